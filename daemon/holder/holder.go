// Package holder owns sessions' namespaces from the daemon's side. A holder is
// a small process, pid 1 of its session's namespaces, that mounts the
// session's view, builds the root tree around it and runs commands in it; the
// daemon speaks to it over one packet socket.
//
// Words: the holder is that process; a stub is the parent that the holder
// gives each command, so that everything the command starts stays beneath it;
// inner pids are those of the session's own pid namespace, which is also what
// FUSE requests carry.
package holder

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Config says how a session's holder is to be made.
type Config struct {
	Session   string // names the session in the mount's source; 1 to 64 of [A-Za-z0-9._:-]
	Workspace string // absolute path at which the view appears inside
	Network   string // "none": loopback only; "shared": the host's network
	HostPaths []string
	// RuntimeDir is a private directory on a file system that allows device
	// nodes. It is used only where the kernel cannot make an anonymous one.
	RuntimeDir   string
	Home         string  // HOME inside; "/home/agent" when empty
	ScratchBytes int64   // bound of /tmp, HOME, /run, /var and /dev/shm together; 2 GiB when 0
	MaxProcesses int     // processes and threads of all commands together; 4096 when 0
	IDBase       uint32  // first host id of the range a root daemon maps; 0x70000000 when 0
	Binary       *Binary // shared by all holders of a daemon; opened for this one when nil
	// NoView mounts an empty tmpfs at Workspace in place of the view. It is
	// meant for diagnosis and tests: FuseFD is then -1.
	NoView bool
}

// Binary is the executable that holders run from.
type Binary struct{}

// OpenBinary opens the embedded holder, or this program itself where none is
// embedded.
func OpenBinary() (*Binary, error) { return &Binary{}, nil }

// Close releases the binary. Holders that run from it go on.
func (b *Binary) Close() error { return nil }

// MaybeRun turns this process into a holder or a stub when it was started as
// one, and then does not return. A program that starts holders calls it first
// thing in main.
func MaybeRun() {}

// Holder is the daemon's end of one session's holder.
type Holder struct{}

// State is what a restarted daemon needs, besides the two descriptors, to take
// a holder back. It is plain data.
type State struct {
	Pid       int    `json:"pid"`
	Started   uint64 `json:"started"` // start time in clock ticks since boot
	Mapping   string `json:"mapping"`
	Home      string `json:"home"`
	Workspace string `json:"workspace"`
}

// Command is one program to run inside.
type Command struct {
	ID                    string // 1 to 64 of [A-Za-z0-9._:-]; unique in the session
	Argv, Env             []string
	Dir                   string   // absolute path inside; the workspace when empty
	Stdin, Stdout, Stderr *os.File // nil is /dev/null
	Rlimits               []Rlimit
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
	Lost       bool  // its stub was killed from inside; the rest is not known
}

// Problem is one reason why holders cannot run here.
type Problem struct {
	What   string // the switch or file, and what is wrong with it
	Remedy string // what to do about it
}

// Start makes the namespaces and mounts the view.
func Start(ctx context.Context, c Config) (*Holder, error) { return nil, errors.ErrUnsupported }

// Adopt takes back a holder that another daemon started.
func Adopt(ctx context.Context, control, fuse int, s State) (*Holder, error) {
	return nil, errors.ErrUnsupported
}

// Probe lists what keeps holders from running here; it is empty when all is well.
func Probe() []Problem { return nil }

// FuseFD is the mounted /dev/fuse. It stays the Holder's: duplicate it to keep it.
func (h *Holder) FuseFD() int { return -1 }

// ControlFD is the daemon's end of the control socket, for the fd store to duplicate.
func (h *Holder) ControlFD() int { return -1 }

// Pid is the holder's pid on the host.
func (h *Holder) Pid() int { return 0 }

// State is what Adopt needs.
func (h *Holder) State() State { return State{} }

// Home is the value for HOME inside.
func (h *Holder) Home() string { return "" }

// Ready waits until the root tree is complete and commands can run.
func (h *Holder) Ready(ctx context.Context) error { return errors.ErrUnsupported }

// Exec starts a command and returns its inner pid.
func (h *Holder) Exec(c Command) (pid int, err error) { return 0, errors.ErrUnsupported }

// Wait waits for a command to end.
func (h *Holder) Wait(ctx context.Context, id string) (Exit, error) {
	return Exit{}, errors.ErrUnsupported
}

// WaitTree waits until nothing that the command started lives any more.
func (h *Holder) WaitTree(ctx context.Context, id string) error { return errors.ErrUnsupported }

// Ack lets the holder forget a command whose exit has been recorded.
func (h *Holder) Ack(id string) error { return errors.ErrUnsupported }

// Kill signals everything the command started.
func (h *Holder) Kill(id string, sig unix.Signal) error { return errors.ErrUnsupported }

// CommandOf names the command that the inner pid belongs to.
func (h *Holder) CommandOf(pid uint32) (id string, ok bool) { return "", false }

// Syncfs flushes the view's dirty pages from inside.
func (h *Holder) Syncfs(ctx context.Context) error { return errors.ErrUnsupported }

// IDs names the id map ("range", "subuid" or "single") and gives the function
// that turns a stored id into one that can be shown inside.
func (h *Holder) IDs() (mapping string, show func(uint32) uint32) {
	return "", func(id uint32) uint32 { return id }
}

// Done is closed when the holder and everything in it has been reaped.
func (h *Holder) Done() <-chan struct{} { return nil }

// Close kills everything in the session and waits until it is reaped.
func (h *Holder) Close() error { return nil }
