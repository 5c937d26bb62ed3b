// Package store keeps one sandbox's layers and their history on disk: packs,
// the commit log, the mark of inode numbers given out. It hands out the merged
// view of any commit and accepts new layers, one winner a number.
//
// A sandbox's directory:
//
//	FORMAT          "ephemeral-sandbox store 1\n"; written last, at creation
//	log             the commit log; the only truth about what was committed
//	packs/xx/ID.lay packs too large to lie in their record
//	inos            the mark of inode numbers
//	tmp/            rubbish after a restart
//
// A commit is durable when its record is. What was named before that is
// garbage without it, what is done after is memory only. After a failed sync
// nobody knows what is on the disk: the store then refuses to change anything
// until it is opened again, and goes on answering reads.
//
// Lock order: Store.publish, then Store.packs.mu, then Store.mu. publish is
// held across the flush of a commit; readers need only mu.
package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"ephemeral-sandbox/fs/hostfs"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// What a Store answers besides the tree's sentinels and layerfmt.CorruptError.
var (
	// ErrBroken is wrapped by every refusal to change a store after a failed
	// sync. Opening the store again mends it.
	ErrBroken = errors.New("the store must be opened again")
	// ErrNotStore means that the directory holds no sandbox, or one whose
	// creation was not finished.
	ErrNotStore = errors.New("not a sandbox directory")
	// ErrClosed is returned by every change after Close.
	ErrClosed = errors.New("the store is closed")
)

const (
	formatName = "FORMAT"
	formatText = "ephemeral-sandbox store 1\n"
	packsDir   = "packs"
	tmpDir     = "tmp"

	defaultInlineMax = 64 << 10
)

// Options of Create and Open. The zero value is fit for use.
type Options struct {
	// Cache holds decoded frames, for all stores that share it. Nil: no cache.
	Cache *layerfmt.FrameCache
	// Disk is the sandbox's directory; nil is the host's directory of that name.
	Disk hostfs.FS
	// Meta is what commit 0 says about itself. Create only.
	Meta CommitMeta
	// InlineMax is the length in bytes up to which a pack lies in its record;
	// 0 is 64 KiB, less than 0 none at all.
	InlineMax int
	// Workers compress the layers that are sealed; 0 leaves it to layerfmt.
	Workers int
	// Salvage lets Open return a store whose newest layers cannot be read. It
	// then ends with the last commit before them, Damage says why, and nothing
	// can be committed. Open only.
	Salvage bool
}

func (o Options) inlineMax() int {
	switch {
	case o.InlineMax < 0:
		return 0
	case o.InlineMax == 0:
		return defaultInlineMax
	}
	return o.InlineMax
}

// Store is one sandbox's open directory. It is safe for concurrent use.
type Store struct {
	dir   string
	disk  hostfs.FS
	opts  Options
	lock  io.Closer
	log   Log
	inos  *inos
	packs *packs
	cut   int64

	publish sync.Mutex // one commit at a time; held across its flush

	mu       sync.RWMutex      // never held across a flush
	broken   error             // guarded by mu; set once an outcome is unknown
	commits  []Commit          // guarded by mu; only ever appended to
	stacks   []*stack.Stack    // guarded by mu; the tree of each commit
	requests map[string]uint64 // guarded by mu; commits by request id
	leases   map[uint64]int    // guarded by mu; holders of each leased commit
	closed   bool              // guarded by mu
	damage   error             // immutable after Open
}

// Create makes a new sandbox in dir, which must not exist or be empty or hold
// what an unfinished Create has left. build writes the base layer. On an error
// nothing is left behind.
func Create(dir string, o Options, build func(w *layerfmt.Writer) error) (*Store, error) {
	o.Meta = stamped(o.Meta)
	s, made, err := prepare(dir, o, true)
	if err != nil {
		return nil, fmt.Errorf("create sandbox: %w", err)
	}
	if err := s.expectVacant(); err != nil {
		return nil, errors.Join(fmt.Errorf("create sandbox in %s: %w", dir, err), s.releaseFiles())
	}
	if err := s.create(build); err != nil {
		undo := s.clear()
		undo = errors.Join(undo, s.releaseFiles())
		if made {
			undo = errors.Join(undo, os.Remove(dir))
		}
		if undo != nil {
			err = fmt.Errorf("%w; taking it back: %w", err, undo)
		}
		return nil, fmt.Errorf("create sandbox in %s: %w", dir, err)
	}
	return s, nil
}

// prepare opens and locks the directory.
func prepare(dir string, o Options, create bool) (s *Store, made bool, err error) {
	disk := o.Disk
	switch {
	case disk != nil:
	case create:
		var d *hostfs.Dir
		if d, made, err = hostfs.MakeDir(dir); err == nil {
			disk = d
		}
	default:
		var d *hostfs.Dir
		if d, err = hostfs.OpenDir(dir); err == nil {
			disk = d
		}
	}
	if err != nil {
		return nil, false, err
	}
	s = &Store{
		dir: dir, disk: disk, opts: o,
		requests: make(map[string]uint64),
		leases:   make(map[uint64]int),
	}
	s.packs = newPacks(disk)
	if s.lock, err = disk.Lock(); err != nil {
		return nil, made, errors.Join(fmt.Errorf("lock %s: %w", dir, err), disk.Close())
	}
	return s, made, nil
}

// create fills an empty directory. Until step 6 is on the disk, the directory
// is no sandbox, whatever else is in it.
func (s *Store) create(build func(w *layerfmt.Writer) error) error {
	for _, dir := range []string{packsDir, tmpDir} { // 1. directories
		if err := s.disk.Mkdir(dir); err != nil {
			return err
		}
	}
	base, err := s.seal(layerfmt.Base, 0, build) // 2. base layer, synced and named
	if err != nil {
		return err
	}
	reader, err := s.openPack(base.source, base.info.StoredBytes, 0)
	if err != nil {
		return err
	}
	view, err := stack.New(reader)
	if err != nil {
		return err
	}
	if s.inos, err = createInos(s.disk, max(base.info.MaxIno, tree.RootIno)+1); err != nil { // 3. inode numbers
		return err
	}
	r := base.record(0, [32]byte{}, s.opts.Meta)
	b, err := r.encode()
	if err != nil {
		return err
	}
	log, err := createLog(s.disk, b) // 4. log with commit 0
	if err != nil {
		return err
	}
	s.log = log
	if err := s.disk.SyncDir("."); err != nil { // 5. names of all of it
		return err
	}
	if err := s.writeFormat(); err != nil { // 6. the directory is a sandbox
		return err
	}
	base.adopt()
	s.accept(r.Commit, view)
	return nil
}

func (s *Store) writeFormat() error {
	f, err := s.disk.Create(tmpDir + "/" + formatName)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(formatText), 0)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := s.disk.Rename(tmpDir+"/"+formatName, formatName); err != nil {
		return err
	}
	return s.disk.SyncDir(".")
}

// expectVacant refuses a directory that holds anything but the leavings of an
// unfinished Create, and clears those away.
func (s *Store) expectVacant() error {
	names, err := s.disk.List(".")
	if err != nil {
		return err
	}
	for _, name := range names {
		switch name {
		case formatName:
			return fmt.Errorf("it holds a sandbox already: %w", tree.ErrExist)
		case logName, inosName, packsDir, tmpDir:
		default:
			return fmt.Errorf("it holds %q and is not empty: %w", name, tree.ErrNotEmpty)
		}
	}
	return s.clear()
}

// clear removes everything a Create makes. FORMAT goes first, durably, so that
// no crash leaves a sandbox with parts missing.
func (s *Store) clear() error {
	err := s.disk.Remove(formatName)
	if err == nil {
		err = s.disk.SyncDir(".")
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var errs []error
	remove := func(name string) {
		if err := s.disk.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	var empty func(dir string, depth int)
	empty = func(dir string, depth int) {
		names, err := s.disk.List(dir)
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
			return
		}
		for _, name := range names {
			if depth > 0 {
				empty(dir+"/"+name, depth-1)
			} else {
				remove(dir + "/" + name)
			}
		}
		remove(dir)
	}
	remove(logName)
	remove(inosName)
	empty(packsDir, 1)
	empty(tmpDir, 0)
	return errors.Join(errs...)
}

// Exists reports whether dir holds a store whose creation was finished, or
// where that cannot be told.
func Exists(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, formatName))
	return !errors.Is(err, fs.ErrNotExist)
}

// Open opens the sandbox in dir. A record torn by a crash is cut off the log;
// damage in the log, or a pack that is missing or cannot be read, is a
// layerfmt.CorruptError.
func Open(dir string, o Options) (*Store, error) {
	s, _, err := prepare(dir, o, false)
	if err != nil {
		return nil, fmt.Errorf("open sandbox: %w", err)
	}
	if err := s.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("open sandbox in %s: %w", dir, err), s.releaseFiles())
	}
	return s, nil
}

func (s *Store) open() error {
	if err := s.checkFormat(); err != nil {
		return err
	}
	var max tree.Ino
	log, cut, err := openLog(s.disk, func(_ uint64, b []byte) error {
		r, err := decodeRecord(b)
		if err != nil {
			return err
		}
		if r.maxIno > max {
			max = r.maxIno
		}
		return s.replay(r)
	})
	if err != nil {
		return err
	}
	s.log, s.cut = log, cut
	if s.damage != nil && (!s.opts.Salvage || len(s.stacks) == 0) {
		return s.damage
	}
	if s.inos, err = openInos(s.disk, max); err != nil {
		return err
	}
	return s.emptyTmp()
}

func (s *Store) checkFormat() error {
	f, err := s.disk.Open(formatName)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrNotStore
	}
	if err != nil {
		return err
	}
	b := make([]byte, len(formatText)+1)
	n, err := f.ReadAt(b, 0)
	if err == io.EOF {
		err = nil
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if got := string(b[:n]); got != formatText {
		return fmt.Errorf("%w: FORMAT says %q, this program reads %q", ErrNotStore, got, formatText)
	}
	return nil
}

// replay takes one record of the log over. A layer that cannot be read ends the
// tree there, while the log is read on, so that its own damage is not missed.
func (s *Store) replay(r record) error {
	if s.damage != nil {
		return nil
	}
	view, err := s.replayLayer(r)
	if err == nil {
		s.accept(r.Commit, view)
		return nil
	}
	if !layerfmt.IsCorrupt(err) && !errors.Is(err, tree.ErrInvalid) && !errors.Is(err, layerfmt.ErrVersion) {
		return err
	}
	s.damage = fmt.Errorf("commit %s: %w", CommitName(r.Number), err)
	return nil
}

func (s *Store) replayLayer(r record) (*stack.Stack, error) {
	var source io.ReaderAt
	if r.Inline {
		source = newInline(r.pack)
	} else {
		f, err := s.packs.open(r.Pack, r.StoredBytes)
		if err != nil {
			return nil, err
		}
		source = f
	}
	reader, err := s.openPack(source, r.StoredBytes, r.Number)
	if err != nil {
		return nil, err
	}
	if reader.ID() != r.Pack {
		return nil, &layerfmt.CorruptError{
			Layer: reader.Name(), Section: "trailer",
			Reason: fmt.Sprintf("the pack is %s, the log names %s", reader.ID(), r.Pack),
		}
	}
	if r.Number == 0 {
		return stack.New(reader)
	}
	return s.Head().Apply(r.Number, reader)
}

// openPack opens a pack under its commit's name, the one that errors give.
func (s *Store) openPack(source io.ReaderAt, size int64, number uint64) (*layerfmt.Reader, error) {
	return layerfmt.Open(source, size, layerfmt.ReaderOptions{Name: CommitName(number), Cache: s.opts.Cache})
}

func (s *Store) emptyTmp() error {
	names, err := s.disk.List(tmpDir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := s.disk.Remove(tmpDir + "/" + name); err != nil {
			return err
		}
	}
	return nil
}

// accept makes a commit visible.
func (s *Store) accept(c Commit, view *stack.Stack) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.commits = append(s.commits, c)
	s.stacks = append(s.stacks, view)
	if c.RequestID != "" {
		s.requests[c.RequestID] = c.Number
	}
}

// Dir is the directory the store was opened on.
func (s *Store) Dir() string { return s.dir }

// TornBytes is the length of the torn record that Open cut off the log, 0 when
// there was none.
func (s *Store) TornBytes() int64 { return s.cut }

// Damage says why the newest layers are missing from a store that was opened
// with Salvage; nil for a whole one.
func (s *Store) Damage() error { return s.damage }

// Head is the tree of the newest commit. It stays readable until Close; a
// Lease keeps it beyond.
func (s *Store) Head() *stack.Stack {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.stacks[len(s.stacks)-1]
}

// HeadCommit is the newest commit.
func (s *Store) HeadCommit() Commit {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.commits[len(s.commits)-1].clone()
}

// Commit returns one commit, tree.ErrNotExist when there is none of that
// number.
func (s *Store) Commit(n uint64) (Commit, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if n >= uint64(len(s.commits)) {
		return Commit{}, fmt.Errorf("commit %s: %w", CommitName(n), tree.ErrNotExist)
	}
	return s.commits[n].clone(), nil
}

// Commits returns all commits, oldest first.
func (s *Store) Commits() []Commit {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make([]Commit, len(s.commits))
	for i, c := range s.commits {
		out[i] = c.clone()
	}
	return out
}

func (c Commit) clone() Commit {
	c.Merged = slices.Clone(c.Merged)
	c.Counts = maps.Clone(c.Counts)
	return c
}

// FindRequest returns the newest commit made for a request id.
func (s *Store) FindRequest(requestID string) (Commit, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	n, ok := s.requests[requestID]
	if !ok {
		return Commit{}, false
	}
	return s.commits[n].clone(), true
}

// AllocInos gives out n consecutive inode numbers that no file of this sandbox
// has had or will have otherwise, and returns the first.
func (s *Store) AllocInos(n uint64) (first tree.Ino, err error) {
	if err := s.refusal(); err != nil {
		return 0, err
	}
	first, err = s.inos.alloc(n)
	if errors.Is(err, ErrUnknownOutcome) {
		return 0, s.setBroken(err)
	}
	return first, err
}

// refusal is why nothing may be changed, nil when it may.
func (s *Store) refusal() error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	switch {
	case s.closed:
		return ErrClosed
	case s.damage != nil:
		return s.damage
	}
	return s.broken
}

func (s *Store) setBroken(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken == nil {
		s.broken = fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return s.broken
}

// Advance appends the commit after parent, with l as its layer, if the head is
// still parent. won is false when another commit landed first; l then stays
// usable. After a win l belongs to the store. An error leaves the head as it
// was; when it is ErrBroken, opening again tells whether the commit was made.
func (s *Store) Advance(parent uint64, l *Sealed, m CommitMeta) (c Commit, won bool, err error) {
	s.publish.Lock()
	defer s.publish.Unlock()
	if err := s.refusal(); err != nil {
		return Commit{}, false, err
	}
	if l.store != s || l.source == nil {
		return Commit{}, false, fmt.Errorf("advance with a layer that was discarded or sealed elsewhere: %w", tree.ErrInvalid)
	}
	head, view := s.HeadCommit(), s.Head()
	if head.Number != parent {
		return Commit{}, false, nil
	}
	if next := s.inos.unused(); l.info.MaxIno >= next {
		return Commit{}, false, fmt.Errorf("advance with a layer that holds inode %d, not given out yet: %w", l.info.MaxIno, tree.ErrInvalid)
	}
	number := parent + 1
	reader, err := s.openPack(l.source, l.info.StoredBytes, number)
	if err != nil {
		return Commit{}, false, err
	}
	// 1. The new tree, in memory: a layer that does not fit is refused before
	// anything is written.
	next, err := view.Apply(number, reader)
	if err != nil {
		return Commit{}, false, fmt.Errorf("commit %s: %w", CommitName(number), err)
	}
	r := l.record(number, head.Digest, stamped(m))
	b, err := r.encode()
	if err != nil {
		return Commit{}, false, err
	}
	// 2. The record. Before it is durable the pack is garbage, after it the
	// commit is made.
	won, err = s.log.Append(number, b)
	switch {
	case errors.Is(err, ErrUnknownOutcome):
		// The pack may be part of history: it must stay where it is.
		l.adopt()
		return Commit{}, false, s.setBroken(err)
	case err != nil || !won:
		return Commit{}, false, err
	}
	l.adopt()
	s.accept(r.Commit, next) // 3. visible
	return r.Commit.clone(), true, nil
}

// Lease pins a commit: its tree stays readable until Release, beyond Close.
type Lease struct {
	store  *Store
	commit uint64
	view   *stack.Stack
	once   sync.Once
}

// Lease leases a commit, tree.ErrNotExist when there is none of that number.
func (s *Store) Lease(commit uint64) (*Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if commit >= uint64(len(s.stacks)) {
		return nil, fmt.Errorf("lease %s: %w", CommitName(commit), tree.ErrNotExist)
	}
	return s.leaseLocked(commit)
}

// LeaseHead leases the newest commit.
func (s *Store) LeaseHead() (*Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leaseLocked(uint64(len(s.stacks) - 1))
}

func (s *Store) leaseLocked(commit uint64) (*Lease, error) {
	if s.closed {
		return nil, ErrClosed
	}
	s.leases[commit]++
	return &Lease{store: s, commit: commit, view: s.stacks[commit]}, nil
}

// Commit is the number of the leased commit.
func (l *Lease) Commit() uint64 { return l.commit }

// Stack is the tree of the leased commit.
func (l *Lease) Stack() *stack.Stack { return l.view }

// Release ends the lease. Calling it again does nothing.
func (l *Lease) Release() { l.once.Do(l.release) }

func (l *Lease) release() {
	s := l.store
	s.mu.Lock()
	if s.leases[l.commit]--; s.leases[l.commit] == 0 {
		delete(s.leases, l.commit)
	}
	last := s.closed && len(s.leases) == 0
	s.mu.Unlock()
	if last {
		s.packs.closeFiles()
	}
}

// Leases counts the leases on each leased commit.
func (s *Store) Leases() map[uint64]int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.leases)
}

// Close releases the directory and its lock. Layers under a lease stay readable
// until the last is released.
func (s *Store) Close() error {
	s.publish.Lock()
	defer s.publish.Unlock()
	s.mu.Lock()
	closed, leased := s.closed, len(s.leases) > 0
	s.closed = true
	s.mu.Unlock()
	if closed {
		return nil
	}
	var err error
	if s.damage == nil {
		err = s.inos.close()
	} else {
		err = s.inos.file.Close()
	}
	err = errors.Join(err, s.log.Close())
	if !leased {
		s.packs.closeFiles()
	}
	return errors.Join(err, s.lock.Close(), s.disk.Close())
}

// releaseFiles closes what a failed Create or Open had opened.
func (s *Store) releaseFiles() error {
	var errs []error
	if s.log != nil {
		errs = append(errs, s.log.Close())
	}
	if s.inos != nil {
		errs = append(errs, s.inos.file.Close())
	}
	s.packs.closeFiles()
	return errors.Join(append(errs, s.lock.Close(), s.disk.Close())...)
}

// stamped gives m a time in the form the log keeps.
func stamped(m CommitMeta) CommitMeta {
	if m.Time.IsZero() {
		m.Time = time.Now()
	}
	m.Time = m.Time.UTC().Round(0)
	return m
}
