package importer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/importer"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// mayBe is for what not every host lets root do; the import is compared with
// what there is.
func mayBe(t *testing.T, err error) {
	t.Helper()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTSUP) {
		t.Logf("this host does not do that: %v", err)
		return
	}
	must(t, err)
}

// importDir imports a directory and opens what comes of it.
func importDir(t *testing.T, dir string, o importer.Options) (*stack.Stack, importer.Result) {
	t.Helper()
	var b bytes.Buffer
	w := layerfmt.NewWriter(&b, layerfmt.WriterOptions{Kind: layerfmt.Base})
	defer w.Abort()
	res, err := importer.Import(context.Background(), dir, w, o)
	must(t, err)
	_, err = w.Finish()
	must(t, err)
	r, err := layerfmt.Open(bytes.NewReader(b.Bytes()), int64(b.Len()), layerfmt.ReaderOptions{Name: "base"})
	must(t, err)
	must(t, r.Verify(context.Background()))
	s, err := stack.New(r)
	must(t, err)
	return s, res
}

func tryImport(dir string, o importer.Options) error {
	w := layerfmt.NewWriter(io.Discard, layerfmt.WriterOptions{Kind: layerfmt.Base})
	defer w.Abort()
	_, err := importer.Import(context.Background(), dir, w, o)
	return err
}

// makeTree fills a directory with one of everything.
func makeTree(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "work")
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string, data []byte, mode os.FileMode) {
		t.Helper()
		must(t, os.WriteFile(at(name), data, 0o600))
		must(t, os.Chmod(at(name), mode))
	}
	for _, d := range []string{"", "a", "a/b", "a/b/c", "z", ".git", "empty", "\xff\xfe dir"} {
		must(t, os.Mkdir(at(d), 0o755))
	}
	write("a/text", []byte("text\n"), 0o644)
	write("a/none", nil, 0o400)
	write("a/b/c/deep", bytes.Repeat([]byte("deep "), 1000), 0o640)
	write("a/.wh.text", []byte("no whiteout"), 0o644)
	write("\xff\xfe dir/\xc0\xc1", []byte("bytes"), 0o644)
	write(strings.Repeat("n", 255), []byte("long"), 0o644)
	write("setuid", []byte("#!"), os.ModeSetuid|0o755)
	write("setgid", []byte("#!"), os.ModeSetgid|os.ModeSticky|0o711)
	big := make([]byte, 3<<20+17)
	for i := range big {
		big[i] = byte(i * i >> 8)
	}
	write("z/big", big, 0o644)
	must(t, os.Chmod(at("empty"), os.ModeSticky|0o777))

	for name, size := range map[string]int64{"z/sparse": 9 << 20, "a/sparse": 300 << 10, "z/hole": 64 << 10} {
		f, err := os.Create(at(name))
		must(t, err)
		must(t, f.Truncate(size))
		if name != "z/hole" {
			_, err = f.WriteAt([]byte("an island"), size/2)
			must(t, err)
		}
		must(t, f.Close())
	}

	must(t, os.Link(at("a/text"), at("z/text too")))
	must(t, os.Link(at("a/text"), at("a/b/text three")))
	must(t, os.Symlink("a/text", at("link")))
	must(t, os.Symlink("/nowhere/\xff", at("a/dangling")))
	must(t, os.Symlink(strings.Repeat("x/", 2000), at("a/long")))
	must(t, unix.Mkfifo(at("fifo"), 0o620))
	l, err := net.Listen("unix", at("socket"))
	must(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	must(t, l.Close())
	if os.Geteuid() == 0 {
		mayBe(t, unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		mayBe(t, unix.Mknod(at("disk"), unix.S_IFBLK|0o660, int(unix.Mkdev(259, 70000))))
		mayBe(t, os.Lchown(at("a/none"), 4321, 1234))
		mayBe(t, os.Lchown(at("link"), 1, 2))
	}
	must(t, os.Chtimes(at("a/text"), time.Unix(5, 123_456_789), time.Unix(1_000_000_000, 987_654_321)))
	must(t, os.Chtimes(at("a/b"), time.Unix(5, 0), time.Unix(-86_400, 5)))
	for name, attrs := range map[string]map[string]string{
		"a/text": {"user.one": "1", "user.empty": "", "user.bytes": "\x00\xff"},
		"z":      {"user.dir": strings.Repeat("v", 2000)},
	} {
		for k, v := range attrs {
			mayBe(t, unix.Setxattr(at(name), k, []byte(v), 0))
		}
	}
	return dir
}

func TestEverythingIsImported(t *testing.T) {
	dir := makeTree(t)
	fds := openFiles(t)
	s, res := importDir(t, dir, importer.Options{})
	if got := openFiles(t); got != fds {
		t.Errorf("%d files are open after the import, %d before", got, fds)
	}
	var want importer.Result
	numbers := make(map[uint64]tree.Ino)
	must(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		must(t, err)
		rel, err := filepath.Rel(dir, path)
		must(t, err)
		d, err := s.Resolve(strings.TrimPrefix(rel, "."))
		if rel == "a/.wh.text" || rel == ".git" {
			d, err = s.Resolve(rel)
		}
		if err != nil {
			t.Fatalf("%q: %v", rel, err)
		}
		var st unix.Stat_t
		must(t, unix.Lstat(path, &st))
		if ino, ok := numbers[st.Ino]; ok && ino != d.Ino {
			t.Errorf("%q has number %d, another name of it %d", rel, d.Ino, ino)
		}
		compareInode(t, rel, path, st, s, d)
		if _, again := numbers[st.Ino]; !again && st.Mode&unix.S_IFMT == unix.S_IFREG {
			want.Bytes += st.Size
		}
		numbers[st.Ino] = d.Ino
		want.MaxIno = max(want.MaxIno, d.Ino)
		if d.Kind == tree.Dir {
			want.Dirs++
			compareNames(t, rel, path, s, d.Ino)
		} else {
			want.Files++
		}
		return nil
	}))
	if res != want {
		t.Errorf("result %+v, want %+v", res, want)
	}
}

func compareInode(t *testing.T, rel, path string, st unix.Stat_t, s *stack.Stack, d tree.Dirent) {
	t.Helper()
	n, err := s.Inode(d.Ino)
	must(t, err)
	want := tree.Attr{
		Ino: n.Ino, Kind: d.Kind, Mode: st.Mode & 0o7777, Nlink: uint32(st.Nlink),
		Mtime: tree.Time{Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec)},
		Ctime: tree.Time{Sec: st.Ctim.Sec, Nsec: uint32(st.Ctim.Nsec)},
		Size:  uint64(st.Size), Alloc: n.Alloc,
	}
	if st.Uid != uint32(os.Geteuid()) {
		want.UID = st.Uid
	}
	if st.Gid != uint32(os.Getegid()) {
		want.GID = st.Gid
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		want.Size, want.Nlink = 0, 2
		entries, err := os.ReadDir(path)
		must(t, err)
		for _, e := range entries {
			if e.IsDir() {
				want.Nlink++
			}
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		want.Rdev = uint32(st.Rdev)
	}
	if n.Attr != want {
		t.Errorf("%q: attributes\n%+v\nwant\n%+v", rel, n.Attr, want)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		if target, err := os.Readlink(path); n.Link != target {
			t.Errorf("%q leads to %q, want %q (%v)", rel, n.Link, target, err)
		}
	case unix.S_IFREG:
		compareContent(t, rel, path, st, s, n)
	}
	got := map[string]string{}
	for _, x := range n.Xattrs {
		got[x.Name] = string(x.Value)
	}
	xattrs := map[string]string{}
	for _, name := range []string{"user.one", "user.empty", "user.bytes", "user.dir"} {
		b := make([]byte, 4096)
		if k, err := unix.Lgetxattr(path, name, b); err == nil {
			xattrs[name] = string(b[:k])
		}
	}
	if !maps.Equal(got, xattrs) {
		t.Errorf("%q: extended attributes %q, want %q", rel, got, xattrs)
	}
}

func compareContent(t *testing.T, rel, path string, st unix.Stat_t, s *stack.Stack, n tree.Inode) {
	t.Helper()
	want, err := os.ReadFile(path)
	must(t, err)
	f, err := s.Open(n.Ino)
	must(t, err)
	got, err := io.ReadAll(io.NewSectionReader(f, 0, int64(f.Size())))
	must(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("%q: content differs", rel)
	}
	if st.Blocks*512 < st.Size && n.Alloc > uint64(st.Blocks*512) {
		t.Errorf("%q: %d bytes hold data, on the host %d", rel, n.Alloc, st.Blocks*512)
	}
}

// compareNames requires the host's names and, but for further names of what has
// one already, consecutive numbers in their order.
func compareNames(t *testing.T, rel, path string, s *stack.Stack, dir tree.Ino) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	want, err := f.Readdirnames(-1)
	must(t, err)
	slices.Sort(want)
	var got []string
	var last tree.Ino
	must(t, s.ReadDir(dir, "", func(d tree.Dirent) bool {
		got = append(got, d.Name)
		if d.Ino > dir {
			if last != 0 && d.Ino != last+1 && !strings.HasPrefix(d.Name, "text") {
				t.Errorf("%q in %q has number %d after %d", d.Name, rel, d.Ino, last)
			}
			last = d.Ino
		}
		return true
	}))
	if !slices.Equal(got, want) {
		t.Errorf("%q lists %q, want %q", rel, got, want)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(names)
}

func TestEqualInputGivesTheSamePack(t *testing.T) {
	dir := makeTree(t)
	first, _ := importDir(t, dir, importer.Options{Workers: 1})
	second, _ := importDir(t, dir, importer.Options{Workers: 7})
	if a, b := first.Layer(0).ID(), second.Layer(0).ID(); a != b {
		t.Errorf("one worker makes pack %s, seven make %s", a, b)
	}
}

func TestExclude(t *testing.T) {
	dir := makeTree(t)
	s, res := importDir(t, dir, importer.Options{Exclude: []string{
		filepath.Join(dir, "a", "b"), filepath.Join(dir, "z", "..", "z", "big"), filepath.Join(dir, "not there"),
	}})
	for path, there := range map[string]bool{"a": true, "a/text": true, "a/b": false, "a/b/c/deep": false, "z/big": false, "z/sparse": true} {
		if _, err := s.Resolve(path); (err == nil) != there {
			t.Errorf("%q: %v, want it there: %v", path, err, there)
		}
	}
	n, err := s.Inode(mustResolve(t, s, "a").Ino)
	must(t, err)
	if n.Nlink != 2 {
		t.Errorf("a has %d links, want 2 without its excluded subdirectory", n.Nlink)
	}
	if n, err = s.Inode(mustResolve(t, s, "a/text").Ino); err != nil || n.Nlink != 2 {
		t.Errorf("a/text has %d links, %v; want 2 without the excluded name", n.Nlink, err)
	}
	if rest, _ := s.Names(n.Ino); len(rest) != 2 {
		t.Errorf("a/text has the names %v", rest)
	}
	if res.Dirs != 6 {
		t.Errorf("%d directories, want 6", res.Dirs)
	}
	if err := tryImport(dir, importer.Options{Exclude: []string{dir}}); !errors.Is(err, tree.ErrInvalid) {
		t.Errorf("import of an excluded directory: %v, want %v", err, tree.ErrInvalid)
	}
}

func mustResolve(t *testing.T, s *stack.Stack, path string) tree.Dirent {
	t.Helper()
	d, err := s.Resolve(path)
	must(t, err)
	return d
}

func TestRootMustBeADirectory(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "real"), 0o700))
	must(t, os.Symlink("real", filepath.Join(dir, "link")))
	for name, want := range map[string]error{"none": unix.ENOENT, "file": unix.ENOTDIR, "real": nil, "link": nil} {
		path := filepath.Join(dir, name)
		err := tryImport(path, importer.Options{})
		if !errors.Is(err, want) || want != nil && !strings.Contains(err.Error(), path) {
			t.Errorf("import of %s: %v, want %v with the path", name, err, want)
		}
	}
}

// TestChangesUnderneath changes names of the root after the walk has seen them
// and before they are read.
func TestChangesUnderneath(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	must(t, os.WriteFile(outside, []byte("secret"), 0o600))
	for name, tc := range map[string]struct {
		change func(at func(string) string) error
		want   []string
	}{
		"grown": {func(at func(string) string) error {
			return appendTo(at("setuid"))
		}, []string{"setuid"}},
		"cut short": {func(at func(string) string) error { return os.Truncate(at("setuid"), 1) }, []string{"setuid"}},
		"replaced": {func(at func(string) string) error {
			return errors.Join(os.WriteFile(at("new"), []byte("#!"), 0o755), os.Rename(at("new"), at("setuid")))
		}, []string{".", "setuid"}},
		"removed": {func(at func(string) string) error { return os.Remove(at("setuid")) }, []string{".", "setuid"}},
		"became a link": {func(at func(string) string) error {
			return errors.Join(os.Remove(at("setuid")), os.Symlink(outside, at("setuid")))
		}, []string{".", "setuid"}},
		"became a pipe": {func(at func(string) string) error {
			return errors.Join(os.Remove(at("setuid")), unix.Mkfifo(at("setuid"), 0o600))
		}, []string{".", "setuid"}},
		"became a directory": {func(at func(string) string) error {
			return errors.Join(os.Remove(at("setuid")), os.Mkdir(at("setuid"), 0o700))
		}, []string{".", "setuid"}},
		"directory became a link": {func(at func(string) string) error {
			return errors.Join(os.Rename(at("z"), at("y")), os.Symlink("y", at("z")))
		}, []string{"z"}},
		"link led elsewhere": {func(at func(string) string) error {
			return errors.Join(os.Remove(at("link")), os.Symlink("elsewhere", at("link")))
		}, []string{".", "link"}},
		"mode":             {func(at func(string) string) error { return os.Chmod(at("setgid"), 0o600) }, []string{"setgid"}},
		"mode of a pipe":   {func(at func(string) string) error { return os.Chmod(at("fifo"), 0o600) }, []string{"fifo"}},
		"something new":    {func(at func(string) string) error { return os.WriteFile(at("new"), nil, 0o600) }, []string{"."}},
		"several at once":  {func(at func(string) string) error { return errors.Join(appendTo(at("setuid")), appendTo(at("setgid"))) }, []string{"setgid", "setuid"}},
		"nothing":          {func(func(string) string) error { return nil }, nil},
		"reading, no more": {func(at func(string) string) error { _, err := os.ReadFile(at("setuid")); return err }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			dir := makeTree(t)
			changed := false
			err := tryImport(dir, importer.Options{Workers: 2, Progress: func(p importer.Progress) {
				if !changed {
					changed = true
					must(t, tc.change(func(name string) string { return filepath.Join(dir, name) }))
				}
			}})
			if tc.want == nil {
				must(t, err)
				return
			}
			var e *importer.ChangedError
			if !errors.As(err, &e) || !slices.Equal(e.Paths, tc.want) {
				t.Fatalf("import: %v, want %q changed", err, tc.want)
			}
			for _, p := range tc.want {
				if !strings.Contains(err.Error(), fmt.Sprintf("%q", p)) {
					t.Errorf("the error does not name %q: %v", p, err)
				}
			}
			var u *importer.UnreadableError
			if errors.As(err, &u) {
				t.Errorf("a change is called unreadable: %v", err)
			}
		})
	}
}

func appendTo(path string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("more")
	return errors.Join(err, f.Close())
}

// TestUnreadable needs a user whom permissions hold; as root it runs itself
// again as another.
func TestUnreadable(t *testing.T) {
	const nobody = 65534
	if os.Geteuid() == 0 {
		self, err := os.ReadFile("/proc/self/exe")
		must(t, err)
		dir := t.TempDir()
		must(t, os.Chmod(dir, 0o755))
		must(t, os.Chmod(filepath.Dir(dir), 0o755))
		copied := filepath.Join(dir, "importer.test")
		must(t, os.WriteFile(copied, self, 0o755))
		home := filepath.Join(dir, "tmp")
		must(t, os.Mkdir(home, 0o755))
		must(t, os.Chown(home, nobody, nobody))
		cmd := exec.Command(copied, "-test.run=^TestUnreadable$", "-test.v")
		cmd.Dir = home
		cmd.Env = append(os.Environ(), "TMPDIR="+home, "GOTMPDIR="+home)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		out, err := cmd.CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("--- PASS: TestUnreadable")) {
			t.Errorf("as another user: %v\n%s", err, out)
		}
		return
	}
	dir := makeTree(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	restore := func(names ...string) {
		for _, name := range names {
			must(t, os.Chmod(at(name), 0o700))
		}
	}
	requireUnreadable := func(total int, want ...string) {
		t.Helper()
		err := tryImport(dir, importer.Options{})
		var e *importer.UnreadableError
		if !errors.As(err, &e) || e.Total != total || !slices.Equal(e.Paths, want) || !errors.Is(err, unix.EACCES) {
			t.Errorf("import: %v, want %d unreadable, %q", err, total, want)
		}
		var c *importer.ChangedError
		if errors.As(err, &c) {
			t.Errorf("an unreadable path is called changed: %v", err)
		}
	}

	must(t, os.Chmod(at("a/text"), 0))
	must(t, os.Chmod(at("z/big"), 0))
	// One inode, three names: it is read by its first.
	requireUnreadable(2, "a/text", "z/big")
	restore("a/text", "z/big")

	must(t, os.Chmod(at("a/b/c"), 0))
	must(t, os.Chmod(at("empty"), 0))
	requireUnreadable(2, "a/b/c", "empty")
	restore("a/b/c", "empty")

	must(t, os.Chmod(at("a/b"), 0o400)) // can be listed, not entered
	requireUnreadable(2, "a/b/c", "a/b/text three")
	restore("a/b")

	var many []string
	for i := range 30 {
		name := fmt.Sprintf("z/f%02d", i)
		must(t, os.WriteFile(at(name), nil, 0))
		many = append(many, name)
	}
	requireUnreadable(30, many[:20]...)
	err := tryImport(dir, importer.Options{})
	if !strings.Contains(err.Error(), "and 10 more") {
		t.Errorf("the error does not say how many more: %v", err)
	}
}

func TestCancel(t *testing.T) {
	dir := makeTree(t)
	cause := errors.New("enough")
	for _, when := range []func(importer.Progress) bool{
		func(importer.Progress) bool { return true },
		func(p importer.Progress) bool { return p.TotalDirs >= 8 },
		func(p importer.Progress) bool { return p.Dirs > 0 },
	} {
		fds := openFiles(t)
		ctx, cancel := context.WithCancelCause(context.Background())
		w := layerfmt.NewWriter(io.Discard, layerfmt.WriterOptions{Kind: layerfmt.Base})
		stopped := false
		_, err := importer.Import(ctx, dir, w, importer.Options{Progress: func(p importer.Progress) {
			if when(p) {
				stopped = true
				cancel(cause)
			}
		}})
		w.Abort()
		cancel(nil)
		// A cancellation that comes with the last report is too late.
		if stopped && err != nil && !errors.Is(err, cause) {
			t.Errorf("import: %v, want %v", err, cause)
		}
		if got := openFiles(t); got != fds {
			t.Errorf("%d files are open after the import, %d before", got, fds)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	w := layerfmt.NewWriter(io.Discard, layerfmt.WriterOptions{Kind: layerfmt.Base})
	defer w.Abort()
	if _, err := importer.Import(ctx, dir, w, importer.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("import with a context that has ended: %v", err)
	}
}

// full is a disk with room for a number of bytes.
type full struct{ left int }

func (f *full) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, unix.ENOSPC
	}
	return len(p), nil
}

func TestFullDisk(t *testing.T) {
	dir := makeTree(t)
	for _, room := range []int{0, 1000, 10_000, 100_000} {
		fds := openFiles(t)
		w := layerfmt.NewWriter(&full{left: room}, layerfmt.WriterOptions{Kind: layerfmt.Base})
		_, err := importer.Import(context.Background(), dir, w, importer.Options{})
		if err == nil {
			_, err = w.Finish()
		}
		w.Abort()
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("room for %d bytes: %v, want %v", room, err, unix.ENOSPC)
		}
		if got := openFiles(t); got != fds {
			t.Errorf("%d files are open after the import, %d before", got, fds)
		}
	}
}

func TestProgress(t *testing.T) {
	dir := makeTree(t)
	var all []importer.Progress
	_, res := importDir(t, dir, importer.Options{Progress: func(p importer.Progress) { all = append(all, p) }})
	last := all[len(all)-1]
	want := importer.Progress{
		Files: res.Files, Dirs: res.Dirs, Bytes: res.Bytes,
		TotalFiles: res.Files, TotalDirs: res.Dirs, TotalBytes: last.TotalBytes, Done: true,
	}
	if last != want || last.TotalBytes < last.Bytes {
		t.Errorf("last report %+v, want %+v", last, want)
	}
	for i, p := range all[:len(all)-1] {
		if p.Done || p.Files > all[i+1].Files || p.TotalDirs > all[i+1].TotalDirs {
			t.Errorf("report %d: %+v, then %+v", i, p, all[i+1])
		}
	}
}

// TestTerabyteOfHole imports a file of almost nothing. Anything that went
// through its hole would be at it for an hour.
func TestTerabyteOfHole(t *testing.T) {
	const size = 1 << 40
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "sparse"))
	must(t, err)
	defer f.Close()
	must(t, f.Truncate(size))
	for _, at := range []int64{1 << 20, size - 4096} {
		_, err := f.WriteAt([]byte("an island"), at)
		must(t, err)
	}
	s, res := importDir(t, dir, importer.Options{})
	if res.Bytes != size {
		t.Errorf("%d bytes imported", res.Bytes)
	}
	d, err := s.Resolve("sparse")
	must(t, err)
	n, err := s.Inode(d.Ino)
	must(t, err)
	if n.Size != size || n.Alloc == 0 || n.Alloc > 4<<20 {
		t.Errorf("%d bytes, %d of data", n.Size, n.Alloc)
	}
	got, err := s.Open(d.Ino)
	must(t, err)
	data := []tree.Range{}
	for off := uint64(0); ; {
		r, more := got.Data(off)
		if !more {
			break
		}
		data = append(data, r)
		off = r.End
	}
	if h, err := tree.HashContent(t.Context(), f, size, data); err != nil || h != n.Hash {
		t.Errorf("hash of the file %x, %v; imported as %x", h, err, n.Hash)
	}
	for _, at := range []int64{1 << 20, size - 4096} {
		b := make([]byte, 9)
		if _, err := got.ReadAt(b, at); err != nil || string(b) != "an island" {
			t.Errorf("at %d: %q, %v", at, b, err)
		}
	}
}
