package drive

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fakePrograms are shell scripts in the place of the programs.
func fakePrograms(t *testing.T, script string) *Rig {
	t.Helper()
	bin := t.TempDir()
	for _, p := range []string{Daemon, Manager, Runtime, Observe} {
		if err := os.WriteFile(filepath.Join(bin, p), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	f, err := NewFamily()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	r, err := New(bin, filepath.Join(t.TempDir(), "state"), f)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestCallDecodesResultsAndErrors(t *testing.T) {
	r := fakePrograms(t, `
for last; do :; done
case "$last" in
good) echo '{"sandbox_id":"'"$SANDBOX_STATE_DIR"'"}' ;;
conflict) printf 'working\n{"error":{"kind":"conflict","message":"m","details":{"conflicts":[{"path":"a","kind":"content"}]}}}\n' >&2; exit 3 ;;
exec) echo '{"status":"exited","exit_code":7}'; exit 7 ;;
silent) exit 1 ;;
text) echo hello ;;
esac
`)
	ctx := t.Context()
	var s Sandbox
	if err := r.Call(ctx, &s, Manager, "good"); err != nil || s.ID != r.State {
		t.Errorf("good: %+v, %v", s, err)
	}
	err := r.Call(ctx, &s, Manager, "conflict")
	e, ok := errors.AsType[*Error](err)
	if !ok || e.Exit != 3 || !IsKind(err, "conflict") || len(e.Conflicts()) != 1 || e.Conflicts()[0].Path != "a" {
		t.Errorf("conflict: %v", err)
	}
	var x Exec
	if err := r.Call(ctx, &x, Runtime, "exec"); err != nil || *x.ExitCode != 7 || x.OK() {
		t.Errorf("exec: %+v, %v", x, err)
	}
	if err := r.Call(ctx, nil, Runtime, "silent"); err == nil {
		t.Error("a failure without a document passed")
	}
	if err := r.Call(ctx, &s, Runtime, "text"); err == nil {
		t.Error("text passed as JSON")
	}
}

func TestImportReports(t *testing.T) {
	r := fakePrograms(t, `echo '{"progress":{"done":5,"unit":"files"}}' >&2; echo noise >&2
printf '{"progress":{"done"' >&2; echo ':9}}' >&2; echo '{"sandbox_id":"s"}'`)
	var seen []int64
	s, err := r.ImportSandbox(t.Context(), "d", func(n int64) { seen = append(seen, n) })
	if err != nil || s.ID != "s" || len(seen) != 2 || seen[1] != 9 {
		t.Errorf("%+v, %v, reports %v", s, err, seen)
	}
}

func TestNewNamesWhatIsMissing(t *testing.T) {
	if _, err := New(t.TempDir(), "", nil); err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("empty directory: %v", err)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	r := fakePrograms(t, "trap 'exit 0' INT; echo > started; while :; do wait; read x < fifo; done")
	dir := t.TempDir()
	t.Chdir(dir)
	if err := exec.Command("mkfifo", "fifo", "started").Run(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		if _, err := os.ReadFile("started"); err != nil {
			t.Error(err)
		}
	}()
	if _, err := r.Run(ctx, nil, Runtime); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted run: %v", err)
	}
}

// A grandchild that detached itself is seen, and killed.
func TestFamilySeesOrphans(t *testing.T) {
	r := fakePrograms(t, "setsid sh -c 'echo $$ > pid; exec cat fifo' >/dev/null 2>&1 & cat pid > /dev/null")
	t.Chdir(t.TempDir())
	if err := exec.Command("mkfifo", "fifo", "pid").Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Run(t.Context(), nil, Daemon); err != nil {
		t.Fatal(err)
	}
	alive := r.Family.Alive()
	if len(alive) != 1 {
		t.Fatalf("alive: %v, want one orphan", alive)
	}
	if left := r.Family.Remaining(time.Millisecond); len(left) != 1 {
		t.Errorf("remaining: %v, want the orphan", left)
	}
	if n := r.Family.Kill(); n != 1 {
		t.Errorf("killed %d, want 1", n)
	}
	if alive := r.Family.Remaining(time.Minute); len(alive) != 0 {
		t.Errorf("still alive: %v", alive)
	}
}

func TestParseStatus(t *testing.T) {
	p, ok := parseStatus("Name:\ta) b\nState:\tS (sleeping)\nPid:\t42\nPPid:\t7\n")
	if !ok || p != (Process{PID: 42, Parent: 7, Name: "a) b", State: "S"}) {
		t.Errorf("%+v, %v", p, ok)
	}
	for _, bad := range []string{"", "x", "Name:\tx\n", "Pid:\tx\nState:\tS\n", "Pid:\t3\n"} {
		if _, ok := parseStatus(bad); ok {
			t.Errorf("%q parsed", bad)
		}
	}
}

func TestShell(t *testing.T) {
	if got, want := Shell("p", "--a=b", "it's", "", "x y"), `p --a=b 'it'\''s' '' 'x y'`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestOwnersAndNumbers(t *testing.T) {
	b := Blame{Ranges: []BlameRange{{Count: 2, Owner: "a"}, {Count: 1, Owner: "b"}}}
	if got := strings.Join(b.Owners(), ","); got != "a,a,b" {
		t.Error(got)
	}
	if n, err := CommitNumber("L000024"); err != nil || n != 24 {
		t.Error(n, err)
	}
	for _, bad := range []string{"", "L", "24", "Lx"} {
		if _, err := CommitNumber(bad); err == nil {
			t.Errorf("%q is a commit", bad)
		}
	}
}

func TestFUSEMountsReads(t *testing.T) {
	if _, err := FUSEMounts(); err != nil {
		t.Error(err)
	}
}
