package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"sync"

	"ephemeral-sandbox/fs/hostfs"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

const (
	inosName = "inos"
	inosSize = 2 * sector
	// inoBlock is by how much the durable mark runs ahead of what was given out:
	// a flush for that many numbers, and that many lost with a crash.
	inoBlock = 1 << 14
	inoMax   = math.MaxInt64
)

var inosMagic = [8]byte{'E', 'S', 'I', 'N', 'O', 'S', '1', '\n'}

// inos gives out inode numbers, none of them twice in the sandbox's life. The
// file holds the mark below which any number may have been given out, in two
// sectors that are written in turn, so that a torn write leaves the other:
//
//	 0  8    magic
//	 8  u64  version of the mark; the higher one counts
//	16  u64  mark
//	24  u32  crc32c of bytes 0 to 24
type inos struct {
	file hostfs.File

	mu      sync.Mutex
	next    uint64 // guarded by mu; the lowest number not given out
	mark    uint64 // guarded by mu; durable
	version uint64 // guarded by mu
	broken  error  // guarded by mu; set once it is unknown which mark is durable
}

func createInos(disk hostfs.FS, next tree.Ino) (*inos, error) {
	f, err := disk.Create(inosName)
	if err != nil {
		return nil, err
	}
	s := &inos{file: f, next: uint64(next)}
	if err := s.raiseLocked(uint64(next)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

// openInos reads the mark. It must be above max, the highest number found in
// the layers.
func openInos(disk hostfs.FS, max tree.Ino) (*inos, error) {
	f, err := disk.OpenWrite(inosName)
	if err != nil {
		return nil, err
	}
	s := &inos{file: f}
	if err := s.load(max); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

func (s *inos) load(max tree.Ino) error {
	corrupt := func(reason string) error {
		return &layerfmt.CorruptError{Layer: inosName, Section: "mark", Reason: reason}
	}
	size, err := s.file.Size()
	if err != nil {
		return err
	}
	b := make([]byte, min(size, inosSize))
	if err := readFull(s.file, b, 0); err != nil {
		return err
	}
	for ; len(b) > 0; b = b[min(len(b), sector):] {
		version, mark, ok := decodeMark(b)
		if ok && version > s.version {
			s.version, s.mark = version, mark
		}
	}
	switch {
	case s.version == 0:
		return corrupt("neither copy of the mark is whole")
	case s.mark <= uint64(max):
		return corrupt(fmt.Sprintf("inode number %d is in use, but the mark is %d", max, s.mark))
	}
	s.next = s.mark
	return nil
}

func encodeMark(version, mark uint64) []byte {
	b := make([]byte, sector)
	copy(b, inosMagic[:])
	binary.LittleEndian.PutUint64(b[8:], version)
	binary.LittleEndian.PutUint64(b[16:], mark)
	binary.LittleEndian.PutUint32(b[24:], crc32.Checksum(b[:24], crcTable))
	return b
}

func decodeMark(b []byte) (version, mark uint64, ok bool) {
	if len(b) < 28 || [8]byte(b[:8]) != inosMagic {
		return 0, 0, false
	}
	if binary.LittleEndian.Uint32(b[24:]) != crc32.Checksum(b[:24], crcTable) {
		return 0, 0, false
	}
	return binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:]), true
}

// raiseLocked makes mark durable, over the older of the two copies.
func (s *inos) raiseLocked(mark uint64) error {
	version := s.version + 1
	off := int64(version%2) * sector
	_, err := s.file.WriteAt(encodeMark(version, mark), off)
	if err != nil {
		// The copy may be torn; the other one counts, and the next try writes
		// this one again.
		return fmt.Errorf("write the inode mark: %w", err)
	}
	if err := s.file.Sync(); err != nil {
		s.broken = fmt.Errorf("sync the inode mark: %w: %w", ErrUnknownOutcome, err)
		return s.broken
	}
	s.version, s.mark = version, mark
	return nil
}

// alloc gives out n consecutive numbers and returns the first.
func (s *inos) alloc(n uint64) (tree.Ino, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return 0, s.broken
	}
	if n == 0 || n > inoMax-inoBlock-s.next {
		return 0, fmt.Errorf("allot %d inode numbers from %d on: %w", n, s.next, tree.ErrInvalid)
	}
	if s.next+n > s.mark {
		if err := s.raiseLocked(s.next + n + inoBlock); err != nil {
			return 0, err
		}
	}
	first := s.next
	s.next += n
	return tree.Ino(first), nil
}

// unused is the lowest number that was not given out.
func (s *inos) unused() tree.Ino {
	s.mu.Lock()
	defer s.mu.Unlock()
	return tree.Ino(s.next)
}

// close gives back what was only reserved.
func (s *inos) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	if s.broken == nil && s.next < s.mark {
		err = s.raiseLocked(s.next)
	}
	return errors.Join(err, s.file.Close())
}
