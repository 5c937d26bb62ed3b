// Package stack shows the layers of a commit as one read-only tree. The base
// layer's index is read in place; everything committed since lives in one
// in-memory index that each commit clones in constant time, so that a lookup
// costs two probes at most, whatever the number of layers.
//
// The topmost record of a key wins: a whiteout hides the name beneath it, and
// an opaque record is taken, when its layer is applied, as a whiteout of every
// name its directory had. A directory that is removed and made again has a new
// inode number, so that what was in the old one stays unreachable.
//
// A Stack never changes and may be used by any number of goroutines. A
// layerfmt.CorruptError met on the way is returned as it is.
package stack

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/google/btree"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// Layer is one commit's layer. Commit 0 is the base.
type Layer struct {
	Commit uint64
	Reader *layerfmt.Reader
}

// Change is one key that a commit changed: a name when Dirent is set, otherwise
// the attributes or content of Inode.
type Change struct {
	Commit uint64
	Dirent *tree.Dirent // Ino 0: the name was removed. Not to be modified.
	Inode  tree.Ino
}

// Stats counts what a Stack holds in memory.
type Stats struct {
	Layers  int // with the base
	Dirents int // names put or hidden since the base
	Inodes  int // inodes with a record since the base
}

// File is the content of a regular file. Holes read as zeros. It is an alias, so
// that rooms which spell the same methods need no adapter.
type File = interface {
	io.ReaderAt
	// Size is the length in bytes.
	Size() uint64
	// Data is the first range that holds data at or after off; false when there
	// is none.
	Data(off uint64) (tree.Range, bool)
}

// Stack is the merged tree of all layers up to one commit.
type Stack struct {
	commit uint64
	base   *base

	// Clone renews a marker in the original, so that two at once need the lock;
	// readers look at other words and need none.
	mu      sync.Mutex
	layers  *btree.BTreeG[layer]
	packs   *btree.BTreeG[pack]
	dirents *btree.BTreeG[dirent]
	inodes  *btree.BTreeG[*inode]
	names   *btree.BTreeG[name]
	subtree *btree.BTreeG[subtree]
}

// base is what all stacks on one base layer share.
type base struct {
	reader *layerfmt.Reader
	max    tree.Ino // no inode above it is in the base

	mu    sync.Mutex
	links map[tree.Ino][]tree.Dirent // guarded by mu; all names of what has several, nil until asked for
}

// The items of the indexes. Each is keyed by its leading fields.
type (
	layer struct {
		commit  uint64
		reader  *layerfmt.Reader
		dirents []tree.Dirent // what it changed, in key order
		inodes  []tree.Ino
	}
	pack struct {
		id     layerfmt.PackID
		reader *layerfmt.Reader
	}
	dirent struct {
		dir    tree.Ino
		name   string
		ino    tree.Ino // 0: a whiteout
		kind   tree.Kind
		commit uint64
	}
	inode struct {
		ino    tree.Ino
		commit uint64
		reader *layerfmt.Reader
		record layerfmt.Inode
	}
	// name turns the live dirents of the index round.
	name struct {
		ino  tree.Ino
		dir  tree.Ino
		name string
	}
	subtree struct {
		dir    tree.Ino
		commit uint64
	}
)

const degree = 32

func compareKey(d1 tree.Ino, n1 string, d2 tree.Ino, n2 string) int {
	if d1 != d2 {
		return cmp.Compare(d1, d2)
	}
	return strings.Compare(n1, n2)
}

// New returns the tree of a base layer, commit 0.
func New(r *layerfmt.Reader) (*Stack, error) {
	root, ok, err := r.Inode(tree.RootIno)
	if err != nil {
		return nil, err
	}
	if !ok || root.Kind != tree.Dir {
		return nil, fmt.Errorf("layer %s has no root directory: %w", r.Name(), tree.ErrInvalid)
	}
	s := &Stack{
		base:   &base{reader: r, max: r.Info().MaxIno},
		layers: btree.NewG(degree, func(a, b layer) bool { return a.commit < b.commit }),
		packs:  btree.NewG(degree, func(a, b pack) bool { return bytes.Compare(a.id[:], b.id[:]) < 0 }),
		dirents: btree.NewG(degree, func(a, b dirent) bool {
			return compareKey(a.dir, a.name, b.dir, b.name) < 0
		}),
		inodes: btree.NewG(degree, func(a, b *inode) bool { return a.ino < b.ino }),
		names: btree.NewG(degree, func(a, b name) bool {
			if a.ino != b.ino {
				return a.ino < b.ino
			}
			return compareKey(a.dir, a.name, b.dir, b.name) < 0
		}),
		subtree: btree.NewG(degree, func(a, b subtree) bool { return a.dir < b.dir }),
	}
	s.layers.ReplaceOrInsert(layer{reader: r})
	s.packs.ReplaceOrInsert(pack{id: r.ID(), reader: r})
	return s, nil
}

// clone returns a stack that shares everything with s until it is changed.
func (s *Stack) clone() *Stack {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &Stack{
		commit:  s.commit,
		base:    s.base,
		layers:  s.layers.Clone(),
		packs:   s.packs.Clone(),
		dirents: s.dirents.Clone(),
		inodes:  s.inodes.Clone(),
		names:   s.names.Clone(),
		subtree: s.subtree.Clone(),
	}
}

// Commit is the number of the newest layer.
func (s *Stack) Commit() uint64 { return s.commit }

// Layer returns the layer of a commit, nil when the stack does not reach it.
func (s *Stack) Layer(commit uint64) *layerfmt.Reader {
	l, _ := s.layers.Get(layer{commit: commit})
	return l.reader
}

// Layers returns all layers, the base first.
func (s *Stack) Layers() []Layer {
	out := make([]Layer, 0, s.layers.Len())
	s.layers.Ascend(func(l layer) bool {
		out = append(out, Layer{Commit: l.commit, Reader: l.reader})
		return true
	})
	return out
}

// Stats counts what the stack holds in memory.
func (s *Stack) Stats() Stats {
	return Stats{Layers: s.layers.Len(), Dirents: s.dirents.Len(), Inodes: s.inodes.Len()}
}

// Lookup finds a name in a directory: tree.ErrNotExist when it is absent. It
// does not ask whether the directory itself is still in the tree.
func (s *Stack) Lookup(dir tree.Ino, name string) (tree.Dirent, error) {
	if d, ok := s.dirents.Get(dirent{dir: dir, name: name}); ok {
		if d.ino == 0 {
			return tree.Dirent{}, tree.ErrNotExist
		}
		return d.tree(), nil
	}
	if dir > s.base.max {
		return tree.Dirent{}, tree.ErrNotExist
	}
	d, ok, err := s.base.reader.Lookup(dir, name)
	if err != nil {
		return tree.Dirent{}, err
	}
	if !ok || d.Op != layerfmt.Put {
		return tree.Dirent{}, tree.ErrNotExist
	}
	return d.Dirent, nil
}

func (d dirent) tree() tree.Dirent {
	return tree.Dirent{Dir: d.dir, Name: d.name, Ino: d.ino, Kind: d.kind}
}

// Inode returns what is known of an inode, or tree.ErrNotExist. Inodes without
// a name are answered as well: a name may be gone while its file is open.
func (s *Stack) Inode(ino tree.Ino) (tree.Inode, error) {
	n, _, _, err := s.record(ino)
	return n.Inode, err
}

// record finds the current record of an inode and the layer it is in.
func (s *Stack) record(ino tree.Ino) (layerfmt.Inode, uint64, *layerfmt.Reader, error) {
	if n, ok := s.inodes.Get(&inode{ino: ino}); ok {
		return n.record, n.commit, n.reader, nil
	}
	if ino > s.base.max {
		return layerfmt.Inode{}, 0, nil, tree.ErrNotExist
	}
	n, ok, err := s.base.reader.Inode(ino)
	if err == nil && !ok {
		err = tree.ErrNotExist
	}
	return n, 0, s.base.reader, err
}

// Holder returns the layer that holds the current record of an inode.
func (s *Stack) Holder(ino tree.Ino) (commit uint64, r *layerfmt.Reader, err error) {
	_, commit, r, err = s.record(ino)
	if err != nil {
		return 0, nil, err
	}
	return commit, r, nil
}

// Locate returns the pack that holds the bytes of an inode, and the number the
// inode has there. The pack is zero when there are no bytes.
func (s *Stack) Locate(ino tree.Ino) (layerfmt.PackID, tree.Ino, error) {
	n, _, r, err := s.record(ino)
	if err != nil {
		return layerfmt.PackID{}, 0, err
	}
	switch n.Content {
	case layerfmt.Here:
		return r.ID(), ino, nil
	case layerfmt.Foreign:
		if n.FromIno != 0 {
			ino = n.FromIno
		}
		return n.Pack, ino, nil
	default:
		return layerfmt.PackID{}, 0, nil
	}
}

// Open returns the content of a regular file: tree.ErrIsDir for a directory,
// tree.ErrInvalid for anything else.
func (s *Stack) Open(ino tree.Ino) (File, error) {
	n, _, r, err := s.record(ino)
	switch {
	case err != nil:
		return nil, err
	case n.Kind == tree.Dir:
		return nil, tree.ErrIsDir
	case n.Kind != tree.File:
		return nil, fmt.Errorf("open a %s: %w", n.Kind, tree.ErrInvalid)
	}
	switch n.Content {
	case layerfmt.Here:
		return openIn(r, n)
	case layerfmt.Foreign:
		return s.openForeign(r, n)
	default:
		return empty{}, nil
	}
}

func openIn(r *layerfmt.Reader, n layerfmt.Inode) (File, error) {
	f, err := r.File(n)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// openForeign follows a record to the pack that holds its bytes. That they are
// the bytes the record speaks of is checked by hash and size, because the two
// packs know nothing of each other.
func (s *Stack) openForeign(r *layerfmt.Reader, n layerfmt.Inode) (File, error) {
	corrupt := func(reason string) error {
		return &layerfmt.CorruptError{
			Layer: r.Name(), Section: "inodes",
			Reason: fmt.Sprintf("content of inode %d in pack %s: %s", n.Ino, n.Pack, reason),
		}
	}
	from := n.FromIno
	if from == 0 {
		from = n.Ino
	}
	p, ok := s.packs.Get(pack{id: n.Pack})
	if !ok {
		return nil, corrupt("no layer of the stack is that pack")
	}
	held, ok, err := p.reader.Inode(from)
	switch {
	case err != nil:
		return nil, err
	case !ok || held.Content != layerfmt.Here:
		return nil, corrupt(fmt.Sprintf("the pack holds no bytes of inode %d", from))
	case held.Hash != n.Hash || held.Size != n.Size:
		return nil, corrupt(fmt.Sprintf("the pack holds other bytes of inode %d", from))
	}
	return openIn(p.reader, held)
}

// empty is the content of a file without bytes.
type empty struct{}

func (empty) ReadAt([]byte, int64) (int, error) { return 0, io.EOF }
func (empty) Size() uint64                      { return 0 }
func (empty) Data(uint64) (tree.Range, bool)    { return tree.Range{}, false }

// ReadDir calls fn for the names of a directory from the given one on, in byte
// order, until fn returns false. Like Lookup it does not ask whether the
// directory is still in the tree; an unknown one is empty.
func (s *Stack) ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error {
	c := cursor{tree: s.dirents, dir: dir, from: from}
	if dir > s.base.max {
		c.drain(fn)
		return nil
	}
	stopped := false
	err := s.base.reader.Dirents(dir, from, func(d layerfmt.Dirent) bool {
		// The index's names that sort before the base's come first, and one that
		// is equal replaces it.
		for {
			e, ok := c.peek()
			if !ok || e.name > d.Name {
				break
			}
			c.next()
			if e.ino != 0 && !fn(e.tree()) {
				stopped = true
				return false
			}
			if e.name == d.Name {
				return true
			}
		}
		if d.Op == layerfmt.Put && !fn(d.Dirent) {
			stopped = true
		}
		return !stopped
	})
	if err != nil || stopped {
		return err
	}
	c.drain(fn)
	return nil
}

// cursor walks one directory's items in the index, a few at a time, so that a
// listing that stops early has not touched the rest.
type cursor struct {
	tree *btree.BTreeG[dirent]
	dir  tree.Ino
	from string // the next item's name is not below it
	buf  []dirent
	done bool // nothing is left beyond buf
}

func (c *cursor) peek() (dirent, bool) {
	if len(c.buf) == 0 && !c.done {
		const batch = 64
		if c.buf == nil {
			c.buf = make([]dirent, 0, batch)
		}
		c.buf = c.buf[:0:cap(c.buf)]
		c.done = true
		c.tree.AscendGreaterOrEqual(dirent{dir: c.dir, name: c.from}, func(d dirent) bool {
			if d.dir != c.dir {
				return false
			}
			if len(c.buf) == batch {
				c.from, c.done = d.name, false
				return false
			}
			c.buf = append(c.buf, d)
			return true
		})
	}
	if len(c.buf) == 0 {
		return dirent{}, false
	}
	return c.buf[0], true
}

func (c *cursor) next() { c.buf = c.buf[1:] }

func (c *cursor) drain(fn func(tree.Dirent) bool) {
	for {
		d, ok := c.peek()
		if !ok {
			return
		}
		c.next()
		if d.ino != 0 && !fn(d.tree()) {
			return
		}
	}
}

// DirentChanged is the last commit that put or removed a name, 0 when none has
// since the base.
func (s *Stack) DirentChanged(dir tree.Ino, name string) uint64 {
	d, _ := s.dirents.Get(dirent{dir: dir, name: name})
	return d.commit
}

// InodeChanged is the last commit with a record of an inode, 0 when there is
// none since the base.
func (s *Stack) InodeChanged(ino tree.Ino) uint64 {
	if n, ok := s.inodes.Get(&inode{ino: ino}); ok {
		return n.commit
	}
	return 0
}

// SubtreeChanged is the last commit that changed a name in, or an inode below,
// a directory or any directory beneath it; 0 when none has since the base. The
// directory's own name and attributes do not count. What was moved out of it
// or into it does.
func (s *Stack) SubtreeChanged(dir tree.Ino) uint64 {
	t, _ := s.subtree.Get(subtree{dir: dir})
	return t.commit
}

// Changes calls fn for every key changed after commit since, oldest commit
// first, until fn returns false. A key changed by several commits is told once
// for each. An opaque record is told as the names it hid.
func (s *Stack) Changes(since uint64, fn func(Change) bool) {
	s.layers.AscendGreaterOrEqual(layer{commit: since + 1}, func(l layer) bool {
		for i := range l.dirents {
			if !fn(Change{Commit: l.commit, Dirent: &l.dirents[i]}) {
				return false
			}
		}
		for _, ino := range l.inodes {
			if !fn(Change{Commit: l.commit, Inode: ino}) {
				return false
			}
		}
		return true
	})
}

// Names returns every name that leads from the root to an inode, sorted by
// directory and name. The root has none. The first call for a file with several
// names in the base reads all names of the base once.
func (s *Stack) Names(ino tree.Ino) ([]tree.Dirent, error) {
	all, err := s.rawNames(ino)
	if err != nil {
		return nil, err
	}
	live := all[:0]
	for _, d := range all {
		_, ok, err := s.climb(d.Dir)
		if err != nil {
			return nil, err
		}
		if ok {
			live = append(live, d)
		}
	}
	return live, nil
}

// rawNames is Names with those in directories that are no longer in the tree.
func (s *Stack) rawNames(ino tree.Ino) ([]tree.Dirent, error) {
	var out []tree.Dirent
	s.names.AscendGreaterOrEqual(name{ino: ino}, func(n name) bool {
		if n.ino != ino {
			return false
		}
		if d, ok := s.dirents.Get(dirent{dir: n.dir, name: n.name}); ok {
			out = append(out, d.tree())
		}
		return true
	})
	if ino > s.base.max {
		return out, nil
	}
	beneath, err := s.base.names(ino)
	if err != nil {
		return nil, err
	}
	for _, d := range beneath {
		if !s.dirents.Has(dirent{dir: d.Dir, name: d.Name}) {
			out = append(out, d)
		}
	}
	slices.SortFunc(out, compareDirent)
	return out, nil
}

func compareDirent(a, b tree.Dirent) int { return compareKey(a.Dir, a.Name, b.Dir, b.Name) }

// names returns the names the base has for an inode.
func (b *base) names(ino tree.Ino) ([]tree.Dirent, error) {
	n, ok, err := b.reader.Inode(ino)
	if err != nil || !ok {
		return nil, err
	}
	if n.Kind != tree.Dir && n.Nlink > 1 {
		links, err := b.allLinks()
		return links[ino], err
	}
	d, ok, err := b.reader.Parent(ino)
	if err != nil || !ok {
		return nil, err
	}
	return []tree.Dirent{d}, nil
}

// allLinks reads all names of the base once. Hard links are rare, so that no
// base has to carry an index for them.
func (b *base) allLinks() (map[tree.Ino][]tree.Dirent, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.links != nil {
		return b.links, nil
	}
	several := make(map[tree.Ino][]tree.Dirent)
	err := b.reader.AllInodes(func(n layerfmt.Inode) bool {
		if n.Kind != tree.Dir && n.Nlink > 1 {
			several[n.Ino] = nil
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	err = b.reader.AllDirents(func(d layerfmt.Dirent) bool {
		if names, ok := several[d.Ino]; ok && d.Op == layerfmt.Put {
			several[d.Ino] = append(names, d.Dirent)
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	b.links = several
	return several, nil
}

// parent returns the one name of a directory.
func (s *Stack) parent(dir tree.Ino) (d tree.Dirent, ok bool, err error) {
	s.names.AscendGreaterOrEqual(name{ino: dir}, func(n name) bool {
		if n.ino == dir {
			d, ok = tree.Dirent{Dir: n.dir, Name: n.name, Ino: dir, Kind: tree.Dir}, true
		}
		return false
	})
	if ok || dir > s.base.max {
		return d, ok, nil
	}
	d, ok, err = s.base.reader.Parent(dir)
	if err != nil || !ok || s.dirents.Has(dirent{dir: d.Dir, name: d.Name}) {
		return tree.Dirent{}, false, err
	}
	return d, true, nil
}

// climb follows a directory to the root. It returns the names on the way, the
// directory's own first, and whether the root was reached.
func (s *Stack) climb(dir tree.Ino) ([]string, bool, error) {
	var names []string
	// A damaged base could lead in a circle. Each time the distance has doubled
	// the place is remembered; to come past it again is to be in one.
	seen, stride := dir, 1
	for dir != tree.RootIno {
		up, ok, err := s.parent(dir)
		if err != nil || !ok {
			return nil, false, err
		}
		names = append(names, up.Name)
		dir = up.Dir
		if dir == seen {
			return nil, false, nil
		}
		if len(names) == stride {
			seen, stride = dir, stride*2
		}
	}
	return names, true, nil
}

// Path returns a path from the root to an inode, "a/b"; the root's is "". Of
// several it is the one whose name sorts first. tree.ErrNotExist when no name
// leads there.
func (s *Stack) Path(ino tree.Ino) (string, error) {
	if ino == tree.RootIno {
		return "", nil
	}
	all, err := s.rawNames(ino)
	if err != nil {
		return "", err
	}
	for _, d := range all {
		names, ok, err := s.climb(d.Dir)
		if err != nil {
			return "", err
		}
		if ok {
			slices.Reverse(names)
			return strings.Join(append(names, d.Name), "/"), nil
		}
	}
	return "", tree.ErrNotExist
}

// Resolve follows a path from the root. No symbolic link is followed: one in
// the middle answers tree.ErrNotDir. The root's own dirent has neither
// directory nor name.
func (s *Stack) Resolve(path string) (tree.Dirent, error) {
	names, err := tree.SplitPath(path)
	if err != nil {
		return tree.Dirent{}, err
	}
	at := tree.Dirent{Ino: tree.RootIno, Kind: tree.Dir}
	for _, name := range names {
		if at.Kind != tree.Dir {
			return tree.Dirent{}, tree.ErrNotDir
		}
		if at, err = s.Lookup(at.Ino, name); err != nil {
			return tree.Dirent{}, err
		}
	}
	return at, nil
}
