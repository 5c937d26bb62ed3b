package overlay_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// ranges is content that says its number of data bytes at some ranges and
// nothing elsewhere, and notes the largest piece that was read of it.
type ranges struct {
	size    uint64
	data    []tree.Range
	largest int
	fail    error
}

func (r *ranges) Size() uint64 { return r.size }

func (r *ranges) ReadAt(p []byte, off int64) (int, error) {
	r.largest = max(r.largest, len(p))
	if r.fail != nil && off > 0 {
		return 0, r.fail
	}
	for i := range p {
		p[i] = byte((off + int64(i)) / 4096)
	}
	return len(p), nil
}

func (r *ranges) Data(off uint64) (tree.Range, bool) {
	for _, x := range r.data {
		if off < x.End {
			return tree.Range{Start: max(off, x.Start), End: x.End}, true
		}
	}
	return tree.Range{}, false
}

func (b *bench) dataFiles() (names []string) {
	b.t.Helper()
	entries, err := os.ReadDir(filepath.Join(b.o.Dir, "data"))
	b.must(err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (b *bench) rebase(l overlay.Lower, e overlay.Edit) error {
	b.Freeze()
	defer b.Thaw()
	return b.Rebase(l, e)
}

// TestRebaseLargeSource copies a tebibyte with few bytes in it: by small pieces,
// and holes stay holes.
func TestRebaseLargeSource(t *testing.T) {
	b := newBench(t, nil)
	src := &ranges{size: 1 << 40, data: []tree.Range{
		{Start: 4096, End: 8192}, {Start: 8192, End: 12288}, {Start: 1 << 30, End: 1<<30 + 3<<20}, {Start: 1<<40 - 4096, End: 1 << 40},
	}}
	b.must(b.rebase(b.low, overlay.Edit{Files: []overlay.FileEdit{{Ino: 2, Source: src, Op: 3}}}))
	if src.largest > 1<<20 {
		t.Fatalf("%d bytes were held in memory", src.largest)
	}
	const data = 3*4096 + 3<<20
	for range 2 {
		a, err := b.Attr(2)
		b.must(err)
		if a.Size != src.size || a.Alloc != data || b.Usage().Bytes != data {
			t.Fatalf("size %d, allocation %d, usage %+v", a.Size, a.Alloc, b.Usage())
		}
		var st unix.Stat_t
		b.must(unix.Stat(filepath.Join(b.o.Dir, "data", "2.1"), &st))
		if st.Blocks*512 > data+64<<10 {
			t.Fatalf("data file takes %d bytes", st.Blocks*512)
		}
		for _, off := range []uint64{0, 4096, 8192, 12288, 1<<30 + 1<<20 - 100, 1<<40 - 4096} {
			got, want := make([]byte, 4096), make([]byte, 4096)
			if _, err := b.ReadAt(2, got, off); err != nil {
				t.Fatal(err)
			}
			if x, ok := src.Data(off); ok && x.Start == off {
				_, _ = src.ReadAt(want, int64(off))
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("content at %d differs", off)
			}
		}
		if at, err := b.Seek(2, 12288, overlay.SeekData); at != 1<<30 || err != nil {
			t.Fatalf("data after the first is at %d, %v", at, err)
		}
		b.reopen()
	}
}

// TestRebaseOwnSource exchanges the contents of two changed files, renews one
// from itself and one from a file that was removed, and drops where it copied
// from.
func TestRebaseOwnSource(t *testing.T) {
	b := newBench(t, func(o *overlay.Options) { o.Clock = func() time.Time { return time.Unix(50, 0) } })
	mine := b.create(op(1), root, "mine", "mine")
	b.write(op(1), 2, "L", 0)
	b.write(op(1), 4, "S", 4097)
	gone := b.create(op(1), root, "gone", "gone")
	b.must(b.Acquire(gone))
	b.must(b.Unlink(op(1), root, "gone"))
	g := b.read(4)
	from := func(ino tree.Ino) overlay.File {
		f, err := b.Data(ino)
		b.must(err)
		return f
	}
	attr := func() *tree.Inode { return &tree.Inode{Attr: tree.Attr{Kind: tree.File, Mode: 0o600}} }
	b.must(b.rebase(b.low, overlay.Edit{
		DropInodes: []tree.Ino{4},
		Files: []overlay.FileEdit{
			{Ino: mine, Source: from(2), Op: 2},
			{Ino: 2, Source: from(mine), Op: 2},
			{Ino: 60, Source: from(4), Op: 2, Attr: attr()},
			{Ino: 61, Source: from(gone), Op: 2, Attr: attr()},
		},
		Dirents: []tree.Dirent{{Dir: 3, Name: "g.old", Ino: 60, Kind: tree.File}, {Dir: 3, Name: "back", Ino: 61, Kind: tree.File}},
	}))
	b.must(b.rebase(b.low, overlay.Edit{Files: []overlay.FileEdit{{Ino: mine, Source: from(mine), Op: 5}}}))
	b.Release(gone)
	for range 2 {
		if b.read(mine) != "Lower\n" || b.read(2) != "mine" || b.read(60) != g || b.read(61) != "gone" || b.read(4) != strings.Repeat("g", 3*4096) {
			t.Fatal("content was copied wrongly")
		}
		if c := b.changed(mine); c.LastOp != 5 || b.MaxOp() != 5 {
			t.Fatalf("last writer is %d, highest operation %d", c.LastOp, b.MaxOp())
		}
		b.must(b.SyncAll())
		if files := b.dataFiles(); len(files) != 4 {
			t.Fatalf("data files: %q", files)
		}
		b.reopen()
	}
}

var errFault = errors.New("the disk is on strike")

// faultLower fails its call number at.
type faultLower struct {
	*lower
	calls, at int
}

func (l *faultLower) fault() error {
	l.calls++
	if l.calls == l.at {
		return errFault
	}
	return nil
}

func (l *faultLower) Lookup(dir tree.Ino, name string) (tree.Dirent, error) {
	if err := l.fault(); err != nil {
		return tree.Dirent{}, err
	}
	return l.lower.Lookup(dir, name)
}

func (l *faultLower) Inode(ino tree.Ino) (tree.Inode, error) {
	if err := l.fault(); err != nil {
		return tree.Inode{}, err
	}
	return l.lower.Inode(ino)
}

func (l *faultLower) ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error {
	if err := l.fault(); err != nil {
		return err
	}
	return l.lower.ReadDir(dir, from, fn)
}

func (l *faultLower) Names(ino tree.Ino) ([]tree.Dirent, error) {
	if err := l.fault(); err != nil {
		return nil, err
	}
	return l.lower.Names(ino)
}

// TestRebaseFails lets each step of a Rebase fail that can: nothing has changed
// then, in memory or on disk, and in the end it goes through.
func TestRebaseFails(t *testing.T) {
	b := newBench(t, nil)
	b.write(op(1), 4, "S", 4097)
	mode := uint32(0o600)
	_, err := b.SetAttr(op(1), 2, overlay.SetAttr{Mode: &mode})
	b.must(err)
	mine := b.create(op(1), root, "mine", "mine")
	b.must(b.Rename(op(1), 3, "g", root, "g", 0))
	say := func() string {
		t.Helper()
		all, err := renderFS(b.FS)
		b.must(err)
		d, err := b.Delta()
		b.must(err)
		return fmt.Sprintf("%s\n%+v\n%+v\n%q", all, d, b.Usage(), b.dataFiles())
	}
	before := say()
	head := smallLower()
	head.commit = 2
	head.put(head.inodes[4], []byte("head"))
	head.put(head.inodes[2], []byte("head"))
	big := &ranges{size: 3 << 20, data: []tree.Range{{End: 3 << 20}}}
	edit := func() overlay.Edit {
		own, err := b.Data(4)
		b.must(err)
		return overlay.Edit{
			Op: 9,
			Files: []overlay.FileEdit{
				{Ino: mine, Source: big, Op: 9},
				{Ino: 2, Source: own, Op: 9},
				{Ino: 70, Source: big, Op: 9, Attr: &tree.Inode{Attr: tree.Attr{Kind: tree.File}}},
			},
			Dirents: []tree.Dirent{{Dir: 3, Name: "new", Ino: 70, Kind: tree.File}, {Dir: root, Name: "mine"}},
		}
	}
	unchanged := func(what string) {
		t.Helper()
		for range 2 {
			if diff := cmp.Diff(before, say()); diff != "" {
				t.Fatalf("%s changed (-before +after):\n%s", what, diff)
			}
			b.reopen()
		}
	}
	for name, tt := range map[string]struct {
		spoil func(e *overlay.Edit)
		want  error
	}{
		"source":            {func(e *overlay.Edit) { e.Files[2].Source = &ranges{size: 3 << 20, data: big.data, fail: errFault} }, errFault},
		"short source":      {func(e *overlay.Edit) { e.Files[1].Source = shortFile{big} }, io.ErrUnexpectedEOF},
		"source too large":  {func(e *overlay.Edit) { e.Files[1].Source = &ranges{size: tree.MaxFileSize + 1} }, tree.ErrTooBig},
		"two contents":      {func(e *overlay.Edit) { e.Files[1].Content = []byte("x") }, tree.ErrInvalid},
		"one inode twice":   {func(e *overlay.Edit) { e.Files[1].Ino = mine }, tree.ErrInvalid},
		"no attributes":     {func(e *overlay.Edit) { e.Files[2].Attr = nil }, tree.ErrInvalid},
		"name not possible": {func(e *overlay.Edit) { e.Dirents[0].Name = "a/b" }, tree.ErrInvalid},
	} {
		e := edit()
		tt.spoil(&e)
		b.want(b.rebase(head, e), tt.want)
		unchanged(name)
	}
	steps := 0
	for {
		steps++
		low := &faultLower{lower: head, at: steps}
		err := b.rebase(low, edit())
		if low.calls < steps {
			b.must(err)
			break
		}
		b.want(err, errFault)
		unchanged(fmt.Sprintf("failing call %d", steps))
	}
	if steps < 10 {
		t.Fatalf("only %d steps could fail", steps)
	}
	b.o.Lower = head
	b.reopen()
	a, err := b.Attr(70)
	b.must(err)
	if want := strings.Repeat("g", 4097) + "S" + strings.Repeat("g", 3*4096-4098); b.read(4) != want || b.read(2) != want || a.Size != 3<<20 {
		t.Fatal("what went through in the end is not what was asked")
	}
}

// shortFile has fewer bytes than it says.
type shortFile struct{ *ranges }

func (shortFile) ReadAt(p []byte, _ int64) (int, error) { return len(p) / 2, io.EOF }

// TestRebaseLeavesData has a data file in the way that cannot be removed. That
// is no error, and the next Open is rid of it.
func TestRebaseLeavesData(t *testing.T) {
	b := newBench(t, nil)
	b.write(op(1), 2, "L", 0)
	b.write(op(1), 4, "S", 0)
	left := filepath.Join(b.o.Dir, "data", "2.1")
	b.must(os.Remove(left))
	b.must(os.MkdirAll(filepath.Join(left, "x"), 0o700)) // a directory with something in it stays
	head := smallLower()
	head.commit = 2
	b.must(b.rebase(head, overlay.Edit{DropAll: true}))
	b.must(b.SyncAll())
	if b.read(2) != "lower\n" || b.read(4) != strings.Repeat("g", 3*4096) {
		t.Fatal("the session is not on its new lower tree")
	}
	if files := b.dataFiles(); !slices.Equal(files, []string{"2.1"}) {
		t.Fatalf("data files left: %q", files)
	}
	b.must(os.Remove(filepath.Join(left, "x")))
	b.o.Lower = head
	b.reopen()
	if files := b.dataFiles(); files != nil {
		t.Fatalf("data files left after opening again: %q", files)
	}
}

// TestReplace compares Replace with Link to a temporary name and Rename, and
// sees that it is one frame.
func TestReplace(t *testing.T) {
	type outcome struct {
		Tree    string
		Delta   *overlay.Delta
		Settled []string
		Prior   tree.Ino
		Oldest  tree.Ino
		Files   []string
		Usage   overlay.Usage
	}
	run := func(t *testing.T, prepare func(b *bench), dir tree.Ino, name string, put func(b *bench, ino tree.Ino)) (out outcome) {
		b := newBench(t, func(o *overlay.Options) {
			o.Clock = func() time.Time { return time.Unix(50, 0) }
			o.Hooks.Settle = func(ino tree.Ino, by tree.Op, c overlay.File) {
				p, _ := io.ReadAll(io.NewSectionReader(c, 0, int64(c.Size())))
				out.Settled = append(out.Settled, fmt.Sprintf("%d by %d: %s", ino, by, p))
			}
		})
		prepare(b)
		a, err := b.Tmpfile(op(3), root, 0o640)
		b.must(err)
		b.write(op(3), a.Ino, "new", 0)
		put(b, a.Ino)
		b.Release(a.Ino)
		b.reopen()
		if b.lookup(dir, name).Ino != a.Ino {
			t.Fatal("the name stands for another inode")
		}
		out.Tree, err = renderFS(b.FS)
		b.must(err)
		out.Delta, err = b.Delta()
		b.must(err)
		out.Prior, out.Oldest = b.Lineage(a.Ino)
		out.Files, out.Usage = b.dataFiles(), b.Usage()
		return out
	}
	for _, tt := range []struct {
		name    string
		dir     tree.Ino
		file    string
		prepare func(b *bench)
	}{
		{"lower file", root, "f", func(*bench) {}},
		{"written lower file", root, "f", func(b *bench) { b.write(op(1), 2, "L", 0) }},
		{"file of the session", 3, "n", func(b *bench) { b.create(op(2), 3, "n", "n") }},
		{"file that replaced a lower one", root, "f", func(b *bench) {
			b.create(op(1), root, "x", "x")
			b.must(b.Rename(op(1), root, "x", root, "f", 0))
		}},
		{"one of two names", root, "h", func(b *bench) {
			_, err := b.Link(op(1), 4, root, "h")
			b.must(err)
			b.write(op(1), 4, "H", 0)
		}},
		{"open file", root, "f", func(b *bench) { b.write(op(1), 2, "L", 0); b.must(b.Acquire(2)) }},
		{"symlink", root, "l", func(b *bench) { _, err := b.Symlink(op(1), root, "l", "f"); b.must(err) }},
		{"nothing", 3, "n", func(*bench) {}},
		{"removed name", 3, "g", func(b *bench) { b.must(b.Unlink(op(1), 3, "g")) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := run(t, tt.prepare, tt.dir, tt.file, func(b *bench, ino tree.Ino) {
				_, err := b.Link(op(3), ino, tt.dir, ".tmp")
				b.must(err)
				b.must(b.Rename(op(3), tt.dir, ".tmp", tt.dir, tt.file, 0))
			})
			got := run(t, tt.prepare, tt.dir, tt.file, func(b *bench, ino tree.Ino) { b.must(b.Replace(op(3), ino, tt.dir, tt.file)) })
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("differs from link and rename (-want +got):\n%s", diff)
			}
		})
	}
}

// TestReplaceOneFrame cuts the journal's last byte off: the frame is torn, and
// the old file has its name again.
func TestReplaceOneFrame(t *testing.T) {
	b := newBench(t, func(o *overlay.Options) { o.KeepOrphans = true })
	a, err := b.Tmpfile(op(1), root, 0o600)
	b.must(err)
	b.write(op(1), a.Ino, "new", 0)
	c := overlay.Caller{Op: 1, Request: 42}
	b.must(b.Replace(c, a.Ino, root, "f"))
	if ino, ok := b.Done(42); ino != a.Ino || !ok {
		t.Fatalf("request: %d, %v", ino, ok)
	}
	b.must(b.Close())
	b.FS = nil
	journal := filepath.Join(b.o.Dir, "journal")
	st, err := os.Stat(journal)
	b.must(err)
	b.must(os.Truncate(journal, st.Size()-1))
	b.reopen()
	if got := b.lookup(root, "f"); got.Ino != 2 || got.Nlink != 1 || !slices.Equal(b.list(root), []string{"d", "f"}) {
		t.Fatalf("with half a frame: %+v, %q", got, b.list(root))
	}
	if b.read(a.Ino) != "new" {
		t.Fatal("the file without a name is not as it was before the frame")
	}
	b.must(b.Replace(c, a.Ino, root, "f"))
	if b.lookup(root, "f").Ino != a.Ino {
		t.Fatal("asked again, it does nothing")
	}
}

func TestReplaceErrors(t *testing.T) {
	b := newBench(t, nil)
	a, err := b.Tmpfile(op(1), root, 0o600)
	b.must(err)
	named := b.create(op(1), root, "named", "x")
	gone := b.create(op(1), root, "gone", "x")
	b.must(b.Acquire(gone))
	b.must(b.Unlink(op(1), root, "gone"))
	dead, err := b.Mkdir(op(1), root, "dead", 0o755)
	b.must(err)
	b.must(b.Acquire(dead.Ino))
	b.must(b.Rmdir(op(1), root, "dead"))
	before, err := renderFS(b.FS)
	b.must(err)
	for _, tt := range []struct {
		ino, dir tree.Ino
		name     string
		want     error
	}{
		{a.Ino, root, "d", tree.ErrIsDir},
		{a.Ino, 2, "x", tree.ErrNotDir},
		{a.Ino, dead.Ino, "x", tree.ErrNotExist},
		{a.Ino, 999, "x", tree.ErrStale},
		{a.Ino, root, "..", tree.ErrInvalid},
		{a.Ino, root, strings.Repeat("n", 256), tree.ErrNameTooLong},
		{999, root, "f", tree.ErrStale},
		{gone, root, "f", tree.ErrNotExist},
		{named, root, "f", tree.ErrInvalid},
		{3, root, "f", tree.ErrPerm},
	} {
		b.want(b.Replace(op(1), tt.ino, tt.dir, tt.name), tt.want)
	}
	after, err := renderFS(b.FS)
	b.must(err)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Fatalf("what failed did something (-before +after):\n%s", diff)
	}
	// A name once given and lost does not come back.
	b.must(b.Replace(op(1), a.Ino, root, "f"))
	b.must(b.Unlink(op(1), root, "f"))
	b.want(b.Replace(op(1), a.Ino, root, "f"), tree.ErrNotExist)
	_, err = b.Link(op(1), a.Ino, root, "f")
	b.want(err, tree.ErrNotExist)
}

// TestMaxOp counts operations that left no record, and outlives a restart.
func TestMaxOp(t *testing.T) {
	b := newBench(t, nil)
	if b.MaxOp() != 0 {
		t.Fatalf("highest operation of nothing is %d", b.MaxOp())
	}
	b.create(op(7), root, "x", "x")
	b.must(b.Unlink(op(8), root, "x"))
	b.write(op(3), 2, "y", 0)
	for range 2 {
		if b.MaxOp() != 8 {
			t.Fatalf("highest operation is %d", b.MaxOp())
		}
		b.reopen()
	}
	b.must(b.rebase(b.low, overlay.Edit{DropAll: true}))
	if b.MaxOp() != 8 {
		t.Fatalf("highest operation of what was dropped is %d", b.MaxOp())
	}
}
