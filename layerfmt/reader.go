package layerfmt

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"sort"
	"sync/atomic"

	"ephemeral-sandbox/fs/tree"
)

// ReaderOptions configure a Reader.
type ReaderOptions struct {
	// Name of the layer, for errors. Empty means the start of the pack's id.
	Name string
	// Cache for pages and frames. Nil means a small one of the Reader's own.
	Cache *FrameCache
	// MaxLogicalBytes is the most that the files of the pack may add up to;
	// Open refuses a pack that claims more. Zero means no limit.
	MaxLogicalBytes int64
}

// ownCache is the size of the cache of a Reader that was given none.
const ownCache = 4 << 20

// Reader reads one pack. It holds no file open and starts no goroutine, so
// there is nothing to close.
type Reader struct {
	src   io.ReaderAt
	size  uint64
	name  string
	id    uint64 // in the cache
	cache *FrameCache

	info    Info
	toc     toc
	header  [headerLen]byte
	trailer trailer
	data    uint64 // where the frames end

	dirents, inodes index
	frames, heap    section

	deps atomic.Pointer[[]PackID] // nil until wanted
}

// index is one tree of a pack.
type index struct {
	section
	class blockClass
	root  atomic.Pointer[page] // kept once loaded, unless the tree is but one page
}

// Open reads the header, the trailer and the table of contents of a pack of
// size bytes. A pack of up to 64 KiB is read whole, in one piece. An error is a
// CorruptError, an ErrVersion, tree.ErrTooBig, or what r answered.
func Open(src io.ReaderAt, size int64, o ReaderOptions) (*Reader, error) {
	r := &Reader{src: src, size: uint64(size), name: o.Name, cache: o.Cache}
	if r.name == "" {
		r.name = "(unnamed)"
	}
	if size < headerLen+skippableLen+trailerLen || size > maxPackSize {
		return nil, r.corrupt("trailer", 0, fmt.Sprintf("a file of %d bytes is no pack", size))
	}
	if r.cache == nil {
		r.cache = NewFrameCache(ownCache)
	}
	r.id = r.cache.readers.Add(1)

	tail, err := r.openTail()
	if err != nil {
		return nil, err
	}
	kind, reason, err := parseHeader(r.header[:])
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", r.name, err)
	}
	if reason != "" {
		return nil, r.corrupt("header", 0, reason)
	}
	if err := r.openTOC(tail); err != nil {
		return nil, err
	}
	r.info = r.toc.info
	r.info.ID, r.info.Kind, r.info.StoredBytes = r.trailer.id, kind, size
	if o.MaxLogicalBytes > 0 && r.info.LogicalBytes > o.MaxLogicalBytes {
		return nil, fmt.Errorf("layer %s holds files of %d bytes, more than %d: %w", r.name, r.info.LogicalBytes, o.MaxLogicalBytes, tree.ErrTooBig)
	}
	if o.Name == "" {
		r.name = r.info.ID.String()[:16]
	}
	if uint64(len(tail)) == r.size {
		r.keepPages(tail)
	}
	return r, nil
}

// openTail reads header and trailer and returns the end of the pack, at least
// from the table of contents on; for a small pack that is all of it.
func (r *Reader) openTail() ([]byte, error) {
	n := uint64(tailRead)
	if r.size <= smallPack {
		n = r.size
	} else if err := r.read(r.header[:], 0, "header"); err != nil {
		return nil, err
	}
	tail := make([]byte, n)
	if err := r.read(tail, r.size-n, "trailer"); err != nil {
		return nil, err
	}
	if n == r.size {
		copy(r.header[:], tail)
	}
	t, reason := parseTrailer(tail[n-trailerLen:], r.size)
	if reason != "" {
		return nil, r.corrupt("trailer", r.size-trailerLen, reason)
	}
	r.trailer = t
	if want := r.size - t.tocOff + skippableLen; want > n {
		tail = make([]byte, want)
		if err := r.read(tail, r.size-want, "toc"); err != nil {
			return nil, err
		}
	}
	return tail, nil
}

// openTOC decodes the table of contents at the end of tail.
func (r *Reader) openTOC(tail []byte) error {
	at := uint64(len(tail)) - trailerLen - uint64(r.trailer.tocLen)
	table := tail[at : uint64(len(tail))-trailerLen]
	end := r.trailer.tocOff - skippableLen
	if !isSkippable(tail[at-skippableLen:], skippableTOC, uint64(len(table))+trailerLen) {
		return r.corrupt("toc", end, "frame head differs")
	}
	if packID(r.header[:], table) != r.trailer.id {
		return r.corrupt("toc", r.trailer.tocOff, "pack id differs")
	}
	t, reason, err := parseTOC(table, end)
	if err != nil {
		return fmt.Errorf("layer %s: %w", r.name, err)
	}
	if reason != "" {
		return r.corrupt("toc", r.trailer.tocOff, reason)
	}
	r.toc = t
	r.data = end
	for _, s := range t.sections {
		r.data = min(r.data, s.off-skippableLen)
		switch s.name {
		case tagDirents:
			r.dirents.section = s
		case tagInodes:
			r.inodes.section = s
		case tagFrames:
			r.frames = s
		case tagHeap:
			r.heap = s
		}
	}
	r.dirents.class, r.inodes.class = blockDirents, blockInodes
	return nil
}

// keepPages puts the tree pages of a pack that was read whole into the cache. A
// page that is damaged is left for the one who looks for it.
func (r *Reader) keepPages(pack []byte) {
	for _, t := range []*index{&r.dirents, &r.inodes} {
		for no := range t.pages() {
			off, n := t.pageAt(uint32(no))
			p, reason := parsePage(pack[off:off+n], t.name, uint32(no))
			if reason != "" {
				continue
			}
			p.own()
			r.cache.get(r.key(t.class, no), func() (block, error) { //nolint:errcheck // cannot fail
				return block{data: p.data, page: p}, nil
			})
		}
	}
}

// ID identifies the pack.
func (r *Reader) ID() PackID { return r.info.ID }

// Info sums the pack up, as its writer did.
func (r *Reader) Info() Info { return r.info }

// Name is the layer's name in errors.
func (r *Reader) Name() string { return r.name }

// Version returns the format version the pack was written in.
func (r *Reader) Version() (major, minor int) { return headerVersion(r.header[:]) }

func (r *Reader) corrupt(section string, off uint64, reason string) error {
	return &CorruptError{Layer: r.name, Section: section, Offset: int64(off), Reason: reason}
}

// read fills b from offset off. A pack that ends too early is corrupt; other
// errors are the disk's.
func (r *Reader) read(b []byte, off uint64, section string) error {
	n, err := r.src.ReadAt(b, int64(off))
	switch {
	case n == len(b):
		return nil
	case err == nil, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return r.corrupt(section, off, fmt.Sprintf("the file ends after %d of %d bytes", n, len(b)))
	}
	return fmt.Errorf("layer %s: read section %s at offset %d: %w", r.name, section, off, err)
}

func (r *Reader) key(class blockClass, index uint64) blockKey {
	return blockKey{reader: r.id, class: class, index: index}
}

// pageAt is the place of a page in the pack.
func (t *index) pageAt(no uint32) (off, n uint64) {
	if t.count == 1 {
		return t.off, t.raw
	}
	at := uint64(no) * pageSize
	return t.off + at, min(pageSize, t.raw-at)
}

func (r *Reader) page(t *index, no uint32) (*page, error) {
	last := t.pages() - 1
	isRoot := uint64(no) == last
	if isRoot {
		if p := t.root.Load(); p != nil {
			return p, nil
		}
	}
	b, err := r.cache.get(r.key(t.class, uint64(no)), func() (block, error) {
		off, n := t.pageAt(no)
		data := make([]byte, n)
		if err := r.read(data, off, t.name); err != nil {
			return block{}, err
		}
		p, reason := parsePage(data, t.name, no)
		if reason == "" && (p.level == 0) != (uint64(no) < t.count) {
			reason = "page is on the wrong level"
		}
		if reason != "" {
			return block{}, r.corrupt(t.name, off, reason)
		}
		return block{data: data, page: p}, nil
	})
	if err != nil {
		return nil, err
	}
	if isRoot && last > 0 {
		t.root.Store(b.page)
	}
	return b.page, nil
}

// leaf descends to the leaf that covers key.
func (r *Reader) leaf(t *index, key []byte) (*page, uint32, error) {
	no := uint32(t.pages() - 1)
	p, err := r.page(t, no)
	for err == nil && p.level > 0 {
		level := p.level
		no = p.child(key)
		if p, err = r.page(t, no); err == nil && p.level != level-1 {
			off, _ := t.pageAt(no)
			err = r.corrupt(t.name, off, "page is on the wrong level")
		}
	}
	return p, no, err
}

// lookup returns the value of key.
func (r *Reader) lookup(t *index, key []byte) (value []byte, found bool, err error) {
	if t.raw == 0 {
		return nil, false, nil
	}
	p, _, err := r.leaf(t, key)
	if err != nil {
		return nil, false, err
	}
	i, found := p.find(key)
	if !found {
		return nil, false, nil
	}
	_, value = p.cell(i)
	return value, true, nil
}

// scan calls fn with the cells from key on, in order, until it returns false.
// key and value are only good during the call.
func (r *Reader) scan(t *index, from []byte, fn func(key, value []byte) (bool, error)) error {
	if t.raw == 0 {
		return nil
	}
	p, no, err := r.leaf(t, from)
	if err != nil {
		return err
	}
	i, _ := p.find(from)
	var key, before []byte
	for {
		for ; i < p.n; i++ {
			key = p.appendKey(key[:0], i)
			_, value := p.cell(i)
			if more, err := fn(key, value); err != nil || !more {
				return err
			}
		}
		if p.n > 0 {
			before = p.appendKey(before[:0], p.n-1)
		}
		if no++; uint64(no) >= t.count {
			return nil
		}
		if p, err = r.page(t, no); err != nil {
			return err
		}
		i = 0
		if key = p.appendKey(key[:0], 0); string(before) >= string(key) {
			off, _ := t.pageAt(no)
			return r.corrupt(t.name, off, "page does not follow the one before it")
		}
	}
}

// cellCorrupt is the error about the cell of a key; it names the cell's page.
func (r *Reader) cellCorrupt(t *index, key []byte, reason string) error {
	off := t.off
	if _, no, err := r.leaf(t, key); err == nil {
		off, _ = t.pageAt(no)
	}
	return r.corrupt(t.name, off, reason)
}

// Lookup returns the record of a name in a directory: a put or a whiteout.
func (r *Reader) Lookup(dir tree.Ino, name string) (Dirent, bool, error) {
	return r.lookupDirent(dir, name, name == "")
}

// IsOpaque reports whether the pack hides every lower name of a directory.
func (r *Reader) IsOpaque(dir tree.Ino) (bool, error) {
	_, found, err := r.lookupDirent(dir, "", false)
	return found, err
}

func (r *Reader) lookupDirent(dir tree.Ino, name string, refuse bool) (Dirent, bool, error) {
	if refuse || len(name) > tree.MaxName {
		return Dirent{}, false, nil
	}
	var buf [maxKey]byte
	key := direntKey(buf[:0], dir, name)
	value, found, err := r.lookup(&r.dirents, key)
	if err != nil || !found {
		return Dirent{}, false, err
	}
	d, ok := parseDirent(dir, name == "", value)
	if !ok {
		return Dirent{}, false, r.cellCorrupt(&r.dirents, key, "dirent is malformed")
	}
	d.Name = name
	return d, true, nil
}

// parseDirentCell decodes a cell of the dirent tree.
func (r *Reader) parseDirentCell(key, value []byte) (Dirent, error) {
	dir, name, ok := splitDirentKey(key)
	var d Dirent
	if ok {
		d, ok = parseDirent(dir, name == "", value)
	}
	if !ok {
		return d, r.cellCorrupt(&r.dirents, key, "dirent is malformed")
	}
	d.Name = name
	return d, nil
}

// Dirents calls fn with the records of a directory whose names are from or
// above, in byte order, until fn returns false. The opaque record is left out.
func (r *Reader) Dirents(dir tree.Ino, from string, fn func(Dirent) bool) error {
	if len(from) > tree.MaxName {
		// No name is so long: what is above it is above its start, too.
		from = from[:tree.MaxName] + "\x00"
	}
	return r.scan(&r.dirents, direntKey(nil, dir, from), func(key, value []byte) (bool, error) {
		d, err := r.parseDirentCell(key, value)
		if err != nil || d.Dir != dir {
			return false, err
		}
		return d.Op == Opaque || fn(d), nil
	})
}

// AllDirents calls fn with every dirent record, in order of directory and name
// (an opaque record before its directory's names), until fn returns false.
func (r *Reader) AllDirents(fn func(Dirent) bool) error {
	return r.scan(&r.dirents, nil, func(key, value []byte) (bool, error) {
		d, err := r.parseDirentCell(key, value)
		return err == nil && fn(d), err
	})
}

// Inode returns the record of an inode.
func (r *Reader) Inode(ino tree.Ino) (Inode, bool, error) {
	cell, found, err := r.inodeCell(ino)
	if err != nil || !found || cell.stub {
		return Inode{}, false, err
	}
	if err := r.resolve(&cell); err != nil {
		return Inode{}, false, err
	}
	return cell.Inode, true, nil
}

func (r *Reader) inodeCell(ino tree.Ino) (inodeCell, bool, error) {
	var buf [maxKey]byte
	key := inodeKey(buf[:0], ino)
	value, found, err := r.lookup(&r.inodes, key)
	if err != nil || !found {
		return inodeCell{}, false, err
	}
	cell, ok := parseInode(ino, value)
	if !ok {
		return inodeCell{}, false, r.cellCorrupt(&r.inodes, key, "inode is malformed")
	}
	return cell, true, nil
}

// resolve fetches what a cell only points to.
func (r *Reader) resolve(n *inodeCell) error {
	n.loc.reader = r.id
	if n.xattrs.len > 0 {
		record, err := r.record(n.xattrs)
		if err != nil {
			return err
		}
		set, ok := parseXattrs(record)
		if !ok {
			return r.corrupt(tagHeap, r.heap.off+uint64(n.xattrs.off), "xattrs are malformed")
		}
		n.Xattrs = set
	}
	if n.link.len > 0 {
		record, err := r.record(n.link)
		if err != nil {
			return err
		}
		if n.Link = string(record); !validLink(n.Link) {
			return r.corrupt(tagHeap, r.heap.off+uint64(n.link.off), "link target is malformed")
		}
	}
	if n.Content == Foreign {
		deps, err := r.Foreign()
		if err != nil {
			return err
		}
		if n.dep >= uint64(len(deps)) {
			return r.cellCorrupt(&r.inodes, inodeKey(nil, n.Ino), "foreign pack is not in the list")
		}
		n.Pack = deps[n.dep]
	}
	return nil
}

// AllInodes calls fn with every inode record in ascending order until fn
// returns false.
func (r *Reader) AllInodes(fn func(Inode) bool) error {
	return r.allCells(func(cell *inodeCell) (bool, error) {
		if cell.stub {
			return true, nil
		}
		if err := r.resolve(cell); err != nil {
			return false, err
		}
		return fn(cell.Inode), nil
	})
}

func (r *Reader) allCells(fn func(*inodeCell) (bool, error)) error {
	return r.scan(&r.inodes, nil, func(key, value []byte) (bool, error) {
		ino, ok := splitInodeKey(key)
		var cell inodeCell
		if ok {
			cell, ok = parseInode(ino, value)
		}
		if !ok {
			return false, r.cellCorrupt(&r.inodes, key, "inode is malformed")
		}
		return fn(&cell)
	})
}

// Parent returns a name that the pack puts for an inode: the first in order of
// directory and name. It finds names of inodes that the pack holds no record of,
// too, and costs two lookups.
func (r *Reader) Parent(ino tree.Ino) (tree.Dirent, bool, error) {
	cell, found, err := r.inodeCell(ino)
	if err != nil || !found || !cell.named {
		return tree.Dirent{}, false, err
	}
	d, err := r.named(&cell)
	return d.Dirent, err == nil, err
}

// named follows the reference of an inode's cell to the dirent that names it.
func (r *Reader) named(n *inodeCell) (Dirent, error) {
	bad := func() (Dirent, error) {
		return Dirent{}, r.cellCorrupt(&r.inodes, inodeKey(nil, n.Ino), "name reference leads nowhere")
	}
	no, slot := n.ref>>refSlotBits, int(n.ref&(maxPageCells-1))
	if no >= r.dirents.count {
		return bad()
	}
	p, err := r.page(&r.dirents, uint32(no))
	if err != nil {
		return Dirent{}, err
	}
	if slot >= p.n {
		return bad()
	}
	_, value := p.cell(slot)
	d, err := r.parseDirentCell(p.appendKey(nil, slot), value)
	if err == nil && (d.Op != Put || d.Ino != n.Ino) {
		return bad()
	}
	return d, err
}

// record returns a record of the heap.
func (r *Reader) record(h heapRef) ([]byte, error) {
	if uint64(h.off)+heapHeadLen+uint64(h.len) > r.heap.raw {
		return nil, r.corrupt(tagHeap, r.heap.off+uint64(h.off), "record lies outside the section")
	}
	// The length belongs to the key: a wrong one must not be served a right
	// record.
	key := r.key(blockHeap, uint64(h.off)<<24|uint64(h.len))
	b, err := r.cache.get(key, func() (block, error) {
		data := make([]byte, heapHeadLen+h.len)
		off := r.heap.off + uint64(h.off)
		if err := r.read(data, off, tagHeap); err != nil {
			return block{}, err
		}
		record, ok := checkHeapRecord(data, h.off)
		if !ok {
			return block{}, r.corrupt(tagHeap, off, "checksum differs")
		}
		return block{data: record}, nil
	})
	return b.data, err
}

// Foreign lists the packs that files of this one have their bytes in. The list
// is shared and must not be changed.
func (r *Reader) Foreign() ([]PackID, error) {
	if deps := r.deps.Load(); deps != nil {
		return *deps, nil
	}
	s, found := r.find(tagDeps)
	if !found {
		return nil, nil
	}
	data, err := r.load(s)
	if err != nil {
		return nil, err
	}
	deps := make([]PackID, 0, s.count)
	for ; len(data) > 0; data = data[len(PackID{}):] {
		deps = append(deps, PackID(data[:len(PackID{})]))
	}
	r.deps.Store(&deps) // two who load it at once load the same
	return deps, nil
}

func (r *Reader) find(name string) (section, bool) {
	s := r.toc.sections
	i := sort.Search(len(s), func(i int) bool { return s[i].name >= name })
	if i == len(s) || s[i].name != name {
		return section{}, false
	}
	return s[i], true
}

// load reads the stored bytes of a section and checks them.
func (r *Reader) load(s section) ([]byte, error) {
	data := make([]byte, s.stored)
	if err := r.read(data, s.off, s.name); err != nil {
		return nil, err
	}
	if sha256.Sum256(data) != s.hash {
		return nil, r.corrupt(s.name, s.off, "hash differs")
	}
	return data, nil
}

// Section returns the bytes that SetSection stored under a name.
func (r *Reader) Section(name string) ([]byte, bool, error) {
	s, found := r.find(name)
	if !found || !validSectionName(name) {
		return nil, false, nil
	}
	if s.codec > codecZstd {
		return nil, false, fmt.Errorf("layer %s: section %s has codec %d: %w", r.name, name, s.codec, ErrVersion)
	}
	data, err := r.load(s)
	if err != nil || s.codec == codecRaw {
		return data, err == nil, err
	}
	out, err := r.cache.decode(data, int(s.raw))
	if err != nil {
		return nil, false, r.corrupt(name, s.off, err.Error())
	}
	return out, true, nil
}

// Sections lists the names that Section answers to, sorted.
func (r *Reader) Sections() []string {
	var names []string
	for _, s := range r.toc.sections {
		if validSectionName(s.name) {
			names = append(names, s.name)
		}
	}
	return names
}

// frameRecord looks a frame up in the frame table.
func (r *Reader) frameRecord(no uint64) (frameRecord, error) {
	if no >= r.frames.count {
		return frameRecord{}, r.corrupt(tagFrames, r.frames.off, fmt.Sprintf("there is no frame %d", no))
	}
	piece := no / framesPerPiece
	b, err := r.cache.get(r.key(blockFrames, piece), func() (block, error) {
		at := piece * framePieceLen
		data := make([]byte, min(framePieceLen, r.frames.raw-at))
		off := r.frames.off + at
		if err := r.read(data, off, tagFrames); err != nil {
			return block{}, err
		}
		if reason := checkFrames(data, uint32(piece), r.data); reason != "" {
			return block{}, r.corrupt(tagFrames, off, reason)
		}
		return block{data: data}, nil
	})
	if err != nil {
		return frameRecord{}, err
	}
	return frameAt(b.data, int(no%framesPerPiece)), nil
}

// frame returns the decoded bytes of a frame.
func (r *Reader) frame(no uint64) ([]byte, error) {
	b, err := r.cache.get(r.key(blockData, no), func() (block, error) {
		f, err := r.frameRecord(no)
		if err != nil {
			return block{}, err
		}
		stored := make([]byte, f.stored)
		if err := r.read(stored, f.off, "data"); err != nil {
			return block{}, err
		}
		if frameCRC(stored, uint32(no)) != f.crc {
			return block{}, r.corrupt("data", f.off, fmt.Sprintf("checksum of frame %d differs", no))
		}
		raw, err := r.cache.decode(stored, int(f.raw))
		if err != nil {
			return block{}, r.corrupt("data", f.off, fmt.Sprintf("frame %d: %v", no, err))
		}
		return block{data: raw}, nil
	})
	return b.data, err
}

// File opens the content of an inode that this Reader returned and whose
// Content is Here, or of an empty file.
func (r *Reader) File(n Inode) (*File, error) {
	switch {
	case n.Kind != tree.File:
		return nil, fmt.Errorf("layer %s: inode %d is a %s: %w", r.name, n.Ino, n.Kind, tree.ErrInvalid)
	case n.Content == None:
		return &File{r: r}, nil
	case n.Content != Here || n.loc.reader != r.id:
		return nil, fmt.Errorf("layer %s: the content of inode %d is elsewhere: %w", r.name, n.Ino, tree.ErrInvalid)
	}
	return r.file(storedFile{n.Ino, n.Size, n.Alloc, n.Hash, n.loc})
}

// storedFile is a file whose bytes are in the pack, without what is not needed
// to read them.
type storedFile struct {
	ino         tree.Ino
	size, alloc uint64
	hash        tree.Hash
	loc         location
}

func (r *Reader) file(n storedFile) (*File, error) {
	f := &File{r: r, ino: n.ino, size: n.size, alloc: n.alloc, frame: uint64(n.loc.frame), skip: uint64(n.loc.off)}
	if n.loc.ranges.len == 0 {
		return f, nil
	}
	record, err := r.record(n.loc.ranges)
	if err != nil {
		return nil, err
	}
	data, ok := parseRanges(record, n.size, n.alloc)
	if !ok {
		return nil, r.corrupt(tagHeap, r.heap.off+uint64(n.loc.ranges.off), "data ranges are malformed")
	}
	f.sparse, f.data = true, data
	f.before = make([]uint64, len(data))
	for i := 1; i < len(data); i++ {
		f.before[i] = f.before[i-1] + data[i-1].End - data[i-1].Start
	}
	return f, nil
}

// File is the content of one regular file.
type File struct {
	r     *Reader
	ino   tree.Ino
	size  uint64
	alloc uint64 // bytes of data
	frame uint64 // the first
	skip  uint64 // bytes of it that are not the file's

	sparse bool
	data   []tree.Range
	before []uint64 // data bytes before each range
}

// Size is the file's length in bytes.
func (f *File) Size() uint64 { return f.size }

// Data returns the first range of data that ends above off, cut to start at
// off or later. It reports false when only a hole, or nothing, follows.
func (f *File) Data(off uint64) (tree.Range, bool) {
	if !f.sparse {
		return tree.Range{Start: off, End: f.size}, off < f.size
	}
	i := f.rangeAt(off)
	if i == len(f.data) {
		return tree.Range{}, false
	}
	return tree.Range{Start: max(off, f.data[i].Start), End: f.data[i].End}, true
}

// rangeAt is the index of the first data range that ends above off.
func (f *File) rangeAt(off uint64) int {
	return sort.Search(len(f.data), func(i int) bool { return f.data[i].End > off })
}

// ReadAt implements io.ReaderAt. Holes read as zeros.
func (f *File) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read at offset %d: %w", off, tree.ErrInvalid)
	}
	pos := uint64(off)
	if pos >= f.size {
		if len(p) == 0 {
			return 0, nil
		}
		return 0, io.EOF
	}
	short := uint64(len(p)) > f.size-pos
	if short {
		p = p[:f.size-pos]
	}
	n, err := f.fill(p, pos)
	if err == nil && short {
		err = io.EOF
	}
	return n, err
}

// fill reads all of p, which lies within the file.
func (f *File) fill(p []byte, pos uint64) (int, error) {
	if !f.sparse {
		return f.stream(p, pos)
	}
	done := 0
	for i := f.rangeAt(pos); done < len(p); i++ {
		next := uint64(math.MaxUint64)
		if i < len(f.data) {
			next = f.data[i].Start
		}
		if pos < next {
			n := min(uint64(len(p)-done), next-pos)
			clear(p[done : done+int(n)])
			done += int(n)
			pos += n
		}
		if done == len(p) {
			break
		}
		n := min(uint64(len(p)-done), f.data[i].End-pos)
		got, err := f.stream(p[done:done+int(n)], f.before[i]+pos-f.data[i].Start)
		done += got
		pos += uint64(got)
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// stream reads from the file's data put end to end.
func (f *File) stream(p []byte, pos uint64) (int, error) {
	done := 0
	for done < len(p) {
		at := pos + f.skip
		no := f.frame + at/chunkSize
		raw, err := f.r.frame(no)
		if err != nil {
			return done, err
		}
		// What the file has in this frame must be there, and full frames come
		// before the last: else the inode and its frames do not belong together.
		first := at - at%chunkSize
		if want := min(f.skip+f.alloc-first, chunkSize); uint64(len(raw)) < want {
			return done, f.r.corrupt("data", f.r.data, fmt.Sprintf("frame %d has %d bytes, inode %d needs %d", no, len(raw), f.ino, want))
		}
		n := copy(p[done:], raw[at%chunkSize:min(uint64(len(raw)), f.skip+f.alloc-first)])
		done += n
		pos += uint64(n)
	}
	return done, nil
}
