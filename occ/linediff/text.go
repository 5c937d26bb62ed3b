package linediff

import (
	"bytes"
	"hash/maphash"
)

// Limits of what counts as text. A file beyond one of them is treated like a
// binary one: it has no lines.
const (
	MaxBytes = 32 << 20
	MaxLines = 4 << 20 // keeps the tables of a diff within a few hundred MiB
	sniff    = 8 << 10
)

// IsText reports whether b has lines: no NUL in its first 8 KiB, at most
// MaxBytes and MaxLines. Any encoding without NUL bytes will do.
func IsText(b []byte) bool {
	return len(b) <= MaxBytes &&
		bytes.IndexByte(b[:min(len(b), sniff)], 0) < 0 &&
		bytes.Count(b, newline) < MaxLines
}

var newline = []byte{'\n'}

// Text is a byte string cut into lines, each with its terminator. The last
// line may lack one. The empty string has no lines.
type Text struct {
	data []byte
	ends []uint32
}

// Cut finds the lines of b, which the Text goes on sharing. b is at most
// 4 GiB.
func Cut(b []byte) Text {
	ends := make([]uint32, 0, bytes.Count(b, newline)+1)
	for at := 0; at < len(b); {
		n := bytes.IndexByte(b[at:], '\n')
		if n < 0 {
			at = len(b)
		} else {
			at += n + 1
		}
		ends = append(ends, uint32(at))
	}
	return Text{data: b, ends: ends}
}

// Len is the number of lines.
func (t Text) Len() int { return len(t.ends) }

// Line is line i with its terminator.
func (t Text) Line(i int) []byte { return t.Lines(i, 1) }

// Lines is the bytes of count lines from start on.
func (t Text) Lines(start, count int) []byte {
	if count == 0 {
		return nil
	}
	from := uint32(0)
	if start > 0 {
		from = t.ends[start-1]
	}
	to := t.ends[start+count-1]
	return t.data[from:to:to]
}

// Split returns the lines of b with their terminators; they share b's memory.
func Split(b []byte) [][]byte {
	t := Cut(b)
	lines := make([][]byte, t.Len())
	for i := range lines {
		lines[i] = t.Line(i)
	}
	return lines
}

// Intern numbers the distinct lines of all texts from 0 in order of first
// appearance, so that equal numbers mean equal lines across the texts.
func Intern(texts ...Text) [][]uint32 {
	in := newInterner()
	ids := make([][]uint32, len(texts))
	for i, t := range texts {
		ids[i] = make([]uint32, t.Len())
		for j := range ids[i] {
			ids[i][j] = in.id(t.Line(j))
		}
	}
	return ids
}

// interner is a hash table from lines to numbers. It keeps references only, no
// copies, and its hash is seeded, so that no input can be made to collide.
type interner struct {
	seed  maphash.Seed
	slots []uint32 // id+1; 0 is free; the length is a power of two
	lines [][]byte
	sums  []uint32
}

func newInterner() *interner {
	return &interner{seed: maphash.MakeSeed(), slots: make([]uint32, 256)}
}

func (in *interner) id(line []byte) uint32 {
	sum := uint32(maphash.Bytes(in.seed, line))
	mask := uint32(len(in.slots) - 1)
	at := sum & mask
	for in.slots[at] != 0 {
		id := in.slots[at] - 1
		if in.sums[id] == sum && bytes.Equal(in.lines[id], line) {
			return id
		}
		at = (at + 1) & mask
	}
	id := uint32(len(in.lines))
	in.lines = append(in.lines, line)
	in.sums = append(in.sums, sum)
	in.slots[at] = id + 1
	if len(in.lines)*2 > len(in.slots) {
		in.grow()
	}
	return id
}

func (in *interner) grow() {
	in.slots = make([]uint32, 2*len(in.slots))
	mask := uint32(len(in.slots) - 1)
	for id, sum := range in.sums {
		at := sum & mask
		for in.slots[at] != 0 {
			at = (at + 1) & mask
		}
		in.slots[at] = uint32(id) + 1
	}
}
