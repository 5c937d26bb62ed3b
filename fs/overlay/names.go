package overlay

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"
)

const (
	setGID   = 0o2000
	setUID   = 0o4000
	groupX   = 0o0010
	modeBits = 0o7777

	maxLinks = math.MaxInt32
)

// dirRecord is the record of a directory. The caller holds mu.
func (f *FS) dirRecord(ino tree.Ino) (*upper.Inode, error) {
	n, err := f.record(ino)
	if err == nil && n.Kind != tree.Dir {
		return nil, fmt.Errorf("inode %d: %w", ino, tree.ErrNotDir)
	}
	return n, err
}

// Lookup finds a name: tree.ErrNotExist when it is absent, tree.ErrNotDir when
// parent is no directory.
func (f *FS) Lookup(parent tree.Ino, name string) (tree.Attr, error) {
	if len(name) > tree.MaxName {
		return tree.Attr{}, fmt.Errorf("name of %d bytes: %w", len(name), tree.ErrNameTooLong)
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	d, ok, err := f.name(parent, name)
	if err != nil {
		return tree.Attr{}, err
	}
	if !ok {
		if _, err := f.dirRecord(parent); err != nil {
			return tree.Attr{}, err
		}
		return tree.Attr{}, fmt.Errorf("%q in %d: %w", name, parent, tree.ErrNotExist)
	}
	n, err := f.record(d.Ino)
	if err != nil {
		return tree.Attr{}, err
	}
	return n.Attr, nil
}

// Resolve walks a path from the root without following symlinks.
func (f *FS) Resolve(path string) (tree.Dirent, error) {
	names, err := tree.SplitPath(path)
	if err != nil {
		return tree.Dirent{}, err
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	at := tree.Dirent{Ino: tree.RootIno, Kind: tree.Dir}
	for _, name := range names {
		if at.Kind != tree.Dir {
			return tree.Dirent{}, fmt.Errorf("path %q at %q: %w", path, at.Name, tree.ErrNotDir)
		}
		next, ok, err := f.name(at.Ino, name)
		if err != nil {
			return tree.Dirent{}, err
		}
		if !ok {
			return tree.Dirent{}, fmt.Errorf("path %q at %q: %w", path, name, tree.ErrNotExist)
		}
		at = next
	}
	return at, nil
}

// Names gives every name of ino in the session; none when it was removed.
func (f *FS) Names(ino tree.Ino) ([]tree.Dirent, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.namesOf(ino)
}

func (f *FS) namesOf(ino tree.Ino) ([]tree.Dirent, error) {
	names := f.up.Names(ino)
	if n := f.up.Inode(ino); n != nil && n.New {
		return names, nil
	}
	low, err := f.lower.Names(ino)
	if err != nil && !errors.Is(err, tree.ErrNotExist) {
		return nil, fmt.Errorf("names of inode %d: %w", ino, err)
	}
	for _, d := range low {
		if f.up.Dirent(d.Dir, d.Name) == nil {
			names = append(names, d)
		}
	}
	return names, nil
}

// Path is where ino is now, without a leading slash; the root's is empty. Of
// several names it is any one. tree.ErrNotExist when ino has no name.
func (f *FS) Path(ino tree.Ino) (string, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var parts []string
	for at := ino; at != tree.RootIno; {
		d, err := f.someName(at)
		if err != nil {
			return "", fmt.Errorf("path of inode %d: %w", ino, err)
		}
		parts = append(parts, d.Name)
		at = d.Dir
	}
	for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
		parts[i], parts[j] = parts[j], parts[i]
	}
	return strings.Join(parts, "/"), nil
}

func (f *FS) someName(ino tree.Ino) (tree.Dirent, error) {
	names, err := f.namesOf(ino)
	if err != nil {
		return tree.Dirent{}, err
	}
	if len(names) == 0 {
		return tree.Dirent{}, fmt.Errorf("inode %d has no name: %w", ino, tree.ErrNotExist)
	}
	return names[0], nil
}

// Parent is the directory that holds directory dir; the root's is the root.
func (f *FS) Parent(dir tree.Ino) (tree.Ino, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.parent(dir)
}

func (f *FS) parent(dir tree.Ino) (tree.Ino, error) {
	if dir == tree.RootIno {
		return dir, nil
	}
	d, err := f.someName(dir)
	return d.Dir, err
}

// within tells whether dir is top or lies beneath it.
func (f *FS) within(dir, top tree.Ino) (bool, error) {
	for {
		if dir == top {
			return true, nil
		}
		if dir == tree.RootIno {
			return false, nil
		}
		up, err := f.parent(dir)
		if err != nil {
			return false, err
		}
		dir = up
	}
}

// absent answers tree.ErrExist when parent has the name, and what else speaks
// against making it.
func (f *FS) absent(parent tree.Ino, name string) error {
	if err := tree.CheckName(name); err != nil {
		return err
	}
	n, err := f.dirRecord(parent)
	if err != nil {
		return err
	}
	if n.Nlink == 0 {
		return fmt.Errorf("directory %d was removed: %w", parent, tree.ErrNotExist)
	}
	if _, ok, err := f.name(parent, name); err != nil {
		return err
	} else if ok {
		return fmt.Errorf("%q in %d: %w", name, parent, tree.ErrExist)
	}
	return nil
}

// fresh allots the inode for a new name. It asks for a number outside mu, for
// that may take a disk write, and only when the name seems to be free.
func (f *FS) fresh(parent tree.Ino, name string) (tree.Ino, error) {
	f.mu.RLock()
	err := f.absent(parent, name)
	f.mu.RUnlock()
	if err != nil {
		return 0, err
	}
	ino, err := f.newIno()
	if err != nil {
		return 0, fmt.Errorf("allot an inode number: %w", err)
	}
	return ino, nil
}

// newInode stages an inode that c makes in dir.
func (t *txn) newInode(ino tree.Ino, dir *upper.Inode, kind tree.Kind, mode uint32) (*upper.Inode, error) {
	if limit := t.f.limit.Inodes; limit != 0 {
		if _, made := t.f.up.Usage(); made >= limit {
			return nil, fmt.Errorf("one inode more than %d: %w", made, tree.ErrQuota)
		}
	}
	n := &upper.Inode{New: true, Data: kind == tree.File, LastOp: t.c.Op}
	n.Ino, n.Kind, n.Mode = ino, kind, mode&modeBits
	n.UID, n.GID, n.Nlink = t.c.UID, t.c.GID, 1
	n.Mtime, n.Ctime = t.now, t.now
	if dir.Mode&setGID != 0 {
		n.GID = dir.GID
		if kind == tree.Dir {
			n.Mode |= setGID
		}
	}
	if kind == tree.Dir {
		n.Nlink = 2
	}
	t.result = ino
	return t.stage(n), nil
}

// make makes a new inode with a name. fill sets what is particular to it.
func (f *FS) make(c Caller, parent tree.Ino, name string, kind tree.Kind, mode uint32, fill func(*upper.Inode)) (tree.Attr, error) {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	ino, err := f.fresh(parent, name)
	if err != nil {
		return tree.Attr{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.absent(parent, name); err != nil {
		return tree.Attr{}, err
	}
	t := f.begin(c)
	dir, err := t.dir(parent)
	if err != nil {
		return tree.Attr{}, err
	}
	n, err := t.newInode(ino, dir, kind, mode)
	if err != nil {
		return tree.Attr{}, err
	}
	if fill != nil {
		fill(n)
	}
	if err := f.room(uint64(len(n.Link))); err != nil {
		return tree.Attr{}, err
	}
	if kind == tree.Dir {
		dir.Nlink++
	}
	if old := f.up.Dirent(parent, name); old != nil && kind == tree.File {
		n.Lineage, n.Prior = old.Removed, old.Removed
	}
	if err := t.setName(dir, name, ino, kind); err != nil {
		return tree.Attr{}, err
	}
	if err := t.commit(); err != nil {
		return tree.Attr{}, err
	}
	return n.Attr, nil
}

// room answers tree.ErrQuota when n bytes of metadata are too many. The caller
// holds mu.
func (f *FS) room(n uint64) error {
	if err := f.reserve(n); err != nil {
		return err
	}
	f.unreserve(n)
	return nil
}

// Create makes a regular file; tree.ErrExist when the name is taken.
func (f *FS) Create(c Caller, parent tree.Ino, name string, mode uint32) (tree.Attr, error) {
	return f.make(c, parent, name, tree.File, mode, nil)
}

// Mknod makes a regular file, fifo, socket or device. rdev is in Linux encoding.
func (f *FS) Mknod(c Caller, parent tree.Ino, name string, kind tree.Kind, mode, rdev uint32) (tree.Attr, error) {
	if !kind.Valid() || kind == tree.Dir || kind == tree.Symlink {
		return tree.Attr{}, fmt.Errorf("make a node of kind %v: %w", kind, tree.ErrInvalid)
	}
	return f.make(c, parent, name, kind, mode, func(n *upper.Inode) {
		if kind == tree.Char || kind == tree.Block {
			n.Rdev = rdev
		}
	})
}

// Mkdir makes a directory.
func (f *FS) Mkdir(c Caller, parent tree.Ino, name string, mode uint32) (tree.Attr, error) {
	return f.make(c, parent, name, tree.Dir, mode, nil)
}

// Symlink makes a symbolic link; a target is 1 to 4095 bytes.
func (f *FS) Symlink(c Caller, parent tree.Ino, name, target string) (tree.Attr, error) {
	if target == "" {
		return tree.Attr{}, fmt.Errorf("empty symlink target: %w", tree.ErrNotExist)
	}
	if len(target) > tree.MaxLink {
		return tree.Attr{}, fmt.Errorf("symlink target of %d bytes: %w", len(target), tree.ErrNameTooLong)
	}
	return f.make(c, parent, name, tree.Symlink, 0o777, func(n *upper.Inode) {
		n.Link, n.Size = target, uint64(len(target))
	})
}

// Tmpfile makes a regular file without a name, owned as if made in parent, that
// Link may name later. The caller holds it open: it has been acquired once.
func (f *FS) Tmpfile(c Caller, parent tree.Ino, mode uint32) (tree.Attr, error) {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	ino, err := f.newIno()
	if err != nil {
		return tree.Attr{}, fmt.Errorf("allot an inode number: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	dir, err := f.dirRecord(parent)
	if err != nil {
		return tree.Attr{}, err
	}
	t := f.begin(c)
	n, err := t.newInode(ino, dir, tree.File, mode)
	if err != nil {
		return tree.Attr{}, err
	}
	n.Nlink, n.Linkable = 0, true
	f.handles.grab(ino)
	if err := t.commit(); err != nil {
		f.handles.drop(ino)
		return tree.Attr{}, err
	}
	return n.Attr, nil
}

// Link gives an inode another name. Directories cannot have two (tree.ErrPerm),
// and what lost its last name gets none (tree.ErrNotExist) unless it is a
// Tmpfile's.
func (f *FS) Link(c Caller, ino, parent tree.Ino, name string) (tree.Attr, error) {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.absent(parent, name); err != nil {
		return tree.Attr{}, err
	}
	t := f.begin(c)
	n, err := t.linkable(ino)
	if err != nil {
		return tree.Attr{}, err
	}
	dir, err := t.dir(parent)
	if err != nil {
		return tree.Attr{}, err
	}
	if err := t.link(n, dir, name); err != nil {
		return tree.Attr{}, err
	}
	if err := t.commit(); err != nil {
		return tree.Attr{}, err
	}
	return n.Attr, nil
}

// linkable stages an inode that may get one more name.
func (t *txn) linkable(ino tree.Ino) (*upper.Inode, error) {
	n, err := t.inode(ino)
	if err != nil {
		return nil, err
	}
	switch {
	case n.Kind == tree.Dir:
		return nil, fmt.Errorf("link to directory %d: %w", ino, tree.ErrPerm)
	case n.Nlink == 0 && !n.Linkable:
		return nil, fmt.Errorf("link to removed inode %d: %w", ino, tree.ErrNotExist)
	case n.Nlink >= maxLinks:
		return nil, fmt.Errorf("link to inode %d: %w", ino, tree.ErrTooManyLink)
	}
	return n, nil
}

// link gives n a name that is free or has been unlinked.
func (t *txn) link(n, dir *upper.Inode, name string) error {
	n.Nlink++
	n.Linkable = false
	n.Ctime = t.now
	t.result = n.Ino
	return t.setName(dir, name, n.Ino, n.Kind)
}

// Replace names a Tmpfile's inode that has no name yet, in place of what has
// the name. It is Link to a temporary name and Rename from there in one step:
// the temporary name never exists, and after a crash the name stands for the
// old inode or for the new. A directory of that name is tree.ErrIsDir, an inode
// that has a name already is tree.ErrInvalid; else the answers are those of Link
// and Rename.
func (f *FS) Replace(c Caller, ino, parent tree.Ino, name string) error {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	return f.removing(c, parent, name, func(held int) (*txn, error) {
		t := f.begin(c)
		if err := t.replace(ino, parent, name, held); err != nil {
			return nil, err
		}
		return t, t.commit()
	})
}

func (t *txn) replace(ino, parent tree.Ino, name string, held int) error {
	if err := tree.CheckName(name); err != nil {
		return err
	}
	dir, err := t.dir(parent)
	if err != nil {
		return err
	}
	n, err := t.linkable(ino)
	if err != nil {
		return err
	}
	if n.Nlink != 0 {
		return fmt.Errorf("replace %q in %d by inode %d, which has a name: %w", name, parent, ino, tree.ErrInvalid)
	}
	d, taken, err := t.f.name(parent, name)
	if err != nil {
		return err
	}
	if taken {
		dst, err := t.inode(d.Ino)
		if err != nil {
			return err
		}
		if err := t.displace(dir, name, n, dst, held); err != nil {
			return err
		}
	}
	return t.link(n, dir, name)
}

// Unlink removes the name of anything but a directory (tree.ErrIsDir).
func (f *FS) Unlink(c Caller, parent tree.Ino, name string) error {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	return f.removing(c, parent, name, func(held int) (*txn, error) {
		t := f.begin(c)
		dir, n, err := t.target(parent, name)
		if err != nil {
			return nil, err
		}
		if n.Kind == tree.Dir {
			return nil, fmt.Errorf("unlink %q in %d: %w", name, parent, tree.ErrIsDir)
		}
		if err := t.clearName(dir, name, removedOrigin(n)); err != nil {
			return nil, err
		}
		t.unlinked(n, held)
		return t, t.commit()
	})
}

// removedOrigin is what a later file of n's name would continue.
func removedOrigin(n *upper.Inode) tree.Ino {
	if n.Kind != tree.File {
		return 0
	}
	return origin(n)
}

// target stages a name's directory and inode.
func (t *txn) target(parent tree.Ino, name string) (dir, n *upper.Inode, err error) {
	if err := tree.CheckName(name); err != nil {
		return nil, nil, err
	}
	if dir, err = t.dir(parent); err != nil {
		return nil, nil, err
	}
	d, ok, err := t.f.name(parent, name)
	if err != nil {
		return nil, nil, err
	}
	if !ok {
		return nil, nil, fmt.Errorf("%q in %d: %w", name, parent, tree.ErrNotExist)
	}
	n, err = t.inode(d.Ino)
	return dir, n, err
}

// removing runs op under mu once the content that the name's removal would lose
// has been settled. op is told how many references to the inode's handle are
// removing's own.
func (f *FS) removing(c Caller, dir tree.Ino, name string, op func(held int) (*txn, error)) error {
	for {
		var h *file
		held := 0
		if ino := f.unsettled(c, dir, name); ino != 0 {
			h, held = f.handles.grab(ino), 1
			h.mu.Lock()
			f.settle(c, h)
		}
		f.mu.Lock()
		ino := f.unsettledLocked(c, dir, name)
		again := ino != 0 && (h == nil || h.ino != ino) // another file took the name meanwhile
		var t *txn
		var err error
		if !again {
			t, err = op(held)
		}
		f.mu.Unlock()
		if h != nil {
			h.mu.Unlock()
			f.Release(h.ino)
		}
		if again {
			continue
		}
		if err == nil {
			t.removeData()
		}
		return err
	}
}

// unsettled is the file that would go with the name and whose last writer was
// another operation than c's, 0 for none.
func (f *FS) unsettled(c Caller, dir tree.Ino, name string) tree.Ino {
	if f.hooks.Settle == nil {
		return 0
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.unsettledLocked(c, dir, name)
}

func (f *FS) unsettledLocked(c Caller, dir tree.Ino, name string) tree.Ino {
	if f.hooks.Settle == nil {
		return 0
	}
	d := f.up.Dirent(dir, name)
	var ino tree.Ino
	if d != nil {
		ino = d.Ino
	} else if low, ok, err := f.lowerName(dir, name); ok && err == nil {
		ino = low.Ino
	}
	if n := f.up.Inode(ino); n != nil && n.Written && n.Nlink == 1 && n.LastOp != c.Op {
		return ino
	}
	return 0
}

// Rmdir removes an empty directory.
func (f *FS) Rmdir(c Caller, parent tree.Ino, name string) error {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.begin(c)
	dir, n, err := t.target(parent, name)
	if err != nil {
		return err
	}
	if n.Kind != tree.Dir {
		return fmt.Errorf("rmdir %q in %d: %w", name, parent, tree.ErrNotDir)
	}
	if err := f.mustBeEmpty(n.Ino); err != nil {
		return err
	}
	if err := t.clearName(dir, name, 0); err != nil {
		return err
	}
	dir.Nlink--
	t.unlinked(n, 0)
	return t.commit()
}

func (f *FS) mustBeEmpty(dir tree.Ino) error {
	empty := true
	if err := f.each(dir, "", func(tree.Dirent) bool { empty = false; return false }); err != nil {
		return err
	}
	if !empty {
		return fmt.Errorf("directory %d: %w", dir, tree.ErrNotEmpty)
	}
	return nil
}

// Rename moves a name, replacing what has the new one: a file by a file, an
// empty directory by a directory. With RenameNoReplace a taken name is
// tree.ErrExist; with RenameExchange the two names change places. Two names of
// one inode are left as they are. A directory cannot move beneath itself
// (tree.ErrInvalid).
func (f *FS) Rename(c Caller, p1 tree.Ino, n1 string, p2 tree.Ino, n2 string, flags uint32) error {
	if flags&^(RenameNoReplace|RenameExchange) != 0 || flags == RenameNoReplace|RenameExchange {
		return fmt.Errorf("rename flags %#x: %w", flags, tree.ErrInvalid)
	}
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	return f.removing(c, p2, n2, func(held int) (*txn, error) {
		t := f.begin(c)
		if err := t.rename(p1, n1, p2, n2, flags, held); err != nil {
			return nil, err
		}
		return t, t.commit()
	})
}

func (t *txn) rename(p1 tree.Ino, n1 string, p2 tree.Ino, n2 string, flags uint32, held int) error {
	f := t.f
	if err := tree.CheckName(n2); err != nil {
		return err
	}
	if _, err := t.dir(p1); err != nil {
		return err
	}
	dir2, err := t.dir(p2)
	if err != nil {
		return err
	}
	dir1, src, err := t.target(p1, n1)
	if err != nil {
		return err
	}
	d2, taken, err := f.name(p2, n2)
	if err != nil {
		return err
	}
	if taken && flags&RenameNoReplace != 0 {
		return fmt.Errorf("%q in %d: %w", n2, p2, tree.ErrExist)
	}
	if !taken && flags&RenameExchange != 0 {
		return fmt.Errorf("%q in %d: %w", n2, p2, tree.ErrNotExist)
	}
	if src.Kind == tree.Dir {
		if in, err := f.within(p2, src.Ino); err != nil {
			return err
		} else if in {
			return fmt.Errorf("move directory %d beneath itself: %w", src.Ino, tree.ErrInvalid)
		}
	}
	if taken && d2.Ino == src.Ino {
		t.inodes = nil // two names of one inode, or one name: nothing happens
		return nil
	}
	t.result = src.Ino
	if !taken {
		return t.move(dir1, n1, dir2, n2, src)
	}
	dst, err := t.inode(d2.Ino)
	if err != nil {
		return err
	}
	if flags&RenameExchange != 0 {
		return t.exchange(dir1, n1, dir2, n2, src, dst)
	}
	if err := t.displace(dir2, n2, src, dst, held); err != nil {
		return err
	}
	return t.move(dir1, n1, dir2, n2, src)
}

// displace takes the name away from dst, for src to have it next.
func (t *txn) displace(dir *upper.Inode, name string, src, dst *upper.Inode, held int) error {
	switch {
	case src.Kind == tree.Dir && dst.Kind != tree.Dir:
		return fmt.Errorf("directory over %q in %d: %w", name, dir.Ino, tree.ErrNotDir)
	case src.Kind != tree.Dir && dst.Kind == tree.Dir:
		return fmt.Errorf("file over %q in %d: %w", name, dir.Ino, tree.ErrIsDir)
	case dst.Kind == tree.Dir:
		if err := t.f.mustBeEmpty(dst.Ino); err != nil {
			return err
		}
		dir.Nlink--
	case src.Kind == tree.File && dst.Kind == tree.File:
		if o := origin(dst); o != 0 && o != src.Ino {
			src.Lineage = o
		}
		src.Prior = dst.Ino
	}
	t.unlinked(dst, held)
	return nil
}

// move takes src's name from one directory to another, where the name is free
// or has been unlinked.
func (t *txn) move(dir1 *upper.Inode, n1 string, dir2 *upper.Inode, n2 string, src *upper.Inode) error {
	if err := t.clearName(dir1, n1, 0); err != nil {
		return err
	}
	if err := t.setName(dir2, n2, src.Ino, src.Kind); err != nil {
		return err
	}
	if src.Kind == tree.Dir {
		dir1.Nlink--
		dir2.Nlink++
	}
	src.Ctime = t.now
	return nil
}

func (t *txn) exchange(dir1 *upper.Inode, n1 string, dir2 *upper.Inode, n2 string, src, dst *upper.Inode) error {
	if dst.Kind == tree.Dir {
		if in, err := t.f.within(dir1.Ino, dst.Ino); err != nil {
			return err
		} else if in {
			return fmt.Errorf("move directory %d beneath itself: %w", dst.Ino, tree.ErrInvalid)
		}
	}
	if err := t.setName(dir1, n1, dst.Ino, dst.Kind); err != nil {
		return err
	}
	if err := t.setName(dir2, n2, src.Ino, src.Kind); err != nil {
		return err
	}
	if src.Kind == tree.Dir {
		dir1.Nlink--
		dir2.Nlink++
	}
	if dst.Kind == tree.Dir {
		dir2.Nlink--
		dir1.Nlink++
	}
	src.Ctime, dst.Ctime = t.now, t.now
	return nil
}

// Lineage tells what ino's content replaced in the session: directly, and the
// lower inode at the start of the chain. Zeros for nothing.
func (f *FS) Lineage(ino tree.Ino) (prior, oldest tree.Ino) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if n := f.up.Inode(ino); n != nil {
		return n.Prior, n.Lineage
	}
	return 0, 0
}
