// Package layerfmt reads and writes packs, the sealed files that layers are
// kept in. The bytes are described in docs/layer-format.md, which is the law;
// this package is one reading of it.
//
// A pack holds two keyed trees: dirents, by (directory inode, name), and
// inodes, by inode number. Beside them lie the compressed bytes of files and
// any number of named sections that mean nothing to this package. A pack is a
// pure function of its content: it knows neither its parents, nor its time of
// writing, nor its place in a stack, and equal calls on a Writer give equal
// bytes whatever the number of workers.
//
// A Reader answers with the right bytes or with a CorruptError that names the
// layer, the section and the offset. Every page and every frame carries a
// checksum that is checked when it is loaded; Verify checks all of them, and
// the hash of every file, at once.
//
// A Reader, a File and a FrameCache may be used by any number of goroutines.
// A Writer belongs to one goroutine at a time. No lock of this package is held
// while the underlying file is read.
package layerfmt

import (
	"encoding/hex"
	"fmt"

	"ephemeral-sandbox/fs/tree"
)

// PackID identifies a pack by its content: a SHA-256 over header and table of
// contents, which in turn hold a hash of every section.
type PackID [32]byte

// String is the id in lower-case hexadecimal, 64 digits.
func (id PackID) String() string { return hex.EncodeToString(id[:]) }

// ParsePackID reads the form that String writes.
func ParsePackID(s string) (PackID, error) {
	var id PackID
	if len(s) != 2*len(id) {
		return id, fmt.Errorf("pack id %q: want %d hexadecimal digits", s, 2*len(id))
	}
	if _, err := hex.Decode(id[:], []byte(s)); err != nil {
		return PackID{}, fmt.Errorf("pack id %q: %w", s, err)
	}
	return id, nil
}

// PackKind says what a pack was written as. It changes how small files are
// grouped and nothing about how a pack is read.
type PackKind uint8

// The kinds. The numbers are part of the format.
const (
	Base  PackKind = 1 // a whole tree: small files share frames
	Delta PackKind = 2 // the changes of one commit: a frame a file
)

// DirentOp says what a dirent record does to its name.
type DirentOp uint8

// The operations of a dirent record.
const (
	Put      DirentOp = iota // the name stands for Ino
	Whiteout                 // the name is hidden in every layer beneath
	Opaque                   // every name of the directory is hidden in every layer beneath
)

func (o DirentOp) String() string {
	switch o {
	case Put:
		return "put"
	case Whiteout:
		return "whiteout"
	case Opaque:
		return "opaque"
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// Dirent is one record of the dirent tree. A whiteout has a Dir and a Name, an
// opaque record only a Dir; both have Ino and Kind zero.
type Dirent struct {
	Op DirentOp
	tree.Dirent
}

// ContentKind says where the bytes of an inode are.
type ContentKind uint8

// The places of content.
const (
	None    ContentKind = iota // not a regular file, or an empty one
	Here                       // in this pack
	Foreign                    // in another pack, named by Inode.Pack
)

func (c ContentKind) String() string {
	switch c {
	case None:
		return "none"
	case Here:
		return "here"
	case Foreign:
		return "foreign"
	}
	return fmt.Sprintf("content(%d)", uint8(c))
}

// Inode is one record of the inode tree.
type Inode struct {
	tree.Inode
	Content ContentKind
	// Pack is the pack that holds the bytes of a Foreign inode. They are there
	// under the same inode number, or under FromIno when that is not zero.
	Pack    PackID
	FromIno tree.Ino

	loc location
}

// Info sums a pack up.
type Info struct {
	ID           PackID
	Kind         PackKind
	Dirents      int // names put
	Whiteouts    int
	Opaques      int
	Inodes       int
	LogicalBytes int64 // sizes of the files whose bytes are here
	StoredBytes  int64 // length of the pack
	MaxIno       tree.Ino
}
