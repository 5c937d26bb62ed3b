package layerfmt

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"strings"

	"ephemeral-sandbox/fs/tree"
)

// The fixed parts of a pack. Their places and values are part of the format.
const (
	skippableHeader  = 0x184D2A5B
	skippableSection = 0x184D2A5C
	skippableTOC     = 0x184D2A5D

	skippableLen = 8 // magic and length of a skippable frame
	headerLen    = 64
	trailerLen   = 64

	versionMajor = 1
	versionMinor = 0

	headerMagic  = "\x89LAY\r\n\x1a\n"
	trailerMagic = "LAYEREND"
	idDomain     = "layerfmt 1\x00"
)

// Limits on what a table of contents may claim.
const (
	smallPack       = 64 << 10 // read with one pread
	tailRead        = 16 << 10 // first guess at trailer and table of contents
	maxTOC          = 64 << 10
	maxSections     = 64
	maxSectionName  = 32
	maxNamedSection = 64 << 20
	maxExpansion    = 16384 // raw bytes for a stored one, above what zstd can do
	maxDeps         = 1 << 16
	maxPackSize     = 1 << 62
)

// sectionTag names a section of the format itself: four capital letters.
type sectionTag = string

// The sections of the format. All are critical.
const (
	tagDirents sectionTag = "DENT"
	tagInodes  sectionTag = "INOD"
	tagFrames  sectionTag = "FRAM"
	tagHeap    sectionTag = "HEAP"
	tagDeps    sectionTag = "DEPS"
)

// sectionCritical marks a section that a reader must understand.
const sectionCritical = 1

// The codecs of a section.
const (
	codecRaw  = 0
	codecZstd = 1
)

// section is an entry of the table of contents.
type section struct {
	name   string
	flags  uint8
	codec  uint8
	off    uint64 // of the payload, from the start of the pack
	stored uint64
	raw    uint64
	count  uint64 // leaves of a tree, frames, dependencies; zero otherwise
	hash   [32]byte
}

// toc is the table of contents.
type toc struct {
	sections []section // ascending by name
	info     Info      // without ID, Kind and StoredBytes
}

// appendSkippable appends the head of a skippable zstd frame.
func appendSkippable(b []byte, magic uint32, n int) []byte {
	b = binary.LittleEndian.AppendUint32(b, magic)
	return binary.LittleEndian.AppendUint32(b, uint32(n))
}

func isSkippable(b []byte, magic uint32, n uint64) bool {
	return len(b) >= skippableLen && binary.LittleEndian.Uint32(b) == magic && uint64(binary.LittleEndian.Uint32(b[4:])) == n
}

func makeHeader(kind PackKind) [headerLen]byte {
	var h [headerLen]byte
	appendSkippable(h[:0], skippableHeader, headerLen-skippableLen)
	copy(h[8:], headerMagic)
	binary.LittleEndian.PutUint16(h[16:], versionMajor)
	binary.LittleEndian.PutUint16(h[18:], versionMinor)
	h[20] = uint8(kind)
	binary.LittleEndian.PutUint32(h[60:], crc32.Checksum(h[:60], castagnoli))
	return h
}

// parseHeader returns the pack's kind, or a reason why the header is damaged,
// or an ErrVersion.
func parseHeader(h []byte) (PackKind, string, error) {
	switch {
	case len(h) < headerLen || !isSkippable(h, skippableHeader, headerLen-skippableLen) || string(h[8:16]) != headerMagic:
		return 0, "this is no pack", nil
	case binary.LittleEndian.Uint32(h[60:]) != crc32.Checksum(h[:60], castagnoli):
		return 0, "checksum differs", nil
	}
	if major := binary.LittleEndian.Uint16(h[16:]); major != versionMajor {
		return 0, "", fmt.Errorf("format version %d.%d, this reader knows %d: %w", major, binary.LittleEndian.Uint16(h[18:]), versionMajor, ErrVersion)
	}
	if need := binary.LittleEndian.Uint64(h[24:]); need != 0 {
		return 0, "", fmt.Errorf("format features %#x are unknown: %w", need, ErrVersion)
	}
	kind := PackKind(h[20])
	if kind != Base && kind != Delta {
		return 0, "", fmt.Errorf("pack kind %d is unknown: %w", kind, ErrVersion)
	}
	return kind, "", nil
}

func (t *toc) appendTo(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(t.sections)))
	for _, s := range t.sections {
		b = append(binary.AppendUvarint(b, uint64(len(s.name))), s.name...)
		b = append(b, s.flags, s.codec)
		for _, v := range [...]uint64{s.off, s.stored, s.raw, s.count} {
			b = binary.AppendUvarint(b, v)
		}
		b = append(b, s.hash[:]...)
	}
	i := &t.info
	for _, v := range [...]uint64{
		uint64(i.Dirents), uint64(i.Whiteouts), uint64(i.Opaques),
		uint64(i.Inodes), uint64(i.LogicalBytes), uint64(i.MaxIno),
	} {
		b = binary.AppendUvarint(b, v)
	}
	return b
}

// parseTOC decodes a table of contents that starts at offset end of its pack,
// counting the skippable head. It returns a reason when the table is damaged,
// or an ErrVersion.
func parseTOC(b []byte, end uint64) (toc, string, error) {
	c := cursor{b: b}
	var t toc
	n := c.uvMax(maxSections)
	for range n {
		s := section{name: string(c.bytes(c.uvMax(maxSectionName)))}
		s.flags, s.codec = c.u8(), c.u8()
		s.off, s.stored, s.raw, s.count = c.uv(), c.uv(), c.uv(), c.uv()
		copy(s.hash[:], c.bytes(uint64(len(s.hash))))
		if c.bad {
			return t, "table is malformed", nil
		}
		if k := len(t.sections); k > 0 && t.sections[k-1].name >= s.name {
			return t, "sections are not in order", nil
		}
		if reason, err := s.check(end); reason != "" || err != nil {
			return t, reason, err
		}
		t.sections = append(t.sections, s)
	}
	i := &t.info
	i.Dirents = int(c.uvMax(math.MaxInt64))
	i.Whiteouts = int(c.uvMax(math.MaxInt64))
	i.Opaques = int(c.uvMax(math.MaxInt64))
	i.Inodes = int(c.uvMax(math.MaxInt64))
	i.LogicalBytes = int64(c.uvMax(math.MaxInt64))
	i.MaxIno = tree.Ino(c.uv())
	if !c.done() {
		return t, "table is malformed", nil
	}
	return t, "", nil
}

// check holds a section's claims against the limits; end is where the last
// section must have ended.
func (s *section) check(end uint64) (string, error) {
	if s.off < headerLen+skippableLen || s.off > end || s.stored > end-s.off || s.stored > math.MaxUint32 {
		return fmt.Sprintf("section %q lies outside the pack", s.name), nil
	}
	bad := func(what string) (string, error) { return fmt.Sprintf("section %s: %s", s.name, what), nil }
	switch s.name {
	case tagDirents, tagInodes:
		pages := s.pages()
		switch {
		case s.count == 0 || s.count > 1 && s.count >= pages:
			return bad("number of leaves is out of bounds")
		case pages == 1 && s.raw > maxOnlyLeaf:
			return bad("its only page is too long")
		case s.raw < pageHeadLen:
			return bad("too short")
		}
	case tagFrames:
		if s.count == 0 || s.count > maxFrames || s.raw != framesLen(s.count) {
			return bad("length does not fit its count")
		}
	case tagDeps:
		if s.count == 0 || s.count > maxDeps || s.raw != 32*s.count {
			return bad("length does not fit its count")
		}
	case tagHeap:
	default:
		switch {
		case s.flags&sectionCritical != 0:
			return "", fmt.Errorf("critical section %q is unknown: %w", s.name, ErrVersion)
		case s.codec > codecZstd:
			return "", nil // not ours to read: Section answers for it
		case s.raw > maxNamedSection || s.raw > maxExpansion*s.stored:
			return bad("claims more bytes than a section may have")
		case s.codec == codecRaw && s.raw != s.stored:
			return bad("length differs from its stored length")
		}
		return "", nil
	}
	if s.codec != codecRaw || s.raw != s.stored {
		return bad("must be stored raw")
	}
	return "", nil
}

// pages is the number of pages of a tree: one of exact size when it is all
// leaf, else fixed ones of which the last may be short.
func (s *section) pages() uint64 {
	if s.count == 1 {
		return 1
	}
	return (s.raw + pageSize - 1) / pageSize
}

// validSectionName reports whether a caller may name a section so: a lower-case
// letter, then letters, digits, dots, dashes and underscores.
func validSectionName(name string) bool {
	if name == "" || len(name) > maxSectionName || name[0] < 'a' || name[0] > 'z' {
		return false
	}
	return strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789._-") == ""
}

func packID(header, toc []byte) PackID {
	h := sha256.New()
	h.Write([]byte(idDomain))
	h.Write(header)
	h.Write(toc)
	return PackID(h.Sum(nil))
}

// trailer is the last 64 bytes of a pack.
type trailer struct {
	tocOff uint64
	tocLen uint32
	id     PackID
}

func (t trailer) bytes() [trailerLen]byte {
	var b [trailerLen]byte
	le := binary.LittleEndian
	le.PutUint64(b[0:], t.tocOff)
	le.PutUint32(b[8:], t.tocLen)
	copy(b[12:], t.id[:])
	le.PutUint16(b[44:], versionMajor)
	le.PutUint16(b[46:], versionMinor)
	le.PutUint32(b[52:], crc32.Checksum(b[:52], castagnoli))
	copy(b[56:], trailerMagic)
	return b
}

func parseTrailer(b []byte, size uint64) (trailer, string) {
	var t trailer
	le := binary.LittleEndian
	if len(b) != trailerLen || !bytes.Equal(b[56:], []byte(trailerMagic)) {
		return t, "the pack does not end in a trailer; it may be cut short"
	}
	if le.Uint32(b[52:]) != crc32.Checksum(b[:52], castagnoli) {
		return t, "checksum differs"
	}
	t.tocOff, t.tocLen = le.Uint64(b), le.Uint32(b[8:])
	copy(t.id[:], b[12:])
	switch {
	case t.tocLen > maxTOC:
		return t, "table of contents is too long"
	case t.tocOff < headerLen+skippableLen || t.tocOff > size || size-t.tocOff != uint64(t.tocLen)+trailerLen:
		return t, "table of contents does not end at the trailer"
	}
	return t, ""
}

func headerVersion(h []byte) (major, minor int) {
	return int(binary.LittleEndian.Uint16(h[16:])), int(binary.LittleEndian.Uint16(h[18:]))
}
