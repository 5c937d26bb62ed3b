package importer

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/fs/tree"
)

// identity tells inodes of the host apart.
type identity struct{ dev, ino uint64 }

// meta is what statx says of an inode.
type meta struct {
	identity
	mode   uint32 // with the type
	uid    uint32
	gid    uint32
	nlink  uint32
	rdev   uint32
	size   uint64
	blocks uint64 // of 512 bytes
	mtime  tree.Time
	ctime  tree.Time
}

// same reports whether an inode is as it was. Its access time and the number of
// its names may differ: other names may lie outside of the directory.
func (m meta) same(o meta) bool {
	return m.identity == o.identity && m.mode == o.mode && m.size == o.size &&
		m.mtime == o.mtime && m.ctime == o.ctime
}

func (m meta) kind() tree.Kind {
	switch m.mode & unix.S_IFMT {
	case unix.S_IFREG:
		return tree.File
	case unix.S_IFDIR:
		return tree.Dir
	case unix.S_IFLNK:
		return tree.Symlink
	case unix.S_IFCHR:
		return tree.Char
	case unix.S_IFBLK:
		return tree.Block
	case unix.S_IFIFO:
		return tree.Fifo
	case unix.S_IFSOCK:
		return tree.Socket
	}
	return 0
}

// sparse reports whether the inode may have holes.
func (m meta) sparse() bool { return m.blocks*512 < m.size }

// stat looks at name in the directory dirfd, or at dirfd itself for "".
func stat(dirfd int, name string) (meta, error) {
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_EMPTY_PATH
	var st unix.Statx_t
	err := retry(func() error { return unix.Statx(dirfd, name, flags, unix.STATX_BASIC_STATS, &st) })
	if err != nil {
		return meta{}, err
	}
	return meta{
		identity: identity{dev: unix.Mkdev(st.Dev_major, st.Dev_minor), ino: st.Ino},
		mode:     uint32(st.Mode), uid: st.Uid, gid: st.Gid, nlink: st.Nlink,
		rdev: uint32(unix.Mkdev(st.Rdev_major, st.Rdev_minor)),
		size: st.Size, blocks: st.Blocks,
		mtime: tree.Time{Sec: st.Mtime.Sec, Nsec: st.Mtime.Nsec},
		ctime: tree.Time{Sec: st.Ctime.Sec, Nsec: st.Ctime.Nsec},
	}, nil
}

func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// openAt opens name in the directory dirfd without following a link, waiting
// for the other end of a pipe, or becoming visible to programs started
// meanwhile.
func openAt(dirfd int, name string, flags int) (fd int, err error) {
	err = retry(func() error {
		fd, err = unix.Openat(dirfd, name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		return err
	})
	return fd, err
}

// swapped reports whether err is what a name gives that stood for something
// else, or for something, a moment ago.
func swapped(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO)
}

// dir is an open directory, shared by those who have yet to open something in
// it.
type dir struct {
	fd   int
	node *node
	refs atomic.Int32
}

func newDir(fd int, n *node) *dir {
	d := &dir{fd: fd, node: n}
	d.refs.Store(1)
	return d
}

func openRoot(path string) (*dir, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return newDir(fd, nil), nil
}

func (d *dir) hold() *dir {
	d.refs.Add(1)
	return d
}

// release gives one hold up; the last closes the directory, after final has
// looked at it once more.
func (d *dir) release(final func(d *dir)) {
	if d.refs.Add(-1) > 0 {
		return
	}
	if final != nil {
		final(d)
	}
	_ = d.close() // it was only read
}

func (d *dir) close() error { return unix.Close(d.fd) }

// names lists the directory, sorted.
func (d *dir) names() ([]string, error) {
	var names []string
	buf := make([]byte, 64<<10)
	for {
		var n int
		err := retry(func() (err error) {
			n, err = unix.ReadDirent(d.fd, buf)
			return err
		})
		if err != nil {
			return nil, err
		}
		if n == 0 {
			slices.Sort(names)
			return names, nil
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

func readlink(dirfd int, name string) (string, error) {
	buf := make([]byte, tree.MaxLink+1)
	var n int
	err := retry(func() (err error) {
		n, err = unix.Readlinkat(dirfd, name, buf)
		return err
	})
	if err != nil {
		return "", err
	}
	if n > tree.MaxLink {
		return "", fmt.Errorf("target of more than %d bytes: %w", tree.MaxLink, tree.ErrNameTooLong)
	}
	return string(buf[:n]), nil
}

// hostFile is an open file of the host.
type hostFile struct{ fd int }

// ReadAt implements io.ReaderAt.
func (f hostFile) ReadAt(p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		var n int
		err := retry(func() (err error) {
			n, err = unix.Pread(f.fd, p[done:], off+int64(done))
			return err
		})
		if err != nil {
			return done, err
		}
		if n == 0 {
			return done, io.EOF
		}
		done += n
	}
	return done, nil
}

// data lists the ranges of a file that hold data.
func (f hostFile) data(size uint64) ([]tree.Range, error) {
	ranges := []tree.Range{}
	for off := int64(0); uint64(off) < size; {
		start, err := unix.Seek(f.fd, off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break
		}
		if err != nil {
			return nil, err
		}
		end, err := unix.Seek(f.fd, start, unix.SEEK_HOLE)
		if err != nil {
			return nil, err
		}
		if end = min(end, int64(size)); start >= end {
			break
		}
		ranges = append(ranges, tree.Range{Start: uint64(start), End: uint64(end)})
		off = end
	}
	return ranges, nil
}

func (f hostFile) close() { _ = unix.Close(f.fd) } // it was only read

// xattrsOf reads the attributes of an inode of any kind but a symbolic link,
// which has none of those that are kept. The kernel offers attributes of
// special files by path only, and its path of an open descriptor leads to no
// other file.
func xattrsOf(fd int, kind tree.Kind, ids idMap) ([]tree.Xattr, error) {
	list := func(b []byte) (int, error) { return unix.Flistxattr(fd, b) }
	get := func(name string, b []byte) (int, error) { return unix.Fgetxattr(fd, name, b) }
	if kind != tree.File && kind != tree.Dir {
		path := "/proc/self/fd/" + strconv.Itoa(fd)
		list = func(b []byte) (int, error) { return unix.Listxattr(path, b) }
		get = func(name string, b []byte) (int, error) { return unix.Getxattr(path, name, b) }
	}
	names, err := grown(list)
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list attributes: %w", err)
	}
	var out []tree.Xattr
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		if !keptXattr(name) {
			continue
		}
		value, err := grown(func(b []byte) (int, error) { return get(name, b) })
		if errors.Is(err, unix.ENODATA) {
			continue // its removal shows in the change time
		}
		if err != nil {
			return nil, fmt.Errorf("attribute %q: %w", name, err)
		}
		if strings.HasPrefix(name, aclPrefix) {
			ids.mapACL(value)
		}
		out = append(out, tree.Xattr{Name: name, Value: value})
	}
	slices.SortFunc(out, func(a, b tree.Xattr) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

const aclPrefix = "system.posix_acl_"

// keptXattr says which attributes belong to the content of a tree; the others
// are the host's own affair.
func keptXattr(name string) bool {
	return strings.HasPrefix(name, "user.") || strings.HasPrefix(name, aclPrefix) || name == "security.capability"
}

// grown calls a function that fills a buffer or says ERANGE with buffers large
// enough.
func grown(call func(b []byte) (int, error)) ([]byte, error) {
	for size := 256; ; size *= 4 {
		b := make([]byte, size)
		n, err := call(b)
		if err == unix.ERANGE && size <= 4*tree.MaxXattrValue {
			continue
		}
		if err == unix.EINTR {
			size /= 4
			continue
		}
		if err != nil {
			return nil, err
		}
		return bytes.Clone(b[:n]), nil
	}
}

// idMap turns the host's ids into those inside a session.
type idMap struct{ uid, gid uint32 } // what become 0

func (m idMap) user(id uint32) uint32 {
	if id == m.uid {
		return 0
	}
	return id
}

func (m idMap) group(id uint32) uint32 {
	if id == m.gid {
		return 0
	}
	return id
}

// mapACL maps the ids in the value of a POSIX ACL attribute in place: a version
// word, then entries of tag u16, permissions u16, id u32, all little endian.
func (m idMap) mapACL(value []byte) {
	const (
		head  = 4
		entry = 8
		user  = 0x02
		group = 0x08
	)
	for off := head; off+entry <= len(value); off += entry {
		id := binary.LittleEndian.Uint32(value[off+4:])
		switch binary.LittleEndian.Uint16(value[off:]) {
		case user:
			id = m.user(id)
		case group:
			id = m.group(id)
		default:
			continue
		}
		binary.LittleEndian.PutUint32(value[off+4:], id)
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
