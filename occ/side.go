package occ

import (
	"errors"

	"ephemeral-sandbox/fs/tree"
)

// side is a view as the judge asks it: what is absent is zero, and the first
// error that means anything else is kept in err, after which answers are void.
type side struct {
	view  View
	err   *error
	names map[tree.Ino][]tree.Dirent
	live  map[tree.Ino]bool
	paths map[tree.Ino]string // of directories
	sums  map[tree.Ino]tree.Hash
}

func newSide(v View, err *error) *side {
	return &side{
		view: v, err: err, names: map[tree.Ino][]tree.Dirent{},
		live:  map[tree.Ino]bool{tree.RootIno: true},
		paths: map[tree.Ino]string{0: "", tree.RootIno: ""},
		sums:  map[tree.Ino]tree.Hash{},
	}
}

// note keeps an error unless it says that something is not there: a directory of
// one side may be unknown to another, or be no directory there.
func (s *side) note(err error) {
	if !errors.Is(err, tree.ErrNotExist) && !errors.Is(err, tree.ErrNotDir) && !errors.Is(err, tree.ErrStale) {
		s.fail(err)
	}
}

// fail keeps an error, of which only the first counts.
func (s *side) fail(err error) {
	if *s.err == nil {
		*s.err = err
	}
}

// at is the entry of a directory under a name. Directory 0 is empty.
func (s *side) at(dir tree.Ino, name string) tree.Dirent {
	if dir == 0 {
		return tree.Dirent{}
	}
	d, err := s.view.Lookup(dir, name)
	if err != nil {
		s.note(err)
		return tree.Dirent{}
	}
	return d
}

func (s *side) inode(ino tree.Ino) tree.Inode {
	if ino == 0 {
		return tree.Inode{}
	}
	n, err := s.view.Inode(ino)
	if err != nil {
		s.note(err)
		return tree.Inode{}
	}
	return n
}

// namesOf lists the names of ino that can be reached from the root.
func (s *side) namesOf(ino tree.Ino) []tree.Dirent {
	if known, ok := s.names[ino]; ok {
		return known
	}
	all, err := s.view.Names(ino)
	s.note(err)
	var reached []tree.Dirent
	if err == nil {
		for _, d := range all {
			if s.alive(d.Dir) {
				reached = append(reached, d)
			}
		}
	}
	s.names[ino] = reached
	return reached
}

// alive reports whether ino can be reached from the root.
func (s *side) alive(ino tree.Ino) bool {
	if ino == 0 {
		return false
	}
	if known, ok := s.live[ino]; ok {
		return known
	}
	s.live[ino] = false // should a broken view have a cycle
	s.live[ino] = len(s.namesOf(ino)) > 0
	return s.live[ino]
}

func (s *side) children(dir tree.Ino) []tree.Dirent {
	var list []tree.Dirent
	if dir != 0 {
		s.note(s.view.ReadDir(dir, "", func(d tree.Dirent) bool {
			d.Dir = dir
			list = append(list, d)
			return true
		}))
	}
	return list
}

// path is the path of an entry.
func (s *side) path(k Key) string { return join(s.dirPath(k.Dir), k.Name) }

// dirPath is the path of a directory, empty when it cannot be reached. Each is
// put together once, from its parent's: a view would climb to the root for every
// entry, and that makes a deep tree quadratic.
func (s *side) dirPath(dir tree.Ino) string {
	if known, ok := s.paths[dir]; ok {
		return known
	}
	s.paths[dir] = "" // should a broken view have a cycle
	if names := s.namesOf(dir); len(names) > 0 {
		s.paths[dir] = s.path(Key{names[0].Dir, names[0].Name})
	}
	return s.paths[dir]
}

// pathOf is the first path of an inode, empty for the root and for none.
func (s *side) pathOf(ino tree.Ino) string {
	if names := s.namesOf(ino); len(names) > 0 && ino != tree.RootIno {
		return s.path(Key{names[0].Dir, names[0].Name})
	}
	return ""
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// hash is the content hash of a regular file, from its record where that has
// one.
func (s *side) hash(n tree.Inode) tree.Hash {
	if n.Hash != (tree.Hash{}) {
		return n.Hash
	}
	if h, ok := s.sums[n.Ino]; ok {
		return h
	}
	h, err := s.view.Hash(n.Ino)
	s.fail(err)
	s.sums[n.Ino] = h
	return h
}

func (s *side) content(ino tree.Ino) []byte {
	b, err := s.view.Content(ino)
	s.fail(err)
	return b
}

// version describes ino for a report, nil when the side does not have it.
func (s *side) version(ino tree.Ino) *Version {
	if !s.alive(ino) {
		return nil
	}
	n := s.inode(ino)
	v := &Version{Path: s.pathOf(ino), Kind: n.Kind, Mode: n.Mode, Size: n.Size, Link: n.Link}
	if n.Kind == tree.File {
		v.Hash = s.hash(n)
	}
	return v
}
