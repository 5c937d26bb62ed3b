// Package fusefs is the kernel's door to a session's tree: it serves an
// overlay.FS on a mounted /dev/fuse, and is the only importer of go-fuse.
//
// It is stateless by construction. A node id is a persistent inode number, a
// file handle says only who opened it, and directories are never opened, so a
// server can be killed and another can go on with the same descriptor: Serve
// with Options.Resume takes over the connection, its open files included.
//
// Nobody but the session changes its tree, so the kernel keeps entries, absent
// names, attributes, links, listings and pages without limit. Whoever changes
// the tree from elsewhere must say so through the Invalidate methods. These
// only queue; one goroutine talks to the kernel, because a notification waits
// for locks that the kernel holds across requests. For the same reason Drain
// must not be called between overlay.FS.Freeze and Thaw: a request that waits
// for Thaw holds its directory's lock.
//
// An unlinked inode lives as long as the kernel knows it: the server acquires
// it when its last name goes and releases it on FORGET, which is all that
// FORGET is for.
//
// Locks: queue.mu, pins.mu and errorLog.mu are leaves; none is held across a
// call to the overlay or to the kernel.
package fusefs

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// TraceLevel chooses how much of what a session does reaches the server, and so
// the access record.
type TraceLevel uint8

// The trace levels.
const (
	// TraceOpen shows every open, every write and every change of names, and
	// the reads that the kernel's cache does not answer.
	TraceOpen TraceLevel = 0
	// TraceIO shows every read and write, at the price of a round trip each.
	TraceIO TraceLevel = 1
	// TraceSet shows no opens. The set of what was read stays complete, because
	// the first read of anything is seen; later ones are not.
	TraceSet TraceLevel = 2
)

var levelNames = [...]string{"open", "io", "set"}

func (l TraceLevel) String() string {
	if int(l) < len(levelNames) {
		return levelNames[l]
	}
	return fmt.Sprintf("level(%d)", uint8(l))
}

// ParseTraceLevel is the inverse of TraceLevel.String.
func ParseTraceLevel(s string) (TraceLevel, error) {
	for i, name := range levelNames {
		if s == name {
			return TraceLevel(i), nil
		}
	}
	return 0, fmt.Errorf("trace level %q: want io, open or set", s)
}

// Bounds of Options.MaxWrite, in bytes.
const (
	DefaultMaxWrite = 256 << 10
	minMaxWrite     = 4 << 10
	maxMaxWrite     = 1 << 20
)

// Options tell Serve what to serve to whom. FS and FD are required.
type Options struct {
	FS *overlay.FS

	// FD is an opened and mounted /dev/fuse. Serve works on a duplicate; the
	// caller keeps its own, and with it the connection, when the server dies.
	FD int

	// Op gives the operation of a process, by its pid as the mount's pid
	// namespace numbers it; 0 when it is not known. It is called on every
	// request and must not touch the mount. Nil: not known.
	Op func(pid uint32) tree.Op

	// Record takes the accesses; nil for none.
	Record *access.Recorder

	// MapID gives the id to show for a stored user id, or group id when gid is
	// set. Nil shows ids as they are stored.
	MapID func(id uint32, gid bool) uint32

	Logger *slog.Logger // nil is slog.Default
	Level  TraceLevel

	// MaxWrite bounds one read or write request. A server keeps a few buffers
	// of that size. 0 is DefaultMaxWrite; at most 1 MiB.
	MaxWrite int

	// Resume is the InitState of an earlier server on the same connection. Its
	// Level and MaxWrite hold, whatever is said here.
	Resume []byte
}

func (o *Options) check() error {
	var problems []error
	if o.FS == nil {
		problems = append(problems, errors.New("FS is missing"))
	}
	if o.FD <= 0 {
		problems = append(problems, fmt.Errorf("FD is %d", o.FD))
	}
	if int(o.Level) >= len(levelNames) {
		problems = append(problems, fmt.Errorf("Level is %v", o.Level))
	}
	if o.MaxWrite == 0 {
		o.MaxWrite = DefaultMaxWrite
	}
	if o.MaxWrite < minMaxWrite || o.MaxWrite > maxMaxWrite {
		problems = append(problems, fmt.Errorf("MaxWrite is %d: want %d to %d", o.MaxWrite, minMaxWrite, maxMaxWrite))
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return errors.Join(problems...)
}

// Server serves one connection.
type Server struct {
	view   *view
	fuse   *fuse.Server
	queue  *queue
	state  initState
	loops  sync.WaitGroup
	served chan struct{} // closed when the connection is gone
}

// Serve answers the kernel's INIT, or takes over from the server that answered
// it, and starts serving. It does not wait for the mount to be used.
func Serve(o Options) (*Server, error) {
	return serve(o, func(v *view) fuse.RawFileSystem { return v })
}

// serve is Serve with something between go-fuse and the view.
func serve(o Options, wrap func(*view) fuse.RawFileSystem) (*Server, error) {
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("serve view: %w", err)
	}
	s := &Server{served: make(chan struct{})}
	var err error
	if o.Resume != nil {
		if s.state, err = decodeState(o.Resume); err != nil {
			return nil, fmt.Errorf("resume view: %w", err)
		}
		o.Level, o.MaxWrite = s.state.level, int(s.state.maxWrite)
	} else {
		s.state = initState{level: o.Level, maxWrite: uint32(o.MaxWrite), connection: newNonce(connectionBits)}
	}
	s.view = newView(o, s.state.connection)
	if s.fuse, err = negotiate(&s.state, wrap(s.view), mountOptions(o, s.view), o.FD); err != nil {
		return nil, fmt.Errorf("serve view: %w", err)
	}
	if o.Resume != nil {
		if err := takeOver(o.FD, &s.state); err != nil {
			return nil, fmt.Errorf("resume view: %w", err)
		}
	}
	s.queue = newQueue(s.fuse)
	s.loops.Go(func() {
		defer close(s.served)
		s.fuse.Serve()
	})
	s.loops.Go(s.queue.run)
	return s, nil
}

// mountOptions are the same for every server on a connection: what the kernel
// was promised in INIT stays promised.
func mountOptions(o Options, v *view) *fuse.MountOptions {
	extra := uint64(fuse.CAP_NO_OPENDIR_SUPPORT | fuse.CAP_HANDLE_KILLPRIV_V2 | fuse.CAP_HAS_RESEND)
	switch o.Level {
	case TraceOpen:
		extra |= fuse.CAP_ATOMIC_O_TRUNC
	case TraceIO:
		extra |= fuse.CAP_ATOMIC_O_TRUNC | fuse.CAP_DIRECT_IO_ALLOW_MMAP
	case TraceSet:
		// An open that is not asked for cannot truncate, so SETATTR must.
	}
	return &fuse.MountOptions{
		Name:                     "sandbox",
		MaxBackground:            64,
		MaxWrite:                 o.MaxWrite,
		EnableSymlinkCaching:     true,
		ExplicitDataCacheControl: true,
		DisableSplice:            true,
		ExtraCapabilities:        extra,
		DisabledCapabilities:     fuse.CAP_PASSTHROUGH,
		Logger:                   slog.NewLogLogger(o.Logger.Handler(), slog.LevelWarn),
		PanicHandler:             v.panicked,
	}
}

// InitState is what a later server needs to take over this connection. It does
// not change as long as the connection lives; keep it where it survives.
func (s *Server) InitState() []byte { return s.state.encode() }

// Level is the trace level in force.
func (s *Server) Level() TraceLevel { return s.state.level }

// Counts gives the number of requests so far by the protocol's name of the
// operation. Operations never asked for are left out.
func (s *Server) Counts() map[string]uint64 {
	out := map[string]uint64{}
	for op := range s.view.counts {
		if n := s.view.counts[op].Load(); n > 0 {
			out[opName(uint32(op))] = n
		}
	}
	return out
}

// Done is closed when the connection is gone.
func (s *Server) Done() <-chan struct{} { return s.served }

// Wait returns when the connection is gone: the mount with all its users has
// ended, or was aborted.
func (s *Server) Wait() { <-s.served }

// Close waits for the connection to end and for everything the server started.
// It does not end the connection, because nothing that holds a descriptor of
// it can do so from here: unmount, or kill the holder, before.
func (s *Server) Close() error {
	<-s.served
	s.queue.close()
	s.loops.Wait()
	s.view.pins.releaseAll(s.view.fs)
	return nil
}

// opNames are the operations that handlers count.
var opNames = map[uint32]string{
	1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 4: "SETATTR", 5: "READLINK", 6: "SYMLINK",
	8: "MKNOD", 9: "MKDIR", 10: "UNLINK", 11: "RMDIR", 12: "RENAME", 13: "LINK",
	14: "OPEN", 15: "READ", 16: "WRITE", 17: "STATFS", 18: "RELEASE", 20: "FSYNC",
	21: "SETXATTR", 22: "GETXATTR", 23: "LISTXATTR", 24: "REMOVEXATTR", 25: "FLUSH",
	27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR", 30: "FSYNCDIR", 34: "ACCESS",
	35: "CREATE", 39: "IOCTL", 43: "FALLOCATE", 44: "READDIRPLUS", 45: "RENAME2",
	46: "LSEEK", 47: "COPY_FILE_RANGE", 51: "TMPFILE", 52: "STATX",
}

const opForget = 2

func opName(op uint32) string {
	if name, ok := opNames[op]; ok {
		return name
	}
	return fmt.Sprintf("OPCODE-%d", op)
}

// dupAbove duplicates fd, close-on-exec, away from the standard descriptors.
func dupAbove(fd int) (int, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return -1, fmt.Errorf("duplicate descriptor %d: %w", fd, err)
	}
	return n, nil
}
