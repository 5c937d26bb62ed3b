// Package holder owns sessions' namespaces from the daemon's side. A holder is
// a small process, pid 1 of its session's namespaces, that mounts the
// session's view, builds the root tree around it and runs commands in it; the
// daemon speaks to it over one packet socket.
//
// Words: the holder is that process; a stub is the parent that the holder
// gives each command, so that everything the command starts stays beneath it;
// inner pids are those of the session's own pid namespace, which is also what
// FUSE requests carry.
//
// Nothing here touches a path in a session's view: such a call would wait for
// the very daemon that makes it.
//
// Lock order: Holder.procMu, then Holder.mu. Neither is held while sending.
package holder

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/wire"
)

// What requests to a holder answer. Errors from inside carry an errno too.
var (
	ErrEnded     = errors.New("the session's holder has ended")
	ErrNoCommand = errors.New("no such command")
	ErrExist     = errors.New("a command of this id exists")
	ErrStuck     = errors.New("the session's processes do not end: close every copy of its fuse descriptor")
)

// StepError says at which step something failed. Is and As see the errno.
type StepError struct {
	Step string // "open"
	On   string // "/dev/fuse"
	Err  error
}

func (e *StepError) Error() string { return e.Step + " " + e.On + ": " + e.Err.Error() }

// Unwrap returns the errno.
func (e *StepError) Unwrap() error { return e.Err }

// State is what a restarted daemon needs, besides the two descriptors, to take
// a holder back. It is plain data.
type State struct {
	Pid       int    `json:"pid"`
	Started   uint64 `json:"started"` // start time in clock ticks since boot
	Mapping   string `json:"mapping"`
	Workspace string `json:"workspace"`
	Home      string `json:"home"`
	Processes uint32 `json:"processes"`
}

// Stage is one timed step of the start.
type Stage struct {
	Name string
	Took time.Duration
}

// Holder is the daemon's end of one session's holder. Its methods may be
// called from any goroutine.
type Holder struct {
	state State
	conn  *wire.Conn
	ctl   int // conn's descriptor
	pidfd *pidfd
	born  time.Time // zero of the owner cache's clock

	ready chan struct{} // closed once readyErr and stages are set
	lost  chan struct{} // closed once the connection is; lostErr is set then
	done  chan struct{} // closed once the holder is reaped

	readyErr error
	stages   []Stage
	lostErr  error

	mu       sync.Mutex
	fuse     int                     // guarded by mu; -1 without a view or once closed
	seq      uint64                  // guarded by mu
	pending  map[uint64]chan answer  // guarded by mu; each has room for its one answer
	commands map[string]*commandInfo // guarded by mu
	adopting bool                    // guarded by mu; commands we never asked for are believed

	procMu sync.RWMutex
	proc   int // guarded by procMu; the session's procfs, -1 once closed

	owners ownerCache
	wg     sync.WaitGroup
}

// answer is a packet that answers a request of ours.
type answer struct {
	body wire.Body
	fds  []int
}

func newHolder(conn *wire.Conn, ctl int, pfd *pidfd, s State) *Holder {
	var seed [8]byte
	rand.Read(seed[:])
	return &Holder{
		state: s, conn: conn, ctl: ctl, pidfd: pfd, born: time.Now(),
		ready: make(chan struct{}), lost: make(chan struct{}), done: make(chan struct{}),
		fuse: -1, proc: -1,
		// Answers to an earlier daemon may still be under way; a random start
		// keeps them apart from ours.
		seq:      binary.LittleEndian.Uint64(seed[:]),
		pending:  make(map[uint64]chan answer),
		commands: make(map[string]*commandInfo),
	}
}

// run starts the goroutines that Close waits for.
func (h *Holder) run() {
	h.wg.Go(h.listen)
	h.wg.Go(func() {
		if h.pidfd.wait() {
			h.conn.Close() // duplicates elsewhere would keep listen from seeing the end
			close(h.done)
		}
	})
}

// listen takes in what the holder sends until the connection ends.
func (h *Holder) listen() {
	var err error
	for err == nil {
		var p wire.Packet
		var fds []int
		if p, fds, err = h.conn.Receive(); err == nil {
			err = h.take(p, fds)
		}
	}
	h.lostErr = ErrEnded
	if errors.Is(err, wire.ErrFormat) || errors.Is(err, wire.ErrVersion) {
		// What does not speak the protocol is not let live.
		h.lostErr = fmt.Errorf("%w: %w", ErrEnded, err)
		h.pidfd.signal(unix.SIGKILL)
	}
	close(h.lost)
}

// take handles one packet. An error ends the session.
func (h *Holder) take(p wire.Packet, fds []int) error {
	switch b := p.Body.(type) {
	case wire.Ready:
		wire.CloseAll(fds)
		h.becomeReady(b.Stages, nil)
		return nil
	case wire.Failed:
		if !h.resolve(p.Seq, answer{b, fds}) {
			h.becomeReady(nil, stepError(b))
		}
		return nil
	case wire.Started:
		h.startedBy(b)
		h.resolve(p.Seq, answer{b, fds})
		return nil
	case wire.Reply:
		h.resolve(p.Seq, answer{b, fds})
		return nil
	}
	wire.CloseAll(fds)
	switch b := p.Body.(type) {
	case wire.Exited:
		h.exitedBy(b)
	case wire.Gone:
		h.goneBy(b)
	default:
		return wire.ErrFormat
	}
	return nil
}

// becomeReady settles Ready, once: an adopted holder is ready already, and
// answers to the daemon before us may still come in.
func (h *Holder) becomeReady(stages []wire.Stage, err error) {
	if closed(h.ready) {
		return
	}
	for _, s := range stages {
		h.stages = append(h.stages, Stage{s.Name, time.Duration(s.Nanos)})
	}
	h.readyErr = err
	close(h.ready)
}

// resolve hands an answer to the request it answers, if one waits for it.
func (h *Holder) resolve(seq uint64, a answer) bool {
	h.mu.Lock()
	waiting, ok := h.pending[seq]
	delete(h.pending, seq)
	h.mu.Unlock()
	if !ok {
		wire.CloseAll(a.fds)
		return false
	}
	waiting <- a
	return true
}

// request sends a request and waits for its answer.
func (h *Holder) request(ctx context.Context, b wire.Body, fds ...int) (answer, error) {
	waiting := make(chan answer, 1)
	h.mu.Lock()
	h.seq++
	seq := h.seq
	h.pending[seq] = waiting
	h.mu.Unlock()
	if err := h.conn.Send(wire.Packet{Seq: seq, Body: b}, fds...); err != nil {
		h.forgetRequest(seq, waiting)
		return answer{}, fmt.Errorf("%w: %w", ErrEnded, err)
	}
	select {
	case a := <-waiting:
		return a, nil
	case <-ctx.Done():
		h.forgetRequest(seq, waiting)
		return answer{}, context.Cause(ctx)
	case <-h.lost:
		h.forgetRequest(seq, waiting)
		return answer{}, h.lostErr
	}
}

// forgetRequest gives up on an answer; descriptors that came with it are closed.
func (h *Holder) forgetRequest(seq uint64, waiting chan answer) {
	h.mu.Lock()
	delete(h.pending, seq)
	h.mu.Unlock()
	select {
	case a := <-waiting:
		wire.CloseAll(a.fds)
	default:
	}
}

// ask is request for what is answered with a plain Reply.
func (h *Holder) ask(ctx context.Context, b wire.Body) error {
	a, err := h.request(ctx, b)
	if err != nil {
		return err
	}
	wire.CloseAll(a.fds)
	reply, ok := a.body.(wire.Reply)
	if !ok {
		return wire.ErrFormat
	}
	if reply.Errno != 0 {
		return unix.Errno(reply.Errno)
	}
	return nil
}

func stepError(f wire.Failed) error {
	return &StepError{Step: f.Step, On: f.Text, Err: unix.Errno(f.Errno)}
}

// FuseFD is the mounted /dev/fuse, -1 without a view. It stays the Holder's:
// whoever serves it keeps a duplicate of their own.
func (h *Holder) FuseFD() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.fuse
}

// ControlFD is the daemon's end of the control socket, for the fd store to
// duplicate. While a duplicate lives, the session outlives this daemon.
func (h *Holder) ControlFD() int { return h.ctl }

// Pid is the holder's pid on the host.
func (h *Holder) Pid() int { return h.state.Pid }

// State is what Adopt needs.
func (h *Holder) State() State { return h.state }

// Home is the value for HOME inside.
func (h *Holder) Home() string { return h.state.Home }

// Stages are the timed steps of the start, as far as they are known: of the
// making first, of the root's assembly once Ready has returned. An adopted
// holder has none.
func (h *Holder) Stages() []Stage {
	select {
	case <-h.ready:
		return h.stages
	default:
		return nil
	}
}

// IDs names the id map ("range", "subuid" or "single") and gives the function
// that turns a stored id into one that can be shown inside.
func (h *Holder) IDs() (mapping string, shown func(uint32) uint32) {
	return h.state.Mapping, show(h.state.Mapping)
}

// Ready waits until the root tree is complete and commands can run. It does
// not look into the view, but commands do: serve it first.
func (h *Holder) Ready(ctx context.Context) error {
	select {
	case <-h.ready:
		return explain(h.readyErr)
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-h.lost:
		select {
		case <-h.ready: // it failed, said why, and ended
			return explain(h.readyErr)
		default:
			return h.lostErr
		}
	}
}

// Syncfs flushes the view's dirty pages from inside, as syncfs(2) does. The
// view must be served meanwhile.
func (h *Holder) Syncfs(ctx context.Context) error {
	if err := h.ask(ctx, wire.Sync{}); err != nil {
		return fmt.Errorf("sync the view: %w", err)
	}
	return nil
}

// Detach gives the holder up without ending it: duplicates of the control and
// fuse descriptors keep the session for a daemon that adopts it. Without any,
// the session ends. The Holder is of no more use.
func (h *Holder) Detach() {
	h.conn.Close()
	h.pidfd.close()
	h.wg.Wait()
	h.closeFuse()
	h.closeProc()
}

// Done is closed when the holder and everything in it has been reaped.
func (h *Holder) Done() <-chan struct{} { return h.done }

// KillSession sends SIGKILL to the holder and, by the kernel's hand, to
// everything in the session. It does not wait.
func (h *Holder) KillSession() error { return h.pidfd.signal(unix.SIGKILL) }

// closeGrace is how long processes get to die while the view is still served,
// and once more after its descriptor is closed here.
const closeGrace = 2 * time.Second

// Close kills everything in the session and waits until it is reaped. The view
// should be served until then: a dying process waits for its answers. When
// some do not come, Close closes its own copy of the fuse descriptor, and fails
// with ErrStuck if that was not the last; close the others and call it again.
func (h *Holder) Close() error {
	if err := h.KillSession(); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill holder %d: %w", h.Pid(), err)
	}
	if !h.reapedWithin(closeGrace) {
		h.closeFuse()
		if !h.reapedWithin(closeGrace) {
			return fmt.Errorf("close holder %d: %w", h.Pid(), ErrStuck)
		}
	}
	h.wg.Wait()
	h.closeFuse()
	h.closeProc()
	h.pidfd.close()
	return nil
}

func (h *Holder) reapedWithin(grace time.Duration) bool {
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-h.done:
		return true
	case <-timer.C:
		return false
	}
}

func (h *Holder) closeFuse() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fuse >= 0 {
		unix.Close(h.fuse)
		h.fuse = -1
	}
}

func (h *Holder) closeProc() {
	h.procMu.Lock()
	defer h.procMu.Unlock()
	if h.proc >= 0 {
		unix.Close(h.proc)
		h.proc = -1
	}
}
