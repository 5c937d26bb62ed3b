package layerfmt

import (
	"bufio"
	"errors"
	"fmt"
	"io"
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
	out *bufio.Writer
	enc *zstd.Encoder

	workers int
	started bool
	jobs    chan *frameJob // to be compressed
	order   chan *frameJob // to be written, in order
	free    chan *frameJob // to be used again
	wg      sync.WaitGroup

	count uint64 // frames sent; the caller's side only

	// These belong to the committer until wg is waited for.
	frames []frameRecord
	off    uint64

	mu  sync.Mutex
	err error // guarded by mu; the first write error
}

// inFlight is how many frames may be in the pipe for each worker.
const inFlight = 3

func newFramePipe(w io.Writer, level zstd.EncoderLevel, workers int) (*framePipe, error) {
	// No checksum: each frame has a crc32c in the frame table. One segment and
	// a pinned window make the bytes depend on the input alone.
	enc, err := zstd.NewWriter(nil,
		zstd.WithEncoderLevel(level),
		zstd.WithEncoderConcurrency(workers),
		zstd.WithWindowSize(chunkSize),
		zstd.WithSingleSegment(true),
		zstd.WithEncoderCRC(false),
		zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("make a compressor: %w", err)
	}
	return &framePipe{
		out:     bufio.NewWriterSize(w, 64<<10),
		enc:     enc,
		workers: workers,
		jobs:    make(chan *frameJob, workers*inFlight),
		order:   make(chan *frameJob, workers*inFlight),
		free:    make(chan *frameJob, workers*inFlight),
	}, nil
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
	if !p.started {
		p.started = true
		for range p.workers {
			p.wg.Go(p.compress)
		}
		p.wg.Go(p.commit)
	}
	n := uint32(p.count)
	p.count++
	p.order <- j
	p.jobs <- j
	return n, nil
}

func (p *framePipe) compress() {
	for j := range p.jobs {
		j.enc = p.enc.EncodeAll(j.raw, j.enc[:0])
		j.done <- struct{}{}
	}
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

// stop waits until everything sent is written. It may be called twice.
func (p *framePipe) stop() error {
	if p.started {
		p.started = false
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
