package upper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// The journal's shape on disk. All of it is part of the format.
const (
	magic      = "EPHUPPER"
	version    = 1
	headerSize = 32      // magic, u32 version, u64 salt, u64 end of the checkpoint, u32 crc32c of all these
	frameHead  = 8       // u32 payload length, u32 crc32c of that length and the payload, started from the salt
	maxPayload = 1 << 30 // a frame is written with one write(2)
)

// CorruptError tells of a journal that is damaged elsewhere than in a torn end.
type CorruptError struct {
	Path   string
	Offset int64
	Reason string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("journal %s is damaged at offset %d: %s", e.Path, e.Offset, e.Reason)
}

// seal is what the checksums of one journal file start from. The salt is drawn
// when the file is made: nobody who writes file names or xattrs that end up in
// the journal can make them look like frames.
type seal struct {
	table *crc32.Table
	start uint32
}

func newSeal(salt uint64) seal {
	s := seal{table: crc32.MakeTable(crc32.Castagnoli)}
	s.start = crc32.Checksum(binary.LittleEndian.AppendUint64(nil, salt), s.table)
	return s
}

func (s seal) sum(length, payload []byte) uint32 {
	return crc32.Update(crc32.Update(s.start, s.table, length), s.table, payload)
}

// close fills in the head of the frame whose payload is b[frameHead:].
func (s seal) close(b []byte) {
	binary.LittleEndian.PutUint32(b, uint32(len(b)-frameHead))
	binary.LittleEndian.PutUint32(b[4:], s.sum(b[:4], b[frameHead:]))
}

// open gives the payload of the frame at the start of b, nil when there is no
// whole and sound frame.
func (s seal) open(b []byte) []byte {
	if len(b) < frameHead {
		return nil
	}
	n := uint64(binary.LittleEndian.Uint32(b))
	if n == 0 || n > maxPayload || n > uint64(len(b)-frameHead) {
		return nil
	}
	payload := b[frameHead : frameHead+n]
	if s.sum(b[:4], payload) != binary.LittleEndian.Uint32(b[4:]) {
		return nil
	}
	return payload
}

func appendHeader(b []byte, salt, checkpoint uint64) []byte {
	from := len(b)
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, version)
	b = binary.LittleEndian.AppendUint64(b, salt)
	b = binary.LittleEndian.AppendUint64(b, checkpoint)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[from:], crc32.MakeTable(crc32.Castagnoli)))
}

func parseHeader(b []byte) (salt, checkpoint uint64, ok bool) {
	if len(b) < headerSize {
		return 0, 0, false
	}
	salt = binary.LittleEndian.Uint64(b[12:])
	checkpoint = binary.LittleEndian.Uint64(b[20:])
	return salt, checkpoint, string(b[:headerSize]) == string(appendHeader(nil, salt, checkpoint))
}

// logFile is what a journal needs of its file.
type logFile interface {
	io.WriterAt
	io.Closer
	Truncate(size int64) error
	Datasync() error
}

// diskFile is a file of the host. Closing it waits for a Datasync under way;
// one that comes later answers os.ErrClosed.
type diskFile struct{ *os.File }

func (d diskFile) Datasync() error {
	raw, err := d.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	if err := raw.Control(func(fd uintptr) { result = unix.Fdatasync(int(fd)) }); err != nil {
		return err
	}
	return result
}

// journal appends frames to a file. Append and replace are called by one
// goroutine at a time; sync may run beside them.
type journal struct {
	mu     sync.Mutex // guards all below, so that file is not swapped under a sync
	seal   seal
	file   logFile
	size   int64
	synced int64 // bytes known durable
	broken error // set once an outcome is unknown
	buf    []byte
}

// append writes one frame with one write(2). When it fails the journal is as
// before, or broken.
func (j *journal) append(f Frame) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.broken != nil {
		return j.broken
	}
	j.buf = appendFrame(append(j.buf[:0], make([]byte, frameHead)...), f)
	if len(j.buf)-frameHead > maxPayload {
		return fmt.Errorf("journal frame of %d bytes is beyond %d", len(j.buf), maxPayload)
	}
	j.seal.close(j.buf)
	n, err := j.file.WriteAt(j.buf, j.size)
	if err != nil {
		if n > 0 {
			if cut := j.file.Truncate(j.size); cut != nil {
				j.broken = fmt.Errorf("journal has half a frame until it is reopened: %w", errors.Join(err, cut))
			}
		}
		return fmt.Errorf("append to journal: %w", err)
	}
	j.size += int64(len(j.buf))
	if cap(j.buf) > 1<<20 {
		j.buf = nil
	}
	return nil
}

// sync makes every frame appended before the call durable. A failed sync
// breaks the journal: the kernel may have dropped what it could not write.
func (j *journal) sync() error {
	j.mu.Lock()
	file, size, broken, done := j.file, j.size, j.broken, j.synced >= j.size
	if broken != nil || done {
		j.mu.Unlock()
		return broken
	}
	j.mu.Unlock()
	err := file.Datasync()

	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file != file {
		return j.broken // a checkpoint took its place, and that was durable
	}
	if err != nil {
		j.broken = fmt.Errorf("sync journal, outcome unknown until it is reopened: %w", err)
		return j.broken
	}
	j.synced = max(j.synced, size)
	return nil
}

// replace makes file, durable and size bytes long, the journal.
func (j *journal) replace(file logFile, size int64, s seal) {
	j.mu.Lock()
	defer j.mu.Unlock()
	_ = j.file.Close() // nothing in it counts any more
	j.file, j.size, j.synced, j.seal = file, size, size, s
}

// fail breaks the journal.
func (j *journal) fail(err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.broken == nil {
		j.broken = err
	}
}

func (j *journal) close() error {
	j.fail(errors.New("journal is closed"))
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.file.Close()
}

// parsed is what replay learned beside the frames.
type parsed struct {
	end        int64 // where the sound part ends
	checkpoint int64
	seal       seal
}

// replay gives every sound frame of b, a whole journal, in order. Damage inside
// the checkpoint, damage with a sound frame behind it, or a sound frame that
// makes no sense is a CorruptError; damage with nothing behind it is a torn end.
func replay(path string, b []byte, fn func(Frame) error) (parsed, error) {
	corrupt := func(off int64, reason string) (parsed, error) {
		return parsed{}, &CorruptError{Path: path, Offset: off, Reason: reason}
	}
	salt, checkpoint, ok := parseHeader(b)
	if !ok {
		return corrupt(0, "header is not that of a version 1 journal")
	}
	s := newSeal(salt)
	off, size := int64(headerSize), int64(len(b))
	for off < size {
		payload := s.open(b[off:])
		if payload == nil {
			if at := s.laterFrame(b, off+1); at > 0 {
				return corrupt(off, fmt.Sprintf("frame is not sound, but the one at offset %d is", at))
			}
			break
		}
		f, err := decodeFrame(payload)
		if err == nil {
			err = fn(f)
		}
		if err != nil {
			return corrupt(off, err.Error())
		}
		off += frameHead + int64(len(payload))
	}
	if uint64(off) < checkpoint {
		return corrupt(off, "ends inside its checkpoint")
	}
	return parsed{end: off, checkpoint: int64(checkpoint), seal: s}, nil
}

// laterFrame looks for a sound frame at or after from, 0 for none.
func (s seal) laterFrame(b []byte, from int64) int64 {
	for off := from; off < int64(len(b))-frameHead; off++ {
		if s.open(b[off:]) != nil {
			return off
		}
	}
	return 0
}
