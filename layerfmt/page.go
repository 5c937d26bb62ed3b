package layerfmt

import (
	"bytes"
	"encoding/binary"
	"slices"
)

// The geometry of tree pages; see docs/layer-format.md.
const (
	pageSize     = 4096
	maxOnlyLeaf  = 32 << 10 // a tree that fits in this is one page of exact size
	pageHeadLen  = 12
	refSlotBits  = 12 // a dirent reference is page<<12 | slot
	maxPageCells = 1 << refSlotBits
	maxKey       = 8 + 255
)

// page is a checked tree page, read in place. A page in hand has been verified
// in full: its cells lie in order, within bounds, with keys ascending.
type page struct {
	data   []byte // the page's used bytes
	prefix []byte // shared start of all keys
	heads  int    // offset of the array of key heads
	slots  int    // offset of the array of cell offsets
	n      int    // cells
	level  uint8  // 0 = leaf
}

// head is the first four bytes of a suffix as a number that sorts the same way.
func head(suffix []byte) uint32 {
	if len(suffix) >= 4 {
		return binary.BigEndian.Uint32(suffix)
	}
	var b [4]byte
	copy(b[:], suffix)
	return binary.BigEndian.Uint32(b[:])
}

// parsePage checks the bytes of page no of a tree and returns the page, or the
// reason why it is none. data may be longer than the page; the rest must be
// zero.
func parsePage(data []byte, tag sectionTag, no uint32) (*page, string) {
	if len(data) < pageHeadLen {
		return nil, "page is shorter than its header"
	}
	used := int(binary.LittleEndian.Uint16(data[4:]))
	if used < pageHeadLen || used > len(data) {
		return nil, "page length is out of bounds"
	}
	if checksum(tag, no, data[4:used]) != binary.LittleEndian.Uint32(data) {
		return nil, "page checksum differs"
	}
	for _, b := range data[used:] {
		if b != 0 {
			return nil, "padding after a page is not zero"
		}
	}
	p := &page{
		data:  data[:used:used],
		n:     int(binary.LittleEndian.Uint16(data[6:])),
		level: data[8],
	}
	prefixLen := int(binary.LittleEndian.Uint16(data[10:]))
	p.heads = pageHeadLen + prefixLen
	p.slots = p.heads + 4*p.n
	cells := p.slots + 2*p.n
	switch {
	case data[9] != 0:
		return nil, "reserved byte of a page is not zero"
	case p.n == 0 || p.n > maxPageCells:
		return nil, "number of cells is out of bounds"
	case prefixLen > maxKey || cells > used:
		return nil, "cells do not fit in the page"
	}
	p.prefix = p.data[pageHeadLen:p.heads]
	return p, p.check(cells, no)
}

// check walks all cells, the first of which starts at offset at.
func (p *page) check(at int, no uint32) string {
	var before []byte
	for i := range p.n {
		if p.slot(i) != at {
			return "cell offsets are not contiguous"
		}
		end := len(p.data)
		if i+1 < p.n {
			end = p.slot(i + 1)
		}
		if end < at || end > len(p.data) {
			return "cell offset is out of bounds"
		}
		c := cursor{b: p.data[at:end]}
		suffix := c.bytes(c.uvMax(uint64(maxKey - len(p.prefix))))
		switch {
		case c.bad:
			return "cell is malformed"
		case p.headAt(i) != head(suffix):
			return "key head differs from its key"
		case i > 0 && bytes.Compare(before, suffix) >= 0:
			return "keys are not ascending"
		}
		if p.level > 0 {
			if child := c.uv(); !c.done() || child >= uint64(no) {
				return "child page is out of bounds"
			}
		}
		before, at = suffix, end
	}
	if at != len(p.data) {
		return "bytes after the last cell"
	}
	return ""
}

func (p *page) headAt(i int) uint32 { return binary.LittleEndian.Uint32(p.data[p.heads+4*i:]) }

func (p *page) slot(i int) int { return int(binary.LittleEndian.Uint16(p.data[p.slots+2*i:])) }

// cell returns the key suffix and the value of cell i. The page was checked, so
// nothing here can be out of bounds.
func (p *page) cell(i int) (suffix, value []byte) {
	at, end := p.slot(i), len(p.data)
	if i+1 < p.n {
		end = p.slot(i + 1)
	}
	n := int(p.data[at])
	at++
	if n >= 0x80 {
		n = n&0x7f | int(p.data[at])<<7
		at++
	}
	return p.data[at : at+n : at+n], p.data[at+n : end : end]
}

func (p *page) suffix(i int) []byte {
	s, _ := p.cell(i)
	return s
}

// appendKey appends the whole key of cell i.
func (p *page) appendKey(b []byte, i int) []byte {
	return append(append(b, p.prefix...), p.suffix(i)...)
}

// find returns the first cell whose key is not below key (p.n if there is
// none), and whether that key is equal.
func (p *page) find(key []byte) (int, bool) {
	if !bytes.HasPrefix(key, p.prefix) {
		if bytes.Compare(key, p.prefix) < 0 {
			return 0, false
		}
		return p.n, false
	}
	rest := key[len(p.prefix):]
	want := head(rest)
	lo, hi := 0, p.n
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if h := p.headAt(mid); h < want || h == want && bytes.Compare(p.suffix(mid), rest) < 0 {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < p.n && p.headAt(lo) == want && bytes.Equal(p.suffix(lo), rest)
}

// child returns the page that the cell covering key points to. Keys below the
// first cell belong to the first child.
func (p *page) child(key []byte) uint32 {
	i, equal := p.find(key)
	if !equal && i > 0 {
		i--
	}
	_, value := p.cell(i)
	c := cursor{b: value}
	return uint32(c.uv())
}

// pageBuilder gathers ascending cells until they no longer fit in one page.
type pageBuilder struct {
	level uint8
	limit int

	keys, vals       []byte
	keyEnds, valEnds []int
	prefix           int // length of the start all keys share
	size             int // of the page so far
}

func (b *pageBuilder) n() int { return len(b.keyEnds) }

func (b *pageBuilder) key(i int) []byte {
	if i == 0 {
		return b.keys[:b.keyEnds[0]]
	}
	return b.keys[b.keyEnds[i-1]:b.keyEnds[i]]
}

func (b *pageBuilder) val(i int) []byte {
	if i == 0 {
		return b.vals[:b.valEnds[0]]
	}
	return b.vals[b.valEnds[i-1]:b.valEnds[i]]
}

// common is the length of the start that x and y share.
func common(x, y []byte) int {
	n := min(len(x), len(y))
	for i := range n {
		if x[i] != y[i] {
			return i
		}
	}
	return n
}

func cellLen(suffix, val int) int { return 4 + 2 + uvLen(uint64(suffix)) + suffix + val }

// add takes a cell, or reports false when the page is full without it.
func (b *pageBuilder) add(key, val []byte) bool {
	prefix, size := len(key), pageHeadLen+len(key)
	if n := b.n(); n > 0 {
		prefix, size = b.prefix, b.size
		if c := common(b.keys[:prefix], key); c < prefix {
			prefix, size = c, pageHeadLen+c
			for i := range n {
				size += cellLen(len(b.key(i))-c, len(b.val(i)))
			}
		}
	}
	size += cellLen(len(key)-prefix, len(val))
	if size > b.limit || b.n() == maxPageCells {
		return false
	}
	b.prefix, b.size = prefix, size
	b.keys, b.vals = append(b.keys, key...), append(b.vals, val...)
	b.keyEnds, b.valEnds = append(b.keyEnds, len(b.keys)), append(b.valEnds, len(b.vals))
	return true
}

// flush appends the page, as page no of the tree, to out and starts afresh.
func (b *pageBuilder) flush(out []byte, tag sectionTag, no uint32) []byte {
	start := len(out)
	out = slices.Grow(out, b.size)[:start+b.size]
	p := out[start:]
	le := binary.LittleEndian
	le.PutUint16(p[4:], uint16(b.size))
	le.PutUint16(p[6:], uint16(b.n()))
	p[8], p[9] = b.level, 0
	le.PutUint16(p[10:], uint16(b.prefix))
	copy(p[pageHeadLen:], b.keys[:b.prefix])
	heads := pageHeadLen + b.prefix
	slots := heads + 4*b.n()
	at := slots + 2*b.n()
	for i := range b.n() {
		suffix := b.key(i)[b.prefix:]
		le.PutUint32(p[heads+4*i:], head(suffix))
		le.PutUint16(p[slots+2*i:], uint16(at))
		at += binary.PutUvarint(p[at:], uint64(len(suffix)))
		at += copy(p[at:], suffix)
		at += copy(p[at:], b.val(i))
	}
	le.PutUint32(p, checksum(tag, no, p[4:]))
	b.keys, b.vals, b.keyEnds, b.valEnds = b.keys[:0], b.vals[:0], b.keyEnds[:0], b.valEnds[:0]
	return out
}

// builtTree is a tree ready to be written.
type builtTree struct {
	data   []byte
	leaves int
	starts []int // number of the first cell of each leaf
}

// ref is where cell i of the tree is: page<<12 | slot.
func (t *builtTree) ref(i int) uint64 {
	leaf, found := slices.BinarySearch(t.starts, i)
	if !found {
		leaf--
	}
	return uint64(leaf)<<refSlotBits | uint64(i-t.starts[leaf])
}

// buildTree lays out the cells that next yields in ascending order of key.
// next appends the key and value of cell i to the slices it is given.
func buildTree(tag sectionTag, cells int, next func(i int, key, val []byte) ([]byte, []byte)) builtTree {
	if cells == 0 {
		return builtTree{}
	}
	var key, val []byte
	only := pageBuilder{limit: maxOnlyLeaf}
	for i := 0; ; i++ {
		if i == cells {
			return builtTree{data: only.flush(nil, tag, 0), leaves: 1, starts: []int{0}}
		}
		if key, val = next(i, key[:0], val[:0]); !only.add(key, val) {
			break
		}
	}

	var t builtTree
	var seps pageSeps
	leaf := pageBuilder{limit: pageSize}
	var last []byte
	for i := range cells {
		key, val = next(i, key[:0], val[:0])
		if i == 0 || !leaf.add(key, val) {
			sep := key
			if i > 0 {
				t.flush(&leaf, tag)
				// The shortest start of this key that is above the last one
				// parts the two leaves. Inner levels must not shorten it again.
				sep = key[:common(last, key)+1]
			}
			seps.add(sep)
			t.starts = append(t.starts, i)
			leaf.add(key, val)
		}
		last = append(last[:0], key...)
	}
	t.flush(&leaf, tag)
	t.leaves = len(t.starts)
	t.inner(tag, seps)
	return t
}

// pageSeps are the lower bounds of the pages of one level, in order.
type pageSeps struct {
	bytes []byte
	ends  []int
}

func (s *pageSeps) add(key []byte) {
	s.bytes = append(s.bytes, key...)
	s.ends = append(s.ends, len(s.bytes))
}

func (s *pageSeps) at(i int) []byte {
	if i == 0 {
		return s.bytes[:s.ends[0]]
	}
	return s.bytes[s.ends[i-1]:s.ends[i]]
}

// flush appends a page on its boundary.
func (t *builtTree) flush(b *pageBuilder, tag sectionTag) {
	if rest := len(t.data) % pageSize; rest != 0 {
		t.data = append(t.data, make([]byte, pageSize-rest)...)
	}
	t.data = b.flush(t.data, tag, uint32(len(t.data)/pageSize))
}

// inner appends the levels above pages [0, len(below)), the root last.
func (t *builtTree) inner(tag sectionTag, below pageSeps) {
	first := 0
	for level := uint8(1); len(below.ends) > 1; level++ {
		b := pageBuilder{limit: pageSize, level: level}
		var seps pageSeps
		pages := len(below.ends)
		var val []byte
		for i := range pages {
			sep := below.at(i)
			val = binary.AppendUvarint(val[:0], uint64(first+i))
			if i > 0 && b.add(sep, val) {
				continue
			}
			if i > 0 {
				t.flush(&b, tag)
			}
			seps.add(sep)
			b.add(sep, val)
		}
		t.flush(&b, tag)
		first += pages
		below = seps
	}
}

// own moves the page to memory of its own, off the buffer it was parsed from.
func (p *page) own() {
	p.data = slices.Clone(p.data)
	p.prefix = p.data[pageHeadLen:p.heads]
}
