package holder

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNamespacesArePrivate(t *testing.T) {
	environments(t, func(t *testing.T) {
		for _, network := range []string{"none", "shared"} {
			h := begin(t, Config{Network: network})
			for _, ns := range []string{"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"} {
				outside, err := os.Readlink("/proc/self/ns/" + ns)
				if err != nil {
					t.Fatal(err)
				}
				inside := strings.TrimSpace(sh(t, h, "readlink /proc/self/ns/"+ns).stdout)
				if shared := ns == "net" && network == "shared"; (inside == outside) != shared || inside == "" {
					t.Errorf("network %s: %s namespace is %s inside, %s outside", network, ns, inside, outside)
				}
			}
			expect(t, h, "id -u; id -g; hostname; umask", "0\n0\nsandbox\n0022")
			expect(t, h, "grep -E '^(CapPrm|CapEff|CapBnd|CapAmb|CapInh|NoNewPrivs)' /proc/self/status | tr -d '0 \t\n'",
				"CapInh:CapPrm:CapEff:CapBnd:CapAmb:NoNewPrivs:1")
			if network == "none" {
				expect(t, h, "cat /sys/class/net/lo/flags; ls /sys/class/net", "0x9\nlo")
			}
			if mapping, shown := h.IDs(); mapping == mapSingle && shown(7) != 0 || mapping != mapSingle && shown(7) != 7 {
				t.Errorf("map %s shows id 7 as %d", mapping, shown(7))
			}
		}
	})
}

func TestRootTree(t *testing.T) {
	environments(t, func(t *testing.T) {
		h := begin(t, Config{})
		for _, dir := range []string{"/", "/etc", "/usr", "/usr/bin", "/dev", "/proc/sys/kernel", "/sys", "/home"} {
			if r := sh(t, h, "touch "+dir+"/x"); r.Code == 0 {
				t.Errorf("%s is writable", dir)
			}
		}
		for _, dir := range []string{"/tmp", "/run", "/var", "/var/tmp", "/dev/shm", "/root", h.Home(), "/home/someone/project"} {
			expect(t, h, "cd "+dir+" && echo text >x && cat x && rm x", "text")
		}
		expect(t, h, "echo $HOME; cd; pwd", "/home/agent\n/home/agent")
		// One proc, the masks upon it, and no mount that another could bring to light.
		expect(t, h, `awk '$3 == "proc" && $2 !~ "^/proc/" {print $2}' /proc/mounts`, "/proc")
		expect(t, h, `cut -d' ' -f2 /proc/mounts | sort | uniq -d`, "")
		expect(t, h, "set -- /proc/[0-9]*; echo $#", "3") // holder, stub, sh
		expect(t, h, "wc -c </proc/keys; wc -c </proc/timer_list", "0\n0")
		expect(t, h, "head -c 3 /dev/zero | od -An -c | tr -d ' '; echo lost >/dev/null; test -c /dev/ptmx && echo pty", `\0\0\0`+"\npty")
		expect(t, h, "ls /run /mnt 2>/dev/null | grep -v lock; echo end", "/run:\nend")
	})
}

func TestWorkspaceAnywhere(t *testing.T) {
	workspaces := []string{
		"/tmp/a/b", "/tmp", "/home/agent", "/home/agent/deep", "/home", "/root/p", "/srv/p", "/var/lib/p",
		"/usr/share/man", "/opt", "/etc", "/a",
	}
	for _, ws := range workspaces {
		if _, err := os.Stat(ws); err != nil && (within(ws, "/usr") || within(ws, "/opt")) {
			continue // this host has no such directory that the view could cover
		}
		h := begin(t, Config{Workspace: ws})
		r := sh(t, h, "pwd -P; echo text >file && cat file; echo home >$HOME/h && cat $HOME/h; grep ' "+ws+" ' /proc/mounts | tail -1 | cut -d' ' -f1")
		if want := ws + "\ntext\nhome\nsandbox-no-view\n"; r.stdout != want {
			t.Errorf("workspace %s: got %q, %q; want %q", ws, r.stdout, r.stderr, want)
		}
		if err := h.Syncfs(patience(t)); err != nil {
			t.Errorf("workspace %s: %v", ws, err)
		}
	}
}

func TestHostPaths(t *testing.T) {
	dir := t.TempDir() // beneath /tmp, which sessions have of their own
	secret := filepath.Join(dir, "closed", "sdk")
	for _, err := range []error{
		os.MkdirAll(secret, 0o755), os.Chmod(filepath.Join(dir, "closed"), 0o700),
		os.WriteFile(filepath.Join(secret, "tool"), []byte("tool"), 0o644),
		os.WriteFile(filepath.Join(dir, "file"), []byte("one file"), 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	h := begin(t, Config{HostPaths: []string{secret, filepath.Join(dir, "file"), "/usr/share"}})
	expect(t, h, "cat "+secret+"/tool; echo; cat "+dir+"/file; ls "+dir, "tool\none fileclosed\nfile")
	if r := sh(t, h, "echo x >"+secret+"/tool || echo x >"+dir+"/file || touch "+secret+"/new"); r.Code == 0 {
		t.Error("a host path is writable")
	}
	if _, err := Start(t.Context(), Config{Session: "s", Workspace: "/w", HostPaths: []string{dir + "/none"}}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an absent host path: %v", err)
	}
}

func TestNothingReachesTheHost(t *testing.T) {
	before, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	h := begin(t, Config{Workspace: "/usr/share/man"})
	expect(t, h, "touch x; echo $?", "0")
	during, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, during) {
		t.Errorf("the session's mounts reached the host:\n%s", during)
	}
}

func TestConfigIsChecked(t *testing.T) {
	good := Config{Session: "s", Workspace: "/w"}
	for name, break_ := range map[string]func(*Config){
		"session":           func(c *Config) { c.Session = "a b" },
		"relative":          func(c *Config) { c.Workspace = "w" },
		"unclean":           func(c *Config) { c.Workspace = "/w/../x" },
		"root":              func(c *Config) { c.Workspace = "/" },
		"proc":              func(c *Config) { c.Workspace = "/proc/x" },
		"network":           func(c *Config) { c.Network = "some" },
		"home in view":      func(c *Config) { c.Home = "/w/home" },
		"host path in view": func(c *Config) { c.HostPaths = []string{"/w/x"} },
		"host path private": func(c *Config) { c.HostPaths = []string{"/tmp"} },
		"host path on home": func(c *Config) { c.HostPaths = []string{"/home"} },
	} {
		c := good
		break_(&c)
		if err := c.withDefaults().validate(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := good.withDefaults().validate(); err != nil {
		t.Error(err)
	}
}

func TestExits(t *testing.T) {
	environments(t, func(t *testing.T) {
		h := begin(t, Config{})
		for _, test := range []struct {
			script string
			code   int
			signal string
		}{
			{"exit 0", 0, ""},
			{"exit 7", 7, ""},
			{"exit 255", 255, ""},
			{"kill -9 $$", -1, "SIGKILL"},
			{"kill -TERM $$", -1, "SIGTERM"},
			{"kill -SEGV $$", -1, "SIGSEGV"},
			{"kill -RTMIN $$", -1, "SIG34"},
		} {
			if r := sh(t, h, test.script); r.Code != test.code || r.Signal != test.signal || r.Lost {
				t.Errorf("%s: %+v", test.script, r.Exit)
			}
		}
		r := sh(t, h, "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
		if r.UserTime+r.SysTime <= 0 || r.MaxRSS < 1<<16 {
			t.Errorf("usage of a busy loop: %+v", r.Exit)
		}
	})
}

func TestStartsThatFail(t *testing.T) {
	h := begin(t, Config{})
	expect(t, h, "printf 'echo script $1' >/tmp/no-first-line; chmod 755 /tmp/no-first-line; echo plain >/tmp/plain; printf '#!/none\n' >/tmp/bad; chmod 755 /tmp/bad", "")
	for _, test := range []struct {
		name string
		c    Command
		want error
		text string
	}{
		{"no program", Command{Argv: []string{"no-such-program"}}, unix.ENOENT, "find the program no-such-program"},
		{"no path", Command{Argv: []string{"/no/such"}}, unix.ENOENT, "execute /no/such"},
		{"no interpreter", Command{Argv: []string{"/tmp/bad"}}, unix.ENOENT, "execute /tmp/bad"},
		{"no directory", Command{Argv: []string{"true"}, Dir: "/none"}, unix.ENOENT, "enter the directory /none"},
		{"not executable", Command{Argv: []string{"/tmp/plain"}}, unix.EACCES, "execute /tmp/plain"},
		{"not executable in PATH", Command{Argv: []string{"plain"}, Env: []string{"PATH=/tmp"}}, unix.EACCES, "find the program plain"},
		{"raising a limit", Command{Argv: []string{"true"}, Rlimits: []Rlimit{{unix.RLIMIT_NPROC, 1 << 40, 1 << 41}, {unix.RLIMIT_NPROC, 9, 3}}}, unix.EINVAL, "limit"},
		{"relative directory", Command{Argv: []string{"true"}, Dir: "tmp"}, nil, "absolute"},
		{"no argv", Command{}, nil, "empty"},
		{"NUL", Command{Argv: []string{"a\x00b"}}, nil, "NUL"},
	} {
		test.c.ID = "fails"
		_, err := h.Exec(test.c)
		if err == nil || test.want != nil && !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%s: %v", test.name, err)
		}
		if _, err := h.Wait(t.Context(), "fails"); !errors.Is(err, ErrNoCommand) {
			t.Errorf("%s: something was left: %v", test.name, err)
		}
	}
	// An empty element of PATH is the command's directory.
	_, wait := spawn(t, h, Command{ID: "script", Argv: []string{"no-first-line", "one"}, Dir: "/tmp", Env: []string{"PATH=/bin:"}})
	if r := wait(); r.stdout != "script one\n" {
		t.Errorf("a script without a first line: %+v", r)
	}
	if _, err := h.Exec(Command{ID: "script", Argv: []string{"true"}}); !errors.Is(err, ErrExist) {
		t.Errorf("an id twice: %v", err)
	}
	if err := h.Ack("script"); err != nil {
		t.Error(err)
	}
	if err := h.Kill("other", unix.SIGTERM); !errors.Is(err, ErrNoCommand) {
		t.Errorf("kill of an unknown command: %v", err)
	}
}

func TestStreams(t *testing.T) {
	environments(t, func(t *testing.T) {
		h := begin(t, Config{})
		data := make([]byte, 8<<20)
		rand.Read(data)
		dir := t.TempDir()
		open := func(name string, content []byte) *os.File {
			t.Helper()
			path := filepath.Join(dir, name)
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { f.Close() })
			return f
		}
		in, out, errs := open("in", data), open("out", nil), open("err", nil)
		c := Command{ID: "copy", Argv: shell("cat; echo aside >&2"), Env: []string{"PATH=/usr/bin:/bin"}, Stdin: in, Stdout: out, Stderr: errs}
		if _, err := h.Exec(c); err != nil {
			t.Fatal(err)
		}
		if exit, err := h.Wait(patience(t), "copy"); err != nil || exit.Code != 0 {
			t.Fatal(exit, err)
		}
		got, err := os.ReadFile(out.Name())
		if err != nil || sha256.Sum256(got) != sha256.Sum256(data) {
			t.Errorf("%d bytes of %d came out, or others: %v", len(got), len(data), err)
		}
		if text, err := os.ReadFile(errs.Name()); err != nil || string(text) != "aside\n" {
			t.Errorf("stderr: %q, %v", text, err)
		}

		big := strings.Repeat("a", 64<<10)
		args := []string{"/bin/sh", "-c", `printf %s "$1$2$BIG" | wc -c`, "sh", big, big}
		_, wait := spawn(t, h, Command{ID: "big", Argv: args, Env: []string{"PATH=/usr/bin:/bin", "BIG=" + big}})
		if r := wait(); strings.TrimSpace(r.stdout) != strconv.Itoa(3*64<<10) {
			t.Errorf("big arguments: %+v", r)
		}
		args = append([]string{"/bin/sh", "-c", `echo $#`, "sh"}, slices.Repeat([]string{strings.Repeat("b", 100)}, 10000)...)
		_, wait = spawn(t, h, Command{ID: "many", Argv: args})
		if r := wait(); strings.TrimSpace(r.stdout) != "10000" {
			t.Errorf("many arguments: %+v", r)
		}
		// A pipe is the command's own; its reader does not wait for the stub.
		reader, writer, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer reader.Close()
		c = Command{ID: "lingers", Argv: shell("sleep 1000 >/dev/null 2>&1 & echo done"), Env: plainEnv, Stdout: writer}
		_, err = h.Exec(c)
		if err = errors.Join(err, writer.Close()); err != nil {
			t.Fatal(err)
		}
		if text, err := io.ReadAll(reader); err != nil || string(text) != "done\n" {
			t.Errorf("a lingering child: %q, %v", text, err)
		}
	})
}

func TestManyAtOnce(t *testing.T) {
	h := begin(t, Config{})
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			id := "n" + strconv.Itoa(i)
			_, wait := spawn(t, h, Command{ID: id, Argv: shell(fmt.Sprintf("echo %d; exit %d", i, i))})
			if r := wait(); r.Code != i || r.stdout != strconv.Itoa(i)+"\n" {
				t.Errorf("command %d: %+v", i, r)
			}
			if err := errors.Join(h.WaitTree(patience(t), id), h.Ack(id)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if left := h.Commands(); len(left) != 0 {
		t.Errorf("acknowledged commands are remembered: %v", left)
	}
	expect(t, h, "set -- /proc/[0-9]*; echo $#", "3")
}

func TestLimits(t *testing.T) {
	h := begin(t, Config{})
	_, wait := spawn(t, h, Command{ID: "limits", Argv: shell("ulimit -n; ulimit -Hn; ulimit -u; ulimit -c"), Rlimits: []Rlimit{
		{unix.RLIMIT_NOFILE, 100, 200}, {unix.RLIMIT_CORE, 0, 0},
	}})
	if r := wait(); r.stdout != "100\n200\n4096\n0\n" && !strings.Contains(r.stderr, "-u") {
		t.Errorf("limits: %+v", r)
	}
}

func TestHostileProgram(t *testing.T) {
	environments(t, func(t *testing.T) {
		dir := t.TempDir()
		copyFile(t, "/proc/self/exe", filepath.Join(dir, "program"))
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		h := begin(t, Config{HostPaths: []string{dir}})
		_, wait := spawn(t, h, Command{ID: "hostile", Argv: shell(`exec -a hostile ` + dir + `/program /home/someone/project`)})
		if r := wait(); r.Code == 0 {
			check(t, r.stdout)
			return
		}
		// A shell without exec -a: name it by a link.
		if err := os.Symlink("program", filepath.Join(dir, hostileName)); err != nil {
			t.Fatal(err)
		}
		_, wait = spawn(t, h, Command{ID: "again", Argv: []string{hostileName, "/home/someone/project"}, Env: []string{"PATH=" + dir}})
		check(t, wait().stdout)
	})
}

func check(t *testing.T, report string) {
	t.Helper()
	if strings.Count(report, "\n") < 15 || strings.Contains(report, "SUCCEEDED") {
		t.Errorf("from inside:\n%s", report)
	}
}
