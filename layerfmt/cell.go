package layerfmt

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"ephemeral-sandbox/fs/tree"
)

// Limits that a writer keeps and a reader checks before it allocates.
const (
	chunkSize     = 128 << 10 // raw bytes of a frame at most
	maxFrames     = 1 << 32
	maxHeapRecord = 8 << 20
	maxXattrSet   = 1 << 20
	inlineLink    = 64
	maxInodeBody  = 512 // more than any inode's cell takes
	maxMode       = 0o7777
	maxNsec       = 999_999_999
)

// emptyHash is the content hash of every empty file; it is never written to.
var emptyHash = tree.Hash(sha256.Sum256(nil))

// The first byte of a dirent's value: an inode type for a put, or one of these.
const (
	cellWhiteout = 8
	cellOpaque   = 9
)

// The first byte of an inode's value.
const (
	inodeKindMask = 0x07 // inode type; 0 = this pack only names the inode
	inodeNamed    = 0x08
	inodeXattrs   = 0x10
	inodeCtime    = 0x20 // ctime differs from mtime and follows it
	inodeContent  = 0xc0 // for files; zero otherwise
)

// The values of the two content bits.
const (
	contentEmpty   = 0x00
	contentDense   = 0x40
	contentSparse  = 0x80
	contentForeign = 0xc0
)

// heapRef points to a record of the heap section. A length of zero is no
// record.
type heapRef struct{ off, len uint32 }

func (h heapRef) append(b []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(h.off)), uint64(h.len))
}

func (c *cursor) heapRef() heapRef {
	h := heapRef{off: uint32(c.uvMax(1<<32 - 1)), len: uint32(c.uvMax(maxHeapRecord))}
	if h.len == 0 {
		c.fail()
	}
	return h
}

// location says where in its pack a file's bytes lie.
type location struct {
	reader uint64  // the Reader that the inode came from
	frame  uint32  // first frame
	off    uint32  // in the first frame
	ranges heapRef // of a sparse file
}

func direntKey(b []byte, dir tree.Ino, name string) []byte {
	return append(binary.BigEndian.AppendUint64(b, uint64(dir)), name...)
}

func inodeKey(b []byte, ino tree.Ino) []byte {
	return binary.BigEndian.AppendUint64(b, uint64(ino))
}

func appendDirent(b []byte, d Dirent) []byte {
	switch d.Op {
	case Whiteout:
		return append(b, cellWhiteout)
	case Opaque:
		return append(b, cellOpaque)
	}
	return binary.AppendUvarint(append(b, uint8(d.Kind)), uint64(d.Ino))
}

// parseDirent decodes a dirent's value. The name is the caller's to fill in and
// to check.
func parseDirent(dir tree.Ino, emptyName bool, value []byte) (Dirent, bool) {
	c := cursor{b: value}
	d := Dirent{Dirent: tree.Dirent{Dir: dir}}
	switch op := c.u8(); op {
	case cellWhiteout:
		d.Op = Whiteout
	case cellOpaque:
		d.Op = Opaque
	default:
		d.Kind, d.Ino = tree.Kind(op), tree.Ino(c.uv())
		if !d.Kind.Valid() || d.Ino == 0 {
			c.fail()
		}
	}
	return d, c.done() && dir != 0 && emptyName == (d.Op == Opaque)
}

// inodeCell is the value of an inode's cell as it lies in the page.
type inodeCell struct {
	Inode
	stub   bool   // the pack names the inode but holds no attributes of it
	named  bool   // ref is valid
	ref    uint64 // the dirent that names it, the first in byte order
	xattrs heapRef
	link   heapRef // long target of a symlink
	dep    uint64  // foreign: index in the list of packs
}

// appendBody appends what stands between the name reference and the location
// of the bytes, and returns the cell's first byte without inodeNamed.
func (n *inodeCell) appendBody(b []byte) ([]byte, uint8) {
	tag := uint8(n.Kind)
	b = binary.AppendUvarint(b, uint64(n.Mode))
	b = binary.AppendUvarint(b, uint64(n.UID))
	b = binary.AppendUvarint(b, uint64(n.GID))
	b = binary.AppendUvarint(b, uint64(n.Nlink))
	b = appendTime(b, n.Mtime)
	if n.Ctime != n.Mtime {
		tag |= inodeCtime
		b = appendTime(b, n.Ctime)
	}
	if n.xattrs.len > 0 {
		tag |= inodeXattrs
		b = n.xattrs.append(b)
	}
	switch n.Kind {
	case tree.File:
		content := n.contentBits()
		tag |= content
		if content == contentEmpty {
			break
		}
		b = binary.AppendUvarint(b, n.Size)
		b = append(b, n.Hash[:]...)
		if content != contentDense {
			b = binary.AppendUvarint(b, n.Alloc)
		}
		switch content {
		case contentForeign:
			b = binary.AppendUvarint(b, n.dep)
			b = binary.AppendUvarint(b, uint64(n.FromIno))
		case contentSparse:
			b = n.loc.ranges.append(b)
		}
	case tree.Symlink:
		b = binary.AppendUvarint(b, n.Alloc)
		b = binary.AppendUvarint(b, n.Size)
		if n.Size <= inlineLink {
			b = append(b, n.Link...)
		} else {
			b = binary.AppendUvarint(b, uint64(n.link.off))
		}
	default:
		b = binary.AppendUvarint(b, n.Size)
		b = binary.AppendUvarint(b, n.Alloc)
		if hasRdev(n.Kind) {
			b = binary.AppendUvarint(b, uint64(n.Rdev))
		}
	}
	return b, tag
}

// appendPlace appends the location of a file's bytes, which ends the cell.
func (l location) appendPlace(b []byte) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(l.frame)), uint64(l.off))
}

func (n *inodeCell) contentBits() uint8 {
	switch {
	case n.Content == None:
		return contentEmpty
	case n.Content == Foreign:
		return contentForeign
	case n.loc.ranges.len > 0:
		return contentSparse
	}
	return contentDense
}

// parseInode decodes the value of the cell of inode ino. What lies in other
// sections (xattrs, a long target, the id of a foreign pack) is left as a
// reference.
func parseInode(ino tree.Ino, value []byte) (inodeCell, bool) {
	c := cursor{b: value}
	n := inodeCell{Inode: Inode{Inode: tree.Inode{Attr: tree.Attr{Ino: ino}}}}
	if ino == 0 {
		return n, false
	}
	tag := c.u8()
	if tag&inodeNamed != 0 {
		n.named, n.ref = true, c.uv()
	}
	if tag&inodeKindMask == 0 {
		n.stub = true
		return n, c.done() && tag == inodeNamed
	}
	n.Kind = tree.Kind(tag & inodeKindMask)
	n.Mode = uint32(c.uvMax(maxMode))
	n.UID = uint32(c.uvMax(1<<32 - 1))
	n.GID = uint32(c.uvMax(1<<32 - 1))
	n.Nlink = uint32(c.uvMax(1<<32 - 1))
	n.Mtime = c.time()
	n.Ctime = n.Mtime
	if tag&inodeCtime != 0 {
		if n.Ctime = c.time(); n.Ctime == n.Mtime {
			c.fail()
		}
	}
	if tag&inodeXattrs != 0 {
		n.xattrs = c.heapRef()
	}
	switch n.Kind {
	case tree.File:
		n.parseContent(&c, tag&inodeContent)
		return n, c.done()
	case tree.Symlink:
		n.Alloc = c.uv()
		if n.Size = c.uvMax(tree.MaxLink); n.Size == 0 {
			c.fail()
		}
		if n.Size <= inlineLink {
			n.Link = string(c.bytes(n.Size))
			if strings.Contains(n.Link, "\x00") {
				c.fail()
			}
		} else {
			n.link = heapRef{off: uint32(c.uvMax(1<<32 - 1)), len: uint32(n.Size)}
		}
	default:
		n.Size, n.Alloc = c.uv(), c.uv()
		if hasRdev(n.Kind) {
			n.Rdev = uint32(c.uvMax(1<<32 - 1))
		}
	}
	return n, c.done() && tag&inodeContent == 0
}

func (n *inodeCell) parseContent(c *cursor, content uint8) {
	if content == contentEmpty {
		n.Hash = emptyHash
		return
	}
	if n.Size = c.uvMax(tree.MaxFileSize); n.Size == 0 {
		c.fail()
	}
	copy(n.Hash[:], c.bytes(uint64(len(n.Hash))))
	n.Alloc = n.Size
	switch content {
	case contentForeign:
		n.Content = Foreign
		n.Alloc, n.dep, n.FromIno = c.uv(), c.uvMax(maxDeps-1), tree.Ino(c.uv())
		return
	case contentSparse:
		// A sparse file has a hole somewhere.
		if n.Alloc = c.uv(); n.Alloc >= n.Size {
			c.fail()
		}
		n.loc.ranges = c.heapRef()
	}
	n.Content = Here
	if n.Alloc == 0 {
		return
	}
	n.loc.frame = uint32(c.uvMax(maxFrames - 1))
	n.loc.off = uint32(c.uvMax(chunkSize - 1))
	// Bytes that span frames start at the first one's start.
	if n.loc.off > 0 && uint64(n.loc.off)+n.Alloc > chunkSize {
		c.fail()
	}
}

func hasRdev(k tree.Kind) bool { return k == tree.Char || k == tree.Block }

func appendTime(b []byte, t tree.Time) []byte {
	return binary.AppendUvarint(appendSV(b, t.Sec), uint64(t.Nsec))
}

func (c *cursor) time() tree.Time {
	return tree.Time{Sec: c.sv(), Nsec: uint32(c.uvMax(maxNsec))}
}

// checkInode says why an inode cannot be written, or nil.
func checkInode(n *tree.Inode) error {
	switch {
	case n.Ino == 0:
		return fmt.Errorf("inode number zero: %w", tree.ErrInvalid)
	case !n.Kind.Valid():
		return fmt.Errorf("inode %d: type %d: %w", n.Ino, n.Kind, tree.ErrInvalid)
	case n.Mode > maxMode:
		return fmt.Errorf("inode %d: mode %#o beyond %#o: %w", n.Ino, n.Mode, maxMode, tree.ErrInvalid)
	case n.Mtime.Nsec > maxNsec || n.Ctime.Nsec > maxNsec:
		return fmt.Errorf("inode %d: nanoseconds beyond a second: %w", n.Ino, tree.ErrInvalid)
	case n.Kind == tree.File && n.Size > tree.MaxFileSize:
		return fmt.Errorf("inode %d: %d bytes: %w", n.Ino, n.Size, tree.ErrTooBig)
	case n.Kind == tree.Symlink && !validLink(n.Link):
		return fmt.Errorf("inode %d: link target of %d bytes must have 1 to %d and no NUL: %w", n.Ino, len(n.Link), tree.MaxLink, tree.ErrInvalid)
	}
	return nil
}

func validLink(target string) bool {
	return target != "" && len(target) <= tree.MaxLink && !strings.Contains(target, "\x00")
}

// appendXattrs encodes a set that must be sorted by name.
func appendXattrs(b []byte, set []tree.Xattr) ([]byte, error) {
	b = binary.AppendUvarint(b, uint64(len(set)))
	for i, x := range set {
		switch {
		case !validXattrName(x.Name):
			return nil, fmt.Errorf("name %q: %w", x.Name, tree.ErrInvalid)
		case len(x.Value) > tree.MaxXattrValue:
			return nil, fmt.Errorf("%s has %d bytes, more than %d: %w", x.Name, len(x.Value), tree.MaxXattrValue, tree.ErrTooBig)
		case i > 0 && set[i-1].Name >= x.Name:
			return nil, fmt.Errorf("%s is not above %s: %w", x.Name, set[i-1].Name, tree.ErrInvalid)
		}
		b = append(binary.AppendUvarint(b, uint64(len(x.Name))), x.Name...)
		b = append(binary.AppendUvarint(b, uint64(len(x.Value))), x.Value...)
	}
	if len(b) > maxXattrSet {
		return nil, fmt.Errorf("a set of %d bytes, more than %d: %w", len(b), maxXattrSet, tree.ErrTooBig)
	}
	return b, nil
}

func validXattrName(name string) bool {
	return name != "" && len(name) <= tree.MaxXattrName && !strings.Contains(name, "\x00")
}

func parseXattrs(record []byte) ([]tree.Xattr, bool) {
	c := cursor{b: record}
	n := c.uvMax(uint64(len(record)) / 3) // a name of one byte and two lengths
	set := make([]tree.Xattr, 0, n)
	for range n {
		x := tree.Xattr{Name: string(c.bytes(c.uvMax(tree.MaxXattrName)))}
		x.Value = append(x.Value, c.bytes(c.uvMax(tree.MaxXattrValue))...)
		if c.bad || !validXattrName(x.Name) || len(set) > 0 && set[len(set)-1].Name >= x.Name {
			return nil, false
		}
		set = append(set, x)
	}
	return set, c.done() && n > 0 && len(record) <= maxXattrSet
}

// appendRanges encodes the data ranges of a sparse file: for each the hole
// before it and its length. Ranges are ascending and do not touch.
func appendRanges(b []byte, data []tree.Range) []byte {
	b = binary.AppendUvarint(b, uint64(len(data)))
	end := uint64(0)
	for _, r := range data {
		b = binary.AppendUvarint(b, r.Start-end)
		b = binary.AppendUvarint(b, r.End-r.Start)
		end = r.End
	}
	return b
}

// parseRanges decodes the data ranges of a file of size bytes, alloc of them
// data.
func parseRanges(record []byte, size, alloc uint64) ([]tree.Range, bool) {
	c := cursor{b: record}
	n := c.uvMax(min(tree.MaxRanges, uint64(len(record))/2))
	data := make([]tree.Range, 0, n)
	end, sum := uint64(0), uint64(0)
	for i := range n {
		hole, length := c.uv(), c.uv()
		if hole == 0 && i > 0 || length == 0 || hole > size-end || length > size-end-hole {
			return nil, false
		}
		data = append(data, tree.Range{Start: end + hole, End: end + hole + length})
		end += hole + length
		sum += length
	}
	return data, c.done() && sum == alloc
}

// splitDirentKey undoes direntKey. The name is a copy; it is empty in an opaque
// record.
func splitDirentKey(key []byte) (dir tree.Ino, name string, ok bool) {
	if len(key) < 8 {
		return 0, "", false
	}
	dir, name = tree.Ino(binary.BigEndian.Uint64(key)), string(key[8:])
	return dir, name, name == "" || tree.CheckName(name) == nil
}

// splitInodeKey undoes inodeKey.
func splitInodeKey(key []byte) (tree.Ino, bool) {
	if len(key) != 8 {
		return 0, false
	}
	return tree.Ino(binary.BigEndian.Uint64(key)), true
}
