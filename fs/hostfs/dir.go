package hostfs

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	fileMode = 0o600
	dirMode  = 0o700
)

// Dir is a directory on the host's disk. Every name is resolved from its
// descriptor and may not leave it, so that renaming the directory or planting a
// symbolic link in it redirects nothing.
type Dir struct {
	root *os.Root
}

var _ FS = (*Dir)(nil)

// OpenDir opens an existing directory.
func OpenDir(name string) (*Dir, error) {
	root, err := os.OpenRoot(name)
	if err != nil {
		return nil, fmt.Errorf("open directory %s: %w", name, err)
	}
	return &Dir{root: root}, nil
}

// MakeDir makes the directory name, durable in its parent and readable by its
// owner only, and opens it. made is false when it was there already.
func MakeDir(name string) (d *Dir, made bool, err error) {
	switch err := os.Mkdir(name, dirMode); {
	case err == nil:
		made = true
	case !errors.Is(err, fs.ErrExist):
		return nil, false, fmt.Errorf("make directory %s: %w", name, err)
	}
	if made {
		if err := syncParent(name); err != nil {
			return nil, true, errors.Join(err, os.Remove(name))
		}
	}
	d, err = OpenDir(name)
	return d, made, err
}

func syncParent(name string) error {
	abs, err := filepath.Abs(name)
	if err != nil {
		return fmt.Errorf("sync the parent of %s: %w", name, err)
	}
	parent, err := OpenDir(filepath.Dir(abs))
	if err != nil {
		return err
	}
	if err := parent.SyncDir("."); err != nil {
		return errors.Join(fmt.Errorf("sync the parent of %s: %w", name, err), parent.Close())
	}
	return parent.Close()
}

// Mkdir implements FS.
func (d *Dir) Mkdir(name string) error {
	err := d.root.Mkdir(name, dirMode)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, statErr := d.root.Lstat(name)
	if statErr != nil {
		return statErr
	}
	if !info.IsDir() {
		return err
	}
	return nil
}

// Open implements FS.
func (d *Dir) Open(name string) (File, error) { return d.open(name, os.O_RDONLY) }

// OpenWrite implements FS.
func (d *Dir) OpenWrite(name string) (File, error) { return d.open(name, os.O_RDWR) }

// Create implements FS.
func (d *Dir) Create(name string) (File, error) {
	return d.open(name, os.O_RDWR|os.O_CREATE|os.O_EXCL)
}

func (d *Dir) open(name string, flag int) (File, error) {
	f, err := d.root.OpenFile(name, flag, fileMode)
	if err != nil {
		return nil, err
	}
	return diskFile{f}, nil
}

// Temp implements FS.
func (d *Dir) Temp(dir string) (Temp, error) {
	f, err := d.root.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, fileMode)
	if err == nil {
		return &diskTemp{diskFile: diskFile{f}, dir: d}, nil
	}
	// Hosts without O_TMPFILE say so in one of these ways; EISDIR is what a
	// kernel too old to know the flag makes of it.
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EINVAL) {
		return nil, err
	}
	return d.namedTemp(dir)
}

func (d *Dir) namedTemp(dir string) (Temp, error) {
	name := path.Join(dir, rand.Text())
	f, err := d.root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return nil, err
	}
	return &diskTemp{diskFile: diskFile{f}, dir: d, name: name}, nil
}

// Rename implements FS.
func (d *Dir) Rename(from, to string) error { return d.root.Rename(from, to) }

// Remove implements FS.
func (d *Dir) Remove(name string) error { return d.root.Remove(name) }

// List implements FS.
func (d *Dir) List(dir string) ([]string, error) {
	f, err := d.root.Open(dir)
	if err != nil {
		return nil, err
	}
	names, err := f.Readdirnames(-1)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	sort.Strings(names)
	return names, err
}

// SyncDir implements FS.
func (d *Dir) SyncDir(dir string) error {
	f, err := d.root.Open(dir)
	if err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

// Lock implements FS with flock(2) on the directory itself, which the kernel
// drops with the last descriptor, however the process ends.
func (d *Dir) Lock() (io.Closer, error) {
	f, err := d.root.Open(".")
	if err != nil {
		return nil, err
	}
	err = control(f, func(fd int) error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrLocked
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Close implements FS.
func (d *Dir) Close() error { return d.root.Close() }

// diskFile adds to os.File what a commit asks of one.
type diskFile struct{ *os.File }

func (f diskFile) Size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (f diskFile) Sync() error {
	err := control(f.File, func(fd int) error {
		for {
			if err := unix.Fdatasync(fd); err != unix.EINTR {
				return err
			}
		}
	})
	if err != nil {
		return &fs.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
	}
	return nil
}

// diskTemp is an unnamed file, or on a host without those one under a random
// name that is not yet its own.
type diskTemp struct {
	diskFile
	dir    *Dir
	name   string // "" for an unnamed file
	linked bool
}

// Link implements Temp.
func (t *diskTemp) Link(name string) error {
	to, err := t.dir.root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	if t.name == "" {
		err = t.linkUnnamed(to, path.Base(name))
	} else {
		err = t.moveNamed(to, path.Base(name))
	}
	if closeErr := to.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return &fs.PathError{Op: "link", Path: name, Err: err}
	}
	t.linked = true
	return nil
}

// linkUnnamed goes through /proc because linking a bare descriptor takes a
// capability on older kernels.
func (t *diskTemp) linkUnnamed(to *os.File, base string) error {
	return control(t.File, func(fd int) error {
		return control(to, func(dirfd int) error {
			err := unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), dirfd, base, unix.AT_SYMLINK_FOLLOW)
			if err == unix.ENOENT {
				err = unix.Linkat(fd, "", dirfd, base, unix.AT_EMPTY_PATH)
			}
			return err
		})
	})
}

func (t *diskTemp) moveNamed(to *os.File, base string) error {
	from, err := t.dir.root.Open(path.Dir(t.name))
	if err != nil {
		return err
	}
	err = control(from, func(fromfd int) error {
		return control(to, func(tofd int) error {
			err := unix.Renameat2(fromfd, path.Base(t.name), tofd, base, unix.RENAME_NOREPLACE)
			if err != unix.EINVAL && err != unix.ENOSYS {
				return err
			}
			// No such flag on this file system. The directory's lock keeps other
			// writers out, so that looking first is enough.
			var st unix.Stat_t
			if err := unix.Fstatat(tofd, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != unix.ENOENT {
				if err == nil {
					err = unix.EEXIST
				}
				return err
			}
			return unix.Renameat(fromfd, path.Base(t.name), tofd, base)
		})
	})
	return errors.Join(err, from.Close())
}

// Close implements File; it discards a file that was never linked.
func (t *diskTemp) Close() error {
	err := t.File.Close()
	if t.name != "" && !t.linked {
		err = errors.Join(err, t.dir.Remove(t.name))
	}
	return err
}

// control runs fn with f's descriptor, which stays open meanwhile.
func control(f *os.File, fn func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	if ctlErr := conn.Control(func(fd uintptr) { err = fn(int(fd)) }); ctlErr != nil {
		return ctlErr
	}
	return err
}
