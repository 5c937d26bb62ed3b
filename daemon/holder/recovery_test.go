package holder

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// doomedDaemon starts a session, hands its descriptors to whoever holds the
// other end of descriptor 3, and waits to be killed. A command prints into
// descriptor 4 once that has happened.
func doomedDaemon() {
	conn, err := net.FileConn(os.NewFile(3, "tester"))
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	h, err := Start(ctx, Config{Session: "doomed", Workspace: "/w", NoView: true})
	if err == nil {
		err = h.Ready(ctx)
	}
	if err != nil {
		panic(err)
	}
	in, out, err := os.Pipe() // out closes when this process dies
	if err != nil {
		panic(err)
	}
	env := []string{"PATH=/usr/bin:/bin"}
	for _, c := range []Command{
		{ID: "finished", Argv: shell("exit 4"), Env: env},
		{ID: "running", Argv: shell("exec sleep 1000"), Env: env},
		{
			ID: "exits", Argv: shell("cat; head -c 1000000 /dev/zero; exit 5"), Env: env,
			Stdin: in, Stdout: os.NewFile(4, "output"),
		},
		{ID: "forgotten", Argv: shell("exit 6"), Env: env},
	} {
		if _, err := h.Exec(c); err != nil {
			panic(err)
		}
	}
	for _, id := range []string{"finished", "forgotten"} {
		if err := h.WaitTree(ctx, id); err != nil {
			panic(err)
		}
	}
	if err := h.Ack("forgotten"); err != nil {
		panic(err)
	}
	state, err := json.Marshal(h.State())
	if err != nil {
		panic(err)
	}
	if _, _, err := conn.(*net.UnixConn).WriteMsgUnix(state, unix.UnixRights(h.ControlFD()), nil); err != nil {
		panic(err)
	}
	conn.Read(make([]byte, 1)) // for ever
	out.Close()
}

// killedDaemon runs a doomed daemon up to its death, and gives what an fd store
// would have kept.
func killedDaemon(t *testing.T, output *os.File, beforeDeath func(control int) int) (control int, s State) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs, ours := os.NewFile(uintptr(fds[0]), "theirs"), os.NewFile(uintptr(fds[1]), "ours")
	conn, err := net.FileConn(ours)
	ours.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	daemon := exec.Command("/proc/self/exe")
	daemon.Args = []string{daemonName}
	daemon.ExtraFiles = []*os.File{theirs, output}
	daemon.Stderr = os.Stderr
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	text, oob := make([]byte, 4096), make([]byte, 64)
	n, oobn, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(text, oob)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text[:n], &s); err != nil {
		t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		t.Fatal(messages, err)
	}
	rights, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(rights) != 1 {
		t.Fatal(rights, err)
	}
	control = beforeDeath(rights[0])
	if err := daemon.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	daemon.Wait()
	return control, s
}

func keep(control int) int { return control }

func drop(control int) int {
	unix.Close(control)
	return -1
}

func TestDaemonIsReplaced(t *testing.T) {
	output := scratch(t, "")
	control, s := killedDaemon(t, output, keep)
	h, err := Adopt(patience(t), control, -1, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.Ready(patience(t)); err != nil {
		t.Error(err)
	}
	if got, want := h.Commands(), []string{"exits", "finished", "running"}; !slices.Equal(got, want) {
		t.Errorf("commands after adoption: %v, want %v", got, want)
	}
	for id, code := range map[string]int{"exits": 5, "finished": 4} {
		if exit, err := h.Wait(patience(t), id); err != nil || exit.Code != code {
			t.Errorf("%s: %+v, %v", id, exit, err)
		}
	}
	if n := len(content(t, output)); n != 1000000 {
		t.Errorf("%d bytes were printed while there was no daemon", n)
	}
	if _, err := h.Exec(Command{ID: "running", Argv: []string{"true"}}); !errors.Is(err, ErrExist) {
		t.Errorf("a running command, once more: %v", err)
	}
	if _, err := h.Exec(Command{ID: "forgotten", Argv: []string{"true"}}); !errors.Is(err, unix.EALREADY) {
		t.Errorf("an acknowledged command, once more: %v", err)
	}
	pids := announced(t, h, "new", daemonised, 1)
	if id, ok := h.CommandOf(pids[0]); !ok || id != "new" {
		t.Errorf("owner after adoption: %q, %v", id, ok)
	}
	if err := errors.Join(h.Kill("running", unix.SIGTERM), h.WaitTree(patience(t), "running"), h.Ack("running")); err != nil {
		t.Error(err)
	}
	if exit, err := h.Wait(patience(t), "exits"); err != nil || exit.Code != 5 {
		t.Error("an exit is told until it is acknowledged:", exit, err)
	}
	expect(t, h, "echo $HOME", h.Home())
	if err := h.Syncfs(patience(t)); err != nil {
		t.Error(err)
	}
}

func TestDaemonDiesForGood(t *testing.T) {
	_, s := killedDaemon(t, scratch(t, ""), drop)
	// Nobody holds the control socket any more: the session ends by itself.
	fd, err := unix.PidfdOpen(s.Pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPidfd(fd, s.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	p.wait()
	if _, err := Adopt(patience(t), 0, -1, s); !errors.Is(err, ErrEnded) {
		t.Errorf("adoption of what has ended: %v", err)
	}
}

func TestAdoptChecksWhom(t *testing.T) {
	s := State{Pid: os.Getpid(), Started: 1}
	if _, err := Adopt(patience(t), 0, -1, s); !errors.Is(err, ErrEnded) {
		t.Errorf("adoption of another process: %v", err)
	}
}

// nextRequest reads one FUSE request and returns its opcode and unique id.
func nextRequest(t *testing.T, fd int) (opcode uint32, unique uint64) {
	t.Helper()
	buf := make([]byte, 1<<17)
	for {
		n, err := unix.Read(fd, buf)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil || n < 40 {
			t.Fatal(n, err)
		}
		return binary.LittleEndian.Uint32(buf[4:]), binary.LittleEndian.Uint64(buf[8:])
	}
}

// answerInit lets the kernel begin to ask about the view.
func answerInit(t *testing.T, fd int) {
	t.Helper()
	const opInit = 26
	opcode, unique := nextRequest(t, fd)
	if opcode != opInit {
		t.Fatalf("the first request is %d", opcode)
	}
	reply := make([]byte, 16+64)
	binary.LittleEndian.PutUint32(reply[0:], uint32(len(reply)))
	binary.LittleEndian.PutUint64(reply[8:], unique)
	binary.LittleEndian.PutUint32(reply[16:], 7)
	binary.LittleEndian.PutUint32(reply[20:], 31)
	binary.LittleEndian.PutUint32(reply[36:], 4096) // the largest write
	if _, err := unix.Write(fd, reply); err != nil {
		t.Fatal(err)
	}
}

func beginView(t *testing.T, workspace string) *Holder {
	t.Helper()
	h, err := Start(patience(t), Config{Session: "view", Workspace: workspace})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.Ready(patience(t)); err != nil {
		t.Fatal(err)
	}
	return h
}

func TestViewIsMounted(t *testing.T) {
	environments(t, func(t *testing.T) {
		if os.Geteuid() == 0 {
			if st, err := os.Stat("/dev/fuse"); err != nil || st.Mode().Perm() != 0o600 {
				t.Log("the host's node is open to all already, so the private one is not put to the test")
			}
		}
		h := beginView(t, "/tmp/ws")
		answerInit(t, h.FuseFD())
		_, wait := spawn(t, h, Command{ID: "mounts", Dir: "/", Argv: shell(`grep ' /tmp/ws ' /proc/mounts`)})
		want := "sandbox:view /tmp/ws fuse.sandbox rw,nosuid,nodev,relatime,user_id="
		if r := wait(); len(r.stdout) < len(want) || r.stdout[:len(want)] != want {
			t.Errorf("got %q, want %q...", r.stdout, want)
		}
	})
}

func TestUnansweredViewBlocksOnlyItsCommand(t *testing.T) {
	h := beginView(t, "/tmp/ws")
	answerInit(t, h.FuseFD())
	stuck := make(chan error, 1)
	go func() {
		_, err := h.Exec(Command{ID: "stuck", Argv: []string{"true"}}) // in the view
		stuck <- err
	}()
	if opcode, _ := nextRequest(t, h.FuseFD()); opcode == 0 {
		t.Fatal("no request")
	}
	// That request is never answered, so the child is beyond any signal.
	_, wait := spawn(t, h, Command{ID: "other", Dir: "/", Argv: shell("echo fine")})
	if r := wait(); r.stdout != "fine\n" {
		t.Errorf("another command: %+v", r)
	}
	if err := h.Kill("stuck", unix.SIGKILL); err != nil {
		t.Error(err)
	}
	if err := h.Close(); err != nil { // gives up on the view after its grace
		t.Fatal(err)
	}
	if err := <-stuck; err == nil {
		t.Error("a command started in a view that never answered")
	}
}

func TestKillEndsAWaitingExec(t *testing.T) {
	h := beginView(t, "/tmp/ws") // its requests queue, unread
	stuck := make(chan error, 1)
	go func() {
		_, err := h.Exec(Command{ID: "stuck", Argv: []string{"true"}})
		stuck <- err
	}()
	for done := false; !done; { // until its child has been there to be killed
		if err := h.Kill("stuck", unix.SIGKILL); err != nil && !errors.Is(err, ErrNoCommand) {
			t.Fatal(err)
		}
		select {
		case err := <-stuck:
			if err == nil {
				t.Error("a command started in a view that never answered")
			}
			done = true
		default:
		}
	}
}

func TestStartIsCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Start(ctx, Config{Session: "s", Workspace: "/w"}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestSecondBest(t *testing.T) {
	// The single map in a root daemon, and this program in place of the static
	// binary: what is left where the better ones fail.
	c := Config{Session: "s", Workspace: "/w", Binary: &Binary{fd: -1, path: self}}.withDefaults()
	binds, err := c.binds()
	if err != nil {
		t.Fatal(err)
	}
	h, err := launch(patience(t), c, idmap{name: mapSingle}, binds)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Ready(patience(t)); err != nil {
		t.Error(err)
	}
	_, wait := spawn(t, h, Command{ID: "id", Dir: "/", Argv: shell("id -u; echo x >/proc/sys/kernel/hostname || echo x >/etc/x || echo refused")})
	if r := wait(); r.stdout != "0\nrefused\n" {
		t.Errorf("%+v", r)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

func TestProbe(t *testing.T) {
	environments(t, func(t *testing.T) {
		if problems := Probe(); len(problems) > 0 {
			t.Errorf("problems on a host where the tests pass: %v", problems)
		}
	})
}

func TestPrivateNodeFallsBack(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Log("only a root daemon makes nodes")
		return
	}
	dir := t.TempDir()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	node, err := nodeIn(fd, int(unix.Mkdev(1, 3)))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(node)
	var st unix.Stat_t
	if err := unix.Fstat(node, &st); err != nil || st.Mode != unix.S_IFCHR|0o666 || st.Nlink != 0 {
		t.Errorf("mode %o, %d links, %v", st.Mode, st.Nlink, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the directory: %v, %v", left, err)
	}
}

func TestSubids(t *testing.T) {
	const file = "# comment\nother:1:2\nme:100000:65536\nme:5:5\nshort:7\nbad:x:1\nzero:0:10\nnone:9:0\n"
	for owner, want := range map[string]idBlock{
		"me": {100000, 65536}, "other": {1, 2}, "short": {}, "bad": {}, "zero": {}, "none": {}, "absent": {},
	} {
		got, ok := parseSubids([]byte(file), owner)
		if got != want || ok != (want != idBlock{}) {
			t.Errorf("%s: %v, %v", owner, got, ok)
		}
	}
}

func TestAdoptionWhileACommandStarts(t *testing.T) {
	h, err := Start(patience(t), Config{Session: "view", Workspace: "/tmp/ws"})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Ready(patience(t)); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := h.Exec(Command{ID: "starting", Argv: []string{"true"}}) // waits for the view
		answered <- err
	}()
	for h.Kill("starting", 0) != nil { // until the holder has heard of it
	}
	dup := func(fd int) int {
		t.Helper()
		fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	control, fuse := dup(h.ControlFD()), dup(h.FuseFD())
	h.Detach()
	if err := <-answered; !errors.Is(err, ErrEnded) {
		t.Errorf("the first daemon was told %v", err)
	}
	next, err := Adopt(patience(t), control, fuse, h.State())
	if err != nil {
		t.Fatal(err)
	}
	if got := next.Commands(); !slices.Equal(got, []string{"starting"}) {
		t.Errorf("commands after adoption: %v", got)
	}
	for { // its child may not have been there to be killed
		if err := next.Kill("starting", unix.SIGKILL); errors.Is(err, ErrNoCommand) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if exit, err := next.Wait(patience(t), "starting"); err != nil || !exit.Lost {
		t.Errorf("%+v, %v", exit, err)
	}
	if err := errors.Join(next.WaitTree(patience(t), "starting"), next.Close()); err != nil {
		t.Error(err)
	}
}
