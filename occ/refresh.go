package occ

import (
	"cmp"
	"fmt"
	"slices"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ/merge"
)

// Labels names the three versions in conflict markers: the session's id and the
// two commits.
type Labels struct{ Base, Head, Session string }

// FileEdit is an inode of the upper as it shall be. Content from FromSession is
// the session's whole content as it reads before the refresh: what the upper
// holds of it may lean on a lower that the head has changed. Content from
// FromHead under the inode's own number is the head's: the upper keeps none.
type FileEdit struct {
	InodePlan
	// Marked is set when Merged holds conflict markers.
	Marked bool
	// Made is set for an inode that Refresh took from newIno.
	Made bool
}

// Plan is what makes a session's upper, taken over base, stand over the head.
// Entries and inodes of the delta that it does not name stay as they are.
type Plan struct {
	// DropDirents and DropInodes leave the upper: the head shows through, or
	// nothing is there any more.
	DropDirents []Key
	DropInodes  []tree.Ino
	// Dirents and Inodes are put into the upper; Ino 0 hides the head's name.
	Dirents []tree.Dirent
	Inodes  []FileEdit
	// Merged lists the paths whose content was merged without conflict.
	Merged []string
	// Conflicts are those that Validate would report. Texts that clash are
	// among Inodes with markers; of anything else the session's version stays
	// in its place and the head's, where it has one, is beside it under the
	// name that Beside gives.
	Conflicts []Conflict
}

// Refresh plans how the session moves from base to head. The arguments are
// those of Validate; newIno allots inode numbers for the head's versions and
// for directories that are made again.
//
// What merges does so silently. A directory that the head removed comes back
// with nothing in it but what the session had made or changed there.
func Refresh(base View, baseCommit uint64, head HeadView, session View, d Delta, l Labels, newIno func() (tree.Ino, error), o Options) (*Plan, error) {
	j := newJudge(base, baseCommit, head, session, d, o)
	j.resolve.labels = [3]string{merge.Base: l.Base, merge.Head: l.Head, merge.Session: l.Session}
	j.resolve.newIno = newIno
	v, err := j.run(d)
	if err != nil {
		return nil, err
	}
	return j.planUpper(v, d), nil
}

// resolver is what the judge needs to lay conflicts out.
type resolver struct {
	labels [3]string
	newIno func() (tree.Ino, error)
	marked map[tree.Ino]bool // plans that hold conflict markers
	made   map[tree.Ino]bool // inodes from newIno
}

// makeIno allots an inode number, 0 after an error.
func (j *judge) makeIno() tree.Ino {
	ino, err := j.resolve.newIno()
	if err != nil {
		if j.err == nil {
			j.err = fmt.Errorf("allot an inode number: %w", err)
		}
		return 0
	}
	j.resolve.made[ino] = true
	return ino
}

// Beside is the name under which a refresh puts the head's version of a
// conflict, before any number that sets it apart from a name already there.
func Beside(name string, headCommit uint64) string {
	suffix := fmt.Sprintf(".head-L%06d", headCommit)
	return name[:min(len(name), tree.MaxName-len(suffix))] + suffix
}

// owed is a version of the head's that the session must still find somewhere:
// beside the entry that took its place, unless it has another name.
type owed struct {
	to   Key
	ino  tree.Ino
	kind tree.Kind
}

// beside owes the session the head's inode h, next to k.
func (j *judge) beside(k Key, h tree.Dirent) {
	if h.Ino != 0 {
		j.owed = append(j.owed, owed{k, h.Ino, h.Kind})
	}
}

// payOwed puts beside what would otherwise have no name. A directory comes
// before what is in it, which then has one.
func (j *judge) payOwed() {
	slices.SortStableFunc(j.owed, func(a, b owed) int { return cmp.Compare(j.depth(a.ino), j.depth(b.ino)) })
	m := j.mergedTree()
	for _, o := range j.owed {
		if m.alive(o.ino) {
			continue
		}
		if !m.alive(o.to.Dir) {
			o.to.Dir = tree.RootIno // its directory has gone too
		}
		k := j.freeName(o.to)
		j.set(k, o.ino, o.kind)
		m.added[o.ino] = append(m.added[o.ino], tree.Dirent{Dir: k.Dir, Name: k.Name, Ino: o.ino, Kind: o.kind})
		if m.live[o.ino] = true; o.kind == tree.Dir {
			m.live = map[tree.Ino]bool{tree.RootIno: true} // what is in it lives again
		}
	}
}

// depth is how many directories the head has above ino.
func (j *judge) depth(ino tree.Ino) int {
	n := 0
	for names := j.head.namesOf(ino); len(names) > 0; names = j.head.namesOf(names[0].Dir) {
		n++
	}
	return n
}

// freeName is a name beside k that neither side has.
func (j *judge) freeName(k Key) Key {
	name := Beside(k.Name, j.headView.Number())
	free := Key{k.Dir, name}
	for n := 1; ; n++ {
		_, taken := j.puts[free]
		if !taken && j.head.at(free.Dir, free.Name).Ino == 0 && j.session.at(j.sessionDir[free.Dir], free.Name).Ino == 0 {
			return free
		}
		mark := fmt.Sprintf(".%d", n)
		free.Name = name[:min(len(name), tree.MaxName-len(mark))] + mark
	}
}

// layOutAll lays out the conflicts of units once everything else has merged.
func (j *judge) layOutAll() {
	for _, c := range j.clashes {
		j.layOut(c.unit, c.result)
	}
	j.clashes = nil
}

// layOut leaves a unit that did not merge as a refresh wants it.
func (j *judge) layOut(u unit, r result) {
	if r.text != nil && !r.text.Clean && len(r.conflicts) == 1 {
		var base []byte
		if u.base != 0 {
			base = j.base.content(u.base)
		}
		head, session := j.head.content(u.head), j.session.content(u.session)
		merged, pieces := r.text.Marked(base, head, session, j.resolve.labels)
		j.takeMerged(&r.plan, merged, pieces, j.head.inode(u.head), j.session.inode(u.session))
		j.resolve.marked[u.target] = true
		j.plan(r.plan)
		return
	}
	s := j.session.inode(u.session)
	plan := InodePlan{Inode: s, From: sourceOf(s), BaseIno: u.base, SessionIno: u.session, Path: j.session.path(u.at)}
	h := j.head.inode(u.head)
	if s.Kind == tree.Dir && h.Kind == tree.Dir {
		plan.Ino = u.target // attributes alone: the entries of both stay together
		j.plan(plan)
		return
	}
	in := u.session
	if s.Kind == tree.Dir {
		in = j.targetOf(u.session)
	}
	if in == u.session && j.plans[in] == nil { // else it has merged with its own other version
		j.plan(plan)
	}
	if u.to.Dir == 0 {
		u.to.Dir = j.targetOf(u.at.Dir)
	}
	if there := j.head.at(u.to.Dir, u.to.Name); there.Ino != 0 && there.Ino != in && there.Ino != u.head {
		j.beside(u.to, there)
	}
	j.set(u.to, in, s.Kind)
	if u.head != u.session {
		j.beside(u.to, tree.Dirent{Ino: u.head, Kind: h.Kind})
		return
	}
	copied := InodePlan{Inode: h, HeadIno: u.head, Path: plan.Path}
	j.takeHead(&copied, h)
	if copied.Ino = j.makeIno(); copied.Ino != 0 {
		j.plan(copied)
		j.beside(u.to, tree.Dirent{Ino: copied.Ino, Kind: h.Kind})
	}
}

// remake makes a directory of the session again that the head has no more, with
// nothing in it yet, and returns its new inode.
func (j *judge) remake(dir tree.Ino) tree.Ino {
	name := j.session.namesOf(dir)[0]
	ino := j.makeIno()
	k := Key{j.targetOf(name.Dir), name.Name}
	j.beside(k, j.head.at(k.Dir, k.Name))
	plan := InodePlan{Inode: j.session.inode(dir), BaseIno: dir, SessionIno: dir, Path: j.session.pathOf(dir)}
	plan.Ino = ino
	j.plan(plan)
	j.set(k, ino, tree.Dir)
	return ino
}

// remakeWhole makes a directory again with everything that the session has in
// it but what the head has elsewhere.
func (j *judge) remakeWhole(dir tree.Ino) tree.Ino {
	target := j.targetOf(dir)
	for _, c := range j.session.children(dir) {
		switch {
		case j.head.alive(c.Ino):
		case c.Kind == tree.Dir && j.base.alive(c.Ino):
			j.remakeWhole(c.Ino)
		default:
			j.set(Key{target, c.Name}, c.Ino, c.Kind)
		}
	}
	return target
}

// planUpper turns what shall lie over the head into edits of the upper.
func (j *judge) planUpper(v *Verdict, d Delta) *Plan {
	plan := &Plan{Merged: v.Merged, Conflicts: v.Conflicts}
	has := make(map[Key]tree.Ino, len(d.Dirents))
	for _, c := range d.Dirents {
		has[Key{c.Dir, c.Name}] = c.Ino
	}
	wanted := make(map[Key]bool, len(v.Dirents))
	for _, e := range v.Dirents {
		k := Key{e.Dir, e.Name}
		wanted[k] = true
		if ino, ok := has[k]; !ok || ino != e.Ino {
			plan.Dirents = append(plan.Dirents, e)
		}
	}
	for k := range has {
		if !wanted[k] {
			plan.DropDirents = append(plan.DropDirents, k)
		}
	}
	slices.SortFunc(plan.DropDirents, compareKeys)

	planned := make(map[tree.Ino]bool, len(v.Inodes))
	for _, p := range v.Inodes {
		planned[p.Ino] = true
		if !j.upperHas(p) {
			plan.Inodes = append(plan.Inodes, FileEdit{
				InodePlan: p, Marked: j.resolve.marked[p.Ino], Made: j.resolve.made[p.Ino],
			})
		}
	}
	merged := j.mergedTree()
	for _, c := range d.Inodes {
		keep := j.timesOnly(c) && merged.alive(c.Ino) && j.headView.InodeChanged(c.Ino) <= j.baseCommit &&
			j.session.inode(c.Ino).Nlink == j.head.inode(c.Ino).Nlink
		if !planned[c.Ino] && !keep {
			plan.DropInodes = append(plan.DropInodes, c.Ino)
		}
	}
	for x := range j.deleted {
		// The upper knows it as deleted; it is back with the head's version.
		if _, listed := j.changes[x]; !listed && !planned[x] && merged.alive(x) {
			plan.DropInodes = append(plan.DropInodes, x)
		}
	}
	slices.Sort(plan.DropInodes)
	return plan
}

// upperHas reports whether the upper's own record and data already make p.
func (j *judge) upperHas(p InodePlan) bool {
	c, ok := j.changes[p.Ino]
	if !ok || p.SessionIno != p.Ino || p.From == FromMerged || j.headView.InodeChanged(p.Ino) > j.baseCommit {
		return false
	}
	s := j.session.inode(p.Ino)
	switch {
	case !c.New && !j.head.alive(p.Ino), p.From == FromSession && !c.New && !c.Data:
		return false
	case p.From == FromHead && (c.New || c.Data):
		if !sameContent(j.head, j.head.inode(p.HeadIno), j.session, s) {
			return false
		}
	}
	return sameMeta(s, p.Inode) && s.Nlink == p.Nlink && s.Link == p.Link && s.Rdev == p.Rdev &&
		s.Size == p.Size && s.Mtime == p.Mtime && s.Ctime == p.Ctime
}
