package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ephemeral-sandbox/daemon"
	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/holder"
)

func TestMain(m *testing.M) {
	holder.MaybeRun()
	if state := os.Getenv(childVar); state != "" {
		childMain(state)
	}
	os.Exit(m.Run())
}

// patience bounds every wait of a test. It is only spent by a test that fails.
const patience = 60 * time.Second

// harness is a running daemon and a client of it.
type harness struct {
	t     *testing.T
	state string
	c     *client.Client
	sb    string
	root  string // of the imported workspace
	stop  func() // ends the daemon; may be called twice
}

// start runs a daemon in a state directory of its own until the test ends.
func start(t *testing.T) *harness {
	t.Helper()
	return startIn(t, t.TempDir(), nil)
}

// mustRunHere passes over a test where an ordinary user may not start sessions.
// Root always may: that it cannot is a failure.
func mustRunHere(t *testing.T) {
	t.Helper()
	problems := holder.Probe()
	switch {
	case len(problems) == 0:
	case os.Geteuid() == 0:
		t.Fatalf("no session can run here: %v", problems)
	default:
		t.Skipf("no session can run here: %v", problems)
	}
}

// startIn runs a daemon over a state directory until the test ends.
func startIn(t *testing.T, state string, edit func(*config.Config)) *harness {
	t.Helper()
	mustRunHere(t)
	cfg := config.Default(state)
	if edit != nil {
		edit(&cfg)
	}
	d, err := daemon.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Serve(ctx) }()
	c := client.New(state)
	stop := sync.OnceFunc(func() {
		c.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		closed := make(chan error, 1)
		go func() { closed <- d.Close() }()
		select {
		case err := <-closed:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("the daemon does not close")
		}
	})
	t.Cleanup(stop)
	return &harness{t: t, state: state, c: c, stop: stop}
}

// open runs a daemon over a sandbox of the given files, by path.
func open(t *testing.T, files map[string]string) *harness {
	t.Helper()
	h := start(t)
	h.imports(files)
	return h
}

// imports makes a sandbox of the given files and goes on with it.
func (h *harness) imports(files map[string]string) {
	h.t.Helper()
	h.root = filepath.Join(h.t.TempDir(), "project")
	if err := os.Mkdir(h.root, 0o755); err != nil {
		h.t.Fatal(err)
	}
	for name, content := range files {
		p := filepath.Join(h.root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			h.t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			h.t.Fatal(err)
		}
	}
	h.sb = must[catalog.CreateSandboxResult](h, catalog.CreateSandbox, &catalog.CreateSandboxRequest{WorkspaceRoot: catalog.Text(h.root)}).SandboxID
}

// try calls an operation on the harness's sandbox.
func try[Res any](h *harness, op string, req any) (*Res, error) {
	h.t.Helper()
	return tryAs[Res](h, "", op, req)
}

// tryAs calls an operation under a request id.
func tryAs[Res any](h *harness, id, op string, req any) (*Res, error) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	defer cancel()
	res := new(Res)
	err := h.c.Call(ctx, client.Call{Op: op, SandboxID: h.sb, RequestID: id, Request: req}, res, nil)
	return res, err
}

func must[Res any](h *harness, op string, req any) *Res {
	h.t.Helper()
	res, err := try[Res](h, op, req)
	if err != nil {
		h.t.Fatalf("%s: %v", op, err)
	}
	return res
}

// fails calls an operation that must be refused with an error of a kind.
func fails(h *harness, kind catalog.Kind, op string, req any) *catalog.Error {
	h.t.Helper()
	_, err := try[any](h, op, req)
	e, ok := errors.AsType[*catalog.Error](err)
	if !ok || e.Kind != kind {
		h.t.Fatalf("%s: %v, want an error of kind %s", op, err, kind)
	}
	return e
}

func text(s string) *catalog.Text { t := catalog.Text(s); return &t }

func texts(list ...string) []catalog.Text {
	out := make([]catalog.Text, len(list))
	for i, s := range list {
		out[i] = catalog.Text(s)
	}
	return out
}

// session opens a session on the head.
func (h *harness) session() string {
	h.t.Helper()
	return must[catalog.CreateWorkspaceSessionResult](h, catalog.CreateWorkspaceSession, &catalog.CreateWorkspaceSessionRequest{}).WorkspaceSessionID
}

// sh runs a command in a session; it must succeed. It gives what was written
// to standard output.
func (h *harness) sh(ws, cmd string) string {
	h.t.Helper()
	x := must[catalog.ExecCommandResult](h, catalog.ExecCommand, &catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: catalog.Text("set -e; " + cmd)})
	if x.Status != "exited" || *x.ExitCode != 0 {
		h.t.Fatalf("%s: %s, code %d\n%s%s", cmd, x.Status, *x.ExitCode, x.Stdout, x.Stderr)
	}
	return string(x.Stdout)
}

// background starts a command in a session and returns while it runs.
func (h *harness) background(ws, cmd string) *running {
	h.t.Helper()
	x := must[catalog.ExecCommandResult](h, catalog.ExecCommand, &catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: catalog.Text(cmd), YieldTimeMS: new(int64)})
	if x.Status != "running" && x.Status != "exited" {
		h.t.Fatalf("%s: %s", cmd, x.Status)
	}
	return &running{h: h, id: x.CommandID, ws: x.WorkspaceSessionID}
}

// running is a command whose output a test follows.
type running struct {
	h      *harness
	id, ws string
	seen   int64
}

// next reads on in a stream, waiting for output or the end.
func (r *running) next() *catalog.ReadCommandLinesResult {
	r.h.t.Helper()
	res := must[catalog.ReadCommandLinesResult](r.h, catalog.ReadCommandLines, &catalog.ReadCommandLinesRequest{
		CommandID: r.id, StartOffset: r.seen, WaitMS: patience.Milliseconds() / 2,
	})
	r.seen = res.EndOffset
	return res
}

// says waits until the command has written exactly want after what was read
// before.
func (r *running) says(want string) {
	r.h.t.Helper()
	got := ""
	for len(got) < len(want) {
		res := r.next()
		got += string(res.Output)
		if res.EOF && len(got) < len(want) {
			break
		}
	}
	if got != want {
		r.h.t.Fatalf("the command says %q, want %q", got, want)
	}
}

// ends waits until the command has ended.
func (r *running) ends() *catalog.ReadCommandLinesResult {
	r.h.t.Helper()
	for {
		if res := r.next(); res.EOF {
			return res
		}
	}
}

// publish publishes a session; it must be committed.
func (h *harness) publish(ws string) *catalog.PublishWorkspaceSessionResult {
	h.t.Helper()
	p := must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
	if p.Status != "committed" {
		h.t.Fatalf("published: %+v", p)
	}
	return p
}

// refused publishes a session, which must conflict.
func (h *harness) refused(ws string) catalog.ConflictDetails {
	h.t.Helper()
	e := fails(h, catalog.Conflicted, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
	return detailsOf(h.t, e)
}

func (h *harness) refresh(ws string) *catalog.RefreshWorkspaceSessionResult {
	h.t.Helper()
	return must[catalog.RefreshWorkspaceSessionResult](h, catalog.RefreshWorkspaceSession, &catalog.RefreshWorkspaceSessionRequest{WorkspaceSessionID: ws})
}

func (h *harness) destroy(ws string) *catalog.DestroyWorkspaceSessionResult {
	h.t.Helper()
	return must[catalog.DestroyWorkspaceSessionResult](h, catalog.DestroyWorkspaceSession, &catalog.DestroyWorkspaceSessionRequest{WorkspaceSessionID: ws})
}

// read gives a file as a session sees it, or as the head holds it.
func (h *harness) read(ws, path string) string {
	h.t.Helper()
	return string(must[catalog.FileReadResult](h, catalog.FileRead, &catalog.FileReadRequest{WorkspaceSessionID: ws, Path: catalog.Text(path)}).Content)
}

// ls gives the names of a directory.
func (h *harness) ls(ws, path string) string {
	h.t.Helper()
	var names []string
	for _, e := range must[catalog.FileListResult](h, catalog.FileList, &catalog.FileListRequest{WorkspaceSessionID: ws, Path: catalog.Text(path)}).Entries {
		names = append(names, string(e.Name))
	}
	return strings.Join(names, " ")
}

func (h *harness) write(ws, path, content string) *catalog.FileWriteResult {
	h.t.Helper()
	return must[catalog.FileWriteResult](h, catalog.FileWrite, &catalog.FileWriteRequest{WorkspaceSessionID: ws, Path: catalog.Text(path), Content: text(content)})
}

func (h *harness) edit(ws, path, old, now string) *catalog.FileEditResult {
	h.t.Helper()
	return must[catalog.FileEditResult](h, catalog.FileEdit, &catalog.FileEditRequest{
		WorkspaceSessionID: ws, Path: catalog.Text(path), Edits: []catalog.Edit{{OldString: catalog.Text(old), NewString: catalog.Text(now)}},
	})
}

func (h *harness) head() string {
	h.t.Helper()
	return must[catalog.LayerStackResult](h, catalog.LayerStack, &catalog.LayerStackRequest{}).Head
}

// verifies checks every byte that the sandbox keeps.
func (h *harness) verifies() {
	h.t.Helper()
	if v := must[catalog.LayerStackResult](h, catalog.LayerStack, &catalog.LayerStackRequest{Verify: true}).Verify; !v.OK {
		h.t.Errorf("damaged: %v", v.Problems)
	}
}

// owners gives the owner of each line of a file, one word a line.
func (h *harness) owners(ws, path string) []string {
	h.t.Helper()
	var list []string
	for _, r := range must[catalog.FileBlameResult](h, catalog.FileBlame, &catalog.FileBlameRequest{WorkspaceSessionID: ws, Path: catalog.Text(path)}).Ranges {
		if int64(len(list))+1 != r.StartLine || r.LineCount < 1 {
			h.t.Fatalf("blame of %s has a range of %d lines at line %d, where line %d is due", path, r.LineCount, r.StartLine, len(list)+1)
		}
		for range r.LineCount {
			list = append(list, r.Owner)
		}
	}
	return list
}

func (h *harness) wantOwners(ws, path string, want ...string) {
	h.t.Helper()
	if got := h.owners(ws, path); !slices.Equal(got, want) {
		h.t.Errorf("the lines of %s are owned by\n%q, want\n%q", path, got, want)
	}
}

func (h *harness) wantContent(ws, path, want string) {
	h.t.Helper()
	if got := h.read(ws, path); got != want {
		h.t.Errorf("%s holds %q, want %q", path, got, want)
	}
}

// changes describes a session's changes, one word each.
func (h *harness) changes(ws string) string {
	h.t.Helper()
	var list []string
	for _, c := range must[catalog.DiffWorkspaceSessionResult](h, catalog.DiffWorkspaceSession, &catalog.DiffWorkspaceSessionRequest{WorkspaceSessionID: ws}).Changes {
		s := fmt.Sprintf("%s:%s", c.Change, c.Path)
		if c.From != "" {
			s += "<" + string(c.From)
		}
		list = append(list, s)
	}
	return strings.Join(list, " ")
}

func by(ws string) string { return "workspace_session:" + ws }

const original = "original"

// numbered is a text of n lines.
func numbered(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "line %d\n", i+1)
	}
	return b.String()
}
