package fusefs

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/fs/overlay"
)

// The guard is the parent of the process that runs the tests. It serves nothing,
// opens no file of a view and forks once, so it cannot get stuck with them. It
// is told of every connection before its first use; it aborts those that last
// too long, that have unanswered requests when they should have ended, and all
// that are there when the tests have ended in whatever way.

// limit is how long a connection may last.
const limit = 2 * time.Minute

// Descriptors of the process that runs the tests: where it tells the guard a
// line, and where it is answered with one.
const (
	tellFD   = 3
	answerFD = 4
)

// guardLine is the one conversation with the guard.
var guardLine = sync.OnceValue(func() *conversation {
	return &conversation{tell: os.NewFile(tellFD, "guard"), answers: bufio.NewReader(os.NewFile(answerFD, "guard"))}
})

type conversation struct {
	mu      sync.Mutex
	tell    *os.File
	answers *bufio.Reader
}

// guarded tells the guard that a connection begins or ends, and returns when it
// knows. The error says that the connection had to be aborted.
func guarded(what, connection string) error {
	c := guardLine()
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := fmt.Fprintln(c.tell, what, connection); err != nil {
		return err
	}
	answer, err := c.answers.ReadString('\n')
	if err == nil && answer != "ok\n" {
		err = fmt.Errorf("connection %s was aborted: %s", connection, strings.TrimSpace(answer))
	}
	return err
}

type guard struct {
	ctl string // where fusectl is

	mu  sync.Mutex
	all map[string]*guardedConnection // guarded by mu; by number, those that have not ended
}

type guardedConnection struct {
	timer *time.Timer
	cut   bool // guarded by guard.mu
}

// guardMain runs the tests and is their guard.
func guardMain() int {
	code, err := guardTests()
	if err != nil {
		fmt.Fprintln(os.Stderr, "guard of the tests:", err)
		return 1
	}
	return code
}

func guardTests() (code int, err error) {
	runtime.LockOSThread() // the child dies with the thread that started it
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	g := &guard{all: map[string]*guardedConnection{}}
	dir, err := os.MkdirTemp("", "fusectl")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.Remove(dir)) }()
	// The mount shows in this namespace only.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return 1, fmt.Errorf("make mounts private: %w", err)
	}
	switch err := unix.Mount("none", dir, "fusectl", 0, ""); {
	case err == nil:
		g.ctl = dir
		defer func() { err = errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH)) }()
	case errors.Is(err, unix.EPERM):
		g.ctl = "/sys/fs/fuse/connections" // in a user namespace, where the host has it
	default:
		return 1, fmt.Errorf("mount fusectl: %w", err)
	}
	told, tell, err := os.Pipe()
	if err != nil {
		return 1, err
	}
	answers, answer, err := os.Pipe()
	if err != nil {
		return 1, err
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	role := roleTests
	if os.Getenv(stuckVar) != "" {
		role = roleStuck
	}
	cmd.Env = append(os.Environ(), roleVar+"="+role)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{tell, answers}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	go g.listen(told, answer)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case <-term:
			_ = cmd.Process.Kill() // it may have ended
		case err := <-ended:
			g.abortAll()
			return exitCode(err), nil
		}
	}
}

// listen hears of connections until the pipe's other end is gone.
func (g *guard) listen(told, answer *os.File) {
	lines := bufio.NewScanner(told)
	for lines.Scan() {
		what, id, _ := strings.Cut(lines.Text(), " ")
		reply := "ok"
		switch what {
		case "begin":
			g.begin(id)
		case "end":
			reply = g.end(id)
		}
		if _, err := fmt.Fprintln(answer, reply); err != nil {
			return
		}
	}
}

func (g *guard) begin(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := &guardedConnection{}
	g.all[id] = c
	c.timer = time.AfterFunc(limit, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.all[id] == c {
			c.cut = true
			g.abort(id, fmt.Sprintf("it has lasted %v", limit))
		}
	})
}

// end forgets a connection, whose number another one may get from now on. What
// is left of it is aborted when somebody waits for an answer.
func (g *guard) end(id string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.all[id]
	if c == nil {
		return "it was never told of"
	}
	c.timer.Stop()
	delete(g.all, id)
	if c.cut {
		return fmt.Sprintf("it lasted more than %v", limit)
	}
	waiting, err := os.ReadFile(filepath.Join(g.ctl, id, "waiting"))
	if err != nil || strings.TrimSpace(string(waiting)) == "0" {
		return "ok" // gone, as it should be, or about to
	}
	g.abort(id, "requests were unanswered at its end")
	return strings.TrimSpace(string(waiting)) + " requests were unanswered at its end"
}

// abortAll ends what the tests left: nobody is there who could use it.
func (g *guard) abortAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for id, c := range g.all {
		c.timer.Stop()
		g.abort(id, "the tests have ended")
	}
}

func (g *guard) abort(id, why string) {
	fmt.Fprintf(os.Stderr, "connection %s is aborted: %s\n", id, why)
	err := os.WriteFile(filepath.Join(g.ctl, id, "abort"), []byte("1"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		fmt.Fprintln(os.Stderr, err)
	}
}

// stuckVar names the directory in which a process that gets stuck says who it
// is.
const stuckVar = "FUSEFS_TEST_STUCK"

// stuckMain serves a view and is killed together with a child that has a file
// of the view open and the last copy of /dev/fuse. The child cannot die: closing
// the file asks the view.
func stuckMain() {
	err := getStuck(os.Getenv(stuckVar))
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func getStuck(dir string) error {
	m := &mounted{dir: filepath.Join(dir, "view")}
	if err := os.Mkdir(m.dir, 0o755); err != nil {
		return err
	}
	var err error
	if m.fd, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	if err := unix.Mount("sandbox", m.dir, "fuse.sandbox", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", m.fd)); err != nil {
		return err
	}
	id, err := m.connection()
	if err != nil {
		return err
	}
	if err := errors.Join(guarded("begin", id), os.WriteFile(filepath.Join(dir, "connection"), []byte(id), 0o600)); err != nil {
		return err
	}
	alloc, err := allocator(filepath.Join(dir, "inos"))
	if err != nil {
		return err
	}
	fs, err := overlay.Open(overlay.Options{Dir: filepath.Join(dir, "upper"), Lower: sampleLower(), NewIno: alloc})
	if err != nil {
		return err
	}
	if _, err := Serve(Options{FS: fs, FD: m.fd}); err != nil {
		return err
	}
	fd, err := unix.Open(filepath.Join(m.dir, "file"), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	debug.SetGCPercent(-1) // nothing may stop this process while it forks: the child asks it
	child := exec.Command("sh", "-c", "read x")
	child.ExtraFiles = []*os.File{os.NewFile(uintptr(fd), "file"), os.NewFile(uintptr(m.fd), "/dev/fuse")}
	if _, err := child.StdinPipe(); err != nil {
		return err
	}
	if err := child.Start(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "pid"), fmt.Append(nil, child.Process.Pid), 0o600); err != nil {
		return err
	}
	return unix.Kill(unix.Getpid(), unix.SIGKILL) // the child's input ends
}

// TestGuard leaves a process stuck on a view that nobody serves any more. A
// guard of its own must free it.
func TestGuard(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVar+"=", stuckVar+"="+dir)
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) {
		t.Fatal(err)
	}
	read := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		return string(b)
	}
	// Should that guard have failed, ours frees it.
	must(t, guarded("begin", read("connection")))
	defer func() {
		if err := guarded("end", read("connection")); err != nil {
			t.Error(err)
		}
	}()
	pid, err := strconv.Atoi(read("pid"))
	must(t, err)
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	must(t, err)
	defer unix.Close(fd)
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 20_000); n != 1 {
		t.Errorf("process %d is stuck: %v", pid, err)
	}
}
