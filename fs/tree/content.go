package tree

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
)

// MaxRanges is the most data ranges that a file keeps apart.
const MaxRanges = 1 << 18

// smallHole is the length in bytes up to which holes are the first to be given
// up when a file has too many: what is smaller than a page saves nothing.
const smallHole = 4 << 10

// sparseContent begins what is hashed of a file with holes.
const sparseContent = "sparse-content\n"

// pieceSize is how many bytes HashContent reads at a time.
const pieceSize = 128 << 10

// DataRanges brings the data ranges of a file of size bytes into their one
// normal form: cut off at size, empty ones dropped, those that touch joined. Nil
// means that all of the file is data; a file that is all hole has a list that
// is empty and not nil. When more than MaxRanges are left, holes of up to 4 KiB
// become data, then of up to 8 KiB, and so on until they are few enough. It also
// returns how many bytes of data there are. Ranges that overlap, run backwards
// or are out of order are ErrInvalid.
func DataRanges(data []Range, size uint64) ([]Range, uint64, error) {
	if data == nil {
		data = []Range{{End: size}}
	}
	normal := make([]Range, 0, len(data))
	end := uint64(0)
	for _, r := range data {
		if r.Start < end || r.End < r.Start {
			return nil, 0, fmt.Errorf("data range [%d, %d) after %d: %w", r.Start, r.End, end, ErrInvalid)
		}
		end = r.End
		if r.End = min(r.End, size); r.Start < r.End {
			normal = joinRange(normal, r, 0)
		}
	}
	for hole := uint64(smallHole); len(normal) > MaxRanges; hole *= 2 {
		joined := normal[:0]
		for _, r := range normal {
			joined = joinRange(joined, r, hole)
		}
		normal = joined
	}
	sum := uint64(0)
	for _, r := range normal {
		sum += r.End - r.Start
	}
	return normal, sum, nil
}

// joinRange appends r, or stretches the last range over a hole of at most the
// given length.
func joinRange(list []Range, r Range, hole uint64) []Range {
	if n := len(list); n > 0 && r.Start-list[n-1].End <= hole {
		list[n-1].End = r.End
		return list
	}
	return append(list, r)
}

// ContentHasher computes the Hash of a file as its data go by. The holes are
// known beforehand, so that their length costs nothing.
type ContentHasher struct {
	sum    hash.Hash
	sparse bool
	ranges []Range // not yet hashed to their end
	inside uint64  // bytes hashed of the first of them
}

// NewContentHasher begins the hash of a file of size bytes with its data in the
// given ranges, of which DataRanges tells what they may be. What is then to be
// written are the bytes of DataRanges' answer, put end to end.
func NewContentHasher(size uint64, data []Range) (*ContentHasher, error) {
	ranges, n, err := DataRanges(data, size)
	if err != nil {
		return nil, err
	}
	h := &ContentHasher{sum: sha256.New(), sparse: n < size, ranges: ranges}
	if h.sparse {
		h.sum.Write(binary.LittleEndian.AppendUint64([]byte(sparseContent), size))
	}
	return h, nil
}

// Write takes the next bytes of data. More than the file has are ErrInvalid.
func (h *ContentHasher) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		if len(h.ranges) == 0 {
			return done, fmt.Errorf("%d bytes after the last of a file's data: %w", len(p)-done, ErrInvalid)
		}
		r := h.ranges[0]
		if h.sparse && h.inside == 0 {
			var head [16]byte
			binary.LittleEndian.PutUint64(head[:8], r.Start)
			binary.LittleEndian.PutUint64(head[8:], r.End)
			h.sum.Write(head[:])
		}
		n := min(uint64(len(p)-done), r.End-r.Start-h.inside)
		h.sum.Write(p[done : done+int(n)])
		done += int(n)
		if h.inside += n; h.inside == r.End-r.Start {
			h.ranges, h.inside = h.ranges[1:], 0
		}
	}
	return done, nil
}

// Sum returns the hash when all data have been written, and
// io.ErrUnexpectedEOF before.
func (h *ContentHasher) Sum() (Hash, error) {
	if len(h.ranges) > 0 {
		return Hash{}, fmt.Errorf("data missing in [%d, %d): %w", h.ranges[0].Start+h.inside, h.ranges[0].End, io.ErrUnexpectedEOF)
	}
	return Hash(h.sum.Sum(nil)), nil
}

// HashContent computes the Hash of a file of size bytes, read from r. data are
// the ranges that hold data, ascending; nil means all of the file. r is not
// asked for what lies in holes, unless there are more than MaxRanges ranges. The
// context is looked at before each piece; memory is one piece and the ranges. An
// r that ends before size gives io.ErrUnexpectedEOF.
func HashContent(ctx context.Context, r io.ReaderAt, size uint64, data []Range) (Hash, error) {
	if size > MaxFileSize {
		return Hash{}, fmt.Errorf("hash %d bytes: %w", size, ErrTooBig)
	}
	ranges, n, err := DataRanges(data, size)
	if err != nil {
		return Hash{}, err
	}
	h, err := NewContentHasher(size, ranges)
	if err != nil {
		return Hash{}, err
	}
	buf := make([]byte, min(n, pieceSize))
	for _, d := range ranges {
		for off := d.Start; off < d.End; {
			if err := ctx.Err(); err != nil {
				return Hash{}, err
			}
			piece := buf[:min(uint64(len(buf)), d.End-off)]
			if err := readFull(r, piece, off); err != nil {
				return Hash{}, err
			}
			if _, err := h.Write(piece); err != nil {
				return Hash{}, err
			}
			off += uint64(len(piece))
		}
	}
	if err := ctx.Err(); err != nil {
		return Hash{}, err
	}
	return h.Sum()
}

// readFull fills p from offset off.
func readFull(r io.ReaderAt, p []byte, off uint64) error {
	n, err := r.ReadAt(p, int64(off))
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read %d bytes at offset %d: %w", len(p), off, err)
}
