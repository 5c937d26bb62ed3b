package overlay

import (
	"errors"
	"fmt"
	"io"
	"os"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"

	"golang.org/x/sys/unix"
)

const (
	page = 4096

	// joinLimit is up to which size a write and the filling of its first and
	// last page go to the data file in one piece.
	joinLimit = 128 << 10
)

// Size is the content's length in bytes.
func (c *content) Size() uint64 { return c.n.Size }

// ReadAt follows io.ReaderAt.
func (c *content) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read at %d: %w", off, tree.ErrInvalid)
	}
	at := uint64(off)
	if at >= c.n.Size {
		return 0, io.EOF
	}
	want := min(uint64(len(p)), c.n.Size-at)
	for done := uint64(0); done < want; {
		src, end := c.n.Piece(at + done)
		part := p[done:min(want, end-at)]
		if err := c.readPiece(src, part, int64(at+done)); err != nil {
			return int(done), err
		}
		done += uint64(len(part))
	}
	if want < uint64(len(p)) {
		return int(want), io.EOF
	}
	return int(want), nil
}

// readPiece reads bytes of one source. What the source is too short for is
// zeros.
func (c *content) readPiece(src upper.Source, p []byte, off int64) error {
	var r io.ReaderAt
	var err error
	switch src {
	case upper.Private:
		r, err = c.f.data(c.fl, c.n.Gen, false)
	case upper.Beneath:
		r, err = c.fl.lowerContent(c.lower)
	default:
		clear(p)
		return nil
	}
	if err != nil {
		return err
	}
	n, err := r.ReadAt(p, off)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("content of inode %d at %d: %w", c.n.Ino, off, err)
	}
	clear(p[n:])
	return nil
}

// Data is the first range at or after off that may hold anything but zeros.
func (c *content) Data(off uint64) (tree.Range, bool) {
	for off < c.n.Size {
		src, end := c.n.Piece(off)
		end = min(end, c.n.Size)
		switch src {
		case upper.Private:
			return tree.Range{Start: off, End: end}, true
		case upper.Beneath:
			low, err := c.fl.lowerContent(c.lower)
			if err != nil {
				// Reading it will tell; until then it counts as data.
				return tree.Range{Start: off, End: end}, true
			}
			if r, ok := low.Data(off); ok && r.Start < end {
				return tree.Range{Start: max(off, r.Start), End: min(end, r.End)}, true
			}
		}
		off = end
	}
	return tree.Range{}, false
}

// dataIn is how many bytes of [start, end) are data and not holes.
func (c *content) dataIn(start, end uint64) (sum uint64) {
	for off := start; off < end; {
		r, ok := c.Data(off)
		if !ok || r.Start >= end {
			break
		}
		sum += min(r.End, end) - r.Start
		off = r.End
	}
	return sum
}

// lockedContent is content that takes the lock for each call.
type lockedContent struct {
	f    *FS
	ino  tree.Ino
	size uint64
}

func (l *lockedContent) Size() uint64 { return l.size }

func (l *lockedContent) ReadAt(p []byte, off int64) (n int, err error) {
	err2 := l.f.view(l.ino, func(c File) { n, err = c.ReadAt(p, off) })
	return n, errors.Join(err2, err)
}

func (l *lockedContent) Data(off uint64) (r tree.Range, ok bool) {
	if err := l.f.view(l.ino, func(c File) { r, ok = c.Data(off) }); err != nil {
		return tree.Range{Start: off, End: l.size}, off < l.size
	}
	return r, ok
}

// view runs fn on the content of a regular file. fn runs under the inode's
// content lock when the session changed the content, and under none otherwise.
func (f *FS) view(ino tree.Ino, fn func(File)) error {
	f.mu.RLock()
	n, lower := f.up.Inode(ino), f.lower
	f.mu.RUnlock()
	if n != nil && n.Kind != tree.File {
		return notFile(ino, n.Kind)
	}
	if n == nil || !n.Data {
		return f.viewLower(ino, lower, fn)
	}
	fl := f.handles.grab(ino)
	defer f.Release(ino)
	fl.mu.RLock()
	defer fl.mu.RUnlock()
	f.mu.RLock()
	n, lower = f.up.Inode(ino), f.lower
	f.mu.RUnlock()
	if n == nil || !n.Data {
		return f.viewLower(ino, lower, fn)
	}
	fn(&content{f: f, fl: fl, n: n, lower: lower})
	return nil
}

func (f *FS) viewLower(ino tree.Ino, lower Lower, fn func(File)) error {
	low, err := lower.Open(ino)
	if err == nil {
		fn(low)
		return nil
	}
	if in, err := lower.Inode(ino); err == nil && in.Kind != tree.File {
		return notFile(ino, in.Kind)
	}
	if errors.Is(err, tree.ErrNotExist) {
		return fmt.Errorf("inode %d: %w", ino, tree.ErrStale)
	}
	return fmt.Errorf("content of inode %d: %w", ino, err)
}

// Data is the content of a regular file as the session has it. Each call on it
// sees the content of that moment; its size is that of now.
func (f *FS) Data(ino tree.Ino) (File, error) {
	var size uint64
	if err := f.view(ino, func(c File) { size = c.Size() }); err != nil {
		return nil, err
	}
	return &lockedContent{f: f, ino: ino, size: size}, nil
}

// ReadAt is read(2): fewer bytes than asked, or none, only at the end of the
// file. It never answers io.EOF.
func (f *FS) ReadAt(ino tree.Ino, p []byte, off uint64) (n int, err error) {
	if off > tree.MaxFileSize {
		return 0, nil
	}
	viewErr := f.view(ino, func(c File) { n, err = c.ReadAt(p, int64(off)) })
	if viewErr != nil {
		return 0, viewErr
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// Seek answers lseek(2) with SeekData or SeekHole; tree.ErrNoData at or past
// the end, or when only a hole follows.
func (f *FS) Seek(ino tree.Ino, off uint64, whence int) (at uint64, err error) {
	if whence != SeekData && whence != SeekHole {
		return 0, fmt.Errorf("seek with whence %d: %w", whence, tree.ErrInvalid)
	}
	viewErr := f.view(ino, func(c File) {
		if off >= c.Size() {
			err = fmt.Errorf("seek to %d of %d: %w", off, c.Size(), tree.ErrNoData)
			return
		}
		r, ok := c.Data(off)
		if whence == SeekData {
			if at = r.Start; !ok {
				err = fmt.Errorf("seek to %d: %w", off, tree.ErrNoData)
			}
			return
		}
		for at = off; ok && r.Start <= at; r, ok = c.Data(at) {
			at = r.End
		}
		at = min(at, c.Size())
	})
	return at, errors.Join(viewErr, err)
}

// edit is one change of a file's content, under its lock.
type edit struct {
	content
	c      Caller
	before uint64 // size
}

// editing runs fn with the content of ino locked, copied up as far as the
// record goes, and settled if fn is going to change bytes. n is fn's to change.
func (f *FS) editing(c Caller, ino tree.Ino, fn func(e *edit) error) error {
	fl := f.handles.grab(ino)
	defer f.Release(ino)
	fl.mu.Lock()
	defer fl.mu.Unlock()
	f.mu.RLock()
	n, err := f.record(ino)
	lower := f.lower
	f.mu.RUnlock()
	if err != nil {
		return err
	}
	if n.Kind != tree.File {
		return notFile(ino, n.Kind)
	}
	if n.Nlink == 0 && !n.New && !n.Data && f.handles.refs(ino) == 1 {
		return fmt.Errorf("inode %d was removed: %w", ino, tree.ErrStale)
	}
	own := *n
	own.CopyUp(f.up.NextGen(ino))
	e := edit{content: content{f: f, fl: fl, n: &own, lower: lower}, c: c, before: n.Size}
	return fn(&e)
}

// commit records e's change as one frame: the inode's record as it is by now,
// copied up, changed by set, and then changes.
func (e *edit) commit(reserved uint64, set func(n *upper.Inode, now tree.Time), changes ...upper.Change) (tree.Attr, error) {
	f := e.f
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.begin(e.c)
	n, err := t.inode(e.n.Ino)
	if err != nil {
		f.unreserve(reserved)
		return tree.Attr{}, err
	}
	n.CopyUp(e.n.Gen)
	set(n, t.now)
	t.changes = append(t.changes, changes...)
	t.result = n.Ino
	if err := t.commitReserved(reserved); err != nil {
		return tree.Attr{}, err
	}
	return n.Attr, nil
}

// touched says of a record that e's caller changed its bytes.
func (e *edit) touched(n *upper.Inode, now tree.Time) {
	n.Mtime, n.Ctime = now, now
	n.Hash = tree.Hash{}
	n.LastOp, n.Written = e.c.Op, true
	if !e.c.keepsPriv() {
		killPriv(n)
	}
}

// WriteAt writes p at off, the whole of it or, with an error, nothing that
// counts.
func (f *FS) WriteAt(c Caller, ino tree.Ino, p []byte, off uint64) (int, error) {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	if off > tree.MaxFileSize || uint64(len(p)) > tree.MaxFileSize-off {
		return 0, fmt.Errorf("write of %d bytes at %d: %w", len(p), off, tree.ErrTooBig)
	}
	if len(p) == 0 {
		return 0, nil
	}
	err := f.editing(c, ino, func(e *edit) error { return e.write(p, off) })
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func (e *edit) write(p []byte, off uint64) error {
	f := e.f
	f.settle(e.c, e.fl)
	end := off + uint64(len(p))
	size := max(e.n.Size, end)
	start := e.gapBefore(off)
	stop := e.gapAfter(end, size)
	grown := stop - start - e.n.Extents().PrivateIn(start, stop)
	alloc := e.n.Alloc + grown - min(e.n.Alloc, e.beneathIn(start, stop))
	if err := f.reserve(grown); err != nil {
		return err
	}
	if err := e.put(p, off, start, stop); err != nil {
		f.unreserve(grown)
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.begin(e.c)
	n, err := f.record(e.n.Ino)
	if err != nil {
		f.unreserve(grown)
		return err
	}
	if kill := !e.c.keepsPriv() && hasPriv(n); kill || !n.Data {
		// The record itself changes too, beside what a Write says of it.
		n = t.stage(n)
		n.CopyUp(e.n.Gen)
		if kill {
			killPriv(n)
		}
	}
	t.result = e.n.Ino
	t.changes = append(t.changes, upper.Change{
		Type: upper.Write, Ino: e.n.Ino, Start: start, End: stop,
		Size: size, Alloc: alloc, Mode: n.Mode, Time: t.now,
	})
	if err := t.commitReserved(grown); err != nil {
		return err
	}
	f.dirty.add(e.n.Ino)
	return nil
}

// gapBefore is where the run of bytes that are not private and end at off
// starts, no further back than off's page.
func (e *edit) gapBefore(off uint64) uint64 {
	start := off
	for at := off &^ (page - 1); at < off; {
		src, end := e.n.Piece(at)
		if src == upper.Private {
			start = off
		} else if start == off {
			start = at
		}
		at = end
	}
	return start
}

// gapAfter is where the run of bytes that are not private and start at end
// stops, no further on than end's page and the file's size.
func (e *edit) gapAfter(end, size uint64) uint64 {
	limit := min((end+page-1)&^(page-1), size)
	for end < limit {
		src, stop := e.n.Piece(end)
		if src == upper.Private {
			break
		}
		end = min(stop, limit)
	}
	return end
}

// beneathIn is how many bytes of data of the lower content show in [start, end).
func (e *edit) beneathIn(start, end uint64) uint64 {
	return e.dataIn(start, end) - e.n.Extents().PrivateIn(start, min(end, e.n.Size))
}

// put writes p at off, and what fills [start, off) and the rest up to stop, to
// the data file. Nothing of it counts until the journal says so.
func (e *edit) put(p []byte, off, start, stop uint64) error {
	fd, err := e.f.data(e.fl, e.n.Gen, true)
	if err != nil {
		return err
	}
	write := func(b []byte, at uint64) error {
		if _, err := fd.WriteAt(b, int64(at)); err != nil {
			return hostErr(fmt.Sprintf("write content of inode %d", e.n.Ino), err)
		}
		return nil
	}
	end := off + uint64(len(p))
	if start == off && stop == end {
		return write(p, off)
	}
	head, tail := make([]byte, off-start), make([]byte, stop-end)
	if err := e.fill(head, start); err != nil {
		return err
	}
	if err := e.fill(tail, end); err != nil {
		return err
	}
	if len(p) <= joinLimit {
		return write(append(append(head, p...), tail...), start)
	}
	if err := write(head, start); err != nil {
		return err
	}
	if err := write(p, off); err != nil {
		return err
	}
	return write(tail, end)
}

// fill reads what the file has at off now, zeros past its end.
func (e *edit) fill(b []byte, off uint64) error {
	if len(b) == 0 {
		return nil
	}
	n, err := e.ReadAt(b, int64(off))
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	clear(b[n:])
	return nil
}

// truncate is SetAttr with a size.
func (f *FS) truncate(c Caller, ino tree.Ino, s SetAttr) (attr tree.Attr, err error) {
	if *s.Size > tree.MaxFileSize {
		return attr, fmt.Errorf("size %d: %w", *s.Size, tree.ErrTooBig)
	}
	err = f.editing(c, ino, func(e *edit) error {
		attr, err = e.truncate(s)
		return err
	})
	return attr, err
}

func (e *edit) truncate(s SetAttr) (tree.Attr, error) {
	size := *s.Size
	if size == e.before {
		// The bytes stay as they are, so this is no change of content.
		e.f.mu.Lock()
		defer e.f.mu.Unlock()
		t := e.f.begin(e.c)
		n, err := t.inode(e.n.Ino)
		if err != nil {
			return tree.Attr{}, err
		}
		n.Mtime = t.now
		if !e.c.keepsPriv() {
			killPriv(n)
		}
		s.apply(n, t.now)
		return n.Attr, t.commit()
	}
	e.f.settle(e.c, e.fl)
	var changes []upper.Change
	lost := uint64(0)
	if size < e.before {
		lost = e.dataIn(size, e.before)
		changes = append(changes, upper.Change{Type: upper.Cut, Ino: e.n.Ino, Start: size})
	}
	attr, err := e.commit(0, func(n *upper.Inode, now tree.Time) {
		n.Size = size
		n.Alloc -= min(n.Alloc, lost)
		n.Shown = min(n.Shown, size)
		e.touched(n, now)
		s.apply(n, now)
	}, changes...)
	if err == nil && size < e.before {
		e.release(func(fd *os.File) error { return fd.Truncate(int64(size)) })
	}
	return attr, err
}

// release gives space of the data file back for bytes that the journal no
// longer counts. A failure costs space until the inode goes, nothing else.
func (e *edit) release(fn func(fd *os.File) error) {
	if fd, err := e.f.data(e.fl, e.n.Gen, false); err == nil {
		_ = fn(fd)
	}
}

// Fallocate makes room (mode 0, with or without FallocKeepSize), punches a hole
// (FallocPunchHole, which needs FallocKeepSize) or writes zeros
// (FallocZeroRange). Everything else is tree.ErrNotSup. Room in the lower
// content is not copied up, and none is kept past the end of the file.
func (f *FS) Fallocate(c Caller, ino tree.Ino, mode uint32, off, n uint64) error {
	f.barrier.RLock()
	defer f.barrier.RUnlock()
	if n == 0 {
		return fmt.Errorf("fallocate of nothing: %w", tree.ErrInvalid)
	}
	if off > tree.MaxFileSize || n > tree.MaxFileSize-off {
		return fmt.Errorf("fallocate %d bytes at %d: %w", n, off, tree.ErrTooBig)
	}
	return f.editing(c, ino, func(e *edit) error {
		switch mode {
		case 0, FallocKeepSize:
			return e.allocate(off, off+n, mode == 0)
		case FallocPunchHole | FallocKeepSize:
			return e.zero(off, off+n, false)
		case FallocZeroRange, FallocZeroRange | FallocKeepSize:
			return e.zero(off, off+n, mode == FallocZeroRange)
		}
		return fmt.Errorf("fallocate mode %#x: %w", mode, tree.ErrNotSup)
	})
}

// zero makes [start, end) a hole, as far as the file goes or, with grow, so that
// it goes that far.
func (e *edit) zero(start, end uint64, grow bool) error {
	size := e.before
	if grow {
		size = max(size, end)
	}
	end = min(end, e.before)
	if start >= end && size == e.before {
		return nil
	}
	e.f.settle(e.c, e.fl)
	var changes []upper.Change
	lost := uint64(0)
	if start < end {
		lost = e.dataIn(start, end)
		// What was never lower content is a hole when nothing is said of it.
		changes = append(changes, upper.Change{Type: upper.Forget, Ino: e.n.Ino, Start: start, End: end})
		if below := min(end, e.n.Shown); start < below {
			changes = append(changes, upper.Change{Type: upper.Zero, Ino: e.n.Ino, Start: start, End: below})
		}
	}
	_, err := e.commit(0, func(n *upper.Inode, now tree.Time) {
		n.Size = size
		n.Alloc -= min(n.Alloc, lost)
		e.touched(n, now)
	}, changes...)
	if err == nil && start < end {
		e.release(func(fd *os.File) error {
			return unix.Fallocate(int(fd.Fd()), unix.FALLOC_FL_KEEP_SIZE|unix.FALLOC_FL_PUNCH_HOLE, int64(start), int64(end-start))
		})
	}
	return err
}

// allocate makes holes in [start, end) private zeros.
func (e *edit) allocate(start, end uint64, grow bool) error {
	size := e.before
	if grow {
		size = max(size, end)
	}
	end = min(end, size)
	var holes []upper.Change
	grown := uint64(0)
	for at := start; at < end; {
		src, stop := e.n.Piece(at)
		if stop = min(stop, end); src == upper.Zeros {
			holes = append(holes, upper.Change{Type: upper.Own, Ino: e.n.Ino, Start: at, End: stop})
			grown += stop - at
		}
		at = stop
	}
	if len(holes) == 0 {
		return nil
	}
	if err := e.f.reserve(grown); err != nil {
		return err
	}
	if err := e.zeroRoom(holes); err != nil {
		e.f.unreserve(grown)
		return err
	}
	if size != e.before {
		e.f.settle(e.c, e.fl)
	}
	_, err := e.commit(grown, func(n *upper.Inode, now tree.Time) {
		last, written := n.LastOp, n.Written
		e.touched(n, now)
		if size == e.before {
			n.LastOp, n.Written = last, written // not a byte reads differently
		}
		n.Size = size
		n.Alloc += grown
	}, holes...)
	if err == nil {
		e.f.dirty.add(e.n.Ino)
	}
	return err
}

// zeroRoom allots zeroed space in the data file. What a crash or an earlier
// change left there is removed first.
func (e *edit) zeroRoom(holes []upper.Change) error {
	fd, err := e.f.data(e.fl, e.n.Gen, true)
	if err != nil {
		return err
	}
	for _, h := range holes {
		start, n := int64(h.Start), int64(h.End-h.Start)
		err := unix.Fallocate(int(fd.Fd()), unix.FALLOC_FL_KEEP_SIZE|unix.FALLOC_FL_PUNCH_HOLE, start, n)
		if err == nil {
			err = unix.Fallocate(int(fd.Fd()), 0, start, n)
		}
		if err != nil {
			return hostErr(fmt.Sprintf("allot space for inode %d", e.n.Ino), err)
		}
	}
	return nil
}

// copyPiece is how much CopyRange moves at a time, and copyLimit how much one
// call does at most, so that nobody waits long for it.
const (
	copyPiece = 1 << 20
	copyLimit = 64 << 20
)

// CopyRange copies up to n bytes and tells how many: fewer at the end of src,
// or when n is large. Ranges of one file that overlap are tree.ErrInvalid.
func (f *FS) CopyRange(c Caller, src tree.Ino, srcOff uint64, dst tree.Ino, dstOff, n uint64) (done uint64, err error) {
	a, err := f.Attr(src)
	if err != nil {
		return 0, err
	}
	n = min(n, copyLimit, a.Size-min(a.Size, srcOff))
	if src == dst && n > 0 && srcOff < dstOff+n && dstOff < srcOff+n {
		return 0, fmt.Errorf("copy within inode %d: ranges overlap: %w", src, tree.ErrInvalid)
	}
	buf := make([]byte, min(n, copyPiece))
	for done < n {
		got, err := f.ReadAt(src, buf[:min(n-done, uint64(len(buf)))], srcOff+done)
		if got > 0 {
			var put int
			put, err = f.WriteAt(c, dst, buf[:got], dstOff+done)
			done += uint64(put)
		}
		if err != nil && done == 0 {
			return 0, err
		}
		if err != nil || got == 0 {
			break
		}
	}
	return done, nil
}
