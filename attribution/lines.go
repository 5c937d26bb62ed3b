package attribution

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"

	"ephemeral-sandbox/occ/linediff"
)

// Lines is the hashes of a text's lines, terminators included. The hash is cut
// from SHA-256, so that nobody can craft a line that passes for another's.
type Lines []uint64

const (
	readSize = 64 << 10
	sniff    = 8 << 10
)

// HashLines reads a file to its end and hashes its lines, without holding more
// than a piece of it in memory. text is false, and lines nil, when the file is
// not a text by linediff's rule; the rest of it is then left unread.
func HashLines(r io.Reader) (lines Lines, text bool, err error) {
	var (
		h    lineHasher
		buf  = make([]byte, readSize)
		size int
	)
	for {
		n, err := io.ReadFull(r, buf)
		chunk := buf[:n]
		if sniffed := min(n, max(0, sniff-size)); bytes.IndexByte(chunk[:sniffed], 0) >= 0 {
			return nil, false, nil
		}
		size += n
		h.write(chunk)
		if size > linediff.MaxBytes || h.ended >= linediff.MaxLines {
			return nil, false, nil
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return h.finish(), true, nil
		case err != nil:
			return nil, false, fmt.Errorf("hash lines: %w", err)
		}
	}
}

// lineHasher hashes lines that may begin in one chunk and end in another.
type lineHasher struct {
	lines Lines
	ended int       // terminators seen
	open  hash.Hash // the line begun in an earlier chunk, nil when none
}

func (h *lineHasher) write(chunk []byte) {
	for len(chunk) > 0 {
		end := bytes.IndexByte(chunk, '\n') + 1
		if end == 0 {
			if h.open == nil {
				h.open = sha256.New()
			}
			h.open.Write(chunk)
			return
		}
		if h.open != nil {
			h.open.Write(chunk[:end])
			h.close()
		} else {
			sum := sha256.Sum256(chunk[:end])
			h.lines = append(h.lines, binary.LittleEndian.Uint64(sum[:]))
		}
		h.ended++
		chunk = chunk[end:]
	}
}

func (h *lineHasher) close() {
	h.lines = append(h.lines, binary.LittleEndian.Uint64(h.open.Sum(nil)))
	h.open = nil
}

func (h *lineHasher) finish() Lines {
	if h.open != nil {
		h.close()
	}
	if h.lines == nil {
		return Lines{}
	}
	return h.lines
}
