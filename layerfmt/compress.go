package layerfmt

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// frameJob is one frame on its way from a Writer to the file.
type frameJob struct {
	raw  []byte
	enc  []byte
	done chan struct{} // holds a token when enc is ready
}

// framePipe compresses frames on several goroutines and writes them in the
// order they came. At most cap(order) frames are in flight, so a slow disk or
// a slow encoder slows the caller down.
type framePipe struct {
	out   *bufio.Writer
	level zstd.EncoderLevel

	workers  int             // at most
	encoders []*zstd.Encoder // one for each worker that was started
	jobs     chan *frameJob  // to be compressed
	order    chan *frameJob  // to be written, in order
	free     chan *frameJob  // to be used again
	wg       sync.WaitGroup

	count   uint64 // frames sent; the caller's side only
	stopped bool   // the caller's side only

	// These belong to the committer until wg is waited for.
	frames []frameRecord
	off    uint64

	mu  sync.Mutex
	err error // guarded by mu; the first write error
}

// inFlight is how many frames may be in the pipe for each worker.
const inFlight = 3

func newFramePipe(w io.Writer, level zstd.EncoderLevel, workers int) *framePipe {
	return &framePipe{
		out:     bufio.NewWriterSize(w, 32<<10),
		level:   level,
		workers: workers,
		jobs:    make(chan *frameJob, workers*inFlight),
		order:   make(chan *frameJob, workers*inFlight),
		free:    make(chan *frameJob, workers*inFlight),
	}
}

// newEncoder makes a compressor. Its tables take about a megabyte, so a pack of
// one small file should not make more than one.
func newEncoder(level zstd.EncoderLevel) (*zstd.Encoder, error) {
	// No checksum: each frame has a crc32c in the frame table. One segment and
	// a pinned window make the bytes depend on the input alone.
	enc, err := zstd.NewWriter(nil,
		zstd.WithEncoderLevel(level),
		zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(chunkSize),
		zstd.WithSingleSegment(true),
		zstd.WithEncoderCRC(false),
		zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("make a compressor: %w", err)
	}
	return enc, nil
}

// job returns a job with an empty raw buffer that can hold a frame.
func (p *framePipe) job() *frameJob {
	select {
	case j := <-p.free:
		j.raw = j.raw[:0]
		return j
	default:
		return &frameJob{raw: make([]byte, 0, chunkSize), done: make(chan struct{}, 1)}
	}
}

// recycle gives a job back that is not in the pipe.
func (p *framePipe) recycle(j *frameJob) {
	select {
	case p.free <- j:
	default:
	}
}

// send puts a frame into the pipe, which owns j from now on, and returns its
// number.
func (p *framePipe) send(j *frameJob) (uint32, error) {
	if err := p.failed(); err != nil {
		return 0, err
	}
	if p.count == maxFrames {
		return 0, errors.New("a pack cannot hold so many frames")
	}
	if err := p.hire(); err != nil {
		return 0, err
	}
	n := uint32(p.count)
	p.count++
	p.order <- j
	p.jobs <- j
	return n, nil
}

// hire starts the goroutines at the first frame, and one more worker when
// frames are waiting.
func (p *framePipe) hire() error {
	running := len(p.encoders)
	if running == p.workers || running > 0 && len(p.jobs) == 0 {
		return nil
	}
	enc, err := newEncoder(p.level)
	if err != nil {
		return err
	}
	p.encoders = append(p.encoders, enc)
	if running == 0 {
		p.wg.Go(p.commit)
	}
	p.wg.Go(func() { p.compress(enc) })
	return nil
}

func (p *framePipe) compress(enc *zstd.Encoder) {
	for j := range p.jobs {
		j.enc = enc.EncodeAll(j.raw, j.enc[:0])
		j.done <- struct{}{}
	}
}

// encodeAll compresses data on the caller's goroutine, in frames of chunkSize.
// The pipe must be stopped.
func (p *framePipe) encodeAll(data []byte) ([]byte, error) {
	if len(p.encoders) == 0 {
		enc, err := newEncoder(p.level)
		if err != nil {
			return nil, err
		}
		p.encoders = append(p.encoders, enc)
	}
	var out []byte
	for chunk := range slices.Chunk(data, chunkSize) {
		out = p.encoders[0].EncodeAll(chunk, out)
	}
	return out, nil
}

// commit writes frames as they become ready. After an error it only drains.
func (p *framePipe) commit() {
	for j := range p.order {
		<-j.done
		if p.failed() == nil {
			p.frames = append(p.frames, frameRecord{
				off:    p.off,
				stored: uint32(len(j.enc)),
				raw:    uint32(len(j.raw)),
				crc:    frameCRC(j.enc, uint32(len(p.frames))),
			})
			if _, err := p.out.Write(j.enc); err != nil {
				p.fail(fmt.Errorf("write a frame: %w", err))
			}
			p.off += uint64(len(j.enc))
		}
		p.recycle(j)
	}
}

// stop waits until everything sent is written. It may be called twice; nothing
// can be sent after it.
func (p *framePipe) stop() error {
	if !p.stopped {
		p.stopped = true
		close(p.jobs)
		close(p.order)
		p.wg.Wait()
	}
	return p.failed()
}

// put writes bytes after the last frame. The pipe must be stopped, or not yet
// started.
func (p *framePipe) put(b []byte) error {
	if err := p.failed(); err != nil {
		return err
	}
	p.off += uint64(len(b))
	if _, err := p.out.Write(b); err != nil {
		p.fail(err)
		return err
	}
	return nil
}

func (p *framePipe) failed() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

func (p *framePipe) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
}
