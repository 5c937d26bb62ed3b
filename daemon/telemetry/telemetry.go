// Package telemetry keeps what happened: a span for every operation and each of
// its stages, and domain events. Both go to checksummed line files in one
// directory, bounded in bytes, and are read back by trace id, by filter, newest
// first. When an endpoint is configured, finished spans also leave by
// OTLP/HTTP.
//
// Words. A span is one timed piece of work; spans that share a trace id form a
// tree. An event is one fact at an instant. A record is either of them as it
// lies on disk; every record has a number, and numbers that are missing are a
// gap, which is counted and never hidden. A segment is one file of records.
//
// Promises. Start, End and Emit never do I/O and never block on it: they append
// to a bounded batch that a goroutine writes. A crash loses at most the batch
// that was not yet written, and spans that had not ended. A record that is
// damaged on disk is skipped and counted; the records around it stay readable.
// Nothing here is the truth about a sandbox: the commit log is.
//
// A nil *Store is a valid store that keeps nothing.
//
// Lock order: Store.files, then Store.mu, then Span.mu.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// The attribute keys that queries select by. A handler sets them on its root
// span; the other keys are free.
const (
	KeySandbox   = "sandbox"
	KeySession   = "session"
	KeyOperation = "operation"
	// KeyRequest holds a root span's request id; Trace finds a trace by it.
	KeyRequest = "request"
	// KeyObserver marks a root span, with true, as a look at the telemetry
	// itself. Trace("last") passes over such traces, so that asking for the
	// last trace twice gives the same answer twice.
	KeyObserver = "observer"
)

// ErrNotFound is what Trace answers when it holds no span of the trace asked
// for: there never was one, or retention has dropped it.
var ErrNotFound = errors.New("no such trace")

// Options say how much is kept and where else it goes. The zero value is fit
// for production.
type Options struct {
	// MaxBytes bounds the segments on disk; the oldest is dropped when a new
	// one would pass it. 0 means 64 MiB; the least is 1 MiB.
	MaxBytes int64
	// MaxPending bounds the records that wait in memory for the next write;
	// what comes beyond it is dropped and counted. 0 means 16384.
	MaxPending int
	// FlushEvery is the longest that a record waits in memory. 0 means 250 ms.
	FlushEvery time.Duration
	// Clock is the wall clock; nil means time.Now.
	Clock func() time.Time
	// Export sends finished spans to a collector; the zero value sends nothing.
	Export Export
}

const (
	defaultMaxBytes   = 64 << 20
	leastMaxBytes     = 1 << 20
	defaultMaxPending = 16384
	defaultFlushEvery = 250 * time.Millisecond
	// segmentsKept is the number of segments that MaxBytes is cut into: what is
	// lost at once when the oldest goes.
	segmentsKept = 16
)

func (o Options) withDefaults() Options {
	if o.MaxBytes == 0 {
		o.MaxBytes = defaultMaxBytes
	}
	o.MaxBytes = max(o.MaxBytes, leastMaxBytes)
	if o.MaxPending <= 0 {
		o.MaxPending = defaultMaxPending
	}
	if o.FlushEvery <= 0 {
		o.FlushEvery = defaultFlushEvery
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	return o
}

// Store records spans and events. Its methods may be called from any goroutine.
type Store struct {
	opts   Options   // immutable
	export *exporter // immutable; nil when nothing is exported

	wake chan struct{} // holds a token while the writer has something to do
	stop context.CancelFunc
	wg   sync.WaitGroup

	files  sync.Mutex // one writer at a time; held across disk writes
	log    segments   // guarded by files
	failed error      // guarded by files; why the last write failed, nil after one that did not

	mu       sync.Mutex
	pending  []*record         // guarded by mu; numbered when written
	overflow uint64            // guarded by mu; records dropped because pending was full
	live     map[spanKey]*Span // guarded by mu; spans that have not ended
	closed   bool              // guarded by mu
}

type spanKey struct{ trace, span string }

// Open opens the store in dir, which it makes with mode 0700 when it is
// missing, and starts its writer. A torn last record is cut off.
func Open(dir string, o Options) (*Store, error) {
	o = o.withDefaults()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("telemetry directory: %w", err)
	}
	log, err := openSegments(dir, o.MaxBytes)
	if err != nil {
		return nil, fmt.Errorf("open telemetry in %s: %w", dir, err)
	}
	export, err := newExporter(o.Export)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("telemetry export: %w", err), log.close())
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &Store{
		opts:   o,
		export: export,
		wake:   make(chan struct{}, 1),
		stop:   stop,
		log:    log,
		live:   make(map[spanKey]*Span),
	}
	s.wg.Go(func() { s.writeLoop(ctx) })
	return s, nil
}

// writeLoop writes the batch FlushEvery after its first record, or at once when
// the batch is half full.
func (s *Store) writeLoop(ctx context.Context) {
	timer := time.NewTimer(s.opts.FlushEvery)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
		timer.Reset(s.opts.FlushEvery)
	wait:
		for !s.halfFull() {
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
				break wait
			case <-s.wake:
			}
		}
		// The error stays in Stats: a full disk must not stop the operations
		// that telemetry only watches.
		_ = s.Flush()
	}
}

func (s *Store) halfFull() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pending) >= s.opts.MaxPending/2
}

// add queues one record, or counts it as dropped.
func (s *Store) add(r *record) {
	s.mu.Lock()
	if s.closed || len(s.pending) >= s.opts.MaxPending {
		s.overflow++
		s.mu.Unlock()
		return
	}
	s.pending = append(s.pending, r)
	n := len(s.pending)
	s.mu.Unlock()
	if n == 1 || n == s.opts.MaxPending/2 {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// Flush hands every record that was added before the call to the operating
// system. It does not wait for the disk. The records of a failed write are lost
// and counted as a gap.
func (s *Store) Flush() error {
	if s == nil {
		return nil
	}
	s.files.Lock()
	defer s.files.Unlock()
	s.mu.Lock()
	batch, overflow := s.pending, s.overflow
	s.pending, s.overflow = nil, 0
	s.mu.Unlock()
	if len(batch) == 0 && overflow == 0 {
		return nil
	}
	s.failed = s.log.write(batch, overflow)
	if s.failed != nil {
		return fmt.Errorf("write telemetry: %w", s.failed)
	}
	return nil
}

// Stats is what is kept and what is missing.
type Stats struct {
	Segments   int    `json:"segments"`
	Bytes      int64  `json:"bytes"`
	Records    uint64 `json:"records"`     // ever added
	Expired    uint64 `json:"expired"`     // dropped with the oldest segments
	Overflowed uint64 `json:"overflowed"`  // dropped since Open: the batch was full, or the disk refused it
	OpenSpans  int    `json:"open_spans"`  // started and not ended
	Unexported uint64 `json:"unexported"`  // finished spans that the exporter gave up on
	LastError  string `json:"last_error"`  // of the last write; empty when it went well
	Directory  string `json:"directory"`   // where the segments lie
	MaxBytes   int64  `json:"max_bytes"`   // the bound on Bytes
	ExportedTo string `json:"exported_to"` // empty when spans stay here
}

// Stats flushes and counts.
func (s *Store) Stats() Stats {
	if s == nil {
		return Stats{}
	}
	_ = s.Flush() // its error is LastError
	s.files.Lock()
	st := Stats{
		Segments:   len(s.log.list),
		Bytes:      s.log.bytes(),
		Records:    s.log.next - 1,
		Expired:    s.log.first() - 1,
		Overflowed: s.log.lost,
		Directory:  s.log.dir,
		MaxBytes:   s.opts.MaxBytes,
		ExportedTo: s.opts.Export.Endpoint,
	}
	if s.failed != nil {
		st.LastError = s.failed.Error()
	}
	s.files.Unlock()
	s.mu.Lock()
	st.OpenSpans = len(s.live)
	s.mu.Unlock()
	if s.export != nil {
		st.Unexported = s.export.failed.Load()
	}
	return st
}

// Close writes what is pending, gives the exporter a few seconds to send what
// it holds, and closes the files. Spans that have not ended are lost.
func (s *Store) Close() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
	err := s.Flush()
	s.files.Lock()
	err = errors.Join(err, s.log.close())
	s.files.Unlock()
	return errors.Join(err, s.export.close())
}
