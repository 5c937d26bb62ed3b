package command_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/cli/command"
	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/fdstore"
	"ephemeral-sandbox/daemon/gateway"
)

// fake is a daemon whose every answer is canned, so that scripts see what the
// tools make of it.
type fake struct {
	gateway *gateway.Gateway
	door    net.Listener
	stash   *fdstore.Client
}

func fakeDaemon() command.Daemon {
	d := command.Daemon{
		Open:   openFake,
		Doctor: func() []command.Problem { return nil },
		Check: func(context.Context, config.Config) ([]command.Checked, error) {
			return []command.Checked{
				{SandboxID: "sb-1", VerifyState: catalog.VerifyState{OK: true, Commits: 3, Layers: 3, Bytes: 4096}},
				{SandboxID: "sb-2", VerifyState: catalog.VerifyState{Problems: []string{"layer L000002: checksum at offset 512"}}},
			}, nil
		},
	}
	if os.Getenv("FAKE_SICK") != "" {
		d.Doctor = func() []command.Problem {
			return []command.Problem{{What: "/dev/fuse is missing", Remedy: "load it with \"modprobe fuse\""}}
		}
	}
	return d
}

func openFake(ctx context.Context, cfg config.Config) (command.Server, error) {
	if why := os.Getenv("FAKE_REFUSE"); why != "" {
		return nil, errors.New(why)
	}
	f := &fake{}
	end, err := fdstore.FromEnv()
	if err != nil {
		return nil, err
	}
	var kept []fdstore.Item
	if f.stash, kept, err = fdstore.Connect(end); err != nil {
		return nil, err
	}
	if f.gateway, err = f.open(cfg, len(kept)); err != nil {
		return nil, err
	}
	if err := f.stash.Put(fmt.Sprint("life ", len(kept)), nil); err != nil {
		return nil, err
	}
	f.door, err = gateway.Listen(ctx, cfg.Socket())
	return f, err
}

func (f *fake) open(cfg config.Config, lives int) (*gateway.Gateway, error) {
	token, err := gateway.EnsureToken(cfg.TokenFile())
	if err != nil {
		return nil, err
	}
	handlers := map[string]gateway.Handler{}
	for _, op := range catalog.Operations() {
		handlers[op.Name] = func(context.Context, gateway.Call) (any, error) { return op.NewResult(), nil }
	}
	handlers[catalog.CreateSandbox] = gateway.Handle(createSandbox)
	handlers[catalog.ListSandboxes] = gateway.Handle(listSandboxes)
	handlers[catalog.InspectSandbox] = gateway.Handle(inspectSandbox)
	handlers[catalog.ListWorkspaceSessions] = gateway.Handle(listSessions)
	handlers[catalog.ExecCommand] = gateway.Handle(execCommand)
	handlers[catalog.ReadCommandLines] = gateway.Handle(readLines)
	handlers[catalog.FileRead] = gateway.Handle(fileRead)
	handlers[catalog.FileWrite] = gateway.Handle(fileWrite)
	handlers[catalog.FileEdit] = gateway.Handle(fileEdit)
	handlers[catalog.FileList] = gateway.Handle(fileList)
	handlers[catalog.FileBlame] = gateway.Handle(fileBlame)
	handlers[catalog.DiffWorkspaceSession] = gateway.Handle(diffSession)
	handlers[catalog.PublishWorkspaceSession] = gateway.Handle(publish)
	handlers[catalog.RefreshWorkspaceSession] = gateway.Handle(refresh)
	handlers[catalog.Trace] = gateway.Handle(trace)
	handlers[catalog.Events] = gateway.Handle(events)
	handlers[catalog.Activity] = gateway.Handle(activity)
	handlers[catalog.LayerStack] = gateway.Handle(layerStack)
	handlers[catalog.Snapshot] = gateway.Handle(func(context.Context, gateway.Call, *catalog.SnapshotRequest) (*catalog.SnapshotResult, error) {
		return &catalog.SnapshotResult{Daemon: catalog.DaemonState{Version: "1", Restarts: lives, StartedAt: noon}}, nil
	})
	return gateway.New(gateway.Options{
		Handlers: handlers, Grants: []gateway.Grant{{Token: token, Authority: catalog.Manage}}, MaxBody: 1 << 20,
	})
}

func (f *fake) Serve(ctx context.Context) error { return f.gateway.Serve(ctx, f.door) }

func (f *fake) Close() error { return f.stash.Close() }

var noon = time.Date(2030, 5, 6, 12, 0, 0, 0, time.UTC)

func createSandbox(_ context.Context, c gateway.Call, r *catalog.CreateSandboxRequest) (*catalog.CreateSandboxResult, error) {
	if !filepath.IsAbs(string(r.WorkspaceRoot)) {
		return nil, fmt.Errorf("%s is not absolute", r.WorkspaceRoot)
	}
	if strings.HasSuffix(string(r.WorkspaceRoot), "/missing") {
		return nil, catalog.Errorf(catalog.NotFound, "%s does not exist: give a directory", r.WorkspaceRoot)
	}
	c.Progress(catalog.Progress{Stage: "import", Done: 1, Unit: "files"})
	c.Progress(catalog.Progress{Stage: "import", Done: 2048, Total: 4096, Unit: "bytes", Message: "src\x1b"})
	return &catalog.CreateSandboxResult{
		SandboxID: "sb-1", Commit: "L000000", WorkspaceRoot: r.WorkspaceRoot, Files: 2, Dirs: 1, Bytes: 4096, StoredBytes: 1000, DurationMS: 12,
	}, nil
}

func sandbox() catalog.Sandbox {
	return catalog.Sandbox{SandboxID: "sb-1", WorkspaceRoot: "/w\n", State: "ready", Head: "L000002", Layers: 3, Files: 2, Bytes: 4096, StoredBytes: 3 << 20, Sessions: 1, CreatedAt: noon}
}

func listSandboxes(context.Context, gateway.Call, *catalog.ListSandboxesRequest) (*catalog.ListSandboxesResult, error) {
	return &catalog.ListSandboxesResult{Sandboxes: []catalog.Sandbox{sandbox()}}, nil
}

func inspectSandbox(_ context.Context, c gateway.Call, _ *catalog.InspectSandboxRequest) (*catalog.InspectSandboxResult, error) {
	if c.SandboxID != "sb-1" {
		return nil, catalog.Errorf(catalog.NotFound, "no sandbox %q: list_sandboxes shows those there are", c.SandboxID)
	}
	return &catalog.InspectSandboxResult{
		Sandbox: sandbox(), OpenSessions: sessions(),
		HeadCommit: &catalog.Commit{Commit: "L000002", Session: "ws-1", Time: noon, Message: "fix"},
	}, nil
}

func sessions() []catalog.Session {
	code := 3
	return []catalog.Session{{
		WorkspaceSessionID: "ws-1", Base: "L000002", State: "ready", Network: "none", TraceLevel: "open", CreatedAt: noon, Changes: 4, UpperBytes: 100,
		Commands: []catalog.Command{
			{CommandID: "c-1", Command: "make", Status: catalog.StatusExited, ExitCode: &code, StartedAt: noon, DurationMS: 15000},
			{CommandID: "c-2", Command: "printf '\xff'", Status: catalog.StatusRunning, StartedAt: noon, DurationMS: 5},
		},
	}}
}

func listSessions(context.Context, gateway.Call, *catalog.ListWorkspaceSessionsRequest) (*catalog.ListWorkspaceSessionsResult, error) {
	return &catalog.ListWorkspaceSessionsResult{Sessions: sessions()}, nil
}

var conflict = catalog.Conflict{
	Path: "src/a.go", AlsoNames: []catalog.Text{"b\xff"}, Kind: "content",
	Head: &catalog.Version{Kind: "file", Size: 3, Mode: "0644"}, HeadCommit: "L000003",
	HeadOrigin: &catalog.Origin{Owner: "workspace_session:ws-9"},
	Hunks: []catalog.Hunk{
		{Base: catalog.LineSpan{Start: 3, Count: 2}, Head: catalog.LineSpan{Start: 3, Count: 1}, Session: catalog.LineSpan{Start: 3, Count: 4}},
		{Head: catalog.LineSpan{Start: 9}, Session: catalog.LineSpan{Start: 12, Count: 2}},
	},
	Remedy: "refresh the session and resolve the marked lines",
}

// big is the output of the fake command "big"; most of it comes neither as
// progress nor in the result.
var big = strings.Repeat("0123456789\n", 300_000)

func execCommand(_ context.Context, c gateway.Call, r *catalog.ExecCommandRequest) (*catalog.ExecCommandResult, error) {
	zero := 0
	res := &catalog.ExecCommandResult{Status: catalog.StatusExited, ExitCode: &zero, CommandID: "c-7", WorkspaceSessionID: "ws-7"}
	out := func(code int, stdout, stderr string) {
		res.ExitCode = &code
		res.Stdout, res.Stderr = catalog.Text(stdout), catalog.Text(stderr)
		res.StdoutBytes, res.StderrBytes = int64(len(stdout)), int64(len(stderr))
	}
	if len(r.Argv) > 0 {
		out(0, fmt.Sprintf("argv %s cwd %q env %s\n", quoteAll(r.Argv), string(r.Cwd), quoteAll(r.Env)), "")
		return res, nil
	}
	switch r.Cmd {
	case "hello":
		c.Progress(catalog.Progress{Stage: "stdout", Output: "out\n"})
		out(0, "out\nmore\n", "err\n")
	case "bytes":
		out(0, "\xff\xfe\x00\n", "\x1b[31m\xff")
	case "seven":
		out(7, "", "")
	case "killed":
		out(137, "partial", "")
		res.Status, res.Signal = catalog.StatusSignaled, "SIGKILL"
	case "slow":
		out(143, "", "")
		res.Status, res.Signal = catalog.StatusTimedOut, "SIGTERM"
	case "stdin":
		if r.Stdin == nil {
			out(0, "no stdin\n", "")
		} else {
			out(0, fmt.Sprintf("stdin %q\n", string(*r.Stdin)), "")
		}
	case "runs on":
		out(0, "so far\n", "")
		res.Status, res.ExitCode = catalog.StatusRunning, nil
	case "published":
		out(0, "", "")
		res.Publish = &catalog.PublishOutcome{Status: catalog.PublishCommitted, Commit: "L000004", Parent: "L000003"}
	case "clash":
		out(0, "done\n", "")
		res.Publish = &catalog.PublishOutcome{Status: catalog.PublishConflict, WorkspaceSessionID: "ws-7", Conflicts: []catalog.Conflict{conflict}}
	case "full":
		out(0, "done\n", "")
		res.Publish = &catalog.PublishOutcome{Status: catalog.PublishFailed, WorkspaceSessionID: "ws-7", Error: catalog.Errorf(catalog.ResourceExhausted, "no space left on device")}
	case "failed":
		out(5, "", "")
		res.Publish = &catalog.PublishOutcome{Status: catalog.PublishSkipped}
	case "big":
		c.Progress(catalog.Progress{Stage: "stdout", Offset: 0, Output: catalog.Text(big[:1000])})
		c.Progress(catalog.Progress{Stage: "stdout", Offset: 500, Output: catalog.Text(big[500:2000])})
		c.Progress(catalog.Progress{Stage: "stdout", Offset: 100_000, Output: catalog.Text(big[100_000:100_100])})
		out(0, big, "")
		res.Stdout, res.Truncated = catalog.Text(big[len(big)-5000:]), true
	case "die":
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	default:
		return nil, catalog.Errorf(catalog.NotFound, "the fake knows no command %q", r.Cmd)
	}
	return res, nil
}

func readLines(_ context.Context, _ gateway.Call, r *catalog.ReadCommandLinesRequest) (*catalog.ReadCommandLinesResult, error) {
	if r.CommandID != "c-7" {
		return nil, catalog.Errorf(catalog.NotFound, "no command %q: list_workspace_sessions shows those there are", r.CommandID)
	}
	end := min(r.StartOffset+r.MaxBytes, int64(len(big)))
	return &catalog.ReadCommandLinesResult{CommandID: "c-7", StartOffset: r.StartOffset, EndOffset: end, Output: catalog.Text(big[r.StartOffset:end]), TotalBytes: int64(len(big))}, nil
}

func fileRead(_ context.Context, _ gateway.Call, r *catalog.FileReadRequest) (*catalog.FileReadResult, error) {
	if r.Path == "rotten" {
		return nil, catalog.Errorf(catalog.Corrupt, "layer L000002, section frames: checksum at offset 4096: restore that layer file from a copy; other layers stay usable").
			With(map[string]any{"layer": "L000002", "section": "frames", "offset": 4096})
	}
	return &catalog.FileReadResult{Path: r.Path, Content: "a\xff\x1b\n<&>", Size: 100, StartLine: r.StartLine, LineCount: 2, Truncated: true}, nil
}

func fileWrite(_ context.Context, c gateway.Call, r *catalog.FileWriteRequest) (*catalog.FileWriteResult, error) {
	return &catalog.FileWriteResult{
		Path: r.Path, Type: "create", BytesWritten: int64(len(*r.Content)), Operation: c.RequestID, WorkspaceSessionID: r.WorkspaceSessionID,
		Status: catalog.PublishCommitted, Commit: "L000005", Parent: "L000004",
	}, nil
}

func fileEdit(_ context.Context, _ gateway.Call, r *catalog.FileEditRequest) (*catalog.FileEditResult, error) {
	return &catalog.FileEditResult{Path: r.Path, EditsApplied: len(r.Edits), Replacements: 1, WorkspaceSessionID: r.WorkspaceSessionID}, nil
}

func fileList(context.Context, gateway.Call, *catalog.FileListRequest) (*catalog.FileListResult, error) {
	return &catalog.FileListResult{Truncated: true, Entries: []catalog.Entry{
		{Name: "bin", Kind: "dir", Mode: "0755", Mtime: noon},
		{Name: "l", Kind: "symlink", Size: 3, Mode: "0777", Mtime: noon, Target: "bin"},
		{Name: "p", Kind: "fifo", Mode: "0600", Mtime: noon},
		{Name: "z\xff", Kind: "file", Size: 12, Mode: "0644", Mtime: noon},
	}}, nil
}

func fileBlame(_ context.Context, _ gateway.Call, r *catalog.FileBlameRequest) (*catalog.FileBlameResult, error) {
	return &catalog.FileBlameResult{Path: r.Path, Commit: "L000003", Ranges: []catalog.BlameRange{
		{StartLine: 1, LineCount: 10, Owner: "original", Commit: "L000000"},
		{StartLine: 11, LineCount: 1, Owner: "workspace_session:ws-1", Session: "ws-1", Operation: "r1", Command: "sed -i s/a/b/ x", Commit: "L000002", Time: &noon},
		{StartLine: 12, LineCount: 2, Owner: "operation:r2", Operation: "r2", Commit: "L000003", Time: &noon},
	}}, nil
}

func diffSession(_ context.Context, _ gateway.Call, r *catalog.DiffWorkspaceSessionRequest) (*catalog.DiffWorkspaceSessionResult, error) {
	res := &catalog.DiffWorkspaceSessionResult{WorkspaceSessionID: r.WorkspaceSessionID, Base: "L000002"}
	if r.WorkspaceSessionID == "clean" {
		return res, nil
	}
	v := func(mode string, size int64) *catalog.Version {
		return &catalog.Version{Kind: "file", Mode: mode, Size: size}
	}
	res.Changes = []catalog.Change{
		{Path: "a", Change: "modified", Kind: "file", Old: v("0644", 2), New: v("0755", 2), LinesAdded: 1, LinesGone: 1, Diff: "--- a\n+++ a\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file"},
		{Path: "b", Change: "renamed", From: "c", Kind: "file", Old: v("0644", 2), New: v("0644", 2)},
		{Path: "i.png", Change: "added", Kind: "file", New: v("0644", 9), Binary: true},
		{Path: "old", Change: "removed", Kind: "dir", Old: &catalog.Version{Kind: "dir", Mode: "0755"}},
	}
	return res, nil
}

func publish(_ context.Context, _ gateway.Call, r *catalog.PublishWorkspaceSessionRequest) (*catalog.PublishWorkspaceSessionResult, error) {
	switch r.WorkspaceSessionID {
	case "clash":
		return nil, catalog.ConflictError("1 path of session clash conflicts with the head L000003: refresh it, resolve, publish again", catalog.ConflictDetails{
			WorkspaceSessionID: "clash", Base: "L000002", Head: "L000003", Conflicts: []catalog.Conflict{conflict},
		})
	case "clean":
		return &catalog.PublishWorkspaceSessionResult{WorkspaceSessionID: "clean", Status: catalog.PublishNoOp, Commit: "L000003", Parent: "L000003"}, nil
	}
	return &catalog.PublishWorkspaceSessionResult{
		WorkspaceSessionID: r.WorkspaceSessionID, Status: catalog.PublishCommitted, Commit: "L000004", Parent: "L000003", Closed: r.Close,
		Merged: []catalog.Text{"a b"}, Counts: map[string]int64{"modified": 2, "added": 1, "removed": 0, "time_only": 3}, DurationMS: 4,
	}, nil
}

func refresh(_ context.Context, _ gateway.Call, r *catalog.RefreshWorkspaceSessionRequest) (*catalog.RefreshWorkspaceSessionResult, error) {
	return &catalog.RefreshWorkspaceSessionResult{
		WorkspaceSessionID: r.WorkspaceSessionID, PreviousBase: "L000002", Base: "L000003",
		Moved: []catalog.Text{"x", "y"}, Merged: []catalog.Text{"m"}, Conflicts: []catalog.Conflict{conflict},
	}, nil
}

func trace(_ context.Context, _ gateway.Call, r *catalog.TraceRequest) (*catalog.TraceResult, error) {
	return &catalog.TraceResult{TraceID: r.TraceID, Name: "publish_workspace_session", Start: noon, DurationUS: 8000, Spans: []catalog.Span{
		{SpanID: "1", Name: "publish_workspace_session", DurationUS: 8000, Attrs: map[string]any{"session": "ws-1", "paths": 3}},
		{SpanID: "2", ParentID: "1", Name: "barrier", Depth: 1, DurationUS: 900, Events: []catalog.SpanEvent{{Name: "frozen", OffsetUS: 850}}},
		{SpanID: "3", ParentID: "1", Name: "seal", Depth: 1, OffsetUS: 900, DurationUS: 5100, Error: "no space"},
		{SpanID: "4", ParentID: "3", Name: "sync", Depth: 2, OffsetUS: 6000, Open: true},
	}}, nil
}

func events(_ context.Context, _ gateway.Call, r *catalog.EventsRequest) (*catalog.EventsResult, error) {
	return &catalog.EventsResult{Lost: 2, Events: []catalog.Event{
		{Time: noon, Name: "session.created", SandboxID: "sb-1", WorkspaceSessionID: "ws-1"},
		{Time: noon.Add(time.Second), Name: "published", Operation: "r1", Attrs: map[string]any{"commit": "L000001", "last_n": r.LastN}},
	}}, nil
}

func activity(_ context.Context, c gateway.Call, r *catalog.ActivityRequest) (*catalog.ActivityResult, error) {
	return &catalog.ActivityResult{
		SandboxID: c.SandboxID,
		Sessions:  []catalog.ActivitySession{{WorkspaceSessionID: "ws-1", TraceLevel: "open", Gaps: 1, Open: true}, {WorkspaceSessionID: "ws-2", TraceLevel: "io", CountsComplete: true}},
		Entries: []catalog.Access{
			{WorkspaceSessionID: "ws-1", Operation: "r1", Command: "make", Kind: "write", Path: "b", Count: 2, First: noon, Last: noon},
			{WorkspaceSessionID: "ws-1", Operation: "r1", Command: "make", Kind: "read", Path: "a", Count: 1, First: noon, Last: noon},
			{WorkspaceSessionID: "ws-1", Kind: "absent", Path: "a", Count: 9, First: noon.Add(-time.Second), Last: noon},
		},
	}, nil
}

func layerStack(_ context.Context, c gateway.Call, r *catalog.LayerStackRequest) (*catalog.LayerStackResult, error) {
	res := &catalog.LayerStackResult{SandboxID: c.SandboxID, Head: "L000001", Leases: 1, LogicalBytes: 5000, StoredBytes: 1500, Layers: []catalog.Layer{
		{Commit: catalog.Commit{Commit: "L000001", Session: "ws-1", Time: noon, Message: "one\ttwo", StoredBytes: 500, LogicalBytes: 1000}, LeasedBy: []string{"ws-2"}},
		{Commit: catalog.Commit{Commit: "L000000", Time: noon, StoredBytes: 1000, LogicalBytes: 4000}},
	}}
	if r.Verify {
		res.Verify = &catalog.VerifyState{OK: c.SandboxID != "sb-bad", Commits: 2, Layers: 2, Bytes: 1500}
		if !res.Verify.OK {
			res.Verify.Problems = []string{"layer L000001, section index: checksum at offset 96"}
		}
	}
	return res, nil
}
