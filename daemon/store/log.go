package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"ephemeral-sandbox/fs/hostfs"
	"ephemeral-sandbox/layerfmt"
)

// ErrUnknownOutcome is what an Append answers when the record may or may not be
// durable. Only opening the log again tells.
var ErrUnknownOutcome = errors.New("outcome unknown until the log is opened again")

// Log is an ordered list of records that grows by put-if-absent: of all who
// append a number, one wins, and a record that has won is durable and stays.
// One process on a disk and many on an object store keep the same promise.
type Log interface {
	// Append puts record under number, which must be the next one or an earlier
	// one; for an earlier one, won is false. An error that is not
	// ErrUnknownOutcome leaves the log as it was.
	Append(number uint64, record []byte) (won bool, err error)
	// Read calls fn for every record, from number 0 on, until fn returns an
	// error. The record may be kept.
	Read(fn func(number uint64, record []byte) error) error
	// Close releases the log.
	Close() error
}

const (
	logName = "log"
	// The log file grows by a half of its length, within these bounds: zeros,
	// written and synced ahead, so that a commit only overwrites and needs no
	// more than one flush.
	minGrowth = 64 << 10
	maxGrowth = 4 << 20
	// sector is the unit in which a disk writes all or nothing.
	sector = 512
)

// fileLog keeps the records one after another in one file, followed by zeros.
// A record is appended by one write and one sync.
//
// What a crash in between leaves is told apart from damage by two rules. A
// record that was durable once is followed by others or is whole: so a bad
// record with a sound one behind it is damage. And disks write whole sectors,
// writes that are cut short their beginning: so a bad last record that was torn
// has a sector that is still all zero, or no checksum at its end, and one with
// neither was damaged. A torn record is cut off, damage is refused.
// A last record that is damaged and holds a sector of zeros by its nature is
// taken for torn; packs are compressed, so that next to none does.
type fileLog struct {
	file hostfs.File

	mu     sync.Mutex
	end    int64  // guarded by mu; where the next record goes
	size   int64  // guarded by mu; zeros are durable up to here
	next   uint64 // guarded by mu
	broken error  // guarded by mu; set once an outcome is unknown
}

var _ Log = (*fileLog)(nil)

// createLog makes the log file of disk with its first record, durable except
// for its name.
func createLog(disk hostfs.FS, record []byte) (*fileLog, error) {
	f, err := disk.Create(logName)
	if err != nil {
		return nil, err
	}
	l := &fileLog{file: f}
	if _, err := l.Append(0, record); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return l, nil
}

// openLog opens the log file of disk, calls fn for each record and makes the
// file ready for the next. cut is the number of bytes of a torn record.
func openLog(disk hostfs.FS, fn func(number uint64, record []byte) error) (l *fileLog, cut int64, err error) {
	f, err := disk.OpenWrite(logName)
	if err != nil {
		return nil, 0, err
	}
	l = &fileLog{file: f}
	if cut, err = l.recover(fn); err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return l, cut, nil
}

// Append implements Log.
func (l *fileLog) Append(number uint64, record []byte) (won bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.broken != nil:
		return false, l.broken
	case number < l.next:
		return false, nil
	case number > l.next:
		return false, fmt.Errorf("append record %d to a log of %d", number, l.next)
	}
	if err := l.growLocked(int64(len(record))); err != nil {
		return false, err
	}
	if _, err := l.file.WriteAt(record, l.end); err != nil {
		return false, l.eraseLocked(len(record), err)
	}
	if err := l.file.Sync(); err != nil {
		l.broken = fmt.Errorf("sync the log: %w: %w", ErrUnknownOutcome, err)
		return false, l.broken
	}
	l.end += int64(len(record))
	l.next++
	return true, nil
}

// growLocked sees to it that n bytes after the end are zeros on the disk. A
// failure leaves zeros or nothing.
func (l *fileLog) growLocked(n int64) error {
	if l.end+n <= l.size {
		return nil
	}
	grow := min(max(l.end/2, minGrowth), maxGrowth)
	size := (l.end + n + grow + minGrowth - 1) / minGrowth * minGrowth
	zeros := make([]byte, minGrowth)
	for at := l.size; at < size; {
		n, err := l.file.WriteAt(zeros[:min(int64(len(zeros)), size-at)], at)
		if err != nil {
			return fmt.Errorf("grow the log: %w", err)
		}
		at += int64(n)
	}
	if err := l.file.Sync(); err != nil {
		l.broken = fmt.Errorf("grow the log: %w: %w", ErrUnknownOutcome, err)
		return l.broken
	}
	l.size = size
	return nil
}

// eraseLocked takes back a record that was written in part, so that nothing of
// it meets the eyes of a later Open.
func (l *fileLog) eraseLocked(n int, cause error) error {
	cause = fmt.Errorf("write to the log: %w", cause)
	_, err := l.file.WriteAt(make([]byte, n), l.end)
	if err == nil {
		err = l.file.Sync()
	}
	if err != nil {
		l.broken = fmt.Errorf("%w: %w: taking it back: %w", cause, ErrUnknownOutcome, err)
		return l.broken
	}
	return cause
}

// Read implements Log.
func (l *fileLog) Read(fn func(number uint64, record []byte) error) error {
	l.mu.Lock()
	end, next := l.end, l.next
	l.mu.Unlock()
	got, err := l.replay(io.NewSectionReader(l.file, 0, end), end, fn)
	if err != nil {
		return err
	}
	if got.end != end || got.next != next {
		return l.corrupt(got.next, got.end, "the record is no longer there")
	}
	return nil
}

// Close implements Log.
func (l *fileLog) Close() error { return l.file.Close() }

func (l *fileLog) corrupt(number uint64, off int64, reason string) error {
	return &layerfmt.CorruptError{Layer: logName, Section: "record " + CommitName(number), Offset: off, Reason: reason}
}

// recover replays the file and readies it for Append.
func (l *fileLog) recover(fn func(number uint64, record []byte) error) (cut int64, err error) {
	size, err := l.file.Size()
	if err != nil {
		return 0, err
	}
	got, err := l.replay(l.file, size, fn)
	if err != nil {
		return 0, err
	}
	if got.next == 0 {
		return 0, l.corrupt(0, 0, "the log has no first record")
	}
	dirty, err := l.tail(got, size)
	if err != nil {
		return 0, err
	}
	// The last record may have been read from a page that a failed sync never
	// brought to the disk and that now counts as clean. Writing it again makes
	// the sync below mean something.
	if _, err := l.file.WriteAt(got.last, got.end-int64(len(got.last))); err != nil {
		return 0, fmt.Errorf("write the last record again: %w", err)
	}
	if dirty > 0 {
		if _, err := l.file.WriteAt(make([]byte, dirty), got.end); err != nil {
			return 0, fmt.Errorf("cut a torn record off: %w", err)
		}
	}
	if err := l.file.Sync(); err != nil {
		return 0, fmt.Errorf("sync the log: %w", err)
	}
	l.end, l.size, l.next = got.end, size, got.next
	return dirty, nil
}

// replayed is how far a replay came.
type replayed struct {
	end  int64
	next uint64
	last []byte // the last record
}

// replay calls fn for each sound record and stops, without an error, at the
// first that is not. A sound record that does not follow the one before it is
// damage.
func (l *fileLog) replay(r io.ReaderAt, size int64, fn func(number uint64, record []byte) error) (replayed, error) {
	var got replayed
	var digest [32]byte
	for {
		b, err := readRecord(r, got.end, size)
		if err != nil {
			return got, err
		}
		if b == nil {
			return got, nil
		}
		h, err := decodeHeader(b)
		if err != nil {
			return got, err
		}
		if h.number != got.next || h.parent != digest {
			return got, l.corrupt(got.next, got.end, fmt.Sprintf("record %d does not follow the one before it", h.number))
		}
		if err := fn(h.number, b); err != nil {
			return got, err
		}
		digest = sha256.Sum256(b)
		got.end += int64(len(b))
		got.next++
		got.last = b
	}
}

// readRecord reads the record at off, nil when no sound one is there. The error
// is the disk's.
func readRecord(r io.ReaderAt, off, size int64) ([]byte, error) {
	if size-off < recordHeader {
		return nil, nil
	}
	head := make([]byte, recordHeader)
	if err := readFull(r, head, off); err != nil {
		return nil, err
	}
	h, err := decodeHeader(head)
	if err != nil || int64(h.length) > size-off {
		return nil, nil
	}
	b := make([]byte, h.length)
	if err := readFull(r, b, off); err != nil {
		return nil, err
	}
	if _, err := decodeRecord(b); err != nil {
		return nil, nil
	}
	return b, nil
}

func readFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read the log at offset %d: %w", off, err)
}

// tail judges what lies behind the last sound record: zeros, a torn record, or
// damage. It returns how many bytes have to be zeroed.
func (l *fileLog) tail(got replayed, size int64) (dirty int64, err error) {
	rest := make([]byte, size-got.end)
	if err := readFull(l.file, rest, got.end); err != nil {
		return 0, err
	}
	rest = bytes.TrimRight(rest, "\x00")
	if len(rest) == 0 {
		return 0, nil
	}
	// Where the length is known, what a pack in the record may look like inside
	// does not count as a record.
	span, from := int64(recordHeader), 1
	if h, err := decodeHeader(rest); err == nil {
		span, from = int64(h.length), h.length
	}
	if off := findRecord(rest, from, got.next); off >= 0 {
		return 0, l.corrupt(got.next, got.end, fmt.Sprintf("not a record, but one follows at offset %d", got.end+int64(off)))
	}
	if span > size-got.end {
		return 0, l.corrupt(got.next, got.end, "the log ends in the middle of the record")
	}
	whole := make([]byte, span)
	copy(whole, rest)
	if !hasUnwritten(whole, got.end) {
		return 0, l.corrupt(got.next, got.end, "the record was written whole and has changed since")
	}
	return int64(len(rest)), nil
}

// findRecord returns the offset of the first sound record in b at or after from
// whose number is at least number, or -1.
func findRecord(b []byte, from int, number uint64) int {
	magic := binary.LittleEndian.AppendUint32(nil, recordMagic)
	for off := from; off < len(b); off++ {
		i := bytes.Index(b[off:], magic)
		if i < 0 {
			return -1
		}
		off += i
		h, err := decodeHeader(b[off:])
		if err != nil || h.number < number {
			continue
		}
		// Zeros at the end of b may have been trimmed.
		whole := make([]byte, h.length)
		copy(whole, b[off:])
		if _, err := decodeRecord(whole); err == nil {
			return off
		}
	}
	return -1
}

// hasUnwritten reports whether b, a record or its header lying at off, was not
// written in full: its checksum, the last 4 bytes, is zero, or a sector that it
// takes part in has only zeros of it.
func hasUnwritten(b []byte, off int64) bool {
	if allZero(b[len(b)-4:]) {
		return true
	}
	for len(b) > 0 {
		n := min(int64(len(b)), sector-off%sector)
		if allZero(b[:n]) {
			return true
		}
		b, off = b[n:], off+n
	}
	return false
}
