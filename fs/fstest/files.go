package fstest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func createFlags(t *testing.T, dir string) {
	p := dir + "/f"
	fd := open(t, p, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR)
	pwrite(t, fd, "0123456789", 0)
	_, err := unix.Open(p, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0o644)
	want(t, "O_EXCL on a file that is there", err, unix.EEXIST)
	open(t, p, unix.O_CREAT|unix.O_RDWR)
	if got := read(t, p); got != "0123456789" {
		t.Errorf("O_CREAT changed the file to %q", got)
	}
	open(t, p, unix.O_WRONLY|unix.O_TRUNC)
	if n := fstat(t, fd).Size; n != 0 {
		t.Errorf("size %d after O_TRUNC", n)
	}
	if got := pread(t, fd, 10, 0); got != "" {
		t.Errorf("the first descriptor reads %q after O_TRUNC", got)
	}
	pwrite(t, fd, "again", 0)
	if got := read(t, p); got != "again" {
		t.Errorf("reads %q", got)
	}
	// A file made read-only can still be written through the descriptor that
	// made it.
	ro, err := unix.Open(dir+"/ro", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o444)
	must(t, err)
	defer unix.Close(ro)
	pwrite(t, ro, "x", 0)
}

func appendTwoWriters(t *testing.T, dir string) {
	p := dir + "/log"
	a := open(t, p, unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND)
	b := open(t, p, unix.O_WRONLY|unix.O_APPEND)
	var wants strings.Builder
	for i := range 50 {
		fd := a
		if i%2 == 1 {
			fd = b
		}
		line := fmt.Sprintf("line %d\n", i)
		wants.WriteString(line)
		_, err := unix.Write(fd, []byte(line))
		must(t, err)
	}
	if got := read(t, p); got != wants.String() {
		t.Errorf("the file holds %d bytes, want %d", len(got), wants.Len())
	}
}

func unlinkedOpenFile(t *testing.T, dir string) {
	p := dir + "/f"
	write(t, p, "before")
	fd := open(t, p, unix.O_RDWR)
	must(t, unix.Unlink(p))
	absent(t, p)
	write(t, p, "another file")
	if st := fstat(t, fd); st.Nlink != 0 || st.Size != 6 {
		t.Errorf("%d links, size %d", st.Nlink, st.Size)
	}
	pwrite(t, fd, "after!!", 0)
	if got := pread(t, fd, 20, 0); got != "after!!" {
		t.Errorf("reads %q", got)
	}
	must(t, unix.Ftruncate(fd, 3))
	must(t, unix.Fchmod(fd, 0o600))
	again := open(t, fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY)
	if got := pread(t, again, 20, 0); got != "aft" {
		t.Errorf("reopened it reads %q", got)
	}
	if got := read(t, p); got != "another file" {
		t.Errorf("the file of the same name reads %q", got)
	}
	// The same through a rename that replaces it.
	write(t, dir+"/g", "g")
	gfd := open(t, dir+"/g", unix.O_RDONLY)
	must(t, unix.Rename(p, dir+"/g"))
	if st := fstat(t, gfd); st.Nlink != 0 || pread(t, gfd, 5, 0) != "g" {
		t.Errorf("replaced: %d links", st.Nlink)
	}
	// A path descriptor is no open, and keeps the inode all the same.
	write(t, dir+"/h", "h")
	path := open(t, dir+"/h", unix.O_PATH)
	must(t, unix.Unlink(dir+"/h"))
	if st := fstat(t, path); st.Nlink != 0 || st.Size != 1 {
		t.Errorf("by path descriptor: %d links, size %d", st.Nlink, st.Size)
	}
}

func tmpfileLinked(t *testing.T, dir string) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o640)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("no O_TMPFILE on this file system")
	}
	must(t, err)
	defer unix.Close(fd)
	pwrite(t, fd, "made in the dark", 0)
	wantNames(t, dir)
	must(t, unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, dir+"/named", unix.AT_SYMLINK_FOLLOW))
	if got := read(t, dir+"/named"); got != "made in the dark" {
		t.Errorf("reads %q", got)
	}
	if st := stat(t, dir+"/named"); st.Nlink != 1 || st.Mode&0o777 != 0o640 {
		t.Errorf("%d links, mode %o", st.Nlink, st.Mode)
	}
	none, err := unix.Open(dir, unix.O_TMPFILE|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o640)
	must(t, err)
	defer unix.Close(none)
	want(t, "naming an O_EXCL one",
		unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", none), unix.AT_FDCWD, dir+"/never", unix.AT_SYMLINK_FOLLOW), unix.ENOENT)
}

func truncateZeros(t *testing.T, dir string) {
	p := dir + "/f"
	write(t, p, strings.Repeat("x", 10000))
	fd := open(t, p, unix.O_RDWR)
	pread(t, fd, 10000, 0) // what was read must not come back
	must(t, unix.Ftruncate(fd, 100))
	must(t, unix.Ftruncate(fd, 9000))
	if got := pread(t, fd, 10000, 0); len(got) != 9000 || strings.Trim(got[100:], "\x00") != "" || strings.Trim(got[:100], "x") != "" {
		t.Errorf("%d bytes, or something else than zeros", len(got))
	}
	must(t, unix.Truncate(p, 1<<40))
	if st := fstat(t, fd); st.Size != 1<<40 {
		t.Errorf("size %d", st.Size)
	}
	if got := pread(t, fd, 4, 1<<40-2); got != "\x00\x00" {
		t.Errorf("the end reads %q", got)
	}
	want(t, "a negative size", unix.Ftruncate(fd, -1), unix.EINVAL)
}

func writeBeyondEnd(t *testing.T, dir string) {
	fd := open(t, dir+"/f", unix.O_CREAT|unix.O_RDWR)
	pwrite(t, fd, "a", 0)
	pwrite(t, fd, "z", 5000)
	got := pread(t, fd, 6000, 0)
	if len(got) != 5001 || got[0] != 'a' || got[5000] != 'z' || strings.Trim(got[1:5000], "\x00") != "" {
		t.Errorf("%d bytes read", len(got))
	}
	if got := pread(t, fd, 10, 6000); got != "" {
		t.Errorf("behind the end it reads %q", got)
	}
}

func sparseFile(t *testing.T, dir string) {
	const hole, data = 1 << 20, 64 << 10
	fd := open(t, dir+"/f", unix.O_CREAT|unix.O_RDWR)
	pwrite(t, fd, strings.Repeat("d", data), hole)
	must(t, unix.Ftruncate(fd, 2*hole+data))
	seek := func(off int64, whence int) int64 {
		t.Helper()
		at, err := unix.Seek(fd, off, whence)
		must(t, err)
		return at
	}
	if at := seek(0, unix.SEEK_DATA); at > hole {
		t.Errorf("data begins at %d, after %d", at, hole)
	}
	if at := seek(hole, unix.SEEK_HOLE); at < hole+data || at > 2*hole+data {
		t.Errorf("the hole after the data begins at %d", at)
	}
	if at := seek(0, unix.SEEK_END); at != 2*hole+data {
		t.Errorf("the end is at %d", at)
	}
	_, err := unix.Seek(fd, 2*hole+data, unix.SEEK_DATA)
	want(t, "data behind the end", err, unix.ENXIO)
	if st := fstat(t, fd); st.Blocks*512 >= st.Size {
		t.Errorf("%d blocks for a sparse file of %d bytes", st.Blocks, st.Size)
	}
}

func fallocateModes(t *testing.T, dir string) {
	fd := open(t, dir+"/f", unix.O_CREAT|unix.O_RDWR)
	must(t, unix.Fallocate(fd, 0, 0, 8192))
	if n := fstat(t, fd).Size; n != 8192 {
		t.Errorf("size %d", n)
	}
	must(t, unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 8192, 8192))
	if n := fstat(t, fd).Size; n != 8192 {
		t.Errorf("size %d after KEEP_SIZE", n)
	}
	pwrite(t, fd, strings.Repeat("x", 16384), 0)
	pread(t, fd, 16384, 0)
	must(t, unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4000, 5000))
	got := pread(t, fd, 20000, 0)
	if len(got) != 16384 || strings.Trim(got[4000:9000], "\x00") != "" ||
		strings.Trim(got[:4000], "x") != "" || strings.Trim(got[9000:], "x") != "" {
		t.Error("a punched hole does not read as zeros, or more went than that")
	}
	if err := unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, 0, 100); err == nil {
		if got := pread(t, fd, 101, 0); got != strings.Repeat("\x00", 100)+"x" {
			t.Error("a zeroed range does not read as zeros")
		}
	} else {
		want(t, "zero range", err, unix.EOPNOTSUPP)
	}
}

func copyFileRange(t *testing.T, dir string) {
	content := strings.Repeat("0123456789abcdef", 5000)
	write(t, dir+"/src", content)
	src := open(t, dir+"/src", unix.O_RDONLY)
	dst := open(t, dir+"/dst", unix.O_CREAT|unix.O_RDWR)
	pwrite(t, dst, "keep", 0)
	from, to := int64(16), int64(4)
	for from < int64(len(content)) {
		n, err := unix.CopyFileRange(src, &from, dst, &to, len(content), 0)
		must(t, err)
		if n == 0 {
			break
		}
	}
	if got := read(t, dir+"/dst"); got != "keep"+content[16:] {
		t.Errorf("%d bytes copied, or wrong ones", len(got))
	}
}

func fsync(t *testing.T, dir string) {
	fd := open(t, dir+"/f", unix.O_CREAT|unix.O_RDWR)
	pwrite(t, fd, "x", 0)
	must(t, unix.Fsync(fd))
	must(t, unix.Fdatasync(fd))
	d := open(t, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	must(t, unix.Fsync(d))
	must(t, unix.Syncfs(d))
}

func mapping(t *testing.T, fd, length, prot, flags int) []byte {
	t.Helper()
	m, err := unix.Mmap(fd, 0, length, prot, flags)
	must(t, err)
	t.Cleanup(func() { unix.Munmap(m) })
	return m
}

func mmapShared(t *testing.T, dir string) {
	const size = 3 * 4096
	write(t, dir+"/f", strings.Repeat("a", size))
	fd := open(t, dir+"/f", unix.O_RDWR)
	m := mapping(t, fd, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if m[5000] != 'a' {
		t.Fatalf("maps %q", m[5000])
	}
	pwrite(t, fd, "written", 5000) // seen through the mapping
	if got := string(m[5000:5007]); got != "written" {
		t.Errorf("the mapping shows %q", got)
	}
	copy(m[8192:], "mapped") // seen by read, before and after it is written back
	if got := pread(t, fd, 6, 8192); got != "mapped" {
		t.Errorf("read shows %q", got)
	}
	must(t, unix.Msync(m, unix.MS_SYNC))
	other := open(t, dir+"/f", unix.O_RDONLY)
	if got := pread(t, other, 6, 8192); got != "mapped" {
		t.Errorf("after msync another descriptor reads %q", got)
	}
	copy(m[100:], "last words")
	must(t, unix.Munmap(m))
	if got := read(t, dir+"/f")[100:110]; got != "last words" {
		t.Errorf("after munmap it reads %q", got)
	}
	// A mapping outlives descriptor and name.
	fd2 := open(t, dir+"/g", unix.O_CREAT|unix.O_RDWR)
	must(t, unix.Ftruncate(fd2, size))
	n := mapping(t, fd2, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, unix.Unlink(dir+"/g"))
	n[0], n[size-1] = 1, 2
	must(t, unix.Msync(n, unix.MS_SYNC))
	if n[0] != 1 || n[size-1] != 2 || n[4096] != 0 {
		t.Error("the mapping of an unlinked file lost its bytes")
	}
}

func mmapPrivate(t *testing.T, dir string) {
	write(t, dir+"/f", strings.Repeat("a", 8192))
	fd := open(t, dir+"/f", unix.O_RDONLY)
	m := mapping(t, fd, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	copy(m, "mine")
	if got := read(t, dir+"/f")[:4]; got != "aaaa" {
		t.Errorf("a private write reached the file: %q", got)
	}
}

func execFile(t *testing.T, dir string) {
	in, err := os.Open("/bin/sh")
	must(t, err)
	defer in.Close()
	p := dir + "/sh"
	out, err := os.OpenFile(p, os.O_CREATE|os.O_WRONLY, 0o755)
	must(t, err)
	_, err = io.Copy(out, in)
	must(t, errors.Join(err, out.Close()))
	got, err := exec.Command(p, "-c", "echo ran").Output()
	if err != nil || string(got) != "ran\n" {
		t.Errorf("%q, %v", got, err)
	}
	write(t, dir+"/script", "#!"+p+"\necho script\n")
	must(t, unix.Chmod(dir+"/script", 0o755))
	got, err = exec.Command(dir + "/script").Output()
	if err != nil || string(got) != "script\n" {
		t.Errorf("%q, %v", got, err)
	}
}

func locks(t *testing.T, dir string) {
	write(t, dir+"/f", "0123456789")
	a, b := open(t, dir+"/f", unix.O_RDWR), open(t, dir+"/f", unix.O_RDWR)
	must(t, unix.Flock(a, unix.LOCK_EX))
	want(t, "a second flock", unix.Flock(b, unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
	must(t, unix.Flock(a, unix.LOCK_UN))
	must(t, unix.Flock(b, unix.LOCK_EX|unix.LOCK_NB))
	lk := unix.Flock_t{Type: unix.F_WRLCK, Start: 2, Len: 3}
	must(t, unix.FcntlFlock(uintptr(a), unix.F_OFD_SETLK, &lk))
	over := unix.Flock_t{Type: unix.F_RDLCK, Start: 4, Len: 4}
	want(t, "an overlapping lock", unix.FcntlFlock(uintptr(b), unix.F_OFD_SETLK, &over), unix.EAGAIN)
	beside := unix.Flock_t{Type: unix.F_RDLCK, Start: 5, Len: 4}
	must(t, unix.FcntlFlock(uintptr(b), unix.F_OFD_SETLK, &beside))
}

func chmod(t *testing.T, dir string) {
	write(t, dir+"/f", "")
	for _, m := range []uint32{0o000, 0o4755, 0o2755, 0o1777, 0o644} {
		must(t, unix.Chmod(dir+"/f", m))
		if got := stat(t, dir+"/f").Mode & 0o7777; got != m {
			t.Errorf("mode %o, want %o", got, m)
		}
	}
	before := stat(t, dir+"/f")
	must(t, unix.Chmod(dir+"/f", 0o600))
	if after := stat(t, dir+"/f"); after.Mtim != before.Mtim {
		t.Error("chmod changed the modification time")
	}
}

// chown skips the test where the user namespace has only one id.
func chown(t *testing.T, path string, uid, gid int) {
	t.Helper()
	err := unix.Chown(path, uid, gid)
	if errors.Is(err, unix.EINVAL) {
		t.Skipf("this user namespace does not have the ids %d:%d", uid, gid)
	}
	must(t, err)
}

func chownKillsSetID(t *testing.T, dir string) {
	if os.Geteuid() != 0 {
		t.Skip("only root can change owners")
	}
	write(t, dir+"/f", "")
	must(t, unix.Chmod(dir+"/f", 0o6755))
	chown(t, dir+"/f", 12, 34)
	if st := stat(t, dir+"/f"); st.Uid != 12 || st.Gid != 34 || st.Mode&0o7777 != 0o755 {
		t.Errorf("owner %d:%d, mode %o", st.Uid, st.Gid, st.Mode&0o7777)
	}
	must(t, unix.Lchown(dir+"/f", -1, 56))
	if st := stat(t, dir+"/f"); st.Uid != 12 || st.Gid != 56 {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
}

func setGIDDirectory(t *testing.T, dir string) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a directory to a group it is not in")
	}
	must(t, unix.Mkdir(dir+"/d", 0o755))
	chown(t, dir+"/d", 0, 77)
	must(t, unix.Chmod(dir+"/d", 0o2775))
	write(t, dir+"/d/f", "")
	must(t, unix.Mkdir(dir+"/d/sub", 0o755))
	if g := stat(t, dir+"/d/f").Gid; g != 77 {
		t.Errorf("a file there has group %d", g)
	}
	if st := stat(t, dir+"/d/sub"); st.Gid != 77 || st.Mode&unix.S_ISGID == 0 {
		t.Errorf("a directory there has group %d, mode %o", st.Gid, st.Mode)
	}
}

func umask(t *testing.T, dir string) {
	old := unix.Umask(0o027)
	defer unix.Umask(old)
	must(t, unix.Mkdir(dir+"/d", 0o777))
	fd, err := unix.Open(dir+"/f", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o666)
	must(t, err)
	unix.Close(fd)
	must(t, unix.Mkfifo(dir+"/p", 0o666))
	for name, mode := range map[string]uint32{"d": 0o750, "f": 0o640, "p": 0o640} {
		if got := stat(t, dir+"/"+name).Mode & 0o7777; got != mode {
			t.Errorf("%s has mode %o, want %o", name, got, mode)
		}
	}
	unix.Umask(0)
	must(t, unix.Mkdir(dir+"/all", 0o1777))
	if got := stat(t, dir+"/all").Mode & 0o7777; got != 0o1777 {
		t.Errorf("mode %o without a umask", got)
	}
}

// later reports whether a is at or after b, and after it when strict.
func later(a, b unix.Timespec, strict bool) bool {
	if a == b {
		return !strict
	}
	return a.Sec > b.Sec || a.Sec == b.Sec && a.Nsec > b.Nsec
}

func times(t *testing.T, dir string) {
	p := dir + "/f"
	write(t, p, "x")
	for _, ts := range []unix.Timespec{{Sec: 1, Nsec: 123456789}, {Sec: -2, Nsec: 5}, {Sec: 1 << 33}} {
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, ts}, 0))
		if got := stat(t, p).Mtim; got != ts {
			t.Errorf("mtime %v, want %v", got, ts)
		}
	}
	old := stat(t, p)
	fd := open(t, p, unix.O_WRONLY)
	pwrite(t, fd, "y", 0)
	if st := stat(t, p); st.Mtim == old.Mtim || !later(st.Ctim, old.Ctim, false) {
		t.Errorf("after a write: mtime %v, ctime %v", st.Mtim, st.Ctim)
	}
	past := []unix.Timespec{{Sec: 1}, {Sec: 1}}
	parent := func(what string, do func() error) {
		t.Helper()
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, dir, past, 0))
		must(t, do())
		if m := stat(t, dir).Mtim; m.Sec <= 1 {
			t.Errorf("%s left the directory's mtime alone", what)
		}
	}
	parent("create", func() error { return unix.Mknod(dir+"/n", unix.S_IFREG|0o644, 0) })
	parent("link", func() error { return unix.Link(dir+"/n", dir+"/l") })
	parent("rename", func() error { return unix.Rename(dir+"/n", dir+"/m") })
	parent("unlink", func() error { return unix.Unlink(dir + "/m") })
	parent("mkdir", func() error { return unix.Mkdir(dir+"/d", 0o755) })
	parent("rmdir", func() error { return unix.Rmdir(dir + "/d") })
	parent("symlink", func() error { return unix.Symlink("x", dir+"/s") })
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, dir+"/s", past, unix.AT_SYMLINK_NOFOLLOW))
	if m := stat(t, dir+"/s").Mtim; m.Sec != 1 {
		t.Errorf("a symlink's mtime is %v", m)
	}
	before := stat(t, p).Ctim
	must(t, unix.Chmod(p, 0o600))
	if after := stat(t, p).Ctim; !later(after, before, false) {
		t.Errorf("chmod moved ctime from %v back to %v", before, after)
	}
}

func statFS(t *testing.T, dir string) {
	var st unix.Statfs_t
	must(t, unix.Statfs(dir, &st))
	if st.Bsize <= 0 || st.Blocks == 0 || st.Bavail > st.Blocks || st.Namelen != 255 {
		t.Errorf("block size %d, %d of %d free, names of %d", st.Bsize, st.Bavail, st.Blocks, st.Namelen)
	}
}

func xattrs(t *testing.T, dir string) {
	p := dir + "/f"
	write(t, p, "")
	err := unix.Setxattr(p, "user.one", []byte("1"), 0)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("no user xattrs on this file system")
	}
	must(t, err)
	must(t, unix.Setxattr(p, "user.two", []byte{0, 1, 0xff}, 0))
	must(t, unix.Setxattr(p, "user.empty", nil, 0))
	value := func(name string) []byte {
		t.Helper()
		b := make([]byte, 100)
		n, err := unix.Getxattr(p, name, b)
		must(t, err)
		return b[:n]
	}
	if v := value("user.two"); !slices.Equal(v, []byte{0, 1, 0xff}) {
		t.Errorf("user.two is %v", v)
	}
	if v := value("user.empty"); len(v) != 0 {
		t.Errorf("user.empty is %v", v)
	}
	want(t, "create of one that is there", unix.Setxattr(p, "user.one", nil, unix.XATTR_CREATE), unix.EEXIST)
	want(t, "replace of one that is not", unix.Setxattr(p, "user.none", nil, unix.XATTR_REPLACE), unix.ENODATA)
	_, err = unix.Getxattr(p, "user.none", make([]byte, 10))
	want(t, "get of one that is not there", err, unix.ENODATA)
	_, err = unix.Getxattr(p, "user.two", make([]byte, 1))
	want(t, "a buffer too small", err, unix.ERANGE)
	n, err := unix.Getxattr(p, "user.two", nil)
	if n != 3 || err != nil {
		t.Errorf("asked for the size: %d, %v", n, err)
	}
	b := make([]byte, 1000)
	n, err = unix.Listxattr(p, b)
	must(t, err)
	got := strings.Split(strings.TrimSuffix(string(b[:n]), "\x00"), "\x00")
	got = slices.DeleteFunc(got, func(s string) bool { return !strings.HasPrefix(s, "user.") })
	slices.Sort(got)
	if !slices.Equal(got, []string{"user.empty", "user.one", "user.two"}) {
		t.Errorf("listed are %q", got)
	}
	must(t, unix.Removexattr(p, "user.one"))
	want(t, "removing it again", unix.Removexattr(p, "user.one"), unix.ENODATA)
	// An inode's attributes go along when it is renamed and linked.
	must(t, unix.Rename(p, dir+"/g"))
	must(t, unix.Link(dir+"/g", p))
	if v := value("user.two"); len(v) != 3 {
		t.Errorf("after a rename user.two is %v", v)
	}
}
