package occ

import (
	"cmp"
	"fmt"
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
	plans    map[tree.Ino]*InodePlan
	affected map[tree.Ino]bool // inodes whose link count may change
	entered  map[tree.Ino]bool // directories of the session with changed entries

	units    []unit
	known    map[unit]bool         // units but for their entries
	targets  map[tree.Ino]bool     // of units
	absorbed map[tree.Ino]bool     // base inodes whose content went into another inode
	turned   map[tree.Ino]bool     // base inodes that became another type of file
	deleted  map[tree.Ino]spot     // base inodes that the session has no more
	lost     map[tree.Ino][]string // by directory that the head has no more

	conflicts []Conflict
	clashes   []clash
	owed      []owed
	reported  map[tree.Ino]bool // session inodes that have a modify/delete conflict
	merged    map[string]bool
	converged map[string]bool
}

func newJudge(base View, baseCommit uint64, head HeadView, session View, d Delta, o Options) *judge {
	j := &judge{
		headView: head, baseCommit: baseCommit, opts: o,
		changes:    make(map[tree.Ino]InodeChange, len(d.Inodes)),
		places:     map[tree.Ino]place{tree.RootIno: {base: tree.RootIno, head: tree.RootIno, target: tree.RootIno}},
		sessionDir: map[tree.Ino]tree.Ino{tree.RootIno: tree.RootIno},
		resolve:    resolver{marked: map[tree.Ino]bool{}, made: map[tree.Ino]bool{}},

		puts: map[Key]tree.Dirent{}, plans: map[tree.Ino]*InodePlan{},
		affected: map[tree.Ino]bool{}, entered: map[tree.Ino]bool{},

		known: map[unit]bool{}, targets: map[tree.Ino]bool{},
		absorbed: map[tree.Ino]bool{}, turned: map[tree.Ino]bool{},
		deleted: map[tree.Ino]spot{}, lost: map[tree.Ino][]string{},

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
