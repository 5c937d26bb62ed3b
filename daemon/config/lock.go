package config

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Lock is the lock of a state directory. It belongs to an open file, so the
// parent and the daemon proper hold it together, and it is free only when both
// are gone. Asking who holds it never takes it, not even for a moment.
type Lock struct {
	File *os.File // inherited by the daemon proper
}

// Owners is the content of a lock file: the processes that hold the lock.
type Owners struct {
	PID   int `json:"pid"`   // the parent, which takes signals
	Child int `json:"child"` // the daemon proper
}

// InUseError says that another daemon holds the lock.
type InUseError struct {
	StateDir string
	Owners   Owners // zero when it has not named itself yet
}

func (e *InUseError) Error() string {
	if e.Owners.PID == 0 {
		return fmt.Sprintf("state directory %s is in use by another sandboxd", e.StateDir)
	}
	return fmt.Sprintf("state directory %s is in use by sandboxd with pid %d", e.StateDir, e.Owners.PID)
}

// TakeLock takes the state directory's lock, waiting at most wait for an owner
// that is on its way out; the error is an *InUseError when there is one still.
func (c Config) TakeLock(ctx context.Context, wait time.Duration) (*Lock, error) {
	f, err := os.OpenFile(c.LockFile(), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := LockFile(ctx, f, wait); err != nil {
		if errors.Is(err, unix.EAGAIN) {
			o, _ := readOwners(f) // zero says what there is to say
			err = &InUseError{StateDir: c.StateDir, Owners: o}
		}
		return nil, errors.Join(err, f.Close())
	}
	return &Lock{File: f}, nil
}

// Name writes the owners into the lock file.
func (l *Lock) Name(o Owners) error {
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := l.File.Truncate(0); err != nil {
		return fmt.Errorf("name the owners of the lock: %w", err)
	}
	if _, err := l.File.WriteAt(append(b, '\n'), 0); err != nil {
		return fmt.Errorf("name the owners of the lock: %w", err)
	}
	return nil
}

// Close lets go of this process's hold on the lock.
func (l *Lock) Close() error { return l.File.Close() }

// Holders tells who holds the state directory's lock; held is false when nobody
// does, and owners are zero when they have not named themselves yet.
func (c Config) Holders() (o Owners, held bool, err error) {
	f, err := os.Open(c.LockFile())
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return Owners{}, false, nil
	}
	if err != nil {
		return Owners{}, false, fmt.Errorf("open lock: %w", err)
	}
	defer func() { _ = f.Close() }() // nothing was written
	asked := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := fcntl(f, unix.F_OFD_GETLK, &asked); err != nil {
		return Owners{}, false, fmt.Errorf("ask for the lock's holder: %w", err)
	}
	if asked.Type == unix.F_UNLCK {
		return Owners{}, false, nil
	}
	o, _ = readOwners(f) // zero says what there is to say
	return o, true, nil
}

// AwaitFree returns when nobody holds the state directory's lock any more, and
// an error wrapping EAGAIN when somebody still does after wait.
func (c Config) AwaitFree(ctx context.Context, wait time.Duration) error {
	f, err := os.OpenFile(c.LockFile(), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open lock: %w", err)
	}
	return errors.Join(LockFile(ctx, f, wait), f.Close())
}

// LockFile takes an exclusive lock that belongs to the open file f, waiting at
// most wait for it; the error wraps EAGAIN when somebody else holds it still.
func LockFile(ctx context.Context, f *os.File, wait time.Duration) error {
	err := fcntl(f, unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
	if !errors.Is(err, unix.EAGAIN) || wait <= 0 {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, wait)
	defer stop()
	// Another open file waits, so that one that is left waiting takes nothing
	// of ours, and only until it is its turn.
	waiter, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("wait for lock: %w", err)
	}
	turn := make(chan error, 1)
	go func() { // ends with the lock's owner; this process may end before
		err := fcntl(waiter, unix.F_OFD_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
		turn <- errors.Join(err, waiter.Close())
	}()
	select {
	case <-ctx.Done():
		return unix.EAGAIN
	case err := <-turn:
		if err != nil {
			return fmt.Errorf("wait for lock: %w", err)
		}
		return fcntl(f, unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
	}
}

func fcntl(f *os.File, cmd int, lk *unix.Flock_t) error {
	for {
		err := unix.FcntlFlock(f.Fd(), cmd, lk)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func readOwners(f *os.File) (Owners, error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<10))
	if err != nil {
		return Owners{}, err
	}
	var o Owners
	if err := json.Unmarshal(b, &o); err != nil {
		return Owners{}, err
	}
	if o.PID <= 1 || o.Child < 0 {
		return Owners{}, fmt.Errorf("lock file names process %d", o.PID)
	}
	return o, nil
}
