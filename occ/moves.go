package occ

import (
	"maps"
	"slices"

	"ephemeral-sandbox/fs/tree"
)

// renames finds files and directories that both sides moved, to two places.
func (j *judge) renames(changes []DirentChange) {
	var moved []tree.Ino
	for _, c := range changes {
		if c.Ino != 0 && j.base.alive(c.Ino) && j.head.alive(c.Ino) && j.session.alive(c.Ino) {
			moved = append(moved, c.Ino)
		}
	}
	slices.Sort(moved)
	for _, x := range slices.Compact(moved) {
		j.rename(x)
	}
}

// rename compares the names of x by the head's directories.
func (j *judge) rename(x tree.Ino) {
	inBase, inSession, inHead := map[Key]bool{}, map[Key]bool{}, map[Key]bool{}
	for _, n := range j.base.namesOf(x) {
		inBase[Key{j.headOfBase(n.Dir), n.Name}] = true
	}
	var at Key
	for _, n := range j.session.namesOf(x) {
		k := Key{j.place(n.Dir).target, n.Name}
		if inSession[k] = true; !inBase[k] {
			at = Key{n.Dir, n.Name}
		}
	}
	var added []Key // by the head alone
	for _, n := range j.head.namesOf(x) {
		k := Key{n.Dir, n.Name}
		if inHead[k] = true; !inBase[k] && !inSession[k] {
			added = append(added, k)
		}
	}
	left, here := false, false
	for k := range inBase {
		left = left || !inSession[k] && !inHead[k]
	}
	for k := range inSession {
		here = here || !inBase[k] && !inHead[k]
	}
	if !left || !here || len(added) == 0 {
		return
	}
	j.report(Conflict{ // 18
		Kind: ConflictRename, Path: j.session.path(at),
		BaseIno: x, HeadIno: x, SessionIno: x, SessionKey: at, HeadKey: added[0],
	})
	for _, k := range added {
		j.unname(x, k)
	}
}

// unname takes the head's entry k from x, unless something else is there now.
func (j *judge) unname(x tree.Ino, k Key) {
	if d, changed := j.puts[k]; !changed || d.Ino == x {
		j.set(k, 0, 0)
	}
}

// deletions looks at what became, in the head, of each inode that the session
// deleted.
func (j *judge) deletions() {
	gone := make([]tree.Ino, 0, len(j.deleted))
	for x := range j.deleted {
		if !j.absorbed[x] && j.head.alive(x) {
			gone = append(gone, x)
		}
	}
	slices.Sort(gone)
	merged := j.mergedTree()
	for _, x := range gone {
		at := j.deleted[x]
		kept := j.head.at(at.head.Dir, at.head.Name)
		names := j.head.namesOf(x)
		switch {
		case merged.alive(x):
			if j.headMoved(x) { // a new link is no more than that
				j.reportDeleted(x, x, names[0])
			}
		case at == (spot{}), j.turned[x]: // judged with its directory, or as a unit
		case kept.Kind == tree.Dir && kept.Ino == x: // 15
			by := j.session.at(at.at.Dir, at.at.Name)
			if by.Kind != tree.Dir || j.place(by.Ino).base != x {
				by.Ino = 0
			}
			if j.removedTree(x, x, by.Ino) {
				j.beside(at.to, kept)
			}
		case j.headChanged(x): // 9
			j.reportDeleted(x, x, names[0])
			j.beside(at.to, names[0])
		}
	}
}

// headMoved reports whether the head has base inode x, under new names only.
func (j *judge) headMoved(x tree.Ino) bool {
	return j.head.alive(x) && !slices.ContainsFunc(j.head.namesOf(x), j.inBase)
}

// inBase reports whether an entry of the head is as the base has it.
func (j *judge) inBase(n tree.Dirent) bool { return j.base.at(n.Dir, n.Name).Ino == n.Ino }

func (j *judge) reportDeleted(base, head tree.Ino, at tree.Dirent) {
	k := Key{at.Dir, at.Name}
	j.report(Conflict{
		Kind: ConflictDeleteModify, Path: j.head.path(k),
		BaseIno: base, HeadIno: head, HeadKey: k,
	})
}

// removedTree reports each thing that the head made or changed beneath a
// directory that the session removed, or replaced by its directory session (0:
// none); an entry that the latter has too is judged for itself. It reports
// whether there was any.
func (j *judge) removedTree(base, head, session tree.Ino) bool {
	if base == head && j.headView.SubtreeChanged(head) <= j.baseCommit && j.headView.InodeChanged(head) <= j.baseCommit {
		return false
	}
	any := false
	lose := func(base, head tree.Ino, at tree.Dirent) {
		any = true
		j.reportDeleted(base, head, at)
	}
	if base != 0 && session == 0 && !sameMeta(j.base.inode(base), j.head.inode(head)) {
		if names := j.head.namesOf(head); len(names) > 0 {
			lose(base, head, names[0])
		}
	}
	for _, h := range j.head.children(head) {
		b := j.base.at(base, h.Name)
		s := j.session.at(session, h.Name)
		j.affected[h.Ino] = true
		switch {
		case s.Ino != 0:
		case h.Ino == b.Ino && j.session.alive(h.Ino):
			// Moved away by the session; its content goes with it.
		case h.Kind == tree.Dir:
			if b.Kind != tree.Dir {
				b.Ino = 0
				lose(0, h.Ino, h)
			}
			any = j.removedTree(b.Ino, h.Ino, 0) || any
		case b.Ino == h.Ino:
			if j.headChanged(h.Ino) {
				lose(b.Ino, h.Ino, h)
			}
		case b.Ino == 0 || !j.same(j.base, b.Ino, j.head, h.Ino):
			lose(b.Ino, h.Ino, h)
		}
	}
	for _, b := range j.base.children(base) {
		// What the head moved out of here the session has deleted.
		if _, known := j.deleted[b.Ino]; known || j.session.alive(b.Ino) || j.head.at(head, b.Name).Ino == b.Ino {
			continue
		}
		if names := j.head.namesOf(b.Ino); len(names) > 0 {
			lose(b.Ino, b.Ino, names[0])
		}
	}
	return any
}

// cycles finds directories that two moves have put into each other.
func (j *judge) cycles() {
	var moved []Key
	for k, d := range j.puts {
		if d.Kind == tree.Dir && d.Ino != 0 && j.head.alive(d.Ino) {
			moved = append(moved, k)
		}
	}
	slices.SortFunc(moved, compareKeys)
	m := j.mergedTree()
	inCycle := map[tree.Ino]bool{}
	for _, k := range moved {
		x := j.puts[k].Ino
		ring := m.ring(x)
		if len(ring) == 0 || inCycle[x] {
			continue
		}
		at := Key{}
		if names := j.session.namesOf(x); len(names) > 0 {
			at = Key{names[0].Dir, names[0].Name}
		}
		j.report(Conflict{
			Kind: ConflictCycle, Path: j.session.path(at),
			BaseIno: x, HeadIno: x, SessionIno: x, SessionKey: at, HeadKey: headKey(j.head.namesOf(x)),
		})
		for _, y := range ring {
			inCycle[y] = true
		}
		j.unmoveRing(ring)
	}
}

// unmoveRing puts every directory of a cycle where the session has it.
func (j *judge) unmoveRing(ring []tree.Ino) {
	for _, y := range ring {
		for _, n := range j.head.namesOf(y) {
			j.unname(y, Key{n.Dir, n.Name})
		}
	}
	for _, y := range ring {
		for _, n := range j.session.namesOf(y) {
			k := Key{j.place(n.Dir).target, n.Name}
			if h := j.head.at(k.Dir, k.Name); h.Ino != 0 && h.Ino != y && !slices.Contains(ring, h.Ino) {
				j.beside(k, h)
			}
			j.set(k, y, tree.Dir)
		}
	}
}

// audit looks at what all moves together have made of each unit. Where they
// leave a change in a file without a name, there is a conflict.
func (j *judge) audit() {
	m := j.mergedTree()
	heads, sessions := map[tree.Ino]bool{}, map[tree.Ino]bool{} // inodes whose change has a place
	for _, o := range j.owed {
		heads[o.ino] = true
	}
	for _, u := range j.units {
		if m.alive(u.target) {
			heads[u.head], sessions[u.session] = true, true
		}
	}
	for _, u := range j.units {
		kind := ""
		switch {
		case !sessions[u.session] && !m.alive(u.session) && !j.sessionKept(u):
			kind = ConflictModifyDelete
		case !heads[u.head] && !m.alive(u.head) && !j.headKept(u):
			kind = ConflictDeleteModify
		default:
			continue
		}
		r := result{}
		r.clash(kind, "")
		j.clashed(u, r)
	}
	j.layOutAll()
	// Each side has unlinked the names that the other has kept.
	m = j.mergedTree()
	for _, x := range slices.Sorted(maps.Keys(j.affected)) {
		names := j.session.namesOf(x)
		if len(names) == 0 || m.alive(x) || heads[x] || sessions[x] || !j.base.alive(x) || !j.head.alive(x) {
			continue
		}
		at := Key{names[0].Dir, names[0].Name}
		if slices.ContainsFunc(names, func(n tree.Dirent) bool { return j.head.at(j.place(n.Dir).head, n.Name).Ino != 0 }) {
			if there := j.head.namesOf(x); j.headChanged(x) { // replaced by the head, but changed under another name
				j.reportDeleted(x, x, there[0])
				j.beside(Key{j.targetOf(at.Dir), at.Name}, there[0])
			}
			continue
		}
		j.modifyDelete(at, x, x)
		for _, n := range j.head.namesOf(x) {
			j.unname(x, Key{n.Dir, n.Name})
		}
		j.set(Key{j.targetOf(at.Dir), at.Name}, x, names[0].Kind)
	}
}

func headKey(names []tree.Dirent) Key {
	if len(names) == 0 {
		return Key{}
	}
	return Key{names[0].Dir, names[0].Name}
}

// reportLost reports each directory that the head has no more while the session
// changed something in it.
func (j *judge) reportLost() {
	dirs := make([]tree.Ino, 0, len(j.lost))
	for d := range j.lost {
		dirs = append(dirs, d)
	}
	slices.Sort(dirs)
	for _, d := range dirs {
		at := headKey(j.session.namesOf(d))
		p := j.place(at.Dir)
		h := j.head.at(p.head, at.Name)
		slices.Sort(j.lost[d])
		c := Conflict{ // 14
			Kind: ConflictParentGone, Path: j.session.path(at), Lost: slices.Compact(j.lost[d]),
			BaseIno: d, HeadIno: h.Ino, SessionIno: d, SessionKey: at,
		}
		if h.Ino != 0 {
			c.HeadKey = Key{h.Dir, h.Name}
		}
		j.report(c)
	}
}

// report completes a conflict from its inodes and keys, and keeps it.
func (j *judge) report(c Conflict) {
	c.Base, c.Head, c.Session = j.base.version(c.BaseIno), j.head.version(c.HeadIno), j.session.version(c.SessionIno)
	names, side := j.session.namesOf(c.SessionIno), j.session
	if len(names) == 0 {
		names, side = j.head.namesOf(c.HeadIno), j.head
	}
	for _, n := range names {
		if p := side.path(Key{n.Dir, n.Name}); p != c.Path {
			c.AlsoNames = append(c.AlsoNames, p)
		}
	}
	slices.Sort(c.AlsoNames)
	c.HeadCommit = j.headCommit(c)
	c.Remedy = remedyFor(c.Kind)
	j.conflicts = append(j.conflicts, c)
}

// headCommit is the last commit that touched what a conflict is about.
func (j *judge) headCommit(c Conflict) uint64 {
	var last uint64
	if c.HeadIno != 0 {
		last = j.headView.InodeChanged(c.HeadIno)
	}
	for _, ino := range [2]tree.Ino{c.BaseIno, c.HeadIno} {
		for _, n := range j.base.namesOf(ino) {
			last = max(last, j.removedBy(n))
		}
		for _, n := range j.head.namesOf(ino) {
			last = max(last, j.headView.DirentChanged(n.Dir, n.Name))
		}
	}
	return last
}

// removedBy is the last commit that changed an entry of the base, or one above
// it where the head has lost its directory.
func (j *judge) removedBy(n tree.Dirent) uint64 {
	last := j.headView.DirentChanged(n.Dir, n.Name)
	for !j.head.alive(n.Dir) {
		names := j.base.namesOf(n.Dir)
		if len(names) == 0 {
			break
		}
		n = names[0]
		last = max(last, j.headView.DirentChanged(n.Dir, n.Name))
	}
	return last
}
