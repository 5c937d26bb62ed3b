package upper

import (
	"github.com/google/btree"
)

// Segment is a run of bytes of one file for which the private side answers.
type Segment struct {
	Start, End uint64 // half open
	Zero       bool   // a hole punched over what lies beneath, not bytes in the data file
}

// Source says where the bytes of a piece of a file come from.
type Source uint8

// The sources of a piece.
const (
	Beneath Source = iota // neither written nor punched: lower content, or a hole past Inode.Shown
	Private               // in the data file
	Zeros                 // punched
)

// Extents is the range map of one file: disjoint, non-empty segments in order,
// with no two of the same kind touching. The zero value is empty, and so, for
// everything that only reads, is nil. It has no lock.
type Extents struct {
	tree    *btree.BTreeG[Segment] // nil while empty
	private uint64                 // bytes in private segments
}

func segmentLess(a, b Segment) bool { return a.Start < b.Start }

// extentDegree keeps nodes small: most files have one segment.
const extentDegree = 16

// Private is the number of bytes in the data file that count.
func (e *Extents) Private() uint64 {
	if e == nil {
		return 0
	}
	return e.private
}

// Len is the number of segments.
func (e *Extents) Len() int {
	if e == nil || e.tree == nil {
		return 0
	}
	return e.tree.Len()
}

// Piece gives the source of the byte at off and where that source ends;
// the end is the largest uint64 when nothing follows.
func (e *Extents) Piece(off uint64) (src Source, end uint64) {
	end = ^uint64(0)
	if e == nil || e.tree == nil {
		return Beneath, end
	}
	e.tree.DescendLessOrEqual(Segment{Start: off}, func(s Segment) bool {
		if s.End > off {
			src, end = s.source(), s.End
		}
		return false
	})
	if src != Beneath {
		return src, end
	}
	e.tree.AscendGreaterOrEqual(Segment{Start: off}, func(s Segment) bool {
		end = s.Start
		return false
	})
	return Beneath, end
}

func (s Segment) source() Source {
	if s.Zero {
		return Zeros
	}
	return Private
}

// Each gives the segments in order until fn returns false.
func (e *Extents) Each(fn func(Segment) bool) {
	if e != nil && e.tree != nil {
		e.tree.Ascend(fn)
	}
}

// PrivateIn is the number of private bytes in [start, end).
func (e *Extents) PrivateIn(start, end uint64) (n uint64) {
	for off := start; off < end; {
		src, stop := e.Piece(off)
		stop = min(stop, end)
		if src == Private {
			n += stop - off
		}
		off = stop
	}
	return n
}

// Set makes [start, end) one segment, replacing what was there and joining
// neighbours of the same kind.
func (e *Extents) Set(start, end uint64, zero bool) {
	if start >= end {
		return
	}
	if e.tree == nil {
		e.tree = btree.NewG(extentDegree, segmentLess)
	}
	e.Clear(start, end)
	e.tree.DescendLessOrEqual(Segment{Start: start}, func(s Segment) bool {
		if s.End == start && s.Zero == zero {
			start = s.Start
		}
		return false
	})
	e.tree.AscendGreaterOrEqual(Segment{Start: end}, func(s Segment) bool {
		if s.Start == end && s.Zero == zero {
			end = s.End
		}
		return false
	})
	// The neighbours that joined are inside the new bounds now.
	e.Clear(start, end)
	e.add(Segment{start, end, zero})
}

// Clear forgets every segment in [start, end), cutting those that straddle it.
func (e *Extents) Clear(start, end uint64) {
	if e.tree == nil || start >= end {
		return
	}
	var hit []Segment
	e.tree.DescendLessOrEqual(Segment{Start: start}, func(s Segment) bool {
		if s.End > start {
			hit = append(hit, s)
		}
		return false
	})
	e.tree.AscendRange(Segment{Start: start}, Segment{Start: end}, func(s Segment) bool {
		if len(hit) == 0 || hit[0] != s {
			hit = append(hit, s)
		}
		return true
	})
	for _, s := range hit {
		e.tree.Delete(s)
		if !s.Zero {
			e.private -= s.End - s.Start
		}
		if s.Start < start {
			e.add(Segment{s.Start, start, s.Zero})
		}
		if s.End > end {
			e.add(Segment{end, s.End, s.Zero})
		}
	}
}

// Cut forgets everything at and after size.
func (e *Extents) Cut(size uint64) { e.Clear(size, ^uint64(0)) }

func (e *Extents) add(s Segment) {
	e.tree.ReplaceOrInsert(s)
	if !s.Zero {
		e.private += s.End - s.Start
	}
}
