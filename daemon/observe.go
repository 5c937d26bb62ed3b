package daemon

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"ephemeral-sandbox/attribution"
	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/daemon/store"
	"ephemeral-sandbox/daemon/telemetry"
)

func (d *Daemon) handleSnapshot(_ context.Context, c *call, _ *catalog.SnapshotRequest) (*catalog.SnapshotResult, error) {
	res := &catalog.SnapshotResult{Time: time.Now().UTC(), Daemon: d.state()}
	list := d.listSandboxes()
	if c.SandboxID != "" {
		list = []*sandbox{c.sandbox}
	}
	for _, s := range list {
		o := catalog.SandboxSnapshot{Sandbox: s.describe()}
		if s.store != nil {
			st := s.store.Head().Stats()
			o.Dirents, o.Inodes = int64(st.Dirents), int64(st.Inodes)
			for _, n := range s.store.Leases() {
				o.Leases += n
			}
		}
		for _, ws := range s.openSessions() {
			o.OpenSessions = append(o.OpenSessions, describeSession(ws))
			for op, n := range ws.Requests() {
				if res.Daemon.FUSECounts == nil {
					res.Daemon.FUSECounts = map[string]int64{}
				}
				res.Daemon.FUSECounts[op] += int64(n)
			}
		}
		res.Sandboxes = append(res.Sandboxes, o)
	}
	return res, nil
}

func (d *Daemon) state() catalog.DaemonState {
	var mem runtime.MemStats
	runtime.ReadMemStats(&mem)
	st := catalog.DaemonState{
		PID: os.Getpid(), Version: Version(), StateDir: catalog.Text(d.cfg.StateDir), StartedAt: d.started, Restarts: d.restarts,
		HeapBytes: int64(mem.HeapAlloc), Goroutines: runtime.NumGoroutine(), RSSBytes: residentBytes(),
		CacheBytes: d.cache.Stats().Bytes, TraceBytes: d.trace.Stats().Bytes, RequestsNow: int(d.requests.Load()),
	}
	if fds, err := os.ReadDir("/proc/self/fd"); err == nil {
		st.OpenFiles = len(fds)
	}
	return st
}

func (d *Daemon) handleTrace(_ context.Context, c *call, r *catalog.TraceRequest) (*catalog.TraceResult, error) {
	v, err := d.trace.Trace(r.TraceID, c.SandboxID)
	if errors.Is(err, telemetry.ErrNotFound) {
		return nil, catalog.Errorf(catalog.NotFound, "no trace %q: use \"last\", or the request id of an operation; old traces are given up to the size bound", r.TraceID)
	}
	if err != nil {
		return nil, err
	}
	res := &catalog.TraceResult{TraceID: v.TraceID, Start: v.Start, DurationUS: v.Duration.Microseconds()}
	if len(v.Roots) > 0 {
		res.Name = v.Roots[0].Name
	}
	v.Walk(func(depth int, n *telemetry.Node) {
		o := catalog.Span{
			SpanID: n.SpanID, ParentID: n.ParentID, Name: n.Name, Depth: depth, OffsetUS: n.Offset.Microseconds(),
			DurationUS: n.Duration.Microseconds(), Error: n.Error, Open: n.Running, Attrs: n.Attrs,
		}
		for _, e := range n.Events {
			o.Events = append(o.Events, catalog.SpanEvent{Name: e.Name, OffsetUS: e.Offset.Microseconds(), Attrs: e.Attrs})
		}
		res.Spans = append(res.Spans, o)
	})
	return res, nil
}

func (d *Daemon) handleEvents(_ context.Context, c *call, r *catalog.EventsRequest) (*catalog.EventsResult, error) {
	f := telemetry.Filter{Sandbox: c.SandboxID, Session: r.WorkspaceSessionID, Name: r.Name}
	if r.SinceMS > 0 {
		f.Since = time.Now().Add(-time.Duration(r.SinceMS) * time.Millisecond)
	}
	list, err := d.trace.Events(f, int(r.LastN))
	if err != nil {
		return nil, err
	}
	slices.Reverse(list)
	res := &catalog.EventsResult{Lost: int64(d.trace.Stats().Expired + d.trace.Stats().Overflowed)}
	for _, e := range list {
		res.Events = append(res.Events, catalog.Event{
			Time: e.Time, Name: e.Name, SandboxID: e.Sandbox, WorkspaceSessionID: e.Session,
			Operation: e.Operation, TraceID: e.Trace, Attrs: e.Attrs,
		})
	}
	return res, nil
}

// recordOf is the access record of one session, open or ended.
type recordOf struct {
	info session.Info
	open bool
	gaps func() uint64
	each func(func(session.Access) bool) error
}

// records lists the access records of the sandbox, of one session when id says
// which, oldest first.
func (s *sandbox) records(id string) ([]recordOf, error) {
	var list []recordOf
	ended, err := s.ended()
	if err != nil {
		return nil, err
	}
	for _, e := range ended {
		list = append(list, recordOf{e.Info, false, func() uint64 { return e.Gaps }, e.Activity})
	}
	for _, ws := range s.openSessions() {
		list = slices.DeleteFunc(list, func(r recordOf) bool { return r.info.ID == ws.Info.ID }) // a Retire that failed half-way
		list = append(list, recordOf{ws.Info, true, ws.Record().Gaps, ws.Activity})
	}
	if id == "" {
		return list, nil
	}
	list = slices.DeleteFunc(list, func(r recordOf) bool { return r.info.ID != id })
	if len(list) == 0 {
		return nil, catalog.Errorf(catalog.NotFound, "no session %q in sandbox %s, open or among the newest %d that ended", id, s.info.ID, keepEnded)
	}
	return list, nil
}

func (d *Daemon) handleActivity(_ context.Context, c *call, r *catalog.ActivityRequest) (*catalog.ActivityResult, error) {
	p, err := c.sandbox.relative(string(r.Path))
	if err != nil {
		return nil, err
	}
	p = strings.Trim(p, "/")
	records, err := c.sandbox.records(r.WorkspaceSessionID)
	if err != nil {
		return nil, err
	}
	res := &catalog.ActivityResult{SandboxID: c.sandbox.info.ID}
	wanted := func(a session.Access) bool {
		return (r.Kind == "" || a.Kind == r.Kind) && (r.Operation == "" || a.Operation == r.Operation) &&
			(p == "" || a.Path == p || strings.HasPrefix(a.Path, p+"/"))
	}
	for _, rec := range records {
		err := rec.each(func(a session.Access) bool {
			if !wanted(a) {
				return true
			}
			if int64(len(res.Entries)) == r.Limit {
				res.Truncated = true
				return false
			}
			res.Entries = append(res.Entries, catalog.Access{
				WorkspaceSessionID: rec.info.ID, Operation: a.Operation, Command: catalog.Text(a.Command), Kind: a.Kind,
				Path: catalog.Text(a.Path), Ino: uint64(a.Ino), Count: a.Count, First: a.First, Last: a.Last,
			})
			return true
		})
		if err != nil {
			return nil, err
		}
		res.Sessions = append(res.Sessions, catalog.ActivitySession{
			WorkspaceSessionID: rec.info.ID, TraceLevel: rec.info.Level, CountsComplete: rec.info.Level == "io",
			Gaps: rec.gaps(), Open: rec.open,
		})
	}
	slices.SortStableFunc(res.Entries, func(a, b catalog.Access) int { return a.First.Compare(b.First) })
	return res, nil
}

func (d *Daemon) handleLayerStack(ctx context.Context, c *call, r *catalog.LayerStackRequest) (*catalog.LayerStackResult, error) {
	s := c.sandbox
	if err := s.readable(); err != nil {
		return nil, err
	}
	res := &catalog.LayerStackResult{SandboxID: s.info.ID, Head: store.CommitName(s.store.HeadCommit().Number)}
	leased := map[uint64][]string{}
	for _, ws := range s.openSessions() {
		leased[ws.Base()] = append(leased[ws.Base()], ws.Info.ID)
	}
	for _, n := range s.store.Leases() {
		res.Leases += n
	}
	commits := s.store.Commits()
	slices.Reverse(commits)
	for _, k := range commits {
		res.Layers = append(res.Layers, catalog.Layer{Commit: describeCommit(k), LeasedBy: leased[k.Number]})
		res.LogicalBytes += k.LogicalBytes
		res.StoredBytes += k.StoredBytes
	}
	if !r.Verify {
		return res, nil
	}
	rep, err := s.store.Verify(ctx)
	if err != nil {
		return nil, err
	}
	res.Verify = &catalog.VerifyState{
		OK: len(rep.Problems) == 0, Commits: rep.Commits, Layers: rep.Layers, Bytes: rep.Bytes, Problems: rep.Problems,
	}
	return res, nil
}

func blameRanges(list []attribution.Range) []catalog.BlameRange {
	out := make([]catalog.BlameRange, 0, len(list))
	for _, r := range list {
		o := catalog.BlameRange{
			StartLine: int64(r.Start), LineCount: int64(r.Count), Owner: r.Origin.Owner(), Session: r.Origin.Session,
			Operation: r.Origin.Operation, Command: catalog.Text(r.Origin.Command), Time: stamp(r.Origin.Time),
		}
		switch {
		case r.Origin.Commit > 0:
			o.Commit = store.CommitName(r.Origin.Commit)
		case r.Origin.Kind == attribution.Original:
			o.Commit = store.CommitName(0)
		}
		out = append(out, o)
	}
	return out
}

func hashOf(b []byte) [sha256.Size]byte { return sha256.Sum256(b) }

// blocks is the space a file takes on the disk, in bytes.
func blocks(st fs.FileInfo) int64 {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		return sys.Blocks * 512
	}
	return st.Size()
}

// residentBytes is this process's memory that is not on loan; 0 when the
// kernel does not say.
func residentBytes() int64 {
	raw, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(raw), &size, &resident); err != nil {
		return 0
	}
	return resident * int64(os.Getpagesize())
}
