package stack

import (
	"fmt"
	"slices"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// Apply returns the tree with one more layer on top, s.Commit()+1. It costs
// O(entries of the layer) and leaves s as it is. A layer that would make a tree
// that is none is refused with tree.ErrInvalid: a name put into a directory
// that cannot be reached, a name of an inode without a record, a directory with
// two names.
func (s *Stack) Apply(commit uint64, r *layerfmt.Reader) (*Stack, error) {
	if commit != s.commit+1 {
		return nil, fmt.Errorf("apply commit %d on top of %d: %w", commit, s.commit, tree.ErrInvalid)
	}
	l := layer{commit: commit, reader: r}
	var err error
	if l.dirents, err = s.layerDirents(r); err != nil {
		return nil, err
	}
	next := s.clone()
	next.commit = commit
	next.packs.ReplaceOrInsert(pack{id: r.ID(), reader: r})

	err = r.AllInodes(func(n layerfmt.Inode) bool {
		l.inodes = append(l.inodes, n.Ino)
		next.inodes.ReplaceOrInsert(&inode{ino: n.Ino, commit: commit, reader: r, record: n})
		return true
	})
	if err != nil {
		return nil, err
	}
	for _, d := range l.dirents {
		old, had := next.dirents.ReplaceOrInsert(dirent{d.Dir, d.Name, d.Ino, d.Kind, commit})
		if had && old.ino != 0 {
			next.names.Delete(name{old.ino, old.dir, old.name})
		}
		if d.Ino != 0 {
			next.names.ReplaceOrInsert(name{d.Ino, d.Dir, d.Name})
		}
	}
	next.layers.ReplaceOrInsert(l)

	if err := next.check(l); err != nil {
		return nil, fmt.Errorf("layer %s: %w", r.Name(), err)
	}
	if err := next.markSubtrees(l); err != nil {
		return nil, err
	}
	return next, nil
}

// layerDirents reads the names a layer changes against s, in key order, with
// each opaque record turned into a whiteout of every name it hides.
func (s *Stack) layerDirents(r *layerfmt.Reader) ([]tree.Dirent, error) {
	var out []tree.Dirent
	var opaque []tree.Ino
	err := r.AllDirents(func(d layerfmt.Dirent) bool {
		switch d.Op {
		case layerfmt.Opaque:
			opaque = append(opaque, d.Dir)
		case layerfmt.Whiteout:
			out = append(out, tree.Dirent{Dir: d.Dir, Name: d.Name})
		default:
			out = append(out, d.Dirent)
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	own := out
	for _, dir := range opaque {
		err := s.ReadDir(dir, "", func(d tree.Dirent) bool {
			if _, ok := slices.BinarySearchFunc(own, d, compareDirent); !ok {
				out = append(out, tree.Dirent{Dir: d.Dir, Name: d.Name})
			}
			return true
		})
		if err != nil {
			return nil, err
		}
	}
	if len(opaque) > 0 {
		slices.SortFunc(out, compareDirent)
	}
	return out, nil
}

// check refuses a layer, already applied to s, that breaks the tree. A name
// that cannot be reached would be content lost without a word.
func (s *Stack) check(l layer) error {
	reached := map[tree.Ino]bool{}
	for _, d := range l.dirents {
		if d.Ino == 0 {
			continue
		}
		n, err := s.Inode(d.Ino)
		if err != nil {
			return fmt.Errorf("name %q in directory %d stands for inode %d: %w", d.Name, d.Dir, d.Ino, invalid(err))
		}
		if n.Kind != d.Kind {
			return fmt.Errorf("name %q in directory %d is a %s, its inode %d a %s: %w", d.Name, d.Dir, d.Kind, d.Ino, n.Kind, tree.ErrInvalid)
		}
		if d.Kind == tree.Dir {
			names, err := s.rawNames(d.Ino)
			if err != nil {
				return err
			}
			if len(names) > 1 || d.Ino == tree.RootIno {
				return fmt.Errorf("directory %d has a second name, %q in directory %d: %w", d.Ino, d.Name, d.Dir, tree.ErrInvalid)
			}
		}
		if reached[d.Dir] {
			continue
		}
		dir, err := s.Inode(d.Dir)
		if err != nil {
			return fmt.Errorf("name %q is put into directory %d: %w", d.Name, d.Dir, invalid(err))
		}
		_, ok, err := s.climb(d.Dir)
		if err != nil {
			return err
		}
		if !ok || dir.Kind != tree.Dir {
			return fmt.Errorf("name %q is put into %s %d, which is not in the tree: %w", d.Name, dir.Kind, d.Dir, tree.ErrInvalid)
		}
		reached[d.Dir] = true
	}
	return nil
}

// invalid turns an absent record, which is a fault of the layer, into
// tree.ErrInvalid and leaves every other error as it is.
func invalid(err error) error {
	if err == tree.ErrNotExist {
		return fmt.Errorf("no record of it: %w", tree.ErrInvalid)
	}
	return err
}

// markSubtrees notes the commit at every directory above a change. It is enough
// to look at where things are now: whatever was above a change and no longer is
// had a name on the way removed in this commit, which is itself a change beneath
// it.
func (s *Stack) markSubtrees(l layer) error {
	done := map[tree.Ino]bool{}
	mark := func(dir tree.Ino) error {
		for !done[dir] {
			done[dir] = true
			s.subtree.ReplaceOrInsert(subtree{dir, s.commit})
			up, ok, err := s.parent(dir)
			if err != nil || !ok {
				return err
			}
			dir = up.Dir
		}
		return nil
	}
	for _, d := range l.dirents {
		if err := mark(d.Dir); err != nil {
			return err
		}
	}
	for _, ino := range l.inodes {
		names, err := s.rawNames(ino)
		if err != nil {
			return err
		}
		for _, d := range names {
			if err := mark(d.Dir); err != nil {
				return err
			}
		}
	}
	return nil
}
