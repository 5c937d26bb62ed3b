package fstest

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// want checks that err is the errno.
func want(t *testing.T, what string, err error, errno unix.Errno) {
	t.Helper()
	if !errors.Is(err, errno) {
		t.Errorf("%s: %v, want %v", what, err, errno)
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(content), 0o644))
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

func stat(t *testing.T, path string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatalf("lstat %s: %v", path, err)
	}
	return st
}

// open opens with the close-on-exec flag and closes at the end of the test.
func open(t *testing.T, path string, flags int) int {
	t.Helper()
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o644)
	if err != nil {
		t.Fatalf("open %s: %v", path, err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func fstat(t *testing.T, fd int) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Fstat(fd, &st))
	return st
}

func pread(t *testing.T, fd, n int, off int64) string {
	t.Helper()
	b := make([]byte, n)
	got, err := unix.Pread(fd, b, off)
	must(t, err)
	return string(b[:got])
}

func pwrite(t *testing.T, fd int, s string, off int64) {
	t.Helper()
	n, err := unix.Pwrite(fd, []byte(s), off)
	must(t, err)
	if n != len(s) {
		t.Fatalf("wrote %d of %d bytes", n, len(s))
	}
}

// entry is one record of getdents64.
type entry struct {
	name string
	ino  uint64
	kind byte
	off  int64
}

// getdents reads one buffer of entries, "." and ".." included.
func getdents(t *testing.T, fd, size int) []entry {
	t.Helper()
	buf := make([]byte, size)
	n, err := unix.Getdents(fd, buf)
	must(t, err)
	var out []entry
	for b := buf[:n]; len(b) > 0; {
		e, length := parseEntry(b)
		out = append(out, e)
		b = b[length:]
	}
	return out
}

// parseEntry takes a struct linux_dirent64 apart.
func parseEntry(b []byte) (entry, int) {
	u64 := func(b []byte) (v uint64) {
		for i := range 8 {
			v |= uint64(b[i]) << (8 * i) // little endian, as all machines this runs on
		}
		return v
	}
	length := int(b[16]) | int(b[17])<<8
	name := b[19:length]
	if i := slices.Index(name, 0); i >= 0 {
		name = name[:i]
	}
	return entry{name: string(name), ino: u64(b), off: int64(u64(b[8:])), kind: b[18]}, length
}

// list reads a directory from where its descriptor stands to the end, without
// "." and "..".
func list(t *testing.T, fd int) []entry {
	t.Helper()
	var out []entry
	for {
		es := getdents(t, fd, 8<<10)
		if len(es) == 0 {
			return out
		}
		for _, e := range es {
			if e.name != "." && e.name != ".." {
				out = append(out, e)
			}
		}
	}
}

// listNames is the sorted listing of a directory.
func listNames(t *testing.T, dir string) []string {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(fd)
	var out []string
	for _, e := range list(t, fd) {
		out = append(out, e.name)
	}
	slices.Sort(out)
	return out
}

func wantNames(t *testing.T, dir string, names ...string) {
	t.Helper()
	slices.Sort(names)
	if got := listNames(t, dir); !slices.Equal(got, names) {
		t.Errorf("%s holds %q, want %q", filepath.Base(dir), got, names)
	}
}

func absent(t *testing.T, path string) {
	t.Helper()
	var st unix.Stat_t
	want(t, "lstat "+filepath.Base(path), unix.Lstat(path, &st), unix.ENOENT)
}
