package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listen makes the unix socket at path with mode 0600, in place of one that a
// dead daemon left. The caller holds the state directory's lock. The name
// appears only when the socket takes connections, so a client that waits for
// the name need not try again; it goes when the listener is closed.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("gateway socket: %w", err)
	}
	defer func() { _ = dir.Close() }() // a directory: nothing was written
	temp := filepath.Base(path) + "." + strconv.Itoa(os.Getpid())
	if err := os.Remove(filepath.Join(dir.Name(), temp)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("gateway socket: %w", err)
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var chmod error
		// A socket's own mode is the mode its name gets at bind.
		err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmod)
	}}
	l, err := lc.Listen(ctx, "unix", ShortPath(dir, temp))
	if err != nil {
		return nil, fmt.Errorf("gateway socket %s: %w", path, err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("gateway socket: unexpected listener %T", l), l.Close())
	}
	u.SetUnlinkOnClose(false) // the name it knows is the one before the rename
	if err := os.Rename(filepath.Join(dir.Name(), temp), path); err != nil {
		return nil, errors.Join(fmt.Errorf("gateway socket: %w", err), l.Close())
	}
	return &listener{UnixListener: u, path: path}, nil
}

// ShortPath names an entry of dir in few enough bytes for a socket address,
// however long the directory's own path is. It holds while dir is open.
func ShortPath(dir *os.File, name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
}

type listener struct {
	*net.UnixListener
	path string
}

func (l *listener) Close() error {
	err := l.UnixListener.Close()
	if errors.Is(err, net.ErrClosed) {
		return err
	}
	if rm := os.Remove(l.path); rm != nil && !errors.Is(rm, fs.ErrNotExist) {
		return errors.Join(err, rm)
	}
	return err
}
