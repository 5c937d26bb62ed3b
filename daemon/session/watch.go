package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Watch calls look now, whenever a command's output in dir has grown, and once
// more when done is closed; it returns then, when ctx ends, or with look's
// error. Where the kernel has no watch left (a user gets 128 by default), the
// output that appears meanwhile is seen at the end.
func Watch(ctx context.Context, dir string, done <-chan struct{}, look func() error) error {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if errors.Is(err, unix.EMFILE) {
		return waitThenLook(ctx, done, look)
	}
	if err != nil {
		return fmt.Errorf("watch a transcript: %w", err)
	}
	f := os.NewFile(uintptr(fd), "inotify")
	for _, name := range []string{"stdout", "stderr"} {
		if _, err := unix.InotifyAddWatch(fd, filepath.Join(dir, name), unix.IN_MODIFY); err != nil {
			return errors.Join(fmt.Errorf("watch a transcript: %w", err), f.Close())
		}
	}
	grown := make(chan struct{}, 1)
	ended := make(chan struct{})
	go func() { // ends when f is closed
		defer close(ended)
		buf := make([]byte, 4096)
		for {
			if _, err := f.Read(buf); err != nil {
				return
			}
			select {
			case grown <- struct{}{}:
			default:
			}
		}
	}()
	defer func() {
		_ = f.Close() // nothing is written to it
		<-ended
	}()
	for {
		if err := look(); err != nil {
			return err
		}
		select {
		case <-grown:
		case <-done:
			return look()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func waitThenLook(ctx context.Context, done <-chan struct{}, look func() error) error {
	if err := look(); err != nil {
		return err
	}
	select {
	case <-done:
		return look()
	case <-ctx.Done():
		return errors.Join(look(), ctx.Err())
	}
}
