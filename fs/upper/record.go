package upper

import (
	"encoding/binary"
	"fmt"

	"ephemeral-sandbox/fs/tree"
)

// Inode is the upper's record of one inode. Records are never changed once they
// are in an Upper: a change puts a new one in their place.
type Inode struct {
	tree.Inode

	New      bool // the lower tree has no such inode
	Data     bool // content is ours: the range map and Shown say which part of it
	Written  bool // bytes were changed by LastOp, not only the inode made
	Linkable bool // made without a name, so that a name may be given to it later

	Gen   uint32 // which data file holds the private bytes; raised when content is replaced as a whole
	Shown uint64 // bytes of the lower content, from the start, that show where no segment lies

	Lineage tree.Ino // the lower inode whose content this one's replaces, through all replacements
	Prior   tree.Ino // the inode replaced directly
	LastOp  tree.Op  // last to change the bytes; the maker while nobody did

	extents *Extents // shared by successive records of one inode; nil when empty
}

// Extents is the range map of n's content. It changes in place with Commit, so
// a reader holds whatever lock keeps commits to this inode out.
func (n *Inode) Extents() *Extents { return n.extents }

// CopyUp makes a file's content n's own, all of it still showing from beneath,
// with a data file of generation gen. It does nothing when the content is n's
// own already.
func (n *Inode) CopyUp(gen uint32) {
	if !n.Data {
		n.Data, n.Gen, n.Shown = true, gen, n.Size
	}
}

// Piece says where the byte of n's content at off comes from and where that
// source ends. Beneath means the lower content; what lies past Shown is Zeros.
// The end may lie past Size.
func (n *Inode) Piece(off uint64) (src Source, end uint64) {
	src, end = n.extents.Piece(off)
	switch {
	case src != Beneath:
	case off < n.Shown:
		end = min(end, n.Shown)
	default:
		src = Zeros
	}
	return src, end
}

// Dirent is the upper's record of one name. Ino 0 hides the lower tree's name.
type Dirent struct {
	tree.Dirent
	Removed tree.Ino // on a hidden name: the lower inode whose content was last removed from it
}

// ChangeType says what a Change does.
type ChangeType uint8

// The changes. Their numbers are part of the journal's format.
const (
	PutDirent  ChangeType = 1  // Dirent replaces the record of its name
	DropDirent ChangeType = 2  // the record of Dirent's Dir and Name goes; the lower name shows
	PutInode   ChangeType = 3  // Inode replaces the record; its range map stays if Data stays set
	DropInode  ChangeType = 4  // the record of Ino goes
	Write      ChangeType = 5  // [Start, End) of Ino is private now; Size, Alloc, Mode, Time are the inode's
	Cut        ChangeType = 6  // segments of Ino at and after Start go
	Zero       ChangeType = 7  // [Start, End) of Ino is punched
	Forget     ChangeType = 8  // segments of Ino in [Start, End) go
	Base       ChangeType = 9  // Start is the commit of the lower tree from here on
	Reset      ChangeType = 10 // every record goes
	Remember   ChangeType = 11 // request Start was carried out, with Ino as its result
	Own        ChangeType = 12 // [Start, End) of Ino is private; attributes stay
)

// Change is one step of a frame. Which fields count depends on Type.
type Change struct {
	Type   ChangeType
	Dirent Dirent
	Inode  *Inode
	Ino    tree.Ino

	Start, End  uint64
	Size, Alloc uint64
	Mode        uint32
	Time        tree.Time
}

// Frame is what happens at once: one journal frame, applied whole or not at all.
type Frame struct {
	Op      tree.Op
	Request uint64   // the caller's number for what it asked, 0 for none
	Result  tree.Ino // the inode that the request made or named
	Changes []Change
}

// Flags of an encoded inode.
const (
	flagNew = 1 << iota
	flagData
	flagWritten
	flagLinkable
	flagHash
	flagLineage
)

// appendFrame encodes f's payload. Integers are LEB128 varints, strings carry
// their length, instants are a zigzag second and a nanosecond.
func appendFrame(b []byte, f Frame) []byte {
	b = binary.AppendUvarint(b, uint64(f.Op))
	b = binary.AppendUvarint(b, f.Request)
	b = binary.AppendUvarint(b, uint64(f.Result))
	for i := range f.Changes {
		b = appendChange(b, &f.Changes[i])
	}
	return b
}

func appendChange(b []byte, c *Change) []byte {
	b = append(b, byte(c.Type))
	switch c.Type {
	case PutDirent:
		b = binary.AppendUvarint(b, uint64(c.Dirent.Dir))
		b = appendString(b, c.Dirent.Name)
		b = binary.AppendUvarint(b, uint64(c.Dirent.Ino))
		b = append(b, byte(c.Dirent.Kind))
		b = binary.AppendUvarint(b, uint64(c.Dirent.Removed))
	case DropDirent:
		b = binary.AppendUvarint(b, uint64(c.Dirent.Dir))
		b = appendString(b, c.Dirent.Name)
	case PutInode:
		b = appendInode(b, c.Inode)
	case DropInode:
		b = binary.AppendUvarint(b, uint64(c.Ino))
	case Write:
		b = binary.AppendUvarint(b, uint64(c.Ino))
		b = binary.AppendUvarint(b, c.Start)
		b = binary.AppendUvarint(b, c.End)
		b = binary.AppendUvarint(b, c.Size)
		b = binary.AppendUvarint(b, c.Alloc)
		b = binary.AppendUvarint(b, uint64(c.Mode))
		b = appendTime(b, c.Time)
	case Cut:
		b = binary.AppendUvarint(b, uint64(c.Ino))
		b = binary.AppendUvarint(b, c.Start)
	case Zero, Forget, Own:
		b = binary.AppendUvarint(b, uint64(c.Ino))
		b = binary.AppendUvarint(b, c.Start)
		b = binary.AppendUvarint(b, c.End)
	case Base:
		b = binary.AppendUvarint(b, c.Start)
	case Remember:
		b = binary.AppendUvarint(b, c.Start)
		b = binary.AppendUvarint(b, uint64(c.Ino))
	case Reset:
	}
	return b
}

func appendInode(b []byte, n *Inode) []byte {
	var flags byte
	for _, f := range []struct {
		set bool
		bit byte
	}{
		{n.New, flagNew},
		{n.Data, flagData},
		{n.Written, flagWritten},
		{n.Linkable, flagLinkable},
		{n.Hash != tree.Hash{}, flagHash},
		{n.Lineage != 0 || n.Prior != 0, flagLineage},
	} {
		if f.set {
			flags |= f.bit
		}
	}
	b = binary.AppendUvarint(b, uint64(n.Ino))
	b = append(b, byte(n.Kind), flags)
	b = binary.AppendUvarint(b, uint64(n.Mode))
	b = binary.AppendUvarint(b, uint64(n.UID))
	b = binary.AppendUvarint(b, uint64(n.GID))
	b = binary.AppendUvarint(b, uint64(n.Nlink))
	b = binary.AppendUvarint(b, n.Size)
	b = binary.AppendUvarint(b, n.Alloc)
	b = binary.AppendUvarint(b, uint64(n.Rdev))
	b = appendTime(b, n.Mtime)
	b = appendTime(b, n.Ctime)
	b = appendString(b, n.Link)
	b = binary.AppendUvarint(b, uint64(len(n.Xattrs)))
	for _, x := range n.Xattrs {
		b = appendString(b, x.Name)
		b = binary.AppendUvarint(b, uint64(len(x.Value)))
		b = append(b, x.Value...)
	}
	if flags&flagHash != 0 {
		b = append(b, n.Hash[:]...)
	}
	b = binary.AppendUvarint(b, uint64(n.LastOp))
	if flags&flagData != 0 {
		b = binary.AppendUvarint(b, uint64(n.Gen))
		b = binary.AppendUvarint(b, n.Shown)
	}
	if flags&flagLineage != 0 {
		b = binary.AppendUvarint(b, uint64(n.Lineage))
		b = binary.AppendUvarint(b, uint64(n.Prior))
	}
	return b
}

func appendString(b []byte, s string) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

func appendTime(b []byte, t tree.Time) []byte {
	b = binary.AppendVarint(b, t.Sec)
	return binary.AppendUvarint(b, uint64(t.Nsec))
}

// decoder reads a payload. The first complaint sticks, and reads after it give
// zeros, so that callers check once.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
		d.b = nil
	}
}

func (d *decoder) uvarint(limit uint64, what string) uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail("%s: bad varint", what)
		return 0
	}
	if v > limit {
		d.fail("%s: %d is beyond %d", what, v, limit)
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) u32(what string) uint32 { return uint32(d.uvarint(1<<32-1, what)) }

func (d *decoder) ino() tree.Ino { return tree.Ino(d.uvarint(1<<64-1, "inode number")) }

func (d *decoder) size(what string) uint64 { return d.uvarint(tree.MaxFileSize, what) }

func (d *decoder) time() tree.Time {
	sec, n := binary.Varint(d.b)
	if n <= 0 {
		d.fail("time: bad varint")
		return tree.Time{}
	}
	d.b = d.b[n:]
	return tree.Time{Sec: sec, Nsec: uint32(d.uvarint(999_999_999, "nanoseconds"))}
}

func (d *decoder) byte(what string) byte {
	if len(d.b) == 0 {
		d.fail("%s: payload ends", what)
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) bytes(limit int, what string) []byte {
	n := d.uvarint(uint64(limit), what)
	if n > uint64(len(d.b)) {
		d.fail("%s: payload ends", what)
		return nil
	}
	v := d.b[:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) name() string {
	s := string(d.bytes(tree.MaxName, "name"))
	if d.err == nil {
		if err := tree.CheckName(s); err != nil {
			d.fail("%v", err)
		}
	}
	return s
}

func (d *decoder) kind(orNone bool) tree.Kind {
	k := tree.Kind(d.byte("kind"))
	if d.err == nil && !k.Valid() && !(orNone && k == 0) {
		d.fail("kind %d is unknown", k)
	}
	return k
}

// decodeFrame reads a payload written by appendFrame. Any other bytes give an
// error or a frame that appendFrame could have been given.
func decodeFrame(b []byte) (Frame, error) {
	d := decoder{b: b}
	f := Frame{Op: tree.Op(d.u32("operation")), Request: d.uvarint(1<<64-1, "request"), Result: d.ino()}
	for d.err == nil && len(d.b) > 0 {
		f.Changes = append(f.Changes, d.change())
	}
	if d.err != nil {
		return Frame{}, d.err
	}
	return f, nil
}

func (d *decoder) change() (c Change) {
	c.Type = ChangeType(d.byte("change"))
	switch c.Type {
	case PutDirent:
		c.Dirent.Dir = d.ino()
		c.Dirent.Name = d.name()
		c.Dirent.Ino = d.ino()
		c.Dirent.Kind = d.kind(c.Dirent.Ino == 0)
		c.Dirent.Removed = d.ino()
	case DropDirent:
		c.Dirent.Dir = d.ino()
		c.Dirent.Name = d.name()
	case PutInode:
		c.Inode = d.inode()
	case DropInode:
		c.Ino = d.ino()
	case Write:
		c.Ino = d.ino()
		c.Start, c.End = d.interval()
		c.Size = d.size("size")
		c.Alloc = d.uvarint(1<<64-1, "allocation")
		c.Mode = d.u32("mode")
		c.Time = d.time()
	case Cut:
		c.Ino = d.ino()
		c.Start = d.size("offset")
	case Zero, Forget, Own:
		c.Ino = d.ino()
		c.Start, c.End = d.interval()
	case Base:
		c.Start = d.uvarint(1<<64-1, "commit")
	case Remember:
		c.Start = d.uvarint(1<<64-1, "request")
		c.Ino = d.ino()
	case Reset:
	default:
		d.fail("change %d is unknown", c.Type)
	}
	return c
}

func (d *decoder) interval() (start, end uint64) {
	start, end = d.size("offset"), d.size("offset")
	if d.err == nil && start >= end {
		d.fail("range [%d, %d) is empty", start, end)
	}
	return start, end
}

func (d *decoder) inode() *Inode {
	n := new(Inode)
	n.Ino = d.ino()
	n.Kind = d.kind(false)
	flags := d.byte("flags")
	n.New, n.Data = flags&flagNew != 0, flags&flagData != 0
	n.Written, n.Linkable = flags&flagWritten != 0, flags&flagLinkable != 0
	n.Mode = d.u32("mode")
	n.UID, n.GID = d.u32("uid"), d.u32("gid")
	n.Nlink = d.u32("link count")
	n.Size = d.size("size")
	n.Alloc = d.uvarint(1<<64-1, "allocation")
	n.Rdev = d.u32("device")
	n.Mtime, n.Ctime = d.time(), d.time()
	n.Link = string(d.bytes(tree.MaxLink, "link target"))
	if count := d.uvarint(uint64(len(d.b)), "xattr count"); count > 0 {
		n.Xattrs = make([]tree.Xattr, 0, min(count, 64))
		for range count {
			x := tree.Xattr{Name: string(d.bytes(tree.MaxXattrName, "xattr name"))}
			x.Value = append([]byte{}, d.bytes(tree.MaxXattrValue, "xattr value")...)
			if d.err != nil {
				break
			}
			n.Xattrs = append(n.Xattrs, x)
		}
	}
	if flags&flagHash != 0 {
		if len(d.b) < len(n.Hash) {
			d.fail("hash: payload ends")
		} else {
			d.b = d.b[copy(n.Hash[:], d.b):]
		}
	}
	n.LastOp = tree.Op(d.u32("operation"))
	if n.Data {
		n.Gen = d.u32("data file")
		n.Shown = d.size("shown bytes")
	}
	if flags&flagLineage != 0 {
		n.Lineage, n.Prior = d.ino(), d.ino()
	}
	return n
}
