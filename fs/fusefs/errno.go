package fusefs

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"ephemeral-sandbox/fs/tree"
)

// errnos is the border between errors and numbers. The most frequent come first.
var errnos = [...]struct {
	err   error
	errno syscall.Errno
}{
	{tree.ErrNotExist, syscall.ENOENT},
	{tree.ErrNoXattr, syscall.ENODATA},
	{tree.ErrExist, syscall.EEXIST},
	{tree.ErrNotEmpty, syscall.ENOTEMPTY},
	{tree.ErrNotDir, syscall.ENOTDIR},
	{tree.ErrIsDir, syscall.EISDIR},
	{tree.ErrInvalid, syscall.EINVAL},
	{tree.ErrNameTooLong, syscall.ENAMETOOLONG},
	{tree.ErrRange, syscall.ERANGE},
	{tree.ErrNoSpace, syscall.ENOSPC},
	{tree.ErrQuota, syscall.EDQUOT},
	{tree.ErrTooBig, syscall.EFBIG},
	{tree.ErrPerm, syscall.EPERM},
	{tree.ErrNotSup, syscall.EOPNOTSUPP},
	{tree.ErrStale, syscall.ESTALE},
	{tree.ErrNoData, syscall.ENXIO},
	{tree.ErrTooManyLink, syscall.EMLINK},
	// What the disk below may say and the session can act on.
	{syscall.ENOSPC, syscall.ENOSPC},
	{syscall.EDQUOT, syscall.EDQUOT},
	{syscall.EFBIG, syscall.EFBIG},
	{syscall.ENOMEM, syscall.ENOMEM},
	{syscall.EMFILE, syscall.ENFILE},
	{syscall.ENFILE, syscall.ENFILE},
}

// errno gives the number to answer with. ok is false for an error that no
// session should meet: a corrupt layer, a failing disk, a mistake of ours.
func errno(err error) (n syscall.Errno, ok bool) {
	for _, e := range errnos {
		if errors.Is(err, e.err) {
			return e.errno, true
		}
	}
	return syscall.EIO, false
}

// fail turns an error of a name operation into a status.
func (v *view) fail(h *fuse.InHeader, err error) fuse.Status {
	n, ok := errno(err)
	if !ok {
		v.errors.log(v.logger, h, err)
	}
	return fuse.Status(n)
}

// failInode is fail for a request about an inode, by number: the kernel cannot
// have asked for a name, so an inode that does not exist is a stale one. The
// kernel answers ESTALE to a path walk by looking the names up afresh.
func (v *view) failInode(h *fuse.InHeader, err error) fuse.Status {
	if errors.Is(err, tree.ErrNotExist) {
		return fuse.Status(syscall.ESTALE)
	}
	return v.fail(h, err)
}

// panicked answers a request whose handler panicked.
func (v *view) panicked(p any) fuse.Status {
	v.logger.Error("handler panicked; the request got EIO", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	return fuse.EIO
}

// errorLog writes one line for each kind of failure of each inode, so that a
// session that reads a damaged file in a loop cannot flood the log.
type errorLog struct {
	mu   sync.Mutex
	seen map[errorKey]bool // guarded by mu
}

type errorKey struct {
	op  uint32
	ino uint64
}

const maxErrorKeys = 1024

func (l *errorLog) log(logger *slog.Logger, h *fuse.InHeader, err error) {
	key := errorKey{h.Opcode, h.NodeId}
	l.mu.Lock()
	known := l.seen[key] || len(l.seen) > maxErrorKeys
	if l.seen == nil {
		l.seen = map[errorKey]bool{}
	}
	if !known {
		l.seen[key] = true
	}
	last := !known && len(l.seen) > maxErrorKeys
	l.mu.Unlock()
	if known {
		return
	}
	logger.Error("request failed", "op", opName(h.Opcode), "ino", h.NodeId, "err", err)
	if last {
		logger.Error("too many different failures; no more are logged for this view")
	}
}
