package occ

import (
	"bytes"
	"cmp"
	"slices"

	"ephemeral-sandbox/fs/tree"
)

// sameContent compares what two inodes of one kind hold, without attributes.
func sameContent(sx *side, x tree.Inode, sy *side, y tree.Inode) bool {
	switch {
	case x.Kind != y.Kind:
		return false
	case x.Kind == tree.File:
		return x.Size == y.Size && (x.Size == 0 || sx.hash(x) == sy.hash(y))
	case x.Kind == tree.Symlink:
		return x.Link == y.Link
	default:
		return x.Rdev == y.Rdev
	}
}

// sameMeta compares permission bits, owners and extended attributes.
func sameMeta(x, y tree.Inode) bool {
	return x.Mode == y.Mode && x.UID == y.UID && x.GID == y.GID && sameXattrs(x.Xattrs, y.Xattrs)
}

func sameXattrs(x, y []tree.Xattr) bool {
	return slices.EqualFunc(x, y, func(a, b tree.Xattr) bool {
		return a.Name == b.Name && bytes.Equal(a.Value, b.Value)
	})
}

// mergeMeta merges bits, owners and extended attributes into out, whose other
// fields stay. Where the two sides gave one thing two values the session's is
// taken, and clash is called with the kind of conflict and the thing's name.
func mergeMeta(out *tree.Inode, base, head, session tree.Inode, clash func(kind, attr string)) {
	changed := base.Mode ^ session.Mode
	out.Mode = session.Mode&changed | head.Mode&^changed
	id := func(base, head, session uint32, attr string) uint32 {
		switch {
		case session == base:
			return head
		case head != base && head != session:
			clash(ConflictOwner, attr)
		}
		return session
	}
	out.UID = id(base.UID, head.UID, session.UID, "uid")
	out.GID = id(base.GID, head.GID, session.GID, "gid")
	out.Xattrs = mergeXattrs(base.Xattrs, head.Xattrs, session.Xattrs, clash)
}

func mergeXattrs(base, head, session []tree.Xattr, clash func(kind, attr string)) []tree.Xattr {
	var names []string
	for _, list := range [3][]tree.Xattr{base, head, session} {
		for _, x := range list {
			names = append(names, x.Name)
		}
	}
	slices.Sort(names)
	var out []tree.Xattr
	for _, name := range slices.Compact(names) {
		b, h, s := xattr(base, name), xattr(head, name), xattr(session, name)
		take := s
		switch {
		case s.equal(b):
			take = h
		case !h.equal(b) && !h.equal(s):
			clash(ConflictXattr, name)
		}
		if take.set {
			out = append(out, tree.Xattr{Name: name, Value: take.value})
		}
	}
	return out
}

// attrValue is the value of an extended attribute that may be absent.
type attrValue struct {
	set   bool
	value []byte
}

func (v attrValue) equal(w attrValue) bool { return v.set == w.set && bytes.Equal(v.value, w.value) }

func xattr(list []tree.Xattr, name string) attrValue {
	at, ok := slices.BinarySearchFunc(list, name, func(x tree.Xattr, name string) int {
		return cmp.Compare(x.Name, name)
	})
	if !ok {
		return attrValue{}
	}
	return attrValue{true, list[at].Value}
}

func later(t, u tree.Time) tree.Time {
	if t.Before(u) {
		return u
	}
	return t
}

// after is the least time later than t.
func after(t tree.Time) tree.Time {
	if t.Nsec++; t.Nsec == 1e9 {
		t.Sec, t.Nsec = t.Sec+1, 0
	}
	return t
}
