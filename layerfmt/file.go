package layerfmt

import (
	"fmt"
	"io"
	"math"
	"sort"

	"ephemeral-sandbox/fs/tree"
)

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
