package layerfmt

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
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
