package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
)

// lock is a state directory's lock file. The parent and the daemon proper hold
// it together, through one open file, so it is free only when both are gone.
type lock struct{ f *os.File }

// owners is the content of a lock file: the processes that hold it.
type owners struct {
	PID   int `json:"pid"`   // the parent, which takes signals
	Child int `json:"child"` // the daemon proper
}

// takeLock takes the lock of a state directory, waiting at most wait for an
// earlier owner that is on its way out.
func takeLock(ctx context.Context, c config.Config, wait time.Duration) (*lock, error) {
	f, err := os.OpenFile(c.LockFile(), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, catalog.Errorf(catalog.PreconditionFailed, "state directory %s cannot be locked: %w", c.StateDir, err)
	}
	err = flock(f, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) && wait > 0 {
		err = awaitLock(ctx, f, wait)
	}
	if err == nil {
		return &lock{f}, nil
	}
	defer func() { _ = f.Close() }() // nothing was written
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return nil, catalog.Errorf(catalog.PreconditionFailed, "state directory %s cannot be locked: %w", c.StateDir, err)
	}
	who := "another sandboxd"
	if o, err := readOwners(f); err == nil {
		who = fmt.Sprintf("sandboxd with pid %d", o.PID)
	}
	return nil, catalog.Errorf(catalog.PreconditionFailed, "state directory %s is in use by %s: stop it with \"sandboxd stop --state-dir %s\", or choose another with --state-dir", c.StateDir, who, client.Quote(c.StateDir))
}

// awaitLock waits for the lock, giving up with EWOULDBLOCK.
func awaitLock(ctx context.Context, f *os.File, wait time.Duration) error {
	ctx, stop := context.WithTimeout(ctx, wait)
	defer stop()
	// A second open file, so that one that is left waiting holds nothing of ours.
	waiter, err := os.OpenFile(f.Name(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	got := make(chan error, 1)
	go func() { // ends when the lock's owner does; the process may end before
		err := flock(waiter, unix.LOCK_EX)
		got <- errors.Join(err, waiter.Close())
	}()
	select {
	case <-ctx.Done():
		return unix.EWOULDBLOCK
	case err := <-got:
		if err != nil {
			return err
		}
		return flock(f, unix.LOCK_EX|unix.LOCK_NB)
	}
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// name writes the owners into the lock file.
func (l *lock) name(o owners) error {
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := l.f.Truncate(0); err != nil {
		return fmt.Errorf("lock file: %w", err)
	}
	if _, err := l.f.WriteAt(append(b, '\n'), 0); err != nil {
		return fmt.Errorf("lock file: %w", err)
	}
	return nil
}

func (l *lock) Close() error { return l.f.Close() }

func readOwners(f *os.File) (owners, error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<10))
	if err != nil {
		return owners{}, err
	}
	var o owners
	if err := json.Unmarshal(b, &o); err != nil {
		return owners{}, err
	}
	if o.PID <= 1 {
		return owners{}, fmt.Errorf("lock file names process %d", o.PID)
	}
	return o, nil
}

// holders returns who holds a state directory's lock; ok is false when nobody
// does. Owners are zero when the file does not tell.
func lockHolders(c config.Config) (o owners, ok bool, err error) {
	f, err := os.Open(c.LockFile())
	if isMissing(err) {
		return owners{}, false, nil
	}
	if err != nil {
		return owners{}, false, fmt.Errorf("lock file: %w", err)
	}
	defer func() { _ = f.Close() }() // nothing was written
	if err := flock(f, unix.LOCK_SH|unix.LOCK_NB); err == nil {
		return owners{}, false, nil
	} else if !errors.Is(err, unix.EWOULDBLOCK) {
		return owners{}, false, fmt.Errorf("lock file: %w", err)
	}
	o, err = readOwners(f)
	if err != nil {
		return owners{}, true, nil // held, but being written
	}
	return o, true, nil
}
