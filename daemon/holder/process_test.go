package holder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// announced starts a script that prints inner pids, one a line, and then stays;
// it returns the first n.
func announced(t *testing.T, h *Holder, id, script string, n int) []uint32 {
	t.Helper()
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	c := Command{ID: id, Argv: shell(script), Env: []string{"PATH=/usr/bin:/bin"}, Stdout: out}
	if _, err := h.Exec(c); err != nil {
		t.Fatal(err)
	}
	out.Close()
	var pids []uint32
	for range n {
		var pid uint32
		if _, err := fmt.Fscanln(in, &pid); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// daemonised leaves a child in a session of its own, whose parent is gone.
const daemonised = `setsid sh -c 'echo $$; exec sleep 1000' & exit 0`

func TestDescendantsBelongToTheirCommand(t *testing.T) {
	environments(t, func(t *testing.T) {
		h := begin(t, Config{})
		one := announced(t, h, "one", daemonised, 1)
		two := announced(t, h, "two", `echo $$; sh -c 'echo $$; sh -c "echo \$\$; sleep 1000" & wait'; wait`, 3)
		for _, id := range []string{"one", "two"} {
			if id == "one" {
				if exit, err := h.Wait(patience(t), id); err != nil || exit.Code != 0 {
					t.Fatal(exit, err)
				}
			}
		}
		owned := func(pids []uint32, want string) {
			t.Helper()
			for range 2 { // walked, then remembered
				for _, pid := range pids {
					if id, ok := h.CommandOf(pid); !ok || id != want {
						t.Errorf("pid %d belongs to %q, %v; want %q", pid, id, ok, want)
					}
				}
			}
		}
		owned(one, "one")
		owned(two, "two")
		for _, pid := range []uint32{0, 1, 1 << 30} {
			if id, ok := h.CommandOf(pid); ok {
				t.Errorf("pid %d belongs to %q", pid, id)
			}
		}

		// The command is over, its daemon is not; killing the command reaches it.
		canceled, cancel := context.WithCancel(context.Background())
		cancel()
		if err := h.WaitTree(canceled, "one"); !errors.Is(err, context.Canceled) {
			t.Errorf("the tree is over though its daemon lives: %v", err)
		}
		for _, id := range []string{"one", "two"} {
			if err := errors.Join(h.Kill(id, unix.SIGKILL), h.WaitTree(patience(t), id)); err != nil {
				t.Fatal(err)
			}
		}
		if exit, err := h.Wait(patience(t), "two"); err != nil || exit.Signal != "SIGKILL" || exit.Lost {
			t.Errorf("the killed command: %+v, %v", exit, err)
		}
		expect(t, h, "set -- /proc/[0-9]*; echo $#", "3")
		owned(one, "one") // its last requests may still come in
		owned(two, "two")
	})
}

func TestTermReachesTheTree(t *testing.T) {
	h := begin(t, Config{})
	announced(t, h, "one", `trap 'exit 3' TERM; setsid sh -c 'echo $$; exec sleep 1000' & wait`, 1)
	if err := errors.Join(h.Kill("one", unix.SIGTERM), h.WaitTree(patience(t), "one")); err != nil {
		t.Fatal(err)
	}
	if exit, err := h.Wait(patience(t), "one"); err != nil || exit.Code != 3 {
		t.Errorf("%+v, %v", exit, err)
	}
}

func TestHolderSurvivesSignals(t *testing.T) {
	environments(t, func(t *testing.T) {
		h := begin(t, Config{})
		announced(t, h, "bystander", "echo $$; exec sleep 1000", 1)
		// Not to its own stub: that comes next.
		expect(t, h, "for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; echo alive", "alive")
		// What stops or kills a stub is for TestKilledStub; 32 to 34 kill any Go
		// program.
		expect(t, h, "for s in $(seq 1 64); do case $s in 9|19|32|33|34) ;; *) kill -$s $PPID;; esac; done 2>/dev/null; echo alive", "alive")
		expect(t, h, "echo still", "still")
		if err := h.Kill("bystander", 0); err != nil {
			t.Error(err)
		}
	})
}

func TestKilledStub(t *testing.T) {
	h := begin(t, Config{})
	announced(t, h, "bystander", "echo $$; exec sleep 1000", 1)
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_, wait := spawn(t, h, Command{
		ID: "killer", Stdin: in, // until the stub has said that it runs
		Argv: shell("setsid sleep 1000 >/dev/null 2>&1 & read end; kill -9 $PPID; sleep 1000"),
	})
	in.Close()
	out.Close()
	if r := wait(); !r.Lost || r.Signal != "SIGKILL" {
		t.Errorf("a command whose stub was killed: %+v", r)
	}
	if err := h.WaitTree(patience(t), "killer"); err != nil {
		t.Fatal(err)
	}
	expect(t, h, "set -- /proc/[0-9]*; echo $#", "5") // as usual, and the bystander with its stub

	// A stub that is merely stopped goes on.
	announced(t, h, "stopper", "kill -STOP $PPID; echo $$; exec sleep 1000", 1)
	if err := errors.Join(h.Kill("stopper", unix.SIGKILL), h.WaitTree(patience(t), "stopper")); err != nil {
		t.Error(err)
	}
	// The worst that a session can do to itself.
	in, out, err = os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_, wait = spawn(t, h, Command{ID: "all", Stdin: in, Argv: shell("read end; kill -9 -1; sleep 1000")})
	in.Close()
	out.Close()
	wait()
	if exit, err := h.Wait(patience(t), "bystander"); err != nil || exit.Signal != "SIGKILL" {
		t.Errorf("%+v, %v", exit, err)
	}
	expect(t, h, "echo still", "still")
}

func TestForkBomb(t *testing.T) {
	environments(t, func(t *testing.T) {
		const limit = 150
		h := begin(t, Config{MaxProcesses: limit})
		in, out, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		bomb := Command{
			ID: "bomb", Stderr: out, Env: []string{"PATH=/usr/bin:/bin"},
			Argv: shell(`f() { f & while :; do (setsid sleep 1000 &) ; done; }; f; wait`),
		}
		if _, err := h.Exec(bomb); err != nil {
			t.Fatal(err)
		}
		out.Close()
		if _, err := in.Read(make([]byte, 1)); err != nil { // the shell's complaint that it cannot fork
			t.Fatal(err)
		}
		// Holder and stubs are beyond the limit: they go on.
		r := sh(t, h, "set -- /proc/[0-9]*; echo $#")
		if n, err := strconv.Atoi(strings.TrimSpace(r.stdout)); err != nil || n < limit/2 || n > 2*limit {
			t.Errorf("%d processes, %v, %+v", n, err, r)
		}
		if err := errors.Join(h.Kill("bomb", unix.SIGKILL), h.WaitTree(patience(t), "bomb")); err != nil {
			t.Fatal(err)
		}
		expect(t, h, "set -- /proc/[0-9]*; echo $#", "3")
	})
}

func TestCloseLeavesNothing(t *testing.T) {
	descriptors := func() string {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return strconv.Itoa(len(names))
	}
	// The session's processes as the host sees them.
	var tree func(pid string) []string
	tree = func(pid string) (pids []string) {
		tasks, err := os.ReadDir("/proc/" + pid + "/task")
		if err != nil {
			return nil
		}
		for _, task := range tasks {
			children, err := os.ReadFile("/proc/" + pid + "/task/" + task.Name() + "/children")
			if err != nil {
				t.Fatal(err)
			}
			for _, child := range strings.Fields(string(children)) {
				pids = append(append(pids, child), tree(child)...)
			}
		}
		return pids
	}
	var before string
	for round := range 3 {
		h, err := Start(patience(t), Config{Session: "s", Workspace: "/w"})
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Ready(patience(t)); err != nil {
			t.Fatal(err)
		}
		for i := range 5 {
			script := `setsid sh -c 'sleep 1000; :' & exit 0`
			c := Command{ID: "c" + strconv.Itoa(i), Dir: "/", Env: []string{"PATH=/usr/bin:/bin"}, Argv: shell(script)}
			if _, err := h.Exec(c); err != nil {
				t.Fatal(err)
			}
		}
		inside := tree(strconv.Itoa(h.Pid()))
		if len(inside) < 10 { // five stubs with a shell each
			t.Fatalf("processes inside: %v", inside)
		}
		waiting := make(chan error, 1)
		go func() { waiting <- h.WaitTree(context.Background(), "c0") }()
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
		<-h.Done()
		if err := <-waiting; !errors.Is(err, ErrEnded) {
			t.Errorf("who waited was told %v", err)
		}
		if _, err := h.Exec(Command{ID: "late", Argv: []string{"true"}}); !errors.Is(err, ErrEnded) {
			t.Errorf("exec after close: %v", err)
		}
		if _, ok := h.CommandOf(2); ok {
			t.Error("a pid of a closed session belongs to a command")
		}
		for _, pid := range inside {
			if _, err := os.Stat("/proc/" + pid); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("process %s is left: %v", pid, err)
			}
		}
		if now := descriptors(); round == 0 {
			before = now // the runtime's own are open by now
		} else if now != before {
			t.Errorf("round %d: %s descriptors, before %s", round, now, before)
		}
	}
}
