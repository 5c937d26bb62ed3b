package session

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ/linediff"
)

// DiffRequest says what of a workspace's changes to show.
type DiffRequest struct {
	Path    string // only this path and what is beneath it; empty for all
	Context int    // unchanged lines around each change
	Stat    bool   // no diff text
}

// The ways in which a path can differ from the base.
const (
	Added    = "added"
	Modified = "modified"
	Removed  = "removed"
	Renamed  = "renamed"
	Metadata = "metadata"
)

// Change is one path that differs from the base.
type Change struct {
	Path, From string // From is the old path of what was renamed
	Change     string
	Old, New   *tree.Inode // nil where absent; Hash is filled in
	Binary     bool
	Added      int // lines
	Removed    int
	Diff       []byte // unified; empty for what is not text
}

// Diff lists what the workspace changed against its base, in byte order of
// paths.
func (w *Workspace) Diff(ctx context.Context, r DiffRequest) ([]Change, error) {
	leave, err := w.enterGate()
	if err != nil {
		return nil, err
	}
	defer leave()
	ctx, done := w.working(ctx)
	defer done()
	w.fs.Freeze()
	defer w.fs.Thaw()
	delta, err := w.fs.Delta()
	if err != nil {
		return nil, fmt.Errorf("capture the delta: %w", err)
	}
	d := differ{base: stackView{w.base().Stack()}, now: w.upperView(ctx), req: r}
	prefix, err := tree.SplitPath(r.Path)
	if err != nil {
		return nil, &PathError{r.Path, "give a path inside the workspace", tree.ErrInvalid}
	}
	d.prefix = strings.Join(prefix, "/")
	if err := d.collect(delta); err != nil {
		return nil, err
	}
	slices.SortFunc(d.list, func(a, b Change) int { return strings.Compare(a.Path, b.Path) })
	return d.list, nil
}

type differ struct {
	base   stackView
	now    upperView
	req    DiffRequest
	prefix string
	list   []Change
}

func (d *differ) collect(delta *overlay.Delta) error {
	seen := map[tree.Ino]bool{} // inodes that a name has accounted for
	for _, e := range delta.Dirents {
		if d.now.ctx.Err() != nil {
			return context.Cause(d.now.ctx)
		}
		if err := d.entry(e, seen); err != nil {
			return err
		}
	}
	for _, n := range delta.Inodes {
		if seen[n.Ino] || n.New || !n.Data && !n.Meta {
			continue
		}
		p, err := d.now.Path(n.Ino)
		if errors.Is(err, tree.ErrNotExist) {
			continue // unlinked, but still open
		}
		if err != nil {
			return err
		}
		if err := d.compare(p, p, n.Ino, n.Ino); err != nil {
			return err
		}
	}
	return nil
}

// entry accounts for one changed name. A name that an inode lost counts as
// renamed at the inode's new name, so it is passed over here.
func (d *differ) entry(e overlay.DirentChange, seen map[tree.Ino]bool) error {
	if e.Ino == 0 {
		names, err := d.now.Names(e.Was)
		if err == nil && len(names) > 0 && !d.keptName(e.Was) {
			return nil // renamed
		}
		dir, err := d.base.Path(e.Dir)
		if errors.Is(err, tree.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return d.compare(join(dir, e.Name), "", e.Was, 0)
	}
	dir, err := d.now.Path(e.Dir)
	if errors.Is(err, tree.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	seen[e.Ino] = true
	to := join(dir, e.Name)
	if e.Was != 0 {
		return d.compare(to, to, e.Was, e.Ino)
	}
	if from, err := d.base.Path(e.Ino); err == nil && !d.keptName(e.Ino) {
		return d.compare(from, to, e.Ino, e.Ino)
	}
	return d.compare("", to, 0, e.Ino)
}

// keptName tells whether one of the names ino has in the base is still its own:
// another name is then a new link, and a lost one no rename.
func (d *differ) keptName(ino tree.Ino) bool {
	names, err := d.base.Names(ino)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(names, func(n tree.Dirent) bool {
		now, err := d.now.FS.Lookup(n.Dir, n.Name)
		return err == nil && now.Ino == ino
	})
}

// compare appends the change from one path of the base to one of the session;
// an empty path is an absent side.
func (d *differ) compare(from, to string, old, now tree.Ino) error {
	c := Change{Path: to, Change: Modified}
	var err error
	if from != "" {
		if c.Old, err = d.side(d.base, old); err != nil {
			return err
		}
	}
	if to != "" {
		if c.New, err = d.side(d.now, now); err != nil {
			return err
		}
	}
	switch {
	case from == "":
		c.Change = Added
	case to == "":
		c.Path, c.Change = from, Removed
	case from != to:
		c.From, c.Change = from, Renamed
	case c.Old.Kind == c.New.Kind && c.Old.Hash == c.New.Hash && c.Old.Link == c.New.Link && c.Old.Rdev == c.New.Rdev:
		c.Change = Metadata
		if c.Old.Kind == tree.Dir && old == now && c.Old.Mode == c.New.Mode && c.Old.UID == c.New.UID && c.Old.GID == c.New.GID && len(c.Old.Xattrs) == 0 && len(c.New.Xattrs) == 0 {
			return nil // only what its entries changed
		}
	}
	if !d.wanted(c.Path) && (c.From == "" || !d.wanted(c.From)) {
		return nil
	}
	if err := d.text(&c, from, to, old, now); err != nil {
		return fmt.Errorf("diff of %q: %w", c.Path, err)
	}
	d.list = append(d.list, c)
	return nil
}

func (d *differ) wanted(p string) bool {
	return d.prefix == "" || p == d.prefix || strings.HasPrefix(p, d.prefix+"/")
}

// hasher is the part of a view that compare needs.
type hasher interface {
	Inode(ino tree.Ino) (tree.Inode, error)
	Hash(ino tree.Ino) (tree.Hash, error)
}

func (d *differ) side(v hasher, ino tree.Ino) (*tree.Inode, error) {
	n, err := v.Inode(ino)
	if err != nil {
		return nil, err
	}
	if n.Kind == tree.File {
		n.Hash, err = v.Hash(ino)
	}
	return &n, err
}

func (d *differ) text(c *Change, from, to string, old, now tree.Ino) error {
	isFile := func(n *tree.Inode) bool { return n != nil && n.Kind == tree.File }
	if !isFile(c.Old) && !isFile(c.New) || isFile(c.Old) && isFile(c.New) && c.Old.Hash == c.New.Hash {
		return nil
	}
	var a, b []byte
	var err error
	nameA, nameB := "/dev/null", "/dev/null"
	for _, side := range []struct {
		n    *tree.Inode
		name string
		to   *string
		text *[]byte
		read func() ([]byte, error)
	}{
		{c.Old, "a/" + from, &nameA, &a, func() ([]byte, error) { return d.base.Content(old) }},
		{c.New, "b/" + to, &nameB, &b, func() ([]byte, error) { return d.now.Content(now) }},
	} {
		if !isFile(side.n) {
			continue
		}
		if side.n.Size > linediff.MaxBytes {
			c.Binary = true
			return nil
		}
		if *side.text, err = side.read(); err != nil {
			return err
		}
		*side.to = side.name
	}
	if !linediff.IsText(a) || !linediff.IsText(b) {
		c.Binary = true
		return nil
	}
	for _, e := range linediff.Diff(linediff.Split(a), linediff.Split(b)) {
		c.Removed += e.A1 - e.A0
		c.Added += e.B1 - e.B0
	}
	if !d.req.Stat {
		c.Diff = bytes.Clone(linediff.Unified(nameA, nameB, a, b, d.req.Context))
	}
	return nil
}
