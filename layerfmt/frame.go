package layerfmt

import (
	"encoding/binary"
)

// The frame table: records of 20 bytes in pieces that each begin with their
// own checksum, so that one record can be read and trusted alone.
const (
	frameRecordLen   = 20
	framesPerPiece   = 204
	framePieceLen    = 4 + framesPerPiece*frameRecordLen
	maxFrameOverhead = 1 << 10 // stored bytes beyond the raw ones
)

// frameRecord says where a frame lies in the pack and what it holds.
type frameRecord struct {
	off    uint64 // from the start of the pack
	stored uint32
	raw    uint32
	crc    uint32 // of the stored bytes
}

// framesLen is the length of the frame table for n frames.
func framesLen(n uint64) uint64 {
	return (n+framesPerPiece-1)/framesPerPiece*4 + n*frameRecordLen
}

// frameCRC is the checksum of a frame's stored bytes.
func frameCRC(stored []byte, index uint32) uint32 { return checksum("DATA", index, stored) }

func buildFrames(frames []frameRecord) []byte {
	out := make([]byte, 0, framesLen(uint64(len(frames))))
	le := binary.LittleEndian
	for piece := uint32(0); len(frames) > 0; piece++ {
		n := min(len(frames), framesPerPiece)
		start := len(out)
		out = append(out, 0, 0, 0, 0)
		for _, f := range frames[:n] {
			out = le.AppendUint64(out, f.off)
			out = le.AppendUint32(out, f.stored)
			out = le.AppendUint32(out, f.raw)
			out = le.AppendUint32(out, f.crc)
		}
		le.PutUint32(out[start:], checksum(tagFrames, piece, out[start+4:]))
		frames = frames[n:]
	}
	return out
}

// checkFrames returns the reason why piece no of the frame table is damaged,
// or "". Frames lie in [headerLen, end) of the pack, each right after the one
// before.
func checkFrames(data []byte, no uint32, end uint64) string {
	if len(data) < 4+frameRecordLen || (len(data)-4)%frameRecordLen != 0 {
		return "piece has an impossible length"
	}
	if binary.LittleEndian.Uint32(data) != checksum(tagFrames, no, data[4:]) {
		return "checksum differs"
	}
	next := uint64(0)
	for i := range (len(data) - 4) / frameRecordLen {
		f := frameAt(data, i)
		switch {
		case f.raw == 0 || f.raw > chunkSize:
			return "a frame's length is out of bounds"
		case f.stored == 0 || f.stored > f.raw+maxFrameOverhead:
			return "a frame's stored length is out of bounds"
		case f.off < headerLen || f.off > end || uint64(f.stored) > end-f.off:
			return "a frame lies outside the data"
		case i > 0 && f.off != next:
			return "frames are not contiguous"
		}
		next = f.off + uint64(f.stored)
	}
	return ""
}

// frameAt reads record i of a checked piece.
func frameAt(piece []byte, i int) frameRecord {
	b := piece[4+i*frameRecordLen:]
	le := binary.LittleEndian
	return frameRecord{off: le.Uint64(b), stored: le.Uint32(b[8:]), raw: le.Uint32(b[12:]), crc: le.Uint32(b[16:])}
}
