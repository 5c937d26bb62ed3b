package occ

import (
	"maps"
	"slices"
	"strings"

	"ephemeral-sandbox/fs/tree"
)

// Validate judges delta d, taken from a session that leased base (commit
// baseCommit), against head. Conflicts are an answer, not an error; an error
// comes from a view.
//
// The cost is that of the delta and of what the head changed beneath the
// directories that the session removed; only files changed on both sides are
// read.
func Validate(base View, baseCommit uint64, head HeadView, session View, d Delta, o Options) (*Verdict, error) {
	j := newJudge(base, baseCommit, head, session, d, o)
	next := firstImagined
	j.resolve.newIno = func() (tree.Ino, error) { next++; return next, nil }
	v, err := j.run(d)
	if err != nil {
		return nil, err
	}
	if len(v.Conflicts) > 0 {
		v.Dirents, v.Inodes = nil, nil
	}
	return v, nil
}

// firstImagined is where the numbers begin of inodes that a refresh would make.
const firstImagined tree.Ino = 1 << 62

// merged is the tree that the head becomes.
type merged struct {
	j     *judge
	added map[tree.Ino][]tree.Dirent // the entries that puts give an inode
	live  map[tree.Ino]bool
}

// mergedTree takes the entries as they are now.
func (j *judge) mergedTree() *merged {
	m := &merged{j: j, added: map[tree.Ino][]tree.Dirent{}, live: map[tree.Ino]bool{tree.RootIno: true}}
	for _, d := range j.puts {
		m.added[d.Ino] = append(m.added[d.Ino], d)
	}
	return m
}

// entries lists the entries that lead to ino, whether they can be reached or
// not.
func (m *merged) entries(ino tree.Ino) []tree.Dirent {
	list := slices.Clone(m.added[ino])
	for _, n := range m.j.head.namesOf(ino) {
		if _, changed := m.j.puts[Key{n.Dir, n.Name}]; !changed {
			list = append(list, n)
		}
	}
	return list
}

// links counts the names of ino.
func (m *merged) links(ino tree.Ino) int {
	n := 0
	for _, d := range m.entries(ino) {
		if m.alive(d.Dir) {
			n++
		}
	}
	return n
}

func (m *merged) alive(ino tree.Ino) bool {
	if known, ok := m.live[ino]; ok {
		return known
	}
	m.live[ino] = false // a cycle is not reached from the root
	for _, d := range m.entries(ino) {
		if m.alive(d.Dir) {
			m.live[ino] = true
			break
		}
	}
	return m.live[ino]
}

// ring is the directories of the cycle that dir is in, none when it is in none.
func (m *merged) ring(dir tree.Ino) []tree.Ino {
	var ring []tree.Ino
	for x := dir; x != tree.RootIno; {
		ring = append(ring, x)
		entries := m.entries(x)
		if len(entries) == 0 {
			return nil
		}
		if x = entries[0].Dir; x == dir {
			return ring
		}
		if slices.Contains(ring, x) {
			return nil // the cycle is farther up
		}
	}
	return nil
}

// finish brings link counts and directories' times up to date and sorts the
// outcome.
func (j *judge) finish(inos []InodeChange) *Verdict {
	m := j.mergedTree()
	v := &Verdict{
		Merged: slices.Sorted(maps.Keys(j.merged)), Converged: slices.Sorted(maps.Keys(j.converged)),
		Conflicts: j.conflicts,
	}
	subdirs := map[tree.Ino]int{} // how many more each directory has than in the head
	dirty := map[tree.Ino]bool{}
	for k, d := range j.puts {
		if !m.alive(k.Dir) {
			continue
		}
		v.Dirents = append(v.Dirents, d)
		dirty[k.Dir] = true
		if j.head.at(k.Dir, k.Name).Kind == tree.Dir {
			subdirs[k.Dir]--
		}
		if d.Ino != 0 && d.Kind == tree.Dir {
			subdirs[k.Dir]++
		}
		if d.Ino != 0 && j.plans[d.Ino] == nil && !j.head.alive(d.Ino) {
			j.planNew(d.Ino)
		}
	}
	v.Dirents = append(v.Dirents, j.leftBehind(m)...)
	slices.SortFunc(v.Dirents, func(a, b tree.Dirent) int { return compareKeys(Key{a.Dir, a.Name}, Key{b.Dir, b.Name}) })
	for ino := range dirty {
		j.touchDir(ino)
	}
	for ino := range j.affected {
		if ino != 0 && j.plans[ino] == nil && j.head.alive(ino) && m.alive(ino) {
			if h := j.head.inode(ino); h.Kind != tree.Dir && m.links(ino) != int(h.Nlink) {
				p := InodePlan{Inode: h, HeadIno: ino, Path: j.head.pathOf(ino)}
				if j.session.alive(ino) {
					p.SessionIno = ino
				}
				j.takeHead(&p, h)
				p.Ctime = later(h.Ctime, j.session.inode(ino).Ctime)
				j.plans[ino] = &p
			}
		}
	}
	for _, ino := range slices.Sorted(maps.Keys(j.plans)) {
		if !m.alive(ino) {
			continue
		}
		p := j.plans[ino]
		switch {
		case p.Kind != tree.Dir:
			p.Nlink = uint32(m.links(ino))
		case j.head.alive(ino):
			p.Nlink = uint32(int(j.head.inode(ino).Nlink) + subdirs[ino])
		default:
			p.Nlink = uint32(2 + subdirs[ino])
		}
		v.Inodes = append(v.Inodes, *p)
	}
	for _, c := range inos {
		if j.plans[c.Ino] == nil && !j.entered[c.Ino] && m.alive(c.Ino) && j.timesOnly(c) &&
			j.session.inode(c.Ino).Mtime != j.base.inode(c.Ino).Mtime {
			v.TimeOnly++
		}
	}
	slices.SortStableFunc(v.Conflicts, func(a, b Conflict) int { return strings.Compare(a.Path, b.Path) })
	return v
}

// leftBehind removes the old entries of what moved out of a directory that goes
// with this layer: nobody can reach them, but a directory must not have two.
func (j *judge) leftBehind(m *merged) []tree.Dirent {
	var out []tree.Dirent
	seen := map[Key]bool{}
	for k, d := range j.puts {
		if d.Ino == 0 || !m.alive(k.Dir) {
			continue
		}
		for _, n := range j.head.namesOf(d.Ino) {
			old := Key{n.Dir, n.Name}
			if p, changed := j.puts[old]; (!changed || p.Ino == 0) && !m.alive(n.Dir) && !seen[old] {
				seen[old] = true
				out = append(out, tree.Dirent{Dir: n.Dir, Name: n.Name})
			}
		}
	}
	return out
}

// planNew plans an inode that the head does not have as the session has it.
func (j *judge) planNew(ino tree.Ino) {
	n := j.session.inode(ino)
	p := InodePlan{Inode: n, From: sourceOf(n), SessionIno: ino, Path: j.session.pathOf(ino)}
	if p.BaseIno = j.changes[ino].Lineage; j.base.alive(ino) {
		p.BaseIno = ino
	}
	j.plans[ino] = &p
}

// touchDir plans a directory whose entries change: it was modified when the
// later side modified it.
func (j *judge) touchDir(ino tree.Ino) {
	s := j.session.inode(j.sessionDir[ino])
	p := j.plans[ino]
	if p == nil {
		p = &InodePlan{Inode: j.head.inode(ino), HeadIno: ino, SessionIno: s.Ino, Path: j.session.pathOf(s.Ino)}
		j.plans[ino] = p
	}
	p.Mtime, p.Ctime = later(p.Mtime, s.Mtime), later(p.Ctime, s.Ctime)
}

// timesOnly reports whether the session changed nothing of an inode that counts
// but its times.
func (j *judge) timesOnly(c InodeChange) bool {
	if c.New || !j.base.alive(c.Ino) || !j.session.alive(c.Ino) {
		return false
	}
	b, s := j.base.inode(c.Ino), j.session.inode(c.Ino)
	return sameMeta(b, s) && j.contentKept(b, s)
}
