package session

import (
	"bytes"
	"context"
	"fmt"

	"ephemeral-sandbox/attribution"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ"
)

// RefreshRequest says on whose account a workspace moves to the head.
type RefreshRequest struct {
	Operation Operation
	Flush     func(context.Context) error // as in PublishRequest
}

// Refreshed is what a refresh did.
type Refreshed struct {
	Base, Previous uint64
	Moved          []string // paths that show the head's version now
	Merged         []string // paths whose content was merged
	Conflicts      []occ.Conflict
}

// Refresh puts the workspace on the current head. What the head changed and the
// session did not appears silently; text that both changed is merged, with
// conflict markers where it clashes; of anything else that clashes the session
// keeps its version and finds the head's beside it.
func (w *Workspace) Refresh(ctx context.Context, r RefreshRequest) (Refreshed, error) {
	leave, err := w.enterGate()
	if err != nil {
		return Refreshed{}, err
	}
	defer leave()
	ctx, done := w.working(ctx)
	defer done()

	head, err := w.opts.History.LeaseHead()
	if err != nil {
		return Refreshed{}, fmt.Errorf("lease the head: %w", err)
	}
	base := w.base().Stack()
	out := Refreshed{Base: head.Stack().Commit(), Previous: base.Commit()}
	if out.Base == out.Previous {
		head.Release()
		return out, nil
	}
	landed := false
	defer func() {
		if !landed {
			head.Release()
		}
	}()
	if r.Flush != nil {
		if err := r.Flush(ctx); err != nil {
			return Refreshed{}, fmt.Errorf("flush the view: %w", err)
		}
	}
	w.fs.Freeze()
	thaw := sync1(w.fs.Thaw)
	defer thaw()
	delta, err := w.fs.Delta()
	if err != nil {
		return Refreshed{}, fmt.Errorf("capture the delta: %w", err)
	}
	_, sp := w.span(ctx, "plan")
	view := w.upperView(ctx)
	plan, err := occ.Refresh(stackView{base}, base.Commit(), stackView{head.Stack()}, view, occDelta(delta), w.labels(out), w.inos.next, occ.Options{Now: tree.At(w.opts.Clock())})
	sp.End(err)
	if err != nil {
		return Refreshed{}, fmt.Errorf("plan the refresh: %w", err)
	}

	w.nameCulprits(head.Stack(), plan.Conflicts)
	m := refreshMove{w: w, op: r.Operation, delta: delta, view: view, base: base, head: head.Stack(), plan: plan}
	edit, err := m.edit()
	if err != nil {
		return Refreshed{}, err
	}
	if err := w.lines.prepare(out.Base, plan.DropInodes, m.owners); err != nil {
		return Refreshed{}, err
	}
	_, sp = w.span(ctx, "rebase")
	err = w.fs.Rebase(head.Stack(), edit)
	sp.End(err)
	if err != nil {
		return Refreshed{}, fmt.Errorf("move the session onto commit %d: %w", out.Base, err)
	}
	landed = true
	w.swapBase(head)
	w.lines.move(out.Base)
	thaw()
	w.notify(m.changed())
	out.Merged, out.Conflicts = plan.Merged, plan.Conflicts
	out.Moved = m.moved()
	return out, nil
}

func (w *Workspace) labels(r Refreshed) occ.Labels {
	return occ.Labels{
		Base:    fmt.Sprintf("base L%06d", r.Previous),
		Head:    fmt.Sprintf("head L%06d", r.Base),
		Session: "session " + w.id,
	}
}

// refreshMove turns a plan into edits of the upper.
type refreshMove struct {
	w          *Workspace
	op         Operation
	delta      *overlay.Delta
	view       upperView
	base, head *stack.Stack
	plan       *occ.Plan
	owners     map[tree.Ino]fileOwners // settled state of the files the move writes
}

func (m *refreshMove) edit() (overlay.Edit, error) {
	m.owners = map[tree.Ino]fileOwners{}
	e := overlay.Edit{Op: m.op.Number, DropInodes: m.plan.DropInodes, Dirents: m.plan.Dirents}
	for _, k := range m.plan.DropDirents {
		e.DropDirents = append(e.DropDirents, overlay.Key(k))
	}
	for i := range m.plan.Inodes {
		n := &m.plan.Inodes[i]
		if n.Kind != tree.File {
			e.NewInodes = append(e.NewInodes, overlay.NewInode{Inode: n.Inode, Op: m.op.Number})
			continue
		}
		f, err := m.file(n)
		if err != nil {
			return e, fmt.Errorf("%s: %w", n.Path, err)
		}
		e.Files = append(e.Files, f)
	}
	return e, nil
}

func (m *refreshMove) file(n *occ.FileEdit) (overlay.FileEdit, error) {
	e := overlay.FileEdit{Ino: n.Ino, Attr: &n.Inode, Op: m.op.Number}
	marker := m.w.who.origin(m.op.Number)
	switch n.From {
	case occ.FromMerged:
		e.Content = n.Merged
		mine, err := m.sessionOwners(n.SessionIno)
		if err != nil {
			return e, err
		}
		if n.Pieces == nil {
			m.owners[n.Ino], err = mine.advance(bytes.NewReader(n.Merged), marker)
			return e, err
		}
		theirs := fileOwners{}
		if n.HeadIno != 0 {
			if theirs, err = m.w.tables.layerOwners(m.head, n.HeadIno); err != nil {
				return e, err
			}
		}
		m.owners[n.Ino], err = selectOwners(n.Pieces, m.withBase(n), n.Merged, theirs, mine, marker)
		return e, err
	case occ.FromHead:
		var err error
		if e.Source, err = m.head.Open(n.HeadIno); err != nil {
			return e, err
		}
		m.owners[n.Ino], err = m.w.tables.layerOwners(m.head, n.HeadIno)
		return e, err
	default:
		var err error
		if e.Source, err = m.view.Data(n.SessionIno); err != nil {
			return e, err
		}
		m.owners[n.Ino], err = m.sessionOwners(n.SessionIno)
		return e, err
	}
}

func (m *refreshMove) withBase(n *occ.FileEdit) func() (attribution.Spans, error) {
	return func() (attribution.Spans, error) {
		f, err := m.w.tables.layerOwners(m.base, n.BaseIno)
		return f.spans.Spans, err
	}
}

func (m *refreshMove) sessionOwners(ino tree.Ino) (fileOwners, error) {
	c, ok := findInode(m.delta, ino)
	if !ok || !c.Data {
		return m.w.tables.layerOwners(m.base, ino)
	}
	f, err := m.view.Data(ino)
	if err != nil {
		return fileOwners{}, err
	}
	return m.w.ownersNow(ino, c.LastOp, f)
}

// changed is what the kernel must forget: every key that moved with the base or
// was edited.
func (m *refreshMove) changed() (entries []overlay.Key, inos []tree.Ino) {
	m.head.Changes(m.base.Commit(), func(c stack.Change) bool {
		if c.Dirent != nil {
			entries = append(entries, overlay.Key{Dir: c.Dirent.Dir, Name: c.Dirent.Name})
		} else {
			inos = append(inos, c.Inode)
		}
		return true
	})
	for _, d := range m.plan.Dirents {
		entries = append(entries, overlay.Key{Dir: d.Dir, Name: d.Name})
	}
	for _, k := range m.plan.DropDirents {
		entries = append(entries, overlay.Key(k))
	}
	for _, n := range m.plan.Inodes {
		inos = append(inos, n.Ino)
	}
	return entries, append(inos, m.plan.DropInodes...)
}

// moved lists the paths that the head changed and the session now shows, in
// byte order.
func (m *refreshMove) moved() []string {
	set := pathSet{}
	mine := map[tree.Ino]bool{}
	for _, n := range m.plan.Inodes {
		mine[n.Ino] = true
	}
	m.head.Changes(m.base.Commit(), func(c stack.Change) bool {
		switch {
		case c.Dirent != nil:
			if dir, err := m.w.fs.Path(c.Dirent.Dir); err == nil {
				set.add(join(dir, c.Dirent.Name))
			} else if dir, err := m.base.Path(c.Dirent.Dir); err == nil {
				set.add(join(dir, c.Dirent.Name))
			}
		case !mine[c.Inode]:
			if n, err := m.head.Inode(c.Inode); err != nil || n.Kind == tree.Dir {
				return true // its entries are listed one by one
			}
			if p, err := m.w.fs.Path(c.Inode); err == nil {
				set.add(p)
			}
		}
		return true
	})
	for _, p := range m.plan.Merged {
		delete(set, p)
	}
	for _, c := range m.plan.Conflicts {
		delete(set, c.Path)
	}
	return set.sorted()
}
