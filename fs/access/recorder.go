package access

import (
	"container/heap"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"

	"ephemeral-sandbox/fs/tree"
)

// Defaults and proportions.
const (
	DefaultMaxBytes  = 64 << 20
	DefaultMaxMemory = 2 << 20

	minTable    = 16 << 10 // a table is never smaller than this
	mergeAt     = 24       // so many small segments are merged
	mergeWidth  = 16       // as many at a time
	bigFraction = 8        // a segment above MaxBytes/bigFraction is not merged any more

	segmentSuffix = ".acc"
	liveMarker    = "live" // exists while a Recorder has the directory open
)

// Options bound a Recorder. The zero value is fit for use.
type Options struct {
	MaxBytes  int64            // all segments together; 0 = DefaultMaxBytes
	MaxMemory int              // both tables together, estimated; 0 = DefaultMaxMemory
	Clock     func() time.Time // nil = time.Now
}

// Recorder is the access record of one session. It is safe for concurrent use.
type Recorder struct {
	dir      string
	maxBytes int64
	maxTable int
	clock    func() time.Time
	done     chan struct{} // closed when the spiller has ended

	mu       sync.Mutex
	cond     *sync.Cond // frozen, closed or spills changed
	active   *table     // takes notes
	frozen   *table     // being written; nil when the spiller is idle
	lost     gap        // notes refused since the last freeze; notes == 0: none
	gaps     []gap      // found or made since, and not in any segment yet
	writing  []gap      // those being written with frozen
	segments []segment  // complete ones, by sequence number
	next     uint64     // sequence number of the next segment
	spills   uint64     // tables written or given up
	err      error      // of the last spill
	closed   bool
}

// segment is a file on disk. A damaged one is kept for the records before the
// damage; its gap is accounted for when damaged is set.
type segment struct {
	seq     uint64
	size    int64
	sum     summary
	damaged bool
}

func (r *Recorder) path(seq uint64) string {
	return filepath.Join(r.dir, fmt.Sprintf("%016x%s", seq, segmentSuffix))
}

// Open opens the record in dir, which is made when missing. Damage found there
// is not an error but a gap. One Recorder at a time may have a directory open.
func Open(dir string, o Options) (*Recorder, error) {
	r, err := load(dir, o)
	if err != nil {
		return nil, fmt.Errorf("open access record: %w", err)
	}
	go r.spill()
	return r, nil
}

// load is Open without the spiller.
func load(dir string, o Options) (*Recorder, error) {
	if o.MaxBytes <= 0 {
		o.MaxBytes = DefaultMaxBytes
	}
	if o.MaxMemory <= 0 {
		o.MaxMemory = DefaultMaxMemory
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	r := &Recorder{
		dir: dir, maxBytes: o.MaxBytes, maxTable: max(o.MaxMemory/2, minTable), clock: o.Clock,
		done: make(chan struct{}), active: newTable(), next: 1,
	}
	r.cond = sync.NewCond(&r.mu)
	return r, r.adopt()
}

// adopt finds the segments on disk and marks the directory as live.
func (r *Recorder) adopt() error {
	names, err := os.ReadDir(r.dir)
	if err != nil {
		return err
	}
	dec, err := newDecoder()
	if err != nil {
		return err
	}
	defer dec.Close()
	replaced := map[uint64]bool{}
	crashed := false
	for _, n := range names {
		if n.Name() == liveMarker {
			crashed = true
			continue
		}
		hex, ok := strings.CutSuffix(n.Name(), segmentSuffix)
		seq, err := strconv.ParseUint(hex, 16, 64)
		if !ok || err != nil || len(hex) != 16 {
			continue
		}
		r.next = max(r.next, seq+1)
		seg, heads, err := r.inspect(seq, dec)
		switch {
		case err == nil:
			r.segments = append(r.segments, seg)
			for _, h := range heads {
				replaced[h] = true
			}
		case !errors.Is(err, errDamaged):
			return err
		case len(heads) > 0 && r.exists(heads):
			// A merge that did not finish: what it was made from is still there.
			if err := os.Remove(r.path(seq)); err != nil {
				return err
			}
		default:
			seg.damaged = true
			r.segments = append(r.segments, seg)
		}
	}
	// A merge that finished, but whose inputs were not deleted any more.
	keep := r.segments[:0]
	for _, s := range r.segments {
		if replaced[s.seq] {
			if err := os.Remove(r.path(s.seq)); err != nil {
				return err
			}
			continue
		}
		keep = append(keep, s)
	}
	r.segments = keep
	for _, s := range r.segments {
		if s.damaged {
			r.addDamageLocked(s)
		}
	}
	if crashed {
		r.gaps = append(r.gaps, r.crashGap())
	}
	marker, err := os.Create(filepath.Join(r.dir, liveMarker))
	if err != nil {
		return err
	}
	return marker.Close()
}

func (r *Recorder) exists(seqs []uint64) bool {
	for _, s := range seqs {
		if _, err := os.Lstat(r.path(s)); err != nil {
			return false
		}
	}
	return true
}

// inspect reads a whole segment. When it is damaged, what could be read before
// the damage is in the summary and in the heads.
func (r *Recorder) inspect(seq uint64, dec *zstd.Decoder) (segment, []uint64, error) {
	seg := segment{seq: seq}
	f, err := os.Open(r.path(seq))
	if err != nil {
		return seg, nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil {
		seg.size = st.Size()
	}
	sr, err := openSegment(f, dec)
	if err != nil {
		return seg, nil, err
	}
	for {
		_, err := sr.next()
		switch {
		case err == io.EOF:
			seg.sum = *sr.tail
			return seg, sr.heads, nil
		case err != nil:
			seg.sum = sr.seen
			return seg, sr.heads, err
		}
	}
}

// addDamageLocked adds the gap of a damaged segment, from its last good record
// until it was written, unless an earlier Recorder has recorded it already.
func (r *Recorder) addDamageLocked(s segment) {
	g := gap{reason: Damaged, first: s.sum.last, last: s.sum.last}
	if st, err := os.Stat(r.path(s.seq)); err == nil {
		g.last = max(g.last, st.ModTime().UnixNano())
	}
	if !slices.Contains(r.allGapsLocked(), g) {
		r.gaps = foldGaps(append(r.gaps, g))
	}
}

// crashGap reaches from the newest access on disk until now.
func (r *Recorder) crashGap() gap {
	g := gap{reason: Crashed, last: r.clock().UnixNano()}
	for _, s := range r.segments {
		g.first = max(g.first, s.sum.last)
	}
	if st, err := os.Stat(filepath.Join(r.dir, liveMarker)); err == nil {
		g.first = max(g.first, st.ModTime().UnixNano())
	}
	g.first = min(g.first, g.last)
	return g
}

// Note records one access. It does no I/O and, for an access it has seen
// before, allocates nothing. When the tables are full it does not wait: the
// access is lost and a gap says so. After Close it does nothing.
func (r *Recorder) Note(op tree.Op, k Kind, ino, dir tree.Ino, name string) {
	now := r.clock().UnixNano()
	if len(name) > tree.MaxName {
		name = name[:tree.MaxName] // no directory holds such a name: it was only asked for
	}
	key := key{op: op, kind: k, ino: ino, dir: dir, name: name}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.active.bump(key, now) {
		return
	}
	if r.active.bytes+r.active.cost(key) > r.maxTable {
		if r.frozen != nil {
			if r.lost.notes == 0 {
				r.lost = gap{reason: Overflow, first: now}
			}
			r.lost.notes++
			r.lost.last = now
			return
		}
		r.freezeLocked()
	}
	r.active.insert(key, now)
}

// freezeLocked hands the active table to the spiller, which must be idle.
func (r *Recorder) freezeLocked() {
	if r.lost.notes > 0 {
		r.gaps = append(r.gaps, r.lost)
		r.lost = gap{}
	}
	r.frozen, r.active = r.active, newTable()
	r.cond.Broadcast()
}

// spill is the goroutine that writes frozen tables until the record is closed.
func (r *Recorder) spill() {
	defer close(r.done)
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		for r.frozen == nil && !r.closed {
			r.cond.Wait()
		}
		if r.frozen == nil {
			return
		}
		t, seq := r.frozen, r.next
		r.next++
		r.writing, r.gaps = foldGaps(r.gaps), nil
		r.mu.Unlock()
		seg, err := r.writeTable(seq, t, r.writing)
		r.mu.Lock()
		r.frozen = nil
		r.spills++
		r.err = err
		if err != nil {
			r.gaps = append(r.writing, r.gaps...)
			if t.notes > 0 {
				first, last := span(t.sorted())
				r.gaps = append(r.gaps, gap{reason: Failed, first: first, last: last, notes: t.notes})
			}
			r.gaps, r.writing = foldGaps(r.gaps), nil
		} else {
			r.writing = nil
			r.segments = append(r.segments, seg)
			r.dropLocked()
			r.mergeLocked()
		}
		r.cond.Broadcast()
	}
}

// writeTable writes t as segment seq; on failure nothing stays behind.
func (r *Recorder) writeTable(seq uint64, t *table, gaps []gap) (segment, error) {
	return r.writeSegment(seq, nil, func(w *segmentWriter) error {
		for _, e := range t.sorted() {
			if err := w.add(e); err != nil {
				return err
			}
		}
		return w.finish(gaps)
	})
}

func (r *Recorder) writeSegment(seq uint64, replaces []uint64, fill func(*segmentWriter) error) (seg segment, err error) {
	f, err := os.OpenFile(r.path(seq), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return seg, fmt.Errorf("create access segment: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	w, err := newSegmentWriter(f, replaces)
	if err == nil {
		err = fill(w)
	}
	if cerr := f.Close(); err == nil && cerr != nil {
		err = fmt.Errorf("close access segment: %w", cerr)
	}
	if err != nil {
		return seg, err
	}
	return segment{seq: seq, size: w.size, sum: w.sum}, nil
}

// dropLocked deletes the segments whose accesses ended longest ago until the
// rest fits MaxBytes, and leaves a gap for what went.
func (r *Recorder) dropLocked() {
	total := int64(0)
	for _, s := range r.segments {
		total += s.size
	}
	for total > r.maxBytes && len(r.segments) > 1 {
		oldest := 0
		for i, s := range r.segments[:len(r.segments)-1] {
			if s.sum.last < r.segments[oldest].sum.last {
				oldest = i
			}
		}
		s := r.segments[oldest]
		if err := os.Remove(r.path(s.seq)); err != nil {
			r.err = fmt.Errorf("drop access segment: %w", err)
			return
		}
		total -= s.size
		r.segments = slices.Delete(r.segments, oldest, oldest+1)
		r.gaps = append(r.gaps, s.sum.gaps...)
		if s.sum.entries > 0 {
			r.gaps = append(r.gaps, gap{reason: Dropped, first: s.sum.first, last: s.sum.last, notes: s.sum.notes})
		}
	}
	r.gaps = foldGaps(joinDropped(r.gaps))
}

// joinDropped makes one gap of all that tell of dropped segments: these are the
// oldest, so that what they leave out is one stretch.
func joinDropped(gaps []gap) []gap {
	out := gaps[:0]
	at := -1
	for _, g := range gaps {
		if g.reason != Dropped {
			out = append(out, g)
			continue
		}
		if at < 0 {
			at = len(out)
			out = append(out, g)
			continue
		}
		out[at].first, out[at].last = min(out[at].first, g.first), max(out[at].last, g.last)
		out[at].notes += g.notes
	}
	return out
}

// mergeLocked joins the smallest segments into one when there are many. It lets
// go of the lock while it writes; only the spiller changes the list, so what it
// chose stays valid.
func (r *Recorder) mergeLocked() {
	small := make([]segment, 0, len(r.segments))
	for _, s := range r.segments {
		if s.size <= r.maxBytes/bigFraction {
			small = append(small, s)
		}
	}
	if len(small) < mergeAt {
		return
	}
	slices.SortFunc(small, func(a, b segment) int { return int(a.size - b.size) })
	small = small[:mergeWidth]
	seqs := make([]uint64, len(small))
	var gaps []gap
	for i, s := range small {
		seqs[i] = s.seq
		gaps = append(gaps, s.sum.gaps...)
	}
	seq := r.next
	r.next++
	r.mu.Unlock()
	seg, err := r.merge(seq, small, foldGaps(gaps))
	r.mu.Lock()
	if err != nil {
		r.err = err // the inputs are all still there
		return
	}
	r.segments = slices.DeleteFunc(r.segments, func(s segment) bool { return slices.Contains(seqs, s.seq) })
	r.segments = append(r.segments, seg)
	for _, s := range seqs {
		if err := os.Remove(r.path(s)); err != nil {
			r.err = fmt.Errorf("delete merged access segment: %w", err)
		}
	}
}

func (r *Recorder) merge(seq uint64, inputs []segment, gaps []gap) (segment, error) {
	seqs := make([]uint64, len(inputs))
	sources := make([]source, 0, len(inputs))
	for i, s := range inputs {
		seqs[i] = s.seq
		f, err := os.Open(r.path(s.seq))
		if err != nil {
			closeAll(sources)
			return segment{}, fmt.Errorf("merge access segments: %w", err)
		}
		sources = append(sources, source{file: f, segment: s})
	}
	defer closeAll(sources)
	return r.writeSegment(seq, seqs, func(w *segmentWriter) error {
		found, err := mergeSources(sources, w.add)
		for _, s := range found {
			gaps = append(gaps, gap{reason: Damaged, first: s.sum.last, last: r.clock().UnixNano()})
		}
		if err != nil {
			return err
		}
		return w.finish(foldGaps(joinDropped(gaps)))
	})
}

// foldGaps keeps a list of gaps within maxGaps by joining the oldest ones.
func foldGaps(gaps []gap) []gap {
	if len(gaps) <= maxGaps {
		return gaps
	}
	slices.SortFunc(gaps, func(a, b gap) int {
		if a.first < b.first {
			return -1
		}
		return 1
	})
	n := len(gaps) - maxGaps + 1
	joined := gaps[0]
	for _, g := range gaps[1:n] {
		joined.first, joined.last = min(joined.first, g.first), max(joined.last, g.last)
		joined.notes += g.notes
	}
	return append([]gap{joined}, gaps[n:]...)
}

// source is one sorted run of records: a segment file, or records in memory.
type source struct {
	file    *os.File
	segment segment // when file is set
	entries []record
	reader  *segmentReader
	cur     record
}

func (s *source) advance() error {
	if s.reader == nil {
		if len(s.entries) == 0 {
			return io.EOF
		}
		s.cur, s.entries = s.entries[0], s.entries[1:]
		return nil
	}
	var err error
	s.cur, err = s.reader.next()
	return err
}

func closeAll(sources []source) {
	for _, s := range sources {
		if s.file != nil {
			s.file.Close()
		}
	}
}

// sourceHeap orders sources by their current record.
type sourceHeap []*source

func (h sourceHeap) Len() int           { return len(h) }
func (h sourceHeap) Less(i, j int) bool { return h[i].cur.compare(h[j].cur.key) < 0 }
func (h sourceHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *sourceHeap) Push(x any)        { *h = append(*h, x.(*source)) }
func (h *sourceHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// mergeSources hands the aggregated records of all sources to fn in key order.
// A segment that turns out damaged ends there; those of which it was not known
// are returned, with what was readable as their sum. An error of fn ends the
// merge.
func mergeSources(sources []source, fn func(record) error) (found []segment, err error) {
	dec, err := newDecoder()
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	var h sourceHeap
	damage := func(s *source, seen summary) {
		if !s.segment.damaged {
			seen.gaps = s.segment.sum.gaps
			s.segment.sum, s.segment.damaged = seen, true
			found = append(found, s.segment)
		}
	}
	pull := func(s *source) error {
		err := s.advance()
		switch {
		case err == nil:
			heap.Push(&h, s)
			return nil
		case err == io.EOF:
			return nil
		case errors.Is(err, errDamaged):
			damage(s, s.reader.seen)
			return nil
		default:
			return err
		}
	}
	for i := range sources {
		s := &sources[i]
		if s.file != nil {
			sr, err := openSegment(io.NewSectionReader(s.file, 0, s.segment.size), dec)
			if errors.Is(err, errDamaged) {
				damage(s, summary{})
				continue
			}
			if err != nil {
				return found, err
			}
			s.reader = sr
		}
		if err := pull(s); err != nil {
			return found, err
		}
	}
	for h.Len() > 0 {
		s := heap.Pop(&h).(*source)
		r := s.cur
		if err := pull(s); err != nil {
			return found, err
		}
		for h.Len() > 0 && h[0].cur.key == r.key {
			t := heap.Pop(&h).(*source)
			r.add(t.cur.stat)
			if err := pull(t); err != nil {
				return found, err
			}
		}
		if err := fn(r); err != nil {
			return found, err
		}
	}
	return found, nil
}

// errStop ends a merge whose reader has had enough.
var errStop = errors.New("stop")

// Each hands every entry to fn, in the order of operation, kind, directory,
// name and inode, until fn returns false. It sees all that was noted before it
// was called. Damage found on the way becomes a gap, not an error.
func (r *Recorder) Each(fn func(Entry) bool) error {
	sources, err := r.sources()
	if err != nil {
		return fmt.Errorf("read access record: %w", err)
	}
	defer closeAll(sources)
	found, err := mergeSources(sources, func(rec record) error {
		if !fn(rec.entry()) {
			return errStop
		}
		return nil
	})
	r.noteDamage(found)
	if err != nil && !errors.Is(err, errStop) {
		return fmt.Errorf("read access record: %w", err)
	}
	return nil
}

// sources opens everything there is at one instant. A segment that is merged
// away while it is being read stays readable through its descriptor.
func (r *Recorder) sources() ([]source, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []source
	for _, s := range r.segments {
		f, err := os.Open(r.path(s.seq))
		if err != nil {
			closeAll(out)
			return nil, err
		}
		out = append(out, source{file: f, segment: s})
	}
	for _, t := range []*table{r.frozen, r.active} {
		if t != nil {
			out = append(out, source{entries: t.sorted()})
		}
	}
	return out, nil
}

// noteDamage adds the gaps of segments that were found damaged, once for each.
func (r *Recorder) noteDamage(found []segment) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range found {
		for i, s := range r.segments {
			if s.seq == f.seq && !s.damaged {
				r.segments[i] = f
				r.addDamageLocked(f)
			}
		}
	}
}

// Gaps returns how many gaps there are; 0 means that the record is complete.
func (r *Recorder) Gaps() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return uint64(len(r.allGapsLocked()))
}

// EachGap hands every gap to fn, oldest first, until fn returns false.
func (r *Recorder) EachGap(fn func(Gap) bool) {
	r.mu.Lock()
	gaps := r.allGapsLocked()
	r.mu.Unlock()
	slices.SortStableFunc(gaps, func(a, b gap) int {
		switch {
		case a.first < b.first:
			return -1
		case a.first > b.first:
			return 1
		}
		return 0
	})
	for _, g := range gaps {
		if !fn(g.public()) {
			return
		}
	}
}

func (r *Recorder) allGapsLocked() []gap {
	var out []gap
	for _, s := range r.segments {
		out = append(out, s.sum.gaps...)
	}
	out = append(out, r.writing...)
	out = append(out, r.gaps...)
	if r.lost.notes > 0 {
		out = append(out, r.lost)
	}
	return joinDropped(out)
}

// Flush writes what was noted so far to disk and returns once it is there. Call
// it when an operation ends: what was flushed survives the process.
func (r *Recorder) Flush() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.flushLocked()
}

func (r *Recorder) flushLocked() error {
	for r.frozen != nil {
		r.cond.Wait()
	}
	if r.active.notes == 0 && len(r.gaps) == 0 && r.lost.notes == 0 {
		return nil
	}
	r.freezeLocked()
	for want := r.spills + 1; r.spills < want; {
		r.cond.Wait()
	}
	return r.err
}

// Close flushes and ends the record. A second Close does nothing.
func (r *Recorder) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		<-r.done
		return nil
	}
	err := r.flushLocked()
	for range 2 { // the last spill may have dropped a segment and left a gap
		err = errors.Join(err, r.flushLocked())
	}
	r.closed = true
	r.cond.Broadcast()
	r.mu.Unlock()
	<-r.done
	if err != nil {
		return fmt.Errorf("close access record: %w", err)
	}
	if err := os.Remove(filepath.Join(r.dir, liveMarker)); err != nil {
		return fmt.Errorf("close access record: %w", err)
	}
	return nil
}
