package wire

import (
	"encoding/binary"
	"strings"
)

type encoder struct{ b []byte }

func (e *encoder) u8(v uint8)   { e.b = append(e.b, v) }
func (e *encoder) u16(v uint16) { e.b = binary.LittleEndian.AppendUint16(e.b, v) }
func (e *encoder) u32(v uint32) { e.b = binary.LittleEndian.AppendUint32(e.b, v) }
func (e *encoder) u64(v uint64) { e.b = binary.LittleEndian.AppendUint64(e.b, v) }

func (e *encoder) bool(v bool) {
	if v {
		e.u8(1)
	} else {
		e.u8(0)
	}
}

func (e *encoder) str(s string) {
	e.u32(uint32(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) strs(list []string) {
	e.u32(uint32(len(list)))
	for _, s := range list {
		e.str(s)
	}
}

// decoder reads from the front of b. After the first thing that does not fit,
// bad is set and everything reads as zero.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n int) []byte {
	if d.bad || n > len(d.b) {
		d.bad = true
		return nil
	}
	p := d.b[:n]
	d.b = d.b[n:]
	return p
}

func (d *decoder) u8() uint8 {
	if p := d.take(1); p != nil {
		return p[0]
	}
	return 0
}

func (d *decoder) u16() uint16 {
	if p := d.take(2); p != nil {
		return binary.LittleEndian.Uint16(p)
	}
	return 0
}

func (d *decoder) u32() uint32 {
	if p := d.take(4); p != nil {
		return binary.LittleEndian.Uint32(p)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if p := d.take(8); p != nil {
		return binary.LittleEndian.Uint64(p)
	}
	return 0
}

func (d *decoder) bool() bool {
	v := d.u8()
	if v > 1 {
		d.bad = true
	}
	return v == 1
}

// count reads the length of a list whose items take at least size bytes each.
func (d *decoder) count(limit, size int) int {
	n := d.u32()
	if d.bad || n > uint32(limit) || uint64(n)*uint64(size) > uint64(len(d.b)) {
		d.bad = true
		return 0
	}
	return int(n)
}

func (d *decoder) str(limit int) string {
	s := string(d.take(d.count(limit, 1)))
	if strings.IndexByte(s, 0) >= 0 {
		d.bad = true
		return ""
	}
	return s
}

func (d *decoder) strs() []string {
	n := d.count(MaxArgs, 4)
	if n == 0 {
		return nil
	}
	list := make([]string, 0, n)
	for range n {
		list = append(list, d.str(MaxCommand))
	}
	return list
}

func (d *decoder) id() string {
	id := d.str(MaxID)
	if !ValidID(id) {
		d.bad = true
	}
	return id
}

// done reports whether all of b was read and all of it was good.
func (d *decoder) done() bool { return !d.bad && len(d.b) == 0 }
