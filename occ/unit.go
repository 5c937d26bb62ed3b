package occ

import (
	"slices"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ/linediff"
	"ephemeral-sandbox/occ/merge"
)

// unit is one file in three versions, each an inode of its own view, and the
// inode that takes the merged result. base is 0 when both sides made the file.
// at is its entry in the session, to the same in the merged tree.
type unit struct {
	base, head, session, target tree.Ino
	at, to                      Key
}

func (j *judge) addUnit(u unit) {
	same := unit{base: u.base, head: u.head, session: u.session, target: u.target}
	if j.known[same] {
		return // another name of the same inodes
	}
	j.known[same], j.targets[u.target] = true, true
	j.units = append(j.units, u)
	switch old, now := j.base.inode(u.base).Kind, j.session.inode(u.session).Kind; {
	case u.session == u.base || old == tree.Dir || u.head != u.base:
	case old == now:
		j.absorbed[u.base] = true
	default:
		j.turned[u.base] = true
	}
}

// settleUnits merges the units of each target. More than one can aim at the
// same: a file moved over another has the changes of both to take.
func (j *judge) settleUnits() {
	byTarget := map[tree.Ino][]unit{}
	var targets []tree.Ino
	for _, u := range j.units {
		if byTarget[u.target] == nil {
			targets = append(targets, u.target)
		}
		byTarget[u.target] = append(byTarget[u.target], u)
	}
	slices.Sort(targets)
	for _, t := range targets {
		us := byTarget[t]
		self := unit{base: t, head: t, session: t, target: t, at: us[0].at, to: us[0].to}
		movedHere := func(u unit) bool { return u.session == t && u.base != t }
		if slices.ContainsFunc(us, movedHere) && !j.known[unit{base: t, head: t, session: t, target: t}] &&
			j.base.alive(t) && j.head.alive(t) && j.headChanged(t) {
			us = append(us, self)
		}
		j.settle(us)
	}
	j.layOutAll()
}

// settle merges the units of one target. Where the head changed two files that
// the session made one, or the other way round, there is no merging them.
func (j *judge) settle(us []unit) {
	heads, sessions := map[[2]tree.Ino]bool{}, map[tree.Ino]bool{}
	first, best := us[0], -1
	for _, u := range us {
		worth := 0
		if !j.headKept(u) {
			heads[[2]tree.Ino{u.base, u.head}] = true
			worth += 2
		}
		if !j.sessionKept(u) {
			sessions[u.session] = true
			worth++
		}
		if worth > best {
			first, best = u, worth
		}
	}
	switch {
	case len(heads) > 1 || len(sessions) > 1 || best == 2 && len(sessions) > 0:
		r := result{}
		r.clash(conflictKindFor(j.session.inode(us[0].session)), "")
		for _, u := range us {
			j.clashed(u, r)
			r = result{} // the same conflict, other versions
		}
	case len(heads) > 0:
		j.mergeUnit(first)
	default:
		// A file moved over another keeps its own record unless it has a
		// change of its own; anything else takes what the session has.
		us = slices.DeleteFunc(slices.Clone(us), func(u unit) bool {
			return u.base != u.session && u.target != u.base && j.base.alive(u.target)
		})
		if at := slices.IndexFunc(us, func(u unit) bool { return !j.sessionKept(u) }); at >= 0 {
			j.mergeUnit(us[at])
		} else if len(us) > 0 {
			j.mergeUnit(us[0])
		}
	}
}

// sessionKept reports whether the session has the unit's base as it was.
func (j *judge) sessionKept(u unit) bool {
	switch {
	case u.base == 0:
		return false
	case u.session == u.base:
		b, s := j.base.inode(u.base), j.session.inode(u.session)
		return sameMeta(b, s) && j.contentKept(b, s)
	default:
		return j.same(j.base, u.base, j.session, u.session)
	}
}

func conflictKindFor(n tree.Inode) string {
	switch n.Kind {
	case tree.File:
		return ConflictContent
	case tree.Symlink:
		return ConflictSymlink
	default:
		return ConflictKind
	}
}

// headKept reports whether the head has the unit's base as it was.
func (j *judge) headKept(u unit) bool {
	switch {
	case u.base == 0:
		return false
	case u.head == u.base:
		return !j.headChanged(u.base)
	default:
		return j.same(j.base, u.base, j.head, u.head)
	}
}

// result is a merged unit: the plan, and what did not merge.
type result struct {
	plan      InodePlan
	conflicts []Conflict // Kind, Attr and Hunks only
	text      *merge.Result
	converged bool // the session's change and the head's are the same
}

func (r *result) clash(kind, attr string) {
	r.conflicts = append(r.conflicts, Conflict{Kind: kind, Attr: attr})
}

func (j *judge) mergeUnit(u unit) {
	r := j.mergeVersions(u)
	if len(r.conflicts) > 0 {
		j.clashed(u, r)
		return
	}
	path := j.session.path(u.at)
	switch {
	case r.plan.From == FromMerged:
		j.merged[path] = true
	case r.converged:
		j.converged[path] = true
	}
	if j.head.alive(u.target) && r.plan.From != FromMerged && r.plan.From != FromSession && r.plan.HeadIno == u.target {
		if h := j.head.inode(u.target); sameMeta(h, r.plan.Inode) && h.Link == r.plan.Link && h.Rdev == r.plan.Rdev {
			return // the head has it already
		}
	}
	j.plan(r.plan)
}

func (j *judge) plan(p InodePlan) {
	j.plans[p.Ino] = &p
	j.affected[p.Ino] = true
}

// mergeVersions merges a unit's three versions: kind, content, then bits,
// owners and extended attributes.
func (j *judge) mergeVersions(u unit) result {
	b, h, s := j.base.inode(u.base), j.head.inode(u.head), j.session.inode(u.session)
	r := result{plan: InodePlan{
		Inode: s, BaseIno: u.base, HeadIno: u.head, SessionIno: u.session, Path: j.session.path(u.at),
	}}
	out := &r.plan
	out.Ino, out.Ctime = u.target, later(h.Ctime, s.Ctime)
	kept := j.headKept(u)
	switch {
	case kept:
		// The head has nothing to say, not even on the type.
	case h.Kind != s.Kind:
		r.clash(cmpOr(u.base == 0, ConflictAddAdd, ConflictKind), "")
		return r
	}
	if kept && (h.Kind != s.Kind || b.Kind != s.Kind) {
		out.From = sourceOf(s)
		return r
	}
	sessionSame := u.base != 0 && j.contentKept(b, s)
	headSame := u.base != 0 && (kept || sameContent(j.base, b, j.head, h))
	switch {
	case s.Kind == tree.Dir:
		out.Mtime = later(h.Mtime, s.Mtime)
	case sessionSame:
		j.takeHead(out, h)
	case headSame:
		out.From = sourceOf(s)
	case sameContent(j.head, h, j.session, s):
		j.takeHead(out, h)
		r.converged = true
	case s.Kind == tree.File:
		j.mergeContent(&r, b, h, s)
	case u.base == 0:
		r.clash(ConflictAddAdd, "")
	case s.Kind == tree.Symlink:
		r.clash(ConflictSymlink, "")
	default:
		r.clash(ConflictKind, "")
	}
	if u.base == 0 {
		// Made twice: there are no old bits to tell whose are new. A directory
		// gets those that both gave it, and the head's owner.
		b.UID, b.GID = s.UID, s.GID
		switch {
		case s.Kind == tree.Dir:
			h.Mode &= s.Mode
			b.Mode = s.Mode
		case h.Mode != s.Mode && len(r.conflicts) == 0:
			r.clash(ConflictAddAdd, "")
		}
	}
	mergeMeta(&out.Inode, b, h, s, r.clash)
	return r
}

func sourceOf(n tree.Inode) Source {
	if n.Kind == tree.File {
		return FromSession
	}
	return FromNothing
}

// takeHead gives the plan the head's content and its times.
func (j *judge) takeHead(out *InodePlan, h tree.Inode) {
	out.Size, out.Alloc, out.Hash, out.Link, out.Rdev, out.Mtime = h.Size, h.Alloc, h.Hash, h.Link, h.Rdev, h.Mtime
	if h.Kind == tree.File {
		out.From = FromHead
		out.Hash = j.head.hash(h)
	}
}

// mergeContent merges three contents of a file, by the path's policy or line by
// line.
func (j *judge) mergeContent(r *result, b, h, s tree.Inode) {
	failed := ConflictContent
	if b.Ino == 0 {
		failed = ConflictAddAdd
	}
	if max(b.Size, h.Size, s.Size) > merge.MaxBytes {
		r.clash(cmpOr(b.Ino == 0, ConflictAddAdd, ConflictBinary), "")
		return
	}
	var base []byte
	if b.Ino != 0 {
		base = j.base.content(b.Ino)
	}
	head, session := j.head.content(h.Ino), j.session.content(s.Ino)
	out := &r.plan
	if j.opts.Policy != nil {
		if merger := j.opts.Policy(out.Path); merger != nil {
			merged, pieces, ok := merger(base, head, session)
			if !ok {
				r.clash(failed, "")
				return
			}
			j.takeMerged(out, merged, pieces, h, s)
			return
		}
	}
	if !linediff.IsText(base) || !linediff.IsText(head) || !linediff.IsText(session) {
		r.clash(cmpOr(b.Ino == 0, ConflictAddAdd, ConflictBinary), "")
		return
	}
	m := merge.Three(base, head, session)
	r.text = &m
	if !m.Clean || b.Ino == 0 { // what was made twice, once empty, is still two files
		r.conflicts = append(r.conflicts, Conflict{Kind: failed, Hunks: m.Hunks})
		return
	}
	j.takeMerged(out, m.Text(base, head, session), m.Pieces, h, s)
}

func cmpOr(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}

// takeMerged gives the plan merged bytes. They are nobody's file, so they are
// newer than both: a build must not take them for what it has seen.
func (j *judge) takeMerged(out *InodePlan, merged []byte, pieces []merge.Piece, h, s tree.Inode) {
	out.From, out.Merged, out.Pieces = FromMerged, merged, pieces
	out.Size, out.Alloc, out.Hash = uint64(len(merged)), uint64(len(merged)), tree.Hash{}
	out.Mtime = later(j.opts.Now, after(later(h.Mtime, s.Mtime)))
	out.Ctime = later(out.Ctime, out.Mtime)
}

// clash is a unit that did not merge.
type clash struct {
	unit
	result
}

// clashed reports what did not merge of a unit, and lays it out for a refresh.
func (j *judge) clashed(u unit, r result) {
	for _, c := range r.conflicts {
		c.Path = j.session.path(u.at)
		c.BaseIno, c.HeadIno, c.SessionIno = u.base, u.head, u.session
		c.SessionKey, c.HeadKey = u.at, u.to
		if j.head.at(u.to.Dir, u.to.Name).Ino != u.head {
			c.HeadKey = headKey(j.head.namesOf(u.head))
		}
		j.report(c)
	}
	j.clashes = append(j.clashes, clash{u, r})
}

// remedyFor is what to do about a kind of conflict.
func remedyFor(kind string) string {
	switch kind {
	case ConflictContent:
		return "refresh the session, resolve the marked lines, and publish again"
	case ConflictBinary:
		return "refresh the session, keep one of the two versions or make a third, and publish again"
	case ConflictModifyDelete:
		return "refresh the session, keep the file or delete it too, and publish again"
	case ConflictDeleteModify:
		return "refresh the session, take the head's version back or delete it again, and publish again"
	case ConflictAddAdd:
		return "refresh the session, join the two or give one another name, and publish again"
	case ConflictKind:
		return "refresh the session, decide which of the two it is to be, and publish again"
	case ConflictSymlink:
		return "refresh the session, choose a target, and publish again"
	case ConflictParentGone:
		return "refresh the session, move what is listed elsewhere or keep the directory, and publish again"
	case ConflictRename:
		return "refresh the session, choose one of the two names, and publish again"
	case ConflictCycle:
		return "refresh the session, move one of the directories elsewhere, and publish again"
	case ConflictXattr:
		return "refresh the session, choose a value, and publish again"
	case ConflictOwner:
		return "refresh the session, choose an owner, and publish again"
	default:
		return "refresh the session, resolve, and publish again"
	}
}
