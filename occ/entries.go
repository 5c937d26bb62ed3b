package occ

import (
	"slices"

	"ephemeral-sandbox/fs/tree"
)

// entry is one entry in three versions: at in the session, to in the merged
// tree.
type entry struct {
	at, to  Key
	b, h, s tree.Dirent
}

// mergeEntry chooses what the merged tree has under a name. Comments number the
// rows of the truth table.
func (j *judge) mergeEntry(e entry) tree.Dirent {
	switch {
	case e.s.Ino == e.h.Ino: // 3
		if e.s.Ino != e.b.Ino {
			j.converged[j.session.path(e.at)] = true
		}
		return e.h
	case e.s.Ino == e.b.Ino: // 1
		if e.h.Ino == 0 && j.follows(e.s.Ino) {
			return j.arrive(e)
		}
		return e.h
	case e.h.Ino == e.b.Ino: // 2, 19; a change in place is the unit's business
		if e.s.Ino == 0 {
			return tree.Dirent{}
		}
		if e.b.Ino != 0 {
			j.addUnit(unit{base: e.b.Ino, head: e.h.Ino, session: e.s.Ino, target: e.s.Ino, at: e.at, to: e.to})
		}
		return j.arrive(e)
	case e.s.Ino == 0:
		return j.removedHere(e)
	case e.h.Ino == 0:
		return j.removedThere(e)
	default:
		return j.madeTwice(e)
	}
}

// removedHere: the session has no such name, the head has another inode there.
func (j *judge) removedHere(e entry) tree.Dirent {
	switch {
	case j.session.alive(e.b.Ino) && !j.keepsName(e.b.Ino): // 16: moved away, the content of h follows
		if j.replacement(e.b.Ino) == e.h.Ino {
			return tree.Dirent{}
		}
		return e.h
	case !j.session.alive(e.b.Ino) && j.headMoved(e.b.Ino): // judged with the deletions
		return e.h
	case e.b.Kind == tree.Dir && e.h.Kind == tree.Dir: // 15
		if !j.removedTree(e.b.Ino, e.h.Ino, 0) {
			return tree.Dirent{}
		}
	case j.same(j.base, e.b.Ino, j.head, e.h.Ino): // 2
		return tree.Dirent{}
	default: // 9
		j.report(Conflict{
			Kind: ConflictDeleteModify, Path: j.head.path(Key{e.h.Dir, e.h.Name}),
			BaseIno: e.b.Ino, HeadIno: e.h.Ino, HeadKey: Key{e.h.Dir, e.h.Name},
		})
	}
	j.beside(e.to, e.h)
	return tree.Dirent{}
}

// removedThere: the head has no such name, the session put another inode there.
func (j *judge) removedThere(e entry) tree.Dirent {
	switch {
	case j.session.alive(e.b.Ino) && !j.keepsName(e.b.Ino):
		return j.arrive(e)
	case !j.session.alive(e.b.Ino) && j.headMoved(e.b.Ino): // 17: the head moved it, the session's content follows
		if e.s.Kind != tree.Dir && e.b.Kind == e.s.Kind && j.untouched(e.s.Ino) {
			j.addUnit(unit{base: e.b.Ino, head: e.b.Ino, session: e.s.Ino, target: e.b.Ino, at: e.at, to: e.to})
			return tree.Dirent{}
		}
	case j.place(e.s.Ino).gone != 0 && e.s.Kind == tree.Dir: // made anew: judged by what is in it
		if sameMeta(j.base.inode(e.b.Ino), j.session.inode(e.s.Ino)) {
			return tree.Dirent{}
		}
		j.modifyDelete(e.at, e.b.Ino, e.s.Ino)
		return tree.Dirent{Ino: j.targetOf(e.s.Ino), Kind: tree.Dir}
	case e.s.Kind != tree.Dir && j.same(j.base, e.b.Ino, j.session, e.s.Ino): // 1
		return tree.Dirent{}
	}
	j.modifyDelete(e.at, e.b.Ino, e.s.Ino) // 8
	return j.arrive(e)
}

// untouched reports whether the head has done nothing to x: it does not know it,
// or has it where and as it was.
func (j *judge) untouched(x tree.Ino) bool {
	if !j.base.alive(x) {
		return true
	}
	return slices.ContainsFunc(j.head.namesOf(x), j.inBase) && !j.headChanged(x)
}

// madeTwice: both sides put an inode of their own there.
func (j *judge) madeTwice(e entry) tree.Dirent {
	u := unit{base: e.b.Ino, head: e.h.Ino, session: e.s.Ino, target: e.s.Ino, at: e.at, to: e.to}
	fresh := !j.base.alive(e.s.Ino)
	if e.s.Kind == tree.Dir && e.h.Kind == tree.Dir && fresh && !j.base.alive(e.h.Ino) { // 13
		if j.place(e.s.Ino).target == e.s.Ino {
			return e.s
		}
		if e.b.Kind != tree.Dir {
			u.base = 0
		}
		u.target = e.h.Ino
		j.addUnit(u)
		return e.h
	}
	if e.s.Kind == tree.Dir && e.h.Kind == tree.Dir {
		j.report(Conflict{ // 10: a directory moved to where the head has put another
			Kind: ConflictAddAdd, Path: j.session.path(e.at), SessionKey: e.at, HeadKey: e.to,
			BaseIno: e.b.Ino, HeadIno: e.h.Ino, SessionIno: e.s.Ino,
		})
		j.beside(e.to, e.h)
		return j.arrive(e)
	}
	if e.b.Ino != 0 && e.b.Kind == e.s.Kind && e.s.Kind != tree.Dir &&
		j.headMoved(e.b.Ino) && !j.session.alive(e.b.Ino) { // 17
		j.addUnit(unit{base: e.b.Ino, head: e.b.Ino, session: e.s.Ino, target: e.b.Ino, at: e.at, to: e.to})
	}
	if fresh && e.s.Kind != tree.Dir && j.same(j.head, e.h.Ino, j.session, e.s.Ino) { // 3
		j.converged[j.session.path(e.at)] = true
		return e.h
	}
	j.addUnit(u) // 4 to 7, 10 to 12
	return j.arrive(e)
}

// arrive is the entry for an inode that the session made, linked or moved to
// where it is. The head may have deleted or replaced what was moved.
func (j *judge) arrive(e entry) tree.Dirent {
	s := e.s.Ino
	if !j.base.alive(s) || j.head.alive(s) {
		return e.s
	}
	switch z := j.replacement(s); {
	case j.keepsName(s):
		return e.s // a new link keeps a file that the head has unlinked
	case z == 0:
	case e.s.Kind == tree.Dir: // 16: it is the head's new directory that moves
		return tree.Dirent{Ino: z, Kind: tree.Dir}
	default: // 16
		j.addUnit(unit{base: s, head: z, session: s, target: s, at: e.at, to: e.to})
		return e.s
	}
	j.modifyDelete(e.at, s, s)
	if e.s.Kind == tree.Dir {
		return tree.Dirent{Ino: j.remakeWhole(s), Kind: tree.Dir}
	}
	return e.s
}

// replacement is the inode that the head put in the place of base inode x,
// which it has no more.
func (j *judge) replacement(x tree.Ino) tree.Ino {
	if j.head.alive(x) {
		return 0
	}
	for _, n := range j.base.namesOf(x) {
		h := j.head.at(j.headOfBase(n.Dir), n.Name)
		if h.Ino != 0 && h.Kind == n.Kind && (n.Kind != tree.Dir || !j.base.alive(h.Ino)) {
			return h.Ino
		}
	}
	return 0
}

// follows reports whether the session moved x, and the head replaced it where it
// was: what replaced it goes where x went.
func (j *judge) follows(x tree.Ino) bool {
	return j.base.alive(x) && !j.keepsName(x) && j.replacement(x) != 0
}

// keepsName reports whether the session has x under a name of the base.
func (j *judge) keepsName(x tree.Ino) bool {
	return slices.ContainsFunc(j.base.namesOf(x), func(n tree.Dirent) bool {
		return j.session.alive(n.Dir) && j.session.at(n.Dir, n.Name).Ino == x
	})
}

// modifyDelete reports that the session changed or moved what the head deleted.
func (j *judge) modifyDelete(at Key, base, session tree.Ino) {
	if j.reported[session] {
		return
	}
	j.reported[session] = true
	j.report(Conflict{
		Kind: ConflictModifyDelete, Path: j.session.path(at),
		BaseIno: base, SessionIno: session, SessionKey: at,
	})
}

// same compares two inodes as the gate does: kind, content, bits and extended
// attributes. Owners do not count: the same file made twice by two sessions is
// the same. Directories are the same only when they are one.
func (j *judge) same(sx *side, x tree.Ino, sy *side, y tree.Ino) bool {
	a, b := sx.inode(x), sy.inode(y)
	if a.Kind == tree.Dir || a.Mode != b.Mode || !sameXattrs(a.Xattrs, b.Xattrs) {
		return a.Kind == tree.Dir && x == y
	}
	return sameContent(sx, a, sy, b)
}

// headChanged reports whether the head's x differs from the base's in more than
// times.
func (j *judge) headChanged(x tree.Ino) bool {
	if j.headView.InodeChanged(x) <= j.baseCommit {
		return false
	}
	b, h := j.base.inode(x), j.head.inode(x)
	return !sameMeta(b, h) || b.Kind != tree.Dir && !sameContent(j.base, b, j.head, h)
}

// contentKept reports whether the session has the content of base inode b as it
// was. The delta tells whether a file's bytes were touched at all.
func (j *judge) contentKept(b, s tree.Inode) bool {
	return b.Ino == s.Ino && s.Kind == tree.File && !j.changes[s.Ino].Data || sameContent(j.base, b, j.session, s)
}

// inPlace makes the units of an inode that both base and session have.
func (j *judge) inPlace(c InodeChange) {
	x := c.Ino
	j.affected[x] = true
	if !j.base.alive(x) || !j.session.alive(x) {
		return
	}
	b, s := j.base.inode(x), j.session.inode(x)
	if sameMeta(b, s) && j.contentKept(b, s) {
		return
	}
	var at Key
	if names := j.session.namesOf(x); len(names) > 0 {
		at = Key{names[0].Dir, names[0].Name}
	}
	p := j.place(at.Dir)
	to := Key{p.target, at.Name}
	if s.Kind == tree.Dir {
		switch d := j.place(x); {
		case d.gone != 0:
			j.lost[d.gone] = append(j.lost[d.gone], j.session.path(at))
		case d.head != 0:
			j.addUnit(unit{base: x, head: d.head, session: x, target: d.target, at: at, to: to})
		}
		return
	}
	found := false
	if j.head.alive(x) {
		j.addUnit(unit{base: x, head: x, session: x, target: x, at: at, to: to})
		found = true
	}
	for _, n := range j.base.namesOf(x) {
		dir := j.headOfBase(n.Dir)
		z := j.head.at(dir, n.Name)
		if z.Ino != 0 && z.Ino != x && j.session.alive(n.Dir) && j.session.at(n.Dir, n.Name).Ino == x { // 17
			j.addUnit(unit{base: x, head: z.Ino, session: x, target: z.Ino, at: Key{n.Dir, n.Name}, to: Key{dir, n.Name}})
			found = true
		}
	}
	if found || j.targets[x] {
		return
	}
	if p.gone != 0 { // 14
		j.lost[p.gone] = append(j.lost[p.gone], j.session.path(at))
	} else {
		j.modifyDelete(at, x, x) // 8
	}
	j.set(Key{j.targetOf(at.Dir), at.Name}, x, s.Kind)
}
