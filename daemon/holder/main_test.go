package holder

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test binary plays parts besides its own: the holder and stub of a build
// that embeds none, programs inside a session, and a daemon that gets killed.
const (
	hostileName = "hostile"
	execerName  = "execer"
	daemonName  = "daemon"
)

func TestMain(m *testing.M) {
	MaybeRun()
	switch os.Args[0] {
	case hostileName:
		hostile(os.Stdout)
		return
	case execerName:
		execer(os.Args[1])
		return
	case daemonName:
		doomedDaemon()
		return
	}
	// Holders of a killed daemon are reaped by whoever adopts them.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// deadline bounds every wait of a test; it decides nothing.
const deadline = 60 * time.Second

func patience(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	t.Cleanup(cancel)
	return ctx
}

// begin starts a session without a view and ends it with the test.
func begin(t *testing.T, c Config) *Holder {
	t.Helper()
	if c.Session == "" {
		c.Session = "test"
	}
	if c.Workspace == "" {
		c.Workspace = "/home/someone/project"
	}
	c.NoView = true
	h, err := Start(patience(t), c)
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

// result is what a command left.
type result struct {
	Exit
	stdout, stderr string
}

// spawn starts c with its output into files; the function it returns waits for
// the command and reads them.
func spawn(t *testing.T, h *Holder, c Command) (pid int, wait func() result) {
	t.Helper()
	c.Stdout, c.Stderr = scratch(t, ""), scratch(t, "")
	if c.Env == nil {
		c.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + h.Home()}
	}
	pid, err := h.Exec(c)
	if err != nil {
		t.Fatal(err)
	}
	return pid, func() result {
		t.Helper()
		exit, err := h.Wait(patience(t), c.ID)
		if err != nil {
			t.Fatal(err)
		}
		return result{exit, content(t, c.Stdout), content(t, c.Stderr)}
	}
}

// scratch is a file that has no name any more, open at its start, as the daemon
// opens those of a command.
func scratch(t *testing.T, text string) *os.File {
	t.Helper()
	name := filepath.Join(os.TempDir(), "holder-test-"+rand.Text())
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	_, err = f.WriteString(text)
	if err = errors.Join(err, os.Remove(name)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	return f
}

// content is all that a file holds.
func content(t *testing.T, f *os.File) string {
	t.Helper()
	all, err := io.ReadAll(io.NewSectionReader(f, 0, math.MaxInt64))
	if err != nil {
		t.Fatal(err)
	}
	return string(all)
}

func shell(script string) []string { return []string{"/bin/sh", "-c", script} }

// sh runs a script until nothing of it is left.
func sh(t *testing.T, h *Holder, script string) result {
	t.Helper()
	id := "sh-" + rand.Text()
	_, wait := spawn(t, h, Command{ID: id, Argv: shell(script)})
	r := wait()
	if err := errors.Join(h.WaitTree(patience(t), id), h.Ack(id)); err != nil {
		t.Fatal(err)
	}
	return r
}

// expect runs a script that must succeed and print want.
func expect(t *testing.T, h *Holder, script, want string) {
	t.Helper()
	r := sh(t, h, script)
	if r.Code != 0 || strings.TrimSpace(r.stdout) != want {
		t.Errorf("%s: got %q, %q, exit %+v; want %q", script, r.stdout, r.stderr, r.Exit, want)
	}
}

// environments runs a test under every id map that can be had here: as root,
// in this process; as ordinary users, in a copy of the test binary.
func environments(t *testing.T, test func(t *testing.T)) {
	t.Run("here", test)
	if os.Geteuid() != 0 {
		return
	}
	root := t.Name()
	t.Run("subuid", func(t *testing.T) { asUser(t, makeUser(t), root) })
	t.Run("single", func(t *testing.T) { asUser(t, account{uid: 47011, gid: 47011}, root) })
}

type account struct{ uid, gid uint32 }

// makeUser adds an ordinary user with subordinate ids for the time of a test.
func makeUser(t *testing.T) account {
	t.Helper()
	name := "ephemeral" + strconv.Itoa(os.Getpid())
	if out, err := exec.Command("useradd", "--no-create-home", "--shell", "/bin/sh", name).CombinedOutput(); err != nil {
		t.Fatalf("useradd: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("userdel", name).CombinedOutput(); err != nil {
			t.Errorf("userdel: %v: %s", err, out)
		}
	})
	id := func(flag string) uint32 {
		out, err := exec.Command("id", flag, name).Output()
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.ParseUint(strings.TrimSpace(string(out)), 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		return uint32(n)
	}
	return account{id("-u"), id("-g")}
}

// openFuseToAll lets everybody open /dev/fuse for the time of a test.
func openFuseToAll(t *testing.T) {
	t.Helper()
	st, err := os.Stat("/dev/fuse")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod("/dev/fuse", 0o666); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Chmod("/dev/fuse", st.Mode().Perm()); err != nil {
			t.Error(err)
		}
	})
}

// asUser runs one of this binary's tests as an ordinary user.
func asUser(t *testing.T, who account, test string) {
	t.Helper()
	openFuseToAll(t)
	dir, err := os.MkdirTemp("", "holder-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary := filepath.Join(dir, "holder.test")
	copyFile(t, "/proc/self/exe", binary)
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chown(dir, int(who.uid), int(who.gid))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*deadline)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, "-test.run=^"+test+"$", "-test.v=true", "-test.count=1")
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: who.uid, Gid: who.gid}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+test) {
		t.Fatalf("as uid %d: %v\n%s", who.uid, err, out)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, data, 0o755); err != nil {
		t.Fatal(err)
	}
}

// hostile tries, from inside a session, what a session must not be able to do,
// and prints how each attempt went.
func hostile(out io.Writer) {
	report := func(what string, err error) {
		if err == nil {
			err = errors.New("SUCCEEDED")
		}
		fmt.Fprintf(out, "%s: %v\n", what, err)
	}
	open := func(path string, flags int) error {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
	if init, err := unix.PidfdOpen(1, 0); err != nil {
		report("open a pidfd of the holder", err)
	} else {
		for fd := range 16 {
			if _, err := unix.PidfdGetfd(init, fd, 0); !errors.Is(err, unix.EPERM) {
				report("take the holder's descriptor", err)
			}
		}
	}
	report("open the holder's memory", open("/proc/1/mem", unix.O_RDWR))
	report("read the holder's environment", open("/proc/1/environ", unix.O_RDONLY))
	report("open the holder's program", open("/proc/1/exe", unix.O_RDONLY))
	report("trace the holder", unix.PtraceSeize(1))
	report("unmount /proc", unix.Unmount("/proc", unix.MNT_DETACH))
	report("unmount the workspace", unix.Unmount(os.Args[1], unix.MNT_DETACH))
	report("mount a tmpfs", unix.Mount("x", "/tmp", "tmpfs", 0, ""))
	report("remount the root", unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, ""))
	report("make a user namespace", unix.Unshare(unix.CLONE_NEWUSER))
	report("make a mount namespace", unix.Unshare(unix.CLONE_NEWNS))
	report("make a device", unix.Mknod("/tmp/device", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 1))))
	report("change the root", unix.Chroot("/tmp"))
	report("give itself a capability", unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, unix.CAP_SYS_ADMIN, 0, 0))
	report("write a sysctl", open("/proc/sys/kernel/core_pattern", unix.O_WRONLY))
	report("trigger a sysrq", open("/proc/sysrq-trigger", unix.O_WRONLY))
	for what, family := range map[string]int{"vsock": unix.AF_VSOCK, "alg": unix.AF_ALG, "packet": unix.AF_PACKET} {
		fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
		}
		report("open a socket of family "+what, err)
	}
	for what, nr := range map[string]uintptr{
		"io_uring_setup": unix.SYS_IO_URING_SETUP, "userfaultfd": unix.SYS_USERFAULTFD, "bpf": unix.SYS_BPF,
		"keyctl": unix.SYS_KEYCTL, "open_by_handle_at": unix.SYS_OPEN_BY_HANDLE_AT,
	} {
		_, _, errno := unix.Syscall(nr, 0, 0, 0)
		if errno != unix.EPERM && errno != unix.ENOSYS {
			report("get past the filter of "+what, nil)
		}
	}
	b := byte('x')
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, 0, unix.TIOCSTI, uintptr(b))
	report("type for another", errno)
	r := unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
	report("raise the process limit", unix.Setrlimit(unix.RLIMIT_NPROC, &r))
}
