package layerfmt

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"ephemeral-sandbox/fs/tree"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// countingDisk counts reads.
type countingDisk struct {
	io.ReaderAt
	reads int
	bytes int64
}

func (d *countingDisk) ReadAt(p []byte, off int64) (int, error) {
	d.reads++
	d.bytes += int64(len(p))
	return d.ReaderAt.ReadAt(p, off)
}

// TestWriterRefuses lists what a pack cannot hold. Each refusal leaves the
// Writer usable.
func TestWriterRefuses(t *testing.T) {
	nothing := bytes.NewReader(nil)
	withXattrs := func(x ...tree.Xattr) tree.Inode {
		n := attr(9, tree.Fifo)
		n.Xattrs = x
		return n
	}
	big := make([]byte, tree.MaxXattrValue)
	var tooMany []tree.Xattr
	for i := range maxXattrSet / tree.MaxXattrValue {
		tooMany = append(tooMany, tree.Xattr{Name: fmt.Sprintf("user.%02d", i), Value: big})
	}
	tests := []struct {
		name string
		call func(w *Writer) error
		want error
	}{
		{"dirent without a directory", func(w *Writer) error { return w.AddDirent(put(0, "a", 2, tree.File)) }, tree.ErrInvalid},
		{"dirent without an inode", func(w *Writer) error { return w.AddDirent(put(1, "a", 0, tree.File)) }, tree.ErrInvalid},
		{"dirent without a type", func(w *Writer) error { return w.AddDirent(put(1, "a", 2, 0)) }, tree.ErrInvalid},
		{"dirent without a name", func(w *Writer) error { return w.AddDirent(put(1, "", 2, tree.File)) }, tree.ErrInvalid},
		{"name with a slash", func(w *Writer) error { return w.AddDirent(put(1, "a/b", 2, tree.File)) }, tree.ErrInvalid},
		{"name with a NUL", func(w *Writer) error { return w.AddDirent(hide(1, "a\x00")) }, tree.ErrInvalid},
		{"long name", func(w *Writer) error { return w.AddDirent(hide(1, strings.Repeat("n", 256))) }, tree.ErrNameTooLong},
		{"whiteout of an inode", func(w *Writer) error {
			d := put(1, "a", 2, tree.File)
			d.Op = Whiteout
			return w.AddDirent(d)
		}, tree.ErrInvalid},
		{"opaque name", func(w *Writer) error {
			d := hide(1, "a")
			d.Op = Opaque
			return w.AddDirent(d)
		}, tree.ErrInvalid},
		{"unknown operation", func(w *Writer) error {
			d := hide(1, "a")
			d.Op = 9
			return w.AddDirent(d)
		}, tree.ErrInvalid},
		{"inode zero", func(w *Writer) error { return w.AddInode(attr(0, tree.Fifo)) }, tree.ErrInvalid},
		{"inode without a type", func(w *Writer) error { return w.AddInode(attr(2, 0)) }, tree.ErrInvalid},
		{"file type in the mode", func(w *Writer) error {
			n := attr(2, tree.Fifo)
			n.Mode = 0o100644
			return w.AddInode(n)
		}, tree.ErrInvalid},
		{"second of nanoseconds", func(w *Writer) error {
			n := attr(2, tree.Fifo)
			n.Ctime.Nsec = 1_000_000_000
			return w.AddInode(n)
		}, tree.ErrInvalid},
		{"file without its bytes", func(w *Writer) error { return w.AddInode(file(2, 1)) }, tree.ErrInvalid},
		{"bytes of a directory", func(w *Writer) error {
			_, err := w.AddFile(attr(2, tree.Dir), nothing, nil)
			return err
		}, tree.ErrInvalid},
		{"foreign directory", func(w *Writer) error { return w.AddForeign(attr(2, tree.Dir), PackID{}, 0) }, tree.ErrInvalid},
		{"foreign with too much data", func(w *Writer) error {
			n := file(2, 10)
			n.Alloc = 11
			return w.AddForeign(n, PackID{}, 0)
		}, tree.ErrInvalid},
		{"file too large", func(w *Writer) error {
			n := file(2, 0)
			n.Size = tree.MaxFileSize + 1
			_, err := w.AddFile(n, nothing, []tree.Range{})
			return err
		}, tree.ErrTooBig},
		{"file shorter than it says", func(w *Writer) error {
			_, err := w.AddFile(file(2, 10), bytes.NewReader([]byte("short")), nil)
			return err
		}, io.ErrUnexpectedEOF},
		{"large file shorter than it says", func(w *Writer) error {
			_, err := w.AddFile(file(2, chunkSize+2), bytes.NewReader(make([]byte, chunkSize+1)), nil)
			return err
		}, io.ErrUnexpectedEOF},
		{"ranges out of order", func(w *Writer) error {
			_, err := w.AddFile(file(2, 10), nothing, []tree.Range{{Start: 5, End: 6}, {Start: 1, End: 2}})
			return err
		}, tree.ErrInvalid},
		{"range backwards", func(w *Writer) error {
			_, err := w.AddFile(file(2, 10), nothing, []tree.Range{{Start: 5, End: 4}})
			return err
		}, tree.ErrInvalid},
		{"empty link", func(w *Writer) error { return w.AddInode(attr(2, tree.Symlink)) }, tree.ErrInvalid},
		{"long link", func(w *Writer) error {
			n := attr(2, tree.Symlink)
			n.Link = strings.Repeat("l", 4096)
			return w.AddInode(n)
		}, tree.ErrInvalid},
		{"xattr without a name", func(w *Writer) error { return w.AddInode(withXattrs(tree.Xattr{})) }, tree.ErrInvalid},
		{"long xattr name", func(w *Writer) error { return w.AddInode(withXattrs(tree.Xattr{Name: strings.Repeat("x", 256)})) }, tree.ErrInvalid},
		{"long xattr value", func(w *Writer) error {
			return w.AddInode(withXattrs(tree.Xattr{Name: "user.x", Value: append(big, 0)}))
		}, tree.ErrTooBig},
		{"xattrs out of order", func(w *Writer) error {
			return w.AddInode(withXattrs(tree.Xattr{Name: "user.b"}, tree.Xattr{Name: "user.a"}))
		}, tree.ErrInvalid},
		{"xattr twice", func(w *Writer) error {
			return w.AddInode(withXattrs(tree.Xattr{Name: "user.a"}, tree.Xattr{Name: "user.a"}))
		}, tree.ErrInvalid},
		{"xattrs too many", func(w *Writer) error { return w.AddInode(withXattrs(tooMany...)) }, tree.ErrTooBig},
		{"section named like the format's", func(w *Writer) error { return w.SetSection("INOD", nil) }, tree.ErrInvalid},
		{"section without a name", func(w *Writer) error { return w.SetSection("", nil) }, tree.ErrInvalid},
		{"section with a long name", func(w *Writer) error { return w.SetSection(strings.Repeat("s", 33), nil) }, tree.ErrInvalid},
		{"section with an odd name", func(w *Writer) error { return w.SetSection("a/b", nil) }, tree.ErrInvalid},
		{"section too long", func(w *Writer) error { return w.SetSection("a", make([]byte, maxNamedSection+1)) }, tree.ErrTooBig},
		{"one section too many", func(w *Writer) error {
			for i := range maxSections {
				if err := w.SetSection(fmt.Sprintf("s%d", i), nil); err != nil {
					return err
				}
			}
			return nil
		}, tree.ErrTooBig},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pack, info := write(t, WriterOptions{Kind: Base}, func(w *Writer) {
				if err := tt.call(w); !errors.Is(err, tt.want) {
					t.Errorf("got %v, want %v", err, tt.want)
				}
				addFile(t, w, attr(100, tree.File), []byte("still usable"))
			})
			if info.Inodes != 1 || info.Dirents+info.Whiteouts+info.Opaques != 0 {
				t.Errorf("the pack holds what was refused: %+v", info)
			}
			must(t, open(t, pack).Verify(t.Context()))
		})
	}
}

func TestWriterRefusesTwice(t *testing.T) {
	for name, add := range map[string]func(w *Writer) error{
		"dirent": func(w *Writer) error { return w.AddDirent(put(1, "a", 2, tree.Fifo)) },
		"whiteout": func(w *Writer) error {
			return errors.Join(w.AddDirent(hide(1, "b")), w.AddDirent(put(1, "b", 2, tree.Fifo)))
		},
		"inode": func(w *Writer) error { return w.AddInode(attr(2, tree.Fifo)) },
	} {
		w := NewWriter(io.Discard, WriterOptions{})
		must(t, add(w))
		must(t, add(w))
		if _, err := w.Finish(); !errors.Is(err, tree.ErrExist) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := w.Finish(); err == nil {
			t.Errorf("%s: finished after all", name)
		}
	}
}

// fullDisk takes n bytes and no more.
type fullDisk struct{ n int }

var errFull = errors.New("no space left on device")

func (d *fullDisk) Write(p []byte) (int, error) {
	if len(p) > d.n {
		n := d.n
		d.n = 0
		return n, errFull
	}
	d.n -= len(p)
	return len(p), nil
}

// TestFullDisk runs out of space after every so many bytes. The error comes
// out, sticks, and no goroutine stays behind.
func TestFullDisk(t *testing.T) {
	build := func(w *Writer) error {
		for i := range 40 {
			if err := w.AddDirent(put(1, fmt.Sprint(i), tree.Ino(i+2), tree.File)); err != nil {
				return err
			}
			n := file(tree.Ino(i+2), 30_000)
			if _, err := w.AddFile(n, bytes.NewReader(noise(uint64(i), 30_000)), nil); err != nil {
				return err
			}
		}
		_, err := w.Finish()
		return err
	}
	var whole bytes.Buffer
	must(t, build(NewWriter(&whole, WriterOptions{})))
	for n := 0; n < whole.Len(); n += 1 + whole.Len()/50 {
		w := NewWriter(&fullDisk{n}, WriterOptions{Workers: 2})
		if err := build(w); !errors.Is(err, errFull) {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		if _, err := w.Finish(); !errors.Is(err, errFull) {
			t.Fatalf("after %d bytes, again: %v", n, err)
		}
		w.Abort()
	}
}

func TestAbort(t *testing.T) {
	w := NewWriter(io.Discard, WriterOptions{Kind: Base, Workers: 3})
	addFile(t, w, attr(2, tree.File), noise(1, 3*chunkSize))
	addFile(t, w, attr(3, tree.File), noise(1, 100))
	w.Abort()
	w.Abort()
	if err := w.AddDirent(put(1, "a", 2, tree.File)); err == nil {
		t.Error("takes a dirent after Abort")
	}
	if _, err := w.AddFile(file(4, 1), bytes.NewReader([]byte("x")), nil); err == nil {
		t.Error("takes a file after Abort")
	}
	if err := w.SetSection("a", nil); err == nil {
		t.Error("takes a section after Abort")
	}
	if _, err := w.Finish(); err == nil {
		t.Error("finishes after Abort")
	}
	if w := NewWriter(io.Discard, WriterOptions{Kind: 9}); w.AddInode(attr(2, tree.Fifo)) == nil {
		t.Error("writes a pack of an unknown kind")
	}
}

// TestEqualFilesAreStoredOnce and are still two files.
func TestEqualFilesAreStoredOnce(t *testing.T) {
	for _, kind := range []PackKind{Base, Delta} {
		content := noise(7, 50_000)
		pack, info := write(t, WriterOptions{Kind: kind}, func(w *Writer) {
			addFile(t, w, attr(9, tree.File), []byte("first"))
			for i := range 20 {
				addFile(t, w, attr(tree.Ino(i+10), tree.File), content)
			}
			addFile(t, w, attr(8, tree.File), []byte("first"))
		})
		if info.StoredBytes > 60_000 || info.LogicalBytes != 20*50_000+10 {
			t.Errorf("%d bytes stored of %d", info.StoredBytes, info.LogicalBytes)
		}
		must(t, open(t, pack).Verify(t.Context()))
	}
}

// TestSmallFilesShareFrames in a base pack, so that they compress together; in
// a delta each has its own.
func TestSmallFilesShareFrames(t *testing.T) {
	frames := func(kind PackKind) uint64 {
		pack, _ := write(t, WriterOptions{Kind: kind}, func(w *Writer) {
			for i := range 100 {
				addFile(t, w, attr(tree.Ino(i+2), tree.File), noise(uint64(i), 1000))
			}
		})
		return open(t, pack).frames.count
	}
	if n := frames(Base); n != 2 {
		t.Errorf("base: %d frames", n)
	}
	if n := frames(Delta); n != 100 {
		t.Errorf("delta: %d frames", n)
	}
}

// islands is a file of which only the named places may be read.
type islands struct {
	t     *testing.T
	bytes map[uint64][]byte // by offset
}

func (f islands) ReadAt(p []byte, off int64) (int, error) {
	for at, b := range f.bytes {
		if end := at + uint64(len(b)); uint64(off) >= at && uint64(off)+uint64(len(p)) <= end {
			return copy(p, b[uint64(off)-at:]), nil
		}
	}
	f.t.Errorf("%d bytes are read at %d: that is a hole", len(p), off)
	return 0, io.EOF
}

// TestTerabyteOfHole puts a file of almost nothing into a pack and gets it back.
// Anything that went through its holes would be at it for an hour.
func TestTerabyteOfHole(t *testing.T) {
	const size = 1 << 40
	large := noise(2, 2*chunkSize+5)
	for name, src := range map[string]islands{
		"all hole":     {t, nil},
		"small data":   {t, map[uint64][]byte{1 << 20: []byte("one"), size - 4096 - 3: []byte("two")}},
		"larger data":  {t, map[uint64][]byte{0: []byte("at the start"), 1 << 39: large}},
		"to the end":   {t, map[uint64][]byte{size - 5: []byte("ended")}},
		"two of a few": {t, map[uint64][]byte{7 << 30: large[:chunkSize], 8 << 30: large}},
	} {
		t.Run(name, func(t *testing.T) {
			data := []tree.Range{}
			for _, at := range slices.Sorted(maps.Keys(src.bytes)) {
				data = append(data, tree.Range{Start: at, End: at + uint64(len(src.bytes[at]))})
			}
			n := attr(2, tree.File)
			n.Size = size
			var hash tree.Hash
			pack, info := write(t, WriterOptions{}, func(w *Writer) {
				var err error
				hash, err = w.AddFile(n, src, data)
				must(t, err)
			})
			if info.LogicalBytes != size {
				t.Errorf("%d bytes by the pack", info.LogicalBytes)
			}
			r := open(t, pack)
			must(t, r.Verify(t.Context()))
			got, _, err := r.Inode(2)
			must(t, err)
			if want, err := tree.HashContent(t.Context(), src, size, data); err != nil || hash != want || got.Hash != want {
				t.Errorf("hash %x by the writer, %x by the reader, want %x, %v", hash, got.Hash, want, err)
			}
			f, err := r.File(got)
			must(t, err)
			off := uint64(0)
			for _, want := range data {
				got, more := f.Data(off)
				if !more || got != want {
					t.Fatalf("data after %d: %v, %v; want %v", off, got, more, want)
				}
				b := make([]byte, want.End-want.Start)
				if _, err := f.ReadAt(b, int64(want.Start)); err != nil || !bytes.Equal(b, src.bytes[want.Start]) {
					t.Errorf("wrong bytes at %d, %v", want.Start, err)
				}
				off = want.End
			}
			if got, more := f.Data(off); more {
				t.Errorf("data after the last: %v", got)
			}
			if again, err := tree.HashContent(t.Context(), f, size, data); err != nil || again != hash {
				t.Errorf("hash of what comes back: %x, %v; want %x", again, err, hash)
			}
		})
	}
}

// TestDataBeyondTheEnd is cut off: a file may have been cut short since its
// ranges were listed.
func TestDataBeyondTheEnd(t *testing.T) {
	src := islands{t, map[uint64][]byte{2: []byte("234"), 8: []byte("89")}}
	pack, _ := write(t, WriterOptions{}, func(w *Writer) {
		_, err := w.AddFile(file(2, 10), src, []tree.Range{{Start: 2, End: 5}, {Start: 8, End: 12}, {Start: 12, End: 13}})
		must(t, err)
	})
	r := open(t, pack)
	must(t, r.Verify(t.Context()))
	n, _, err := r.Inode(2)
	must(t, err)
	if n.Alloc != 5 {
		t.Errorf("%d bytes of data", n.Alloc)
	}
}

func TestVarints(t *testing.T) {
	for _, v := range []uint64{0, 1, 127, 128, 300, 1 << 35, math.MaxUint64} {
		b := appendUV(v)
		if len(b) != uvLen(v) {
			t.Errorf("%d: %d bytes, uvLen says %d", v, len(b), uvLen(v))
		}
		if c := (cursor{b: b}); c.uv() != v || !c.done() {
			t.Errorf("%d does not come back", v)
		}
		if c := (cursor{b: b[:len(b)-1]}); c.uv() != 0 || !c.bad {
			t.Errorf("%d is read from too few bytes", v)
		}
	}
	for _, v := range []int64{0, 1, -1, math.MaxInt64, math.MinInt64} {
		if c := (cursor{b: appendSV(nil, v)}); c.sv() != v || !c.done() {
			t.Errorf("%d does not come back", v)
		}
	}
	for _, long := range [][]byte{{0x80, 0}, {0xff, 0x80, 0}, bytes.Repeat([]byte{0x80}, 11), append(bytes.Repeat([]byte{0xff}, 9), 2)} {
		if c := (cursor{b: long}); c.uv() != 0 || !c.bad {
			t.Errorf("%x is taken for a number", long)
		}
	}
}

func TestPackIDText(t *testing.T) {
	id := PackID{0: 0xab, 31: 1}
	got, err := ParsePackID(id.String())
	if err != nil || got != id {
		t.Errorf("%s: %s, %v", id, got, err)
	}
	for _, bad := range []string{"", "ab", id.String() + "0", strings.Repeat("g", 64)} {
		if _, err := ParsePackID(bad); err == nil {
			t.Errorf("%q is taken for an id", bad)
		}
	}
}
