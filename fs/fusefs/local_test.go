package fusefs

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, err error, errno unix.Errno) {
	t.Helper()
	if !errors.Is(err, errno) {
		t.Errorf("%s: %v, want %v", what, err, errno)
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

func readNames(t *testing.T, dir string) []string {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	names, err := f.Readdirnames(-1)
	must(t, err)
	slices.Sort(names)
	return names
}

func statIno(t *testing.T, path string) tree.Ino {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatalf("lstat %s: %v", path, err)
	}
	return tree.Ino(st.Ino)
}

func resolve(t *testing.T, fs *overlay.FS, path string) tree.Dirent {
	t.Helper()
	d, err := fs.Resolve(path)
	must(t, err)
	return d
}

// TestRequestsPerCall holds the number of requests that system calls cost. A
// request more is a round trip more for everybody.
func TestRequestsPerCall(t *testing.T) {
	for _, level := range []TraceLevel{TraceOpen, TraceSet} {
		t.Run(level.String(), func(t *testing.T) {
			v := serveLocal(t, sampleLower(), func(o *Options, _ *overlay.Options) { o.Level = level })
			p := func(names ...string) string { return v.path(append([]string{"lower"}, names...)...) }
			buf := make([]byte, 64<<10)
			var st unix.Stat_t
			open := func(path string, flags int) int {
				fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
				must(t, err)
				return fd
			}
			list := func(dir string) {
				fd := open(dir, unix.O_RDONLY|unix.O_DIRECTORY)
				for {
					n, err := unix.Getdents(fd, buf)
					must(t, err)
					if n == 0 {
						break
					}
				}
				must(t, unix.Close(fd))
			}
			// The kernel learns once that it need not ask for these.
			list(v.dir)
			for _, flags := range []int{unix.O_RDWR, unix.O_RDONLY} {
				must(t, unix.Close(open(p("suid"), flags)))
			}
			must(t, unix.Stat(p("suid"), &st))
			v.until(t, "the first opens are released", func() bool {
				return level == TraceSet || v.server.Counts()["RELEASE"] == 2
			})

			type requests = map[string]uint64
			with := func(set, more requests) requests {
				if level == TraceSet {
					return set
				}
				out := maps.Clone(set)
				if out == nil {
					out = requests{}
				}
				maps.Copy(out, more)
				return out
			}
			var fd int
			steps := []struct {
				name string
				do   func()
				want requests
			}{
				{"stat, first", func() { must(t, unix.Stat(p("a.txt"), &st)) }, requests{"LOOKUP": 1}},
				{"stat, again", func() { must(t, unix.Stat(p("a.txt"), &st)) }, nil},
				{"stat of nothing, first", func() { wantErr(t, "stat", unix.Stat(p("none"), &st), unix.ENOENT) }, requests{"LOOKUP": 1}},
				{"stat of nothing, again", func() { wantErr(t, "stat", unix.Stat(p("none"), &st), unix.ENOENT) }, nil},
				{"list, first", func() { list(p("sub")) }, requests{"LOOKUP": 1, "READDIRPLUS": 2}},
				{"list, again", func() { list(p("sub")) }, nil},
				{"stat of what was listed", func() {
					for i := range 30 {
						must(t, unix.Stat(p("sub", fmt.Sprintf("f%02d", i)), &st))
					}
				}, nil},
				{"readlink, first", func() {
					_, err := unix.Readlink(p("sym"), buf)
					must(t, err)
				}, requests{"LOOKUP": 1, "READLINK": 1}},
				{"readlink, again", func() {
					_, err := unix.Readlink(p("sym"), buf)
					must(t, err)
				}, nil},
				{"open for reading", func() { fd = open(p("a.txt"), unix.O_RDONLY) }, with(nil, requests{"OPEN": 1})},
				{"read, first", func() {
					_, err := unix.Pread(fd, buf, 0)
					must(t, err)
				}, requests{"READ": 1}},
				{"read, again", func() {
					_, err := unix.Pread(fd, buf, 0)
					must(t, err)
				}, nil},
				{"close", func() { must(t, unix.Close(fd)) }, with(nil, requests{"RELEASE": 1})},
				{"open, read, close, again", func() {
					fd = open(p("a.txt"), unix.O_RDONLY)
					_, err := unix.Pread(fd, buf, 0)
					must(t, errors.Join(err, unix.Close(fd)))
				}, with(nil, requests{"OPEN": 1, "RELEASE": 1})},
				{"create and write", func() {
					fd = open(p("new"), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY)
					_, err := unix.Write(fd, buf[:1000])
					must(t, err)
				}, requests{"LOOKUP": 1, "CREATE": 1, "GETXATTR": 1, "WRITE": 1}},
				{"write, again", func() {
					_, err := unix.Write(fd, buf[:1000])
					must(t, err)
				}, requests{"WRITE": 1}},
				{"close of a written file", func() { must(t, unix.Close(fd)) }, with(nil, requests{"RELEASE": 1})},
				// With default_permissions the kernel checks a directory that
				// it knows to have changed against fresh attributes.
				{
					"open for writing in a changed directory, and close", func() { must(t, unix.Close(open(p("new"), unix.O_WRONLY))) },
					with(requests{"GETATTR": 1}, requests{"OPEN": 1, "RELEASE": 1}),
				},
				{"open for writing and close", func() { must(t, unix.Close(open(p("new"), unix.O_WRONLY))) }, with(nil, requests{"OPEN": 1, "RELEASE": 1})},
				{
					"truncating open", func() { must(t, unix.Close(open(p("new"), unix.O_WRONLY|unix.O_TRUNC))) },
					with(requests{"SETATTR": 1}, requests{"OPEN": 1, "RELEASE": 1}),
				},
				{"mkdir", func() { must(t, unix.Mkdir(p("dir"), 0o755)) }, requests{"LOOKUP": 1, "MKDIR": 1}},
				{"rename", func() { must(t, unix.Rename(p("new"), p("old"))) }, requests{"GETATTR": 1, "LOOKUP": 1, "RENAME": 1}},
				{"unlink", func() { must(t, unix.Unlink(p("old"))) }, requests{"GETATTR": 1, "UNLINK": 1, "FORGET": 1}},
				{"rmdir", func() { must(t, unix.Rmdir(p("dir"))) }, requests{"GETATTR": 1, "RMDIR": 1, "FORGET": 1}},
				{"stat of a changed directory", func() { must(t, unix.Stat(p(), &st)) }, requests{"GETATTR": 1}},
				{"fsync", func() {
					fd := open(p("a.txt"), unix.O_RDONLY)
					must(t, errors.Join(unix.Fsync(fd), unix.Close(fd)))
				}, with(requests{"FSYNC": 1}, requests{"OPEN": 1, "RELEASE": 1})},
			}
			if level == TraceOpen {
				for i := range steps {
					if steps[i].name == "truncating open" {
						delete(steps[i].want, "SETATTR")
					}
				}
			}
			for _, s := range steps {
				before := v.server.Counts()
				s.do()
				diff := func() requests {
					out := requests{}
					for op, n := range v.server.Counts() {
						// STATFS is what until paces itself with.
						if d := n - before[op]; d > 0 && op != "STATFS" {
							out[op] = d
						}
					}
					return out
				}
				// RELEASE and FORGET come when the call is long over.
				late := s.want["RELEASE"] + s.want["FORGET"]
				v.until(t, s.name+" has its late requests", func() bool {
					d := diff()
					return d["RELEASE"]+d["FORGET"] >= late
				})
				want := s.want
				if want == nil {
					want = requests{}
				}
				if d := cmp.Diff(want, diff()); d != "" {
					t.Errorf("%s (-want +got):\n%s", s.name, d)
				}
			}
		})
	}
}

// TestChangesFromElsewhere makes changes past the kernel, as the file API,
// refresh and undo do, and looks at them through the mount.
func TestChangesFromElsewhere(t *testing.T) {
	v := serveLocal(t, sampleLower(), nil)
	api := overlay.Caller{Op: 9}
	lower := resolve(t, v.fs, "lower").Ino
	sub := resolve(t, v.fs, "lower/sub").Ino
	var st unix.Stat_t
	missing := func(path string) {
		t.Helper()
		wantErr(t, "stat "+filepath.Base(path), unix.Stat(path, &st), unix.ENOENT)
	}

	t.Run("a name that was absent", func(t *testing.T) {
		missing(v.path("lower", "late"))
		_, err := v.fs.Create(api, lower, "late", 0o644)
		must(t, err)
		v.server.InvalidateEntry(lower, "late")
		v.server.Drain()
		must(t, unix.Stat(v.path("lower", "late"), &st))
	})
	t.Run("a name that was there", func(t *testing.T) {
		must(t, unix.Stat(v.path("lower", "late"), &st))
		must(t, v.fs.Unlink(api, lower, "late"))
		v.server.InvalidateEntry(lower, "late")
		v.server.Drain()
		missing(v.path("lower", "late"))
	})
	t.Run("a listing", func(t *testing.T) {
		before := readNames(t, v.path("lower", "sub"))
		if again := readNames(t, v.path("lower", "sub")); !slices.Equal(before, again) {
			t.Fatal("two listings differ")
		}
		// The kernel has no entry of this name, not even an absent one.
		_, err := v.fs.Create(api, sub, "unheard-of", 0o644)
		must(t, err)
		v.server.InvalidateEntry(sub, "unheard-of")
		v.server.Drain()
		if got := readNames(t, v.path("lower", "sub")); len(got) != len(before)+1 || !slices.Contains(got, "unheard-of") {
			t.Errorf("listed are %q", got)
		}
		must(t, v.fs.Unlink(api, sub, "f00"))
		v.server.InvalidateDeleted(sub, "f00", 0)
		v.server.Drain()
		if got := readNames(t, v.path("lower", "sub")); len(got) != len(before) || slices.Contains(got, "f00") {
			t.Errorf("listed are %q", got)
		}
	})
	t.Run("a listing that is open", func(t *testing.T) {
		f, err := os.Open(v.path("lower", "sub"))
		must(t, err)
		defer f.Close()
		before, err := f.Readdirnames(-1)
		must(t, err)
		_, err = v.fs.Create(api, sub, "while-open", 0o644)
		must(t, err)
		v.server.InvalidateEntry(sub, "while-open")
		v.server.Drain()
		_, err = f.Seek(0, 0)
		must(t, err)
		after, err := f.Readdirnames(-1)
		must(t, err)
		if len(after) != len(before)+1 {
			t.Errorf("%d names after a rewind, %d before", len(after), len(before))
		}
	})
	t.Run("content", func(t *testing.T) {
		path := v.path("lower", "a.txt")
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		must(t, err)
		defer unix.Close(fd)
		if got := readFile(t, path); got != "alpha\n" {
			t.Fatalf("reads %q", got)
		}
		ino := resolve(t, v.fs, "lower/a.txt").Ino
		_, err = v.fs.WriteAt(api, ino, []byte("ALPHA"), 0) // of the same size
		must(t, err)
		v.server.InvalidateInode(ino)
		v.server.Drain()
		if got := readFile(t, path); got != "ALPHA\n" {
			t.Errorf("reads %q", got)
		}
		b := make([]byte, 20)
		n, err := unix.Pread(fd, b, 0)
		must(t, err)
		if string(b[:n]) != "ALPHA\n" {
			t.Errorf("the open file reads %q", b[:n])
		}
	})
	t.Run("attributes", func(t *testing.T) {
		path := v.path("lower", "a.txt")
		must(t, unix.Stat(path, &st))
		ino, mode := resolve(t, v.fs, "lower/a.txt").Ino, uint32(0o600)
		_, err := v.fs.SetAttr(api, ino, overlay.SetAttr{Mode: &mode})
		must(t, err)
		v.server.InvalidateInode(ino)
		v.server.Drain()
		must(t, unix.Stat(path, &st))
		if st.Mode&0o777 != 0o600 {
			t.Errorf("mode %o", st.Mode)
		}
	})
	t.Run("a replaced file that is open", func(t *testing.T) {
		path := v.path("lower", "big")
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		must(t, err)
		defer unix.Close(fd)
		a, err := v.fs.Create(api, lower, "big.new", 0o644)
		must(t, err)
		_, err = v.fs.WriteAt(api, a.Ino, []byte("replaced"), 0)
		must(t, err)
		must(t, v.fs.Rename(api, lower, "big.new", lower, "big", 0))
		v.server.InvalidateEntry(lower, "big.new")
		v.server.InvalidateEntry(lower, "big")
		v.server.Drain()
		if got := readFile(t, path); got != "replaced" {
			t.Errorf("reads %q", got)
		}
		b := make([]byte, 16)
		_, err = unix.Pread(fd, b, 1<<19)
		if err != nil || string(b) != "0123456789abcdef" {
			t.Errorf("the open file reads %q, %v", b, err)
		}
	})
	t.Run("a directory that is somebody's working directory", func(t *testing.T) {
		empty := resolve(t, v.fs, "lower/empty").Ino
		fd, err := unix.Open(v.path("lower", "empty"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		defer unix.Close(fd)
		must(t, v.fs.Rmdir(api, lower, "empty"))
		v.server.InvalidateDeleted(lower, "empty", empty)
		v.server.Drain()
		missing(v.path("lower", "empty"))
		_, err = unix.Openat(fd, "x", unix.O_CREAT|unix.O_WRONLY, 0o644)
		wantErr(t, "create in it", err, unix.ENOENT)
	})
	t.Run("told of nothing", func(t *testing.T) {
		// A stale entry heals itself when it is used.
		must(t, unix.Stat(v.path("lower", "sub", "f01"), &st))
		must(t, v.fs.Unlink(api, sub, "f01"))
		_, err := unix.Open(v.path("lower", "sub", "f01"), unix.O_RDONLY, 0)
		wantErr(t, "open", err, unix.ENOENT)
	})
}

// TestListingsRaceWithChanges lists a directory without pause while it is
// changed from elsewhere; after each change and Drain the listing is right.
func TestListingsRaceWithChanges(t *testing.T) {
	v := serveLocal(t, sampleLower(), nil)
	api := overlay.Caller{Op: 9}
	sub := resolve(t, v.fs, "lower/sub").Ino
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				f, err := os.Open(v.path("lower", "sub"))
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := f.Readdirnames(-1); err != nil {
					t.Error(err)
				}
				f.Close()
			}
		})
	}
	model := map[string]bool{}
	for _, n := range readNames(t, v.path("lower", "sub")) {
		model[n] = true
	}
	for i := range 150 {
		name := fmt.Sprintf("n%03d", i)
		_, err := v.fs.Create(api, sub, name, 0o644)
		must(t, err)
		model[name] = true
		v.server.InvalidateEntry(sub, name)
		if gone := fmt.Sprintf("n%03d", i-5); model[gone] {
			must(t, v.fs.Unlink(api, sub, gone))
			delete(model, gone)
			v.server.InvalidateEntry(sub, gone)
		}
		v.server.Drain()
		if d := cmp.Diff(slices.Sorted(maps.Keys(model)), readNames(t, v.path("lower", "sub"))); d != "" {
			t.Fatalf("round %d (-want +got):\n%s", i, d)
		}
		for n := range model {
			var st unix.Stat_t
			if err := unix.Stat(v.path("lower", "sub", n), &st); err != nil {
				t.Fatalf("round %d: stat %s: %v", i, n, err)
			}
		}
	}
	close(stop)
	readers.Wait()
}

// TestHardLinksAcrossCopyUp writes through one name of a lower inode and reads
// through the other, whose pages the kernel has.
func TestHardLinksAcrossCopyUp(t *testing.T) {
	v := serveLocal(t, sampleLower(), nil)
	one, two := v.path("lower", "link1"), v.path("lower", "link2")
	if readFile(t, one) != readFile(t, two) || statIno(t, one) != statIno(t, two) {
		t.Fatal("the two names differ before anything was written")
	}
	held, err := unix.Open(two, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(held)
	before := statIno(t, one)
	fd, err := unix.Open(one, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	_, err = unix.Pwrite(fd, []byte("WRITTEN"), 7000)
	must(t, errors.Join(err, unix.Close(fd)))
	b := make([]byte, 7)
	_, err = unix.Pread(held, b, 7000)
	must(t, err)
	if got := readFile(t, two); string(b) != "WRITTEN" || got[7000:7007] != "WRITTEN" || got[:7] != "linked " {
		t.Errorf("through the other name: %q and %q", b, got[6990:7010])
	}
	if statIno(t, one) != before || statIno(t, two) != before {
		t.Error("copying up changed the inode number")
	}
	must(t, unix.Unlink(one))
	var st unix.Stat_t
	must(t, unix.Stat(two, &st))
	if st.Nlink != 1 {
		t.Errorf("%d links left", st.Nlink)
	}
}

// TestUnlinkedLivesUntilForgotten follows an inode from its last name's end to
// the kernel's forgetting it.
func TestUnlinkedLivesUntilForgotten(t *testing.T) {
	v := serveLocal(t, sampleLower(), nil)
	path := v.path("f")
	must(t, os.WriteFile(path, []byte("content"), 0o644))
	ino := statIno(t, path)
	opath, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0) // no OPEN comes of this
	must(t, err)
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	must(t, unix.Unlink(path))
	must(t, unix.Close(fd))
	again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", opath), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	b := make([]byte, 20)
	n, err := unix.Pread(again, b, 0)
	if err != nil || string(b[:n]) != "content" {
		t.Errorf("reads %q, %v", b[:n], err)
	}
	must(t, unix.Close(again))
	if _, err := v.fs.Attr(ino); err != nil {
		t.Errorf("with a path descriptor left: %v", err)
	}
	must(t, unix.Close(opath))
	v.until(t, "the inode is gone", func() bool {
		_, err := v.fs.Attr(ino)
		return errors.Is(err, tree.ErrStale)
	})
}

// TestOperationOfEachRequest checks that changes and accesses are booked on the
// operation of the process that made them, mapped memory included.
func TestOperationOfEachRequest(t *testing.T) {
	var mu sync.Mutex
	ops := map[uint32]tree.Op{}
	v := serveLocal(t, sampleLower(), func(o *Options, _ *overlay.Options) {
		o.Op = func(pid uint32) tree.Op {
			mu.Lock()
			defer mu.Unlock()
			return ops[pid]
		}
	})
	// The tool waits for its standard input to end, so that its pid is known
	// before it does anything.
	run := func(op tree.Op, script string, args ...string) {
		t.Helper()
		v.holdsNothing(t)
		cmd := exec.Command("sh", append([]string{"-c", "read x; " + script, "sh"}, args...)...)
		in, err := cmd.StdinPipe()
		must(t, err)
		must(t, cmd.Start())
		mu.Lock()
		ops[uint32(cmd.Process.Pid)] = op
		mu.Unlock()
		must(t, in.Close())
		must(t, cmd.Wait())
	}
	run(1, `echo one > "$1"`, v.path("one"))
	run(2, `exec 3>> "$1"; echo two >&3`, v.path("one"))
	run(3, `exec 3< "$1"; read line <&3`, v.path("lower", "a.txt"))
	run(4, `cd "$1"; test -e absent || true`, v.path("lower"))

	delta, err := v.fs.Delta()
	must(t, err)
	one := resolve(t, v.fs, "one").Ino
	for _, n := range delta.Inodes {
		if n.Ino == one && n.LastOp != 2 {
			t.Errorf("the file's last writer is %d", n.LastOp)
		}
	}
	type seen struct {
		Op   tree.Op
		Kind access.Kind
		Name string
	}
	got := map[seen]bool{}
	must(t, v.record.Each(func(e access.Entry) bool {
		name := e.Name
		if name == "" {
			name, _ = v.fs.Path(e.Ino)
		}
		got[seen{e.Op, e.Kind, name}] = true
		return true
	}))
	for _, want := range []seen{
		{1, access.Absent, "one"},
		{1, access.Create, "one"},
		{1, access.Write, "one"},
		{2, access.Write, "one"},
		{3, access.Lookup, "lower"},
		{3, access.Lookup, "a.txt"},
		{3, access.Read, "lower/a.txt"},
		{4, access.Absent, "absent"},
	} {
		if !got[want] {
			t.Errorf("%v is not in the record", want)
		}
	}
	for s := range got {
		if s.Op == 0 && s.Kind != access.Lookup && s.Kind != access.Absent {
			t.Errorf("%v has no operation", s)
		}
	}
}

func TestMappedWritesAreTheOpeners(t *testing.T) {
	var pid sync.Map
	v := serveLocal(t, sampleLower(), func(o *Options, _ *overlay.Options) {
		o.Op = func(p uint32) tree.Op {
			if _, ok := pid.Load(p); ok {
				return 7
			}
			return 0
		}
	})
	path := v.path("lower", "big")
	c := tool(t, v.mounted, "mmap-write", path, "through a mapping")
	// Until its pid is known, the process is kept from starting its work.
	gate, err := c.StdinPipe()
	must(t, err)
	must(t, c.Start())
	pid.Store(uint32(c.Process.Pid), true)
	must(t, gate.Close())
	must(t, c.Wait())
	if got := readFile(t, path)[:17]; got != "through a mapping" {
		t.Errorf("reads %q", got)
	}
	ino := statIno(t, path)
	lastOp := func() tree.Op {
		delta, err := v.fs.Delta()
		must(t, err)
		for _, n := range delta.Inodes {
			if n.Ino == ino {
				return n.LastOp
			}
		}
		return 0
	}
	v.until(t, "the page is written back", func() bool { return lastOp() != 0 })
	if got := lastOp(); got != 7 {
		t.Errorf("booked on operation %d", got)
	}
}

// TestRecordOfChanges checks what each kind of change leaves in the record.
func TestRecordOfChanges(t *testing.T) {
	v := serveLocal(t, sampleLower(), func(o *Options, _ *overlay.Options) {
		o.Op = func(uint32) tree.Op { return 1 }
	})
	p := func(n string) string { return v.path("lower", n) }
	must(t, unix.Mkdir(p("d"), 0o755))
	must(t, unix.Symlink("x", p("s")))
	must(t, unix.Link(p("a.txt"), p("l")))
	must(t, unix.Mkfifo(p("fifo"), 0o644))
	must(t, unix.Chmod(p("a.txt"), 0o600))
	must(t, unix.Setxattr(p("big"), "user.k", []byte("v"), 0))
	must(t, unix.Truncate(p("big"), 10))
	must(t, unix.Rename(p("l"), p("sym")))
	must(t, unix.Rmdir(p("d")))
	readNames(t, p("sub"))
	dir := resolve(t, v.fs, "lower").Ino
	inos := map[string]tree.Ino{}
	for _, n := range []string{"a.txt", "big", "sub"} {
		inos[n] = resolve(t, v.fs, "lower/"+n).Ino
	}
	type seen struct {
		Kind access.Kind
		Ino  tree.Ino
		Dir  tree.Ino
		Name string
	}
	got := map[seen]bool{}
	must(t, v.record.Each(func(e access.Entry) bool {
		ino := e.Ino
		if e.Kind == access.Create || e.Kind == access.Remove {
			ino = 0 // not known beforehand
		}
		got[seen{e.Kind, ino, e.Dir, e.Name}] = true
		return true
	}))
	for _, want := range []seen{
		{access.Create, 0, dir, "d"},
		{access.Create, 0, dir, "s"},
		{access.Create, 0, dir, "fifo"},
		{access.Link, inos["a.txt"], dir, "l"},
		{access.Attr, inos["a.txt"], 0, ""},
		{access.Attr, inos["big"], 0, ""},
		{access.Write, inos["big"], 0, ""},
		{access.Rename, inos["a.txt"], dir, "l"},
		{access.Rename, inos["a.txt"], dir, "sym"},
		{access.Remove, 0, dir, "sym"},
		{access.Remove, 0, dir, "d"},
		{access.List, inos["sub"], 0, ""},
	} {
		if !got[want] {
			t.Errorf("%v is not in the record", want)
		}
	}
}

// corruptError is what a damaged layer answers with, as far as this room knows.
type corruptError struct{ layer string }

func (e *corruptError) Error() string { return "layer " + e.layer + " is damaged" }

func TestFailuresBelow(t *testing.T) {
	lower := sampleLower()
	l, _ := lower.Lookup(tree.RootIno, "lower")
	find := func(name string) tree.Ino {
		d, err := lower.Lookup(l.Ino, name)
		must(t, err)
		return d.Ino
	}
	bad, mad := find("big"), find("a.txt")
	var on sync.Map
	lower.fail = func(ino tree.Ino) error {
		if _, ok := on.Load(ino); !ok {
			return nil
		}
		if ino == mad {
			panic("lost my head")
		}
		return fmt.Errorf("frame 3: %w", &corruptError{"abc"})
	}
	v := serveLocal(t, lower, nil)
	fd, err := unix.Open(v.path("lower", "big"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	on.Store(bad, true)
	on.Store(mad, true)
	b := make([]byte, 10)
	for range 5 {
		_, err = unix.Pread(fd, b, 0)
		wantErr(t, "read of a damaged file", err, unix.EIO)
	}
	log := v.log.String()
	if n := strings.Count(log, "layer abc is damaged"); n != 1 || !strings.Contains(log, "op=READ") || !strings.Contains(log, fmt.Sprintf("ino=%d", bad)) {
		t.Errorf("%d lines about it in the log:\n%s", n, log)
	}
	var st unix.Stat_t
	wantErr(t, "a handler that panics", unix.Stat(v.path("lower", "a.txt"), &st), unix.EIO)
	if log := v.log.String(); strings.Count(log, "lost my head") != 1 {
		t.Errorf("the log:\n%s", log)
	}
	must(t, unix.Stat(v.path("lower", "sub"), &st)) // all else goes on
	on.Delete(mad)
	must(t, unix.Stat(v.path("lower", "a.txt"), &st))
}

func TestQuota(t *testing.T) {
	v := serveLocal(t, sampleLower(), func(_ *Options, oo *overlay.Options) { oo.Quota = overlay.Quota{Bytes: 64 << 10, Inodes: 3} })
	fd, err := unix.Open(v.path("f"), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	must(t, err)
	defer unix.Close(fd)
	_, err = unix.Write(fd, make([]byte, 128<<10))
	wantErr(t, "writing over the quota", err, unix.EDQUOT)
	must(t, unix.Mkdir(v.path("a"), 0o755))
	must(t, unix.Mkdir(v.path("b"), 0o755))
	wantErr(t, "an inode over the quota", unix.Mkdir(v.path("c"), 0o755), unix.EDQUOT)
}

// TestWritingKillsPrivileges writes to a set-id file with a file capability as
// an ordinary user.
func TestWritingKillsPrivileges(t *testing.T) {
	if os.Geteuid() != 0 || !hasUser(12345) {
		t.Skip("takes a second user id")
	}
	v := serveLocal(t, sampleLower(), nil)
	path := v.path("lower", "suid")
	if n, err := unix.Getxattr(path, "security.capability", make([]byte, 100)); err != nil || n != 20 {
		t.Fatalf("the capability: %d bytes, %v", n, err)
	}
	must(t, unix.Chmod(path, 0o6777))
	// The directory above is not for others, so the file is opened before.
	if err := tool(t, v.mounted, "write-as", "12345", path, "x\n").Run(); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	if st.Mode&0o7777 != 0o777 {
		t.Errorf("mode %o after a write", st.Mode&0o7777)
	}
	_, err := unix.Getxattr(path, "security.capability", make([]byte, 100))
	wantErr(t, "the capability after a write", err, unix.ENODATA)
	if got := readFile(t, path); got != "x\nivileged" {
		t.Errorf("reads %q", got)
	}
}

// hasUser reports whether this user namespace has the id.
func hasUser(id int) bool {
	b, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		first, err1 := strconv.Atoi(f[0])
		count, err2 := strconv.Atoi(f[2])
		if err1 == nil && err2 == nil && id >= first && id < first+count {
			return true
		}
	}
	return false
}

func TestXattrRules(t *testing.T) {
	v := serveLocal(t, sampleLower(), nil)
	path := v.path("lower", "a.txt")
	_, err := unix.Getxattr(path, "security.selinux", make([]byte, 10))
	wantErr(t, "a label", err, unix.ENODATA)
	for _, name := range []string{"security.selinux", "system.posix_acl_access"} {
		wantErr(t, "setting "+name, unix.Setxattr(path, name, make([]byte, 28), 0), unix.EOPNOTSUPP)
	}
	must(t, unix.Setxattr(path, "user.big", make([]byte, 60<<10), 0))
	if n, err := unix.Getxattr(path, "user.big", make([]byte, 64<<10)); n != 60<<10 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	for i := 0; ; i++ {
		err := unix.Setxattr(path, fmt.Sprintf("user.%0200d", i), nil, 0)
		if errors.Is(err, unix.ENOSPC) {
			break
		}
		must(t, err)
		if i > 1000 {
			t.Fatal("the list of attributes has no bound")
		}
	}
	if _, err := unix.Listxattr(path, make([]byte, 64<<10)); err != nil {
		t.Errorf("a full list: %v", err)
	}
}

func TestShownIDs(t *testing.T) {
	if !hasUser(200) {
		t.Skip("takes more than one user id")
	}
	v := serveLocal(t, sampleLower(), func(o *Options, _ *overlay.Options) {
		o.MapID = func(id uint32, gid bool) uint32 {
			if gid {
				return id + 200
			}
			return id + 100
		}
	})
	var st unix.Stat_t
	must(t, unix.Stat(v.path("lower", "a.txt"), &st))
	if st.Uid != 100 || st.Gid != 200 {
		t.Errorf("shown as %d:%d", st.Uid, st.Gid)
	}
	if !lowerStamp(tree.Ino(st.Ino)).Equal(time.Unix(st.Mtim.Unix())) {
		t.Errorf("mtime %v", st.Mtim)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	_, err := Serve(Options{Level: 9, MaxWrite: 1})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, word := range []string{"FS", "FD", "Level", "MaxWrite"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not name %s", err, word)
		}
	}
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	w.Close()
	fs, err := overlay.Open(overlay.Options{Dir: t.TempDir(), Lower: sampleLower(), NewIno: func() (tree.Ino, error) { return 0, tree.ErrNoSpace }})
	must(t, err)
	defer fs.Close()
	if _, err := Serve(Options{FS: fs, FD: int(r.Fd())}); err == nil {
		t.Error("served a pipe")
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("open /dev/fuse: %v", err)
	}
	defer unix.Close(fd)
	if _, err := Serve(Options{FS: fs, FD: fd}); err == nil || !strings.Contains(err.Error(), "not mounted") {
		t.Errorf("an unmounted descriptor: %v", err)
	}
}

func TestTraceLevelNames(t *testing.T) {
	for _, l := range []TraceLevel{TraceOpen, TraceIO, TraceSet} {
		if got, err := ParseTraceLevel(l.String()); err != nil || got != l {
			t.Errorf("%v: %v, %v", l, got, err)
		}
	}
	if _, err := ParseTraceLevel("all"); err == nil {
		t.Error("accepted all")
	}
}
