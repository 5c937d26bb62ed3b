package fstest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func names(t *testing.T, dir string) {
	odd := []string{
		strings.Repeat("x", 255), "new\nline", "\xff\xfe not utf-8", "\x1b[31m", " ", ".wh.x", ".wh..wh..opq", "manifest.json",
	}
	for _, n := range odd {
		write(t, dir+"/"+n, n)
	}
	wantNames(t, dir, odd...)
	for _, n := range odd {
		if got := read(t, dir+"/"+n); got != n {
			t.Errorf("%q reads %q", n, got)
		}
	}
	long := dir + "/" + strings.Repeat("y", 256)
	_, err := unix.Open(long, unix.O_RDONLY, 0)
	want(t, "open of a name of 256 bytes", err, unix.ENAMETOOLONG)
	want(t, "mkdir of a name of 256 bytes", unix.Mkdir(long, 0o755), unix.ENAMETOOLONG)
	want(t, "symlink of a name of 256 bytes", unix.Symlink("t", long), unix.ENAMETOOLONG)
	want(t, "rename to a name of 256 bytes", unix.Rename(dir+"/ ", long), unix.ENAMETOOLONG)
}

// deepPath goes deeper than any path name can reach.
func deepPath(t *testing.T, dir string) {
	const levels, component = 40, 200
	name := strings.Repeat("d", component) // 40 * 200 is twice PATH_MAX
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	for range levels {
		must(t, unix.Mkdirat(fd, name, 0o755))
		next, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		unix.Close(fd)
		fd = next
	}
	f, err := unix.Openat(fd, "leaf", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	must(t, err)
	pwrite(t, f, "deep", 0)
	unix.Close(f)
	must(t, unix.Unlinkat(fd, "leaf", 0))
	for range levels {
		up, err := unix.Openat(fd, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		must(t, unix.Unlinkat(up, name, unix.AT_REMOVEDIR))
		unix.Close(fd)
		fd = up
	}
	unix.Close(fd)
	wantNames(t, dir)
}

func hardLinks(t *testing.T, dir string) {
	a, b, c := dir+"/a", dir+"/b", dir+"/c"
	write(t, a, "one")
	must(t, unix.Link(a, b))
	if sa, sb := stat(t, a), stat(t, b); sa.Nlink != 2 || sb.Nlink != 2 || sa.Ino != sb.Ino {
		t.Fatalf("nlink %d and %d, inodes %d and %d", sa.Nlink, sb.Nlink, sa.Ino, sb.Ino)
	}
	write(t, b, "through b")
	if got := read(t, a); got != "through b" {
		t.Errorf("a reads %q", got)
	}
	must(t, unix.Link(b, c))
	must(t, unix.Unlink(a))
	if sb, sc := stat(t, b), stat(t, c); sb.Nlink != 2 || sc.Nlink != 2 {
		t.Errorf("nlink %d and %d after an unlink", sb.Nlink, sc.Nlink)
	}
	want(t, "link over a name", unix.Link(b, c), unix.EEXIST)
	must(t, unix.Mkdir(dir+"/d", 0o755))
	want(t, "link to a directory", unix.Link(dir+"/d", dir+"/e"), unix.EPERM)
	must(t, unix.Chmod(b, 0o600))
	if m := stat(t, c).Mode & 0o777; m != 0o600 {
		t.Errorf("mode through the other name is %o", m)
	}
}

func directoryErrors(t *testing.T, dir string) {
	write(t, dir+"/f", "")
	must(t, unix.Mkdir(dir+"/d", 0o755))
	write(t, dir+"/d/x", "")
	want(t, "mkdir over a directory", unix.Mkdir(dir+"/d", 0o755), unix.EEXIST)
	want(t, "mkdir over a file", unix.Mkdir(dir+"/f", 0o755), unix.EEXIST)
	want(t, "rmdir of a full directory", unix.Rmdir(dir+"/d"), unix.ENOTEMPTY)
	want(t, "rmdir of a file", unix.Rmdir(dir+"/f"), unix.ENOTDIR)
	want(t, "unlink of a directory", unix.Unlink(dir+"/d"), unix.EISDIR)
	want(t, "rmdir of nothing", unix.Rmdir(dir+"/n"), unix.ENOENT)
	want(t, "unlink of nothing", unix.Unlink(dir+"/n"), unix.ENOENT)
	_, err := unix.Open(dir+"/f/x", unix.O_RDONLY, 0)
	want(t, "a path through a file", err, unix.ENOTDIR)
	_, err = unix.Open(dir+"/d", unix.O_WRONLY, 0)
	want(t, "writing a directory", err, unix.EISDIR)
	_, err = unix.Open(dir+"/f", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	want(t, "O_DIRECTORY on a file", err, unix.ENOTDIR)
}

func directoryLinks(t *testing.T, dir string) {
	base := stat(t, dir).Nlink
	if base != 2 {
		t.Skipf("this file system does not count subdirectories (an empty directory has %d links)", base)
	}
	must(t, unix.Mkdir(dir+"/a", 0o755))
	must(t, unix.Mkdir(dir+"/b", 0o755))
	write(t, dir+"/f", "")
	if n := stat(t, dir).Nlink; n != 4 {
		t.Errorf("nlink %d with two subdirectories", n)
	}
	must(t, unix.Rename(dir+"/a", dir+"/b/a"))
	if n, m := stat(t, dir).Nlink, stat(t, dir+"/b").Nlink; n != 3 || m != 3 {
		t.Errorf("nlink %d and %d after a move", n, m)
	}
	must(t, unix.Rmdir(dir+"/b/a"))
	must(t, unix.Rmdir(dir+"/b"))
	if n := stat(t, dir).Nlink; n != 2 {
		t.Errorf("nlink %d with no subdirectory", n)
	}
}

func dotDotAfterMove(t *testing.T, dir string) {
	must(t, os.MkdirAll(dir+"/a/m/below", 0o755))
	must(t, unix.Mkdir(dir+"/b", 0o755))
	must(t, unix.Rename(dir+"/a/m", dir+"/b/m"))
	b := stat(t, dir+"/b").Ino
	if got := stat(t, dir+"/b/m/..").Ino; got != b {
		t.Errorf(".. is inode %d, the parent %d", got, b)
	}
	fd := open(t, dir+"/b/m", unix.O_RDONLY|unix.O_DIRECTORY)
	for _, e := range getdents(t, fd, 4096) {
		if e.name == ".." && e.ino != b {
			t.Errorf(".. is listed as inode %d, the parent is %d", e.ino, b)
		}
		if e.name == "." && e.ino != stat(t, dir+"/b/m").Ino {
			t.Errorf(". is listed as inode %d", e.ino)
		}
	}
	wantNames(t, dir+"/b/m", "below")
}

// largeDirectory checks that a listing is complete, agrees with stat, repeats
// itself after a rewind and goes on from any position it told.
func largeDirectory(t *testing.T, dir string) {
	const n = 2500
	for i := range n {
		fd, err := unix.Open(fmt.Sprintf("%s/entry-%04d", dir, i), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
		must(t, err)
		unix.Close(fd)
	}
	fd := open(t, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	first := list(t, fd)
	if len(first) != n {
		t.Fatalf("%d entries, want %d", len(first), n)
	}
	seen := map[string]bool{}
	for i, e := range first {
		if seen[e.name] {
			t.Fatalf("%s is listed twice", e.name)
		}
		seen[e.name] = true
		if i%100 == 0 {
			if st := stat(t, dir+"/"+e.name); st.Ino != e.ino || e.kind != unix.DT_REG {
				t.Errorf("%s is listed as inode %d of type %d, and is %d", e.name, e.ino, e.kind, st.Ino)
			}
		}
	}
	_, err := unix.Seek(fd, 0, unix.SEEK_SET)
	must(t, err)
	if again := list(t, fd); !slices.Equal(first, again) {
		t.Error("the listing differs after a rewind")
	}
	for _, at := range []int{0, 1, n / 2, n - 2} {
		_, err := unix.Seek(fd, first[at].off, unix.SEEK_SET)
		must(t, err)
		if rest := list(t, fd); len(rest) != n-at-1 || rest[0].name != first[at+1].name {
			t.Errorf("%d entries after the %dth, want %d", len(rest), at, n-at-1)
		}
	}
}

// listWhileDeleting deletes what it lists, as rm -r does: every entry must come
// exactly once.
func listWhileDeleting(t *testing.T, dir string) {
	const n = 1200
	for i := range n {
		write(t, fmt.Sprintf("%s/%d", dir, i), "")
	}
	fd := open(t, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	seen := map[string]int{}
	for {
		es := getdents(t, fd, 1024)
		if len(es) == 0 {
			break
		}
		for _, e := range es {
			if e.name == "." || e.name == ".." {
				continue
			}
			seen[e.name]++
			must(t, unix.Unlink(dir+"/"+e.name))
		}
	}
	if len(seen) != n {
		t.Errorf("%d of %d entries came", len(seen), n)
	}
	for name, times := range seen {
		if times != 1 {
			t.Errorf("%s came %d times", name, times)
		}
	}
	wantNames(t, dir)
}

// listingFollowsChanges lists again and again between changes.
func listingFollowsChanges(t *testing.T, dir string) {
	var have []string
	for i := range 20 {
		n := fmt.Sprintf("f%02d", i)
		write(t, dir+"/"+n, "")
		have = append(have, n)
		wantNames(t, dir, have...)
		if i%3 == 2 {
			must(t, unix.Rename(dir+"/"+have[0], dir+"/r"+have[0]))
			have[0] = "r" + have[0]
			wantNames(t, dir, have...)
			must(t, unix.Unlink(dir+"/"+have[0]))
			have = have[1:]
			wantNames(t, dir, have...)
		}
	}
	fd := open(t, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	before := len(list(t, fd))
	write(t, dir+"/late", "")
	_, err := unix.Seek(fd, 0, unix.SEEK_SET)
	must(t, err)
	if after := len(list(t, fd)); after != before+1 {
		t.Errorf("%d entries after a rewind, %d before", after, before)
	}
}

func removedDirectory(t *testing.T, dir string) {
	sub := dir + "/gone"
	must(t, unix.Mkdir(sub, 0o755))
	fd := open(t, sub, unix.O_RDONLY|unix.O_DIRECTORY)
	path := open(t, sub, unix.O_PATH|unix.O_DIRECTORY)
	must(t, unix.Rmdir(sub))
	for _, fd := range []int{fd, path} {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Nlink != 0 {
			t.Errorf("fstat of a removed directory: %v, %d links", err, st.Nlink)
		}
		_, err := unix.Openat(fd, "new", unix.O_CREAT|unix.O_WRONLY, 0o644)
		want(t, "create in a removed directory", err, unix.ENOENT)
	}
	must(t, unix.Mkdir(sub, 0o755))
	write(t, sub+"/x", "")
	_, err := unix.Openat(fd, "x", unix.O_RDONLY, 0)
	want(t, "open through the old directory", err, unix.ENOENT)
}

func renameKeepsInode(t *testing.T, dir string) {
	must(t, os.MkdirAll(dir+"/d/sub", 0o755))
	write(t, dir+"/d/sub/f", "content")
	before, file := stat(t, dir+"/d").Ino, stat(t, dir+"/d/sub/f").Ino
	fd := open(t, dir+"/d/sub/f", unix.O_RDONLY)
	must(t, unix.Rename(dir+"/d", dir+"/e"))
	if got := stat(t, dir+"/e").Ino; got != before {
		t.Errorf("inode %d became %d", before, got)
	}
	if got := stat(t, dir+"/e/sub/f").Ino; got != file || pread(t, fd, 100, 0) != "content" {
		t.Errorf("the file's inode %d became %d", file, got)
	}
	absent(t, dir+"/d")
	// Replace a file by another, as editors and git do.
	write(t, dir+"/target", "old")
	write(t, dir+"/target.lock", "new")
	old := open(t, dir+"/target", unix.O_RDONLY)
	must(t, unix.Rename(dir+"/target.lock", dir+"/target"))
	if got := read(t, dir+"/target"); got != "new" {
		t.Errorf("after the rename it reads %q", got)
	}
	if got := pread(t, old, 10, 0); got != "old" {
		t.Errorf("the open file reads %q", got)
	}
	absent(t, dir+"/target.lock")
}

func renameSameInode(t *testing.T, dir string) {
	write(t, dir+"/a", "x")
	must(t, unix.Link(dir+"/a", dir+"/b"))
	must(t, unix.Rename(dir+"/a", dir+"/b"))
	wantNames(t, dir, "a", "b")
	if n := stat(t, dir+"/a").Nlink; n != 2 {
		t.Errorf("%d links", n)
	}
	must(t, unix.Rename(dir+"/a", dir+"/a"))
	wantNames(t, dir, "a", "b")
}

func renameErrors(t *testing.T, dir string) {
	write(t, dir+"/f", "")
	must(t, os.MkdirAll(dir+"/d/sub", 0o755))
	must(t, unix.Mkdir(dir+"/empty", 0o755))
	want(t, "directory over a full one", unix.Rename(dir+"/empty", dir+"/d"), unix.ENOTEMPTY)
	want(t, "directory over a file", unix.Rename(dir+"/d", dir+"/f"), unix.ENOTDIR)
	want(t, "file over a directory", unix.Rename(dir+"/f", dir+"/d"), unix.EISDIR)
	want(t, "directory into itself", unix.Rename(dir+"/d", dir+"/d/sub/x"), unix.EINVAL)
	want(t, "nothing", unix.Rename(dir+"/n", dir+"/m"), unix.ENOENT)
	must(t, unix.Rename(dir+"/d", dir+"/empty"))
	wantNames(t, dir, "empty", "f")
	wantNames(t, dir+"/empty", "sub")
}

func renameNoReplace(t *testing.T, dir string) {
	write(t, dir+"/a", "a")
	write(t, dir+"/b", "b")
	at := func(from, to string, flags uint) error {
		return unix.Renameat2(unix.AT_FDCWD, dir+"/"+from, unix.AT_FDCWD, dir+"/"+to, flags)
	}
	want(t, "no replace", at("a", "b", unix.RENAME_NOREPLACE), unix.EEXIST)
	must(t, at("a", "c", unix.RENAME_NOREPLACE))
	wantNames(t, dir, "b", "c")
	want(t, "exchange with nothing", at("b", "n", unix.RENAME_EXCHANGE), unix.ENOENT)
}

func renameExchange(t *testing.T, dir string) {
	must(t, os.MkdirAll(dir+"/p/d", 0o755))
	must(t, unix.Mkdir(dir+"/q", 0o755))
	write(t, dir+"/p/d/in", "in")
	write(t, dir+"/q/f", "f")
	di, fi := stat(t, dir+"/p/d").Ino, stat(t, dir+"/q/f").Ino
	must(t, unix.Renameat2(unix.AT_FDCWD, dir+"/p/d", unix.AT_FDCWD, dir+"/q/f", unix.RENAME_EXCHANGE))
	if stat(t, dir+"/q/f").Ino != di || stat(t, dir+"/p/d").Ino != fi {
		t.Error("the inodes did not change places")
	}
	if read(t, dir+"/q/f/in") != "in" || read(t, dir+"/p/d") != "f" {
		t.Error("the contents did not change places")
	}
	want(t, "exchange with an ancestor",
		unix.Renameat2(unix.AT_FDCWD, dir+"/q", unix.AT_FDCWD, dir+"/q/f", unix.RENAME_EXCHANGE), unix.EINVAL)
}

// renameStorm moves a fixed number of files about from several goroutines; in
// the end they are all there, each once.
func renameStorm(t *testing.T, dir string) {
	const files, dirs, workers, rounds = 24, 3, 4, 150
	for d := range dirs {
		must(t, unix.Mkdir(fmt.Sprintf("%s/d%d", dir, d), 0o755))
	}
	inos := map[uint64]bool{}
	for i := range files {
		p := fmt.Sprintf("%s/d%d/%d", dir, i%dirs, i)
		write(t, p, fmt.Sprint(i))
		inos[stat(t, p).Ino] = true
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for r := range rounds {
				i := (r*7 + w*5) % files
				from := fmt.Sprintf("%s/d%d/%d", dir, (r+w)%dirs, i)
				to := fmt.Sprintf("%s/d%d/%d", dir, (r*3+w+1)%dirs, i)
				// The source may be elsewhere at the moment: that is the point.
				if err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE); err != nil &&
					err != unix.ENOENT && err != unix.EEXIST {
					t.Errorf("rename: %v", err)
				}
			}
		})
	}
	wg.Wait()
	found := 0
	for d := range dirs {
		sub := fmt.Sprintf("%s/d%d", dir, d)
		for _, n := range listNames(t, sub) {
			found++
			if got := read(t, filepath.Join(sub, n)); got != n {
				t.Errorf("%s reads %q", n, got)
			}
			if !inos[stat(t, filepath.Join(sub, n)).Ino] {
				t.Errorf("%s has a new inode", n)
			}
		}
	}
	if found != files {
		t.Errorf("%d files, want %d", found, files)
	}
}

func symlinks(t *testing.T, dir string) {
	long := strings.Repeat("x/", 2047) // 4094 bytes
	for name, target := range map[string]string{"dangling": "nowhere", "loop": "loop", "long": long, "bytes": "\xff\n"} {
		must(t, unix.Symlink(target, dir+"/"+name))
		got, err := os.Readlink(dir + "/" + name)
		must(t, err)
		if got != target {
			t.Errorf("%s leads to %q", name, got)
		}
		if st := stat(t, dir+"/"+name); st.Size != int64(len(target)) || st.Mode&unix.S_IFMT != unix.S_IFLNK {
			t.Errorf("%s has size %d and mode %o", name, st.Size, st.Mode)
		}
	}
	_, err := unix.Open(dir+"/loop", unix.O_RDONLY, 0)
	want(t, "open of a loop", err, unix.ELOOP)
	_, err = unix.Open(dir+"/dangling", unix.O_RDONLY, 0)
	want(t, "open of a dangling link", err, unix.ENOENT)
	write(t, dir+"/file", "f")
	must(t, unix.Symlink("file", dir+"/good"))
	if got := read(t, dir+"/good"); got != "f" {
		t.Errorf("through the link: %q", got)
	}
	_, err = unix.Open(dir+"/good", unix.O_RDONLY|unix.O_NOFOLLOW, 0)
	want(t, "O_NOFOLLOW", err, unix.ELOOP)
	want(t, "symlink over a name", unix.Symlink("x", dir+"/good"), unix.EEXIST)
	fd, err := unix.Open(dir+"/dangling", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	must(t, err)
	unix.Close(fd)
	stat(t, dir+"/nowhere")
}

func namedPipe(t *testing.T, dir string) {
	p := dir + "/fifo"
	must(t, unix.Mkfifo(p, 0o644))
	if m := stat(t, p).Mode; m&unix.S_IFMT != unix.S_IFIFO {
		t.Fatalf("mode %o", m)
	}
	fd := open(t, p, unix.O_RDWR|unix.O_NONBLOCK)
	_, err := unix.Write(fd, []byte("through"))
	must(t, err)
	b := make([]byte, 20)
	n, err := unix.Read(fd, b)
	must(t, err)
	if string(b[:n]) != "through" {
		t.Errorf("read %q", b[:n])
	}
}

func unixSocket(t *testing.T, dir string) {
	// Addresses are short: bind and connect by a relative path.
	back := open(t, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	must(t, unix.Chdir(dir))
	defer func() { must(t, unix.Fchdir(back)) }()
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(s)
	must(t, unix.Bind(s, &unix.SockaddrUnix{Name: "sock"}))
	must(t, unix.Listen(s, 1))
	c, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(c)
	must(t, unix.Connect(c, &unix.SockaddrUnix{Name: "sock"}))
	if m := stat(t, "sock").Mode; m&unix.S_IFMT != unix.S_IFSOCK {
		t.Errorf("mode %o", m)
	}
}
