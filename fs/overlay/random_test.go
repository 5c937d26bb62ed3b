package overlay_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// world is an overlay beside the model of what it must look like.
type world struct {
	dir   string
	fs    *overlay.FS
	m     *model
	low   *lower
	next  tree.Ino
	clock int64

	open    map[tree.Ino]*node // with handles
	settled map[tree.Ino][]byte
	settles []error
}

func (w *world) options() overlay.Options {
	return overlay.Options{
		Dir: w.dir, Lower: w.low,
		NewIno: func() (tree.Ino, error) { w.next++; return w.next, nil },
		Clock:  func() time.Time { return time.Unix(w.clock, 0) },
		Hooks:  overlay.Hooks{Settle: w.settle},
	}
}

// settle checks that a content told as settled is what the model has, last
// written by whom it says.
func (w *world) settle(ino tree.Ino, by tree.Op, content overlay.File) {
	data, err := io.ReadAll(io.NewSectionReader(content, 0, int64(content.Size())))
	n := w.m.inodes()[ino]
	if n == nil {
		n = w.open[ino]
	}
	switch {
	case err != nil:
	case n == nil:
		err = fmt.Errorf("settle of inode %d, which is not there", ino)
	case by != n.lastOp || !n.written:
		err = fmt.Errorf("settle of inode %d by %d, last written by %d", ino, by, n.lastOp)
	case !bytes.Equal(data, n.data):
		err = fmt.Errorf("settle of inode %d with other content than it had", ino)
	}
	w.settles = append(w.settles, err)
	w.settled[ino] = data
}

func (w *world) start(t *rapid.T) {
	var err error
	if w.fs, err = overlay.Open(w.options()); err != nil {
		t.Fatal(err)
	}
}

// genTree makes a random tree.
func genTree(t *rapid.T, w *world) {
	w.m = &model{root: newDir(tree.RootIno)}
	w.next = tree.RootIno
	dirs := []*node{w.m.root}
	c := overlay.Caller{UID: 7, GID: 8}
	for i := range rapid.IntRange(0, 12).Draw(t, "size") {
		d := rapid.SampledFrom(dirs).Draw(t, "dir")
		name := genName.Draw(t, "name")
		if d.names[name] != nil {
			continue
		}
		kind := rapid.SampledFrom([]tree.Kind{tree.File, tree.File, tree.Dir, tree.Symlink}).Draw(t, "kind")
		if rapid.IntRange(0, 4).Draw(t, "link") == 0 {
			if files := w.files(); len(files) > 0 {
				_ = w.m.link(rapid.SampledFrom(files).Draw(t, "linked"), d, name)
				continue
			}
		}
		n, _ := w.m.add(c, d, name, kind, rapid.SampledFrom([]uint32{0o644, 0o4755, 0o2755}).Draw(t, "mode"))
		w.next++
		n.Ino = w.next
		n.Mtime = tree.Time{Sec: int64(i)}
		n.changed, n.lastOp = false, 0
		switch kind {
		case tree.Dir:
			dirs = append(dirs, n)
		case tree.Symlink:
			n.Link, n.Size = "target", 6
		case tree.File:
			n.data = genBytes(t, 24<<10)
			n.Size = uint64(len(n.data))
			n.Xattrs = []tree.Xattr{{Name: "user.lower", Value: []byte("x")}}
		}
	}
}

var genName = rapid.SampledFrom([]string{"a", "b", "c", "d", "e"})

// genBytes makes bytes with holes in them.
func genBytes(t *rapid.T, limit int) []byte {
	b := make([]byte, rapid.IntRange(0, limit).Draw(t, "length"))
	seed := rapid.Byte().Draw(t, "seed")
	hole := rapid.IntRange(0, 4).Draw(t, "hole")
	for i := range b {
		if i/3000 != hole {
			b[i] = byte(i)*7 + seed | 1
		}
	}
	return b
}

func (w *world) sorted(keep func(*node) bool) (out []*node) {
	all := w.m.inodes()
	for _, ino := range slices.Sorted(maps.Keys(all)) {
		if keep(all[ino]) {
			out = append(out, all[ino])
		}
	}
	return out
}

func (w *world) files() []*node {
	out := w.sorted(func(n *node) bool { return n.Kind == tree.File })
	for _, ino := range slices.Sorted(maps.Keys(w.open)) {
		if w.open[ino].Nlink == 0 {
			out = append(out, w.open[ino])
		}
	}
	return out
}

func (w *world) anyNode(t *rapid.T) *node {
	return rapid.SampledFrom(w.sorted(func(*node) bool { return true })).Draw(t, "inode")
}

func (w *world) anyDir(t *rapid.T) *node {
	// One in ten is no directory, to see that said.
	if rapid.IntRange(0, 9).Draw(t, "odd") == 0 {
		return w.anyNode(t)
	}
	return rapid.SampledFrom(w.sorted(func(n *node) bool { return n.Kind == tree.Dir })).Draw(t, "dir")
}

func (w *world) anyFile(t *rapid.T) *node {
	files := w.files()
	if len(files) == 0 {
		t.Skip("no file")
	}
	return rapid.SampledFrom(files).Draw(t, "file")
}

func genCaller(t *rapid.T) overlay.Caller {
	return overlay.Caller{
		Op:  tree.Op(rapid.IntRange(1, 3).Draw(t, "op")),
		UID: rapid.SampledFrom([]uint32{0, 1000}).Draw(t, "uid"), GID: 100,
		KillPriv: rapid.IntRange(0, 5).Draw(t, "kill") == 0,
	}
}

func (w *world) tick() {
	w.clock++
	w.m.now = tree.Time{Sec: w.clock}
	clear(w.settled)
}

// same fails unless the overlay's answer is the model's.
func same(t *rapid.T, got, want error) bool {
	t.Helper()
	if want == nil && got == nil {
		return true
	}
	if !errors.Is(got, want) || want == nil {
		t.Fatalf("answer is %v, want %v", got, want)
	}
	return false
}

// before remembers what a change of n's bytes must settle.
func (w *world) before(c overlay.Caller, n *node) func(t *rapid.T) {
	need, data := n.written && n.lastOp != c.Op, n.data
	return func(t *rapid.T) {
		if got, ok := w.settled[n.Ino]; need && (!ok || !bytes.Equal(got, data)) {
			t.Fatalf("inode %d was not settled before operation %d changed what another wrote", n.Ino, c.Op)
		}
	}
}

func (w *world) make(t *rapid.T, kind tree.Kind) {
	w.tick()
	c, d, name := genCaller(t), w.anyDir(t), genName.Draw(t, "name")
	mode := rapid.SampledFrom([]uint32{0o600, 0o4711, 0o2710, 0o2755, 0o1777}).Draw(t, "mode")
	var a tree.Attr
	var err error
	switch kind {
	case tree.File:
		a, err = w.fs.Create(c, d.Ino, name, mode)
	case tree.Dir:
		a, err = w.fs.Mkdir(c, d.Ino, name, mode)
	case tree.Symlink:
		mode = 0o777
		a, err = w.fs.Symlink(c, d.Ino, name, "to/"+name)
	default:
		a, err = w.fs.Mknod(c, d.Ino, name, kind, mode, 0x102)
	}
	n, want := w.m.add(c, d, name, kind, mode)
	if !same(t, err, want) {
		return
	}
	n.Ino = a.Ino
	switch kind {
	case tree.Symlink:
		n.Link, n.Size = "to/"+name, uint64(3+len(name))
	case tree.Char:
		n.Rdev = 0x102
	}
}

func (w *world) Create(t *rapid.T)  { w.make(t, tree.File) }
func (w *world) Mkdir(t *rapid.T)   { w.make(t, tree.Dir) }
func (w *world) Symlink(t *rapid.T) { w.make(t, tree.Symlink) }
func (w *world) Mknod(t *rapid.T)   { w.make(t, tree.Char) }

func (w *world) Link(t *rapid.T) {
	w.tick()
	c, n, d, name := genCaller(t), w.anyNode(t), w.anyDir(t), genName.Draw(t, "name")
	_, err := w.fs.Link(c, n.Ino, d.Ino, name)
	same(t, err, w.m.link(n, d, name))
}

// losing remembers what must be settled when a name goes.
func (w *world) losing(c overlay.Caller, d *node, name string) func(t *rapid.T) {
	n := d.names[name]
	if n == nil || n.Kind != tree.File || n.Nlink != 1 {
		return func(*rapid.T) {}
	}
	return w.before(c, n)
}

func (w *world) Unlink(t *rapid.T) {
	w.tick()
	c, d, name := genCaller(t), w.anyDir(t), genName.Draw(t, "name")
	check := w.losing(c, d, name)
	err := w.fs.Unlink(c, d.Ino, name)
	if same(t, err, w.m.unlink(d, name)) {
		check(t)
	}
}

func (w *world) Rmdir(t *rapid.T) {
	w.tick()
	c, d, name := genCaller(t), w.anyDir(t), genName.Draw(t, "name")
	same(t, w.fs.Rmdir(c, d.Ino, name), w.m.rmdir(d, name))
}

func (w *world) Rename(t *rapid.T) {
	w.tick()
	c, d1, d2 := genCaller(t), w.anyDir(t), w.anyDir(t)
	n1, n2 := genName.Draw(t, "name"), genName.Draw(t, "new name")
	flags := rapid.SampledFrom([]uint32{0, 0, 0, overlay.RenameNoReplace, overlay.RenameExchange}).Draw(t, "flags")
	check := func(*rapid.T) {}
	if flags == 0 && d1.names[n1] != d2.names[n2] {
		check = w.losing(c, d2, n2)
	}
	err := w.fs.Rename(c, d1.Ino, n1, d2.Ino, n2, flags)
	if same(t, err, w.m.rename(d1, n1, d2, n2, flags)) {
		check(t)
	}
}

func genOffset(t *rapid.T) uint64 {
	if rapid.Bool().Draw(t, "aligned") {
		return uint64(rapid.IntRange(0, 10).Draw(t, "page")) * 4096
	}
	return uint64(rapid.IntRange(0, 40<<10).Draw(t, "offset"))
}

func (w *world) Write(t *rapid.T) {
	w.tick()
	c, n := genCaller(t), w.anyFile(t)
	p, off := genBytes(t, 9000), genOffset(t)
	check := w.before(c, n)
	got, err := w.fs.WriteAt(c, n.Ino, p, off)
	if err != nil || got != len(p) {
		t.Fatalf("write of %d bytes: %d, %v", len(p), got, err)
	}
	if len(p) > 0 {
		w.m.write(c, n, p, off)
		check(t)
	}
}

func (w *world) Truncate(t *rapid.T) {
	w.tick()
	c, n, size := genCaller(t), w.anyFile(t), genOffset(t)
	check := w.before(c, n)
	a, err := w.fs.SetAttr(c, n.Ino, overlay.SetAttr{Size: &size})
	if err != nil || a.Size != size {
		t.Fatalf("truncate to %d: %+v, %v", size, a, err)
	}
	if size == uint64(len(n.data)) {
		n.Mtime, n.Ctime = w.m.now, w.m.now
		w.m.kill(c, n)
		return
	}
	w.m.resize(n, size)
	w.m.wrote(c, n)
	check(t)
}

func (w *world) Fallocate(t *rapid.T) {
	w.tick()
	c, n, off := genCaller(t), w.anyFile(t), genOffset(t)
	length := uint64(rapid.IntRange(1, 9000).Draw(t, "length"))
	mode := rapid.SampledFrom([]uint32{0, 1, 3, 0x10, 0x11}).Draw(t, "mode")
	check := w.before(c, n)
	if err := w.fs.Fallocate(c, n.Ino, mode, off, length); err != nil {
		t.Fatalf("fallocate mode %#x at %d for %d: %v", mode, off, length, err)
	}
	size, end := uint64(len(n.data)), off+length
	if mode&overlay.FallocKeepSize == 0 && end > size {
		w.m.resize(n, end)
	}
	grew := uint64(len(n.data)) != size
	zeroed := mode > 1 && off < size
	if zeroed {
		n.data = slices.Clone(n.data)
		clear(n.data[off:min(end, size)])
	}
	a, err := w.fs.Attr(n.Ino)
	if err != nil {
		t.Fatal(err)
	}
	switch {
	case grew || zeroed:
		w.m.wrote(c, n)
		check(t)
	case a.Ctime != n.Ctime:
		// Holes were made room for: no byte reads differently.
		n.Mtime, n.Ctime, n.changed = w.m.now, w.m.now, true
		w.m.kill(c, n)
	}
}

func (w *world) CopyRange(t *rapid.T) {
	w.tick()
	c, src, dst := genCaller(t), w.anyFile(t), w.anyFile(t)
	from, to, length := genOffset(t), genOffset(t), uint64(rapid.IntRange(1, 9000).Draw(t, "length"))
	check := w.before(c, dst)
	got, err := w.fs.CopyRange(c, src.Ino, from, dst.Ino, to, length)
	var p []byte
	if size := uint64(len(src.data)); from < size {
		p = slices.Clone(src.data[from:min(from+length, size)])
	}
	if length = uint64(len(p)); src == dst && length > 0 && from < to+length && to < from+length {
		same(t, err, tree.ErrInvalid)
		return
	}
	if err != nil || got != uint64(len(p)) {
		t.Fatalf("copied %d of %d: %v", got, len(p), err)
	}
	if len(p) > 0 {
		w.m.write(c, dst, p, to)
		check(t)
	}
}

func (w *world) SetAttr(t *rapid.T) {
	w.tick()
	c, n := genCaller(t), w.anyNode(t)
	var s overlay.SetAttr
	if rapid.Bool().Draw(t, "chown") {
		uid := uint32(rapid.IntRange(0, 3).Draw(t, "owner"))
		s.UID, n.UID = &uid, uid
		if n.Kind != tree.Dir {
			w.m.kill(overlay.Caller{UID: 1}, n)
		}
	}
	if rapid.Bool().Draw(t, "chmod") {
		mode := uint32(rapid.IntRange(0, 0o7777).Draw(t, "mode"))
		s.Mode, n.Mode = &mode, mode
	}
	if rapid.Bool().Draw(t, "utime") {
		at := tree.Time{Sec: int64(rapid.IntRange(-5, 5).Draw(t, "mtime"))}
		s.Mtime, n.Mtime = &at, at
	}
	if s != (overlay.SetAttr{}) {
		n.Ctime = w.m.now
	}
	if _, err := w.fs.SetAttr(c, n.Ino, s); err != nil {
		t.Fatal(err)
	}
}

func (w *world) Xattr(t *rapid.T) {
	w.tick()
	c, n := genCaller(t), w.anyNode(t)
	name := rapid.SampledFrom([]string{"user.lower", "user.b", "security.capability"}).Draw(t, "xattr")
	i := slices.IndexFunc(n.Xattrs, func(x tree.Xattr) bool { return x.Name == name })
	x := slices.Clone(n.Xattrs)
	var err, want error
	if rapid.Bool().Draw(t, "remove") {
		err = w.fs.RemoveXattr(c, n.Ino, name)
		if i < 0 {
			want = tree.ErrNoXattr
		} else {
			x = slices.Delete(x, i, i+1)
		}
	} else {
		flags := rapid.IntRange(0, 2).Draw(t, "flags")
		value := genBytes(t, 30)
		err = w.fs.SetXattr(c, n.Ino, name, value, flags)
		switch {
		case flags == overlay.XattrCreate && i >= 0:
			want = tree.ErrExist
		case flags == overlay.XattrReplace && i < 0:
			want = tree.ErrNoXattr
		case i >= 0:
			x[i].Value = value
		default:
			x = append(x, tree.Xattr{Name: name, Value: value})
			slices.SortFunc(x, func(a, b tree.Xattr) int { return bytes.Compare([]byte(a.Name), []byte(b.Name)) })
		}
	}
	if same(t, err, want) {
		n.Xattrs, n.Ctime = x, w.m.now
	}
}

func (w *world) Acquire(t *rapid.T) {
	n := w.anyFile(t)
	if err := w.fs.Acquire(n.Ino); err != nil {
		t.Fatal(err)
	}
	n.handles++
	w.open[n.Ino] = n
}

func (w *world) Release(t *rapid.T) {
	if len(w.open) == 0 {
		t.Skip("nothing open")
	}
	n := w.open[rapid.SampledFrom(slices.Sorted(maps.Keys(w.open))).Draw(t, "open")]
	w.fs.Release(n.Ino)
	if n.handles--; n.handles == 0 {
		delete(w.open, n.Ino)
		if n.Nlink == 0 {
			if err := w.fs.Acquire(n.Ino); !errors.Is(err, tree.ErrStale) {
				t.Fatalf("inode %d outlives its last close: %v", n.Ino, err)
			}
		}
	}
}

// tmpfile makes a file without a name.
func (w *world) tmpfile(t *rapid.T, c overlay.Caller) *node {
	a, err := w.fs.Tmpfile(c, tree.RootIno, 0o600)
	if err != nil || a.Nlink != 0 {
		t.Fatalf("tmpfile: %+v, %v", a, err)
	}
	d := &node{names: map[string]*node{}}
	d.Inode, d.names = w.m.root.Inode, map[string]*node{}
	n, _ := w.m.add(c, d, "tmp", tree.File, 0o600)
	n.Ino, n.Nlink = a.Ino, 0
	return n
}

// Tmpfile makes a file without a name and, most times, gives it one.
func (w *world) Tmpfile(t *rapid.T) {
	w.tick()
	c, name := genCaller(t), genName.Draw(t, "name")
	n := w.tmpfile(t, c)
	defer w.fs.Release(n.Ino)
	if rapid.Bool().Draw(t, "named") {
		_, err := w.fs.Link(c, n.Ino, tree.RootIno, name)
		same(t, err, w.m.link(n, w.m.root, name))
	}
}

// Replace puts a file that had no name in the place of another.
func (w *world) Replace(t *rapid.T) {
	w.tick()
	c, d, name := genCaller(t), w.anyDir(t), genName.Draw(t, "name")
	n := w.tmpfile(t, c)
	defer w.fs.Release(n.Ino)
	if p := genBytes(t, 9000); len(p) > 0 {
		if _, err := w.fs.WriteAt(c, n.Ino, p, 0); err != nil {
			t.Fatal(err)
		}
		w.m.write(c, n, p, 0)
	}
	check := w.losing(c, d, name)
	err := w.fs.Replace(c, n.Ino, d.Ino, name)
	if same(t, err, w.m.replace(n, d, name)) {
		check(t)
	}
}

// Reopen ends the process without a sync, as a kill would.
func (w *world) Reopen(t *rapid.T) {
	if err := w.fs.Close(); err != nil {
		t.Fatal(err)
	}
	for _, n := range w.open {
		n.handles = 0
	}
	clear(w.open)
	if base, ok, err := overlay.PeekBase(w.dir); base != w.low.commit || !ok || err != nil {
		t.Fatalf("journal stands on %d, %v, %v; want %d", base, ok, err, w.low.commit)
	}
	w.start(t)
}

// Rebase publishes the session and puts it on the outcome, keeping nothing,
// everything, or what the delta named of its own. Some files get the content of
// others, as the session or the new lower tree has it.
func (w *world) Rebase(t *rapid.T) {
	w.tick()
	w.fs.Freeze()
	defer w.fs.Thaw()
	d, err := w.fs.Delta()
	if err != nil {
		t.Fatal(err)
	}
	next, err := w.low.apply(w.fs, d)
	if err != nil {
		t.Fatal(err)
	}
	if rapid.Bool().Draw(t, "forget the dead") {
		live := w.m.inodes()
		for ino := range next.inodes {
			if live[ino] == nil {
				delete(next.inodes, ino)
				delete(next.content, ino)
				delete(next.names, ino)
			}
		}
	}
	var e overlay.Edit
	how := rapid.SampledFrom([]string{"all", "named", "none"}).Draw(t, "drop")
	switch how {
	case "all":
		e.DropAll = true
	case "named":
		for _, c := range d.Dirents {
			e.DropDirents = append(e.DropDirents, overlay.Key{Dir: c.Dir, Name: c.Name})
		}
		for _, c := range d.Inodes {
			e.DropInodes = append(e.DropInodes, c.Ino)
		}
	}
	if how != "none" {
		w.twins(t, next, d)
	}
	edited := w.copies(t, next, &e)
	if err := w.fs.Rebase(next, e); err != nil {
		t.Fatal(err)
	}
	w.low = next
	if how != "none" {
		for _, n := range w.m.inodes() {
			n.changed, n.written, n.lastOp = false, false, 0
		}
	}
	for n, data := range edited {
		n.data = data
		w.m.wrote(overlay.Caller{Op: 9}, n)
	}
	if how == "none" || len(edited) > 0 {
		return
	}
	if d, err := w.fs.Delta(); err != nil || len(d.Dirents)+len(d.Inodes) > 0 {
		t.Fatalf("delta after publishing all: %+v, %v", d, err)
	}
}

// twins has some files of the session turn out to be in the new lower tree
// already, as another made them there: the session drops its own, which go on
// without a name while they are open.
func (w *world) twins(t *rapid.T, next *lower, d *overlay.Delta) {
	live := w.m.inodes()
	for _, c := range d.Inodes {
		n := live[c.Ino]
		if !c.New || c.Kind != tree.File || n.Nlink != 1 || !rapid.Bool().Draw(t, "made twice") {
			continue
		}
		w.next++
		twin := *n
		twin.Ino, twin.handles = w.next, 0
		next.put(twin.Inode, n.data)
		delete(next.inodes, n.Ino)
		delete(next.content, n.Ino)
		w.m.walk(func(dir *node, name string, at *node) {
			if at == n {
				dir.names[name] = &twin
				next.names[dir.Ino][name] = tree.Dirent{Dir: dir.Ino, Name: name, Ino: twin.Ino, Kind: tree.File}
			}
		})
		n.Nlink = 0
	}
}

// copies adds files to e whose content is that of others, and tells the content
// they are going to have.
func (w *world) copies(t *rapid.T, next *lower, e *overlay.Edit) map[*node][]byte {
	edited := map[*node][]byte{}
	named := w.sorted(func(n *node) bool { return n.Kind == tree.File })
	for range rapid.IntRange(0, 3).Draw(t, "copies") {
		if len(named) == 0 {
			break
		}
		dst, src := rapid.SampledFrom(named).Draw(t, "target"), w.anyFile(t)
		if edited[dst] != nil {
			continue
		}
		from, err := w.fs.Data(src.Ino)
		if low, lowErr := next.Open(src.Ino); lowErr == nil && src.Nlink > 0 && (rapid.Bool().Draw(t, "from the new lower tree") || err != nil) {
			from, err = low, nil // always of what only the new tree has
		}
		if err != nil {
			t.Fatal(err)
		}
		e.Files = append(e.Files, overlay.FileEdit{Ino: dst.Ino, Source: from, Op: 9})
		edited[dst] = append([]byte{}, src.data...)
	}
	return edited
}

// Check compares everything.
func (w *world) Check(t *rapid.T) {
	if err := errors.Join(w.settles...); err != nil {
		t.Fatal(err)
	}
	w.settles = nil
	got, err := renderFS(w.fs)
	if err != nil {
		t.Fatal(err)
	}
	if want := w.m.render(); got != want {
		t.Fatalf("overlay differs from the model:\n%s", cmp.Diff(want, got))
	}
	for ino, n := range w.open {
		buf := make([]byte, len(n.data)+1)
		got, err := w.fs.ReadAt(ino, buf, 0)
		a, aerr := w.fs.Attr(ino)
		if err != nil || aerr != nil || !bytes.Equal(buf[:got], n.data) || a.Nlink != n.Nlink {
			t.Fatalf("open inode %d: %d bytes of %d, links %d of %d, %v, %v", ino, got, len(n.data), a.Nlink, n.Nlink, err, aerr)
		}
	}
	w.checkDelta(t)
}

// checkDelta compares the delta with the difference of model and lower tree.
func (w *world) checkDelta(t *rapid.T) {
	d, err := w.fs.Delta()
	if err != nil {
		t.Fatal(err)
	}
	live := w.m.inodes()
	want := map[overlay.Key]overlay.DirentChange{}
	for dir, names := range w.low.names {
		for name, was := range names {
			want[overlay.Key{Dir: dir, Name: name}] = overlay.DirentChange{Dir: dir, Name: name, Was: was.Ino}
		}
	}
	w.m.walk(func(dir *node, name string, n *node) {
		k := overlay.Key{Dir: dir.Ino, Name: name}
		c := want[k]
		c.Dir, c.Name, c.Ino, c.Kind = dir.Ino, name, n.Ino, n.Kind
		want[k] = c
	})
	maps.DeleteFunc(want, func(k overlay.Key, c overlay.DirentChange) bool {
		_, reachable := live[k.Dir]
		_, wasThere := w.low.names[k.Dir]
		dead, _ := w.low.Names(k.Dir)
		return c.Ino == c.Was || !reachable && (!wasThere || len(dead) == 0 && k.Dir != tree.RootIno)
	})
	got := map[overlay.Key]overlay.DirentChange{}
	for _, c := range d.Dirents {
		got[overlay.Key{Dir: c.Dir, Name: c.Name}] = c
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("names of the delta (-want +got):\n%s", diff)
	}
	seen := map[tree.Ino]overlay.InodeChange{}
	for _, c := range d.Inodes {
		seen[c.Ino] = c
	}
	for ino, n := range live {
		low, lowErr := w.low.Inode(ino)
		c, ok := seen[ino]
		delete(seen, ino)
		meta := lowErr != nil || n.Mode != low.Mode || n.UID != low.UID || n.Rdev != low.Rdev || n.Link != low.Link || !cmp.Equal(n.Xattrs, low.Xattrs, cmp.Transformer("none", func(x []tree.Xattr) []tree.Xattr {
			if len(x) == 0 {
				return nil
			}
			return x
		}))
		data := n.Kind == tree.File && n.changed
		if ok != (c.Ino != 0) || !ok && (meta || data) || ok && (c.New != (lowErr != nil) || c.Meta != meta || c.Data != data || c.LastOp != n.lastOp && data) {
			t.Fatalf("inode %d in the delta (%v): %+v; want new %v, meta %v, data %v, last %d", ino, ok, c, lowErr != nil, meta, data, n.lastOp)
		}
	}
	if len(seen) > 0 {
		t.Fatalf("the delta has inodes that nothing names: %+v", seen)
	}
}

// TestRandom drives an overlay and the model with the same random operations by
// random callers, and compares all of both after each.
func TestRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "overlay")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		w := &world{dir: dir, open: map[tree.Ino]*node{}, settled: map[tree.Ino][]byte{}, clock: 100}
		genTree(t, w)
		w.low = w.m.freeze(5)
		w.start(t)
		defer func() { _ = w.fs.Close() }()
		t.Repeat(rapid.StateMachineActions(w))
	})
}
