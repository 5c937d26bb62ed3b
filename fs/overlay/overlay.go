// Package overlay joins the immutable lower tree of a commit and one session's
// private changes into one POSIX tree, and knows neither protocol nor policy.
//
// A name that the session's upper has a record for is what that record says; a
// record without an inode number hides the lower name. All other names and all
// untouched inodes are the lower tree's. Nothing is opaque here: a directory
// that is removed and made again has a new inode number, so that the names of
// the old one are out of reach. An inode keeps its number for life, also when it
// is copied up, and all its names share it.
//
// Copying up is by parts. A change of attributes makes a record of the
// attributes. The first change of content makes a private sparse file, and each
// write fills the pages it touches from the lower content; the rest of the
// content stays where it is.
//
// Who may do something is not judged here: names, kinds, limits and quota are.
//
// Lock order, first to last:
//
//	FS.barrier   shared by every mutation, exclusive between Freeze and Thaw
//	  file.mu    content of one inode; only Rebase holds several
//	    FS.mu    names, inode records and the lower tree; the upper's tables
//	      handles.mu, listings.mu, quota.mu, dirty.mu   leaves
//	      file.fdMu                                      leaf
//
// A reader of an untouched file holds FS.mu shared while it finds that out, and
// nothing while it reads. Hooks.Settle runs with file.mu held and FS.mu free.
package overlay

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"

	"golang.org/x/sys/unix"
)

// FS is a session's tree. Its methods may be called from many goroutines.
type FS struct {
	dir    string
	newIno func() (tree.Ino, error)
	limit  Quota
	hooks  Hooks
	clock  func() time.Time

	barrier sync.RWMutex

	mu    sync.RWMutex
	lower Lower             // guarded by mu
	up    *upper.Upper      // tables guarded by mu
	kept  map[tree.Ino]bool // guarded by mu; orphans that live on though nothing is known to refer to them

	handles  handles
	listings listings
	quota    quota
	dirty    dirty
}

// quota is the account that writers reserve from before they hold FS.mu.
type quota struct {
	mu       sync.Mutex
	used     Usage
	reserved uint64 // bytes promised to writes under way
}

// dirty is the set of inodes whose data files were written since they were last
// made durable.
type dirty struct {
	mu  sync.Mutex
	set map[tree.Ino]bool
}

func (d *dirty) add(ino tree.Ino) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.set == nil {
		d.set = map[tree.Ino]bool{}
	}
	d.set[ino] = true
}

func (d *dirty) remove(ino tree.Ino) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.set, ino)
}

func (d *dirty) all() (inos []tree.Ino) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for ino := range d.set {
		inos = append(inos, ino)
	}
	return inos
}

// Open makes or reopens the session's tree in o.Dir. A torn end of the journal
// is cut; other damage is an *upper.CorruptError. Opening on another commit
// than the journal stands on is an error: see PeekBase.
func Open(o Options) (*FS, error) {
	if o.Lower == nil || o.NewIno == nil || o.Dir == "" {
		return nil, fmt.Errorf("open overlay: Dir, Lower and NewIno are all needed: %w", tree.ErrInvalid)
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	up, err := upper.Open(o.Dir, upper.Options{Base: o.Lower.Commit()})
	if err != nil {
		return nil, fmt.Errorf("open overlay: %w", err)
	}
	f := &FS{
		dir: o.Dir, newIno: o.NewIno, limit: o.Quota, hooks: o.Hooks, clock: o.Clock,
		lower: o.Lower, up: up, kept: map[tree.Ino]bool{},
	}
	f.handles.open = map[tree.Ino]*file{}
	f.listings.init(o.Clock())
	if up.Base() != o.Lower.Commit() {
		err = fmt.Errorf("open overlay: its journal stands on commit %d, not %d: %w", up.Base(), o.Lower.Commit(), tree.ErrInvalid)
	} else {
		err = f.adopt(o.KeepOrphans)
	}
	if err != nil {
		return nil, errors.Join(err, up.Close())
	}
	return f, nil
}

// PeekBase reads the number of the commit that the journal in dir stands on; ok
// is false when there is no journal yet.
func PeekBase(dir string) (commit uint64, ok bool, err error) { return upper.PeekBase(dir) }

// adopt deals with inodes that had no name when the journal was last written
// and counts what is there. Every data file counts as not yet durable.
func (f *FS) adopt(keepOrphans bool) error {
	t := f.begin(Caller{})
	f.up.Snapshot().Inodes(func(n *upper.Inode) bool {
		if n.Data {
			f.dirty.add(n.Ino)
		}
		switch {
		case n.Nlink != 0:
		case keepOrphans:
			f.kept[n.Ino] = true
		default:
			t.bury(t.stage(n))
		}
		return true
	})
	if err := t.commit(); err != nil {
		return fmt.Errorf("drop unlinked inodes: %w", err)
	}
	t.removeData()
	return nil
}

// Freeze waits for mutations under way and holds off new ones until Thaw; reads
// go on. Only one owner freezes at a time.
func (f *FS) Freeze() { f.barrier.Lock() }

// Thaw ends Freeze.
func (f *FS) Thaw() { f.barrier.Unlock() }

// Usage is what the session holds now.
func (f *FS) Usage() Usage {
	f.quota.mu.Lock()
	defer f.quota.mu.Unlock()
	return f.quota.used
}

// reserve promises n more private bytes to a write, or answers tree.ErrQuota.
func (f *FS) reserve(n uint64) error {
	f.quota.mu.Lock()
	defer f.quota.mu.Unlock()
	if f.limit.Bytes != 0 && n > 0 && f.quota.used.Bytes+f.quota.reserved+n > f.limit.Bytes {
		return fmt.Errorf("%d more bytes beside %d: %w", n, f.quota.used.Bytes, tree.ErrQuota)
	}
	f.quota.reserved += n
	return nil
}

// settleQuota takes the usage from the tables and gives a reservation back. The
// caller holds mu.
func (f *FS) settleQuota(reserved uint64) {
	f.quota.mu.Lock()
	defer f.quota.mu.Unlock()
	f.quota.used.Bytes, f.quota.used.Inodes = f.up.Usage()
	f.quota.reserved -= reserved
}

func (f *FS) unreserve(n uint64) {
	f.quota.mu.Lock()
	defer f.quota.mu.Unlock()
	f.quota.reserved -= n
}

// StatFS is the host file system's answer, narrowed to the quota.
func (f *FS) StatFS() (StatFS, error) {
	var host unix.Statfs_t
	if err := unix.Statfs(f.dir, &host); err != nil {
		return StatFS{}, fmt.Errorf("statfs of the session's directory: %w", err)
	}
	block := uint64(host.Bsize)
	s := StatFS{
		BlockSize: uint32(host.Bsize), NameMax: tree.MaxName,
		Bytes: host.Blocks * block, BytesFree: host.Bavail * block,
		Inodes: host.Files, InodesFree: host.Ffree,
	}
	use := f.Usage()
	narrow := func(total, free *uint64, limit, used uint64) {
		if limit != 0 {
			*total = min(*total, limit)
			*free = min(*free, limit-min(limit, used))
		}
	}
	narrow(&s.Bytes, &s.BytesFree, f.limit.Bytes, use.Bytes)
	narrow(&s.Inodes, &s.InodesFree, f.limit.Inodes, use.Inodes)
	return s, nil
}

// MaxOp is the highest operation number that the journal has ever booked a
// change on: operations numbered from there on are not mistaken for earlier
// ones. It costs O(1).
func (f *FS) MaxOp() tree.Op {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.up.MaxOp()
}

// Done tells whether the request with that number is in the journal, and the
// inode it made or named. The newest thousand or so are remembered.
func (f *FS) Done(request uint64) (ino tree.Ino, ok bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.up.Done(request)
}

// Close ends the session's use of its directory. No call may be under way.
// What operations returned for stays with the kernel; Sync first what must
// outlive the machine.
func (f *FS) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.handles.close(), f.up.Close())
}

func (f *FS) now() tree.Time { return tree.At(f.clock()) }

// hostErr turns what the host's file system complains of into the words of
// fs/tree, keeping the cause.
func hostErr(what string, err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%s: %w: %w", what, tree.ErrNoSpace, err)
	case errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%s: %w: %w", what, tree.ErrQuota, err)
	case errors.Is(err, syscall.EFBIG):
		return fmt.Errorf("%s: %w: %w", what, tree.ErrTooBig, err)
	case errors.Is(err, syscall.EOPNOTSUPP):
		return fmt.Errorf("%s: %w: %w", what, tree.ErrNotSup, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
