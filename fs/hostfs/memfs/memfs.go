// Package memfs is a hostfs.FS in memory that knows what a power loss would
// leave of it. It exists for tests.
//
// What was not synced is kept as a list of single changes: names made, moved or
// removed, and file bytes in sectors of 512. CrashClone asks for each of them
// whether it had reached the disk. Sectors are never torn and a rename is never
// half done, which is what disks and journalling file systems promise; nothing
// else is promised, in particular no order.
package memfs

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"sync"
	"syscall"

	"ephemeral-sandbox/fs/hostfs"
)

// SectorSize is the unit in which unsynced bytes survive or vanish.
const SectorSize = 512

// FS is a directory in memory.
type FS struct {
	mu       sync.Mutex
	live     tree       // guarded by mu
	durable  tree       // guarded by mu; names that a crash leaves for certain
	pending  []nameOp   // guarded by mu; changes of names since, oldest first
	locked   bool       // guarded by mu
	capacity int64      // guarded by mu; bytes of all files together, 0 = no bound
	used     int64      // guarded by mu
	files    []*content // guarded by mu; every file ever made
}

var _ hostfs.FS = (*FS)(nil)

// tree maps a directory to what is in it. A nil *content is a directory.
type tree map[string]map[string]*content

type content struct {
	live    []byte
	durable []byte
	pending []write // since the last sync, oldest first
}

type write struct {
	off  int64
	data []byte
}

// nameOp is one change of names. It removes from, when set, and puts file at
// to, when set: both together are a rename.
type nameOp struct {
	from, to string
	file     *content
}

// New returns an empty directory.
func New() *FS {
	return &FS{live: tree{".": {}}, durable: tree{".": {}}}
}

// SetCapacity bounds the bytes of all files together; writes that would grow
// beyond it fail with ENOSPC. Zero takes the bound away.
func (m *FS) SetCapacity(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.capacity = bytes
}

// Used is the number of bytes all files together hold.
func (m *FS) Used() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}

// CrashClone returns the directory as a restart after a power loss at this
// instant would find it. keep is asked for every unsynced change whether it
// had reached the disk; nil keeps none. Nobody holds the clone's lock.
func (m *FS) CrashClone(keep func() bool) *FS {
	m.mu.Lock()
	defer m.mu.Unlock()
	if keep == nil {
		keep = func() bool { return false }
	}
	names := m.durable.clone()
	for _, op := range m.pending {
		if keep() {
			names.apply(op)
		}
	}
	out := New()
	copies := make(map[*content]*content)
	for _, file := range m.files {
		c := &content{durable: slices.Clone(file.durable)}
		for _, w := range file.pending {
			if keep() {
				c.durable = overwrite(c.durable, w.off, w.data)
			}
		}
		c.live = slices.Clone(c.durable)
		copies[file] = c
	}
	out.adopt(names, ".", copies)
	out.durable = out.live.clone()
	return out
}

// adopt takes over what is reachable from dir; names under a directory whose
// own name was lost are lost with it.
func (m *FS) adopt(names tree, dir string, copies map[*content]*content) {
	for name, file := range names[dir] {
		if file == nil {
			sub := path.Join(dir, name)
			m.live[dir][name] = nil
			m.live[sub] = map[string]*content{}
			m.adopt(names, sub, copies)
			continue
		}
		c := copies[file]
		if !slices.Contains(m.files, c) {
			m.files = append(m.files, c)
			m.used += int64(len(c.live))
		}
		m.live[dir][name] = c
	}
}

func (t tree) clone() tree {
	out := make(tree, len(t))
	for dir, names := range t {
		out[dir] = maps.Clone(names)
	}
	return out
}

// apply makes one change of names as far as it still can be made.
func (t tree) apply(op nameOp) {
	if op.from != "" {
		names := t[path.Dir(op.from)]
		if file, ok := names[path.Base(op.from)]; ok && file == nil {
			delete(t, op.from)
		}
		delete(names, path.Base(op.from))
	}
	if op.to == "" {
		return
	}
	dir := path.Dir(op.to)
	if t[dir] == nil {
		t[dir] = map[string]*content{}
	}
	t[dir][path.Base(op.to)] = op.file
	if op.file == nil && t[op.to] == nil {
		t[op.to] = map[string]*content{}
	}
}

func overwrite(data []byte, off int64, p []byte) []byte {
	if end := off + int64(len(p)); end > int64(len(data)) {
		data = append(data, make([]byte, end-int64(len(data)))...)
	}
	copy(data[off:], p)
	return data
}

func fail(op, name string, errno syscall.Errno) error {
	return &fs.PathError{Op: op, Path: name, Err: errno}
}

func (m *FS) lookupLocked(op, name string) (c *content, err error) {
	names, ok := m.live[path.Dir(name)]
	if !ok {
		return nil, fail(op, name, syscall.ENOENT)
	}
	c, ok = names[path.Base(name)]
	if !ok {
		return nil, fail(op, name, syscall.ENOENT)
	}
	return c, nil
}

func (m *FS) changeLocked(op nameOp) {
	m.live.apply(op)
	m.pending = append(m.pending, op)
}

// Mkdir implements hostfs.FS.
func (m *FS) Mkdir(name string) error {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.live[name]; ok {
		return nil
	}
	if _, ok := m.live[path.Dir(name)]; !ok {
		return fail("mkdir", name, syscall.ENOENT)
	}
	if _, ok := m.live[path.Dir(name)][path.Base(name)]; ok {
		return fail("mkdir", name, syscall.EEXIST)
	}
	m.changeLocked(nameOp{to: name})
	return nil
}

// Open implements hostfs.FS.
func (m *FS) Open(name string) (hostfs.File, error) { return m.open(name, false) }

// OpenWrite implements hostfs.FS.
func (m *FS) OpenWrite(name string) (hostfs.File, error) { return m.open(name, true) }

func (m *FS) open(name string, writable bool) (hostfs.File, error) {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	c, err := m.lookupLocked("open", name)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return nil, fail("open", name, syscall.EISDIR)
	}
	return &file{fs: m, name: name, content: c, writable: writable}, nil
}

// Create implements hostfs.FS.
func (m *FS) Create(name string) (hostfs.File, error) {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	names, ok := m.live[path.Dir(name)]
	if !ok {
		return nil, fail("create", name, syscall.ENOENT)
	}
	if _, ok := names[path.Base(name)]; ok {
		return nil, fail("create", name, syscall.EEXIST)
	}
	c := m.newContentLocked()
	m.changeLocked(nameOp{to: name, file: c})
	return &file{fs: m, name: name, content: c, writable: true}, nil
}

func (m *FS) newContentLocked() *content {
	c := &content{}
	m.files = append(m.files, c)
	return c
}

// Temp implements hostfs.FS.
func (m *FS) Temp(dir string) (hostfs.Temp, error) {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.live[dir]; !ok {
		return nil, fail("temp", dir, syscall.ENOENT)
	}
	return &temp{file{fs: m, name: path.Join(dir, "(unnamed)"), content: m.newContentLocked(), writable: true}}, nil
}

// Rename implements hostfs.FS.
func (m *FS) Rename(from, to string) error {
	from, to = path.Clean(from), path.Clean(to)
	m.mu.Lock()
	defer m.mu.Unlock()
	c, err := m.lookupLocked("rename", from)
	if err != nil {
		return err
	}
	if c == nil {
		return fail("rename", from, syscall.EISDIR)
	}
	if _, ok := m.live[path.Dir(to)]; !ok {
		return fail("rename", to, syscall.ENOENT)
	}
	m.changeLocked(nameOp{from: from, to: to, file: c})
	return nil
}

// Remove implements hostfs.FS.
func (m *FS) Remove(name string) error {
	name = path.Clean(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	c, err := m.lookupLocked("remove", name)
	if err != nil {
		return err
	}
	if c == nil && len(m.live[name]) != 0 {
		return fail("remove", name, syscall.ENOTEMPTY)
	}
	m.changeLocked(nameOp{from: name})
	return nil
}

// List implements hostfs.FS.
func (m *FS) List(dir string) ([]string, error) {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	names, ok := m.live[dir]
	if !ok {
		return nil, fail("list", dir, syscall.ENOENT)
	}
	return slices.Sorted(maps.Keys(names)), nil
}

// SyncDir implements hostfs.FS.
func (m *FS) SyncDir(dir string) error {
	dir = path.Clean(dir)
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.live[dir]; !ok {
		return fail("sync", dir, syscall.ENOENT)
	}
	rest := m.pending[:0:0]
	for _, op := range m.pending {
		if op.from != "" && path.Dir(op.from) == dir || op.to != "" && path.Dir(op.to) == dir {
			m.durable.apply(op)
		} else {
			rest = append(rest, op)
		}
	}
	m.pending = rest
	return nil
}

// Lock implements hostfs.FS.
func (m *FS) Lock() (io.Closer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.locked {
		return nil, hostfs.ErrLocked
	}
	m.locked = true
	return &lock{fs: m}, nil
}

type lock struct{ fs *FS }

// Close implements io.Closer.
func (l *lock) Close() error {
	l.fs.mu.Lock()
	defer l.fs.mu.Unlock()
	l.fs.locked = false
	return nil
}

// Close implements hostfs.FS; the directory stays as it is.
func (m *FS) Close() error { return nil }

type file struct {
	fs       *FS
	name     string
	content  *content
	writable bool
	closed   bool // guarded by fs.mu
}

func (f *file) checkLocked(op string) error {
	if f.closed {
		return &fs.PathError{Op: op, Path: f.name, Err: fs.ErrClosed}
	}
	return nil
}

// ReadAt implements io.ReaderAt.
func (f *file) ReadAt(p []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("read"); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, fail("read", f.name, syscall.EINVAL)
	}
	if off >= int64(len(f.content.live)) {
		return 0, io.EOF
	}
	n := copy(p, f.content.live[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// WriteAt implements io.WriterAt.
func (f *file) WriteAt(p []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("write"); err != nil {
		return 0, err
	}
	if !f.writable {
		return 0, fail("write", f.name, syscall.EBADF)
	}
	full := len(p)
	grow := max(0, off+int64(full)-int64(len(f.content.live)))
	if room := f.fs.capacity - f.fs.used; f.fs.capacity > 0 && grow > room {
		// A disk takes what fits before it says that it is full.
		cut := min(int64(full), grow-max(0, room))
		p = p[:int64(full)-cut]
		grow = max(0, off+int64(len(p))-int64(len(f.content.live)))
	}
	f.fs.used += grow
	f.content.live = overwrite(f.content.live, off, p)
	for n := 0; n < len(p); {
		end := min(len(p), n+SectorSize-int((off+int64(n))%SectorSize))
		f.content.pending = append(f.content.pending, write{off + int64(n), slices.Clone(p[n:end])})
		n = end
	}
	if len(p) < full {
		return len(p), fail("write", f.name, syscall.ENOSPC)
	}
	return full, nil
}

// Size implements hostfs.File.
func (f *file) Size() (int64, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	return int64(len(f.content.live)), f.checkLocked("stat")
}

// Sync implements hostfs.File.
func (f *file) Sync() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("sync"); err != nil {
		return err
	}
	for _, w := range f.content.pending {
		f.content.durable = overwrite(f.content.durable, w.off, w.data)
	}
	f.content.pending = nil
	return nil
}

// Close implements io.Closer.
func (f *file) Close() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if err := f.checkLocked("close"); err != nil {
		return err
	}
	f.closed = true
	return nil
}

// Corrupt flips the given bits of one byte of a file on the disk, behind the
// back of whoever wrote it.
func (m *FS) Corrupt(name string, off int64, bits byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	c, err := m.lookupLocked("corrupt", path.Clean(name))
	if err != nil {
		return err
	}
	if c == nil || off < 0 || off >= int64(len(c.live)) {
		return fmt.Errorf("corrupt %s at %d: %w", name, off, syscall.EINVAL)
	}
	c.live[off] ^= bits
	if off < int64(len(c.durable)) {
		c.durable[off] ^= bits
	}
	return nil
}

// ForgetUnsynced does to a file what Linux may do after a failed sync: what was
// written stays readable, counts as synced, and never reaches the disk.
func (m *FS) ForgetUnsynced(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	c, err := m.lookupLocked("forget", path.Clean(name))
	if err == nil && c != nil {
		c.pending = nil
	}
	return err
}

type temp struct{ file }

// Link implements hostfs.Temp.
func (t *temp) Link(name string) error {
	name = path.Clean(name)
	t.fs.mu.Lock()
	defer t.fs.mu.Unlock()
	if err := t.checkLocked("link"); err != nil {
		return err
	}
	names, ok := t.fs.live[path.Dir(name)]
	if !ok {
		return fail("link", name, syscall.ENOENT)
	}
	if _, ok := names[path.Base(name)]; ok {
		return fail("link", name, syscall.EEXIST)
	}
	t.fs.changeLocked(nameOp{to: name, file: t.content})
	return nil
}
