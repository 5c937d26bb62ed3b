package session

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"ephemeral-sandbox/attribution"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
	"ephemeral-sandbox/occ"
	"ephemeral-sandbox/occ/merge"
)

// PublishRequest says how a workspace's changes are to become a commit.
type PublishRequest struct {
	Operation  Operation
	Message    string
	ExpectHead *uint64 // refuse unless the head is this commit
	// Flush writes the dirty pages of shared mappings into the view; nil where
	// nothing is mounted.
	Flush func(context.Context) error
}

// Publication is what came of a publish that was not refused.
type Publication struct {
	Committed   bool // false: there was nothing to publish
	Commit      uint64
	Parent      uint64
	Merged      []string
	Counts      map[string]int64
	StoredBytes int64
}

// ConflictError refuses a publication whole. The workspace is as it was.
type ConflictError struct {
	Base, Head uint64
	Conflicts  []occ.Conflict
}

func (e *ConflictError) Error() string {
	n := fmt.Sprintf("%d paths conflict", len(e.Conflicts))
	if len(e.Conflicts) == 1 {
		n = fmt.Sprintf("%q conflicts", e.Conflicts[0].Path)
	}
	return n + " with the head and nothing was published: refresh the session, resolve, and publish again"
}

// LandError says that the changes were committed, but that the workspace could
// not be moved onto the commit: it goes on from where it stood, and finds at its
// next publication that the head has these changes already.
type LandError struct {
	Commit uint64
	Err    error
}

func (e *LandError) Error() string {
	return fmt.Sprintf("committed, but the session could not be moved onto the commit: %v", e.Err)
}

func (e *LandError) Unwrap() error { return e.Err }

// HeadMovedError refuses a publication that expected another head.
type HeadMovedError struct{ Expected, Head uint64 }

func (e *HeadMovedError) Error() string {
	return fmt.Sprintf("the head is commit %d, not %d as expected: refresh and look again, or publish without the expectation", e.Head, e.Expected)
}

// Publish makes one layer of the workspace's changes on top of the head, or
// refuses and changes nothing. Afterwards the workspace stands on the new
// commit. With a LandError the Publication is valid too: it was committed. A
// crash before Advance leaves a layer that no commit names; a crash
// between Advance and Rebase leaves an upper that repeats what the head holds,
// which the next publication finds to be no change.
func (w *Workspace) Publish(ctx context.Context, r PublishRequest) (Publication, error) {
	leave, err := w.enterGate()
	if err != nil {
		return Publication{}, err
	}
	defer leave()
	ctx, done := w.working(ctx)
	defer done()

	if r.Flush != nil {
		_, sp := w.span(ctx, "flush mappings")
		err := r.Flush(ctx)
		sp.End(err)
		if err != nil {
			return Publication{}, fmt.Errorf("flush the view: %w", err)
		}
	}
	_, sp := w.span(ctx, "capture")
	w.fs.Freeze()
	thaw := sync1(w.fs.Thaw)
	defer thaw()
	delta, err := w.fs.Delta()
	sp.End(err)
	if err != nil {
		return Publication{}, fmt.Errorf("capture the delta: %w", err)
	}

	p := publication{w: w, req: r, delta: delta, view: w.upperView(ctx)}
	if err := p.setAside(); err != nil {
		return Publication{}, err
	}
	for landed := false; !landed; {
		if ctx.Err() != nil {
			return Publication{}, context.Cause(ctx)
		}
		if landed, err = p.attempt(ctx); err != nil {
			return p.result, err
		}
	}
	thaw()
	w.notify(p.entries, p.inodes)
	return p.result, nil
}

// publication is one Publish on its way through the gate.
type publication struct {
	w     *Workspace
	req   PublishRequest
	delta *overlay.Delta
	view  upperView
	same  map[overlay.Key]overlay.DirentChange // replaced by an equal file; see setAside

	result  Publication
	entries []overlay.Key // what the kernel must forget
	inodes  []tree.Ino
}

// setAside finds the files that were replaced by equal ones, as an editor does
// that saves what it read: only their times differ, so they are not published,
// and like other changes of times alone they stay private.
func (p *publication) setAside() error {
	p.same = map[overlay.Key]overlay.DirentChange{}
	base := p.w.base().Stack()
	for _, d := range p.delta.Dirents {
		now, ok := findInode(p.delta, d.Ino)
		if d.Ino == 0 || d.Was == 0 || d.Kind != tree.File || !ok || !now.New || now.Nlink != 1 {
			continue
		}
		was, err := base.Inode(d.Was)
		if err != nil {
			return fmt.Errorf("read inode %d of the base: %w", d.Was, err)
		}
		if was.Kind != tree.File || was.Nlink != 1 || was.Size != now.Size || was.Mode != now.Mode ||
			was.UID != now.UID || was.GID != now.GID || !slices.EqualFunc(was.Xattrs, now.Xattrs, sameXattr) {
			continue
		}
		if names, err := p.w.fs.Names(d.Was); err == nil && len(names) > 0 {
			continue // moved elsewhere: its old name was given anew
		}
		hash, err := p.view.Hash(d.Ino)
		if err != nil {
			return err
		}
		if hash == was.Hash {
			p.same[overlay.Key{Dir: d.Dir, Name: d.Name}] = d
		}
	}
	return nil
}

func sameXattr(a, b tree.Xattr) bool { return a.Name == b.Name && bytes.Equal(a.Value, b.Value) }

// gated is the delta without what was set aside.
func (p *publication) gated() occ.Delta {
	d := occDelta(p.delta)
	if len(p.same) == 0 {
		return d
	}
	aside := map[tree.Ino]bool{}
	d.Dirents = slices.DeleteFunc(d.Dirents, func(e occ.DirentChange) bool {
		s, ok := p.same[overlay.Key{Dir: e.Dir, Name: e.Name}]
		if ok {
			aside[s.Ino], aside[s.Was] = true, true
		}
		return ok
	})
	d.Inodes = slices.DeleteFunc(d.Inodes, func(n occ.InodeChange) bool { return aside[n.Ino] })
	return d
}

// attempt validates against the head of this moment and tries to move it; false
// means that another commit landed first.
func (p *publication) attempt(ctx context.Context) (done bool, err error) {
	w := p.w
	head, err := w.opts.History.LeaseHead()
	if err != nil {
		return false, fmt.Errorf("lease the head: %w", err)
	}
	defer head.Release()
	parent := head.Stack().Commit()
	if e := p.req.ExpectHead; e != nil && *e != parent {
		return false, &HeadMovedError{Expected: *e, Head: parent}
	}

	base := w.base().Stack()
	_, sp := w.span(ctx, "validate")
	v, err := occ.Validate(stackView{base}, base.Commit(), stackView{head.Stack()}, p.view, p.gated(), occ.Options{Now: tree.At(w.opts.Clock())})
	sp.End(err)
	if err != nil {
		return false, fmt.Errorf("validate: %w", err)
	}
	if len(v.Conflicts) > 0 {
		w.nameCulprits(head.Stack(), v.Conflicts)
		return false, &ConflictError{Base: base.Commit(), Head: parent, Conflicts: v.Conflicts}
	}
	result := Publication{Commit: parent, Parent: parent, Merged: v.Merged, Counts: counts(v, base)}
	result.Counts["time_only"] += int64(len(p.same))
	if v.Empty() {
		p.result = result
		// What both sides changed alike is in the head already: standing on it
		// is all that is left to do.
		if parent == base.Commit() || len(p.delta.Dirents)+len(p.delta.Inodes) == 0 {
			return true, nil
		}
		return true, p.land(ctx, v, head.Stack(), parent)
	}

	_, sp = w.span(ctx, "seal")
	sealed, err := w.opts.History.Seal(func(lw *layerfmt.Writer) error {
		return p.write(ctx, lw, v, head.Stack())
	})
	sp.End(err)
	if err != nil {
		return false, fmt.Errorf("seal the layer: %w", err)
	}
	_, sp = w.span(ctx, "commit")
	commit, won, err := w.opts.History.Advance(parent, sealed, Meta{
		Session: w.id, Operation: p.req.Operation.ID, RequestID: p.req.Operation.ID,
		Message: p.req.Message, Time: w.opts.Clock(), Merged: v.Merged, Counts: result.Counts,
	})
	sp.End(err)
	if err != nil || !won {
		return false, errors.Join(err, sealed.Discard())
	}
	result.Committed, result.Commit, result.StoredBytes = true, commit.Number, commit.StoredBytes
	p.result = result
	if err := p.land(ctx, v, head.Stack(), commit.Number); err != nil {
		return false, &LandError{Commit: commit.Number, Err: err}
	}
	return true, nil
}

// nameCulprits makes each clash of lines name the commit that wrote the lines it
// is about; the commit that changed the file last may be another one. Where the
// owners cannot be read the last commit stands.
func (w *Workspace) nameCulprits(head *stack.Stack, conflicts []occ.Conflict) {
	for i := range conflicts {
		c := &conflicts[i]
		if c.HeadIno == 0 || len(c.Hunks) == 0 {
			continue
		}
		f, err := w.tables.layerOwners(head, c.HeadIno)
		if err != nil {
			continue
		}
		var newest uint64
		for _, h := range c.Hunks {
			for _, r := range f.ranges() {
				if r.Start <= h.Head.Start+h.Head.Count && h.Head.Start+1 < r.Start+r.Count {
					newest = max(newest, r.Origin.Commit)
				}
			}
		}
		if newest > 0 {
			c.HeadCommit = newest
		}
	}
}

// write fills a layer with the verdict and with the owners of its lines.
func (p *publication) write(ctx context.Context, lw *layerfmt.Writer, v *occ.Verdict, head *stack.Stack) error {
	for _, d := range v.Dirents {
		op := layerfmt.Put
		if d.Ino == 0 {
			op = layerfmt.Whiteout
		}
		if err := lw.AddDirent(layerfmt.Dirent{Op: op, Dirent: d}); err != nil {
			return err
		}
	}
	owners := map[tree.Ino]attribution.FileSpans{}
	for i := range v.Inodes {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n := &v.Inodes[i]
		if err := p.writeInode(lw, n, head); err != nil {
			return fmt.Errorf("%s: %w", n.Path, err)
		}
		if n.Kind != tree.File {
			continue
		}
		f, err := p.owners(n, head)
		if err != nil {
			return fmt.Errorf("%s: %w", n.Path, err)
		}
		owners[n.Ino] = f.spans
	}
	return lw.SetSection(attribution.SectionName, attribution.Encode(owners))
}

func (p *publication) writeInode(lw *layerfmt.Writer, n *occ.InodePlan, head *stack.Stack) error {
	switch n.From {
	case occ.FromNothing:
		return lw.AddInode(n.Inode)
	case occ.FromMerged:
		_, err := lw.AddFile(n.Inode, bytes.NewReader(n.Merged), nil)
		return err
	case occ.FromHead:
		return addForeign(lw, n.Inode, head, n.HeadIno)
	}
	if c, ok := p.change(n.SessionIno); !ok || !c.Data {
		return addForeign(lw, n.Inode, p.w.base().Stack(), n.SessionIno)
	}
	f, err := p.view.Data(n.SessionIno)
	if err != nil {
		return err
	}
	_, err = lw.AddFile(n.Inode, f, dataRanges(f))
	return err
}

// addForeign writes a record whose content stays in the pack that has it.
func addForeign(lw *layerfmt.Writer, n tree.Inode, s *stack.Stack, ino tree.Ino) error {
	from, err := s.Inode(ino)
	if err != nil {
		return err
	}
	n.Size, n.Alloc, n.Hash = from.Size, from.Alloc, from.Hash
	if n.Size == 0 {
		_, err := lw.AddFile(n, bytes.NewReader(nil), nil)
		return err
	}
	pack, at, err := s.Locate(ino)
	if err != nil {
		return err
	}
	return lw.AddForeign(n, pack, at)
}

// owners works out who owns the lines that the plan publishes under an inode.
func (p *publication) owners(n *occ.InodePlan, head *stack.Stack) (fileOwners, error) {
	switch {
	case n.From == occ.FromHead:
		return p.w.tables.layerOwners(head, n.HeadIno)
	case n.From == occ.FromSession:
		return p.sessionOwners(n.SessionIno)
	}
	session, err := p.sessionOwners(n.SessionIno)
	if err != nil {
		return fileOwners{}, err
	}
	if n.Pieces == nil {
		return session.advance(bytes.NewReader(n.Merged), p.w.who.origin(p.req.Operation.Number))
	}
	theirs, err := p.w.tables.layerOwners(head, n.HeadIno)
	if err != nil {
		return fileOwners{}, err
	}
	base := func() (attribution.Spans, error) {
		f, err := p.w.tables.layerOwners(p.w.base().Stack(), n.BaseIno)
		return f.spans.Spans, err
	}
	return selectOwners(n.Pieces, base, n.Merged, theirs, session, p.w.who.origin(p.req.Operation.Number))
}

func (p *publication) sessionOwners(ino tree.Ino) (fileOwners, error) {
	c, ok := p.change(ino)
	if !ok || !c.Data {
		return p.w.tables.layerOwners(p.w.base().Stack(), ino)
	}
	f, err := p.view.Data(ino)
	if err != nil {
		return fileOwners{}, err
	}
	return p.w.ownersNow(ino, c.LastOp, f)
}

func (p *publication) change(ino tree.Ino) (overlay.InodeChange, bool) {
	return findInode(p.delta, ino)
}

// land puts the workspace on the commit that now holds its changes.
func (p *publication) land(ctx context.Context, v *occ.Verdict, head *stack.Stack, commit uint64) (err error) {
	w := p.w
	_, sp := w.span(ctx, "rebase")
	defer func() { sp.End(err) }()
	lease, err := w.opts.History.Lease(commit)
	if err != nil {
		return fmt.Errorf("lease commit %d: %w", commit, err)
	}
	edit := overlay.Edit{Op: p.req.Operation.Number}
	base := w.base().Stack().Commit()
	own, kept := map[overlay.Key]tree.Ino{}, map[tree.Ino]bool{}
	for _, d := range p.delta.Dirents {
		k := overlay.Key{Dir: d.Dir, Name: d.Name}
		own[k] = d.Ino
		now := lease.Stack()
		if _, aside := p.same[k]; aside && now.DirentChanged(d.Dir, d.Name) <= base && now.InodeChanged(d.Was) <= base {
			kept[d.Ino], kept[d.Was] = true, true
			continue
		}
		edit.DropDirents = append(edit.DropDirents, k)
	}
	published := map[tree.Ino]bool{} // true: exactly as the session's kernel knows it
	for _, n := range v.Inodes {
		own := n.From == occ.FromSession || n.From == occ.FromNothing
		published[n.Ino] = own && head.InodeChanged(n.Ino) <= base
	}
	for _, n := range p.delta.Inodes {
		// Times alone are not published; they stay private, so that nothing the
		// session set is seen to jump back. But such a record holds all other
		// attributes too, as of the old base: it must not hide what the head
		// made of them since.
		_, ok := published[n.Ino]
		if kept[n.Ino] && !ok {
			continue
		}
		if ok || n.New || n.Data || n.Meta || lease.Stack().InodeChanged(n.Ino) > base {
			edit.DropInodes = append(edit.DropInodes, n.Ino)
		}
	}
	if err := w.fs.Rebase(lease.Stack(), edit); err != nil {
		lease.Release()
		return fmt.Errorf("move the session onto commit %d: %w", commit, err)
	}
	lease.Stack().Changes(base, func(c stack.Change) bool {
		switch {
		case c.Dirent != nil:
			k := overlay.Key{Dir: c.Dirent.Dir, Name: c.Dirent.Name}
			if ino, ok := own[k]; !ok || ino != c.Dirent.Ino {
				p.entries = append(p.entries, k)
			}
		case !published[c.Inode]:
			p.inodes = append(p.inodes, c.Inode)
		}
		return true
	})
	w.swapBase(lease)
	w.lines.move(commit)
	return nil
}

// counts says what a verdict does to the tree the session started from.
func counts(v *occ.Verdict, base *stack.Stack) map[string]int64 {
	c := map[string]int64{"merged": int64(len(v.Merged)), "converged": int64(len(v.Converged)), "time_only": int64(v.TimeOnly)}
	seen := map[tree.Ino]bool{}
	for _, d := range v.Dirents {
		switch was, err := base.Lookup(d.Dir, d.Name); {
		case d.Ino == 0:
			c["removed"]++
		case errors.Is(err, tree.ErrNotExist):
			c["added"]++
			seen[d.Ino] = true
		case err == nil && was.Ino != d.Ino:
			c["modified"]++
			seen[d.Ino] = true
		}
	}
	for _, n := range v.Inodes {
		switch {
		case seen[n.Ino] || n.Kind == tree.Dir:
		case n.From == occ.FromMerged || n.From == occ.FromSession:
			c["modified"]++
		default:
			c["metadata"]++
		}
	}
	return c
}

func occDelta(d *overlay.Delta) occ.Delta {
	var o occ.Delta
	for _, e := range d.Dirents {
		o.Dirents = append(o.Dirents, occ.DirentChange{Dir: e.Dir, Name: e.Name, Ino: e.Ino, Kind: e.Kind, Was: e.Was})
	}
	for _, n := range d.Inodes {
		o.Inodes = append(o.Inodes, occ.InodeChange{Inode: n.Inode, New: n.New, Data: n.Data, Meta: n.Meta, Lineage: n.Lineage, LastOp: n.LastOp})
	}
	return o
}

// selectOwners puts the owners of merged content together from both sides, by
// the merge's own pieces; base is asked only where conflict markers show base
// lines, and the markers themselves belong to the operation that wrote them.
func selectOwners(pieces []merge.Piece, base func() (attribution.Spans, error), merged []byte, head, session fileOwners, marker attribution.Origin) (fileOwners, error) {
	parts := make([]attribution.PieceOf, len(pieces))
	var old attribution.Spans
	for i, p := range pieces {
		parts[i] = attribution.PieceOf{Start: p.Start, Count: p.Count}
		switch p.Side {
		case merge.Head:
			parts[i].Spans = head.spans.Spans
		case merge.Session:
			parts[i].Spans = session.spans.Spans
		case merge.Marker:
			parts[i].Start, parts[i].Spans = 0, attribution.Whole(p.Count, marker)
		case merge.Base:
			if old == nil {
				var err error
				if old, err = base(); err != nil {
					return fileOwners{}, err
				}
			}
			parts[i].Spans = old
		}
	}
	return ownersOf(bytes.NewReader(merged), attribution.Select(parts))
}

// sync1 makes f safe to call more than once.
func sync1(f func()) func() {
	done := false
	return func() {
		if !done {
			done = true
			f()
		}
	}
}
