package daemon_test

import (
	"slices"
	"strings"
	"testing"

	"ephemeral-sandbox/daemon/catalog"
)

// TestActivity asks who read, wrote, created, renamed and removed what.
func TestActivity(t *testing.T) {
	h := open(t, map[string]string{"read": "r\n", "written": "w\n", "old": "o\n", "gone": "g\n", "linked": "l\n", "d/x": "x\n"})
	ws := must[catalog.CreateWorkspaceSessionResult](h, catalog.CreateWorkspaceSession, &catalog.CreateWorkspaceSessionRequest{TraceLevel: "io"}).WorkspaceSessionID
	cmds := map[string]string{
		"op-read":   "cat read",
		"op-write":  "echo x >>written",
		"op-create": "echo x >made; mkdir made.d",
		"op-rename": "mv old new",
		"op-remove": "rm gone",
		"op-link":   "ln linked linked2",
		"op-attr":   "chmod 700 d/x",
		"op-list":   "ls d",
		"op-absent": "[ ! -e nothing ]",
	}
	for id, cmd := range cmds {
		if _, err := tryAs[catalog.ExecCommandResult](h, id, catalog.ExecCommand, &catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: catalog.Text(cmd)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tryAs[catalog.FileWriteResult](h, "op-api", catalog.FileWrite, &catalog.FileWriteRequest{WorkspaceSessionID: ws, Path: "api", Content: text("x")}); err != nil {
		t.Fatal(err)
	}
	if _, err := tryAs[catalog.FileReadResult](h, "op-api-read", catalog.FileRead, &catalog.FileReadRequest{WorkspaceSessionID: ws, Path: "read"}); err != nil {
		t.Fatal(err)
	}
	want := []struct{ op, kind, path string }{
		{"op-read", "read", "read"},
		{"op-write", "write", "written"},
		{"op-create", "create", "made"},
		{"op-create", "create", "made.d"},
		{"op-create", "write", "made"},
		{"op-rename", "rename", "old"},
		{"op-remove", "remove", "gone"},
		{"op-link", "link", "linked2"},
		{"op-attr", "attr", "d/x"},
		{"op-list", "list", "d"},
		{"op-absent", "absent", "nothing"},
		{"op-api", "create", "api"},
		{"op-api-read", "read", "read"},
	}
	check := func(when string, open bool) {
		t.Helper()
		res := must[catalog.ActivityResult](h, catalog.Activity, &catalog.ActivityRequest{WorkspaceSessionID: ws})
		if len(res.Sessions) != 1 || res.Sessions[0].TraceLevel != "io" || !res.Sessions[0].CountsComplete || res.Sessions[0].Open != open || res.Sessions[0].Gaps != 0 {
			t.Errorf("%s: sessions %+v", when, res.Sessions)
		}
		for _, w := range want {
			i := slices.IndexFunc(res.Entries, func(a catalog.Access) bool {
				return a.Operation == w.op && a.Kind == w.kind && (string(a.Path) == w.path || w.kind == "rename" && a.Path == "new")
			})
			if i < 0 {
				var has []string
				for _, a := range res.Entries {
					if a.Operation == w.op {
						has = append(has, a.Kind+" "+string(a.Path))
					}
				}
				t.Errorf("%s: %s did not %s %s, but %q", when, w.op, w.kind, w.path, has)
				continue
			}
			if a := res.Entries[i]; a.Count == 0 || a.First.IsZero() || a.Last.Before(a.First) || a.WorkspaceSessionID != ws || string(a.Command) != cmds[w.op] {
				t.Errorf("%s: %+v", when, a)
			}
		}
		for _, a := range res.Entries {
			if a.Operation == "op-read" && (a.Kind == "write" || a.Kind == "create") {
				t.Errorf("%s: a reader is said to %s %s", when, a.Kind, a.Path)
			}
		}
		only := must[catalog.ActivityResult](h, catalog.Activity, &catalog.ActivityRequest{Path: "read", Kind: "read"}).Entries
		if len(only) != 2 {
			t.Errorf("%s: who read it: %+v", when, only)
		}
	}
	check("in the session", true)
	h.publish(ws)
	check("after publication", true)
	h.destroy(ws)
	check("after the session has ended", false)
	fails(h, catalog.NotFound, catalog.Activity, &catalog.ActivityRequest{WorkspaceSessionID: "ws-000000000000"})
}

func TestEventsAndTrace(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n"})
	one, two := h.session(), h.session()
	h.sh(one, "echo one >f")
	h.sh(two, "echo two >f")
	if _, err := tryAs[catalog.PublishWorkspaceSessionResult](h, "req-publish", catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: one}); err != nil {
		t.Fatal(err)
	}
	h.refused(two)
	h.refresh(two)
	h.destroy(two)
	// A command's end is told after its answer.
	var names []string
	var events []catalog.Event
	for !slices.Contains(names, "command.ended") {
		events = must[catalog.EventsResult](h, catalog.Events, &catalog.EventsRequest{LastN: 1000}).Events
		names = nil
		for _, e := range events {
			names = append(names, e.Name)
		}
	}
	for _, want := range []string{"sandbox.created", "session.created", "command.started", "layer.published", "publish.refused", "session.refreshed", "session.destroyed"} {
		if !slices.Contains(names, want) {
			t.Errorf("no event %s among %q", want, names)
		}
	}
	for i, e := range events {
		if i > 0 && e.Time.Before(events[i-1].Time) {
			t.Errorf("%s comes before %s", e.Name, events[i-1].Name)
		}
		switch e.Name {
		case "layer.published":
			if e.WorkspaceSessionID != one || e.Attrs["commit"] != "L000001" || e.Operation != "req-publish" || e.SandboxID != h.sb {
				t.Errorf("%+v", e)
			}
		case "publish.refused":
			if e.WorkspaceSessionID != two || e.Attrs["conflicts"] != 1.0 {
				t.Errorf("%+v", e)
			}
		}
	}
	for _, e := range must[catalog.EventsResult](h, catalog.Events, &catalog.EventsRequest{WorkspaceSessionID: two, Name: "session.destroyed"}).Events {
		if e.WorkspaceSessionID != two || e.Name != "session.destroyed" {
			t.Errorf("%+v", e)
		}
	}
	tr := must[catalog.TraceResult](h, catalog.Trace, &catalog.TraceRequest{TraceID: "req-publish"})
	var spans []string
	for _, s := range tr.Spans {
		spans = append(spans, s.Name)
		if s.Depth > 0 && s.ParentID == "" || s.OffsetUS < 0 || s.Open {
			t.Errorf("%+v", s)
		}
	}
	if tr.Name != catalog.PublishWorkspaceSession {
		t.Errorf("the trace is of %s", tr.Name)
	}
	for _, want := range []string{"flush mappings", "capture", "validate", "seal", "commit", "rebase"} {
		if !slices.Contains(spans, want) {
			t.Errorf("no span %q among %q", want, spans)
		}
	}
	if last := must[catalog.TraceResult](h, catalog.Trace, nil); last.Name != catalog.DestroyWorkspaceSession {
		t.Errorf("the last trace is of %s", last.Name)
	}
	fails(h, catalog.NotFound, catalog.Trace, &catalog.TraceRequest{TraceID: "nothing"})
}

// TestSessionsListed describes sessions and what runs in them.
func TestSessionsListed(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n"})
	ws := h.session()
	h.sh(ws, "mkfifo steps; echo 2 >>f")
	run := h.background(ws, "echo started; read x <steps; exit 4")
	run.says("started\n")
	s := must[catalog.ListWorkspaceSessionsResult](h, catalog.ListWorkspaceSessions, nil).Sessions[0]
	if s.WorkspaceSessionID != ws || s.State != "ready" || s.Changes != 2 || s.UpperBytes == 0 || s.HolderPID == 0 || s.Implicit || s.Base != "L000000" {
		t.Errorf("%+v", s)
	}
	if len(s.Commands) != 2 || s.Commands[1].Status != "running" || s.Commands[1].ExitCode != nil || !strings.HasPrefix(string(s.Commands[1].Command), "echo started") {
		t.Errorf("%+v", s.Commands)
	}
	h.sh(ws, "echo x >steps")
	run.ends()
	s = must[catalog.ListWorkspaceSessionsResult](h, catalog.ListWorkspaceSessions, nil).Sessions[0]
	if c := s.Commands[1]; c.Status != "exited" || *c.ExitCode != 4 {
		t.Errorf("%+v", c)
	}
	snap := must[catalog.SnapshotResult](h, catalog.Snapshot, nil)
	if len(snap.Daemon.FUSECounts) == 0 || snap.Daemon.Goroutines == 0 || len(snap.Sandboxes) != 1 {
		t.Errorf("%+v", snap)
	}
}
