package overlay_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// bench is an overlay for one test, over a small lower tree:
//
//	/f   file 2, "lower\n"
//	/d   directory 3
//	/d/g file 4, three pages of 'g'
type bench struct {
	*overlay.FS
	t   *testing.T
	o   overlay.Options
	low *lower
	ino atomic.Uint64
}

func smallLower() *lower {
	m := &model{root: newDir(tree.RootIno)}
	c := overlay.Caller{}
	f, _ := m.add(c, m.root, "f", tree.File, 0o644)
	f.Ino, f.data = 2, []byte("lower\n")
	d, _ := m.add(c, m.root, "d", tree.Dir, 0o755)
	d.Ino = 3
	g, _ := m.add(c, d, "g", tree.File, 0o644)
	g.Ino, g.data = 4, bytes.Repeat([]byte{'g'}, 3*4096)
	return m.freeze(1)
}

func newBench(t *testing.T, set func(o *overlay.Options)) *bench {
	t.Helper()
	b := &bench{t: t, low: smallLower()}
	b.ino.Store(100)
	b.o = overlay.Options{Dir: t.TempDir(), Lower: b.low, NewIno: func() (tree.Ino, error) { return tree.Ino(b.ino.Add(1)), nil }}
	if set != nil {
		set(&b.o)
	}
	b.reopen()
	t.Cleanup(func() { _ = b.Close() })
	return b
}

func (b *bench) reopen() {
	b.t.Helper()
	if b.FS != nil {
		b.must(b.Close())
	}
	f, err := overlay.Open(b.o)
	b.must(err)
	b.FS = f
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) want(err, want error) {
	b.t.Helper()
	if !errors.Is(err, want) {
		b.t.Fatalf("answer is %v, want %v", err, want)
	}
}

func (b *bench) create(c overlay.Caller, dir tree.Ino, name, data string) tree.Ino {
	b.t.Helper()
	a, err := b.Create(c, dir, name, 0o644)
	b.must(err)
	b.write(c, a.Ino, data, 0)
	return a.Ino
}

func (b *bench) write(c overlay.Caller, ino tree.Ino, data string, off uint64) {
	b.t.Helper()
	n, err := b.WriteAt(c, ino, []byte(data), off)
	b.must(err)
	if n != len(data) {
		b.t.Fatalf("wrote %d of %d bytes", n, len(data))
	}
}

func (b *bench) read(ino tree.Ino) string {
	b.t.Helper()
	f, err := b.Data(ino)
	b.must(err)
	data, err := io.ReadAll(io.NewSectionReader(f, 0, int64(f.Size())))
	b.must(err)
	return string(data)
}

func (b *bench) lookup(dir tree.Ino, name string) tree.Attr {
	b.t.Helper()
	a, err := b.Lookup(dir, name)
	b.must(err)
	return a
}

func (b *bench) list(dir tree.Ino) (names []string) {
	b.t.Helper()
	b.must(b.ReadDir(dir, 0, func(d tree.Dirent, _ uint64) bool { names = append(names, d.Name); return true }))
	return names
}

func (b *bench) changed(ino tree.Ino) overlay.InodeChange {
	b.t.Helper()
	d, err := b.Delta()
	b.must(err)
	for _, c := range d.Inodes {
		if c.Ino == ino {
			return c
		}
	}
	b.t.Fatalf("inode %d is not in the delta", ino)
	return overlay.InodeChange{}
}

var root = tree.RootIno

func op(n tree.Op) overlay.Caller { return overlay.Caller{Op: n} }

// bigLower is a lower tree with one file of a gibibyte of 'x' that counts what
// is read of it.
type bigLower struct {
	*lower
	read atomic.Int64
}

const gib = 1 << 30

func (l *bigLower) Open(ino tree.Ino) (overlay.File, error) {
	if ino == 2 {
		return bigFile{l}, nil
	}
	return l.lower.Open(ino)
}

type bigFile struct{ l *bigLower }

func (bigFile) Size() uint64 { return gib }

func (f bigFile) ReadAt(p []byte, _ int64) (int, error) {
	f.l.read.Add(int64(len(p)))
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

func (bigFile) Data(off uint64) (tree.Range, bool) {
	return tree.Range{Start: off, End: gib}, off < gib
}

// TestSubFileCopyUp writes 4 KiB into a lower file of 1 GiB: at most a page is
// copied, and the file system is charged for what is private.
func TestSubFileCopyUp(t *testing.T) {
	for _, tt := range []struct {
		off  uint64
		read int64
	}{{0, 0}, {512 << 20, 0}, {100<<20 + 7, 4096}, {gib - 4096, 0}} {
		low := &bigLower{lower: smallLower()}
		in := low.inodes[2]
		in.Size, in.Alloc, in.Hash = gib, gib, tree.Hash{1}
		low.inodes[2] = in
		b := newBench(t, func(o *overlay.Options) { o.Lower = low })
		b.write(op(1), 2, strings.Repeat("y", 4096), tt.off)
		if got := low.read.Load(); got != tt.read {
			t.Errorf("write at %d read %d lower bytes, want %d", tt.off, got, tt.read)
		}
		if use := b.Usage(); use.Bytes != uint64(4096+tt.read) {
			t.Errorf("write at %d keeps %d bytes", tt.off, use.Bytes)
		}
		a, err := b.Attr(2)
		b.must(err)
		if a.Size != gib || a.Alloc != gib {
			t.Errorf("size %d, allocation %d", a.Size, a.Alloc)
		}
		var st unix.Stat_t
		b.must(unix.Stat(filepath.Join(b.o.Dir, "data", "2.1"), &st))
		if st.Blocks*512 > 64<<10 {
			t.Errorf("data file takes %d bytes", st.Blocks*512)
		}
		p := make([]byte, 4098)
		if _, err := b.ReadAt(2, p, max(tt.off, 1)-1); err != nil || !bytes.Contains(p, bytes.Repeat([]byte("y"), 4096)) {
			t.Errorf("read back at %d: %v", tt.off, err)
		}
		zero := uint64(0)
		a, err = b.SetAttr(op(1), 2, overlay.SetAttr{Size: &zero})
		b.must(err)
		if a.Alloc != 0 || b.Usage().Bytes != 0 {
			t.Errorf("after truncation: %+v, %+v", a, b.Usage())
		}
	}
}

// TestTruncateShowsZeros cuts a lower file and lets it grow again.
func TestTruncateShowsZeros(t *testing.T) {
	b := newBench(t, nil)
	for _, size := range []uint64{5000, 9000} {
		_, err := b.SetAttr(op(1), 4, overlay.SetAttr{Size: &size})
		b.must(err)
	}
	b.reopen()
	if got, want := b.read(4), strings.Repeat("g", 5000)+strings.Repeat("\x00", 4000); got != want {
		t.Fatal("bytes that were cut off came back")
	}
	b.write(op(1), 4, "!", 5002)
	if got, want := b.read(4), strings.Repeat("g", 5000)+"\x00\x00!"+strings.Repeat("\x00", 3997); got != want {
		t.Fatal("filling a page brought bytes back that were cut off")
	}
}

// TestLineage follows what replaced what, also after a restart.
func TestLineage(t *testing.T) {
	rename := func(b *bench, from, to string) { b.must(b.Rename(op(1), root, from, root, to, 0)) }
	for _, tt := range []struct {
		name string
		do   func(b *bench) tree.Ino
		want tree.Ino // lineage
		last bool     // prior is another file of the session
	}{
		{"rename over", func(b *bench) tree.Ino {
			n := b.create(op(1), root, "tmp", "x")
			rename(b, "tmp", "f")
			return n
		}, 2, false},
		{"rename over twice", func(b *bench) tree.Ino {
			b.create(op(1), root, "tmp", "x")
			rename(b, "tmp", "f")
			n := b.create(op(2), root, "tmp", "y")
			rename(b, "tmp", "f")
			return n
		}, 2, true},
		{"remove and make", func(b *bench) tree.Ino {
			b.must(b.Unlink(op(1), root, "f"))
			return b.create(op(1), root, "f", "x")
		}, 2, false},
		{"remove and make, twice", func(b *bench) tree.Ino {
			b.must(b.Unlink(op(1), root, "f"))
			b.create(op(1), root, "f", "x")
			b.reopen()
			b.must(b.Unlink(op(1), root, "f"))
			return b.create(op(1), root, "f", "x")
		}, 2, false},
		{"backup, make, remove backup", func(b *bench) tree.Ino {
			rename(b, "f", "f~")
			n := b.create(op(1), root, "f", "x")
			b.must(b.Unlink(op(1), root, "f~"))
			return n
		}, 2, false},
		{"removed under a name it had moved to", func(b *bench) tree.Ino {
			rename(b, "f", "h")
			b.must(b.Unlink(op(1), root, "h"))
			return b.create(op(1), root, "h", "x")
		}, 2, false},
		{"lower file over lower file", func(b *bench) tree.Ino {
			b.must(b.Rename(op(1), 3, "g", root, "f", 0))
			return 4
		}, 2, false},
		{"new file over new file", func(b *bench) tree.Ino {
			b.create(op(1), root, "x", "x")
			n := b.create(op(1), root, "y", "x")
			rename(b, "y", "x")
			return n
		}, 0, true},
		{"the name is free", func(b *bench) tree.Ino { return b.create(op(1), root, "x", "x") }, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, nil)
			n := tt.do(b)
			for range 2 {
				c := b.changed(n)
				if c.Lineage != tt.want || tt.last != (c.Prior > 100) {
					t.Fatalf("lineage %d, prior %d; want %d", c.Lineage, c.Prior, tt.want)
				}
				b.reopen()
			}
		})
	}
}

// TestSettle tells whose content was overwritten, across a restart.
func TestSettle(t *testing.T) {
	var told []string
	b := newBench(t, func(o *overlay.Options) {
		o.Hooks.Settle = func(ino tree.Ino, by tree.Op, c overlay.File) {
			p, _ := io.ReadAll(io.NewSectionReader(c, 0, int64(c.Size())))
			told = append(told, fmt.Sprintf("%d by %d: %s", ino, by, p))
		}
	})
	b.write(op(1), 2, "one", 0)
	b.write(op(1), 2, "1", 0)
	b.reopen()
	b.write(op(2), 2, "2", 0)
	b.create(op(3), root, "t", "three")
	b.must(b.Rename(op(3), root, "t", root, "f", 0))
	b.must(b.Unlink(op(4), root, "f"))
	want := []string{"2 by 1: 1neer\n", "2 by 2: 2neer\n", "101 by 3: three"}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Fatalf("settled (-want +got):\n%s", diff)
	}
}

func TestQuota(t *testing.T) {
	b := newBench(t, func(o *overlay.Options) { o.Quota = overlay.Quota{Bytes: 10000, Inodes: 3} })
	n := b.create(op(1), root, "a", strings.Repeat("a", 9000))
	_, err := b.WriteAt(op(1), n, make([]byte, 2000), 9000)
	b.want(err, tree.ErrQuota)
	b.write(op(1), n, strings.Repeat("b", 9000), 0) // in place costs nothing
	_, err = b.WriteAt(op(1), 4, []byte("x"), 1)
	b.want(err, tree.ErrQuota)
	b.want(b.Fallocate(op(1), n, 0, 0, 20000), tree.ErrQuota)
	b.want(b.SetXattr(op(1), 4, "user.x", make([]byte, 3000), 0), tree.ErrQuota)
	_, err = b.Symlink(op(1), root, "l", strings.Repeat("l", 2000))
	b.want(err, tree.ErrQuota)
	for _, name := range []string{"b", "c"} {
		_, err = b.Mkdir(op(1), root, name, 0o755)
		b.must(err)
	}
	_, err = b.Create(op(1), root, "e", 0o644)
	b.want(err, tree.ErrQuota)
	s, err := b.StatFS()
	b.must(err)
	if s.Bytes != 10000 || s.BytesFree != 1000 || s.Inodes != 3 || s.InodesFree != 0 || s.NameMax != 255 {
		t.Fatalf("statfs: %+v", s)
	}
	b.must(b.Unlink(op(1), 3, "g")) // removing always works
	b.must(b.Unlink(op(1), root, "a"))
	b.must(b.Rmdir(op(1), root, "b"))
	if use := b.Usage(); use != (overlay.Usage{Inodes: 1}) {
		t.Fatalf("usage is %+v", use)
	}
	b.reopen()
	if use := b.Usage(); use != (overlay.Usage{Inodes: 1}) {
		t.Fatalf("usage after a restart is %+v", use)
	}
}

func TestLimits(t *testing.T) {
	b := newBench(t, nil)
	long := strings.Repeat("n", 255)
	n := b.create(op(1), root, long, "x")
	for _, tt := range []struct {
		name string
		want error
	}{{long + "n", tree.ErrNameTooLong}, {"", tree.ErrInvalid}, {".", tree.ErrInvalid}, {"..", tree.ErrInvalid}, {"a/b", tree.ErrInvalid}} {
		_, err := b.Create(op(1), root, tt.name, 0o644)
		b.want(err, tt.want)
		b.want(b.Rename(op(1), root, long, root, tt.name, 0), tt.want)
	}
	_, err := b.Lookup(root, long+"n")
	b.want(err, tree.ErrNameTooLong)
	target := strings.Repeat("t", 4095)
	a, err := b.Symlink(op(1), root, "l", target)
	b.must(err)
	_, err = b.Symlink(op(1), root, "l2", target+"t")
	b.want(err, tree.ErrNameTooLong)
	_, err = b.Symlink(op(1), root, "l2", "")
	b.want(err, tree.ErrNotExist)
	b.reopen()
	if got, err := b.Readlink(a.Ino); got != target || err != nil {
		t.Fatalf("target of %d bytes, %v", len(got), err)
	}
	_, err = b.Readlink(n)
	b.want(err, tree.ErrInvalid)

	name := "user." + strings.Repeat("x", 250)
	b.must(b.SetXattr(op(1), n, name, make([]byte, 64<<10), 0))
	b.want(b.SetXattr(op(1), n, name+"x", nil, 0), tree.ErrRange)
	b.want(b.SetXattr(op(1), n, name, make([]byte, 64<<10+1), 0), tree.ErrRange)
	b.want(b.SetXattr(op(1), n, "", nil, 0), tree.ErrRange)
	b.want(b.SetXattr(op(1), n, name, nil, 3), tree.ErrInvalid)
	for i := 0; ; i++ {
		if err = b.SetXattr(op(1), n, fmt.Sprintf("user.%d", i), make([]byte, 64<<10), 0); err != nil {
			break
		}
	}
	b.want(err, tree.ErrNoSpace)

	_, err = b.WriteAt(op(1), n, []byte("x"), tree.MaxFileSize)
	b.want(err, tree.ErrTooBig)
	huge := uint64(tree.MaxFileSize + 1)
	_, err = b.SetAttr(op(1), n, overlay.SetAttr{Size: &huge})
	b.want(err, tree.ErrTooBig)
	b.want(b.Fallocate(op(1), n, 0, 1, tree.MaxFileSize), tree.ErrTooBig)
	b.want(b.Fallocate(op(1), n, 0, 0, 0), tree.ErrInvalid)
	for _, mode := range []uint32{0x02, 0x08, 0x20, 0x40} { // a hole that may grow, collapse, insert, unshare
		b.want(b.Fallocate(op(1), n, mode, 0, 4096), tree.ErrNotSup)
	}
	_, err = b.ReadAt(3, make([]byte, 1), 0)
	b.want(err, tree.ErrIsDir)
	_, err = b.WriteAt(op(1), a.Ino, []byte("x"), 0)
	b.want(err, tree.ErrInvalid)
	_, err = b.Attr(9999)
	b.want(err, tree.ErrStale)
	_, err = b.Mknod(op(1), root, "k", tree.Dir, 0o644, 0)
	b.want(err, tree.ErrInvalid)
}

// TestOneInode keeps number, names and content of a file together through a
// copy-up that any of its names may cause.
func TestOneInode(t *testing.T) {
	b := newBench(t, nil)
	_, err := b.Link(op(1), 4, root, "h")
	b.must(err)
	b.write(op(1), b.lookup(root, "h").Ino, "H", 0)
	b.must(b.Rename(op(1), 3, "g", root, "h", 0)) // two names of one inode stay
	for _, k := range []overlay.Key{{Dir: root, Name: "h"}, {Dir: 3, Name: "g"}} {
		if a := b.lookup(k.Dir, k.Name); a.Ino != 4 || a.Nlink != 2 {
			t.Fatalf("%+v is %+v", k, a)
		}
	}
	b.must(b.Unlink(op(1), 3, "g"))
	if a := b.lookup(root, "h"); a.Nlink != 1 || b.read(4)[:2] != "Hg" {
		t.Fatalf("left: %+v", a)
	}
}

// TestRemovedDirectory takes no new names, and one of its name made later is
// empty whatever the lower one held.
func TestRemovedDirectory(t *testing.T) {
	b := newBench(t, nil)
	b.want(b.Rmdir(op(1), root, "d"), tree.ErrNotEmpty)
	b.must(b.Unlink(op(1), 3, "g"))
	b.must(b.Rmdir(op(1), root, "d"))
	_, err := b.Create(op(1), 3, "x", 0o644)
	b.want(err, tree.ErrNotExist)
	_, err = b.Parent(3)
	b.want(err, tree.ErrNotExist)
	if a, err := b.Attr(3); err != nil || a.Nlink != 0 {
		t.Fatalf("removed directory: %+v, %v", a, err)
	}
	a, err := b.Mkdir(op(1), root, "d", 0o755)
	b.must(err)
	if names := b.list(a.Ino); a.Ino == 3 || names != nil {
		t.Fatalf("new directory %d holds %q", a.Ino, names)
	}
	if p, err := b.Parent(a.Ino); p != root || err != nil {
		t.Fatalf("parent is %d, %v", p, err)
	}
}

// TestOrphans keeps unlinked files that are open, through a restart if asked.
func TestOrphans(t *testing.T) {
	for _, keep := range []bool{false, true} {
		b := newBench(t, func(o *overlay.Options) { o.KeepOrphans = keep })
		n := b.create(op(1), root, "x", "mine")
		for _, ino := range []tree.Ino{n, 2, 4} {
			b.must(b.Acquire(ino))
		}
		b.write(op(1), 2, "L", 0)
		b.must(b.Unlink(op(1), root, "x"))
		b.must(b.Unlink(op(1), root, "f"))
		b.must(b.Unlink(op(1), 3, "g"))
		content := func() {
			t.Helper()
			if b.read(n) != "mine" || b.read(2) != "Lower\n" || b.read(4) != strings.Repeat("g", 3*4096) {
				t.Fatal("an open file lost its content with its name")
			}
		}
		content()
		_, err := b.Link(op(1), n, root, "again")
		b.want(err, tree.ErrNotExist)
		b.reopen()
		if keep {
			content()
			b.must(b.Acquire(n))
			b.Release(n)
			b.Release(n) // opens of the earlier server are not counted
			content()
			continue
		}
		_, err = b.Attr(n)
		b.want(err, tree.ErrStale)
		b.must(b.SyncAll())
		if left := b.dataFiles(); len(left) != 0 {
			t.Fatalf("data files of unlinked inodes are left: %v", left)
		}
	}
}

// TestLastClose removes all of an unlinked file when nobody has it open.
func TestLastClose(t *testing.T) {
	b := newBench(t, nil)
	n := b.create(op(1), root, "x", "mine")
	b.write(op(1), 2, "L", 0)
	for _, ino := range []tree.Ino{n, 2, n} {
		b.must(b.Acquire(ino))
	}
	b.must(b.Unlink(op(1), root, "x"))
	b.must(b.Unlink(op(1), root, "f"))
	b.Release(n)
	if b.read(n) != "mine" {
		t.Fatal("gone while open")
	}
	b.Release(n)
	b.Release(2)
	_, err := b.Attr(n)
	b.want(err, tree.ErrStale)
	b.want(b.Acquire(2), tree.ErrStale)
	b.must(b.SyncAll())
	left := b.dataFiles()
	if use := b.Usage(); len(left) != 0 || use != (overlay.Usage{}) {
		t.Fatalf("left of closed files: %v, %+v", left, use)
	}
}

// TestCookies lists a directory of 100,000 names while it changes.
func TestCookies(t *testing.T) {
	const count = 100_000
	m := &model{root: newDir(tree.RootIno)}
	for i := range count {
		n, _ := m.add(overlay.Caller{}, m.root, fmt.Sprintf("%06d", i), tree.Symlink, 0o777)
		n.Ino = tree.Ino(1000 + i)
	}
	low := m.freeze(1)
	sorted := &sortedLower{lower: low}
	b := newBench(t, func(o *overlay.Options) { o.Lower = sorted })
	b.ino.Store(1 << 20)
	seen, made := map[string]int{}, 0
	var cookie uint64
	for {
		var batch []tree.Dirent
		b.must(b.ReadDir(root, cookie, func(d tree.Dirent, next uint64) bool {
			if len(batch) == 5000 {
				return false
			}
			if int64(next) <= 0 {
				t.Fatalf("cookie %#x is not a positive loff_t", next)
			}
			batch, cookie = append(batch, d), next
			return true
		}))
		if len(batch) == 0 {
			break
		}
		for i, d := range batch {
			seen[d.Name]++
			if i%50 == 0 {
				b.must(b.Unlink(op(1), root, d.Name))
			}
		}
		_, err := b.Create(op(1), root, fmt.Sprintf("new%d", made), 0o644)
		b.must(err)
		made++
	}
	if len(seen) != count {
		t.Fatalf("saw %d names of %d", len(seen), count)
	}
	for name, n := range seen {
		if n != 1 || strings.HasPrefix(name, "new") {
			t.Fatalf("saw %q %d times", name, n)
		}
	}
	if got := len(b.list(root)); got != count-count/50+made {
		t.Fatalf("afterwards %d names", got)
	}
}

// sortedLower lists its root without sorting it again.
type sortedLower struct {
	*lower
	names []string
}

func (l *sortedLower) ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error {
	if l.names == nil {
		for name := range l.lower.names[dir] {
			l.names = append(l.names, name)
		}
		slices.Sort(l.names)
	}
	i, _ := slices.BinarySearch(l.names, from)
	for ; i < len(l.names) && fn(l.lower.names[dir][l.names[i]]); i++ {
	}
	return nil
}

// TestManyListings has more readers than listings are kept for.
func TestManyListings(t *testing.T) {
	b := newBench(t, nil)
	const dirs = 400
	type reader struct {
		dir    tree.Ino
		cookie uint64
		names  []string
	}
	readers := make([]*reader, dirs)
	for i := range readers {
		a, err := b.Mkdir(op(1), root, fmt.Sprintf("d%03d", i), 0o755)
		b.must(err)
		readers[i] = &reader{dir: a.Ino}
		for _, name := range []string{"a", "b", "c", "d"} {
			_, err := b.Create(op(1), a.Ino, name, 0o644)
			b.must(err)
		}
	}
	for range 4 {
		for _, r := range readers {
			n := 0
			b.must(b.ReadDir(r.dir, r.cookie, func(d tree.Dirent, next uint64) bool {
				if n++; n > 1 {
					return false
				}
				r.names, r.cookie = append(r.names, d.Name), next
				return true
			}))
			// What was listed goes, as rm -r does it.
			b.must(b.Unlink(op(1), r.dir, r.names[len(r.names)-1]))
		}
	}
	for i, r := range readers {
		if !slices.Equal(r.names, []string{"a", "b", "c", "d"}) {
			t.Fatalf("reader %d saw %q", i, r.names)
		}
	}
}

// TestFreeze holds mutations off and lets reads through.
func TestFreeze(t *testing.T) {
	b := newBench(t, nil)
	b.Freeze()
	begun, done := make(chan struct{}), make(chan error, 1)
	go func() {
		close(begun)
		_, err := b.WriteAt(op(1), 2, []byte("L"), 0)
		done <- err
	}()
	<-begun
	if b.read(2) != "lower\n" || len(b.list(root)) != 2 {
		t.Fatal("the frozen tree changed")
	}
	if d, err := b.Delta(); err != nil || len(d.Inodes) != 0 {
		t.Fatalf("delta of the frozen tree: %+v, %v", d, err)
	}
	select {
	case err := <-done:
		t.Fatalf("a write went through a freeze: %v", err)
	default:
	}
	b.Thaw()
	b.must(<-done)
	if b.read(2) != "Lower\n" {
		t.Fatal("the write was lost")
	}
}

// TestDone remembers requests across a restart.
func TestDone(t *testing.T) {
	b := newBench(t, nil)
	a, err := b.Mkdir(overlay.Caller{Request: 42}, root, "x", 0o755)
	b.must(err)
	_, err = b.Mkdir(overlay.Caller{Request: 43}, root, "x", 0o755)
	b.want(err, tree.ErrExist)
	b.reopen()
	if ino, ok := b.Done(42); ino != a.Ino || !ok {
		t.Fatalf("request 42: %d, %v", ino, ok)
	}
	if _, ok := b.Done(43); ok {
		t.Fatal("a request that failed is said to be done")
	}
}

// TestRebaseEdit refreshes a session onto a head that changed the same files.
func TestRebaseEdit(t *testing.T) {
	b := newBench(t, func(o *overlay.Options) { o.Clock = func() time.Time { return time.Unix(50, 0) } })
	mode := uint32(0o600)
	b.write(op(1), 4, "S", 4097) // keeps showing lower bytes around it
	_, err := b.SetAttr(op(1), 2, overlay.SetAttr{Mode: &mode})
	b.must(err)
	mine := b.create(op(1), root, "mine", "mine")
	gone := b.create(op(1), root, "gone", "gone")
	b.must(b.Acquire(gone))
	b.must(b.Unlink(op(1), root, "gone"))

	// The head: f has other bytes, d/g has other bytes, d has a new subdirectory.
	m := &model{root: newDir(tree.RootIno)}
	f, _ := m.add(op(0), m.root, "f", tree.File, 0o644)
	f.Ino, f.data = 2, []byte("the head's\n")
	d, _ := m.add(op(0), m.root, "d", tree.Dir, 0o755)
	d.Ino = 3
	g, _ := m.add(op(0), d, "g", tree.File, 0o644)
	g.Ino, g.data = 4, []byte("head")
	sub, _ := m.add(op(0), d, "sub", tree.Dir, 0o755)
	sub.Ino = 60
	head := m.freeze(2)

	edit := overlay.Edit{
		Op: 9,
		Files: []overlay.FileEdit{
			{Ino: mine, Content: []byte("merged\n"), Op: 9, Lineage: 2},
			{Ino: 70, Content: []byte("beside\n"), Op: 9, Attr: &tree.Inode{Attr: tree.Attr{Kind: tree.File, Mode: 0o640}}},
		},
		NewInodes: []overlay.NewInode{{Inode: tree.Inode{Attr: tree.Attr{Ino: 71, Kind: tree.Symlink, Size: 1}, Link: "x"}, Op: 9}},
		Dirents: []tree.Dirent{
			{Dir: root, Name: "f.head", Ino: 70, Kind: tree.File},
			{Dir: 3, Name: "link", Ino: 71, Kind: tree.Symlink},
			{Dir: 3, Name: "again", Ino: 70, Kind: tree.File},
		},
	}
	b.Freeze()
	b.must(b.Rebase(head, edit))
	b.Thaw()
	b.o.Lower = head
	b.o.KeepOrphans = true
	for range 2 {
		want := strings.Repeat("g", 4097) + "S" + strings.Repeat("g", 3*4096-4098)
		if got := b.read(4); got != want {
			t.Fatalf("kept content is %d bytes of a mix of two lower files", len(got))
		}
		if a := b.lookup(root, "f"); a.Mode != 0o600 || b.read(2) != "the head's\n" || a.Size != 11 {
			t.Fatalf("kept attributes over new content: %+v", a)
		}
		if b.read(mine) != "merged\n" || b.read(70) != "beside\n" || b.read(gone) != "gone" {
			t.Fatal("content of the edit")
		}
		if a := b.lookup(3, "again"); a.Nlink != 2 || a.Mode != 0o640 {
			t.Fatalf("new file: %+v", a)
		}
		if a := b.lookup(root, "d"); a.Nlink != 3 {
			t.Fatalf("directory with the head's subdirectory: %+v", a)
		}
		if names := b.list(3); !slices.Equal(names, []string{"again", "g", "link", "sub"}) {
			t.Fatalf("directory holds %q", names)
		}
		if c := b.changed(mine); c.Lineage != 2 || c.LastOp != 9 || !c.New {
			t.Fatalf("edited file in the delta: %+v", c)
		}
		b.reopen()
	}
	b.o.Lower = smallLower()
	b.must(b.Close())
	_, err = overlay.Open(b.o)
	b.want(err, tree.ErrInvalid)
}

// TestSync flushes files in every state, and one that another call removes.
func TestSync(t *testing.T) {
	b := newBench(t, nil)
	n := b.create(op(1), root, "x", "x")
	for _, ino := range []tree.Ino{n, 2, 3, root} {
		b.must(b.Sync(ino, true))
	}
	b.must(b.Unlink(op(1), root, "x"))
	b.must(b.Sync(n, false))
	b.write(op(1), 2, "y", 0)
	b.must(b.SyncAll())
}
