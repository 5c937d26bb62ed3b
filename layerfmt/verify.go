package layerfmt

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"slices"

	"ephemeral-sandbox/fs/tree"
)

// maxProblems is how many problems Verify collects before it gives up.
const maxProblems = 64

// verifyCache is the cache of a verification: it must not answer for the disk
// with what was read before, and its order of reading needs no more.
const verifyCache = 4 << 20

// Verify reads the whole pack and checks all of it: the frame heads, the hash
// of every section, every page of both trees, their order and their agreement,
// every frame, and the hash of every file. It returns nil, the context's error,
// or the problems found, joined: mostly CorruptErrors. Memory is some bytes a
// file.
func (r *Reader) Verify(ctx context.Context) error {
	again, err := Open(r.src, int64(r.size), ReaderOptions{Name: r.name, Cache: NewFrameCache(verifyCache)})
	if err != nil {
		return err
	}
	v := verifier{Reader: again, ctx: ctx}
	if again.trailer != r.trailer {
		v.add(r.corrupt("trailer", r.size-trailerLen, "the pack is not the one that was opened"))
	}
	for _, step := range []func() error{v.layout, v.trees, v.direntRecords, v.inodeRecords, v.counts, v.frameTable, v.contents} {
		if err := v.add(step()); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return errors.Join(v.problems...)
}

// verifier is one run of Verify over a Reader of its own.
type verifier struct {
	*Reader
	ctx      context.Context
	problems []error
	seen     Info         // counted from the records
	files    []storedFile // files whose bytes are here
}

// leafPlace is a cell's place in a tree.
type leafPlace struct {
	page uint32
	slot int
}

func (p leafPlace) ref() uint64 { return uint64(p.page)<<refSlotBits | uint64(p.slot) }

// add notes a problem. It returns the reason to stop, if there is one.
func (v *verifier) add(err error) error {
	if err == nil {
		return nil
	}
	if v.ctx.Err() != nil && errors.Is(err, v.ctx.Err()) {
		return err
	}
	for _, p := range v.problems {
		if p.Error() == err.Error() {
			return nil // one damaged frame can hurt many files
		}
	}
	v.problems = append(v.problems, err)
	if len(v.problems) == maxProblems {
		return errors.Join(v.problems...)
	}
	return nil
}

// layout checks that frames and sections fill the pack without a gap, and the
// hash of each section.
func (v *verifier) layout() error {
	sections := slices.Clone(v.toc.sections)
	slices.SortFunc(sections, func(a, b section) int { return cmp.Compare(a.off, b.off) })
	next := v.Reader.data
	buf := make([]byte, chunkSize)
	for _, s := range sections {
		head := buf[:skippableLen]
		if s.off != next+skippableLen {
			return v.corrupt(s.name, s.off, "section does not follow what is before it")
		}
		if err := v.read(head, next, s.name); err != nil {
			return err
		}
		if !isSkippable(head, skippableSection, s.stored) {
			if err := v.add(v.corrupt(s.name, next, "frame head differs")); err != nil {
				return err
			}
		}
		sum := sha256.New()
		for done := uint64(0); done < s.stored; {
			piece := buf[:min(uint64(len(buf)), s.stored-done)]
			if err := v.read(piece, s.off+done, s.name); err != nil {
				return err
			}
			sum.Write(piece)
			done += uint64(len(piece))
			if err := v.ctx.Err(); err != nil {
				return err
			}
		}
		if [32]byte(sum.Sum(nil)) != s.hash {
			if err := v.add(v.corrupt(s.name, s.off, "hash differs")); err != nil {
				return err
			}
		} else if validSectionName(s.name) {
			if _, _, err := v.Section(s.name); err != nil && v.add(err) != nil {
				return err
			}
		}
		next = s.off + s.stored
	}
	if end := v.trailer.tocOff - skippableLen; next != end {
		return v.corrupt("toc", end, "table of contents does not follow the last section")
	}
	return nil
}

// trees checks that the inner pages of both trees lead to every leaf, in order.
func (v *verifier) trees() error {
	for _, t := range []*index{&v.dirents, &v.inodes} {
		if t.raw == 0 {
			continue
		}
		w := treeWalk{v: v, t: t}
		root := uint32(t.pages() - 1)
		err := w.page(root, nil)
		if err == nil && (uint64(w.leaves) != t.count || uint64(w.pages) != t.pages()) {
			off, _ := t.pageAt(root)
			err = v.corrupt(t.name, off, "inner pages do not lead to every page")
		}
		if stop := v.add(err); stop != nil {
			return stop
		}
	}
	return nil
}

// treeWalk visits a tree in order.
type treeWalk struct {
	v             *verifier
	t             *index
	leaves, pages uint32 // visited
	last          []byte // key before
}

// page visits a page and what is beneath it. bound is the separator that led
// to it.
func (w *treeWalk) page(no uint32, bound []byte) error {
	p, err := w.v.Reader.page(w.t, no)
	if err != nil {
		return err
	}
	off, _ := w.t.pageAt(no)
	if w.pages++; uint64(w.pages) > w.t.pages() {
		return w.v.corrupt(w.t.name, off, "inner pages lead to a page twice")
	}
	first := p.appendKey(nil, 0)
	if bytes.Compare(first, bound) < 0 {
		return w.v.corrupt(w.t.name, off, "page starts below its separator")
	}
	if p.level == 0 {
		if no != w.leaves {
			return w.v.corrupt(w.t.name, off, "leaves are not in order")
		}
		w.leaves++
		// A separator must be above everything in the leaf before.
		if no > 0 && (bytes.Compare(bound, w.last) <= 0 || bytes.Compare(first, w.last) <= 0) {
			return w.v.corrupt(w.t.name, off, "page does not follow the one before it")
		}
		w.last = p.appendKey(w.last[:0], p.n-1)
		return w.v.ctx.Err()
	}
	for i := range p.n {
		_, value := p.cell(i)
		c := cursor{b: value}
		child := uint32(c.uv())
		if below, err := w.v.Reader.page(w.t, child); err != nil {
			return err
		} else if below.level != p.level-1 {
			return w.v.corrupt(w.t.name, off, "child page is on the wrong level")
		}
		if err := w.page(child, p.appendKey(nil, i)); err != nil {
			return err
		}
	}
	return nil
}

// cells calls fn with every cell of a tree and its place. Damaged pages are
// noted and passed over.
func (v *verifier) cells(t *index, fn func(at leafPlace, key, value []byte) error) error {
	if t.raw == 0 {
		return nil
	}
	var key []byte
	for no := range uint32(t.count) {
		if err := v.ctx.Err(); err != nil {
			return err
		}
		p, err := v.Reader.page(t, no)
		if err != nil {
			if stop := v.add(err); stop != nil {
				return stop
			}
			continue
		}
		for i := range p.n {
			key = p.appendKey(key[:0], i)
			_, value := p.cell(i)
			if err := fn(leafPlace{no, i}, key, value); err != nil && v.add(err) != nil {
				return err
			}
		}
	}
	return nil
}

// direntRecords checks every dirent, and that its inode knows of it.
func (v *verifier) direntRecords() error {
	return v.cells(&v.dirents, func(at leafPlace, key, value []byte) error {
		d, err := v.parseDirentCell(key, value)
		if err != nil {
			return err
		}
		v.seen.MaxIno = max(v.seen.MaxIno, d.Dir, d.Ino)
		switch d.Op {
		case Whiteout:
			v.seen.Whiteouts++
			return nil
		case Opaque:
			v.seen.Opaques++
			return nil
		}
		v.seen.Dirents++
		n, found, err := v.inodeCell(d.Ino)
		if err != nil {
			return err
		}
		// The reference is followed when the inode's turn comes. That it leads to
		// a name of the inode, and not past this one, makes it the first.
		switch {
		case !found || !n.named:
			return v.cellCorrupt(&v.dirents, key, fmt.Sprintf("inode %d does not know its name", d.Ino))
		case n.ref > at.ref():
			return v.cellCorrupt(&v.dirents, key, fmt.Sprintf("inode %d knows a later name", d.Ino))
		case !n.stub && n.Kind != d.Kind:
			return v.cellCorrupt(&v.dirents, key, fmt.Sprintf("a %s by its name, a %s by its inode", d.Kind, n.Kind))
		}
		return nil
	})
}

// inodeRecords checks every inode and what it points to, and lists the files.
func (v *verifier) inodeRecords() error {
	return v.cells(&v.inodes, func(_ leafPlace, key, value []byte) error {
		ino, ok := splitInodeKey(key)
		var n inodeCell
		if ok {
			n, ok = parseInode(ino, value)
		}
		if !ok {
			return v.cellCorrupt(&v.inodes, key, "inode is malformed")
		}
		v.seen.MaxIno = max(v.seen.MaxIno, ino)
		if n.named {
			if _, err := v.named(&n); err != nil {
				return err
			}
		}
		if n.stub {
			return nil
		}
		v.seen.Inodes++
		if err := v.resolve(&n); err != nil {
			return err
		}
		if n.Content == Here {
			if n.Size > uint64(math.MaxInt64-v.seen.LogicalBytes) {
				return v.cellCorrupt(&v.inodes, key, "files add up to more than a pack can hold")
			}
			v.seen.LogicalBytes += int64(n.Size)
			v.files = append(v.files, storedFile{ino, n.Size, n.Alloc, n.Hash, n.loc})
		}
		return nil
	})
}

// counts holds what was counted against what the table of contents says. It
// comes before any file is read: a pack that lies about its size is not hashed
// for hours.
func (v *verifier) counts() error {
	want := v.info
	want.ID, want.Kind, want.StoredBytes = PackID{}, 0, 0
	if v.seen != want && len(v.problems) == 0 {
		v.files = nil
		return v.corrupt("toc", v.trailer.tocOff, fmt.Sprintf("counts differ: %+v by the table, %+v by the records", want, v.seen))
	}
	return nil
}

// frameTable checks that frames fill the space before the sections.
func (v *verifier) frameTable() error {
	next := uint64(headerLen)
	for no := range v.frames.count {
		f, err := v.frameRecord(no)
		if err != nil {
			return err
		}
		if f.off != next {
			return v.corrupt(tagFrames, v.frames.off, fmt.Sprintf("frame %d does not follow the one before it", no))
		}
		next = f.off + uint64(f.stored)
	}
	if next != v.Reader.data {
		return v.corrupt("data", next, "bytes after the last frame")
	}
	return nil
}

// contents decodes every frame once, as far as the order of files allows, and
// checks the hash of every file.
func (v *verifier) contents() error {
	slices.SortFunc(v.files, func(a, b storedFile) int {
		return cmp.Or(cmp.Compare(a.loc.frame, b.loc.frame), cmp.Compare(a.loc.off, b.loc.off), cmp.Compare(a.ino, b.ino))
	})
	next := uint64(0) // frame not yet read
	until := func(end uint64) error {
		for ; next < end; next++ {
			if err := v.ctx.Err(); err != nil {
				return err
			}
			if _, err := v.frame(next); err != nil && v.add(err) != nil {
				return err
			}
		}
		return nil
	}
	for _, n := range v.files {
		first := uint64(n.loc.frame)
		if n.alloc > 0 {
			if err := until(min(first, v.frames.count)); err != nil {
				return err
			}
		}
		if err := v.content(n); err != nil && v.add(err) != nil {
			return err
		}
		if n.alloc > 0 {
			next = max(next, first+(uint64(n.loc.off)+n.alloc+chunkSize-1)/chunkSize)
		}
	}
	return until(v.frames.count)
}

// content checks the hash of one file, from its data alone.
func (v *verifier) content(n storedFile) error {
	f, err := v.file(n)
	if err != nil {
		return err
	}
	sum, err := tree.NewContentHasher(n.size, f.data)
	if err != nil {
		return err
	}
	buf := make([]byte, min(n.alloc, chunkSize))
	for off := uint64(0); off < n.alloc; {
		if err := v.ctx.Err(); err != nil {
			return err
		}
		piece := buf[:min(uint64(len(buf)), n.alloc-off)]
		if _, err := f.stream(piece, off); err != nil {
			return err
		}
		if _, err := sum.Write(piece); err != nil {
			return err
		}
		off += uint64(len(piece))
	}
	got, err := sum.Sum()
	if err != nil {
		return err
	}
	if got == n.hash {
		return nil
	}
	off := v.Reader.data
	if rec, err := v.frameRecord(uint64(n.loc.frame)); err == nil {
		off = rec.off
	}
	return v.corrupt("data", off, fmt.Sprintf("hash of inode %d differs", n.ino))
}
