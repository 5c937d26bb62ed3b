package access

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"github.com/klauspost/compress/zstd"

	"ephemeral-sandbox/fs/tree"
)

// A segment file is
//
//	magic     8 bytes "ESACCES1"
//	block...  the first of type head, then entries, the last of type tail
//
// and a block is
//
//	type      1 byte
//	zero      3 bytes
//	raw       4 bytes, little endian: bytes of the payload when decoded
//	stored    4 bytes: bytes of the payload that follow
//	crc32c    4 bytes, of the twelve bytes above and the payload
//	payload
//
// A head lists the sequence numbers of the segments that this one replaces. An
// entries payload is zstd over records in strictly ascending key order, the
// order going on from block to block. A tail holds the sums and the gaps. The
// file is complete only when a tail ends exactly at its end.
const (
	segmentMagic = "ESACCES1"
	blockHeader  = 16
	blockRaw     = 128 << 10 // an entries block is closed when it has grown past this
	maxRaw       = 256 << 10 // and is never accepted above this
	maxStored    = maxRaw + 4096
	maxReplaced  = 4096
	maxGaps      = 256

	headBlock    = 1
	entriesBlock = 2
	tailBlock    = 3
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errDamaged marks a segment whose bytes are not what was written.
var errDamaged = errors.New("access segment is damaged")

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errDamaged, fmt.Sprintf(format, args...))
}

// summary is what a tail holds.
type summary struct {
	entries     uint64
	notes       uint64
	first, last int64
	gaps        []gap
}

// gap is a Gap as segments hold it.
type gap struct {
	reason      Reason
	first, last int64
	notes       uint64
}

func (g gap) public() Gap {
	return Gap{Reason: g.reason, First: time.Unix(0, g.first), Last: time.Unix(0, g.last), Notes: g.notes}
}

// segmentWriter encodes records, given in key order, to w.
type segmentWriter struct {
	w    io.Writer
	enc  *zstd.Encoder
	buf  []byte // raw entries of the open block
	prev int64  // first of the record before, in this block
	sum  summary
	size int64
}

func newSegmentWriter(w io.Writer, replaces []uint64) (*segmentWriter, error) {
	enc, err := zstd.NewWriter(nil,
		zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithLowerEncoderMem(true), zstd.WithWindowSize(128<<10), zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, fmt.Errorf("segment encoder: %w", err)
	}
	s := &segmentWriter{w: w, enc: enc}
	if err := s.write([]byte(segmentMagic)); err != nil {
		return nil, err
	}
	head := binary.AppendUvarint(nil, uint64(len(replaces)))
	for _, seq := range replaces {
		head = binary.AppendUvarint(head, seq)
	}
	return s, s.block(headBlock, len(head), head)
}

func (s *segmentWriter) write(p []byte) error {
	n, err := s.w.Write(p)
	s.size += int64(n)
	if err != nil {
		return fmt.Errorf("write access segment: %w", err)
	}
	return nil
}

func (s *segmentWriter) block(kind byte, raw int, payload []byte) error {
	h := make([]byte, blockHeader)
	h[0] = kind
	binary.LittleEndian.PutUint32(h[4:], uint32(raw))
	binary.LittleEndian.PutUint32(h[8:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(h[12:], blockSum(h, payload))
	if err := s.write(h); err != nil {
		return err
	}
	return s.write(payload)
}

func blockSum(header, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(header[:12], castagnoli), castagnoli, payload)
}

func (s *segmentWriter) add(r record) error {
	if s.sum.entries == 0 {
		s.sum.first, s.sum.last = r.first, r.last
	}
	s.sum.entries++
	s.sum.notes += r.count
	s.sum.first, s.sum.last = min(s.sum.first, r.first), max(s.sum.last, r.last)
	if len(s.buf) == 0 {
		s.prev = 0
	}
	s.buf = appendRecord(s.buf, r, s.prev)
	s.prev = r.first
	if len(s.buf) >= blockRaw {
		return s.flush()
	}
	return nil
}

func (s *segmentWriter) flush() error {
	if len(s.buf) == 0 {
		return nil
	}
	err := s.block(entriesBlock, len(s.buf), s.enc.EncodeAll(s.buf, nil))
	s.buf = s.buf[:0]
	return err
}

// finish writes what is left and the tail with the given gaps.
func (s *segmentWriter) finish(gaps []gap) error {
	if err := s.flush(); err != nil {
		return err
	}
	s.sum.gaps = gaps
	tail := appendSummary(nil, s.sum)
	return s.block(tailBlock, len(tail), tail)
}

func appendRecord(b []byte, r record, prev int64) []byte {
	b = binary.AppendUvarint(b, uint64(r.op))
	b = append(b, byte(r.kind))
	b = binary.AppendUvarint(b, uint64(r.ino))
	b = binary.AppendUvarint(b, uint64(r.dir))
	b = append(b, byte(len(r.name)))
	b = append(b, r.name...)
	b = binary.AppendUvarint(b, r.count)
	b = binary.AppendVarint(b, r.first-prev)
	return binary.AppendUvarint(b, uint64(r.last-r.first))
}

func appendSummary(b []byte, s summary) []byte {
	b = binary.AppendUvarint(b, s.entries)
	b = binary.AppendUvarint(b, s.notes)
	b = binary.AppendVarint(b, s.first)
	b = binary.AppendVarint(b, s.last)
	b = binary.AppendUvarint(b, uint64(len(s.gaps)))
	for _, g := range s.gaps {
		b = append(b, byte(g.reason))
		b = binary.AppendVarint(b, g.first)
		b = binary.AppendVarint(b, g.last)
		b = binary.AppendUvarint(b, g.notes)
	}
	return b
}

// cursor takes values off the front of a payload; after a failure it stays
// failed and gives zeros.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) uvarint() uint64 {
	v, n := binary.Uvarint(c.b)
	if n <= 0 {
		c.b, c.bad = nil, true
		return 0
	}
	c.b = c.b[n:]
	return v
}

func (c *cursor) varint() int64 {
	v, n := binary.Varint(c.b)
	if n <= 0 {
		c.b, c.bad = nil, true
		return 0
	}
	c.b = c.b[n:]
	return v
}

func (c *cursor) byte() byte {
	p := c.bytes(1)
	if len(p) == 0 {
		return 0
	}
	return p[0]
}

func (c *cursor) bytes(n int) []byte {
	if n > len(c.b) {
		c.b, c.bad = nil, true
		return nil
	}
	p := c.b[:n]
	c.b = c.b[n:]
	return p
}

func (c *cursor) record(prev int64) (record, error) {
	var r record
	op := c.uvarint()
	r.kind = Kind(c.byte())
	r.ino = tree.Ino(c.uvarint())
	r.dir = tree.Ino(c.uvarint())
	r.name = string(c.bytes(int(c.byte())))
	r.count = c.uvarint()
	r.first = prev + c.varint()
	r.last = r.first + int64(c.uvarint())
	r.op = tree.Op(op)
	switch {
	case c.bad:
		return record{}, damaged("record is cut short")
	case op > uint64(^tree.Op(0)) || !r.kind.Valid() || r.count == 0 || r.last < r.first:
		return record{}, damaged("record out of range")
	}
	return r, nil
}

func (c *cursor) summary() (summary, error) {
	s := summary{entries: c.uvarint(), notes: c.uvarint(), first: c.varint(), last: c.varint()}
	n := c.uvarint()
	if n > maxGaps {
		return summary{}, damaged("%d gaps", n)
	}
	for range n {
		s.gaps = append(s.gaps, gap{reason: Reason(c.byte()), first: c.varint(), last: c.varint(), notes: c.uvarint()})
	}
	if c.bad || len(c.b) > 0 {
		return summary{}, damaged("tail of the wrong length")
	}
	return s, nil
}

// segmentReader decodes a segment from its beginning.
type segmentReader struct {
	r     *bufio.Reader
	dec   *zstd.Decoder
	cur   cursor
	prev  int64
	last  key
	any   bool // last is set
	tail  *summary
	seen  summary // what the records so far add up to
	heads []uint64
}

// newDecoder makes a decoder that several segmentReaders may share one after
// the other.
func newDecoder() (*zstd.Decoder, error) {
	dec, err := zstd.NewReader(nil,
		zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxMemory(maxRaw))
	if err != nil {
		return nil, fmt.Errorf("segment decoder: %w", err)
	}
	return dec, nil
}

func openSegment(r io.Reader, dec *zstd.Decoder) (*segmentReader, error) {
	s := &segmentReader{r: bufio.NewReaderSize(r, 32<<10), dec: dec}
	magic := make([]byte, len(segmentMagic))
	if _, err := io.ReadFull(s.r, magic); err != nil || string(magic) != segmentMagic {
		return nil, damaged("magic is missing")
	}
	kind, raw, payload, err := s.block()
	if err != nil {
		return nil, err
	}
	if kind != headBlock || raw != len(payload) {
		return nil, damaged("first block is not a head")
	}
	c := cursor{b: payload}
	n := c.uvarint()
	if n > maxReplaced {
		return nil, damaged("replaces %d segments", n)
	}
	for range n {
		s.heads = append(s.heads, c.uvarint())
	}
	if c.bad || len(c.b) > 0 {
		return nil, damaged("head of the wrong length")
	}
	return s, nil
}

func (s *segmentReader) block() (kind byte, raw int, payload []byte, err error) {
	h := make([]byte, blockHeader)
	if _, err := io.ReadFull(s.r, h); err != nil {
		return 0, 0, nil, damaged("block header is cut short")
	}
	raw = int(binary.LittleEndian.Uint32(h[4:]))
	stored := int(binary.LittleEndian.Uint32(h[8:]))
	if raw > maxRaw || stored > maxStored {
		return 0, 0, nil, damaged("block of %d bytes, %d stored", raw, stored)
	}
	payload = make([]byte, stored)
	if _, err := io.ReadFull(s.r, payload); err != nil {
		return 0, 0, nil, damaged("block is cut short")
	}
	if blockSum(h, payload) != binary.LittleEndian.Uint32(h[12:]) {
		return 0, 0, nil, damaged("checksum of a block")
	}
	return h[0], raw, payload, nil
}

// next returns the next record, or io.EOF after the last one of a complete
// segment, whose tail is then set.
func (s *segmentReader) next() (record, error) {
	for len(s.cur.b) == 0 {
		if s.tail != nil {
			return record{}, io.EOF
		}
		if err := s.advance(); err != nil {
			return record{}, err
		}
	}
	r, err := s.cur.record(s.prev)
	if err != nil {
		return record{}, err
	}
	if s.any && s.last.compare(r.key) >= 0 {
		return record{}, damaged("records out of order")
	}
	if !s.any {
		s.seen.first, s.seen.last = r.first, r.last
	}
	s.prev, s.last, s.any = r.first, r.key, true
	s.seen.entries++
	s.seen.notes += r.count
	s.seen.first, s.seen.last = min(s.seen.first, r.first), max(s.seen.last, r.last)
	return r, nil
}

// advance loads the next block of entries, or the tail.
func (s *segmentReader) advance() error {
	kind, raw, payload, err := s.block()
	if err != nil {
		return err
	}
	switch kind {
	case entriesBlock:
		b, err := s.dec.DecodeAll(payload, make([]byte, 0, raw))
		if err != nil || len(b) != raw || raw == 0 {
			return damaged("entries do not decode")
		}
		s.cur, s.prev = cursor{b: b}, 0
		return nil
	case tailBlock:
		c := cursor{b: payload}
		sum, err := c.summary()
		if err != nil {
			return err
		}
		if _, err := s.r.ReadByte(); err != io.EOF {
			return damaged("bytes after the tail")
		}
		s.tail = &sum
		return nil
	default:
		return damaged("block of type %d", kind)
	}
}
