package occ

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"ephemeral-sandbox/fs/tree"
)

// judge works out what the head becomes when a delta is laid over it. It goes
// entry by entry and inode by inode through what the session changed:
//
//  1. each changed entry gets the inode that the merged tree shall have there;
//  2. each inode changed in place, and each file that replaces another, becomes
//     a unit: three versions of one file and the inode that takes the result;
//  3. units are merged; deletions are checked against what the head did to the
//     deleted; moves are checked against each other;
//  4. link counts and the times of directories are brought up to date.
//
// Each conflict is also laid out as a refresh wants it, so that what follows from
// it is seen too.
type judge struct {
	base, head, session *side
	headView            HeadView
	baseCommit          uint64
	opts                Options
	resolve             resolver
	err                 error

	changes    map[tree.Ino]InodeChange
	places     map[tree.Ino]place
	sessionDir map[tree.Ino]tree.Ino // the session's directory that a head directory stands for

	puts     map[Key]tree.Dirent // over the head; Ino 0 removes
	units    []unit
	known    map[unit]bool     // units but for their entries
	targets  map[tree.Ino]bool // of units
	absorbed map[tree.Ino]bool // base inodes whose content went into another inode
	turned   map[tree.Ino]bool // base inodes that became another type of file
	deleted  map[tree.Ino]spot // base inodes that the session has no more
	lost     map[tree.Ino][]string
	plans    map[tree.Ino]*InodePlan
	affected map[tree.Ino]bool // inodes whose link count may change
	entered  map[tree.Ino]bool // directories of the session with changed entries

	conflicts []Conflict
	clashes   []clash
	owed      []owed
	reported  map[tree.Ino]bool // session inodes that have a modify/delete conflict
	merged    map[string]bool
	converged map[string]bool
	timeOnly  int
}

func newJudge(base View, baseCommit uint64, head HeadView, session View, d Delta, o Options) *judge {
	j := &judge{
		headView: head, baseCommit: baseCommit, opts: o,
		changes:    make(map[tree.Ino]InodeChange, len(d.Inodes)),
		places:     map[tree.Ino]place{tree.RootIno: {base: tree.RootIno, head: tree.RootIno, target: tree.RootIno}},
		sessionDir: map[tree.Ino]tree.Ino{tree.RootIno: tree.RootIno},
		puts:       map[Key]tree.Dirent{}, known: map[unit]bool{}, targets: map[tree.Ino]bool{}, absorbed: map[tree.Ino]bool{}, turned: map[tree.Ino]bool{}, deleted: map[tree.Ino]spot{},
		lost: map[tree.Ino][]string{}, plans: map[tree.Ino]*InodePlan{}, affected: map[tree.Ino]bool{}, entered: map[tree.Ino]bool{},
		resolve:  resolver{marked: map[tree.Ino]bool{}, made: map[tree.Ino]bool{}},
		reported: map[tree.Ino]bool{}, merged: map[string]bool{}, converged: map[string]bool{},
	}
	j.base, j.head, j.session = newSide(base, &j.err), newSide(head, &j.err), newSide(session, &j.err)
	for _, c := range d.Inodes {
		j.changes[c.Ino] = c
	}
	return j
}

// run judges the whole delta.
func (j *judge) run(d Delta) (*Verdict, error) {
	dirents := slices.SortedFunc(slices.Values(d.Dirents), func(a, b DirentChange) int {
		return compareKeys(Key{a.Dir, a.Name}, Key{b.Dir, b.Name})
	})
	for _, c := range dirents {
		j.affected[c.Was], j.entered[c.Dir] = true, true
		if j.session.alive(c.Dir) {
			j.entry(c.Dir, c.Name)
			continue
		}
		j.noteDeleted(c.Was, spot{})
		if !j.base.alive(c.Was) || !j.session.alive(c.Was) || j.keepsName(c.Was) {
			continue
		}
		// Moved away before the directory went.
		k := Key{j.headOfBase(c.Dir), c.Name}
		if h := j.head.at(k.Dir, k.Name).Ino; h != 0 && (h == c.Was || h == j.replacement(c.Was)) {
			j.set(k, 0, 0)
		}
	}
	j.implicit(dirents)
	inos := slices.SortedFunc(slices.Values(d.Inodes), func(a, b InodeChange) int { return cmp.Compare(a.Ino, b.Ino) })
	for _, c := range inos {
		j.inPlace(c)
	}
	j.settleUnits()
	j.renames(dirents)
	j.deletions()
	j.cycles()
	j.reportLost()
	j.audit()
	j.payOwed()
	v := j.finish(inos)
	if j.err != nil {
		return nil, fmt.Errorf("validate against commit %d: %w", j.headView.Number(), j.err)
	}
	return v, nil
}

func compareKeys(a, b Key) int {
	return cmp.Or(cmp.Compare(a.Dir, b.Dir), cmp.Compare(a.Name, b.Name))
}

// place says which directories stand for one directory of the session: base and
// head to compare its entries with, target to write them to. 0 means none. gone
// is the topmost directory above or at it that the head has no more.
type place struct{ base, head, target, gone tree.Ino }

func (j *judge) place(dir tree.Ino) place {
	if known, ok := j.places[dir]; ok {
		return known
	}
	names := j.session.namesOf(dir)
	if len(names) == 0 {
		return place{}
	}
	name := names[0]
	var p place
	switch known := j.base.alive(dir); {
	case known && j.head.alive(dir):
		p = place{base: dir, head: dir, target: dir}
	case known:
		h := j.headOfBase(dir)
		p = place{base: dir, head: h, target: h}
		if h == 0 {
			parent := j.place(name.Dir)
			p.gone = cmp.Or(parent.gone, dir)
		}
	default:
		p = j.placeNew(dir, name)
	}
	j.places[dir] = p
	if p.target != 0 {
		j.sessionDir[p.target] = dir
	}
	return p
}

// targetOf is the directory of the merged tree that takes entries of the
// session's dir. One that the head has removed is made again for a refresh.
func (j *judge) targetOf(dir tree.Ino) tree.Ino {
	p := j.place(dir)
	if p.target == 0 && p.gone != 0 {
		p.target = j.remake(dir)
		j.places[dir] = p
		j.sessionDir[p.target] = dir
	}
	return p.target
}

// placeNew places a directory that the session made: over the base directory
// that it replaces, and into the one that the head made in the same place.
func (j *judge) placeNew(dir tree.Ino, name tree.Dirent) place {
	parent := j.place(name.Dir)
	p := place{target: dir, gone: parent.gone}
	b := j.base.at(parent.base, name.Name)
	h := j.head.at(parent.head, name.Name)
	if b.Kind == tree.Dir && !j.session.alive(b.Ino) {
		switch {
		case h.Kind == tree.Dir:
			p.base = b.Ino
		case h.Ino == 0 && !j.head.alive(b.Ino):
			return place{base: b.Ino, gone: cmp.Or(parent.gone, dir)}
		}
	}
	if h.Kind == tree.Dir {
		switch {
		case j.session.alive(b.Ino) && j.replacement(b.Ino) == h.Ino:
			// The session moved b away, and with it what the head made of it.
		case !j.base.alive(h.Ino):
			p.head, p.target = h.Ino, h.Ino
		case p.base != 0:
			p.head = h.Ino
		}
	}
	return p
}

// headOfBase is the head's directory in the place of a base directory: itself
// while it lives, else one that the head made there, else 0.
func (j *judge) headOfBase(dir tree.Ino) tree.Ino {
	if j.head.alive(dir) {
		return dir
	}
	names := j.base.namesOf(dir)
	if len(names) == 0 {
		return 0
	}
	if d := j.head.at(j.headOfBase(names[0].Dir), names[0].Name); d.Kind == tree.Dir && !j.base.alive(d.Ino) {
		return d.Ino
	}
	return 0
}

// set gives an entry of the merged tree its inode; 0 removes it.
func (j *judge) set(k Key, ino tree.Ino, kind tree.Kind) {
	if k.Dir == 0 {
		return
	}
	now := j.head.at(k.Dir, k.Name)
	if now.Ino == ino {
		delete(j.puts, k)
		return
	}
	j.puts[k] = tree.Dirent{Dir: k.Dir, Name: k.Name, Ino: ino, Kind: kind}
	j.affected[now.Ino], j.affected[ino] = true, true
}

// entry judges one entry of a directory of the session.
func (j *judge) entry(dir tree.Ino, name string) {
	at := Key{dir, name}
	p := j.place(dir)
	b, h, s := j.base.at(p.base, name), j.head.at(p.head, name), j.session.at(dir, name)
	j.affected[b.Ino] = true
	if b.Ino != s.Ino {
		j.noteDeleted(b.Ino, spot{at: at, to: Key{p.target, name}, head: Key{p.head, name}})
	}
	if p.gone != 0 {
		if s.Ino != 0 && (s.Ino != b.Ino && !j.madeAgain(b, s) || s.Ino == b.Ino && j.follows(s.Ino)) {
			j.lost[p.gone] = append(j.lost[p.gone], j.session.path(at))
			to := Key{j.targetOf(dir), name}
			switch {
			case j.follows(s.Ino): // 16
				s = j.arrive(entry{at: at, to: to, b: b, s: s})
			case s.Kind == tree.Dir:
				s.Ino = j.targetOf(s.Ino)
			}
			j.set(to, s.Ino, s.Kind)
		}
		return
	}
	m := j.mergeEntry(entry{at: at, to: Key{p.target, name}, b: b, h: h, s: s})
	j.set(Key{p.target, name}, m.Ino, m.Kind)
	if h.Ino != 0 && m.Ino == h.Ino && p.head != p.target {
		j.unname(h.Ino, Key{p.head, name}) // it goes over into the session's new directory
	}
}

// madeAgain reports whether the session has put in the place of b what b was.
// Of a directory what is in it is judged for itself.
func (j *judge) madeAgain(b, s tree.Dirent) bool {
	if b.Kind == tree.Dir && s.Kind == tree.Dir {
		return j.place(s.Ino).target == 0 && sameMeta(j.base.inode(b.Ino), j.session.inode(s.Ino))
	}
	return b.Ino != 0 && !j.base.alive(s.Ino) && j.same(j.base, b.Ino, j.session, s.Ino)
}

// spot is the place of an entry in the session, in the merged tree and in the
// head. The zero spot lies in a directory that the session deleted as well.
type spot struct{ at, to, head Key }

// noteDeleted remembers where a base inode was that the session has no more.
func (j *judge) noteDeleted(x tree.Ino, at spot) {
	if !j.base.alive(x) || j.session.alive(x) {
		return
	}
	if known, ok := j.deleted[x]; !ok || known == (spot{}) {
		j.deleted[x] = at
	}
}

// implicit judges the entries that the session removed by replacing their
// directory, where the head has replaced the directory too.
func (j *judge) implicit(changes []DirentChange) {
	for _, c := range changes {
		if c.Kind != tree.Dir || c.Ino == 0 || !j.session.alive(c.Ino) || j.base.alive(c.Ino) {
			continue
		}
		if p := j.place(c.Ino); p.base != 0 && p.base != p.head && p.gone == 0 {
			for _, child := range j.base.children(p.base) {
				if j.session.at(c.Ino, child.Name).Ino == 0 {
					j.entry(c.Ino, child.Name)
				}
			}
		}
	}
}

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
