package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon"
	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/fdstore"
)

// childVar makes this program a daemon over the state directory that it names.
const childVar = "DAEMON_TEST_STATE"

func childMain(state string) {
	if err := serveChild(state); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serveChild(state string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() { // ends with the test's process, and this one with it
		_, _ = os.Stdin.Read(make([]byte, 1)) // nothing is ever written
		stop()
	}()
	d, err := daemon.Open(ctx, config.Default(state))
	if err != nil {
		return err
	}
	err = d.Serve(ctx)
	if e := d.Close(); err == nil {
		err = e
	}
	return err
}

// replaced is a daemon in a process that is replaced when it is killed.
type replaced struct {
	*harness
	pids chan int
	pid  int
}

// startReplaced runs a daemon in a process, and another when that is killed,
// until the test ends. This process keeps their descriptors.
func startReplaced(t *testing.T) *replaced {
	t.Helper()
	mustRunHere(t)
	r := &replaced{harness: &harness{t: t, state: t.TempDir()}, pids: make(chan int, 8)}
	life, end, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	p := fdstore.Parent{
		Command: func() *exec.Cmd {
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), childVar+"="+r.state)
			cmd.Stdin, cmd.Stderr = life, os.Stderr
			return cmd
		},
		Started: func(pid int) error {
			r.pids <- pid
			return nil
		},
	}
	go func() {
		code, err := p.Run(ctx, nil)
		if err == nil && code != 0 {
			err = fmt.Errorf("the daemon ended with %d", code)
		}
		ended <- err
	}()
	r.c = client.New(r.state)
	t.Cleanup(func() {
		r.c.Close()
		stop()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("the daemon does not end")
			if err := unix.Kill(r.pid, unix.SIGKILL); err != nil {
				t.Error(err)
			}
			<-ended
		}
		life.Close()
		end.Close()
	})
	r.waits(0)
	return r
}

// waits returns when a daemon answers that is not the one with the pid old.
func (r *replaced) waits(old int) {
	r.t.Helper()
	select {
	case r.pid = <-r.pids:
	case <-time.After(patience):
		r.t.Fatal("no daemon was started")
	}
	var lastErr error
	for end := time.Now().Add(patience); time.Now().Before(end); {
		var snap *catalog.SnapshotResult
		snap, lastErr = try[catalog.SnapshotResult](&harness{t: r.t, c: r.c}, catalog.Snapshot, nil)
		if lastErr == nil && snap.Daemon.PID == r.pid && r.pid != old {
			return
		}
	}
	r.t.Fatalf("the daemon %d does not answer: %v", r.pid, lastErr)
}

// kill ends the daemon as a crash would, and waits for the next.
func (r *replaced) kill() {
	r.t.Helper()
	old := r.pid
	if err := unix.Kill(old, unix.SIGKILL); err != nil {
		r.t.Fatal(err)
	}
	r.waits(old)
}

// TestTakeover kills the daemon under a session with a running command, which
// goes on as if nothing had been.
func TestTakeover(t *testing.T) {
	r := startReplaced(t)
	r.imports(map[string]string{"f": "1\n2\n3\n", "d/x": "x\n"})
	one, two := r.session(), r.session()
	r.sh(one, "sed -i 1s/1/one/ f; mkfifo steps; mv d e; echo gone >tmp; rm tmp")
	holderPID := must[catalog.ListWorkspaceSessionsResult](r.harness, catalog.ListWorkspaceSessions, nil).Sessions[0].HolderPID
	run := r.background(one, `cd e; exec 3>>../f 4>../unlinked; rm ../unlinked; echo kept >&4; echo ready; while :; do read step <../steps || continue; echo "$step" >&3; echo "did $step $(cat /proc/self/fd/4)"; [ "$step" != end ] || exit 5; done`)
	run.says("ready\n")
	r.sh(two, "echo head >new")
	r.publish(two)

	for i := range 2 {
		r.kill()
		list := must[catalog.ListWorkspaceSessionsResult](r.harness, catalog.ListWorkspaceSessions, nil).Sessions
		if len(list) != 2 || list[0].State != "ready" || list[0].HolderPID != holderPID || list[0].Commands[len(list[0].Commands)-1].Status != "running" && i == 0 {
			t.Fatalf("after %d deaths: %+v", i+1, list)
		}
		if got := must[catalog.SnapshotResult](r.harness, catalog.Snapshot, nil).Daemon.Restarts; got != i+1 {
			t.Errorf("%d restarts are told after %d deaths", got, i+1)
		}
		step := "step" + number(i)
		r.sh(one, "echo "+step+" >steps")
		run.says("did " + step + " kept\n")
	}
	r.wantContent(one, "f", "one\n2\n3\nstep0\nstep1\n")
	if got := r.sh(one, "cat f; ls; ls e"); got != "one\n2\n3\nstep0\nstep1\ne\nf\nsteps\nx\n" {
		t.Errorf("the session sees %q", got)
	}
	r.wantOwners(one, "f", by(one), original, original, by(one), by(one))
	if ref := r.refresh(one); ref.Base != "L000001" || len(ref.Conflicts) > 0 {
		t.Errorf("refreshed: %+v", ref)
	}
	p := r.publish(one)
	if p.Commit != "L000002" {
		t.Errorf("published %+v", p)
	}
	r.sh(one, "cat new; echo end >steps")
	run.says("did end kept\n")
	if res := run.ends(); *res.ExitCode != 5 || res.Status != "exited" {
		t.Errorf("the command ended: %+v", res)
	}
	r.wantOwners("", "f", by(one), original, original, by(one), by(one))
	act := must[catalog.ActivityResult](r.harness, catalog.Activity, &catalog.ActivityRequest{WorkspaceSessionID: one, Path: "f", Kind: "write"}).Entries
	for _, a := range act {
		if a.Operation == "" {
			t.Errorf("nobody is said to have written: %+v", a)
		}
	}
	if len(act) < 2 {
		t.Errorf("who wrote f: %+v", act)
	}
	r.verifies()
	r.destroy(one)
	// It was left to another parent, which may reap it late.
	stat, err := os.ReadFile("/proc/" + number(holderPID) + "/stat")
	if err == nil && !strings.Contains(string(stat), ") Z ") {
		t.Errorf("the holder is there: %s", stat)
	}
}

// TestTakeoverOfExits kills the daemon and lets a command, and a one-command
// session, end before the next is there.
func TestTakeoverOfExits(t *testing.T) {
	r := startReplaced(t)
	r.imports(map[string]string{"f": "1\n"})
	ws := r.session()
	x := must[catalog.ExecCommandResult](r.harness, catalog.ExecCommand, &catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: "echo out; sleep 0.3; echo more; exit 9", YieldTimeMS: new(int64)})
	y := must[catalog.ExecCommandResult](r.harness, catalog.ExecCommand, &catalog.ExecCommandRequest{Cmd: "sleep 0.3; echo 2 >>f", YieldTimeMS: new(int64)})
	r.kill()
	end := (&running{h: r.harness, id: x.CommandID, ws: ws}).ends()
	if end.Status != "exited" || *end.ExitCode != 9 || end.TotalBytes != 9 {
		t.Errorf("the command: %+v", end)
	}
	one := &running{h: r.harness, id: y.CommandID, ws: y.WorkspaceSessionID}
	res := one.ends()
	for res.Publish == nil {
		res = one.next()
	}
	if res.Publish.Status != "committed" || res.Publish.Commit != "L000001" {
		t.Errorf("the one-command session: %+v", res.Publish)
	}
	r.wantContent("", "f", "1\n2\n")
	r.wantOwners("", "f", original, by(y.WorkspaceSessionID))
}

// TestRestart closes a daemon and opens another on its state: the processes are
// gone, everything else goes on.
func TestRestart(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n2\n3\n"})
	ws, done := h.session(), h.session()
	h.sh(ws, "sed -i 2s/2/two/ f; echo n >new; ln new new2")
	h.sh(done, "echo d >>f")
	h.publish(done)
	run := h.background(ws, "echo started; sleep 1000")
	run.says("started\n")
	shot := h.run(&catalog.ExecCommandRequest{Cmd: "echo x >shot; echo started; sleep 1000", YieldTimeMS: new(int64)})
	(&running{h: h, id: shot.CommandID}).says("started\n")
	before := h.changes(ws)
	h.stop()

	n := startIn(t, h.state, nil)
	n.sb, n.root = h.sb, h.root
	if got := n.changes(ws); got != before {
		t.Errorf("the session differs in %s, want %s", got, before)
	}
	run.h = n
	if end := run.ends(); end.Status != "cancelled" || end.ExitCode == nil {
		t.Errorf("the command: %+v", end)
	}
	if got := n.sh(ws, "cat f new2; [ new -ef new2 ]"); got != "1\ntwo\n3\nn\n" {
		t.Errorf("the session sees %q", got)
	}
	n.wantOwners(ws, "f", original, by(ws), original)
	one := &running{h: n, id: shot.CommandID}
	res := one.ends()
	for res.Publish == nil {
		res = one.next()
	}
	if res.Publish.Status != "skipped" {
		t.Errorf("the one-command session: %+v", res.Publish)
	}
	p := n.publish(ws)
	if p.Commit != "L000002" || n.read("", "f") != "1\ntwo\n3\nd\n" {
		t.Errorf("published %+v; f holds %q", p, n.read("", "f"))
	}
	n.wantOwners("", "f", original, by(ws), original, by(done))
	n.verifies()
}

// TestRestartFromImage opens a copy of the state that a daemon, killed together
// with its parent, would have left: commands of which nobody knows the end have
// ended.
func TestRestartFromImage(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n"})
	ws := h.session()
	run := h.background(ws, "echo 2 >>f; echo started; sleep 1000")
	run.says("started\n")
	shot := h.run(&catalog.ExecCommandRequest{Cmd: "echo x >shot; echo started; sleep 1000", YieldTimeMS: new(int64)})
	(&running{h: h, id: shot.CommandID}).says("started\n")
	image := filepath.Join(t.TempDir(), "image")
	if out, err := exec.Command("cp", "-a", h.state, image).CombinedOutput(); err != nil && !strings.Contains(string(out), "gateway.sock") {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.Remove(filepath.Join(image, config.SocketName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	h.stop()

	n := startIn(t, image, nil)
	n.sb, n.root = h.sb, h.root
	for _, s := range must[catalog.ListWorkspaceSessionsResult](n, catalog.ListWorkspaceSessions, nil).Sessions {
		for _, c := range s.Commands {
			if c.Status == "running" {
				t.Errorf("in session %s, %q is said to run", s.WorkspaceSessionID, c.Command)
			}
		}
	}
	if got := n.sh(ws, "cat f"); got != "1\n2\n" {
		t.Errorf("the session sees %q", got)
	}
	n.publish(ws)
	n.wantOwners("", "f", original, by(ws))
	n.stop()
}
