package overlay

import (
	"errors"
	"fmt"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"
)

// txn gathers the changes of one operation, made on copies, and commits them as
// one journal frame. It lives under FS.mu held exclusively.
type txn struct {
	f      *FS
	c      Caller
	now    tree.Time
	result tree.Ino

	inodes  []*upper.Inode // staged copies, in order of first use
	dropped map[tree.Ino]bool
	changes []upper.Change // everything but inode records; after these in the frame
	unused  []upper.Unused // to discard once the frame is in
	moved   []tree.Ino     // directories whose listings change
}

func (f *FS) begin(c Caller) *txn { return &txn{f: f, c: c, now: f.now()} }

// stage copies a record for change.
func (t *txn) stage(n *upper.Inode) *upper.Inode {
	for _, s := range t.inodes {
		if s.Ino == n.Ino {
			return s
		}
	}
	n2 := *n
	t.inodes = append(t.inodes, &n2)
	return &n2
}

// inode stages the record of ino, which is copied up when it has none.
func (t *txn) inode(ino tree.Ino) (*upper.Inode, error) {
	for _, s := range t.inodes {
		if s.Ino == ino {
			return s, nil
		}
	}
	n, err := t.f.record(ino)
	if err != nil {
		return nil, err
	}
	return t.stage(n), nil
}

// dir stages the record of a directory that still has its name.
func (t *txn) dir(ino tree.Ino) (*upper.Inode, error) {
	n, err := t.inode(ino)
	if err != nil {
		return nil, err
	}
	if n.Kind != tree.Dir {
		return nil, fmt.Errorf("inode %d: %w", ino, tree.ErrNotDir)
	}
	if n.Nlink == 0 {
		return nil, fmt.Errorf("directory %d was removed: %w", ino, tree.ErrNotExist)
	}
	return n, nil
}

// touch notes that the entries of dir changed.
func (t *txn) touch(dir *upper.Inode) {
	dir.Mtime, dir.Ctime = t.now, t.now
	t.moved = append(t.moved, dir.Ino)
}

// setName makes name stand for ino. Where the lower tree says the same already,
// no record is needed.
func (t *txn) setName(dir *upper.Inode, name string, ino tree.Ino, kind tree.Kind) error {
	low, ok, err := t.f.lowerName(dir.Ino, name)
	if err != nil {
		return err
	}
	d := tree.Dirent{Dir: dir.Ino, Name: name, Ino: ino, Kind: kind}
	if ok && low.Ino == ino && low.Kind == kind {
		t.changes = append(t.changes, upper.Change{Type: upper.DropDirent, Dirent: upper.Dirent{Dirent: d}})
	} else {
		t.changes = append(t.changes, upper.Change{Type: upper.PutDirent, Dirent: upper.Dirent{Dirent: d}})
	}
	t.touch(dir)
	return nil
}

// clearName removes name. removed is the lower inode whose content goes with
// it, which a later file of that name continues; 0 for none.
func (t *txn) clearName(dir *upper.Inode, name string, removed tree.Ino) error {
	_, ok, err := t.f.lowerName(dir.Ino, name)
	if err != nil {
		return err
	}
	d := upper.Dirent{Dirent: tree.Dirent{Dir: dir.Ino, Name: name}, Removed: removed}
	if ok || removed != 0 {
		t.changes = append(t.changes, upper.Change{Type: upper.PutDirent, Dirent: d})
	} else {
		t.changes = append(t.changes, upper.Change{Type: upper.DropDirent, Dirent: d})
	}
	t.touch(dir)
	return nil
}

// unlinked takes one name away from n. held is the number of references to its
// handle that the caller itself has.
func (t *txn) unlinked(n *upper.Inode, held int) {
	n.Ctime = t.now
	if n.Kind == tree.Dir {
		n.Nlink = 0
	} else {
		n.Nlink--
	}
	if n.Nlink == 0 && !t.f.kept[n.Ino] && t.f.handles.refs(n.Ino) <= held {
		t.bury(n)
	}
}

// bury forgets an inode that nothing refers to. Of a lower inode a record stays
// that says it is gone, for a node id may still be about.
func (t *txn) bury(n *upper.Inode) {
	if n.Data {
		t.discard(n)
	}
	if !n.New {
		n.Data, n.Written, n.Shown, n.Gen = false, false, 0, 0
		return
	}
	if t.dropped == nil {
		t.dropped = map[tree.Ino]bool{}
	}
	t.dropped[n.Ino] = true
	t.f.dirty.remove(n.Ino)
	t.changes = append(t.changes, upper.Change{Type: upper.DropInode, Ino: n.Ino})
	if n.Kind == tree.Dir {
		// Names that were hidden or remembered in it mean nothing any more.
		t.f.up.Dirents(n.Ino, "", func(d *upper.Dirent) bool {
			t.changes = append(t.changes, upper.Change{Type: upper.DropDirent, Dirent: *d})
			return true
		})
	}
}

// commit journals and applies what was staged. When it fails nothing changed.
func (t *txn) commit() error { return t.commitReserved(0) }

// commitReserved is commit for a write that reserved bytes of the quota.
func (t *txn) commitReserved(reserved uint64) error {
	f := upper.Frame{Op: t.c.Op, Request: t.c.Request, Result: t.result}
	for _, n := range t.inodes {
		if !t.dropped[n.Ino] {
			f.Changes = append(f.Changes, upper.Change{Type: upper.PutInode, Inode: n})
		}
	}
	f.Changes = append(f.Changes, t.changes...)
	var err error
	if len(f.Changes) > 0 {
		err = t.f.up.Commit(f)
	}
	t.f.settleQuota(reserved)
	if err != nil {
		return hostErr("record the change", err)
	}
	for _, dir := range t.moved {
		t.f.listings.changed(dir)
	}
	return nil
}

// discard notes that the data file of n has no owner any more. The caller holds
// mu exclusively.
func (t *txn) discard(n *upper.Inode) {
	t.unused = append(t.unused, upper.Unused{Ino: n.Ino, Gen: n.Gen, Bytes: n.Extents().Private()})
}

// removeData gives up the data files that the committed frame left without an
// owner. They go once the frame is durable. What a crash or an error leaves of
// them costs space until the sweep at the next open; the operation itself is
// done, so nobody is told.
func (t *txn) removeData() { t.f.up.Discard(t.unused) }

// record gives the upper's record of ino, or one made from the lower inode. The
// caller holds mu and does not change what it gets.
func (f *FS) record(ino tree.Ino) (*upper.Inode, error) {
	if n := f.up.Inode(ino); n != nil {
		return n, nil
	}
	low, err := f.lower.Inode(ino)
	if errors.Is(err, tree.ErrNotExist) {
		return nil, fmt.Errorf("inode %d: %w", ino, tree.ErrStale)
	}
	if err != nil {
		return nil, fmt.Errorf("inode %d: %w", ino, err)
	}
	return &upper.Inode{Inode: low}, nil
}

// lowerName is what the lower tree has at a name, whatever the session did to
// the name. The caller holds mu.
func (f *FS) lowerName(dir tree.Ino, name string) (tree.Dirent, bool, error) {
	if n := f.up.Inode(dir); n != nil && n.New {
		return tree.Dirent{}, false, nil
	}
	d, err := f.lower.Lookup(dir, name)
	if errors.Is(err, tree.ErrNotExist) {
		return tree.Dirent{}, false, nil
	}
	if err != nil {
		return tree.Dirent{}, false, fmt.Errorf("look %q up in %d: %w", name, dir, err)
	}
	return d, true, nil
}

// name is what the session has at a name. The caller holds mu.
func (f *FS) name(dir tree.Ino, name string) (tree.Dirent, bool, error) {
	if d := f.up.Dirent(dir, name); d != nil {
		return d.Dirent, d.Ino != 0, nil
	}
	return f.lowerName(dir, name)
}

// origin is the lower inode whose content n continues, 0 for none.
func origin(n *upper.Inode) tree.Ino {
	if n.New {
		return n.Lineage
	}
	return n.Ino
}
