package fusefs

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/tree"
)

// OpenDir is never asked again after this: the kernel then takes every
// directory as opened and keeps its listing.
func (v *view) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, _ *fuse.OpenOut) fuse.Status {
	v.begin(&in.InHeader)
	return fuse.ENOSYS
}

func (v *view) ReleaseDir(in *fuse.ReleaseIn) { v.begin(&in.InHeader) }

func (v *view) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return v.list(in, out, false)
}

func (v *view) ReadDirPlus(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return v.list(in, out, true)
}

// Offsets of a listing: 1 is behind ".", 2 behind "..", and above that they are
// the overlay's cookies, moved up.
const (
	afterSelf   = 1
	afterParent = 2
)

// Bytes of one entry in an answer, without its name.
const (
	direntSize     = 24
	direntPlusSize = 24 + 128
)

// item is one entry on its way into an answer.
type item struct {
	tree.Dirent
	next uint64 // the offset behind it
}

func (v *view) list(in *fuse.ReadIn, out *fuse.DirEntryList, plus bool) fuse.Status {
	h := &in.InHeader
	op, dir := v.begin(h), tree.Ino(in.NodeId)
	if in.Offset == 0 {
		v.note(op, access.List, dir, 0, "")
	}
	items, err := v.items(dir, in.Offset, int(in.Size), plus)
	if err != nil {
		return v.failInode(h, err)
	}
	for _, it := range items {
		e := fuse.DirEntry{Mode: kindBits(it.Kind), Name: it.Name, Ino: uint64(it.Ino), Off: it.next}
		if !plus {
			if !out.AddDirEntry(e) {
				break
			}
			continue
		}
		entry := out.AddDirLookupEntry(e)
		if entry == nil {
			break
		}
		if it.next <= afterParent {
			continue // the kernel wants no more than the name of these
		}
		// An inode that went since the listing was made has its name shown, as
		// on any file system, but nothing for the kernel to keep.
		if a, err := v.fs.Attr(it.Ino); err == nil {
			v.entry(entry, a)
		}
	}
	return fuse.OK
}

// items collects what an answer of size bytes can hold, and no more, so that the
// overlay knows where this reader stands.
func (v *view) items(dir tree.Ino, off uint64, size int, plus bool) ([]item, error) {
	per := direntSize
	if plus {
		per = direntPlusSize
	}
	var items []item
	add := func(it item) bool {
		if size -= per + (len(it.Name)+7)&^7; size < 0 {
			return false
		}
		items = append(items, it)
		return true
	}
	if off < afterSelf {
		add(item{tree.Dirent{Dir: dir, Name: ".", Ino: dir, Kind: tree.Dir}, afterSelf})
	}
	if off < afterParent {
		parent, err := v.fs.Parent(dir)
		if err != nil {
			return nil, err
		}
		add(item{tree.Dirent{Dir: dir, Name: "..", Ino: parent, Kind: tree.Dir}, afterParent})
		off = afterParent
	}
	err := v.fs.ReadDir(dir, off-afterParent, func(d tree.Dirent, next uint64) bool {
		return add(item{d, next + afterParent})
	})
	return items, err
}

// Where labels and access control lists are kept. Neither is
// enforced in a view, so none can be set; what a layer brought along is shown.
const (
	labelXattr      = "security.selinux"
	aclAccessXattr  = "system.posix_acl_access"
	aclDefaultXattr = "system.posix_acl_default"
)

// maxXattrList bounds the names of one inode's attributes together, as the
// kernel bounds a listing.
const maxXattrList = 64 << 10

func (v *view) GetXAttr(_ <-chan struct{}, h *fuse.InHeader, name string, dest []byte) (uint32, fuse.Status) {
	v.begin(h)
	if name == labelXattr {
		return 0, fuse.ENODATA // asked by every ls -l
	}
	value, err := v.fs.GetXattr(tree.Ino(h.NodeId), name)
	if err != nil {
		return 0, v.failInode(h, err)
	}
	if len(dest) < len(value) {
		return uint32(len(value)), fuse.ERANGE
	}
	return uint32(copy(dest, value)), fuse.OK
}

func (v *view) ListXAttr(_ <-chan struct{}, h *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	v.begin(h)
	names, err := v.fs.ListXattr(tree.Ino(h.NodeId))
	if err != nil {
		return 0, v.failInode(h, err)
	}
	size := listSize(names)
	if len(dest) < size {
		return uint32(size), fuse.ERANGE
	}
	dest = dest[:0]
	for _, n := range names {
		dest = append(dest, n...)
		dest = append(dest, 0)
	}
	return uint32(size), fuse.OK
}

func listSize(names []string) int {
	size := 0
	for _, n := range names {
		size += len(n) + 1
	}
	return size
}

func (v *view) SetXAttr(_ <-chan struct{}, in *fuse.SetXAttrIn, name string, value []byte) fuse.Status {
	h := &in.InHeader
	op, ino := v.begin(h), tree.Ino(in.NodeId)
	if _, ok := v.done(h); ok {
		return fuse.OK
	}
	switch {
	case name == labelXattr, name == aclAccessXattr, name == aclDefaultXattr:
		return fuse.Status(syscall.EOPNOTSUPP)
	case len(name) > tree.MaxXattrName:
		return fuse.ERANGE
	case len(value) > tree.MaxXattrValue:
		return fuse.Status(syscall.E2BIG)
	}
	names, err := v.fs.ListXattr(ino)
	if err != nil {
		return v.failInode(h, err)
	}
	if listSize(names)+len(name)+1 > maxXattrList {
		return fuse.Status(syscall.ENOSPC)
	}
	if err := v.fs.SetXattr(v.caller(h, op), ino, name, value, int(in.Flags)); err != nil {
		return v.failInode(h, err)
	}
	v.note(op, access.Attr, ino, 0, "")
	return fuse.OK
}

func (v *view) RemoveXAttr(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	op, ino := v.begin(h), tree.Ino(h.NodeId)
	if _, ok := v.done(h); ok {
		return fuse.OK
	}
	if err := v.fs.RemoveXattr(v.caller(h, op), ino, name); err != nil {
		return v.failInode(h, err)
	}
	v.note(op, access.Attr, ino, 0, "")
	return fuse.OK
}
