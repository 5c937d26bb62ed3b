package layerfmt

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"

	"github.com/klauspost/compress/zstd"

	"ephemeral-sandbox/fs/tree"
)

// WriterOptions configure a Writer. The zero value writes a Delta.
type WriterOptions struct {
	// Kind is Base for a whole tree, in which small files added one after
	// another share frames of up to 64 KiB: add a directory's files together.
	// It is Delta, the default, for the changes of a commit, in which each file
	// has frames of its own that can be moved to another pack as they are.
	Kind PackKind
	// Level of compression; zero is zstd.SpeedDefault. Packs written at
	// different levels have different bytes.
	Level zstd.EncoderLevel
	// Workers compress; zero means one for each processor. The bytes written
	// do not depend on it.
	Workers int
}

// A base pack's small files and the frames they share.
const (
	clusterSize = 64 << 10
	clusterFile = 32 << 10 // larger files have frames of their own
)

// Writer writes one pack to a stream. Names and inodes are kept in memory until
// Finish sorts and writes them; bytes of files go out at once. Every use ends
// with Finish or Abort.
//
// An error of the underlying writer sticks: every later call returns it. An
// error about the arguments of a call leaves the Writer as it was.
type Writer struct {
	opts WriterOptions
	pipe *framePipe
	err  error // set when the Writer can do no more

	info    Info // counted as things are added
	dirents []Dirent
	inodes  []pendingInode
	arena   []byte // where bodies of inodes are put
	heap    []byte
	records map[string]heapRef // what the heap holds, for finding equals
	deps    []PackID
	depOf   map[PackID]uint64
	named   map[string][]byte
	byHash  map[tree.Hash]int // first inode with these bytes; single frames only

	cluster *frameJob // open frame of small files, nil if none
	members []int     // inodes whose bytes are in cluster
}

// pendingInode is an inode waiting for Finish. Its location may not be known
// before its frame is sent, or may be that of another inode.
type pendingInode struct {
	ino    tree.Ino
	body   []byte // of the cell
	frame  uint32
	off    uint32
	sameAs int32 // one more than the index of an inode with the same bytes
	tag    uint8
	placed bool // the cell ends with frame and off
}

// NewWriter starts a pack on w.
func NewWriter(w io.Writer, o WriterOptions) *Writer {
	if o.Kind == 0 {
		o.Kind = Delta
	}
	if o.Level == 0 {
		o.Level = zstd.SpeedDefault
	}
	if o.Workers <= 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	wr := &Writer{
		opts:    o,
		records: make(map[string]heapRef),
		depOf:   make(map[PackID]uint64),
		named:   make(map[string][]byte),
		byHash:  make(map[tree.Hash]int),
	}
	if o.Kind != Base && o.Kind != Delta {
		wr.err = fmt.Errorf("pack kind %d: %w", o.Kind, tree.ErrInvalid)
		return wr
	}
	wr.pipe = newFramePipe(w, o.Level, o.Workers)
	h := makeHeader(o.Kind)
	wr.err = wr.pipe.put(h[:])
	return wr
}

// AddDirent adds a record of the dirent tree, in any order. A key may be added
// once only; Finish finds out.
func (w *Writer) AddDirent(d Dirent) error {
	if w.err != nil {
		return w.err
	}
	if d.Dir == 0 {
		return fmt.Errorf("dirent %q: directory zero: %w", d.Name, tree.ErrInvalid)
	}
	switch d.Op {
	case Put:
		if d.Ino == 0 || !d.Kind.Valid() {
			return fmt.Errorf("dirent %q: inode %d of type %d: %w", d.Name, d.Ino, d.Kind, tree.ErrInvalid)
		}
	case Whiteout, Opaque:
		if d.Ino != 0 || d.Kind != 0 {
			return fmt.Errorf("%s of %q names inode %d: %w", d.Op, d.Name, d.Ino, tree.ErrInvalid)
		}
	default:
		return fmt.Errorf("dirent %q: %s: %w", d.Name, d.Op, tree.ErrInvalid)
	}
	if d.Op == Opaque {
		if d.Name != "" {
			return fmt.Errorf("opaque record with a name, %q: %w", d.Name, tree.ErrInvalid)
		}
	} else if err := tree.CheckName(d.Name); err != nil {
		return err
	}
	switch d.Op {
	case Put:
		w.info.Dirents++
	case Whiteout:
		w.info.Whiteouts++
	case Opaque:
		w.info.Opaques++
	}
	w.info.MaxIno = max(w.info.MaxIno, d.Dir, d.Ino)
	w.dirents = append(w.dirents, d)
	return nil
}

// AddInode adds an inode that has no bytes: anything but a file, or an empty
// file. A symlink's size is set to that of its target; a device number is kept
// for devices only.
func (w *Writer) AddInode(n tree.Inode) error {
	if w.err != nil {
		return w.err
	}
	if n.Kind == tree.File && n.Size != 0 {
		return fmt.Errorf("inode %d: a file of %d bytes without its content: %w", n.Ino, n.Size, tree.ErrInvalid)
	}
	cell, err := w.cell(n)
	if err != nil {
		return err
	}
	if n.Kind == tree.File {
		cell.Alloc, cell.Hash = 0, emptyHash
	}
	w.push(&cell)
	return nil
}

// AddFile adds a regular file of n.Size bytes, read from r. data lists the
// ranges that hold data, ascending, as tree.DataRanges takes them; between them
// are holes, which r is not asked for and which cost nothing. Nil means all of
// the file. The inode's Hash and Alloc are computed; the hash is returned. Bytes
// are read before AddFile returns and compressed later. An inode whose reading
// failed is not in the pack.
func (w *Writer) AddFile(n tree.Inode, r io.ReaderAt, data []tree.Range) (tree.Hash, error) {
	if w.err != nil {
		return tree.Hash{}, w.err
	}
	if n.Kind != tree.File {
		return tree.Hash{}, fmt.Errorf("inode %d: a %s has no content: %w", n.Ino, n.Kind, tree.ErrInvalid)
	}
	if n.Size == 0 {
		return emptyHash, w.AddInode(n)
	}
	data, alloc, err := tree.DataRanges(data, n.Size)
	if err != nil {
		return tree.Hash{}, fmt.Errorf("inode %d: %w", n.Ino, err)
	}
	n.Alloc = alloc
	cell, err := w.cell(n)
	if err != nil {
		return tree.Hash{}, err
	}
	sum, err := tree.NewContentHasher(n.Size, data)
	if err != nil {
		return tree.Hash{}, fmt.Errorf("inode %d: %w", n.Ino, err)
	}
	cell.Content = Here
	sparse := alloc < n.Size
	in := content{r: r, data: data, sum: sum}
	if alloc > chunkSize {
		err = w.addLarge(&cell, &in)
	} else {
		err = w.addSmall(&cell, &in, sparse)
	}
	if err != nil {
		return tree.Hash{}, fmt.Errorf("inode %d: %w", n.Ino, err)
	}
	return cell.Hash, nil
}

// addSmall adds a file whose data fit in one frame.
func (w *Writer) addSmall(cell *inodeCell, in *content, sparse bool) error {
	data := in.data // in.next takes it off
	j := w.pipe.job()
	raw, err := in.next(j.raw)
	j.raw = raw
	if err == nil {
		cell.Hash, err = in.sum.Sum()
	}
	if err != nil {
		w.pipe.recycle(j)
		return err
	}
	if sparse {
		if err := w.addRanges(cell, data); err != nil {
			w.pipe.recycle(j)
			return err
		}
	}
	first, known := w.byHash[cell.Hash]
	switch {
	case len(j.raw) == 0:
		w.pipe.recycle(j)
		w.push(cell)
		return nil
	case known && !sparse:
		w.pipe.recycle(j)
		w.push(cell)
		w.inodes[len(w.inodes)-1].sameAs = int32(first) + 1
		return nil
	}
	if !sparse {
		w.byHash[cell.Hash] = len(w.inodes)
	}
	if w.opts.Kind == Base && len(j.raw) <= clusterFile {
		return w.addToCluster(cell, j)
	}
	if cell.loc.frame, err = w.send(j); err != nil {
		return err
	}
	w.push(cell)
	return nil
}

// addToCluster puts the bytes of j into the open frame, or makes j the open
// frame.
func (w *Writer) addToCluster(cell *inodeCell, j *frameJob) error {
	if w.cluster != nil && len(w.cluster.raw)+len(j.raw) > clusterSize {
		if err := w.flushCluster(); err != nil {
			w.pipe.recycle(j)
			return err
		}
	}
	if w.cluster == nil {
		w.cluster = j
	} else {
		cell.loc.off = uint32(len(w.cluster.raw))
		w.cluster.raw = append(w.cluster.raw, j.raw...)
		w.pipe.recycle(j)
	}
	w.members = append(w.members, len(w.inodes))
	w.push(cell)
	return nil
}

func (w *Writer) flushCluster() error {
	if w.cluster == nil {
		return nil
	}
	frame, err := w.send(w.cluster)
	if err != nil {
		return err
	}
	for _, i := range w.members {
		w.inodes[i].frame = frame
	}
	w.cluster, w.members = nil, w.members[:0]
	return nil
}

// addLarge adds a file as a run of full frames and a last one.
func (w *Writer) addLarge(cell *inodeCell, in *content) error {
	data := in.data // in.next takes it off
	for first := true; ; {
		j := w.pipe.job()
		raw, err := in.next(j.raw)
		j.raw = raw
		if err != nil || len(raw) == 0 {
			w.pipe.recycle(j)
			if err != nil {
				return err
			}
			break
		}
		frame, err := w.send(j)
		if err != nil {
			return err
		}
		if first {
			cell.loc.frame, first = frame, false
		}
	}
	var err error
	if cell.Hash, err = in.sum.Sum(); err != nil {
		return err
	}
	if cell.Alloc < cell.Size {
		if err := w.addRanges(cell, data); err != nil {
			return err
		}
	}
	w.push(cell)
	return nil
}

// send puts a frame into the pipe. Its error is the end of the Writer.
func (w *Writer) send(j *frameJob) (uint32, error) {
	n, err := w.pipe.send(j)
	if err != nil {
		w.err = err
	}
	return n, err
}

func (w *Writer) addRanges(cell *inodeCell, data []tree.Range) error {
	ref, err := w.record(appendRanges(nil, data))
	cell.loc.ranges = ref
	return err
}

// AddForeign adds a regular file whose bytes are in another pack, under the
// same inode number, or under fromIno when that is not zero. Hash, Size and
// Alloc must be set. An empty file has no bytes and becomes an ordinary one.
func (w *Writer) AddForeign(n tree.Inode, pack PackID, fromIno tree.Ino) error {
	if w.err != nil {
		return w.err
	}
	switch {
	case n.Kind != tree.File:
		return fmt.Errorf("inode %d: a %s has no content: %w", n.Ino, n.Kind, tree.ErrInvalid)
	case n.Size == 0:
		return w.AddInode(n)
	case n.Alloc > n.Size:
		return fmt.Errorf("inode %d: %d bytes of data in a file of %d: %w", n.Ino, n.Alloc, n.Size, tree.ErrInvalid)
	}
	cell, err := w.cell(n)
	if err != nil {
		return err
	}
	dep, known := w.depOf[pack]
	if !known {
		if len(w.deps) == maxDeps {
			return fmt.Errorf("inode %d: more than %d foreign packs: %w", n.Ino, maxDeps, tree.ErrTooBig)
		}
		dep = uint64(len(w.deps))
		w.depOf[pack] = dep
		w.deps = append(w.deps, pack)
	}
	cell.Content, cell.dep = Foreign, dep
	if fromIno != n.Ino {
		cell.FromIno = fromIno
	}
	w.push(&cell)
	return nil
}

// SetSection stores data under a name: a lower-case letter, then up to 31
// lower-case letters, digits, dots, dashes or underscores. Its meaning is the
// caller's. A second call for a name replaces the first.
func (w *Writer) SetSection(name string, data []byte) error {
	switch {
	case w.err != nil:
		return w.err
	case !validSectionName(name):
		return fmt.Errorf("section name %q: %w", name, tree.ErrInvalid)
	case len(data) > maxNamedSection:
		return fmt.Errorf("section %s of %d bytes, more than %d: %w", name, len(data), maxNamedSection, tree.ErrTooBig)
	}
	if _, known := w.named[name]; !known && len(w.named) == maxSections-5 {
		return fmt.Errorf("section %s: more than %d sections: %w", name, maxSections-5, tree.ErrTooBig)
	}
	w.named[name] = slices.Clone(data)
	return nil
}

// cell checks an inode and stores what goes into the heap.
func (w *Writer) cell(n tree.Inode) (inodeCell, error) {
	if err := checkInode(&n); err != nil {
		return inodeCell{}, err
	}
	if n.Kind == tree.Symlink {
		n.Size = uint64(len(n.Link))
	} else {
		n.Link = ""
	}
	if !hasRdev(n.Kind) {
		n.Rdev = 0
	}
	cell := inodeCell{Inode: Inode{Inode: n}}
	cell.Xattrs = nil // kept in the heap only
	if len(n.Xattrs) > 0 {
		set, err := appendXattrs(nil, n.Xattrs)
		if err != nil {
			return cell, fmt.Errorf("inode %d: xattrs: %w", n.Ino, err)
		}
		if cell.xattrs, err = w.record(set); err != nil {
			return cell, fmt.Errorf("inode %d: xattrs: %w", n.Ino, err)
		}
	}
	if len(n.Link) > inlineLink {
		var err error
		if cell.link, err = w.record([]byte(n.Link)); err != nil {
			return cell, fmt.Errorf("inode %d: link target: %w", n.Ino, err)
		}
	}
	return cell, nil
}

// push adds an inode that is complete but for the frame of its bytes.
func (w *Writer) push(cell *inodeCell) {
	if cap(w.arena)-len(w.arena) < maxInodeBody {
		w.arena = make([]byte, 0, min(64<<10, max(2<<10, 2*cap(w.arena))))
	}
	at := len(w.arena)
	p := pendingInode{ino: cell.Ino, frame: cell.loc.frame, off: cell.loc.off}
	w.arena, p.tag = cell.appendBody(w.arena)
	p.body = w.arena[at:len(w.arena):len(w.arena)]
	p.placed = cell.Content == Here && cell.Alloc > 0
	w.inodes = append(w.inodes, p)
	w.info.Inodes++
	w.info.MaxIno = max(w.info.MaxIno, cell.Ino)
	if cell.Content == Here {
		w.info.LogicalBytes += int64(cell.Size)
	}
}

// record puts b into the heap unless an equal record is there already.
func (w *Writer) record(b []byte) (heapRef, error) {
	if ref, known := w.records[string(b)]; known {
		return ref, nil
	}
	if len(b) > maxHeapRecord || uint64(len(w.heap)+heapHeadLen+len(b)) > math.MaxUint32 {
		return heapRef{}, fmt.Errorf("no room for %d bytes beside the %d there: %w", len(b), len(w.heap), tree.ErrTooBig)
	}
	ref := heapRef{off: uint32(len(w.heap)), len: uint32(len(b))}
	w.heap = appendHeapRecord(w.heap, ref.off, b)
	w.records[string(b)] = ref
	return ref, nil
}

// Finish writes everything that is not yet written and ends the pack. It does
// not sync or close the underlying writer.
func (w *Writer) Finish() (Info, error) {
	if w.err != nil {
		w.Abort()
		return Info{}, w.err
	}
	info, err := w.finish()
	w.Abort()
	if err != nil {
		w.err = err
		return Info{}, err
	}
	w.err = errFinished
	return info, nil
}

var errFinished = errors.New("the pack is finished")

// Abort ends the Writer's goroutines. The pack, if it is not finished, is left
// cut short, and no reader takes it for a whole one. Abort may be called at any
// time, also after Finish.
func (w *Writer) Abort() {
	if w.pipe != nil {
		w.pipe.stop() //nolint:errcheck // a pack that is given up may well have failed
	}
	if w.err == nil {
		w.err = errors.New("the pack was aborted")
	}
}

func (w *Writer) finish() (Info, error) {
	if err := w.flushCluster(); err != nil {
		return Info{}, err
	}
	if err := w.pipe.stop(); err != nil {
		return Info{}, err
	}
	for i := range w.inodes {
		if n := &w.inodes[i]; n.sameAs > 0 {
			first := &w.inodes[n.sameAs-1]
			n.frame, n.off = first.frame, first.off
		}
	}
	if err := w.sort(); err != nil {
		return Info{}, err
	}

	var t toc
	add := func(name string, codec uint8, data []byte, raw, count int) error {
		if len(data) == 0 && count == 0 && name != "" && name[0] < 'a' {
			return nil // a part of the format that this pack does not need
		}
		s := section{
			name: name, codec: codec,
			off:    w.pipe.off + skippableLen,
			stored: uint64(len(data)), raw: uint64(raw), count: uint64(count),
			hash: sha256.Sum256(data),
		}
		if name[0] < 'a' {
			s.flags = sectionCritical
		}
		if len(data) > math.MaxUint32 {
			return fmt.Errorf("section %s of %d bytes: %w", name, len(data), tree.ErrTooBig)
		}
		t.sections = append(t.sections, s)
		if err := w.pipe.put(appendSkippable(nil, skippableSection, len(data))); err != nil {
			return err
		}
		return w.pipe.put(data)
	}
	if err := add(tagHeap, codecRaw, w.heap, len(w.heap), 0); err != nil {
		return Info{}, err
	}
	frames := buildFrames(w.pipe.frames)
	if err := add(tagFrames, codecRaw, frames, len(frames), len(w.pipe.frames)); err != nil {
		return Info{}, err
	}
	var deps []byte
	for _, id := range w.deps {
		deps = append(deps, id[:]...)
	}
	if err := add(tagDeps, codecRaw, deps, len(deps), len(w.deps)); err != nil {
		return Info{}, err
	}
	for _, name := range sortedKeys(w.named) {
		data := w.named[name]
		stored, codec, err := w.pack(data)
		if err != nil {
			return Info{}, err
		}
		if err := add(name, codec, stored, len(data), 0); err != nil {
			return Info{}, err
		}
	}
	dirents := w.direntTree()
	if err := add(tagDirents, codecRaw, dirents.data, len(dirents.data), dirents.leaves); err != nil {
		return Info{}, err
	}
	inodes := w.inodeTree(&dirents)
	if err := add(tagInodes, codecRaw, inodes.data, len(inodes.data), inodes.leaves); err != nil {
		return Info{}, err
	}

	slices.SortFunc(t.sections, func(a, b section) int { return cmp.Compare(a.name, b.name) })
	t.info = w.info
	return w.end(t)
}

// end writes the table of contents and the trailer.
func (w *Writer) end(t toc) (Info, error) {
	table := t.appendTo(nil)
	if len(table) > maxTOC {
		return Info{}, fmt.Errorf("table of contents of %d bytes: %w", len(table), tree.ErrTooBig)
	}
	header := makeHeader(w.opts.Kind)
	end := trailer{
		tocOff: w.pipe.off + skippableLen,
		tocLen: uint32(len(table)),
		id:     packID(header[:], table),
	}
	tail := end.bytes()
	for _, b := range [][]byte{appendSkippable(nil, skippableTOC, len(table)+trailerLen), table, tail[:]} {
		if err := w.pipe.put(b); err != nil {
			return Info{}, err
		}
	}
	if err := w.pipe.out.Flush(); err != nil {
		return Info{}, err
	}
	info := t.info
	info.ID, info.Kind, info.StoredBytes = end.id, w.opts.Kind, int64(w.pipe.off)
	return info, nil
}

// pack compresses a named section, if that helps.
func (w *Writer) pack(data []byte) ([]byte, uint8, error) {
	out, err := w.pipe.encodeAll(data)
	if err != nil || len(out) >= len(data) {
		return data, codecRaw, err
	}
	return out, codecZstd, nil
}

func (w *Writer) sort() error {
	slices.SortFunc(w.dirents, func(a, b Dirent) int {
		return cmp.Or(cmp.Compare(a.Dir, b.Dir), cmp.Compare(a.Name, b.Name))
	})
	for i := 1; i < len(w.dirents); i++ {
		if a, b := &w.dirents[i-1], &w.dirents[i]; a.Dir == b.Dir && a.Name == b.Name {
			return fmt.Errorf("name %q in directory %d was added twice: %w", a.Name, a.Dir, tree.ErrExist)
		}
	}
	slices.SortFunc(w.inodes, func(a, b pendingInode) int { return cmp.Compare(a.ino, b.ino) })
	for i := 1; i < len(w.inodes); i++ {
		if ino := w.inodes[i].ino; w.inodes[i-1].ino == ino {
			return fmt.Errorf("inode %d was added twice: %w", ino, tree.ErrExist)
		}
	}
	return nil
}

func (w *Writer) direntTree() builtTree {
	return buildTree(tagDirents, len(w.dirents), func(i int, key, val []byte) ([]byte, []byte) {
		d := &w.dirents[i]
		return direntKey(key, d.Dir, d.Name), appendDirent(val, *d)
	})
}

// naming is the place of the first dirent, in byte order, that names an inode.
type naming struct {
	ino    tree.Ino
	dirent int
}

// inodeTree joins the inodes of the pack with those that its dirents name, so
// that every name can be found from its inode.
func (w *Writer) inodeTree(dirents *builtTree) builtTree {
	var names []naming
	for i := range w.dirents {
		if w.dirents[i].Op == Put {
			names = append(names, naming{w.dirents[i].Ino, i})
		}
	}
	slices.SortStableFunc(names, func(a, b naming) int { return cmp.Compare(a.ino, b.ino) })
	names = slices.CompactFunc(names, func(a, b naming) bool { return a.ino == b.ino })

	// The cells are the union of both lists: index of the inode, or -1, and of
	// the dirent, or -1.
	type pair struct{ inode, dirent int }
	var cells []pair
	for i, k := 0, 0; i < len(w.inodes) || k < len(names); {
		switch {
		case k == len(names) || i < len(w.inodes) && w.inodes[i].ino < names[k].ino:
			cells = append(cells, pair{i, -1})
			i++
		case i == len(w.inodes) || names[k].ino < w.inodes[i].ino:
			cells = append(cells, pair{-1, names[k].dirent})
			k++
		default:
			cells = append(cells, pair{i, names[k].dirent})
			i++
			k++
		}
	}
	return buildTree(tagInodes, len(cells), func(i int, key, val []byte) ([]byte, []byte) {
		var n pendingInode // of an inode that is only named: nothing but a reference
		if k := cells[i].inode; k >= 0 {
			n = w.inodes[k]
		}
		val = append(val, n.tag)
		if k := cells[i].dirent; k >= 0 {
			n.ino = w.dirents[k].Ino
			val[len(val)-1] |= inodeNamed
			val = binary.AppendUvarint(val, dirents.ref(k))
		}
		val = append(val, n.body...)
		if n.placed {
			val = location{frame: n.frame, off: n.off}.appendPlace(val)
		}
		return inodeKey(key, n.ino), val
	})
}

func sortedKeys(m map[string][]byte) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// content reads the data of a file in order and hashes them.
type content struct {
	r    io.ReaderAt
	data []tree.Range // in normal form, not yet read to their end
	read uint64       // bytes read of the first of them
	sum  *tree.ContentHasher
}

// next fills buf up to its capacity with the data that come next. It returns
// nothing at the end of the data.
func (c *content) next(buf []byte) ([]byte, error) {
	for len(c.data) > 0 && len(buf) < cap(buf) {
		at, end := c.data[0].Start+c.read, c.data[0].End
		n := min(uint64(cap(buf)-len(buf)), end-at)
		piece := buf[len(buf) : len(buf)+int(n)]
		if got, err := c.r.ReadAt(piece, int64(at)); got < len(piece) {
			if err == nil || errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return buf, fmt.Errorf("read %d bytes at offset %d: %w", n, at, err)
		}
		if _, err := c.sum.Write(piece); err != nil {
			return buf, err
		}
		buf = buf[:len(buf)+int(n)]
		if c.read += n; at+n == end {
			c.data, c.read = c.data[1:], 0
		}
	}
	return buf, nil
}
