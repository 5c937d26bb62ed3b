package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/fdstore"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/fs/fusefs"
)

// mounter serves sessions' views through fs/fusefs.
type mounter struct{ log *slog.Logger }

func (m mounter) Mount(s session.MountSpec) (session.Mount, error) {
	level, err := fusefs.ParseTraceLevel(s.Level)
	if err != nil {
		return nil, err
	}
	return fusefs.Serve(fusefs.Options{
		FS: s.FS, FD: s.FD, Op: s.Op, Record: s.Record, Logger: m.log, Level: level, Resume: s.Resume,
		MapID: func(id uint32, _ bool) uint32 { return s.Show(id) },
	})
}

// stash keeps sessions' descriptors in the daemon's parent.
type stash struct{ client *fdstore.Client }

func (s stash) Put(key string, meta []byte, fds ...int) (err error) {
	var files []*os.File
	defer func() {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
	}()
	for _, fd := range fds {
		// A duplicate, so that closing the file leaves the caller's open.
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return fmt.Errorf("duplicate descriptor: %w", err)
		}
		files = append(files, os.NewFile(uintptr(dup), "kept"))
	}
	return s.client.Put(key, meta, files...)
}

func (s stash) Drop(key string) error { return s.client.Drop(key) }

// dupFD duplicates a file's descriptor without taking it from the file.
func dupFD(f *os.File) (int, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	dup := -1
	var dupErr error
	err = raw.Control(func(fd uintptr) { dup, dupErr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 3) })
	return dup, errors.Join(err, dupErr)
}

func closeFD(fd int) error { return unix.Close(fd) }

// insidePath is the PATH of sessions: the daemon's own as far as sessions can
// see it, and the places where programs usually are.
func insidePath(own string) string {
	var list []string
	usual := []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	for _, p := range append(filepath.SplitList(own), usual...) {
		if filepath.IsAbs(p) && !slices.Contains(list, filepath.Clean(p)) {
			list = append(list, filepath.Clean(p))
		}
	}
	return strings.Join(list, ":")
}
