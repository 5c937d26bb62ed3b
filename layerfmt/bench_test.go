package layerfmt

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"ephemeral-sandbox/fs/tree"
)

// benchTree writes a base pack of n small files, 40 to a directory.
func benchTree(b *testing.B, n int) []byte {
	b.Helper()
	var out bytes.Buffer
	w := NewWriter(&out, WriterOptions{Kind: Base})
	text := []byte("package x // a line of source\n")
	for i := range n {
		dir, name, ino := benchKey(i)
		if err := w.AddDirent(Dirent{Dirent: tree.Dirent{Dir: dir, Name: name, Ino: ino, Kind: tree.File}}); err != nil {
			b.Fatal(err)
		}
		data := append(bytes.Repeat(text, 20), name...)
		attr := tree.Attr{Ino: ino, Kind: tree.File, Mode: 0o644, Nlink: 1, Size: uint64(len(data)), Mtime: tree.Time{Sec: 1_700_000_000 + int64(i)}}
		attr.Ctime = attr.Mtime
		if _, err := w.AddFile(tree.Inode{Attr: attr}, bytes.NewReader(data), nil); err != nil {
			b.Fatal(err)
		}
	}
	if _, err := w.Finish(); err != nil {
		b.Fatal(err)
	}
	return out.Bytes()
}

func benchKey(i int) (dir tree.Ino, name string, ino tree.Ino) {
	return tree.Ino(1 + i/40), fmt.Sprintf("some_source_file_%02d.go", i%40), tree.Ino(1_000_000 + i)
}

func benchReader(b *testing.B, n int) *Reader {
	b.Helper()
	pack := benchTree(b, n)
	r, err := Open(bytes.NewReader(pack), int64(len(pack)), ReaderOptions{Cache: NewFrameCache(256 << 20)})
	if err != nil {
		b.Fatal(err)
	}
	if err := r.AllDirents(func(Dirent) bool { return true }); err != nil {
		b.Fatal(err)
	}
	if err := r.AllInodes(func(Inode) bool { return true }); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	return r
}

const benchFiles = 100_000

func BenchmarkLookup(b *testing.B) {
	keys := make([]struct {
		dir  tree.Ino
		name string
	}, 1<<14)
	for i := range keys {
		keys[i].dir, keys[i].name, _ = benchKey(rand.IntN(benchFiles))
	}
	r := benchReader(b, benchFiles)
	for i := 0; b.Loop(); i++ {
		k := &keys[i%len(keys)]
		if _, found, err := r.Lookup(k.dir, k.name); !found || err != nil {
			b.Fatal(found, err)
		}
	}
}

func BenchmarkLookupAbsent(b *testing.B) {
	r := benchReader(b, benchFiles)
	for i := 0; b.Loop(); i++ {
		if _, found, err := r.Lookup(tree.Ino(1+i%(benchFiles/40)), "no_such_file.go"); found || err != nil {
			b.Fatal(found, err)
		}
	}
}

func BenchmarkInode(b *testing.B) {
	r := benchReader(b, benchFiles)
	for i := 0; b.Loop(); i++ {
		if _, found, err := r.Inode(tree.Ino(1_000_000 + i*7919%benchFiles)); !found || err != nil {
			b.Fatal(found, err)
		}
	}
}

func BenchmarkDirents(b *testing.B) {
	r := benchReader(b, benchFiles)
	for i := 0; b.Loop(); i++ {
		n := 0
		if err := r.Dirents(tree.Ino(1+i%(benchFiles/40)), "", func(Dirent) bool { n++; return true }); n != 40 || err != nil {
			b.Fatal(n, err)
		}
	}
}

func BenchmarkReadCached4K(b *testing.B) {
	var out bytes.Buffer
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	w := NewWriter(&out, WriterOptions{})
	if _, err := w.AddFile(tree.Inode{Attr: tree.Attr{Ino: 2, Kind: tree.File, Size: uint64(len(data))}}, bytes.NewReader(data), nil); err != nil {
		b.Fatal(err)
	}
	if _, err := w.Finish(); err != nil {
		b.Fatal(err)
	}
	r, err := Open(bytes.NewReader(out.Bytes()), int64(out.Len()), ReaderOptions{Cache: NewFrameCache(64 << 20)})
	if err != nil {
		b.Fatal(err)
	}
	n, _, err := r.Inode(2)
	if err != nil {
		b.Fatal(err)
	}
	f, err := r.File(n)
	if err != nil {
		b.Fatal(err)
	}
	p := make([]byte, 4096)
	b.SetBytes(int64(len(p)))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, err := f.ReadAt(p, int64(i%256*4096)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSmallDelta is the price of writing and opening a layer of one file.
func BenchmarkSmallDelta(b *testing.B) {
	data := bytes.Repeat([]byte("some text\n"), 100)
	cache := NewFrameCache(64 << 20)
	b.ReportAllocs()
	var out bytes.Buffer
	for b.Loop() {
		out.Reset()
		w := NewWriter(&out, WriterOptions{})
		if err := w.AddDirent(Dirent{Dirent: tree.Dirent{Dir: 1, Name: "a", Ino: 2, Kind: tree.File}}); err != nil {
			b.Fatal(err)
		}
		if _, err := w.AddFile(tree.Inode{Attr: tree.Attr{Ino: 2, Kind: tree.File, Size: uint64(len(data))}}, bytes.NewReader(data), nil); err != nil {
			b.Fatal(err)
		}
		if _, err := w.Finish(); err != nil {
			b.Fatal(err)
		}
		if _, err := Open(bytes.NewReader(out.Bytes()), int64(out.Len()), ReaderOptions{Cache: cache}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(out.Len()-len(data)), "overhead-B")
}

func BenchmarkWriteBase(b *testing.B) {
	text := bytes.Repeat([]byte("package x // a line of source\n"), 100)
	for i := range text {
		if i%7 == 0 {
			text[i] = byte(rand.IntN(64) + 32)
		}
	}
	b.SetBytes(int64(1000 * len(text)))
	for b.Loop() {
		w := NewWriter(io.Discard, WriterOptions{Kind: Base})
		for i := range 1000 {
			text[i%len(text)]++
			attr := tree.Attr{Ino: tree.Ino(i + 2), Kind: tree.File, Size: uint64(len(text))}
			if _, err := w.AddFile(tree.Inode{Attr: attr}, bytes.NewReader(text), nil); err != nil {
				b.Fatal(err)
			}
		}
		if _, err := w.Finish(); err != nil {
			b.Fatal(err)
		}
	}
}
