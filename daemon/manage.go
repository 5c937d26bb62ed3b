package daemon

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/importer"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/daemon/store"
)

func (d *Daemon) listSandboxes() []*sandbox {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.SortedFunc(maps.Values(d.sandboxes), func(a, b *sandbox) int {
		return cmp.Or(a.info.Created.Compare(b.info.Created), strings.Compare(a.info.ID, b.info.ID))
	})
}

func (d *Daemon) countSessions() int {
	n := 0
	for _, s := range d.listSandboxes() {
		n += len(s.openSessions())
	}
	return n
}

func (d *Daemon) handleCreateSandbox(ctx context.Context, c *call, r *catalog.CreateSandboxRequest) (*catalog.CreateSandboxResult, error) {
	start := time.Now()
	s, err := d.createSandbox(ctx, c.RequestID, string(r.WorkspaceRoot), r.HostPaths, func(p importer.Progress) {
		c.Progress(catalog.Progress{Stage: "import", Done: p.Files, Unit: "files"})
	})
	if err != nil {
		return nil, err
	}
	d.emit("sandbox.created", s, "", c.RequestID, map[string]any{"workspace_root": s.root(), "files": s.info.Files})
	return &catalog.CreateSandboxResult{
		SandboxID: s.info.ID, Commit: store.CommitName(0), WorkspaceRoot: catalog.Text(s.root()),
		Files: s.info.Files, Dirs: s.info.Dirs, Bytes: s.info.Bytes,
		StoredBytes: s.store.HeadCommit().StoredBytes, DurationMS: time.Since(start).Milliseconds(),
	}, nil
}

func (d *Daemon) handleListSandboxes(context.Context, *call, *catalog.ListSandboxesRequest) (*catalog.ListSandboxesResult, error) {
	res := &catalog.ListSandboxesResult{}
	for _, s := range d.listSandboxes() {
		res.Sandboxes = append(res.Sandboxes, s.describe())
	}
	return res, nil
}

func (d *Daemon) handleInspectSandbox(_ context.Context, c *call, _ *catalog.InspectSandboxRequest) (*catalog.InspectSandboxResult, error) {
	res := &catalog.InspectSandboxResult{Sandbox: c.sandbox.describe()}
	for _, ws := range c.sandbox.openSessions() {
		res.OpenSessions = append(res.OpenSessions, describeSession(ws))
	}
	if c.sandbox.store != nil {
		head := describeCommit(c.sandbox.store.HeadCommit())
		res.HeadCommit = &head
	}
	return res, nil
}

func (d *Daemon) handleDestroySandbox(ctx context.Context, c *call, r *catalog.DestroySandboxRequest) (*catalog.DestroySandboxResult, error) {
	s := c.sandbox
	if !r.Force {
		for _, ws := range s.openSessions() {
			changes, err := ws.Diff(ctx, session.DiffRequest{Stat: true})
			if err != nil {
				return nil, err
			}
			if len(changes) > 0 {
				return nil, catalog.Errorf(catalog.PreconditionFailed, "session %s holds %d unpublished changes: publish or destroy it first, or destroy the sandbox with force", ws.Info.ID, len(changes))
			}
		}
	}
	freed := diskUse(s.dir)
	d.mu.Lock()
	_, mine := d.sandboxes[s.info.ID]
	delete(d.sandboxes, s.info.ID)
	d.mu.Unlock()
	if !mine {
		return nil, catalog.Errorf(catalog.NotFound, "sandbox %s is being destroyed already", s.info.ID)
	}
	n, err := s.destroy()
	if err != nil {
		d.mu.Lock()
		d.sandboxes[s.info.ID] = s
		d.mu.Unlock()
		return nil, err
	}
	d.emit("sandbox.destroyed", s, "", c.RequestID, nil)
	return &catalog.DestroySandboxResult{SandboxID: s.info.ID, Destroyed: true, SessionsEnded: n, FreedBytes: freed}, nil
}

func (s *sandbox) describe() catalog.Sandbox {
	out := catalog.Sandbox{
		SandboxID: s.info.ID, WorkspaceRoot: catalog.Text(s.root()), State: "ready",
		Files: s.info.Files, Bytes: s.info.Bytes, Sessions: len(s.openSessions()), CreatedAt: s.info.Created,
	}
	for _, p := range s.info.HostPaths {
		out.HostPaths = append(out.HostPaths, catalog.Text(p))
	}
	if s.problem != nil {
		out.State, out.Problem = "broken", s.problem.Error()
	}
	if s.store != nil {
		commits := s.store.Commits()
		out.Head, out.Layers = store.CommitName(s.store.HeadCommit().Number), len(commits)
		for _, c := range commits {
			out.StoredBytes += c.StoredBytes
		}
	}
	return out
}

func describeCommit(c store.Commit) catalog.Commit {
	return catalog.Commit{
		Commit: store.CommitName(c.Number), Session: c.Session, Operation: c.Operation, RequestID: c.RequestID,
		Message: c.Message, Time: c.Time, Merged: texts(c.Merged), Counts: c.Counts, Pack: c.Pack.String(),
		Inline: c.Inline, LogicalBytes: c.LogicalBytes, StoredBytes: c.StoredBytes,
	}
}

func describeSession(ws *session.Session) catalog.Session {
	state, pid, problem := ws.Status()
	use := ws.FS().Usage()
	out := catalog.Session{
		WorkspaceSessionID: ws.Info.ID, Base: store.CommitName(ws.Base()), State: string(state),
		Implicit: ws.Info.Implicit, Network: ws.Info.Network, TraceLevel: ws.Info.Level, CreatedAt: ws.Info.Created,
		UpperBytes: int64(use.Bytes), HolderPID: pid,
	}
	if problem != nil {
		out.Problem = problem.Error()
	}
	if delta, err := ws.FS().Delta(); err == nil {
		out.Changes = int64(len(delta.Dirents))
		for _, n := range delta.Inodes {
			if !n.New && (n.Data || n.Meta) {
				out.Changes++
			}
		}
	}
	for _, cmd := range ws.Commands() {
		out.Commands = append(out.Commands, describeCommand(cmd.State()))
	}
	return out
}

func describeCommand(st session.CommandState) catalog.Command {
	out := catalog.Command{
		CommandID: st.ID, Command: catalog.Text(st.Command), Status: st.Status,
		StartedAt: st.Started, DurationMS: duration(st).Milliseconds(),
	}
	if st.Status != session.StatusRunning {
		out.ExitCode = &st.Code
	}
	return out
}

// duration is how long a command has run, or ran.
func duration(st session.CommandState) time.Duration {
	if st.Ended.IsZero() {
		return time.Since(st.Started)
	}
	return st.Ended.Sub(st.Started)
}

// diskUse is the bytes that files beneath dir take on the disk; what cannot be
// read counts as nothing.
func diskUse(dir string) int64 {
	var sum int64
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		}
		if st, err := e.Info(); err == nil {
			sum += blocks(st)
		}
		return nil
	})
	return sum
}
