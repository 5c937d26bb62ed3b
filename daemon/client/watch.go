package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// Watch tells when a file appears in a directory, or is closed by a process
// that could write it.
type Watch struct{ f *os.File }

// WatchDir watches dir from now on.
func WatchDir(dir string) (*Watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", dir, err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO|unix.IN_CREATE|unix.IN_CLOSE_WRITE); err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", dir, err), f.Close())
	}
	return &Watch{f}, nil
}

// Await returns the next of names to which that happens, ctx's error when that
// ends first, and another when the watch is closed.
func (w *Watch) Await(ctx context.Context, names ...string) (string, error) {
	stop := context.AfterFunc(ctx, func() { _ = w.f.Close() }) // ends the Read
	defer stop()
	buf := make([]byte, 64<<10)
	for {
		n, err := w.f.Read(buf)
		if err != nil {
			if ctx.Err() != nil {
				return "", ctx.Err()
			}
			return "", err
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
			if name := string(bytes.TrimRight(b[unix.SizeofInotifyEvent:end], "\x00")); slices.Contains(names, name) {
				return name, nil
			}
			b = b[end:]
		}
	}
}

// Close ends the watch.
func (w *Watch) Close() error {
	if err := w.f.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
