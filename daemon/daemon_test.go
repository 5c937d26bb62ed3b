package daemon_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ephemeral-sandbox/daemon/catalog"
)

func TestOneThread(t *testing.T) {
	h := start(t)
	dir := filepath.Join(t.TempDir(), "project")
	for name, content := range map[string]string{"a.txt": "one\ntwo\nthree\n", "sub/b.txt": "b\n", "run.sh": "#!/bin/sh\necho hello\n"} {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	sb := must[catalog.CreateSandboxResult](h, catalog.CreateSandbox, &catalog.CreateSandboxRequest{WorkspaceRoot: catalog.Text(dir)})
	h.sb = sb.SandboxID
	if sb.Files != 3 || sb.Commit != "L000000" {
		t.Fatalf("imported %+v", sb)
	}
	ws := must[catalog.CreateWorkspaceSessionResult](h, catalog.CreateWorkspaceSession, &catalog.CreateWorkspaceSessionRequest{}).WorkspaceSessionID
	x := must[catalog.ExecCommandResult](h, catalog.ExecCommand, &catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: "sed -i s/two/TWO/ a.txt && ./run.sh && cat sub/b.txt && pwd"})
	if x.Status != "exited" || *x.ExitCode != 0 || string(x.Stdout) != "hello\nb\n"+dir+"\n" {
		t.Fatalf("exec %+v %q %q", x, x.Stdout, x.Stderr)
	}
	pub := must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
	if pub.Status != "committed" || pub.Commit != "L000001" {
		t.Fatalf("publish %+v", pub)
	}
	read := must[catalog.FileReadResult](h, catalog.FileRead, &catalog.FileReadRequest{Path: "a.txt"})
	if read.Content != "one\nTWO\nthree\n" {
		t.Fatalf("read %+v", read)
	}
	blame := must[catalog.FileBlameResult](h, catalog.FileBlame, &catalog.FileBlameRequest{Path: "a.txt"})
	var owners []string
	for _, r := range blame.Ranges {
		owners = append(owners, r.Owner)
	}
	if got := strings.Join(owners, " "); got != "original workspace_session:"+ws+" original" {
		t.Fatalf("blame %s", got)
	}
	if blame.Ranges[1].Commit != "L000001" || !strings.HasPrefix(string(blame.Ranges[1].Command), "sed -i") {
		t.Fatalf("blame %+v", blame.Ranges[1])
	}
	must[catalog.TraceResult](h, catalog.Trace, &catalog.TraceRequest{})
	act := must[catalog.ActivityResult](h, catalog.Activity, &catalog.ActivityRequest{Path: "a.txt"})
	if len(act.Entries) == 0 {
		t.Fatal("no activity on a.txt")
	}
	w := must[catalog.FileWriteResult](h, catalog.FileWrite, &catalog.FileWriteRequest{Path: "new/c.txt", Content: text("c\n")})
	if w.Commit != "L000002" {
		t.Fatalf("write %+v", w)
	}
}
