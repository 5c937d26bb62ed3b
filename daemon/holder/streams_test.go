package holder

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var plainEnv = []string{"PATH=/usr/bin:/bin"}

func TestStreamsCanBeReopened(t *testing.T) {
	environments(t, func(t *testing.T) {
		h := begin(t, Config{})
		const script = `echo a >/dev/stdout; echo b >>/proc/self/fd/1; echo c | tee /dev/stderr; echo d >/dev/fd/2
			printf 'nul\000bad\377\376end\n'; head -n 1 /dev/stdin; cat <&0 >>/dev/stdout`
		_, wait := spawn(t, h, Command{ID: "files", Argv: shell(script), Stdin: scratch(t, "in\x00put\n")})
		if r := wait(); r.Code != 0 || r.stdout != "a\nb\nc\nnul\x00bad\xff\xfeend\nin\x00put\n" || r.stderr != "c\nd\n" {
			t.Errorf("%+v", r)
		}
		c := Command{ID: "null", Env: plainEnv, Argv: shell("cat /dev/stdin && echo x >/dev/stdout && echo x >>/dev/stderr")}
		if _, err := h.Exec(c); err != nil {
			t.Fatal(err)
		}
		if exit, err := h.Wait(patience(t), "null"); err != nil || exit.Code != 0 {
			t.Error(exit, err)
		}
	})
}

func TestFilesAreOutOfReach(t *testing.T) {
	h := begin(t, Config{})
	const script = `echo kept; truncate -s 0 /dev/stdout; : >/dev/stdout
		for fd in /proc/$$/fd/*; do readlink $fd; done | grep -v ^pipe: ; echo end`
	_, wait := spawn(t, h, Command{ID: "c", Argv: shell(script), Stdin: scratch(t, "")})
	if r := wait(); r.stdout != "kept\nend\n" {
		t.Errorf("%+v", r)
	}
}

func TestInputFromTheFilesOffset(t *testing.T) {
	h := begin(t, Config{})
	in := scratch(t, "skipped"+strings.Repeat("x", 1<<20))
	if _, err := in.Seek(7, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	_, wait := spawn(t, h, Command{ID: "counts", Argv: shell("wc -c"), Stdin: in})
	if r := wait(); strings.TrimSpace(r.stdout) != strconv.Itoa(1<<20) {
		t.Errorf("%+v", r)
	}
	_, wait = spawn(t, h, Command{ID: "ignores", Argv: shell("exit 3"), Stdin: in})
	if r := wait(); r.Code != 3 || r.StreamErr != 0 {
		t.Errorf("input that nobody reads: %+v", r)
	}
	if err := h.WaitTree(patience(t), "ignores"); err != nil {
		t.Error(err)
	}
}

func TestMuchOutput(t *testing.T) {
	h := begin(t, Config{})
	const size = 200 << 20
	out, sum := scratch(t, ""), scratch(t, "")
	script := `exec 3>&1; head -c ` + strconv.Itoa(size) + ` /dev/urandom | tee /dev/fd/3 | sha256sum >&2`
	if _, err := h.Exec(Command{ID: "much", Argv: shell(script), Env: plainEnv, Stdout: out, Stderr: sum}); err != nil {
		t.Fatal(err)
	}
	if exit, err := h.Wait(patience(t), "much"); err != nil || exit.Code != 0 || exit.StdoutDropped != 0 {
		t.Fatal(exit, err)
	}
	digest := sha256.New()
	n, err := io.Copy(digest, io.NewSectionReader(out, 0, math.MaxInt64))
	if want := hex.EncodeToString(digest.Sum(nil)); err != nil || n != size || !strings.HasPrefix(content(t, sum), want) {
		t.Errorf("%d bytes came, or others: %v", n, err)
	}
}

func TestOutputLimit(t *testing.T) {
	h := begin(t, Config{})
	run := func(id, script string, limit int64) result {
		t.Helper()
		_, wait := spawn(t, h, Command{ID: id, Argv: shell(script), OutputBytes: limit})
		return wait()
	}
	r := run("beyond", "printf start; head -c 1000000 /dev/zero; printf errors >&2", 100000)
	if r.Code != 0 || len(r.stdout) != 100000 || !strings.HasPrefix(r.stdout, "start\x00") || r.StdoutDropped != 900005 ||
		r.stderr != "errors" || r.StderrDropped != 0 || r.StreamErr != 0 {
		t.Errorf("%d bytes of output, %q, %+v", len(r.stdout), r.stderr, r.Exit)
	}
	if r := run("exact", "printf 12345; printf 123456 >&2", 5); r.stdout != "12345" || r.StdoutDropped != 0 || r.stderr != "12345" || r.StderrDropped != 1 {
		t.Errorf("%+v", r)
	}
	// Somebody who never stops holds up neither the exit nor the kill.
	if r := run("endless", "yes & exit 4", 1000); r.Code != 4 || len(r.stdout) > 1000 {
		t.Errorf("%d bytes of output, %+v", len(r.stdout), r.Exit)
	}
	if err := errors.Join(h.Kill("endless", unix.SIGKILL), h.WaitTree(patience(t), "endless")); err != nil {
		t.Error(err)
	}
	if _, err := h.Exec(Command{ID: "negative", Argv: []string{"true"}, OutputBytes: -1}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a negative limit: %v", err)
	}
}

func TestFullDisk(t *testing.T) {
	full := func(t *testing.T) (*os.File, unix.Errno) {
		if os.Geteuid() != 0 { // no file system of its own: a file that must not grow
			fd, err := unix.MemfdCreate("full", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW); err != nil {
				t.Fatal(err)
			}
			return os.NewFile(uintptr(fd), "full"), unix.EPERM
		}
		fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fsfd)
		if err := errors.Join(unix.FsconfigSetString(fsfd, "size", "64k"), unix.FsconfigCreate(fsfd)); err != nil {
			t.Fatal(err)
		}
		dir, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(dir)
		fd, err := unix.Openat(dir, "out", unix.O_RDWR|unix.O_CREAT|unix.O_APPEND|unix.O_CLOEXEC, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		return os.NewFile(uintptr(fd), "full"), unix.ENOSPC
	}
	environments(t, func(t *testing.T) {
		h := begin(t, Config{})
		out, want := full(t)
		t.Cleanup(func() { out.Close() })
		c := Command{ID: "c", Argv: shell("head -c 1000000 /dev/zero; exit 6"), Env: plainEnv, Stdout: out}
		if _, err := h.Exec(c); err != nil {
			t.Fatal(err)
		}
		exit, err := h.Wait(patience(t), "c")
		if kept := int64(len(content(t, out))); err != nil || exit.Code != 6 || exit.StreamErr != want || kept+exit.StdoutDropped != 1000000 || kept > 64<<10 {
			t.Errorf("%d bytes are kept: %+v, %v", kept, exit, err)
		}
	})
}

func TestOutputAfterTheEnd(t *testing.T) {
	environments(t, func(t *testing.T) {
		h := begin(t, Config{})
		expect(t, h, "mkfifo /tmp/go", "")
		out := scratch(t, "")
		c := Command{ID: "first", Env: plainEnv, Stdout: out, Argv: shell("setsid sh -c 'read go </tmp/go; echo late; echo later >/dev/stdout' & echo early")}
		if _, err := h.Exec(c); err != nil {
			t.Fatal(err)
		}
		if exit, err := h.Wait(patience(t), "first"); err != nil || exit.Code != 0 || content(t, out) != "early\n" {
			t.Fatal(exit, err, content(t, out))
		}
		expect(t, h, "echo go >/tmp/go", "")
		if err := h.WaitTree(patience(t), "first"); err != nil {
			t.Fatal(err)
		}
		if got := content(t, out); got != "early\nlate\nlater\n" {
			t.Errorf("got %q", got)
		}
	})
}
