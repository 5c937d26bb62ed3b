package holder

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/wire"
)

// Command is one program to run inside.
type Command struct {
	ID   string   // 1 to 64 of [A-Za-z0-9._:-]; unique in the session
	Argv []string // Argv[0] is looked up in Env's PATH when it has no slash
	Env  []string // all of it: nothing is added
	Dir  string   // absolute path inside; the workspace when empty
	// Stdin is read from its offset on; Stdout and Stderr are written as they
	// are opened. Of a regular file the command sees only a pipe, which its stub
	// empties or fills, also while no daemon runs; anything else is the
	// command's own. nil is /dev/null. They stay the caller's, who may close
	// them when Exec returns.
	Stdin, Stdout, Stderr *os.File
	// OutputBytes bounds how much the files of Stdout and Stderr take each; 0
	// is no bound. What the command prints beyond is read and dropped.
	OutputBytes int64
	Rlimits     []Rlimit
}

// Rlimit is one resource limit of a command, as setrlimit(2) has it.
type Rlimit struct {
	Resource   int // unix.RLIMIT_*
	Soft, Hard uint64
}

// Exit is how a command ended.
type Exit struct {
	Code       int    // exit code; -1 when a signal ended it
	Signal     string // "SIGKILL"; empty when it exited
	CoreDumped bool
	UserTime   time.Duration
	SysTime    time.Duration
	MaxRSS     int64 // bytes
	// Lost says that only the end is known: its stub was killed from inside the
	// session, or it was about to start when the daemon was replaced, and failed.
	Lost bool
	// StdoutDropped and StderrDropped say how many bytes the files lack at the
	// command's end, because of OutputBytes or because the file failed. A file
	// is always the beginning of what was printed.
	StdoutDropped, StderrDropped int64
	// StreamErr is the first failure of a stream's file: ENOSPC when the disk
	// was full. 0 is none. An input whose file fails ends early.
	StreamErr unix.Errno
}

// commandInfo is what the daemon knows of a command. exit is set before exited
// is closed.
type commandInfo struct {
	exit   Exit
	exited chan struct{}
	gone   chan struct{}
	acked  bool
}

func newCommandInfo() *commandInfo {
	return &commandInfo{exited: make(chan struct{}), gone: make(chan struct{})}
}

// Exec starts a command in a session of its own (setsid) with umask 022, and
// returns its inner pid once its program is running. A StepError says why it
// could not be; it then left nothing behind. Exec waits as long as the view
// makes the lookup of directory and program wait; Kill ends that.
func (h *Holder) Exec(c Command) (pid int, err error) {
	if !wire.ValidID(c.ID) {
		return 0, fmt.Errorf("command id %q: use 1 to %d letters, digits or . _ : -", c.ID, wire.MaxID)
	}
	if c.OutputBytes < 0 {
		return 0, fmt.Errorf("command %s: %d output bytes: %w", c.ID, c.OutputBytes, unix.EINVAL)
	}
	if c.Dir == "" {
		c.Dir = h.state.Workspace
	}
	if !filepath.IsAbs(c.Dir) {
		return 0, fmt.Errorf("command %s: directory %q: give an absolute path", c.ID, c.Dir)
	}
	spec, err := h.encode(c)
	if err != nil {
		return 0, err
	}
	defer unix.Close(spec)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", os.DevNull, err)
	}
	defer null.Close()
	fds := []int{spec}
	for _, f := range []*os.File{c.Stdin, c.Stdout, c.Stderr} {
		if f == nil {
			f = null
		}
		// Fd makes the file blocking, which is what a program expects.
		fds = append(fds, int(f.Fd()))
	}

	h.mu.Lock()
	if h.commands[c.ID] != nil {
		h.mu.Unlock()
		return 0, fmt.Errorf("command %s: %w", c.ID, ErrExist)
	}
	h.commands[c.ID] = newCommandInfo()
	h.mu.Unlock()
	a, err := h.request(context.Background(), wire.Exec{ID: c.ID}, fds...)
	wire.CloseAll(a.fds)
	if err == nil {
		switch b := a.body.(type) {
		case wire.Started:
			return int(b.Pid), nil
		case wire.Failed:
			err = stepError(b)
		default:
			err = wire.ErrFormat
		}
	}
	h.mu.Lock()
	delete(h.commands, c.ID)
	h.mu.Unlock()
	return 0, fmt.Errorf("command %s: %w", c.ID, err)
}

// encode writes what the stub needs into a memory file.
func (h *Holder) encode(c Command) (int, error) {
	limits := []wire.Limit{{
		Resource: unix.RLIMIT_NPROC, Soft: uint64(h.state.Processes), Hard: uint64(h.state.Processes),
	}}
	for _, l := range c.Rlimits {
		limits = slices.DeleteFunc(limits, func(have wire.Limit) bool { return have.Resource == uint32(l.Resource) })
		limits = append(limits, wire.Limit{Resource: uint32(l.Resource), Soft: l.Soft, Hard: l.Hard})
	}
	spec := wire.AppendCommand(nil, wire.Command{
		Argv: c.Argv, Env: c.Env, Dir: c.Dir, Limits: limits, Output: uint64(c.OutputBytes),
	})
	if _, err := wire.ParseCommand(spec); err != nil {
		return -1, fmt.Errorf("command %s: its arguments, environment, directory or limits are too many, too large, empty or hold a NUL: %w", c.ID, err)
	}
	fd, err := unix.MemfdCreate("command", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("command", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return -1, fmt.Errorf("command %s: make a memory file: %w", c.ID, err)
	}
	for rest := spec; len(rest) > 0; {
		n, err := unix.Write(fd, rest)
		if err != nil && err != unix.EINTR {
			unix.Close(fd)
			return -1, fmt.Errorf("command %s: write its arguments: %w", c.ID, err)
		}
		rest = rest[max(n, 0):]
	}
	return fd, nil
}

// knownLocked finds a command's record. A daemon that adopts has none yet, and
// makes one of whatever it is told.
func (h *Holder) knownLocked(id string) *commandInfo {
	if c := h.commands[id]; c != nil {
		return c
	}
	if !h.adopting {
		return nil
	}
	c := newCommandInfo()
	h.commands[id] = c
	return c
}

func (h *Holder) startedBy(b wire.Started) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.knownLocked(b.ID)
}

func (h *Holder) exitedBy(b wire.Exited) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.knownLocked(b.ID)
	if c == nil || closed(c.exited) {
		return
	}
	c.exit = exitOf(b)
	close(c.exited)
}

func (h *Holder) goneBy(b wire.Gone) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.knownLocked(b.ID)
	if c == nil || closed(c.gone) {
		return
	}
	if !closed(c.exited) { // a start that another daemon asked for has failed
		c.exit = Exit{Code: -1, Lost: true}
		close(c.exited)
	}
	close(c.gone)
	if c.acked {
		delete(h.commands, b.ID)
	}
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func exitOf(b wire.Exited) Exit {
	e := Exit{
		Code:     -1,
		UserTime: time.Duration(b.UserMicros) * time.Microsecond,
		SysTime:  time.Duration(b.SysMicros) * time.Microsecond,
		MaxRSS:   int64(b.MaxRSS << 10),
		Lost:     b.Lost,

		StdoutDropped: int64(min(b.StdoutDropped, math.MaxInt64)),
		StderrDropped: int64(min(b.StderrDropped, math.MaxInt64)),
		StreamErr:     unix.Errno(b.StreamErrno),
	}
	switch status := unix.WaitStatus(b.Status); {
	case status.Exited():
		e.Code = status.ExitStatus()
	case status.Signaled():
		e.CoreDumped = status.CoreDump()
		if e.Signal = unix.SignalName(status.Signal()); e.Signal == "" {
			e.Signal = fmt.Sprintf("SIG%d", status.Signal())
		}
	}
	return e
}

// Wait waits for a command to end; what the command itself has printed is in
// its files then, what its descendants go on printing follows. It may be called any number of times until
// Ack. Descendants may outlive the command: see WaitTree.
func (h *Holder) Wait(ctx context.Context, id string) (Exit, error) {
	c, err := h.waitFor(ctx, id, func(c *commandInfo) chan struct{} { return c.exited })
	if err != nil {
		return Exit{}, err
	}
	return c.exit, nil
}

// WaitTree waits until nothing that the command started lives any more, and all
// they printed is in the files.
func (h *Holder) WaitTree(ctx context.Context, id string) error {
	_, err := h.waitFor(ctx, id, func(c *commandInfo) chan struct{} { return c.gone })
	return err
}

func (h *Holder) waitFor(ctx context.Context, id string, event func(*commandInfo) chan struct{}) (*commandInfo, error) {
	h.mu.Lock()
	c := h.commands[id]
	h.mu.Unlock()
	if c == nil {
		return nil, fmt.Errorf("command %s: %w", id, ErrNoCommand)
	}
	select {
	case <-event(c):
		return c, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-h.lost:
	}
	if closed(event(c)) { // it came before the end did
		return c, nil
	}
	return nil, fmt.Errorf("command %s: %w", id, h.lostErr)
}

// Commands lists the ids of the commands that are not acknowledged, in order.
func (h *Holder) Commands() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	ids := make([]string, 0, len(h.commands))
	for id := range h.commands {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Ack lets both sides forget a command that has ended. Call it once the exit is
// recorded where a restart finds it; until then, an adopting daemon hears of
// it again.
func (h *Holder) Ack(id string) error {
	h.mu.Lock()
	c := h.commands[id]
	if c == nil || !closed(c.exited) {
		h.mu.Unlock()
		return fmt.Errorf("acknowledge command %s: %w", id, ErrNoCommand)
	}
	c.acked = true
	if closed(c.gone) {
		delete(h.commands, id)
	}
	h.mu.Unlock()
	if err := h.conn.Send(wire.Packet{Body: wire.Ack{ID: id}}); err != nil {
		return fmt.Errorf("acknowledge command %s: %w: %w", id, ErrEnded, err)
	}
	return nil
}

// Kill signals everything that the command started and that still lives, also
// what made itself a session of its own. With SIGKILL it returns once nothing
// is left that the signal has not been sent to; Wait and WaitTree see them
// end. Signal 0 only asks whether the command is known.
func (h *Holder) Kill(id string, sig unix.Signal) error {
	if sig < 0 || sig > 64 {
		return fmt.Errorf("signal %d: %w", sig, unix.EINVAL)
	}
	err := h.ask(context.Background(), wire.Kill{ID: id, Signal: uint8(sig)})
	switch {
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("kill command %s: %w", id, ErrNoCommand)
	case err != nil:
		return fmt.Errorf("kill command %s: %w", id, err)
	}
	return nil
}
