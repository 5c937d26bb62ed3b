package layerfmt

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"ephemeral-sandbox/fs/tree"
)

var update = flag.Bool("update", false, "write the golden packs anew")

// everything puts one of each thing that a pack can hold into w. Golden packs
// depend on it: give a new thing a new golden.
func everything(t failer, w *Writer) {
	t.Helper()
	dirents := []Dirent{
		put(1, "src", 2, tree.Dir),
		put(1, "dev", 3, tree.Dir),
		put(1, ".wh.x", 10, tree.File),
		put(1, "manifest.json", 11, tree.File),
		put(1, "\xff\xfenot utf-8", 12, tree.File),
		put(1, strings.Repeat("n", 255), 13, tree.File),
		put(2, "hard", 10, tree.File),
		put(2, "other name of another pack's inode", 5000, tree.File),
		hide(2, "gone"),
		hide(1, "gone too"),
		opaque(2),
		put(2, "short link", 20, tree.Symlink),
		put(2, "long link", 21, tree.Symlink),
		put(3, "null", 30, tree.Char),
		put(3, "sda", 31, tree.Block),
		put(3, "fifo", 32, tree.Fifo),
		put(3, "socket", 33, tree.Socket),
		put(2, "sparse", 14, tree.File),
		put(2, "all hole", 15, tree.File),
		put(2, "empty", 16, tree.File),
		put(2, "foreign", 17, tree.File),
		put(2, "foreign from", 18, tree.File),
		put(2, "large", 19, tree.File),
	}
	for _, d := range dirents {
		must(t, w.AddDirent(d))
	}

	root := attr(1, tree.Dir)
	root.Mode, root.Nlink, root.Size = 0o1777, 4, 4096
	must(t, w.AddInode(root))
	src := attr(2, tree.Dir)
	src.Mode = 0o2755
	src.Xattrs = []tree.Xattr{
		{Name: "system.posix_acl_default", Value: bytes.Repeat([]byte{1, 0, 7}, 9)},
		{Name: "user.empty"},
		{Name: "user.x", Value: []byte("y")},
	}
	must(t, w.AddInode(src))
	must(t, w.AddInode(attr(3, tree.Dir)))

	hard := attr(10, tree.File)
	hard.Mode, hard.Nlink, hard.UID, hard.GID = 0o4755, 2, 1000, 100
	hard.Xattrs = []tree.Xattr{{Name: "security.capability", Value: bytes.Repeat([]byte{2}, 20)}}
	addFile(t, w, hard, []byte("a file named like a whiteout of another format\n"))
	addFile(t, w, attr(11, tree.File), []byte("{}\n"))
	twin := attr(12, tree.File)
	twin.Mtime = tree.Time{Sec: math.MinInt64, Nsec: maxNsec}
	twin.Ctime = tree.Time{Sec: math.MaxInt64}
	addFile(t, w, twin, []byte("{}\n"))
	addFile(t, w, attr(13, tree.File), noise(1, 700))

	sparse := file(14, 3000)
	content := bytes.Repeat([]byte("data"), 1000)
	h, err := w.AddFile(sparse, bytes.NewReader(content[:3000]), []tree.Range{{Start: 10, End: 20}, {Start: 20, End: 25}, {Start: 900, End: 1000}})
	must(t, err)
	if h == hashOf(content[:3000]) {
		t.Fatal("holes are not in the hash")
	}
	_, err = w.AddFile(file(15, 100_000), bytes.NewReader(nil), []tree.Range{})
	must(t, err)
	addFile(t, w, attr(16, tree.File), nil)
	foreign := file(17, 12345)
	foreign.Hash, foreign.Alloc = tree.Hash{1: 2}, 12345
	must(t, w.AddForeign(foreign, PackID{0: 0xab}, 0))
	foreign.Ino, foreign.Alloc = 18, 77
	must(t, w.AddForeign(foreign, PackID{0: 0xcd}, 17))
	addFile(t, w, attr(19, tree.File), bytes.Repeat([]byte("a larger file, "), 10_000))

	link := attr(20, tree.Symlink)
	link.Link = "../src"
	must(t, w.AddInode(link))
	link.Ino, link.Link = 21, strings.Repeat("long/", 800)
	must(t, w.AddInode(link))
	for i, kind := range []tree.Kind{tree.Char, tree.Block, tree.Fifo, tree.Socket} {
		n := attr(tree.Ino(30+i), kind)
		n.Rdev = 0x0103 + uint32(i)
		must(t, w.AddInode(n))
	}
	// An inode with no name here, as after a chmod.
	far := attr(1<<63+5, tree.Fifo)
	far.Ctime = far.Mtime
	must(t, w.AddInode(far))

	must(t, w.SetSection("attribution", bytes.Repeat([]byte("spans "), 40)))
	must(t, w.SetSection("short", []byte("x")))
	must(t, w.SetSection("none", nil))
}

func everythingPack(t failer, o WriterOptions) []byte {
	t.Helper()
	pack, _ := write(t, o, func(w *Writer) { everything(t, w) })
	return pack
}

// TestGolden holds the bytes of packs fast. A pack of every minor version that
// was ever released must stay readable, and the newest must be written as it
// was: equal calls give equal bytes, for years.
func TestGolden(t *testing.T) {
	for _, kind := range []PackKind{Base, Delta} {
		name := map[PackKind]string{Base: "base", Delta: "delta"}[kind]
		t.Run(name, func(t *testing.T) {
			path := filepath.Join("testdata", "v1.0-"+name)
			pack := everythingPack(t, WriterOptions{Kind: kind})
			if *update {
				text, err := dump(open(t, pack))
				must(t, err)
				must(t, os.WriteFile(path+".lay", pack, 0o644))
				must(t, os.WriteFile(path+".txt", []byte(text), 0o644))
			}
			golden, err := os.ReadFile(path + ".lay")
			must(t, err)
			want, err := os.ReadFile(path + ".txt")
			must(t, err)
			r := open(t, golden)
			must(t, r.Verify(t.Context()))
			got, err := dump(r)
			must(t, err)
			if got != string(want) {
				t.Errorf("the golden pack reads otherwise:\n%s", got)
			}
			if !bytes.Equal(pack, golden) {
				t.Errorf("the pack written now differs from the golden one: %d bytes, %d", len(pack), len(golden))
			}
		})
	}
}

func TestBytesDependOnCallsOnly(t *testing.T) {
	build := func(workers int) []byte {
		pack, _ := write(t, WriterOptions{Kind: Base, Workers: workers}, func(w *Writer) {
			everything(t, w)
			for i := range 60 {
				text := bytes.Repeat(fmt.Appendf(nil, "line of file %d\n", i), 1+i*37%900)
				addFile(t, w, attr(tree.Ino(100+i), tree.File), append(text, noise(uint64(i), i*5000)...))
			}
		})
		return pack
	}
	one := build(1)
	for _, workers := range []int{1, 4} {
		if !bytes.Equal(one, build(workers)) {
			t.Errorf("%d workers write other bytes than one", workers)
		}
	}
	// What is sorted at the end may come in any order.
	ab, _ := write(t, WriterOptions{}, func(w *Writer) {
		must(t, w.AddDirent(put(1, "a", 2, tree.Fifo)))
		must(t, w.AddDirent(put(1, "b", 3, tree.Fifo)))
		must(t, w.AddInode(attr(2, tree.Fifo)))
		must(t, w.AddInode(attr(3, tree.Fifo)))
	})
	ba, _ := write(t, WriterOptions{}, func(w *Writer) {
		must(t, w.AddInode(attr(3, tree.Fifo)))
		must(t, w.AddInode(attr(2, tree.Fifo)))
		must(t, w.AddDirent(put(1, "b", 3, tree.Fifo)))
		must(t, w.AddDirent(put(1, "a", 2, tree.Fifo)))
	})
	if !bytes.Equal(ab, ba) {
		t.Error("the order of dirents and inodes without content shows in the pack")
	}
}

func TestReaderTellsOfItself(t *testing.T) {
	pack := everythingPack(t, WriterOptions{Kind: Base})
	r, err := Open(bytes.NewReader(pack), int64(len(pack)), ReaderOptions{})
	must(t, err)
	if got := r.ID().String()[:16]; r.Name() != got {
		t.Errorf("a layer without a name is called %q, its id begins %q", r.Name(), got)
	}
	if r := open(t, pack); r.Name() != "test" {
		t.Errorf("the layer is called %q", r.Name())
	}
	if major, minor := r.Version(); major != versionMajor || minor != versionMinor {
		t.Errorf("version %d.%d", major, minor)
	}
	if r.Info().Kind != Base || r.Info().StoredBytes != int64(len(pack)) {
		t.Errorf("info %+v", r.Info())
	}
	deps, err := r.Foreign()
	must(t, err)
	if want := []PackID{{0: 0xab}, {0: 0xcd}}; !slices.Equal(deps, want) {
		t.Errorf("foreign packs %v, want %v", deps, want)
	}
}

// TestZstdReadsPacks: a pack is a zstd stream, and what comes out is the bytes
// of its files in the order of their frames.
func TestZstdReadsPacks(t *testing.T) {
	pack := everythingPack(t, WriterOptions{})
	r := open(t, pack)
	var want []byte
	for no := range r.frames.count {
		raw, err := r.frame(no)
		must(t, err)
		want = append(want, raw...)
	}
	dec, err := zstd.NewReader(bytes.NewReader(pack))
	must(t, err)
	defer dec.Close()
	var got bytes.Buffer
	_, err = dec.WriteTo(&got)
	must(t, err)
	if !bytes.Equal(got.Bytes(), want) {
		t.Errorf("the stream has %d bytes, the frames %d", got.Len(), len(want))
	}

	cli, err := exec.LookPath("zstd")
	if errors.Is(err, exec.ErrNotFound) {
		t.Log("no zstd command here; the library above has read the stream")
		return
	}
	must(t, err)
	path := filepath.Join(t.TempDir(), "pack.zst")
	must(t, os.WriteFile(path, pack, 0o644))
	if out, err := exec.Command(cli, "-t", path).CombinedOutput(); err != nil {
		t.Errorf("zstd -t: %v: %s", err, out)
	}
	out, err := exec.Command(cli, "-dc", path).Output()
	if err != nil || !bytes.Equal(out, want) {
		t.Errorf("zstd -dc: %v, %d bytes, want %d", err, len(out), len(want))
	}
}

// TestSmallPackIsSmall holds the promise about a commit of one file.
func TestSmallPackIsSmall(t *testing.T) {
	content := noise(1, 500)
	pack, _ := write(t, WriterOptions{}, func(w *Writer) {
		for i := range tree.Ino(5) { // the directories on the way, touched
			must(t, w.AddDirent(put(i+1, "directory", i+2, tree.Dir)))
			must(t, w.AddInode(attr(i+1, tree.Dir)))
		}
		must(t, w.AddDirent(put(6, "file.go", 7, tree.File)))
		addFile(t, w, attr(7, tree.File), content)
	})
	if over := len(pack) - len(content); over > 1024 {
		t.Errorf("%d bytes beside %d of content", over, len(content))
	}
}
