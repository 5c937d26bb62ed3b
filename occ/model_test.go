package occ_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"testing"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ"
)

// world is a whole tree in memory: the two tables, and when each key last
// changed. It serves as base, head and session alike.
type world struct {
	dirents map[occ.Key]tree.Dirent
	inodes  map[tree.Ino]node
	number  uint64

	direntAt map[occ.Key]uint64
	inodeAt  map[tree.Ino]uint64
	treeAt   map[tree.Ino]uint64

	next  *tree.Ino
	clock *int64
}

type node struct {
	tree.Inode
	data string
}

func newWorld() *world {
	next, clock := tree.RootIno+1, int64(1000)
	w := &world{
		dirents: map[occ.Key]tree.Dirent{}, inodes: map[tree.Ino]node{},
		direntAt: map[occ.Key]uint64{}, inodeAt: map[tree.Ino]uint64{}, treeAt: map[tree.Ino]uint64{},
		next: &next, clock: &clock,
	}
	w.inodes[tree.RootIno] = node{Inode: tree.Inode{Attr: tree.Attr{Ino: tree.RootIno, Kind: tree.Dir, Mode: 0o755, Nlink: 2}}}
	return w
}

func (w *world) clone() *world {
	c := *w
	c.dirents, c.inodes = maps.Clone(w.dirents), maps.Clone(w.inodes)
	c.direntAt, c.inodeAt, c.treeAt = maps.Clone(w.direntAt), maps.Clone(w.inodeAt), maps.Clone(w.treeAt)
	return &c
}

// The view.

func (w *world) Lookup(dir tree.Ino, name string) (tree.Dirent, error) {
	if n, ok := w.inodes[dir]; !ok || n.Kind != tree.Dir {
		return tree.Dirent{}, fmt.Errorf("look %q up in %d: %w", name, dir, tree.ErrNotDir)
	}
	d, ok := w.dirents[occ.Key{Dir: dir, Name: name}]
	if !ok {
		return tree.Dirent{}, tree.ErrNotExist
	}
	return d, nil
}

func (w *world) Inode(ino tree.Ino) (tree.Inode, error) {
	n, ok := w.inodes[ino]
	if !ok {
		return tree.Inode{}, tree.ErrNotExist
	}
	return n.Inode, nil
}

func (w *world) Names(ino tree.Ino) ([]tree.Dirent, error) {
	var names []tree.Dirent
	for _, d := range w.dirents {
		if d.Ino == ino && w.reachable(d.Dir) {
			names = append(names, d)
		}
	}
	slices.SortFunc(names, func(a, b tree.Dirent) int {
		return strings.Compare(fmt.Sprintf("%08d%s", a.Dir, a.Name), fmt.Sprintf("%08d%s", b.Dir, b.Name))
	})
	return names, nil
}

func (w *world) parentOf(dir tree.Ino) (tree.Dirent, bool) {
	for _, d := range w.dirents {
		if d.Ino == dir {
			return d, true
		}
	}
	return tree.Dirent{}, false
}

func (w *world) reachable(dir tree.Ino) bool {
	for range len(w.inodes) + 1 {
		if dir == tree.RootIno {
			return true
		}
		d, ok := w.parentOf(dir)
		if !ok {
			return false
		}
		dir = d.Dir
	}
	return false
}

func (w *world) Path(ino tree.Ino) (string, error) {
	path := ""
	for ino != tree.RootIno {
		d, ok := w.parentOf(ino)
		if !ok {
			return "", tree.ErrNotExist
		}
		path = strings.TrimSuffix(d.Name+"/"+path, "/")
		ino = d.Dir
	}
	return path, nil
}

func (w *world) Content(ino tree.Ino) ([]byte, error) {
	n, ok := w.inodes[ino]
	if !ok {
		return nil, tree.ErrNotExist
	}
	return []byte(n.data), nil
}

func (w *world) Hash(ino tree.Ino) (tree.Hash, error) {
	n, ok := w.inodes[ino]
	if !ok {
		return tree.Hash{}, tree.ErrNotExist
	}
	return sha256.Sum256([]byte(n.data)), nil
}

func (w *world) ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error {
	var list []tree.Dirent
	for k, d := range w.dirents {
		if k.Dir == dir && k.Name >= from {
			list = append(list, d)
		}
	}
	slices.SortFunc(list, func(a, b tree.Dirent) int { return strings.Compare(a.Name, b.Name) })
	for _, d := range list {
		if !fn(d) {
			return nil
		}
	}
	return nil
}

func (w *world) DirentChanged(dir tree.Ino, name string) uint64 {
	return w.direntAt[occ.Key{Dir: dir, Name: name}]
}
func (w *world) InodeChanged(ino tree.Ino) uint64   { return w.inodeAt[ino] }
func (w *world) SubtreeChanged(dir tree.Ino) uint64 { return w.treeAt[dir] }
func (w *world) Number() uint64                     { return w.number }

// What a user does. Paths that are wrong panic: the tests choose them.

func (w *world) tick() tree.Time {
	*w.clock++
	return tree.Time{Sec: *w.clock}
}

func (w *world) newIno() (tree.Ino, error) {
	ino := *w.next
	*w.next++
	return ino, nil
}

func (w *world) find(path string) (tree.Dirent, bool) {
	d := tree.Dirent{Ino: tree.RootIno, Kind: tree.Dir}
	for _, name := range strings.Split(path, "/") {
		var ok bool
		if d, ok = w.dirents[occ.Key{Dir: d.Ino, Name: name}]; !ok {
			return tree.Dirent{}, false
		}
	}
	return d, true
}

func (w *world) key(path string) occ.Key {
	at := strings.LastIndexByte(path, '/')
	if at < 0 {
		return occ.Key{Dir: tree.RootIno, Name: path}
	}
	d, ok := w.find(path[:at])
	if !ok {
		panic("no directory " + path[:at])
	}
	return occ.Key{Dir: d.Ino, Name: path[at+1:]}
}

// entry sets one name and keeps times and link counts.
func (w *world) entry(k occ.Key, ino tree.Ino) {
	dir := w.inodes[k.Dir]
	if old, ok := w.dirents[k]; ok {
		delete(w.dirents, k)
		if old.Kind == tree.Dir {
			dir.Nlink--
		}
		w.links(old.Ino, -1)
	}
	if ino != 0 {
		kind := w.inodes[ino].Kind
		w.dirents[k] = tree.Dirent{Dir: k.Dir, Name: k.Name, Ino: ino, Kind: kind}
		if kind == tree.Dir {
			dir.Nlink++
		}
		w.links(ino, 1)
	}
	dir.Mtime = w.tick()
	dir.Ctime = dir.Mtime
	w.inodes[k.Dir] = dir
}

func (w *world) links(ino tree.Ino, by int) {
	if n := w.inodes[ino]; n.Kind != tree.Dir {
		n.Nlink = uint32(int(n.Nlink) + by)
		n.Ctime = w.tick()
		w.inodes[ino] = n
	}
}

func (w *world) make(path string, n node) tree.Ino {
	n.Ino, _ = w.newIno()
	n.Mtime = w.tick()
	n.Ctime = n.Mtime
	n.Size = uint64(len(n.data) + len(n.Link))
	if n.Kind == tree.Dir {
		n.Nlink = 2
	}
	w.inodes[n.Ino] = n
	w.entry(w.key(path), n.Ino)
	return n.Ino
}

func (w *world) mkdir(path string) tree.Ino {
	return w.make(path, node{Inode: tree.Inode{Attr: tree.Attr{Kind: tree.Dir, Mode: 0o755}}})
}

func (w *world) create(path, data string) tree.Ino {
	return w.make(path, node{Inode: tree.Inode{Attr: tree.Attr{Kind: tree.File, Mode: 0o644}}, data: data})
}

func (w *world) symlink(path, target string) tree.Ino {
	return w.make(path, node{Inode: tree.Inode{Attr: tree.Attr{Kind: tree.Symlink, Mode: 0o777}, Link: target}})
}

func (w *world) change(path string, fn func(n *node)) {
	d, ok := w.find(path)
	if !ok {
		panic("no file " + path)
	}
	n := w.inodes[d.Ino]
	n.Xattrs = slices.Clone(n.Xattrs)
	n.Ctime = w.tick()
	fn(&n)
	n.Hash = tree.Hash{}
	n.Size = uint64(len(n.data) + len(n.Link))
	w.inodes[d.Ino] = n
}

func (w *world) write(path, data string) {
	w.change(path, func(n *node) { n.data, n.Mtime = data, n.Ctime })
}

func (w *world) chmod(path string, mode uint32) { w.change(path, func(n *node) { n.Mode = mode }) }

func (w *world) touch(path string) { w.change(path, func(n *node) { n.Mtime = n.Ctime }) }

func (w *world) setxattr(path, name, value string) {
	w.change(path, func(n *node) {
		n.Xattrs = slices.DeleteFunc(n.Xattrs, func(x tree.Xattr) bool { return x.Name == name })
		if value != "" {
			n.Xattrs = append(n.Xattrs, tree.Xattr{Name: name, Value: []byte(value)})
		}
		sort.Slice(n.Xattrs, func(i, j int) bool { return n.Xattrs[i].Name < n.Xattrs[j].Name })
	})
}

// remove is rm -r.
func (w *world) remove(path string) {
	k := w.key(path)
	if d := w.dirents[k]; d.Kind == tree.Dir {
		for key := range maps.Clone(w.dirents) {
			if key.Dir == d.Ino {
				w.remove(path + "/" + key.Name)
			}
		}
	}
	w.entry(k, 0)
}

func (w *world) rename(from, to string) {
	a, b := w.key(from), w.key(to)
	ino := w.dirents[a].Ino
	if w.dirents[b].Kind == tree.Dir {
		panic("rename over a directory")
	}
	w.entry(b, ino)
	w.entry(a, 0)
}

func (w *world) link(from, to string) {
	d, _ := w.find(from)
	w.entry(w.key(to), d.Ino)
}

// save is how editors write: a new file renamed over the old one.
func (w *world) save(path, data string) {
	d, _ := w.find(path)
	mode := w.inodes[d.Ino].Mode
	w.create(path+".tmp", data)
	w.chmod(path+".tmp", mode)
	w.rename(path+".tmp", path)
}

// delta is what a session's upper would say of w, taken over base.
func (w *world) delta(base *world) occ.Delta {
	var d occ.Delta
	keys := map[occ.Key]bool{}
	for k := range w.dirents {
		keys[k] = true
	}
	for k := range base.dirents {
		keys[k] = true
	}
	for k := range keys {
		b, s := base.dirents[k], w.dirents[k]
		if b.Ino != s.Ino {
			d.Dirents = append(d.Dirents, occ.DirentChange{Dir: k.Dir, Name: k.Name, Ino: s.Ino, Kind: s.Kind, Was: b.Ino})
		}
	}
	for ino, s := range w.inodes {
		b, old := base.inodes[ino]
		switch {
		case !old:
			d.Inodes = append(d.Inodes, occ.InodeChange{Inode: s.Inode, New: true, Data: true, Meta: true})
		case s.data != b.data:
			d.Inodes = append(d.Inodes, occ.InodeChange{Inode: s.Inode, Data: true})
		case s.Ctime != b.Ctime || s.Nlink != b.Nlink:
			d.Inodes = append(d.Inodes, occ.InodeChange{Inode: s.Inode, Meta: true})
		}
	}
	return d
}

// mark notes what changed since base as the commit after it.
func (w *world) mark(base *world) *world {
	w.number = base.number + 1
	d := w.delta(base)
	up := func(v *world, dir tree.Ino) {
		for dir != tree.RootIno {
			w.treeAt[dir] = w.number
			p, ok := v.parentOf(dir)
			if !ok {
				return
			}
			dir = p.Dir
		}
		w.treeAt[tree.RootIno] = w.number
	}
	for _, c := range d.Dirents {
		w.direntAt[occ.Key{Dir: c.Dir, Name: c.Name}] = w.number
		up(base, c.Dir)
		up(w, c.Dir)
	}
	for _, c := range d.Inodes {
		w.inodeAt[c.Ino] = w.number
		for _, v := range []*world{base, w} {
			names, _ := v.Names(c.Ino)
			for _, n := range names {
				up(v, n.Dir)
			}
		}
	}
	return w
}

// sealed is head with the verdict over it: what the layer would make.
func (w *world) sealed(t testing.TB, v *occ.Verdict, session *world) *world {
	t.Helper()
	out := w.clone()
	for _, p := range v.Inodes {
		n := node{Inode: p.Inode}
		switch p.From {
		case occ.FromSession:
			n.data = session.inodes[p.SessionIno].data
		case occ.FromHead:
			n.data = w.inodes[p.HeadIno].data
		case occ.FromMerged:
			n.data = string(p.Merged)
		}
		if p.Kind == tree.File && int(p.Size) != len(n.data) {
			t.Fatalf("plan of %q: size %d, content has %d bytes", p.Path, p.Size, len(n.data))
		}
		if n.Hash != (tree.Hash{}) && n.Hash != tree.Hash(sha256.Sum256([]byte(n.data))) {
			t.Fatalf("plan of %q: the hash is another content's", p.Path)
		}
		out.inodes[p.Ino] = n
	}
	for _, d := range v.Dirents {
		k := occ.Key{Dir: d.Dir, Name: d.Name}
		if d.Ino == 0 {
			delete(out.dirents, k)
		} else {
			out.dirents[k] = d
		}
	}
	out.mark(w)
	out.check(t)
	return out
}

// check is the file system check of a tree.
func (w *world) check(t testing.TB) {
	t.Helper()
	entries := map[tree.Ino]int{}
	for _, d := range w.dirents {
		if entries[d.Ino]++; d.Kind == tree.Dir && entries[d.Ino] > 1 {
			t.Fatalf("directory %d has an entry left behind, or two: %v", d.Ino, d)
		}
	}
	names, subdirs := map[tree.Ino]int{}, map[tree.Ino]int{}
	for k, d := range w.dirents {
		if !w.reachable(k.Dir) {
			continue
		}
		n, ok := w.inodes[d.Ino]
		if !ok {
			t.Fatalf("entry %v leads to no inode", d)
		}
		if n.Kind != d.Kind {
			t.Fatalf("entry %v leads to a %v", d, n.Kind)
		}
		names[d.Ino]++
		if d.Kind == tree.Dir {
			subdirs[d.Dir]++
		}
	}
	for ino, count := range names {
		n := w.inodes[ino]
		want := count
		if n.Kind == tree.Dir {
			want = 2 + subdirs[ino]
		}
		if int(n.Nlink) != want {
			p, _ := w.Path(ino)
			t.Fatalf("%q (inode %d) has link count %d, not %d\n%s", p, ino, n.Nlink, want, w)
		}
	}
}

// paths is the tree as a user sees it, times and inode numbers left out.
func (w *world) paths() map[string]string {
	out := map[string]string{}
	var walk func(dir tree.Ino, prefix string)
	walk = func(dir tree.Ino, prefix string) {
		for k, d := range w.dirents {
			if k.Dir != dir {
				continue
			}
			n := w.inodes[d.Ino]
			out[prefix+k.Name] = fmt.Sprintf("%v %o %q%s %v", n.Kind, n.Mode, n.data, n.Link, n.Xattrs)
			if d.Kind == tree.Dir {
				walk(d.Ino, prefix+k.Name+"/")
			}
		}
	}
	walk(tree.RootIno, "")
	return out
}

func (w *world) String() string {
	var out bytes.Buffer
	p := w.paths()
	for _, k := range slices.Sorted(maps.Keys(p)) {
		d, _ := w.find(k)
		fmt.Fprintf(&out, "  %-20s %3d %s\n", k, d.Ino, p[k])
	}
	return out.String()
}

// refreshed is the session with the plan carried out, as an overlay would.
func (w *world) refreshed(t testing.TB, plan *occ.Plan, base, head *world) *world {
	t.Helper()
	d := w.delta(base)
	out := head.clone()
	dropped, droppedInos := map[occ.Key]bool{}, map[tree.Ino]bool{}
	for _, k := range plan.DropDirents {
		dropped[k] = true
	}
	for _, ino := range plan.DropInodes {
		droppedInos[ino] = true
	}
	put := func(k occ.Key, e tree.Dirent) {
		if e.Ino == 0 {
			delete(out.dirents, k)
		} else {
			out.dirents[k] = e
		}
	}
	for _, c := range d.Dirents {
		if k := (occ.Key{Dir: c.Dir, Name: c.Name}); !dropped[k] {
			put(k, tree.Dirent{Dir: c.Dir, Name: c.Name, Ino: c.Ino, Kind: c.Kind})
		}
	}
	for _, e := range plan.Dirents {
		put(occ.Key{Dir: e.Dir, Name: e.Name}, e)
	}
	for _, c := range d.Inodes {
		if droppedInos[c.Ino] {
			continue
		}
		n := node{Inode: w.inodes[c.Ino].Inode, data: head.inodes[c.Ino].data}
		if c.Data {
			n.data = w.inodes[c.Ino].data
		}
		out.inodes[c.Ino] = n
	}
	for _, e := range plan.Inodes {
		n := node{Inode: e.Inode}
		switch e.From {
		case occ.FromSession:
			n.data = w.inodes[e.SessionIno].data
		case occ.FromHead:
			n.data = head.inodes[e.HeadIno].data
		case occ.FromMerged:
			n.data = string(e.Merged)
		}
		out.inodes[e.Ino] = n
	}
	out.check(t)
	return out
}
