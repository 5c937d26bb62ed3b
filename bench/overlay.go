package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// overlay does the compared work on kernel overlayfs, in user and mount
// namespaces made for each command, so that nothing stays mounted.
type overlay struct {
	temp  string
	lower string
	count int
}

// newOverlay returns nil when this user cannot mount overlayfs here.
func newOverlay(temp, lower string) (*overlay, error) {
	o := &overlay{temp: filepath.Join(temp, "overlay"), lower: lower}
	if err := os.MkdirAll(o.temp, 0o755); err != nil {
		return nil, err
	}
	cmd, err := o.command(context.Background(), o.session(), "true")
	if err != nil {
		return nil, err
	}
	if cmd.Run() != nil {
		return nil, nil
	}
	return o, nil
}

// session returns the directory of the next session.
func (o *overlay) session() string {
	o.count++
	return filepath.Join(o.temp, fmt.Sprint(o.count))
}

// command mounts a fresh overlay in dir and runs a shell script in it.
func (o *overlay) command(ctx context.Context, dir, script string) (*exec.Cmd, error) {
	for _, d := range []string{"upper", "work", "merged"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	const mount = `mount --make-rprivate / && mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/merged" && cd "$2/merged" && exec sh -c "$3"`
	cmd := exec.CommandContext(ctx, "sh", "-c", mount, "sh", o.lower, dir, script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return cmd, nil
}

// firstByte is the time from nothing to the first byte of a command in a fresh
// overlay, directories included.
func (o *overlay) firstByte(ctx context.Context, script string) (time.Duration, error) {
	dir := o.session()
	began := time.Now()
	cmd, err := o.command(ctx, dir, script)
	if err != nil {
		return 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	_, readErr := io.ReadFull(out, make([]byte, 1))
	took := time.Since(began)
	_, drainErr := io.Copy(io.Discard, out)
	return took, errors.Join(readErr, drainErr, cmd.Wait(), os.RemoveAll(dir))
}

// publish changes files on a fresh overlay, untimed, and times what makes its
// upper directory a durable layer at to.
func (o *overlay) publish(ctx context.Context, script, to string) (time.Duration, error) {
	dir := o.session()
	cmd, err := o.command(ctx, dir, script)
	if err != nil {
		return 0, err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("change files on overlayfs: %w: %s", err, strings.TrimSpace(string(out)))
	}
	began := time.Now()
	if err := copyDurably(filepath.Join(dir, "upper"), to+".tmp"); err != nil {
		return 0, err
	}
	if err := os.Rename(to+".tmp", to); err != nil {
		return 0, err
	}
	if err := syncPath(filepath.Dir(to)); err != nil {
		return 0, err
	}
	took := time.Since(began)
	return took, errors.Join(os.RemoveAll(dir), os.RemoveAll(to))
}

// copyDurably copies a tree of regular files and directories, each synced.
func copyDurably(from, to string) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		a, b := filepath.Join(from, e.Name()), filepath.Join(to, e.Name())
		if e.IsDir() {
			err = copyDurably(a, b)
		} else {
			err = copyFile(a, b)
		}
		if err != nil {
			return err
		}
	}
	return syncPath(to)
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	return out.Sync()
}

func syncPath(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
