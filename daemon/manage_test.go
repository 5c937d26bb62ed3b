package daemon_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ephemeral-sandbox/daemon/catalog"
)

// refusal is the error of a call that must fail with a kind.
func refusal(t *testing.T, err error, kind catalog.Kind) *catalog.Error {
	t.Helper()
	e, ok := errors.AsType[*catalog.Error](err)
	if !ok || e.Kind != kind {
		t.Fatalf("answered %v, want an error of kind %s", err, kind)
	}
	if strings.Contains(e.Message, "\n") {
		t.Errorf("the message has more than one line: %q", e.Message)
	}
	return e
}

// TestFailedImportLeavesNothing imports a file that grows all the while.
func TestFailedImportLeavesNothing(t *testing.T) {
	h := start(t)
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "growing"))
	if err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 1<<16)
	for i := range block {
		block[i] = byte(i * i >> 3)
	}
	for range 1 << 9 { // long enough to read that it grows meanwhile
		if _, err := f.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				ended <- f.Close()
				return
			default:
				if _, err := f.Write(block[:1]); err != nil {
					ended <- errors.Join(err, f.Close())
					return
				}
			}
		}
	}()
	_, err = try[catalog.CreateSandboxResult](h, catalog.CreateSandbox, &catalog.CreateSandboxRequest{WorkspaceRoot: catalog.Text(dir)})
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if e := refusal(t, err, catalog.PreconditionFailed); !strings.Contains(e.Message, "growing") {
		t.Errorf("the message does not name the file: %s", e.Message)
	}
	left, err := os.ReadDir(filepath.Join(h.state, "sandboxes"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestHostPaths shows a directory of the host to sessions, and refuses what
// would show them the daemon's own files.
func TestHostPaths(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n"})
	shown := t.TempDir()
	// The directories that tests are given are not open to the ids of a session.
	if err := errors.Join(os.Chmod(shown, 0o755), os.WriteFile(filepath.Join(shown, "x"), []byte("from the host\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	create := func(hostPath string) (*catalog.CreateSandboxResult, error) {
		return try[catalog.CreateSandboxResult](h, catalog.CreateSandbox, &catalog.CreateSandboxRequest{
			WorkspaceRoot: catalog.Text(h.root), HostPaths: []catalog.Text{catalog.Text(hostPath)},
		})
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(h.state, link); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{h.state, filepath.Dir(h.state), filepath.Join(h.state, "sandboxes"), link, "relative", h.root} {
		_, err := create(p)
		refusal(t, err, catalog.InvalidRequest)
	}
	_, err := create(filepath.Join(shown, "missing"))
	refusal(t, err, catalog.NotFound)

	made, err := create(shown)
	if err != nil {
		t.Fatal(err)
	}
	h.sb = made.SandboxID
	ws := h.session()
	if got := h.sh(ws, "cat "+shown+"/x; touch "+shown+"/y 2>/dev/null || echo read-only"); got != "from the host\nread-only\n" {
		t.Errorf("the session sees %q", got)
	}
}

// TestSandboxWithoutDescription takes the description of a sandbox away: its
// history is kept, and it is whole again once the description is back.
func TestSandboxWithoutDescription(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n"})
	h.write("", "g", "2\n")
	sb, state, name := h.sb, h.state, filepath.Join(h.state, "sandboxes", h.sb, "sandbox.json")
	h.stop()
	if err := os.Rename(name, name+".away"); err != nil {
		t.Fatal(err)
	}
	h = startIn(t, state, nil)
	h.sb = sb
	list := must[catalog.ListSandboxesResult](h, catalog.ListSandboxes, nil).Sandboxes
	if len(list) != 1 || list[0].SandboxID != sb || list[0].State != "broken" || !strings.Contains(list[0].Problem, "sandbox.json") {
		t.Fatalf("listed %+v", list)
	}
	h.stop()
	if err := os.Rename(name+".away", name); err != nil {
		t.Fatal(err)
	}
	h = startIn(t, state, nil)
	h.sb = sb
	h.wantContent("", "g", "2\n")
	h.verifies()
}
