package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Watch tells when a name appears in a directory.
type Watch struct{ f *os.File }

// WatchDir watches dir from now on.
func WatchDir(dir string) (*Watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", dir, err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_MOVED_TO|unix.IN_CREATE); err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: %w", dir, err), f.Close())
	}
	return &Watch{f}, nil
}

// Await returns nil when name has appeared, ctx's error when that ends first,
// and another when the watch is closed.
func (w *Watch) Await(ctx context.Context, name string) error {
	stop := context.AfterFunc(ctx, func() { _ = w.f.Close() }) // ends the Read
	defer stop()
	buf := make([]byte, 64<<10)
	for {
		n, err := w.f.Read(buf)
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
			if string(bytes.TrimRight(b[unix.SizeofInotifyEvent:end], "\x00")) == name {
				return nil
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
