package fusefs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"ephemeral-sandbox/fs/overlay"
)

// dying is a view whose server is killed in one of its methods, before or after
// the method has done its work: the request was taken and is never answered.
type dying struct {
	*view
	in    string
	after bool
}

func (d *dying) run(method string, do func() fuse.Status) fuse.Status {
	if d.in != method {
		return do()
	}
	if d.after {
		do()
	}
	unix.Kill(unix.Getpid(), unix.SIGKILL)
	select {}
}

func (d *dying) Mkdir(c <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	return d.run("Mkdir", func() fuse.Status { return d.view.Mkdir(c, in, name, out) })
}

func (d *dying) Mknod(c <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	return d.run("Mknod", func() fuse.Status { return d.view.Mknod(c, in, name, out) })
}

func (d *dying) Create(c <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	return d.run("Create", func() fuse.Status { return d.view.Create(c, in, name, out) })
}

func (d *dying) Symlink(c <-chan struct{}, h *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	return d.run("Symlink", func() fuse.Status { return d.view.Symlink(c, h, target, name, out) })
}

func (d *dying) Link(c <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	return d.run("Link", func() fuse.Status { return d.view.Link(c, in, name, out) })
}

func (d *dying) Unlink(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return d.run("Unlink", func() fuse.Status { return d.view.Unlink(c, h, name) })
}

func (d *dying) Rmdir(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return d.run("Rmdir", func() fuse.Status { return d.view.Rmdir(c, h, name) })
}

func (d *dying) Rename(c <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	return d.run("Rename", func() fuse.Status { return d.view.Rename(c, in, from, to) })
}

func (d *dying) SetXAttr(c <-chan struct{}, in *fuse.SetXAttrIn, name string, value []byte) fuse.Status {
	return d.run("SetXAttr", func() fuse.Status { return d.view.SetXAttr(c, in, name, value) })
}

func (d *dying) RemoveXAttr(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return d.run("RemoveXAttr", func() fuse.Status { return d.view.RemoveXAttr(c, h, name) })
}

func (d *dying) SetAttr(c <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	return d.run("SetAttr", func() fuse.Status { return d.view.SetAttr(c, in, out) })
}

func (d *dying) Open(c <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return d.run("Open", func() fuse.Status { return d.view.Open(c, in, out) })
}

func (d *dying) Write(c <-chan struct{}, in *fuse.WriteIn, data []byte) (n uint32, st fuse.Status) {
	st = d.run("Write", func() fuse.Status {
		n, st = d.view.Write(c, in, data)
		return st
	})
	return n, st
}

func (d *dying) Read(c <-chan struct{}, in *fuse.ReadIn, buf []byte) (r fuse.ReadResult, st fuse.Status) {
	st = d.run("Read", func() fuse.Status {
		r, st = d.view.Read(c, in, buf)
		return st
	})
	return r, st
}

// crashable mounts a view and spawns servers for it, to serve one after the
// other; edit may change the configuration of each. The first serves already.
func crashable(t *testing.T, servers int, edit func(i int, c *serverConfig)) []*remote {
	t.Helper()
	m := mount(t)
	dir := t.TempDir()
	out := make([]*remote, servers)
	for i := range out {
		c := serverConfig{Dir: filepath.Join(dir, "upper"), Inos: filepath.Join(dir, "inos"), Level: "open", State: filepath.Join(dir, "state")}
		if edit != nil {
			edit(i, &c)
		}
		out[i] = spawn(t, m, c)
	}
	out[0].serve(t)
	return out
}

// TestTakeOver kills a server under open files and starts another.
func TestTakeOver(t *testing.T) {
	servers := crashable(t, 2, nil)
	t.Cleanup(func() { servers[1].endsWell(t) }) // when all files are closed
	p := func(names ...string) string { return filepath.Join(append([]string{servers[0].dir}, names...)...) }
	open := func(path string, flags int) int {
		t.Helper()
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
		must(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	pread := func(fd, n int, off int64) string {
		t.Helper()
		b := make([]byte, n)
		n, err := unix.Pread(fd, b, off)
		must(t, err)
		return string(b[:n])
	}
	reading := open(p("lower", "big"), unix.O_RDONLY)
	pread(reading, 16, 0)
	log := open(p("log"), unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND)
	_, err := unix.Write(log, []byte("before\n"))
	must(t, err)
	unlinked := open(p("unlinked"), unix.O_CREAT|unix.O_RDWR)
	_, err = unix.Write(unlinked, []byte("no name"))
	must(t, err)
	must(t, unix.Unlink(p("unlinked")))
	later := open(p("later"), unix.O_CREAT|unix.O_RDWR)
	_, err = unix.Write(later, []byte("still named"))
	must(t, err)
	listing := open(p("lower", "sub"), unix.O_RDONLY|unix.O_DIRECTORY)
	first := make([]byte, 300)
	n, err := unix.Getdents(listing, first)
	must(t, err)
	_, _, names := unix.ParseDirent(first[:n], -1, nil)
	must(t, unix.Mkdir(p("gone"), 0o755))
	removed := open(p("gone"), unix.O_RDONLY|unix.O_DIRECTORY)
	must(t, unix.Rmdir(p("gone")))

	servers[0].kill(t)
	// While nobody serves, requests wait.
	waiting := make(chan error)
	go func() {
		var st unix.Stat_t
		waiting <- unix.Stat(p("lower", "link1"), &st)
	}()
	servers[1].serve(t)
	must(t, <-waiting)

	if got := pread(reading, 16, 1<<19); got != "0123456789abcdef" {
		t.Errorf("the open file reads %q", got)
	}
	_, err = unix.Write(log, []byte("after\n"))
	must(t, err)
	if got := readFile(t, p("log")); got != "before\nafter\n" {
		t.Errorf("the log reads %q", got)
	}
	if got := pread(unlinked, 20, 0); got != "no name" {
		t.Errorf("the unlinked file reads %q", got)
	}
	_, err = unix.Pwrite(unlinked, []byte("NO"), 0)
	must(t, err)
	if got := pread(unlinked, 20, 0); got != "NO name" {
		t.Errorf("the unlinked file reads %q after a write", got)
	}
	// A file that was open before loses its name only now.
	must(t, unix.Unlink(p("later")))
	_, err = unix.Pwrite(later, []byte("STILL"), 0)
	must(t, err)
	if got := pread(later, 20, 0); got != "STILL named" {
		t.Errorf("the file unlinked later reads %q", got)
	}
	for {
		n, err := unix.Getdents(listing, first)
		must(t, err)
		if n == 0 {
			break
		}
		_, _, names = unix.ParseDirent(first[:n], -1, names)
	}
	slices.Sort(names)
	if d := cmp.Diff(readNames(t, p("lower", "sub")), names); d != "" {
		t.Errorf("a listing begun before (-want +got):\n%s", d)
	}
	var st unix.Stat_t
	if err := unix.Fstat(removed, &st); err != nil || st.Nlink != 0 {
		t.Errorf("the removed directory: %v, %d links", err, st.Nlink)
	}
	fd := open(p("new"), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY)
	if st.Ino == uint64(statIno(t, p("new"))) {
		t.Error("an inode number came twice")
	}
	must(t, unix.Close(fd))
}

// TestUnansweredRequests kills the server in the middle of a request, before
// and after it took effect. The one who asked must not notice.
func TestUnansweredRequests(t *testing.T) {
	type call struct {
		name, method string
		prepare      func(p func(string) string) error
		do           func(p func(string) string) error
		check        func(t *testing.T, p func(string) string)
	}
	exists := func(names ...string) func(*testing.T, func(string) string) {
		return func(t *testing.T, p func(string) string) {
			got := slices.DeleteFunc(readNames(t, p("")), func(n string) bool { return n == "lower" })
			if !slices.Equal(got, names) {
				t.Errorf("the root holds %q, want %q", got, names)
			}
		}
	}
	create := func(names ...string) func(func(string) string) error {
		return func(p func(string) string) error {
			for _, n := range names {
				if err := os.WriteFile(p(n), []byte(n), 0o644); err != nil {
					return err
				}
			}
			return nil
		}
	}
	rename := func(from, to string, flags uint) func(func(string) string) error {
		return func(p func(string) string) error {
			return unix.Renameat2(unix.AT_FDCWD, p(from), unix.AT_FDCWD, p(to), flags)
		}
	}
	calls := []call{
		{"mkdir", "Mkdir", nil, func(p func(string) string) error { return unix.Mkdir(p("d"), 0o755) }, exists("d")},
		{"mknod", "Mknod", nil, func(p func(string) string) error { return unix.Mkfifo(p("p"), 0o644) }, exists("p")},
		{"symlink", "Symlink", nil, func(p func(string) string) error { return unix.Symlink("t", p("s")) }, exists("s")},
		{"create", "Create", nil, func(p func(string) string) error {
			fd, err := unix.Open(p("f"), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
			if err != nil {
				return err
			}
			_, err = unix.Write(fd, []byte("made"))
			return errors.Join(err, unix.Close(fd))
		}, func(t *testing.T, p func(string) string) {
			if got := readFile(t, p("f")); got != "made" {
				t.Errorf("reads %q", got)
			}
		}},
		{
			"link", "Link", create("a"), func(p func(string) string) error { return unix.Link(p("a"), p("b")) },
			func(t *testing.T, p func(string) string) {
				var st unix.Stat_t
				must(t, unix.Stat(p("b"), &st))
				if st.Nlink != 2 {
					t.Errorf("%d links", st.Nlink)
				}
			},
		},
		{"unlink", "Unlink", create("a"), func(p func(string) string) error { return unix.Unlink(p("a")) }, exists()},
		{
			"rmdir", "Rmdir", func(p func(string) string) error { return unix.Mkdir(p("d"), 0o755) },
			func(p func(string) string) error { return unix.Rmdir(p("d")) }, exists(),
		},
		{"rename", "Rename", create("a"), rename("a", "b", 0), exists("b")},
		{"rename over", "Rename", create("a", "b"), rename("a", "b", 0), func(t *testing.T, p func(string) string) {
			exists("b")(t, p)
			if got := readFile(t, p("b")); got != "a" {
				t.Errorf("reads %q", got)
			}
		}},
		{"rename, no replace", "Rename", create("a"), rename("a", "b", unix.RENAME_NOREPLACE), exists("b")},
		{"rename, exchange", "Rename", create("a", "b"), rename("a", "b", unix.RENAME_EXCHANGE), func(t *testing.T, p func(string) string) {
			if a, b := readFile(t, p("a")), readFile(t, p("b")); a != "b" || b != "a" {
				t.Errorf("read %q and %q", a, b)
			}
		}},
		{"setxattr", "SetXAttr", create("a"), func(p func(string) string) error {
			return unix.Setxattr(p("a"), "user.k", []byte("v"), unix.XATTR_CREATE)
		}, exists("a")},
		{"removexattr", "RemoveXAttr", func(p func(string) string) error {
			return errors.Join(create("a")(p), unix.Setxattr(p("a"), "user.k", []byte("v"), 0))
		}, func(p func(string) string) error { return unix.Removexattr(p("a"), "user.k") }, exists("a")},
		{"chmod", "SetAttr", create("a"), func(p func(string) string) error { return unix.Chmod(p("a"), 0o600) }, exists("a")},
		{"read", "Read", nil, func(p func(string) string) error {
			b, err := os.ReadFile(p("lower/a.txt"))
			if err == nil && string(b) != "alpha\n" {
				err = fmt.Errorf("read %q", b)
			}
			return err
		}, exists()},
		{
			"open, truncating", "Open", nil, func(p func(string) string) error { return os.WriteFile(p("lower/a.txt"), []byte("new"), 0o644) },
			func(t *testing.T, p func(string) string) {
				if got := readFile(t, p("lower/a.txt")); got != "new" {
					t.Errorf("reads %q", got)
				}
			},
		},
		{"append", "Write", nil, func(p func(string) string) error {
			fd, err := unix.Open(p("lower/a.txt"), unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			_, err = unix.Write(fd, []byte("beta\n"))
			return errors.Join(err, unix.Close(fd))
		}, func(t *testing.T, p func(string) string) {
			if got := readFile(t, p("lower/a.txt")); got != "alpha\nbeta\n" {
				t.Errorf("reads %q", got)
			}
		}},
	}
	for _, c := range calls {
		for _, when := range []string{"before", "after"} {
			t.Run(c.name+"/"+when, func(t *testing.T) {
				servers := crashable(t, 3, func(i int, s *serverConfig) {
					if i == 1 {
						s.DieIn, s.DieWhen = c.method, when
					}
				})
				v := servers[0]
				p := func(name string) string { return filepath.Join(v.dir, name) }
				if c.prepare != nil {
					must(t, c.prepare(p))
				}
				v.kill(t)
				servers[1].serve(t)
				result := make(chan error, 1)
				go func() { result <- c.do(p) }()
				servers[1].cmd.Wait()
				select {
				case err := <-result:
					t.Fatalf("it was answered: %v", err)
				default:
				}
				servers[2].serve(t)
				if err := <-result; err != nil {
					t.Errorf("the answer is %v", err)
				}
				c.check(t, p)
				servers[2].endsWell(t)
			})
		}
	}
}

func TestTakeOverRefusesOtherTerms(t *testing.T) {
	servers := crashable(t, 2, nil)
	v := servers[0]
	v.kill(t)
	good, err := os.ReadFile(v.config.State)
	must(t, err)
	s, err := decodeState(good)
	must(t, err)
	s.out = bytes.Clone(s.out)
	s.out[outHeaderSize+12] ^= 1 // a flag that was agreed on
	alloc, err := allocator(v.config.Inos)
	must(t, err)
	fs, err := overlay.Open(overlay.Options{Dir: v.config.Dir, Lower: sampleLower(), NewIno: alloc})
	must(t, err)
	_, err = Serve(Options{FS: fs, FD: v.fd, Resume: s.encode()})
	if err == nil || !strings.Contains(err.Error(), "agree") {
		t.Errorf("served: %v", err)
	}
	must(t, fs.Close())
	servers[1].serve(t)
	if got := readFile(t, filepath.Join(v.dir, "lower", "a.txt")); got != "alpha\n" {
		t.Errorf("reads %q", got)
	}
	servers[1].endsWell(t)
}

func sampleState() initState {
	in := make([]byte, inHeaderSize+64)
	in[0], in[4] = byte(len(in)), opInit
	return initState{level: TraceIO, maxWrite: 1 << 20, connection: 77, in: in, out: make([]byte, 80)}
}

func TestStateRoundTrip(t *testing.T) {
	s := sampleState()
	got, err := decodeState(s.encode())
	must(t, err)
	if d := cmp.Diff(s, got, cmp.AllowUnexported(initState{})); d != "" {
		t.Error(d)
	}
	b := s.encode()
	for i := range b {
		for _, bad := range [][]byte{b[:i], append(bytes.Clone(b[:i]), append([]byte{b[i] ^ 0x40}, b[i+1:]...)...)} {
			if _, err := decodeState(bad); err == nil {
				t.Fatalf("accepted with byte %d changed or missing", i)
			}
		}
	}
}

func FuzzState(f *testing.F) {
	s := sampleState()
	f.Add(s.encode())
	f.Add([]byte(stateMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decodeState(b)
		if err != nil {
			return
		}
		if !bytes.Equal(s.encode(), b) {
			t.Error("another state than the one read")
		}
	})
}
