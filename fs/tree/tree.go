// Package tree holds the words every other room speaks: inode numbers, names,
// attributes, and the sentinel errors a tree answers with. It is a leaf and
// imports nothing of ours.
//
// A tree here is two tables. Directory entries map (directory inode, name) to
// an inode number; inodes map that number to attributes and content. An inode
// number is allotted once in a sandbox's life and never reused, so it serves as
// the identity of a file across sessions, renames, commits and restarts.
package tree

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Ino is a persistent inode number. Zero means "none".
type Ino uint64

// RootIno is the inode number of every tree's root directory.
const RootIno Ino = 1

// Op numbers an operation (a command, a file edit, a publish) within one
// session. Zero means the operation is not known. The session keeps the table
// from Op to operation id.
type Op uint32

// Hash identifies the content of a regular file of any size. Without holes it
// is the SHA-256 of the bytes. With holes it is the SHA-256 of
//
//	"sparse-content\n" | u64 size | for each data range: u64 start | u64 end | its bytes
//
// with little-endian numbers and ranges as DataRanges gives them, so that a hole
// costs nothing however long it is. Two files that read alike but have their
// holes in different places have different hashes. HashContent and
// ContentHasher compute it.
type Hash [32]byte

// Kind is the type of an inode.
type Kind uint8

// The seven inode types. The numbers are part of the layer format.
const (
	File    Kind = 1
	Dir     Kind = 2
	Symlink Kind = 3
	Char    Kind = 4
	Block   Kind = 5
	Fifo    Kind = 6
	Socket  Kind = 7
)

var kindNames = [...]string{"none", "file", "dir", "symlink", "char", "block", "fifo", "socket"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Valid reports whether k is one of the seven types.
func (k Kind) Valid() bool { return k >= File && k <= Socket }

// Time is a wall-clock instant with nanoseconds, wide enough for any date a
// file system can hold.
type Time struct {
	Sec  int64
	Nsec uint32
}

// At converts a time.Time.
func At(t time.Time) Time { return Time{Sec: t.Unix(), Nsec: uint32(t.Nanosecond())} }

// Std converts back to a time.Time in UTC.
func (t Time) Std() time.Time { return time.Unix(t.Sec, int64(t.Nsec)).UTC() }

// Before reports whether t is earlier than u.
func (t Time) Before(u Time) bool {
	return t.Sec < u.Sec || t.Sec == u.Sec && t.Nsec < u.Nsec
}

// Attr is what stat(2) shows of an inode. UID and GID are ids inside the
// session's user namespace.
type Attr struct {
	Ino   Ino
	Kind  Kind
	Mode  uint32 // permission bits, set-id bits and sticky bit: 07777
	UID   uint32
	GID   uint32
	Nlink uint32
	Size  uint64 // bytes; a symlink's is the length of its target
	Alloc uint64 // bytes that hold data, holes not counted
	Rdev  uint32 // Linux encoding of the device number, for Char and Block
	Mtime Time
	Ctime Time
}

// Xattr is one extended attribute with its full name ("user.x").
type Xattr struct {
	Name  string
	Value []byte
}

// Inode is everything an inode has but its bytes.
type Inode struct {
	Attr
	Link   string  // target, for Symlink
	Xattrs []Xattr // sorted by name; nil when there are none
	Hash   Hash    // content hash, for File; zero when not yet computed
}

// Dirent is one name in one directory.
type Dirent struct {
	Dir  Ino
	Name string
	Ino  Ino
	Kind Kind
}

// Range is a half-open interval of byte offsets [Start, End).
type Range struct{ Start, End uint64 }

// Limits of the model; readers refuse what is beyond them.
const (
	MaxName       = 255
	MaxLink       = 4095
	MaxXattrName  = 255
	MaxXattrValue = 64 << 10
	MaxFileSize   = 1 << 60
)

// What a tree answers. Callers test with errors.Is; fs/fusefs alone turns them
// into errnos.
var (
	ErrNotExist    = errors.New("no such file or directory")
	ErrExist       = errors.New("file exists")
	ErrNotDir      = errors.New("not a directory")
	ErrIsDir       = errors.New("is a directory")
	ErrNotEmpty    = errors.New("directory not empty")
	ErrInvalid     = errors.New("invalid argument")
	ErrNameTooLong = errors.New("file name too long")
	ErrNoXattr     = errors.New("no such attribute")
	ErrRange       = errors.New("result too large for the buffer")
	ErrNoSpace     = errors.New("no space left")
	ErrQuota       = errors.New("quota exceeded")
	ErrTooBig      = errors.New("file too large")
	ErrPerm        = errors.New("operation not permitted")
	ErrNotSup      = errors.New("operation not supported")
	ErrStale       = errors.New("inode is gone")
	ErrNoData      = errors.New("no data at or after the offset")
	ErrTooManyLink = errors.New("too many links")
)

// CheckName returns nil when name may stand in a directory: 1 to 255 bytes,
// no slash, no NUL, not "." or "..".
func CheckName(name string) error {
	switch {
	case name == "" || name == "." || name == "..":
		return fmt.Errorf("name %q: %w", name, ErrInvalid)
	case len(name) > MaxName:
		return fmt.Errorf("name of %d bytes: %w", len(name), ErrNameTooLong)
	case strings.ContainsAny(name, "/\x00"):
		return fmt.Errorf("name %q holds a slash or NUL: %w", name, ErrInvalid)
	}
	return nil
}

// SplitPath cleans a path relative to a tree's root and returns its names. A
// leading slash, doubled slashes and "." are dropped; ".." is refused, because
// a tree has no outside. The root is the empty list.
func SplitPath(path string) ([]string, error) {
	var names []string
	for part := range strings.SplitSeq(path, "/") {
		if part == "" || part == "." {
			continue
		}
		if err := CheckName(part); err != nil {
			return nil, fmt.Errorf("path %q: %w", path, err)
		}
		names = append(names, part)
	}
	return names, nil
}
