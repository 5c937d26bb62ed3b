package daemon_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"ephemeral-sandbox/daemon/catalog"
)

// TestEverythingAtOnce has several clients use the same few sessions in every
// way at the same time, ends the sessions under them, and finds a sandbox that
// is whole. Only what the requests themselves ask for may be refused.
func TestEverythingAtOnce(t *testing.T) {
	files := map[string]string{}
	for i := range 6 {
		files["f"+number(i)] = numbered(20)
		files["d/g"+number(i)] = numbered(3)
	}
	h := open(t, files)
	sessions := []string{h.session(), h.session(), h.session()}
	allowed := map[catalog.Kind]bool{catalog.Conflicted: true, catalog.NotFound: true, catalog.PreconditionFailed: true}
	ask := func(op string, req any) {
		_, err := try[any](h, op, req)
		if err == nil {
			return
		}
		if e, ok := errors.AsType[*catalog.Error](err); !ok || !allowed[e.Kind] {
			t.Errorf("%s: %v", op, err)
		}
	}
	client := func(seed uint64) {
		r := rand.New(rand.NewPCG(seed, 1))
		for range 25 {
			ws, f := sessions[r.IntN(len(sessions))], "f"+number(r.IntN(6))
			run := func(cmd string) {
				ask(catalog.ExecCommand, &catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: catalog.Text(cmd)})
			}
			switch r.IntN(12) {
			case 0:
				run(fmt.Sprintf("sed -i '%ds/.*/by %d/' %s", 1+r.IntN(20), seed, f))
			case 1:
				run("for i in 1 2 3 4 5 6 7 8 9; do echo $i >>" + f + "; cat " + f + " >/dev/null; done")
			case 2:
				run("mv d e 2>/dev/null || mv e d; ls -R >/dev/null")
			case 3:
				run("mkdir -p n/" + f + " && echo x >n/" + f + "/x; rm -rf n/f1")
			case 4, 5:
				ask(catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
			case 6, 7:
				ask(catalog.RefreshWorkspaceSession, &catalog.RefreshWorkspaceSessionRequest{WorkspaceSessionID: ws})
			case 8:
				ask(catalog.FileEdit, &catalog.FileEditRequest{WorkspaceSessionID: ws, Path: catalog.Text(f), Edits: []catalog.Edit{{OldString: "line 7\n", NewString: "line 7\nline 7b\n"}}})
			case 9:
				ask(catalog.FileWrite, &catalog.FileWriteRequest{Path: catalog.Text("own" + number(int(seed))), Content: text(number(r.IntN(99)))})
			case 10:
				ask(catalog.FileBlame, &catalog.FileBlameRequest{WorkspaceSessionID: ws, Path: catalog.Text(f)})
				ask(catalog.DiffWorkspaceSession, &catalog.DiffWorkspaceSessionRequest{WorkspaceSessionID: ws})
			default:
				ask(catalog.Snapshot, nil)
				ask(catalog.Activity, &catalog.ActivityRequest{Path: catalog.Text(f)})
			}
		}
	}
	var clients sync.WaitGroup
	for seed := range uint64(4) {
		clients.Go(func() { client(seed) })
	}
	// One session ends in the middle of it all.
	h.sh(sessions[2], "true")
	h.destroy(sessions[2])
	clients.Wait()
	for _, s := range must[catalog.ListWorkspaceSessionsResult](h, catalog.ListWorkspaceSessions, nil).Sessions {
		if s.State != "ready" {
			t.Errorf("session %s is %s: %s", s.WorkspaceSessionID, s.State, s.Problem)
		}
		h.refresh(s.WorkspaceSessionID)
		h.sh(s.WorkspaceSessionID, "cat $(find . -type f) >/dev/null")
		for i := range 6 {
			if f := "f" + number(i); len(h.owners("", f)) < 20 {
				t.Errorf("%s has lost lines", f)
			}
		}
		h.destroy(s.WorkspaceSessionID)
	}
	h.verifies()
	if snap := must[catalog.SnapshotResult](h, catalog.Snapshot, nil).Sandboxes[0]; snap.Leases != 0 {
		t.Errorf("%d leases are held for no session", snap.Leases)
	}
}
