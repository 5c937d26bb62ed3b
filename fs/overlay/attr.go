package overlay

import (
	"fmt"
	"slices"
	"strings"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"
)

const (
	capability = "security.capability"

	// maxXattrBytes bounds the names and values of one inode together.
	maxXattrBytes = 1 << 20
	// maxXattrList is the kernel's bound on what listxattr(2) gives.
	maxXattrList = 64 << 10
)

// Attr is what stat(2) shows; tree.ErrStale when there is no such inode. An
// inode that lost its last name shows a link count of 0.
func (f *FS) Attr(ino tree.Ino) (tree.Attr, error) {
	n, err := f.Inode(ino)
	return n.Attr, err
}

// Inode is Attr with symlink target and xattrs. The caller does not change it.
func (f *FS) Inode(ino tree.Ino) (tree.Inode, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	n, err := f.record(ino)
	if err != nil {
		return tree.Inode{}, err
	}
	return n.Inode, nil
}

// SetAttr changes attributes in one step and gives the new ones. A change of
// owner takes the set-id bits and file capabilities of anything but a directory
// away, unless the mode is set as well; so does a change of size by a caller
// that must not keep them.
func (f *FS) SetAttr(c Caller, ino tree.Ino, s SetAttr) (tree.Attr, error) {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	if s.Size != nil {
		return f.truncate(c, ino, s)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.begin(c)
	n, err := t.inode(ino)
	if err != nil {
		return tree.Attr{}, err
	}
	if s == (SetAttr{}) {
		return n.Attr, nil
	}
	s.apply(n, t.now)
	t.result = ino
	if err := t.commit(); err != nil {
		return tree.Attr{}, err
	}
	return n.Attr, nil
}

// apply sets everything but the size.
func (s SetAttr) apply(n *upper.Inode, now tree.Time) {
	if s.UID != nil {
		n.UID = *s.UID
	}
	if s.GID != nil {
		n.GID = *s.GID
	}
	if (s.UID != nil || s.GID != nil) && n.Kind != tree.Dir {
		killPriv(n)
	}
	if s.Mode != nil {
		n.Mode = *s.Mode & modeBits
	}
	if s.Mtime != nil {
		n.Mtime = *s.Mtime
	}
	n.Ctime = now
	if s.Ctime != nil {
		n.Ctime = *s.Ctime
	}
}

// keepsPriv tells whether c may change a file's bytes and leave its set-id bits.
func (c Caller) keepsPriv() bool { return !c.KillPriv && c.UID == 0 }

// killedMode is mode without what a change by a lesser caller takes away:
// set-user-id always, set-group-id only where it does not mean locking.
func killedMode(mode uint32) uint32 {
	mode &^= setUID
	if mode&groupX != 0 {
		mode &^= setGID
	}
	return mode
}

// hasPriv tells whether killPriv would change n.
func hasPriv(n *upper.Inode) bool {
	_, capable := findXattr(n.Xattrs, capability)
	return capable || n.Mode != killedMode(n.Mode)
}

func killPriv(n *upper.Inode) {
	n.Mode = killedMode(n.Mode)
	if i, ok := findXattr(n.Xattrs, capability); ok {
		n.Xattrs = slices.Delete(slices.Clone(n.Xattrs), i, i+1)
	}
}

// Readlink gives a symlink's target; tree.ErrInvalid for anything else.
func (f *FS) Readlink(ino tree.Ino) (string, error) {
	n, err := f.Inode(ino)
	if err == nil && n.Kind != tree.Symlink {
		return "", fmt.Errorf("readlink of a %v: %w", n.Kind, tree.ErrInvalid)
	}
	return n.Link, err
}

func findXattr(x []tree.Xattr, name string) (int, bool) {
	return slices.BinarySearchFunc(x, name, func(x tree.Xattr, name string) int { return strings.Compare(x.Name, name) })
}

// GetXattr gives a value, which the caller does not change; tree.ErrNoXattr
// when there is none.
func (f *FS) GetXattr(ino tree.Ino, name string) ([]byte, error) {
	n, err := f.Inode(ino)
	if err != nil {
		return nil, err
	}
	i, ok := findXattr(n.Xattrs, name)
	if !ok {
		return nil, errNoXattr(ino, name)
	}
	return n.Xattrs[i].Value, nil
}

func errNoXattr(ino tree.Ino, name string) error {
	return fmt.Errorf("xattr %q of inode %d: %w", name, ino, tree.ErrNoXattr)
}

// ListXattr gives the names in byte order.
func (f *FS) ListXattr(ino tree.Ino) ([]string, error) {
	n, err := f.Inode(ino)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(n.Xattrs))
	for i, x := range n.Xattrs {
		names[i] = x.Name
	}
	return names, nil
}

// SetXattr sets a value. With XattrCreate an attribute that is there is
// tree.ErrExist, with XattrReplace one that is not is tree.ErrNoXattr. A name or
// value beyond the kernel's limits is tree.ErrRange; more than an inode may
// carry is tree.ErrNoSpace.
func (f *FS) SetXattr(c Caller, ino tree.Ino, name string, value []byte, flags int) error {
	if name == "" || len(name) > tree.MaxXattrName || strings.Contains(name, "\x00") || len(value) > tree.MaxXattrValue {
		return fmt.Errorf("xattr name of %d bytes, value of %d: %w", len(name), len(value), tree.ErrRange)
	}
	if flags&^(XattrCreate|XattrReplace) != 0 || flags == XattrCreate|XattrReplace {
		return fmt.Errorf("setxattr flags %#x: %w", flags, tree.ErrInvalid)
	}
	return f.editXattrs(c, ino, func(x []tree.Xattr) ([]tree.Xattr, error) {
		i, ok := findXattr(x, name)
		switch {
		case ok && flags == XattrCreate:
			return nil, fmt.Errorf("xattr %q of inode %d: %w", name, ino, tree.ErrExist)
		case !ok && flags == XattrReplace:
			return nil, errNoXattr(ino, name)
		case !ok:
			x = slices.Insert(x, i, tree.Xattr{Name: name})
		}
		x[i].Value = append([]byte{}, value...)
		return x, nil
	})
}

// RemoveXattr removes an attribute; tree.ErrNoXattr when there is none.
func (f *FS) RemoveXattr(c Caller, ino tree.Ino, name string) error {
	return f.editXattrs(c, ino, func(x []tree.Xattr) ([]tree.Xattr, error) {
		i, ok := findXattr(x, name)
		if !ok {
			return nil, errNoXattr(ino, name)
		}
		return slices.Delete(x, i, i+1), nil
	})
}

func xattrBytes(x []tree.Xattr) (all, names uint64) {
	for _, x := range x {
		all += uint64(len(x.Name) + len(x.Value))
		names += uint64(len(x.Name)) + 1
	}
	return all, names
}

// editXattrs changes the xattrs of one inode; edit gets a copy of its own.
func (f *FS) editXattrs(c Caller, ino tree.Ino, edit func([]tree.Xattr) ([]tree.Xattr, error)) error {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.begin(c)
	n, err := t.inode(ino)
	if err != nil {
		return err
	}
	before, _ := xattrBytes(n.Xattrs)
	x, err := edit(slices.Clone(n.Xattrs))
	if err != nil {
		return err
	}
	after, names := xattrBytes(x)
	if after > before {
		if after > maxXattrBytes || names > maxXattrList {
			return fmt.Errorf("%d bytes of xattrs on inode %d: %w", after, ino, tree.ErrNoSpace)
		}
		// The first xattr that a lower inode gets brings its others along.
		if f.up.Inode(ino) == nil {
			before = 0
		}
		if err := f.room(after - before); err != nil {
			return err
		}
	}
	if n.Xattrs = x; len(x) == 0 {
		n.Xattrs = nil
	}
	n.Ctime = t.now
	t.result = ino
	return t.commit()
}

// notFile is the answer to reading or writing what holds no bytes.
func notFile(ino tree.Ino, k tree.Kind) error {
	err := tree.ErrInvalid
	if k == tree.Dir {
		err = tree.ErrIsDir
	}
	return fmt.Errorf("inode %d is a %v: %w", ino, k, err)
}
