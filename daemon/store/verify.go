package store

import (
	"context"
	"errors"
	"fmt"

	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// Report is what Verify found.
type Report struct {
	Commits  int
	Layers   int   // read from end to end
	Bytes    int64 // of those layers, as stored
	Problems []string
}

// Verify reads everything a sandbox consists of: the log and its chain, every
// page, frame and hash of every layer, that every name has its inode, and that
// content kept in another layer is there. Problems are reported, not returned;
// the error is that the check could not be carried out.
func (s *Store) Verify(ctx context.Context) (Report, error) {
	var rep Report
	if s.damage != nil {
		rep.problem(s.damage)
	}
	commits := s.Commits()
	if err := s.verifyLog(&rep, commits); err != nil {
		return rep, err
	}
	s.mu.RLock()
	stacks := s.stacks[:len(commits):len(commits)]
	s.mu.RUnlock()
	for i, c := range commits {
		if err := s.verifyLayer(ctx, &rep, c, stacks[i]); err != nil {
			return rep, err
		}
	}
	return rep, nil
}

func (r *Report) problem(err error) { r.Problems = append(r.Problems, err.Error()) }

// judge files what is wrong with the data and returns any other error.
func (r *Report) judge(what string, err error) error {
	if err == nil {
		return nil
	}
	if layerfmt.IsCorrupt(err) || errors.Is(err, tree.ErrInvalid) {
		r.problem(fmt.Errorf("%s: %w", what, err))
		return nil
	}
	return fmt.Errorf("verify %s: %w", what, err)
}

// verifyLog reads the log again and compares it with what was replayed.
func (s *Store) verifyLog(rep *Report, commits []Commit) error {
	err := s.log.Read(func(number uint64, b []byte) error {
		r, err := decodeRecord(b)
		if err != nil {
			return err
		}
		rep.Commits++
		if number < uint64(len(commits)) && r.Digest != commits[number].Digest {
			rep.problem(fmt.Errorf("log: record %s is not the one that was committed", CommitName(number)))
		}
		return nil
	})
	return rep.judge("log", err)
}

func (s *Store) verifyLayer(ctx context.Context, rep *Report, c Commit, view *stack.Stack) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	what := "layer " + CommitName(c.Number)
	if !c.Inline {
		what += " (" + packName(c.Pack) + ")"
	}
	r := view.Layer(c.Number)
	err := r.Verify(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	rep.Layers++
	rep.Bytes += c.StoredBytes
	if err != nil {
		return rep.judge(what, err)
	}
	if r.ID() != c.Pack {
		rep.problem(fmt.Errorf("%s: the pack is %s, the log names %s", what, r.ID(), c.Pack))
	}
	if err := rep.judge(what, verifyForeign(r, view)); err != nil {
		return err
	}
	if c.Number == 0 {
		return rep.judge(what, verifyBase(r))
	}
	return nil
}

// verifyForeign checks that content said to be in another layer is there.
func verifyForeign(r *layerfmt.Reader, view *stack.Stack) error {
	var errs []error
	err := r.AllInodes(func(n layerfmt.Inode) bool {
		if n.Content == layerfmt.Foreign {
			if _, err := view.Open(n.Ino); err != nil {
				errs = append(errs, err)
			}
		}
		return true
	})
	return errors.Join(append(errs, err)...)
}

// verifyBase checks what Apply checks of every later layer: that a name's inode
// is there and of the kind the name says, and that its directory is one.
func verifyBase(r *layerfmt.Reader) error {
	kinds := make(map[tree.Ino]tree.Kind)
	err := r.AllInodes(func(n layerfmt.Inode) bool {
		kinds[n.Ino] = n.Kind
		return true
	})
	if err != nil {
		return err
	}
	var errs []error
	err = r.AllDirents(func(d layerfmt.Dirent) bool {
		if d.Op != layerfmt.Put || d.Kind != kinds[d.Ino] || kinds[d.Dir] != tree.Dir {
			errs = append(errs, fmt.Errorf("name %q in directory %d does not fit inode %d: %w", d.Name, d.Dir, d.Ino, tree.ErrInvalid))
		}
		return len(errs) < 100
	})
	return errors.Join(append(errs, err)...)
}
