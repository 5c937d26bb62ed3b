package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder"
)

// killGrace is how long a command that ran out of time may take to end after
// SIGTERM before SIGKILL takes its whole tree.
const killGrace = 2 * time.Second

// ExecRequest is a command to run in a session.
type ExecRequest struct {
	Operation Operation
	CommandID string
	Shell     string   // command line for the shell; empty when Argv is given
	Argv      []string // program and arguments
	Env       []string // K=V, over the session's own
	Dir       string   // absolute, or relative to the workspace
	Stdin     io.Reader
	Timeout   time.Duration // 0: none
}

// Exit values of a command's status.
const (
	StatusRunning   = "running"
	StatusExited    = "exited"
	StatusSignaled  = "signaled"
	StatusTimedOut  = "timed_out"
	StatusCancelled = "cancelled"
)

// CommandState is a command at one instant. It is kept beside the transcript.
type CommandState struct {
	ID        string        `json:"id"`
	Operation string        `json:"operation"`
	Command   string        `json:"command"`
	Status    string        `json:"status"`
	Code      int           `json:"code"` // exit code, or 128 + the signal's number
	Signal    string        `json:"signal,omitempty"`
	Started   time.Time     `json:"started"`
	Ended     time.Time     `json:"ended,omitzero"`
	User      time.Duration `json:"user"`
	System    time.Duration `json:"system"`
	MaxRSS    int64         `json:"max_rss"`
	Dropped   [2]int64      `json:"dropped"` // bytes of stdout and stderr that were not kept
}

// Command is one command of a session, running or ended.
type Command struct {
	dir  string
	done chan struct{}
	stop context.CancelCauseFunc // ends the command; nil for one that was loaded

	mu    sync.Mutex
	state CommandState // guarded by mu
}

var (
	errTimedOut  = errors.New("timed out")
	errCancelled = errors.New("cancelled")
)

// Done is closed when the command has ended and its state is final.
func (c *Command) Done() <-chan struct{} { return c.done }

// State is the command now.
func (c *Command) State() CommandState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

func (c *Command) running() bool { return c.State().Status == StatusRunning }

func (c *Command) cancel() bool {
	if c.stop == nil || !c.running() {
		return false
	}
	c.stop(errCancelled)
	return true
}

// Exec starts a command. Its output goes to files, so that it outlives the
// daemon and can be read by offset at any time.
func (s *Session) Exec(ctx context.Context, r ExecRequest) (*Command, error) {
	if err := s.ensureHolder(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	h := s.holder
	s.mu.Unlock()
	if h == nil {
		return nil, fmt.Errorf("session %s: its holder ended at once", s.Info.ID)
	}
	dir := filepath.Join(s.dir, "commands", r.CommandID)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("keep a transcript: %w", err)
	}
	cmd, files, err := s.prepare(dir, h, r)
	defer func() {
		for _, f := range files {
			_ = f.Close() // the command has its own descriptors; nothing was written here
		}
	}()
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	op := r.Operation
	op.Command = r.display()
	op.CommandID = r.CommandID
	if op, err = s.Begin(op); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	c := &Command{dir: dir, done: make(chan struct{}), state: CommandState{
		ID: r.CommandID, Operation: op.ID, Command: op.Command, Status: StatusRunning, Started: s.opts.Clock(),
	}}
	if err := c.save(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	waiting, err := s.register(c)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	_, sp := s.span(ctx, "command launch")
	_, err = h.Exec(cmd)
	sp.End(err)
	if err != nil {
		s.unregister(c)
		return nil, errors.Join(startError(r, err), os.RemoveAll(dir))
	}
	go s.follow(waiting, h, c)
	if r.Timeout > 0 {
		timer := time.AfterFunc(r.Timeout, func() { c.stop(errTimedOut) })
		go func() { // ends with the command
			<-c.done
			timer.Stop()
		}()
	}
	return c, nil
}

// register makes a command known before it is started, so that whoever ends the
// session finds it: either it is refused, or Stop waits for it. The context is
// cancelled by the command's stop.
func (s *Session) register(c *Command) (context.Context, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == Closing {
		return nil, fmt.Errorf("session %s: %w", s.Info.ID, ErrEnding)
	}
	n := 0
	for _, o := range s.order {
		if o.running() {
			n++
		}
	}
	if s.runtime.MaxCommands > 0 && n >= s.runtime.MaxCommands {
		return nil, fmt.Errorf("session %s: %d: %w", s.Info.ID, n, ErrTooManyCommands)
	}
	ctx, stop := context.WithCancelCause(context.Background())
	c.stop = stop
	s.commands[c.state.ID] = c
	s.order = append(s.order, c)
	s.waiters.Add(1)
	return ctx, nil
}

// unregister takes a command back that could not be started.
func (s *Session) unregister(c *Command) {
	c.stop(nil)
	s.mu.Lock()
	delete(s.commands, c.state.ID)
	s.order = slices.DeleteFunc(s.order, func(o *Command) bool { return o == c })
	s.mu.Unlock()
	s.waiters.Done()
	close(c.done)
}

// CommandError refuses a command that cannot be started as it was asked for.
type CommandError struct {
	Command string
	Err     error
}

func (e *CommandError) Error() string {
	return fmt.Sprintf("command %q cannot be started: %v: name a program and a directory that are there", e.Command, e.Err)
}

func (e *CommandError) Unwrap() error { return e.Err }

// startError tells a wrong request from a fault of the holder.
func startError(r ExecRequest, err error) error {
	step, ok := errors.AsType[*holder.StepError](err)
	if !ok {
		return fmt.Errorf("run %q: %w", r.display(), err)
	}
	return &CommandError{Command: r.display(), Err: step}
}

func (r ExecRequest) display() string {
	if r.Shell != "" {
		return r.Shell
	}
	return strings.Join(r.Argv, " ")
}

// prepare opens the command's files and puts its environment together.
func (s *Session) prepare(dir string, h *holder.Holder, r ExecRequest) (holder.Command, []*os.File, error) {
	var files []*os.File
	create := func(name string) (*os.File, error) {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_APPEND|os.O_EXCL, 0o600)
		if err == nil {
			files = append(files, f)
		}
		return f, err
	}
	cmd := holder.Command{ID: r.CommandID, Argv: r.Argv, Dir: r.Dir, OutputBytes: s.runtime.OutputBytes}
	if r.Shell != "" {
		cmd.Argv = []string{"/bin/sh", "-c", r.Shell}
	}
	if !path.IsAbs(cmd.Dir) {
		cmd.Dir = path.Join(s.Info.Workspace, cmd.Dir)
	}
	var err error
	if cmd.Stdout, err = create("stdout"); err != nil {
		return cmd, files, err
	}
	if cmd.Stderr, err = create("stderr"); err != nil {
		return cmd, files, err
	}
	if r.Stdin != nil {
		if cmd.Stdin, err = create("stdin"); err != nil {
			return cmd, files, err
		}
		if _, err := io.Copy(cmd.Stdin, r.Stdin); err != nil {
			return cmd, files, fmt.Errorf("keep standard input: %w", err)
		}
		if _, err := cmd.Stdin.Seek(0, io.SeekStart); err != nil {
			return cmd, files, err
		}
		if err := os.Remove(cmd.Stdin.Name()); err != nil {
			return cmd, files, err
		}
	}
	cmd.Env = environment([]string{
		"PATH=" + s.runtime.Path,
		"HOME=" + h.Home(),
		"USER=agent",
		"LANG=C.UTF-8",
		"TERM=dumb",
		"PAGER=cat",
		"GIT_PAGER=cat",
		"SANDBOX_ID=" + s.Info.Sandbox,
		"SANDBOX_SESSION_ID=" + s.Info.ID,
		"SANDBOX_WORKSPACE=" + s.Info.Workspace,
		"SANDBOX_OPERATION_ID=" + r.Operation.ID,
	}, r.Env)
	return cmd, files, nil
}

// environment lays over upon base; a later value of a name replaces an earlier.
func environment(base, over []string) []string {
	env := slices.Clone(base)
	for _, kv := range over {
		name, _, _ := strings.Cut(kv, "=")
		i := slices.IndexFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
		if i < 0 {
			env = append(env, kv)
			continue
		}
		env[i] = kv
	}
	return env
}

// follow waits until a registered command has ended.
func (s *Session) follow(ctx context.Context, h *holder.Holder, c *Command) {
	defer s.waiters.Done()
	defer c.stop(nil)
	exit, killed, err := s.await(ctx, h, c)
	var cause error
	if killed {
		cause = context.Cause(ctx)
	}
	saved := c.finish(exit, err, cause, s.opts.Clock())
	_ = s.record.Flush() // a record that cannot be written shows as a gap
	if err == nil && saved == nil {
		_ = h.Ack(c.state.ID) // a holder that is gone needs no leave to forget
	}
}

// loseCommands ends the commands that an earlier daemon left running and whose
// holder could not be taken back.
func (s *Session) loseCommands() {
	for _, c := range s.Commands() {
		if c.stop == nil && c.running() { // the others are followed
			_ = c.finish(holder.Exit{Lost: true}, nil, nil, s.opts.Clock()) // found lost again by the next daemon
		}
	}
}

// await waits for the end of c; when it is told to stop, it kills the command's
// tree: first with leave to clean up, then without.
func (s *Session) await(ctx context.Context, h *holder.Holder, c *Command) (exit holder.Exit, killed bool, err error) {
	id := c.State().ID
	if exit, err = h.Wait(ctx, id); err == nil || ctx.Err() == nil {
		return exit, false, err
	}
	grace, cancel := context.WithTimeout(context.Background(), killGrace)
	defer cancel()
	_ = h.Kill(id, unix.SIGTERM)
	exit, err = h.Wait(grace, id)
	// What the command itself left behind must go as well. Where there is
	// nothing to kill any more, Wait knows why.
	_ = h.Kill(id, unix.SIGKILL)
	if err != nil {
		exit, err = h.Wait(context.Background(), id)
	}
	return exit, true, err
}

// finish makes the end of a command known. A state that cannot be saved is right
// in memory; the next daemon finds the command running and asks the holder.
func (c *Command) finish(exit holder.Exit, err, cause error, now time.Time) error {
	c.mu.Lock()
	st := &c.state
	st.Ended, st.Code, st.Status = now, exit.Code, StatusExited
	st.User, st.System, st.MaxRSS = exit.UserTime, exit.SysTime, exit.MaxRSS
	st.Dropped = [2]int64{exit.StdoutDropped, exit.StderrDropped}
	switch {
	case err != nil || exit.Lost: // the holder died, and the command with it
		st.Status, st.Signal, st.Code = StatusCancelled, "SIGKILL", 128+int(unix.SIGKILL)
	case exit.Signal != "":
		st.Status, st.Signal = StatusSignaled, exit.Signal
		st.Code = 128 + int(unix.SignalNum(exit.Signal))
	}
	switch {
	case errors.Is(cause, errTimedOut):
		st.Status = StatusTimedOut
	case errors.Is(cause, errCancelled):
		st.Status = StatusCancelled
	}
	c.mu.Unlock()
	err = c.save()
	close(c.done)
	return err
}

func (c *Command) save() error {
	raw, err := json.Marshal(c.State())
	if err != nil {
		return err
	}
	name := filepath.Join(c.dir, "command.json")
	if err := os.WriteFile(name+".new", raw, 0o600); err != nil {
		return fmt.Errorf("keep the state of a command: %w", err)
	}
	return os.Rename(name+".new", name)
}

// Command finds a command by id.
func (s *Session) Command(id string) (*Command, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, ok := s.commands[id]
	return c, ok
}

// Commands lists the session's commands, oldest first.
func (s *Session) Commands() []*Command {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.order)
}

func (s *Session) loadCommands() error {
	list, err := LoadCommands(filepath.Join(s.dir, "commands"))
	if err != nil {
		return err
	}
	for _, c := range list {
		s.commands[c.state.ID] = c
		s.ops.bind(c.state.ID, c.state.Operation)
	}
	s.order = list
	return nil
}

// LoadCommands reads the commands whose transcripts are kept in dir, oldest
// first.
func LoadCommands(dir string) ([]*Command, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read transcripts: %w", err)
	}
	var list []*Command
	for _, e := range entries {
		c, err := LoadCommand(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // cut off while it was being started
		}
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b *Command) int { return a.state.Started.Compare(b.state.Started) })
	return list, nil
}

// LoadCommand reads the command whose transcript is kept in dir.
func LoadCommand(dir string) (*Command, error) {
	c := &Command{dir: dir, done: make(chan struct{})}
	raw, err := os.ReadFile(filepath.Join(dir, "command.json"))
	if err != nil {
		return nil, fmt.Errorf("read transcript: %w", err)
	}
	if err := json.Unmarshal(raw, &c.state); err != nil {
		return nil, fmt.Errorf("read transcript %s: %w", dir, err)
	}
	if !c.running() {
		close(c.done)
	}
	return c, nil
}

// ReadOutput reads at most limit bytes of a stream ("stdout" or "stderr") of
// the command whose transcript is in dir, from off on, and tells how long the
// stream is by now. A negative off counts from the end.
func ReadOutput(dir, stream string, off int64, limit int) (data []byte, start, total int64, err error) {
	f, err := os.Open(filepath.Join(dir, stream))
	if err != nil {
		return nil, 0, 0, fmt.Errorf("read transcript: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	st, err := f.Stat()
	if err != nil {
		return nil, 0, 0, fmt.Errorf("read transcript: %w", err)
	}
	total = st.Size()
	if off < 0 {
		off = max(0, total+off)
	}
	if off >= total {
		return nil, off, total, nil
	}
	data = make([]byte, min(int64(limit), total-off))
	if _, err := io.ReadFull(io.NewSectionReader(f, off, total-off), data); err != nil {
		return nil, off, total, fmt.Errorf("read transcript: %w", err)
	}
	return data, off, total, nil
}
