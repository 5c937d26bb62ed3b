package fdstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

// Limits of restarting: a child that dies maxDeaths times within deathWindow is
// not started again.
const (
	maxDeaths   = 5
	deathWindow = 10 * time.Second
)

// exitPanic is the exit code of a Go program that ends by a panic or a fatal
// error of the runtime.
const exitPanic = 2

// Parent runs a child and starts another when it dies of a signal or a panic.
type Parent struct {
	// Command returns the child's command, not yet started. Its ExtraFiles are
	// kept; the child's end of the store follows them, its number in EnvFD.
	Command func() *exec.Cmd
	// Started is told the process id of each child.
	Started func(pid int) error
	// Died is told why each child that is replaced had died. It may be nil.
	Died func(pid int, state *os.ProcessState)
	// Backoff returns how long to wait before the start after the nth death
	// in a row; nil doubles from 10 ms.
	Backoff func(n int) time.Duration
}

// Run runs children until one ends on its own, and returns its exit code. When
// ctx ends, the child is sent SIGTERM and its end is waited for; a second
// signal on hurry sends SIGKILL.
func (p Parent) Run(ctx context.Context, hurry <-chan os.Signal) (code int, err error) {
	store := NewStore()
	defer func() { err = errors.Join(err, store.Close()) }()
	var deaths []time.Time
	for {
		cmd, err := p.runOnce(ctx, hurry, store)
		if err != nil {
			return 1, err
		}
		state := cmd.ProcessState
		if ctx.Err() != nil || !died(state) {
			return exitCode(state), nil
		}
		if p.Died != nil {
			p.Died(cmd.Process.Pid, state)
		}
		now := time.Now()
		deaths = append(deaths, now)
		for now.Sub(deaths[0]) > deathWindow {
			deaths = deaths[1:]
		}
		if len(deaths) >= maxDeaths {
			return 1, fmt.Errorf("gave up: the daemon died %d times within %s, at last with %s", len(deaths), deathWindow, state)
		}
		wait := time.NewTimer(p.backoff(len(deaths)))
		select {
		case <-ctx.Done():
			wait.Stop()
			return 1, nil
		case <-wait.C:
		}
	}
}

func (p Parent) backoff(n int) time.Duration {
	if p.Backoff != nil {
		return p.Backoff(n)
	}
	return 10 * time.Millisecond << (n - 1)
}

// runOnce runs one child to its end and reads all it had sent.
func (p Parent) runOnce(ctx context.Context, hurry <-chan os.Signal, store *Store) (*exec.Cmd, error) {
	parent, child, err := Pair()
	if err != nil {
		return nil, err
	}
	cmd := p.Command()
	cmd.Env = append(cmd.Environ(), EnvFD+"="+strconv.Itoa(3+len(cmd.ExtraFiles)))
	cmd.ExtraFiles = append(cmd.ExtraFiles, child)
	err = cmd.Start()
	if err = errors.Join(err, child.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("start the daemon: %w", err), parent.Close())
	}
	if p.Started != nil {
		err = p.Started(cmd.Process.Pid)
	}
	served := make(chan error, 1)
	go func() { served <- store.Serve(parent) }() // ends with the child's end of the pair
	ended := make(chan struct{})
	told := make(chan struct{})
	go func() { // ends when ended is closed
		defer close(told)
		forward(ctx, hurry, cmd.Process, ended)
	}()
	if err != nil {
		err = errors.Join(err, cmd.Process.Kill())
	}
	waitErr := cmd.Wait()
	close(ended)
	<-told
	err = errors.Join(err, drained(parent, served))
	if cmd.ProcessState == nil {
		err = errors.Join(err, waitErr)
	}
	return cmd, err
}

// drainTime bounds the wait for the end of a dead child's messages, for the
// case that a descendant inherited its socket.
const drainTime = 5 * time.Second

func drained(parent *net.UnixConn, served <-chan error) error {
	limit := time.NewTimer(drainTime)
	defer limit.Stop()
	select {
	case err := <-served:
		return err
	case <-limit.C:
		_ = parent.Close() // unblocks Serve, which reports the closed connection
		<-served
		return nil
	}
}

// forward passes the end of ctx on as SIGTERM and each later signal as SIGKILL.
func forward(ctx context.Context, hurry <-chan os.Signal, child *os.Process, ended <-chan struct{}) {
	select {
	case <-ended:
		return
	case <-ctx.Done():
		_ = child.Signal(syscall.SIGTERM) // it may have ended by itself
	}
	for {
		select {
		case <-ended:
			return
		case <-hurry:
			_ = child.Kill()
		}
	}
}

func died(state *os.ProcessState) bool {
	ws, ok := state.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() || state.ExitCode() == exitPanic
}

func exitCode(state *os.ProcessState) int {
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return state.ExitCode()
}

// FromEnv returns the child's end of the store that a Parent gave this process,
// or nil when it has no such parent. It may be called once.
func FromEnv() (*os.File, error) {
	v := os.Getenv(EnvFD)
	if v == "" {
		return nil, nil
	}
	fd, err := strconv.Atoi(v)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("%s=%q: must be the number of an inherited descriptor", EnvFD, v)
	}
	if err := os.Unsetenv(EnvFD); err != nil {
		return nil, err
	}
	syscall.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "fdstore"), nil
}
