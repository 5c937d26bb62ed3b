package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/daemon/store"
	"ephemeral-sandbox/fs/tree"
)

func (d *Daemon) handleCreateSession(ctx context.Context, c *call, r *catalog.CreateWorkspaceSessionRequest) (*catalog.CreateWorkspaceSessionResult, error) {
	start := time.Now()
	ws, err := c.sandbox.newSession(ctx, session.Info{Network: r.Network, Level: r.TraceLevel})
	if err != nil {
		return nil, err
	}
	d.emit("session.created", c.sandbox, ws.Info.ID, c.RequestID, map[string]any{"base": store.CommitName(ws.Base())})
	return &catalog.CreateWorkspaceSessionResult{
		WorkspaceSessionID: ws.Info.ID, Base: store.CommitName(ws.Base()), Workspace: catalog.Text(ws.Info.Workspace),
		Network: ws.Info.Network, TraceLevel: ws.Info.Level, IDMapping: ws.Mapping(),
		DurationMS: time.Since(start).Milliseconds(),
	}, nil
}

func (d *Daemon) handleListSessions(_ context.Context, c *call, _ *catalog.ListWorkspaceSessionsRequest) (*catalog.ListWorkspaceSessionsResult, error) {
	res := &catalog.ListWorkspaceSessionsResult{}
	for _, ws := range c.sandbox.openSessions() {
		res.Sessions = append(res.Sessions, describeSession(ws))
	}
	return res, nil
}

func (d *Daemon) handleDestroySession(_ context.Context, c *call, r *catalog.DestroyWorkspaceSessionRequest) (*catalog.DestroyWorkspaceSessionResult, error) {
	ws, err := c.sandbox.session(r.WorkspaceSessionID)
	if err != nil {
		return nil, err
	}
	was := describeSession(ws)
	freed := diskUse(c.sandbox.sessionDir(ws.Info.ID))
	n, err := c.sandbox.retire(ws)
	if err != nil {
		return nil, err
	}
	d.emit("session.destroyed", c.sandbox, ws.Info.ID, c.RequestID, map[string]any{"unpublished_changes": was.Changes})
	return &catalog.DestroyWorkspaceSessionResult{
		WorkspaceSessionID: ws.Info.ID, Destroyed: true, Unpublished: was.Changes, FreedBytes: freed, ProcessesEnded: n,
	}, nil
}

func (d *Daemon) handlePublish(ctx context.Context, c *call, r *catalog.PublishWorkspaceSessionRequest) (*catalog.PublishWorkspaceSessionResult, error) {
	start := time.Now()
	ws, err := c.sandbox.session(r.WorkspaceSessionID)
	if err != nil {
		return nil, err
	}
	if err := c.sandbox.usable(); err != nil {
		return nil, err
	}
	req := session.PublishRequest{Message: r.Message}
	if r.ExpectHead != "" {
		n, err := parseCommit(r.ExpectHead)
		if err != nil {
			return nil, err
		}
		req.ExpectHead = &n
	}
	if req.Operation, err = ws.Begin(c.op()); err != nil {
		return nil, err
	}
	pub, err := ws.Publish(ctx, req)
	if !landed(err) {
		d.tellRefusal(c, ws, err)
		return nil, c.sandbox.withSession(err, ws.Info.ID)
	}
	d.tellPublished(c, ws.Info.ID, pub)
	res := &catalog.PublishWorkspaceSessionResult{
		WorkspaceSessionID: ws.Info.ID, Status: status(pub), Commit: store.CommitName(pub.Commit),
		Parent: store.CommitName(pub.Parent), Merged: texts(pub.Merged), Counts: pub.Counts, StoredBytes: pub.StoredBytes,
	}
	if err != nil {
		res.Warning = err.Error()
	}
	if r.Close {
		if _, err := c.sandbox.retire(ws); err != nil {
			return nil, fmt.Errorf("published as %s, but the session did not end: %w", res.Commit, err)
		}
		res.Closed = true
	}
	res.DurationMS = time.Since(start).Milliseconds()
	return res, nil
}

// landed tells whether a publication was committed, or needed no commit. One
// that was committed is never told as a failure, whatever came after.
func landed(err error) bool {
	_, committed := errors.AsType[*session.LandError](err)
	return err == nil || committed
}

func status(p session.Publication) string {
	if p.Committed {
		return catalog.PublishCommitted
	}
	return catalog.PublishNoOp
}

// withSession puts the session that stays into the details of a conflict.
func (s *sandbox) withSession(err error, id string) error {
	c, ok := errors.AsType[*session.ConflictError](err)
	if !ok {
		return err
	}
	details := s.conflictDetails(c)
	details.WorkspaceSessionID = id
	return catalog.ConflictError(c.Error(), details)
}

func (d *Daemon) tellPublished(c *call, sessionID string, p session.Publication) {
	if p.Committed {
		d.emit("layer.published", c.sandbox, sessionID, c.RequestID, map[string]any{
			"commit": store.CommitName(p.Commit), "merged": int64(len(p.Merged)), "stored_bytes": p.StoredBytes,
		})
	}
}

func (d *Daemon) tellRefusal(c *call, ws *session.Session, err error) {
	if conflict, ok := errors.AsType[*session.ConflictError](err); ok {
		d.emit("publish.refused", c.sandbox, ws.Info.ID, c.RequestID, map[string]any{
			"conflicts": int64(len(conflict.Conflicts)), "head": store.CommitName(conflict.Head),
		})
	}
}

func (d *Daemon) handleRefresh(ctx context.Context, c *call, r *catalog.RefreshWorkspaceSessionRequest) (*catalog.RefreshWorkspaceSessionResult, error) {
	start := time.Now()
	ws, err := c.sandbox.session(r.WorkspaceSessionID)
	if err != nil {
		return nil, err
	}
	op, err := ws.Begin(c.op())
	if err != nil {
		return nil, err
	}
	done, err := ws.Refresh(ctx, session.RefreshRequest{Operation: op})
	if err != nil {
		return nil, err
	}
	d.emit("session.refreshed", c.sandbox, ws.Info.ID, c.RequestID, map[string]any{
		"base": store.CommitName(done.Base), "moved": int64(len(done.Moved)), "conflicts": int64(len(done.Conflicts)),
	})
	return &catalog.RefreshWorkspaceSessionResult{
		WorkspaceSessionID: ws.Info.ID, Base: store.CommitName(done.Base), PreviousBase: store.CommitName(done.Previous),
		Moved: texts(done.Moved), Merged: texts(done.Merged), Conflicts: c.sandbox.conflicts(done.Conflicts),
		DurationMS: time.Since(start).Milliseconds(),
	}, nil
}

func (d *Daemon) handleDiff(ctx context.Context, c *call, r *catalog.DiffWorkspaceSessionRequest) (*catalog.DiffWorkspaceSessionResult, error) {
	ws, err := c.sandbox.session(r.WorkspaceSessionID)
	if err != nil {
		return nil, err
	}
	p, err := c.sandbox.relative(string(r.Path))
	if err != nil {
		return nil, err
	}
	changes, err := ws.Diff(ctx, session.DiffRequest{Path: p, Context: int(r.Context), Stat: r.Stat})
	if err != nil {
		return nil, err
	}
	res := &catalog.DiffWorkspaceSessionResult{WorkspaceSessionID: ws.Info.ID, Base: store.CommitName(ws.Base())}
	for _, ch := range changes {
		o := catalog.Change{
			Path: catalog.Text(ch.Path), From: catalog.Text(ch.From), Change: ch.Change,
			Old: inodeVersion(ch.Old), New: inodeVersion(ch.New), Binary: ch.Binary,
			LinesAdded: int64(ch.Added), LinesGone: int64(ch.Removed), Diff: catalog.Text(ch.Diff),
		}
		if o.New != nil {
			o.Kind = o.New.Kind
		} else {
			o.Kind = o.Old.Kind
		}
		res.Changes = append(res.Changes, o)
	}
	return res, nil
}

func inodeVersion(n *tree.Inode) *catalog.Version {
	if n == nil {
		return nil
	}
	return &catalog.Version{Kind: n.Kind.String(), Hash: hashText(n.Kind, n.Hash), Size: int64(n.Size), Mode: octal(n.Mode), Target: catalog.Text(n.Link)}
}

// place is where a file operation looks: a session, or a commit.
type place struct {
	tree    session.Tree
	session string
	commit  string
	release func()
}

// look finds the tree that a read is about, and notes the reads of a session.
func (c *call) look(sessionID, commit string) (place, error) {
	if sessionID == "" {
		lease, err := c.sandbox.at(commit)
		if err != nil {
			return place{}, err
		}
		return place{tree: session.AtCommit(lease), commit: store.CommitName(lease.Stack().Commit()), release: lease.Release}, nil
	}
	ws, err := c.sandbox.session(sessionID)
	if err != nil {
		return place{}, err
	}
	op, err := ws.Begin(c.op())
	if err != nil {
		return place{}, err
	}
	return place{tree: ws.Tree(op.Number, ws.Record()), session: sessionID, commit: store.CommitName(ws.Base()), release: func() {}}, nil
}

func (d *Daemon) handleFileRead(_ context.Context, c *call, r *catalog.FileReadRequest) (*catalog.FileReadResult, error) {
	at, err := c.look(r.WorkspaceSessionID, r.Commit)
	if err != nil {
		return nil, err
	}
	defer at.release()
	p, err := c.sandbox.relative(string(r.Path))
	if err != nil {
		return nil, err
	}
	n, data, err := session.ReadFile(at.tree, p)
	if err != nil {
		return nil, err
	}
	res := &catalog.FileReadResult{
		Path: r.Path, Commit: at.commit, WorkspaceSessionID: at.session, Size: int64(len(data)), Mode: octal(n.Mode),
		Hash: fmt.Sprintf("%x", hashOf(data)), StartLine: r.StartLine, TotalLines: countLines(data),
	}
	window, end := lineWindow(data, r.StartLine, r.LineCount)
	if cut := int64(len(window)) - r.MaxBytes; cut > 0 {
		window, end = window[:r.MaxBytes], end-int(cut)
	}
	res.Content, res.LineCount = catalog.Text(window), countLines(window)
	res.Truncated = end < len(data)
	return res, nil
}

func countLines(b []byte) int64 {
	n := int64(bytes.Count(b, []byte{'\n'}))
	if len(b) > 0 && b[len(b)-1] != '\n' {
		n++
	}
	return n
}

// lineWindow is count lines of b from line start, counted from 1, or all that
// follow when count is 0; end is the offset in b behind them.
func lineWindow(b []byte, start, count int64) (window []byte, end int) {
	from := linesEnd(b, start-1)
	end = len(b)
	if count > 0 {
		end = from + linesEnd(b[from:], count)
	}
	return b[from:end], end
}

// linesEnd is the offset behind the first n lines of b.
func linesEnd(b []byte, n int64) int {
	off := 0
	for ; n > 0 && off < len(b); n-- {
		i := bytes.IndexByte(b[off:], '\n')
		if i < 0 {
			return len(b)
		}
		off += i + 1
	}
	return off
}

func (d *Daemon) handleFileList(_ context.Context, c *call, r *catalog.FileListRequest) (*catalog.FileListResult, error) {
	at, err := c.look(r.WorkspaceSessionID, r.Commit)
	if err != nil {
		return nil, err
	}
	defer at.release()
	p, err := c.sandbox.relative(string(r.Path))
	if err != nil {
		return nil, err
	}
	dir, err := session.Walk(at.tree, p)
	if err != nil {
		return nil, err
	}
	if dir.Kind != tree.Dir {
		return nil, catalog.Errorf(catalog.InvalidRequest, "path %q is a %s, not a directory: file_read reads it", p, dir.Kind)
	}
	res := &catalog.FileListResult{Path: r.Path, Commit: at.commit, WorkspaceSessionID: at.session}
	var names []tree.Dirent
	err = at.tree.Names(dir.Ino, string(r.After), func(e tree.Dirent) bool {
		if int64(len(names)) == r.Limit {
			res.Truncated = true
			return false
		}
		names = append(names, e)
		return true
	})
	if err != nil {
		return nil, err
	}
	for _, e := range names {
		n, err := at.tree.Inode(e.Ino)
		if errors.Is(err, tree.ErrNotExist) {
			continue // removed while we listed
		}
		if err != nil {
			return nil, err
		}
		res.Entries = append(res.Entries, catalog.Entry{
			Name: catalog.Text(e.Name), Kind: n.Kind.String(), Size: int64(n.Size), Mode: octal(n.Mode),
			Mtime: n.Mtime.Std(), Target: catalog.Text(n.Link),
		})
	}
	return res, nil
}

// write runs a change of one file, beside no other: in its session, or as a
// commit of its own.
func (d *Daemon) write(ctx context.Context, c *call, sessionID, message string, do func(*session.Workspace, session.Operation, session.Noter) error) (session.Publication, string, error) {
	if sessionID == "" {
		pub, err := c.sandbox.operate(ctx, c.op(), message, func(w *session.Workspace, op session.Operation) error {
			return w.Exclusive(func() error { return do(w, op, session.Unrecorded{}) })
		})
		if err != nil {
			return pub, "", err
		}
		d.tellPublished(c, "", pub)
		return pub, status(pub), nil
	}
	ws, err := c.sandbox.session(sessionID)
	if err != nil {
		return session.Publication{}, "", err
	}
	op, err := ws.Begin(c.op())
	if err != nil {
		return session.Publication{}, "", err
	}
	return session.Publication{}, "", ws.Exclusive(func() error { return do(ws.Workspace, op, ws.Record()) })
}

func (d *Daemon) handleFileWrite(ctx context.Context, c *call, r *catalog.FileWriteRequest) (*catalog.FileWriteResult, error) {
	p, err := c.sandbox.relative(string(r.Path))
	if err != nil {
		return nil, err
	}
	res := &catalog.FileWriteResult{Path: r.Path, BytesWritten: int64(len(*r.Content)), Operation: c.RequestID, WorkspaceSessionID: r.WorkspaceSessionID}
	pub, st, err := d.write(ctx, c, r.WorkspaceSessionID, r.Message, func(w *session.Workspace, op session.Operation, note session.Noter) error {
		created, err := w.WriteFile(op, note, p, []byte(*r.Content))
		if res.Type = "update"; created {
			res.Type = "create"
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if st != "" {
		res.Status, res.Commit, res.Parent, res.Merged = st, store.CommitName(pub.Commit), store.CommitName(pub.Parent), texts(pub.Merged)
	}
	return res, nil
}

func (d *Daemon) handleFileEdit(ctx context.Context, c *call, r *catalog.FileEditRequest) (*catalog.FileEditResult, error) {
	p, err := c.sandbox.relative(string(r.Path))
	if err != nil {
		return nil, err
	}
	res := &catalog.FileEditResult{Path: r.Path, Operation: c.RequestID, WorkspaceSessionID: r.WorkspaceSessionID, EditsApplied: len(r.Edits)}
	pub, st, err := d.write(ctx, c, r.WorkspaceSessionID, r.Message, func(w *session.Workspace, op session.Operation, note session.Noter) error {
		_, data, err := session.ReadFile(w.Tree(op.Number, note), p)
		if err != nil {
			return err
		}
		text, n, err := applyEdits(p, string(data), r.Edits)
		if err != nil {
			return err
		}
		res.Replacements, res.BytesWritten = n, int64(len(text))
		_, err = w.WriteFile(op, note, p, []byte(text))
		return err
	})
	if err != nil {
		return nil, err
	}
	if st != "" {
		res.Status, res.Commit, res.Parent, res.Merged = st, store.CommitName(pub.Commit), store.CommitName(pub.Parent), texts(pub.Merged)
	}
	return res, nil
}

// applyEdits applies each edit to the text that the one before it left.
func applyEdits(p, text string, edits []catalog.Edit) (string, int, error) {
	total := 0
	for i, e := range edits {
		n := strings.Count(text, string(e.OldString))
		switch {
		case n == 0:
			return "", 0, catalog.Errorf(catalog.PreconditionFailed, "edits[%d]: old_string does not occur in %q: read the file again and copy the text exactly", i, p)
		case n > 1 && !e.ReplaceAll:
			return "", 0, catalog.Errorf(catalog.PreconditionFailed, "edits[%d]: old_string occurs %d times in %q: add text around it until it is unique, or set replace_all", i, n, p)
		}
		text = strings.ReplaceAll(text, string(e.OldString), string(e.NewString))
		total += n
	}
	return text, total, nil
}

func (d *Daemon) handleBlame(_ context.Context, c *call, r *catalog.FileBlameRequest) (*catalog.FileBlameResult, error) {
	p, err := c.sandbox.relative(string(r.Path))
	if err != nil {
		return nil, err
	}
	res := &catalog.FileBlameResult{Path: r.Path, WorkspaceSessionID: r.WorkspaceSessionID}
	if r.WorkspaceSessionID != "" {
		ws, err := c.sandbox.session(r.WorkspaceSessionID)
		if err != nil {
			return nil, err
		}
		res.Commit = store.CommitName(ws.Base())
		ranges, err := ws.Blame(p)
		if err != nil {
			return nil, err
		}
		res.Ranges = blameRanges(ranges)
		return res, nil
	}
	lease, err := c.sandbox.at(r.Commit)
	if err != nil {
		return nil, err
	}
	defer lease.Release()
	res.Commit = store.CommitName(lease.Stack().Commit())
	ranges, err := session.BlameAt(lease, p)
	if err != nil {
		return nil, err
	}
	res.Ranges = blameRanges(ranges)
	return res, nil
}
