package fusefs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// The test binary plays four parts: the outer process, which does nothing but
// start the guard; the guard, see guard_test.go; the one that runs the tests;
// and servers and tools that tests start as processes.
//
// No process forks while it holds files of a view and the view's /dev/fuse as
// well. Until the child has executed another program it holds copies of both;
// closing the files asks the view, and if the one who serves it dies at that
// moment, the child waits for an answer that only it could give. Nothing but
// the guard's abort ends such a wait, not even SIGKILL.
const (
	roleVar   = "FUSEFS_TEST_ROLE"
	roleGuard = "guard"
	roleTests = "tests"
	roleServe = "serve"
	roleTool  = "tool"
	roleStuck = "stuck" // what the guard runs in place of the tests when stuckVar is set
)

func TestMain(m *testing.M) {
	switch os.Getenv(roleVar) {
	case roleGuard:
		os.Exit(guardMain())
	case roleServe:
		serveMain()
	case roleTool:
		toolMain()
	case roleStuck:
		stuckMain()
	case roleTests:
		os.Exit(m.Run())
	default:
		os.Exit(inNamespace())
	}
}

// inNamespace runs the guard, and with it the tests, in a mount namespace of
// its own, as root of a user namespace when this process is not root already.
func inNamespace() int {
	runtime.LockOSThread() // the child is told of the end of the thread that started it
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleVar+"="+roleGuard)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// Whatever kills this process's group must not kill the guard.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setsid: true}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	} else {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return exitCode(cmd.Run())
}

// exitCode is the code to end with after a child has.
func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode()
	}
	fmt.Fprintln(os.Stderr, "run the tests in a mount namespace:", err)
	return 1
}

// mounted is a mount without a server.
type mounted struct {
	dir string
	fd  int // of /dev/fuse
}

// mount opens and mounts /dev/fuse on a fresh directory. The mount goes at the
// end of the test, and the connection is cut when the test takes too long.
func mount(t *testing.T) *mounted {
	t.Helper()
	dir := t.TempDir()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOENT) {
		t.Skipf("no view can be mounted here: open /dev/fuse: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	opts := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions", fd)
	if err := unix.Mount("sandbox", dir, "fuse.sandbox", unix.MS_NOSUID|unix.MS_NODEV, opts); err != nil {
		unix.Close(fd)
		t.Fatalf("mount: %v", err)
	}
	m := &mounted{dir: dir, fd: fd}
	t.Cleanup(func() {
		m.unmount()
		m.closeFD()
	})
	id, err := m.connection()
	must(t, err)
	must(t, guarded("begin", id))
	t.Cleanup(func() {
		m.unmount()
		m.closeFD()
		if err := guarded("end", id); err != nil {
			t.Error(err)
		}
	})
	return m
}

func (m *mounted) unmount() { unix.Unmount(m.dir, unix.MNT_DETACH) }

func (m *mounted) closeFD() {
	if m.fd >= 0 {
		unix.Close(m.fd)
		m.fd = -1
	}
}

// connection is the number that fusectl knows the mount by.
func (m *mounted) connection() (string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 4 && f[4] == m.dir {
			_, minor, _ := strings.Cut(f[2], ":")
			return minor, nil
		}
	}
	return "", fmt.Errorf("%s is not mounted", m.dir)
}

// noPoll has the kernel ask once whether files can be polled. After that it
// does not ask again, which it would do for the Go runtime in a way that keeps
// the runtime from answering.
func (m *mounted) noPoll(t *testing.T) {
	t.Helper()
	fd, err := unix.Open(filepath.Join(m.dir, ".go-fuse-epoll-hack"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); err != nil {
		t.Fatal(err)
	}
}

// inode numbers for sessions of a test, written ahead so that a second server
// does not hand one out again.
func allocator(file string) (func() (tree.Ino, error), error) {
	const block = 1 << 16
	next := uint64(firstIno)
	if b, err := os.ReadFile(file); err == nil {
		if next, err = strconv.ParseUint(string(b), 10, 64); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(file, []byte(strconv.FormatUint(next+block, 10)), 0o600); err != nil {
		return nil, err
	}
	var used atomic.Uint64
	return func() (tree.Ino, error) {
		n := used.Add(1)
		if n >= block {
			return 0, errors.New("out of inode numbers")
		}
		return tree.Ino(next + n), nil
	}, nil
}

// local is a view served by the test's own process.
type local struct {
	*mounted
	fs     *overlay.FS
	server *Server
	record *access.Recorder
	log    *lines
}

// lines collects log lines.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// serveLocal serves lower from this process. edit may change the options.
// Memory of such a view must not be mapped: a page fault of the runtime's own
// threads cannot be answered. Nor must it be served under a log that is a file.
func serveLocal(t *testing.T, lower overlay.Lower, edit func(*Options, *overlay.Options)) *local {
	t.Helper()
	m := mount(t)
	alloc, err := allocator(filepath.Join(t.TempDir(), "inos"))
	if err != nil {
		t.Fatal(err)
	}
	v := &local{mounted: m, log: &lines{}}
	if v.record, err = access.Open(t.TempDir(), access.Options{}); err != nil {
		t.Fatal(err)
	}
	oo := overlay.Options{Dir: t.TempDir(), Lower: lower, NewIno: alloc}
	o := Options{FD: m.fd, Record: v.record, Logger: slog.New(slog.NewTextHandler(v.log, nil))}
	if edit != nil {
		edit(&o, &oo)
	}
	if v.fs, err = overlay.Open(oo); err != nil {
		t.Fatal(err)
	}
	o.FS = v.fs
	if v.server, err = Serve(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.unmount()
		if err := errors.Join(v.server.Close(), v.fs.Close(), v.record.Close()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log of the view:\n%s", v.log)
		}
	})
	m.noPoll(t)
	return v
}

func (v *local) path(names ...string) string {
	return filepath.Join(append([]string{v.dir}, names...)...)
}

// until waits for something that a request brings about which nobody waits
// for, such as RELEASE. It makes a round trip between looks.
func (v *local) until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("waited in vain until %s", what)
		}
		var st unix.Statfs_t
		if err := unix.Statfs(v.dir, &st); err != nil {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
}

// serverConfig is what a server process is told.
type serverConfig struct {
	Dir     string // of the overlay
	Inos    string
	Level   string
	State   string // file that holds the INIT state; resumed from when it exists
	DieIn   string // method to be killed in
	DieWhen string // before or after it does its work
}

// remote is a view served by another process.
type remote struct {
	*mounted
	config serverConfig
	cmd    *exec.Cmd
	start  *os.File // closed to let the process begin
	ready  *os.File // gives a byte when it serves
	stderr *lines
}

// holdsNothing fails the test when this process is about to fork with files of
// a view open. A test starts its servers and tools before it opens any; they
// wait until they are told to begin.
func (m *mounted) holdsNothing(t *testing.T) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, fd := range fds {
		if name, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(name, m.dir+"/") {
			t.Fatalf("%s is open while a process is started", name)
		}
	}
}

// spawn starts a server process for m, which does nothing yet.
func spawn(t *testing.T, m *mounted, c serverConfig, env ...string) *remote {
	t.Helper()
	m.holdsNothing(t)
	arg, err := json.Marshal(c)
	must(t, err)
	ready, readyW, err := os.Pipe()
	must(t, err)
	startR, start, err := os.Pipe()
	must(t, err)
	dev, err := unix.FcntlInt(uintptr(m.fd), unix.F_DUPFD_CLOEXEC, 3)
	must(t, err)
	devFile := os.NewFile(uintptr(dev), "/dev/fuse")
	v := &remote{mounted: m, config: c, start: start, ready: ready, stderr: &lines{}}
	v.cmd = exec.Command("/proc/self/exe", string(arg))
	// Without the last one a server under the race detector takes a second to
	// end.
	v.cmd.Env = append(append(os.Environ(), env...), roleVar+"="+roleServe, "GORACE=atexit_sleep_ms=0")
	v.cmd.Stdin, v.cmd.Stderr = startR, v.stderr
	v.cmd.ExtraFiles = []*os.File{devFile, readyW}
	err = v.cmd.Start()
	for _, f := range []*os.File{devFile, readyW, startR} {
		f.Close()
	}
	must(t, err)
	t.Cleanup(func() {
		if v.cmd.ProcessState == nil {
			v.cmd.Process.Kill()
			v.cmd.Wait()
		}
		v.start.Close()
		v.ready.Close()
	})
	return v
}

// serve lets the server begin and waits until it serves.
func (v *remote) serve(t *testing.T) {
	t.Helper()
	must(t, v.start.Close())
	if _, err := io.ReadFull(v.ready, make([]byte, 1)); err != nil {
		t.Fatalf("the server did not start: %v, %v\n%s", err, v.cmd.Wait(), v.stderr)
	}
}

// endsWell waits for the server, which ends with the connection.
func (v *remote) endsWell(t *testing.T) {
	t.Helper()
	v.unmount()
	v.closeFD()
	if err := v.cmd.Wait(); err != nil {
		t.Errorf("the server ended with %v", err)
	}
	if s := v.stderr.String(); s != "" {
		t.Errorf("the server said:\n%s", s)
	}
}

// serveRemote mounts a view and serves it from another process, which ends with
// the mount and must end well.
func serveRemote(t *testing.T, level TraceLevel, env ...string) *remote {
	t.Helper()
	m := mount(t)
	dir := t.TempDir()
	v := spawn(t, m, serverConfig{Dir: filepath.Join(dir, "upper"), Inos: filepath.Join(dir, "inos"), Level: level.String()}, env...)
	v.serve(t)
	m.closeFD() // so that the connection ends with the server
	t.Cleanup(func() { v.endsWell(t) })
	return v
}

// kill ends the server as a crash would.
func (v *remote) kill(t *testing.T) {
	t.Helper()
	must(t, v.cmd.Process.Kill())
	v.cmd.Wait()
}

// serveMain is the server process: it begins when its standard input ends;
// descriptor 3 is the mounted /dev/fuse, 4 is where it says that it serves.
func serveMain() {
	if err := serveProcess(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serveProcess() error {
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	var c serverConfig
	if err := json.Unmarshal([]byte(os.Args[1]), &c); err != nil {
		return err
	}
	level, err := ParseTraceLevel(c.Level)
	if err != nil {
		return err
	}
	alloc, err := allocator(c.Inos)
	if err != nil {
		return err
	}
	fs, err := overlay.Open(overlay.Options{Dir: c.Dir, Lower: sampleLower(), NewIno: alloc, KeepOrphans: true})
	if err != nil {
		return err
	}
	o := Options{FS: fs, FD: 3, Level: level, Op: func(pid uint32) tree.Op { return tree.Op(pid) }}
	if c.State != "" {
		if o.Resume, err = os.ReadFile(c.State); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	s, err := serve(o, func(v *view) fuse.RawFileSystem {
		if c.DieIn == "" {
			return v
		}
		return &dying{view: v, in: c.DieIn, after: c.DieWhen == "after"}
	})
	if err != nil {
		return err
	}
	unix.Close(3)
	if c.State != "" {
		if err := os.WriteFile(c.State, s.InitState(), 0o600); err != nil {
			return err
		}
	}
	if _, err := os.NewFile(4, "ready").Write([]byte{1}); err != nil {
		return err
	}
	return errors.Join(s.Close(), fs.Close())
}

// toolMain does what a test wants done in a process that serves nothing, once
// its standard input has ended.
func toolMain() {
	io.Copy(io.Discard, os.Stdin)
	if err := tools[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// tool is a command that runs one of tools as a process of its own.
func tool(t *testing.T, m *mounted, name string, args ...string) *exec.Cmd {
	t.Helper()
	m.holdsNothing(t)
	cmd := exec.Command("/proc/self/exe", append([]string{name}, args...)...)
	cmd.Env = append(os.Environ(), roleVar+"="+roleTool)
	cmd.Stderr = os.Stderr
	return cmd
}

var tools = map[string]func(args []string) error{
	// mmap-write FILE TEXT: writes through a shared mapping.
	"mmap-write": func(args []string) error {
		fd, err := unix.Open(args[0], unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		m, err := unix.Mmap(fd, 0, len(args[1]), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		copy(m, args[1])
		return errors.Join(unix.Munmap(m), unix.Close(fd))
	},
	// write-as ID FILE TEXT: opens the file, becomes an ordinary user, writes.
	"write-as": func(args []string) error {
		fd, err := unix.Open(args[1], unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		id, err := strconv.Atoi(args[0])
		if err == nil {
			err = syscall.Setgroups(nil)
		}
		if err == nil {
			err = syscall.Setresgid(id, id, id)
		}
		if err == nil {
			err = syscall.Setresuid(id, id, id)
		}
		if err == nil {
			_, err = unix.Write(fd, []byte(args[2]))
		}
		return errors.Join(err, unix.Close(fd))
	},
	// append FILE TEXT: writes at the end.
	"append": func(args []string) error {
		fd, err := unix.Open(args[0], unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		_, err = unix.Write(fd, []byte(args[1]))
		return errors.Join(err, unix.Close(fd))
	},
}
