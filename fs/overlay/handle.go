package overlay

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"

	"golang.org/x/sys/unix"
)

// handles is the set of inodes that something refers to: an open, or an
// operation under way. An unlinked inode lives while it is in the set.
type handles struct {
	mu   sync.Mutex
	open map[tree.Ino]*file // guarded by mu
}

// file is what the process keeps of an inode while something refers to it.
type file struct {
	ino  tree.Ino
	refs int // guarded by handles.mu

	mu sync.RWMutex // the inode's content: its range map, Size, Shown, and data file

	fdMu  sync.Mutex
	fd    *os.File // guarded by fdMu; the data file of generation gen, nil when not open
	gen   uint32
	low   File  // guarded by fdMu; content of the inode in lowOf, nil when not open
	lowOf Lower // guarded by fdMu
}

// grab adds a reference.
func (h *handles) grab(ino tree.Ino) *file {
	h.mu.Lock()
	defer h.mu.Unlock()
	fl := h.open[ino]
	if fl == nil {
		fl = &file{ino: ino}
		h.open[ino] = fl
	}
	fl.refs++
	return fl
}

// drop takes a reference away and tells whether it was the last. One that is
// not there is not an error: opens of an earlier server are not counted.
func (h *handles) drop(ino tree.Ino) (last bool) {
	h.mu.Lock()
	fl := h.open[ino]
	if fl != nil {
		if fl.refs--; fl.refs == 0 {
			delete(h.open, ino)
			last = true
		}
	}
	h.mu.Unlock()
	if last {
		fl.forget()
	}
	return last
}

func (h *handles) refs(ino tree.Ino) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	if fl := h.open[ino]; fl != nil {
		return fl.refs
	}
	return 0
}

// all gives the inodes that something refers to.
func (h *handles) all() []tree.Ino {
	h.mu.Lock()
	defer h.mu.Unlock()
	inos := make([]tree.Ino, 0, len(h.open))
	for ino := range h.open {
		inos = append(inos, ino)
	}
	return inos
}

func (h *handles) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ino, fl := range h.open {
		fl.forget()
		delete(h.open, ino)
	}
	return nil
}

// forget closes what fl holds open. Closing cannot lose bytes: write errors of
// the page cache are told to Sync, which opens the file anew.
func (fl *file) forget() {
	fl.fdMu.Lock()
	defer fl.fdMu.Unlock()
	if fl.fd != nil {
		_ = fl.fd.Close()
	}
	fl.fd, fl.low, fl.lowOf = nil, nil, nil
}

// data opens the data file of n; without create and file the error is
// fs.ErrNotExist. The caller holds fl.mu.
func (f *FS) data(fl *file, gen uint32, create bool) (*os.File, error) {
	fl.fdMu.Lock()
	defer fl.fdMu.Unlock()
	if fl.fd != nil && fl.gen == gen {
		return fl.fd, nil
	}
	fd, err := f.up.OpenData(fl.ino, gen, create)
	if err != nil {
		return nil, hostErr(fmt.Sprintf("inode %d", fl.ino), err)
	}
	if fl.fd != nil {
		_ = fl.fd.Close() // of a generation that nobody reads any more
	}
	fl.fd, fl.gen = fd, gen
	return fd, nil
}

// lowerContent opens the content that inode fl.ino has in lower.
func (fl *file) lowerContent(lower Lower) (File, error) {
	fl.fdMu.Lock()
	defer fl.fdMu.Unlock()
	if fl.low != nil && fl.lowOf == lower {
		return fl.low, nil
	}
	low, err := lower.Open(fl.ino)
	if err != nil {
		return nil, fmt.Errorf("content of inode %d: %w", fl.ino, err)
	}
	fl.low, fl.lowOf = low, lower
	return low, nil
}

// Acquire counts an open of ino, so that it lives on when it is unlinked;
// tree.ErrStale when it is gone already.
func (f *FS) Acquire(ino tree.Ino) error {
	f.handles.grab(ino)
	f.mu.RLock()
	n, err := f.record(ino)
	if err == nil && n.Nlink == 0 && !f.kept[ino] && f.handles.refs(ino) == 1 {
		err = fmt.Errorf("inode %d was removed: %w", ino, tree.ErrStale)
	}
	f.mu.RUnlock()
	if err != nil {
		f.Release(ino)
	}
	return err
}

// Release takes back one Acquire. The last one ends an unlinked inode; what
// could not be removed of it then goes when the session is opened again.
func (f *FS) Release(ino tree.Ino) {
	if !f.handles.drop(ino) {
		return
	}
	f.mu.RLock()
	orphan := f.orphan(ino)
	f.mu.RUnlock()
	if !orphan {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.orphan(ino) || f.handles.refs(ino) != 0 {
		return
	}
	t := f.begin(Caller{})
	t.bury(t.stage(f.up.Inode(ino)))
	if t.commit() == nil {
		t.removeData()
	}
}

// orphan tells whether ino has a record to be rid of. The caller holds mu.
func (f *FS) orphan(ino tree.Ino) bool {
	n := f.up.Inode(ino)
	return n != nil && n.Nlink == 0 && (n.New || n.Data) && !f.kept[ino]
}

// Sync makes ino's bytes, and every change of names and attributes made so far,
// outlive the machine. dataOnly may leave times behind; it costs the same here.
func (f *FS) Sync(ino tree.Ino, dataOnly bool) error {
	if err := f.syncData(ino); err != nil { // 1. bytes
		return err
	}
	return f.syncMeta()
}

func (f *FS) syncMeta() error {
	if err := f.up.SyncNames(); err != nil { // 2. that the data files are there
		return hostErr("sync", err)
	}
	if err := f.up.Sync(); err != nil { // 3. the journal, which says what counts
		return hostErr("sync", err)
	}
	return nil
}

// SyncAll is Sync for every inode.
func (f *FS) SyncAll() error {
	for _, ino := range f.dirty.all() {
		if err := f.syncData(ino); err != nil {
			return err
		}
	}
	return f.syncMeta()
}

// syncData flushes one data file. It holds no lock while the disk works, so the
// file may be replaced meanwhile; then the new one is flushed.
func (f *FS) syncData(ino tree.Ino) error {
	fl := f.handles.grab(ino)
	defer f.Release(ino)
	for {
		fl.mu.RLock()
		f.mu.RLock()
		n := f.up.Inode(ino)
		f.mu.RUnlock()
		var fd *os.File
		var err error
		if n != nil && n.Data {
			fd, err = f.data(fl, n.Gen, false)
		}
		fl.mu.RUnlock()
		if errors.Is(err, fs.ErrNotExist) || err == nil && fd == nil {
			f.dirty.remove(ino)
			return nil // no byte was ever written
		}
		if err != nil {
			return err
		}
		f.dirty.remove(ino) // before the flush: a write from here on is for the next
		err = fdatasync(fd)
		if errors.Is(err, os.ErrClosed) {
			continue
		}
		if err != nil {
			err = fmt.Errorf("sync content of inode %d, outcome unknown until reopened: %w", ino, err)
			f.up.Fail(err)
			return hostErr("sync", err)
		}
		return nil
	}
}

func fdatasync(fd *os.File) error {
	raw, err := fd.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	if err := raw.Control(func(fd uintptr) { result = unix.Fdatasync(int(fd)) }); err != nil {
		return err
	}
	return result
}

// settle tells the owner of the last writer's content before c changes it. The
// caller holds fl.mu exclusively and mu not at all.
func (f *FS) settle(c Caller, fl *file) {
	if f.hooks.Settle == nil {
		return
	}
	f.mu.RLock()
	n, lower := f.up.Inode(fl.ino), f.lower
	f.mu.RUnlock()
	if n == nil || !n.Written || n.LastOp == c.Op {
		return
	}
	f.hooks.Settle(fl.ino, n.LastOp, &content{f: f, fl: fl, n: n, lower: lower})
}

// content is a file's content under a lock that its maker holds.
type content struct {
	f     *FS
	fl    *file
	n     *upper.Inode
	lower Lower
}
