// Package run is what happens inside a session's namespaces: the holder, which
// is pid 1 there, and the stub above each command. It is linked into the small
// static binary and, for builds without that, into the daemon.
//
// The holder keeps its capabilities and forks only from one locked thread,
// which has given up its bounding set, taken no_new_privs and a seccomp
// filter: whatever it forks can never have more than that. It touches the
// session's view nowhere but in syncfs, so an unanswered request blocks a stub
// or that one call, never the holder.
//
// Lock order: server.mu, then the connection's own.
package run

import (
	"os"
	"os/signal"
	"runtime"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/wire"
)

// Name is the argv[0] by which Main knows that this process is one of ours.
const Name = "sandbox-holder"

// The modes, argv[1].
const (
	ModeInit  = "init"  // pid 1 of a session, ids mapped
	ModeRemap = "remap" // the same, but the ids are still to be mapped
	ModeStub  = "stub"  // above one command; argv[2] is its id
)

// self is this program, by a path that no root change can take away.
const self = "/proc/self/exe"

// The descriptors that a holder and a stub are started with, behind null ones
// at 0 to 2.
const (
	fdControl = 3
	fdSpec    = 4 // stubs only, like the next three
	fdStdin   = 5
	fdStdout  = 6
	fdStderr  = 7
)

// Main runs this process as a holder or stub, and never returns, when its argv
// says that it is one.
func Main() {
	if len(os.Args) < 2 || os.Args[0] != Name {
		return
	}
	runtime.LockOSThread()
	drainSignals()
	switch mode := os.Args[1]; {
	case mode == ModeRemap:
		remap()
	case mode == ModeInit:
		initMain()
	case mode == ModeStub && len(os.Args) == 3:
		stubMain(os.Args[2])
	}
	os.Exit(2)
}

// drainSignals takes every signal that can be caught and drops it. Left to
// itself, the Go runtime would end pid 1 on a TERM that any process of the
// session may send. Ignoring them is no way out: commands would inherit that.
func drainSignals() {
	caught := make(chan os.Signal, 16)
	signal.Notify(caught)
	go func() {
		for range caught {
		}
	}()
}

// remap waits until the daemon has mapped ids, then executes the holder anew:
// root gains its capabilities only by an exec that happens under a map.
func remap() {
	conn, err := wire.NewConn(fdControl, wire.MaxPacket)
	if err != nil {
		return
	}
	packet, fds, err := conn.Receive()
	wire.CloseAll(fds)
	if _, ok := packet.Body.(wire.Mapped); err != nil || !ok {
		return
	}
	err = unix.Exec(self, []string{Name, ModeInit}, nil)
	conn.Send(wire.Packet{Body: failed(&stepError{"execute the holder again under its id map", self, err})})
}

func initMain() {
	unix.CloseOnExec(fdControl)
	conn, err := wire.NewConn(fdControl, wire.MaxPacket)
	if err != nil {
		return
	}
	unix.Umask(0)
	packet, fds, err := conn.Receive()
	setup, ok := packet.Body.(wire.Setup)
	if err != nil || !ok {
		return
	}
	var stages clock
	stages.start()
	if err := build(conn, setup, fds, &stages); err != nil {
		conn.Send(wire.Packet{Body: failed(err)})
		return
	}
	s, err := newServer(conn, setup)
	if err != nil {
		conn.Send(wire.Packet{Body: failed(err)})
		return
	}
	conn.Send(wire.Packet{Body: wire.Ready{Stages: stages.list}})
	s.serve()
}

// stepError is a failed step of the start: what was tried, on what, and why it
// failed.
type stepError struct {
	step string
	on   string
	err  error
}

func (e *stepError) Error() string { return e.step + " " + e.on + ": " + e.err.Error() }
func (e *stepError) Unwrap() error { return e.err }

// at gives err its step; it is nil when err is.
func at(step, on string, err error) error {
	if err == nil {
		return nil
	}
	return &stepError{step, on, err}
}

func failed(err error) wire.Failed {
	f := wire.Failed{Step: "start", Errno: errnoOf(err)}
	if step, ok := err.(*stepError); ok {
		f.Step, f.Text = step.step, step.on
	}
	return f
}
