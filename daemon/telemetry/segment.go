package telemetry

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// On disk a segment is a file of lines. A line is the CRC-32C of its JSON in
// eight hex digits, one space, the JSON of one record without a line feed in
// it, and a line feed. So a segment can be read with the tools at hand, and a
// damaged line costs that line alone. The file's name is the number of its
// first record, in 20 digits.

const (
	segmentSuffix = ".jsonl"
	maxLine       = 1 << 20 // a longer line is damage; the writer never makes one
)

type recordKind string

const (
	kindSpan  recordKind = "span"
	kindEvent recordKind = "event"
	kindGap   recordKind = "gap" // Lost records were dropped just before it
)

// record is a span, an event or a gap as it lies on disk.
type record struct {
	Number    uint64         `json:"n"`
	Kind      recordKind     `json:"kind"`
	Time      int64          `json:"t"` // unix nanoseconds; a span's start
	Trace     string         `json:"trace,omitempty"`
	Span      string         `json:"span,omitempty"`
	Parent    string         `json:"parent,omitempty"`
	Name      string         `json:"name,omitempty"`
	Dur       int64          `json:"dur,omitempty"` // nanoseconds
	Failed    bool           `json:"failed,omitempty"`
	Error     string         `json:"error,omitempty"`
	Sandbox   string         `json:"sandbox,omitempty"`
	Session   string         `json:"session,omitempty"`
	Operation string         `json:"operation,omitempty"`
	Attrs     map[string]any `json:"attrs,omitempty"`
	Events    []spanEvent    `json:"events,omitempty"`
	Lost      int            `json:"lost,omitempty"`
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendLine appends r's line to b.
func appendLine(b []byte, r *record) ([]byte, error) {
	js, err := json.Marshal(r)
	if err != nil {
		return b, fmt.Errorf("encode record: %w", err)
	}
	if len(js) > maxLine-10 {
		return b, fmt.Errorf("record of %d bytes is over the limit", len(js))
	}
	b = fmt.Appendf(b, "%08x ", crc32.Checksum(js, castagnoli))
	b = append(b, js...)
	return append(b, '\n'), nil
}

// checkLine returns the JSON of a line without its line feed, or false when the
// line is damaged.
func checkLine(line []byte) ([]byte, bool) {
	if len(line) < 10 || len(line) > maxLine || line[8] != ' ' {
		return nil, false
	}
	sum, err := strconv.ParseUint(string(line[:8]), 16, 32)
	if err != nil || uint32(sum) != crc32.Checksum(line[9:], castagnoli) {
		return nil, false
	}
	return line[9:], true
}

// decodeRecord reads the JSON of one checked line. Whole numbers come back as
// int64, so that a large count survives the trip.
func decodeRecord(js []byte) (*record, error) {
	var r record
	d := json.NewDecoder(bytes.NewReader(js))
	d.UseNumber()
	if err := d.Decode(&r); err != nil {
		return nil, fmt.Errorf("decode record: %w", err)
	}
	switch r.Kind {
	case kindSpan, kindEvent, kindGap:
	default:
		return nil, fmt.Errorf("record of kind %q", r.Kind)
	}
	settleNumbers(r.Attrs)
	for i := range r.Events {
		settleNumbers(r.Events[i].Attrs)
	}
	return &r, nil
}

func settleNumbers(m map[string]any) {
	for k, v := range m {
		n, ok := v.(json.Number)
		if !ok {
			continue
		}
		if i, err := n.Int64(); err == nil {
			m[k] = i
		} else if f, err := n.Float64(); err == nil {
			m[k] = f
		} else {
			m[k] = n.String()
		}
	}
}

// eachLine calls fn with the JSON of every intact line of data, in order, until
// fn returns false. It returns how many lines were damaged and how many bytes
// of data form whole lines.
func eachLine(data []byte, fn func(js []byte) bool) (damaged int, whole int) {
	for whole < len(data) {
		n := bytes.IndexByte(data[whole:], '\n')
		if n < 0 {
			return damaged, whole
		}
		js, ok := checkLine(data[whole : whole+n])
		whole += n + 1
		if !ok {
			damaged++
		} else if !fn(js) {
			return damaged, whole
		}
	}
	return damaged, whole
}

// segment is one file. Its name holds first.
type segment struct {
	first uint64 // number of its first record
	size  int64  // bytes of whole lines
}

// segments is the directory of segment files and the one that is written. The
// store serialises its use.
type segments struct {
	dir      string
	maxBytes int64
	list     []segment // oldest first; the last one is written
	next     uint64    // number of the next record
	lost     uint64    // records dropped since Open, for want of room in memory or on disk
	owed     uint64    // of them, those that no gap record tells of yet
	out      *os.File  // the last segment; nil until something is written
}

func segmentName(first uint64) string { return fmt.Sprintf("%020d%s", first, segmentSuffix) }

func openSegments(dir string, maxBytes int64) (segments, error) {
	g := segments{dir: dir, maxBytes: maxBytes, next: 1}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return g, fmt.Errorf("list segments: %w", err)
	}
	for _, e := range entries {
		digits, ok := strings.CutSuffix(e.Name(), segmentSuffix)
		first, err := strconv.ParseUint(digits, 10, 64)
		if !ok || err != nil || len(digits) != 20 || first == 0 {
			continue // not ours; leave it alone
		}
		info, err := e.Info()
		if err != nil {
			return g, fmt.Errorf("segment %s: %w", e.Name(), err)
		}
		g.list = append(g.list, segment{first: first, size: info.Size()})
	}
	slices.SortFunc(g.list, func(a, b segment) int { return cmp.Compare(a.first, b.first) })
	if len(g.list) == 0 {
		return g, nil
	}
	return g, g.reopenLast()
}

// reopenLast cuts a torn tail off the newest segment and finds the number that
// follows its last record.
func (g *segments) reopenLast() error {
	last := &g.list[len(g.list)-1]
	name := filepath.Join(g.dir, segmentName(last.first))
	data, err := os.ReadFile(name)
	if err != nil {
		return fmt.Errorf("read segment: %w", err)
	}
	g.next = last.first
	lines, whole := 0, 0
	damaged, whole := eachLine(data, func(js []byte) bool {
		lines++
		if r, err := decodeRecord(js); err == nil && r.Number >= g.next && r.Number < 1<<62 {
			g.next = r.Number + 1
		}
		return true
	})
	// A damaged last line had a number too; never give it out again.
	g.next = max(g.next, last.first+uint64(lines+damaged))
	if whole < len(data) {
		if err := os.Truncate(name, int64(whole)); err != nil {
			return fmt.Errorf("cut torn record: %w", err)
		}
	}
	last.size = int64(whole)
	g.out, err = os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open segment: %w", err)
	}
	return nil
}

// first is the number of the oldest record that may still be here.
func (g *segments) first() uint64 {
	if len(g.list) == 0 {
		return g.next
	}
	return g.list[0].first
}

func (g *segments) bytes() int64 {
	var n int64
	for _, s := range g.list {
		n += s.size
	}
	return n
}

// write numbers and writes a batch, with a gap record before it when overflow
// records were dropped. On failure it leaves the file at its last whole line
// and owes the next write a gap record for what this one lost.
func (g *segments) write(batch []*record, overflow uint64) error {
	g.lost += overflow
	g.owed += overflow
	if g.owed > 0 {
		t := int64(0)
		if len(batch) > 0 {
			t = batch[0].Time
		}
		batch = append([]*record{{Kind: kindGap, Time: t, Lost: int(g.owed)}}, batch...)
	}
	var failed error // the first; the others are most often the same
	for len(batch) > 0 {
		n, err := g.writeSome(batch)
		if err != nil {
			failed = cmp.Or(failed, err)
			g.lose(batch[:n])
		} else if n > 0 && batch[0].Kind == kindGap {
			g.owed = 0
		}
		batch = batch[n:]
	}
	return failed
}

func (g *segments) lose(batch []*record) {
	for _, r := range batch {
		if r.Kind != kindGap {
			g.lost++
			g.owed++
		}
	}
}

// writeSome writes as much of the batch as the open segment has room for, in
// one write, and returns how many records that settled, written or failed. None
// means that the segment was full and another is next.
func (g *segments) writeSome(batch []*record) (int, error) {
	if g.out == nil {
		if err := g.begin(); err != nil {
			return len(batch), err
		}
	}
	limit := g.maxBytes / segmentsKept
	last := &g.list[len(g.list)-1]
	var buf []byte
	n := 0
	for n < len(batch) {
		batch[n].Number = g.next
		b, err := appendLine(buf, batch[n])
		if err == nil && int64(len(b)-len(buf)) > limit {
			err = fmt.Errorf("record of %d bytes is over the limit", len(b)-len(buf))
		}
		if err != nil && n == 0 {
			return 1, err
		}
		if err != nil || last.size+int64(len(b)) > limit {
			break // comes first in the next round
		}
		buf, g.next, n = b, g.next+1, n+1
	}
	if n == 0 {
		return 0, g.rotate()
	}
	if _, err := g.out.Write(buf); err != nil {
		if terr := g.out.Truncate(last.size); terr != nil {
			// The tail is of unknown shape: leave this file to readers, who
			// skip what is damaged, and go on in another.
			err = errors.Join(err, terr, g.rotate())
		}
		return n, fmt.Errorf("append to segment: %w", err)
	}
	last.size += int64(len(buf))
	return n, nil
}

// begin creates the next segment and drops the oldest ones that no longer fit.
func (g *segments) begin() error {
	keep := g.maxBytes - g.maxBytes/segmentsKept
	for len(g.list) > 0 && g.bytes() > keep {
		err := os.Remove(filepath.Join(g.dir, segmentName(g.list[0].first)))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("drop oldest segment: %w", err)
		}
		g.list = g.list[1:]
	}
	f, err := os.OpenFile(filepath.Join(g.dir, segmentName(g.next)), os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("create segment: %w", err)
	}
	g.list = append(g.list, segment{first: g.next})
	g.out = f
	return nil
}

func (g *segments) rotate() error {
	f := g.out
	g.out = nil
	if err := f.Close(); err != nil {
		return fmt.Errorf("close segment: %w", err)
	}
	return nil
}

func (g *segments) close() error {
	if g.out == nil {
		return nil
	}
	return g.rotate()
}
