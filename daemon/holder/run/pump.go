package run

import (
	"errors"
	"math"
	"sync"

	"golang.org/x/sys/unix"
)

// chunk is how much one step of a pump moves at most. It must hold PIPE_BUF: a
// writer may switch its pipe to packets, and a read drops what does not fit.
const chunk = 64 << 10

// pump carries a command's streams between pipes, which the command has, and
// files, which only its stub has. So a command cannot undo what it has printed,
// can reopen its streams whoever owns the files, and fills no disk beyond its
// bound. A stream that is no regular file goes to the command as it is.
//
// One goroutine runs the pump; the stub's wait loop calls settle beside it.
type pump struct {
	theirs [3]int // the command's ends, until it is started

	mu  sync.Mutex
	in  source     // guarded by mu, like the rest
	out [2]sink    // stdout, stderr
	err unix.Errno // the first failure of a file
	buf []byte
}

// source is a file that is read into a pipe.
type source struct {
	pipe int // -1 once it has ended; only run changes it, as in sink
	file int
	at   int64
}

// sink is a file that is filled from a pipe. The file is always the beginning
// of the stream: once bytes are dropped, all that follow are.
type sink struct {
	pipe    int
	file    int
	left    int64 // how many bytes the file may still take
	dropped uint64
}

// newPump makes the pipes for the streams at the descriptors std: input, output
// and errors. The files among them become the pump's. Each output file takes
// limit bytes, any number when that is 0.
func newPump(std [3]int, limit uint64) (*pump, error) {
	left := int64(math.MaxInt64)
	if limit > 0 && limit < math.MaxInt64 {
		left = int64(limit)
	}
	p := &pump{theirs: std, in: source{pipe: -1}, buf: make([]byte, chunk)}
	for i := range p.out {
		p.out[i].pipe = -1
	}
	for i, fd := range std {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		var ends [2]int
		if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
			return nil, err
		}
		ours, theirs := ends[0], ends[1]
		if i == 0 {
			ours, theirs = theirs, ours
			at, err := unix.Seek(fd, 0, unix.SEEK_CUR)
			if err != nil {
				return nil, err
			}
			p.in = source{pipe: ours, file: fd, at: at}
		} else {
			p.out[i-1] = sink{pipe: ours, file: fd, left: left}
		}
		// This end alone: the other is an open file of its own.
		if err := unix.SetNonblock(ours, true); err != nil {
			return nil, err
		}
		p.theirs[i] = theirs
	}
	return p, nil
}

// started closes the command's ends, or the pump would wait for itself.
func (p *pump) started() {
	for _, fd := range p.theirs {
		unix.Close(fd)
	}
}

// run moves bytes until every stream has ended.
func (p *pump) run() {
	for {
		ready := [...]unix.PollFd{ // a negative descriptor is never ready
			{Fd: int32(p.in.pipe), Events: unix.POLLOUT},
			{Fd: int32(p.out[0].pipe), Events: unix.POLLIN},
			{Fd: int32(p.out[1].pipe), Events: unix.POLLIN},
		}
		if ready[0].Fd < 0 && ready[1].Fd < 0 && ready[2].Fd < 0 {
			return
		}
		if _, err := unix.Poll(ready[:], -1); err != nil {
			continue // a signal
		}
		p.mu.Lock()
		if ready[0].Revents != 0 && !p.feed() {
			end(&p.in.pipe, p.in.file)
		}
		for i := range p.out {
			s := &p.out[i]
			if ready[1+i].Revents == 0 {
				continue
			}
			if _, more := p.take(s); !more {
				end(&s.pipe, s.file)
			}
		}
		p.mu.Unlock()
	}
}

func end(pipe *int, file int) {
	unix.Close(*pipe)
	unix.Close(file)
	*pipe = -1
}

// feed moves one chunk of the input and reports whether there may be more. The
// caller holds mu.
func (p *pump) feed() (more bool) {
	n, err := unix.Pread(p.in.file, p.buf, p.in.at)
	switch {
	case err == unix.EINTR:
		return true
	case err != nil:
		p.fail(err)
		return false
	case n == 0:
		return false
	}
	n, err = unix.Write(p.in.pipe, p.buf[:n])
	p.in.at += int64(max(n, 0))
	return err == nil || err == unix.EINTR || err == unix.EAGAIN
}

// take moves one chunk of an output. more is false when nobody has the other
// end any more. The caller holds mu.
func (p *pump) take(s *sink) (n int, more bool) {
	n, err := unix.Read(s.pipe, p.buf)
	if err != nil {
		return 0, err == unix.EINTR || err == unix.EAGAIN
	}
	p.store(s, p.buf[:n])
	return n, n > 0
}

// store writes what the file may take of b, and drops the rest. The caller
// holds mu.
func (p *pump) store(s *sink, b []byte) {
	keep := b[:min(int64(len(b)), s.left)]
	for len(keep) > 0 {
		n, err := unix.Write(s.file, keep)
		if err == unix.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = unix.EIO
		}
		if err != nil {
			p.fail(err)
			s.left = 0
			break
		}
		keep, b = keep[n:], b[n:]
		s.left -= int64(n)
	}
	s.dropped += uint64(len(b))
}

// fail remembers the first failure. The caller holds mu.
func (p *pump) fail(err error) {
	var errno unix.Errno
	if p.err == 0 && errors.As(err, &errno) {
		p.err = errno
	}
}

// settle moves what is in the output's pipes now, and says how many bytes of
// each have been dropped so far and which failure of a file came first. It does
// not wait for those who still write.
func (p *pump) settle() (dropped [2]uint64, err unix.Errno) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.out {
		s := &p.out[i]
		if s.pipe >= 0 {
			p.drain(s)
		}
		dropped[i] = s.dropped
	}
	return dropped, p.err
}

// drain moves as much as the pipe holds at this instant. The caller holds mu.
func (p *pump) drain(s *sink) {
	held, err := unix.IoctlGetInt(s.pipe, unix.TIOCINQ)
	if err != nil {
		return
	}
	for held > 0 {
		n, err := unix.Read(s.pipe, p.buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 { // the command has read it itself
			return
		}
		p.store(s, p.buf[:n])
		held -= n
	}
}
