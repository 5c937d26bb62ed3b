package layerfmt

import (
	"encoding/binary"
	"hash/crc32"
	"math/bits"
)

// castagnoli is the table of crc32c; it is never written to.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum is the crc32c of a piece of a section. The section's tag and the
// piece's place in it go in first, so that a sound piece in the wrong place is
// not taken for the right one.
func checksum(tag sectionTag, place uint32, piece []byte) uint32 {
	var seed [8]byte
	copy(seed[:4], tag)
	binary.LittleEndian.PutUint32(seed[4:], place)
	return crc32.Update(crc32.Update(0, castagnoli, seed[:]), castagnoli, piece)
}

// uvLen is the length of v as a varint.
func uvLen(v uint64) int { return max(1, (bits.Len64(v)+6)/7) }

// appendSV appends v zigzag-folded, so that small negative numbers stay short.
func appendSV(b []byte, v int64) []byte {
	return binary.AppendUvarint(b, uint64(v)<<1^uint64(v>>63))
}

// cursor reads fields off the front of b. After the first field that is not
// there, or not canonical, bad is set and every further field is zero.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) fail() { c.b, c.bad = nil, true }

// uv reads an unsigned varint. A longer spelling of a shorter number is bad, so
// that equal values have equal bytes.
func (c *cursor) uv() uint64 {
	if len(c.b) > 0 && c.b[0] < 0x80 {
		v := c.b[0]
		c.b = c.b[1:]
		return uint64(v)
	}
	v, n := binary.Uvarint(c.b)
	if n <= 0 || c.b[n-1] == 0 {
		c.fail()
		return 0
	}
	c.b = c.b[n:]
	return v
}

// uvMax reads a varint that may not exceed limit.
func (c *cursor) uvMax(limit uint64) uint64 {
	v := c.uv()
	if v > limit {
		c.fail()
		return 0
	}
	return v
}

func (c *cursor) sv() int64 {
	v := c.uv()
	return int64(v>>1) ^ -int64(v&1)
}

func (c *cursor) u8() uint8 {
	if len(c.b) == 0 {
		c.fail()
		return 0
	}
	v := c.b[0]
	c.b = c.b[1:]
	return v
}

// bytes returns the next n bytes, sharing memory with the cursor.
func (c *cursor) bytes(n uint64) []byte {
	if n > uint64(len(c.b)) {
		c.fail()
		return nil
	}
	v := c.b[:n:n]
	c.b = c.b[n:]
	return v
}

// done reports whether every field was good and nothing is left over.
func (c *cursor) done() bool { return !c.bad && len(c.b) == 0 }
