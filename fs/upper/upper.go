// Package upper holds one session's private changes to a tree: which names and
// inodes differ from the lower tree, and the bytes written.
//
// Names and inode records live in memory, in btrees that can be cloned in O(1).
// They are written ahead to a journal: a file of frames, each with a length and
// a checksum, each one operation, applied whole or not at all. A frame is one
// write(2), so whatever an operation returned for is there after the process is
// killed; Sync makes it outlive the machine. A torn last frame is cut when the
// journal is opened; damage anywhere else is a CorruptError and nothing is
// opened. When the journal has outgrown what it describes, it is rewritten as a
// checkpoint and swapped by rename.
//
// The bytes of an inode live in a sparse file of its own, data/INO.GEN in hex,
// of which the inode's range map (Extents) says what counts. Bytes reach the
// data file before the journal says so, and the journal says that bytes are gone
// before the data file loses them. A data file is removed only once the frame
// that took its owner away is durable: Discard keeps a list for the next Sync,
// and what a crash leaves is swept by Open. What the range map does not call private may
// therefore hold anything and is never read. After a power loss, bytes that were
// written and not synced may be there, be gone, or read as zeros.
//
// An Upper has no lock for its tables: the owner keeps Commit exclusive of
// everything else, while readers may share. Sync, OpenData, RemoveData, Discard,
// NextGen and SyncNames may be called at any time.
package upper

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"ephemeral-sandbox/fs/tree"

	"github.com/google/btree"
	"golang.org/x/sys/unix"
)

// Names inside an upper's directory.
const (
	journalName = "journal"
	freshName   = "journal.new" // a checkpoint not yet in place
	dataName    = "data"
)

// Options tune an Upper. The zero value is fit for use.
type Options struct {
	Base uint64 // commit of the lower tree, for a journal that is made now

	// CompactMin is the size in bytes below which a journal is left alone;
	// 0 is 4 MiB.
	CompactMin int64
}

// requestsKept bounds how many carried out requests are remembered.
const requestsKept = 1024

// Upper is one session's changes, in memory and on disk.
type Upper struct {
	path       string
	dir, data  *os.Root
	journal    *journal
	compactMin int64
	floor      int64 // size of the journal when it was last a bare checkpoint

	state

	fresh   atomic.Bool // a data file was made since the last SyncNames
	namesMu sync.Mutex  // one SyncNames at a time

	garbage garbage
}

// state is what the journal says.
type state struct {
	base    uint64
	dirents *btree.BTreeG[*Dirent]
	inodes  *btree.BTreeG[*Inode]
	names   *btree.BTreeG[tree.Dirent] // put dirents by inode; derived

	bytes uint64 // private bytes, link targets and xattrs of all inodes
	made  uint64 // inodes that are New

	maxOp tree.Op // highest that any frame or record ever had

	requests map[uint64]tree.Ino
	order    []uint64 // keys of requests, oldest first
}

const tableDegree = 32

func newState() state {
	return state{
		dirents: btree.NewG(tableDegree, func(a, b *Dirent) bool {
			return a.Dir < b.Dir || a.Dir == b.Dir && a.Name < b.Name
		}),
		inodes: btree.NewG(tableDegree, func(a, b *Inode) bool { return a.Ino < b.Ino }),
		names: btree.NewG(tableDegree, func(a, b tree.Dirent) bool {
			if a.Ino != b.Ino {
				return a.Ino < b.Ino
			}
			return a.Dir < b.Dir || a.Dir == b.Dir && a.Name < b.Name
		}),
		requests: map[uint64]tree.Ino{},
	}
}

// Open makes or replays the upper in directory path. Data files that no record
// names are removed.
func Open(path string, o Options) (*Upper, error) {
	if o.CompactMin == 0 {
		o.CompactMin = 4 << 20
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make upper: %w", err)
	}
	dir, err := os.OpenRoot(path)
	if err != nil {
		return nil, fmt.Errorf("open upper: %w", err)
	}
	u := &Upper{path: path, dir: dir, compactMin: o.CompactMin, state: newState()}
	if err := u.open(o.Base); err != nil {
		if u.journal != nil {
			err = errors.Join(err, u.journal.file.Close())
		}
		if u.data != nil {
			err = errors.Join(err, u.data.Close())
		}
		return nil, errors.Join(err, dir.Close())
	}
	return u, nil
}

func (u *Upper) open(base uint64) error {
	if err := u.dir.Mkdir(dataName, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make data directory: %w", err)
	}
	data, err := u.dir.OpenRoot(dataName)
	if err != nil {
		return fmt.Errorf("open data directory: %w", err)
	}
	u.data = data
	if err := u.dir.Remove(freshName); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove unfinished checkpoint: %w", err)
	}
	file, err := u.dir.OpenFile(journalName, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		u.base = base
		file, size, seal, err := u.writeCheckpoint()
		if err != nil {
			return err
		}
		u.journal, u.floor = &journal{file: diskFile{file}, size: size, synced: size, seal: seal}, size
	case err != nil:
		return fmt.Errorf("open journal: %w", err)
	default:
		u.journal = &journal{file: diskFile{file}}
		if err := u.replay(); err != nil {
			return err
		}
	}
	return u.sweep()
}

// replay rebuilds the state and cuts a torn end off.
func (u *Upper) replay() error {
	b, err := u.dir.ReadFile(journalName)
	if err != nil {
		return fmt.Errorf("read journal: %w", err)
	}
	p, err := replay(u.path+"/"+journalName, b, u.apply)
	if err != nil {
		return err
	}
	if p.end < int64(len(b)) {
		if err := u.journal.file.Truncate(p.end); err != nil {
			return fmt.Errorf("cut torn end of journal: %w", err)
		}
	}
	u.journal.size, u.journal.seal, u.floor = p.end, p.seal, p.checkpoint
	return nil
}

// PeekBase reads which commit the upper in directory path stands on, without
// opening it. ok is false when there is no upper.
func PeekBase(path string) (commit uint64, ok bool, err error) {
	name := path + "/" + journalName
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("read journal: %w", err)
	}
	_, err = replay(name, b, func(f Frame) error {
		for _, c := range f.Changes {
			if c.Type == Base {
				commit = c.Start
			}
		}
		return nil
	})
	return commit, err == nil, err
}

// Base is the commit of the lower tree that the records are relative to.
func (u *Upper) Base() uint64 { return u.base }

// Usage is the number of bytes of private content, link targets and xattrs, and
// the number of inodes made here.
func (u *Upper) Usage() (bytes, inodes uint64) { return u.bytes, u.made }

// MaxOp is the highest operation number that was ever journaled, also by
// frames that a checkpoint has replaced.
func (u *Upper) MaxOp() tree.Op { return u.maxOp }

// Dirent gives the record of a name, nil for none.
func (u *Upper) Dirent(dir tree.Ino, name string) *Dirent {
	d, _ := u.dirents.Get(&Dirent{Dirent: tree.Dirent{Dir: dir, Name: name}})
	return d
}

// Inode gives the record of an inode, nil for none.
func (u *Upper) Inode(ino tree.Ino) *Inode {
	n, _ := u.inodes.Get(&Inode{Inode: tree.Inode{Attr: tree.Attr{Ino: ino}}})
	return n
}

// Dirents gives dir's records from the name on, in byte order.
func (u *Upper) Dirents(dir tree.Ino, from string, fn func(*Dirent) bool) {
	u.dirents.AscendGreaterOrEqual(&Dirent{Dirent: tree.Dirent{Dir: dir, Name: from}}, func(d *Dirent) bool {
		return d.Dir == dir && fn(d)
	})
}

// Names gives the names that records give to ino.
func (u *Upper) Names(ino tree.Ino) (names []tree.Dirent) {
	u.names.AscendGreaterOrEqual(tree.Dirent{Ino: ino}, func(d tree.Dirent) bool {
		if d.Ino == ino {
			names = append(names, d)
		}
		return d.Ino == ino
	})
	return names
}

// Done tells whether a frame for that request is in the journal, and its result.
// The newest thousand or so requests are remembered.
func (u *Upper) Done(request uint64) (tree.Ino, bool) {
	ino, ok := u.requests[request]
	return ino, ok
}

// Snapshot is the tables at one instant. Range maps are not part of it.
type Snapshot struct {
	Base    uint64
	dirents *btree.BTreeG[*Dirent]
	inodes  *btree.BTreeG[*Inode]
}

// Snapshot costs O(1). Like Commit it must be exclusive.
func (u *Upper) Snapshot() *Snapshot {
	return &Snapshot{Base: u.base, dirents: u.dirents.Clone(), inodes: u.inodes.Clone()}
}

// Dirents gives all records by directory and name.
func (s *Snapshot) Dirents(fn func(*Dirent) bool) { s.dirents.Ascend(fn) }

// Inodes gives all records by number.
func (s *Snapshot) Inodes(fn func(*Inode) bool) { s.inodes.Ascend(fn) }

// Inode gives the record of an inode, nil for none.
func (s *Snapshot) Inode(ino tree.Ino) *Inode {
	n, _ := s.inodes.Get(&Inode{Inode: tree.Inode{Attr: tree.Attr{Ino: ino}}})
	return n
}

// Commit appends f to the journal and applies it. When it fails nothing has
// changed.
func (u *Upper) Commit(f Frame) error {
	if err := u.journal.append(f); err != nil {
		return err
	}
	if err := u.apply(f); err != nil {
		err = fmt.Errorf("journal says what the tables cannot follow: %w", err)
		u.journal.fail(err)
		return err
	}
	if u.journal.size > u.compactMin && u.journal.size > 4*u.floor {
		u.compact()
	}
	return nil
}

// Scratch is a copy of u's tables to try changes on, without journal, files or
// range maps. Like Commit it must be exclusive.
func (u *Upper) Scratch() *Upper {
	s := u.state
	s.dirents, s.inodes, s.names = s.dirents.Clone(), s.inodes.Clone(), s.names.Clone()
	return &Upper{state: s}
}

// Try makes changes on a Scratch. Those of range maps are left out, but refused
// when Commit could not follow them.
func (u *Upper) Try(changes []Change) error {
	for i := range changes {
		var err error
		switch c := &changes[i]; c.Type {
		case Write, Cut, Zero, Forget, Own:
			_, err = u.changeable(c)
		case Remember:
		default:
			err = u.applyChange(c, 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// apply carries one frame out on the tables.
func (s *state) apply(f Frame) error {
	s.maxOp = max(s.maxOp, f.Op)
	for i := range f.Changes {
		if err := s.applyChange(&f.Changes[i], f.Op); err != nil {
			return err
		}
	}
	if f.Request != 0 {
		s.remember(f.Request, f.Result)
	}
	return nil
}

func (s *state) applyChange(c *Change, op tree.Op) error {
	switch c.Type {
	case PutDirent:
		d := c.Dirent
		s.putDirent(&d)
	case DropDirent:
		if old, ok := s.dirents.Delete(&c.Dirent); ok && old.Ino != 0 {
			s.names.Delete(old.Dirent)
		}
	case PutInode:
		n := *c.Inode
		s.maxOp = max(s.maxOp, n.LastOp)
		if n.extents = nil; n.Data {
			if old := s.inode(n.Ino); old != nil && old.Data && old.Gen == n.Gen {
				n.extents = old.extents
			}
		}
		s.putInode(&n)
	case DropInode:
		if old, ok := s.inodes.Delete(&Inode{Inode: tree.Inode{Attr: tree.Attr{Ino: c.Ino}}}); ok {
			s.account(old, -1)
		}
	case Write:
		return s.change(c, func(n *Inode) {
			n.extents.Set(c.Start, c.End, false)
			n.Size, n.Alloc, n.Mode = c.Size, c.Alloc, c.Mode
			n.Mtime, n.Ctime = c.Time, c.Time
			n.Hash = tree.Hash{}
			n.LastOp, n.Written = op, true
		})
	case Cut:
		return s.change(c, func(n *Inode) { n.extents.Cut(c.Start) })
	case Own:
		return s.change(c, func(n *Inode) { n.extents.Set(c.Start, c.End, false) })
	case Zero:
		return s.change(c, func(n *Inode) { n.extents.Set(c.Start, c.End, true) })
	case Forget:
		return s.change(c, func(n *Inode) { n.extents.Clear(c.Start, c.End) })
	case Base:
		s.base = c.Start
	case Reset:
		fresh := newState()
		fresh.base, fresh.maxOp = s.base, s.maxOp
		fresh.requests, fresh.order = s.requests, s.order
		*s = fresh
	case Remember:
		s.remember(c.Start, c.Ino)
	default:
		return fmt.Errorf("change %d is unknown", c.Type)
	}
	return nil
}

func (s *state) inode(ino tree.Ino) *Inode {
	n, _ := s.inodes.Get(&Inode{Inode: tree.Inode{Attr: tree.Attr{Ino: ino}}})
	return n
}

// changeable gives the record whose content c edits.
func (s *state) changeable(c *Change) (*Inode, error) {
	n := s.inode(c.Ino)
	if n == nil || !n.Data {
		return nil, fmt.Errorf("change %d of inode %d, which has no private content", c.Type, c.Ino)
	}
	return n, nil
}

// change edits the content of an inode that has private content.
func (s *state) change(c *Change, edit func(*Inode)) error {
	old, err := s.changeable(c)
	if err != nil {
		return err
	}
	// The old record shares its range map with the new one, so its share of
	// the account is taken before the map changes.
	s.account(old, -1)
	n := *old
	if n.extents == nil {
		n.extents = &Extents{}
	}
	edit(&n)
	s.inodes.ReplaceOrInsert(&n)
	s.account(&n, +1)
	return nil
}

func (s *state) putInode(n *Inode) {
	if old, ok := s.inodes.ReplaceOrInsert(n); ok {
		s.account(old, -1)
	}
	s.account(n, +1)
}

func (s *state) account(n *Inode, sign int64) {
	bytes := uint64(len(n.Link)) + n.Extents().Private()
	for _, x := range n.Xattrs {
		bytes += uint64(len(x.Name) + len(x.Value))
	}
	s.bytes += uint64(sign) * bytes
	if n.New {
		s.made += uint64(sign)
	}
}

func (s *state) putDirent(d *Dirent) {
	if old, ok := s.dirents.ReplaceOrInsert(d); ok && old.Ino != 0 {
		s.names.Delete(old.Dirent)
	}
	if d.Ino != 0 {
		s.names.ReplaceOrInsert(d.Dirent)
	}
}

func (s *state) remember(request uint64, result tree.Ino) {
	if _, ok := s.requests[request]; !ok {
		s.order = append(s.order, request)
	}
	s.requests[request] = result
	if len(s.order) > requestsKept {
		delete(s.requests, s.order[0])
		s.order = s.order[1:]
	}
}

// compact replaces the journal by a checkpoint of the tables. A crash before
// the rename leaves the old journal, after it the new one; both say the same. A
// checkpoint that cannot be written, on a full disk for instance, leaves the
// old journal in use; it is tried again after as much growth.
func (u *Upper) compact() {
	file, size, seal, err := u.writeCheckpoint()
	if err != nil {
		u.floor = u.journal.size
		return
	}
	u.floor = size
	u.journal.replace(diskFile{file}, size, seal)
}

// checkpointFrame is about how many bytes of a checkpoint go into one frame.
const checkpointFrame = 64 << 10

// writeCheckpoint writes the state as a journal of its own and puts it in
// place of the one there is.
func (u *Upper) writeCheckpoint() (file *os.File, size int64, s seal, err error) {
	var random [8]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, 0, s, fmt.Errorf("draw journal salt: %w", err)
	}
	salt := binary.LittleEndian.Uint64(random[:])
	s = newSeal(salt)
	file, err = u.dir.OpenFile(freshName, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, 0, s, fmt.Errorf("make checkpoint: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
			if gone := u.dir.Remove(freshName); gone != nil && !errors.Is(gone, fs.ErrNotExist) {
				err = errors.Join(err, gone)
			}
		}
	}()
	w := checkpointer{file: file, seal: s, op: u.maxOp, size: headerSize}
	u.checkpoint(&w)
	w.flush()
	if w.err != nil {
		return nil, 0, s, fmt.Errorf("write checkpoint: %w", w.err)
	}
	if _, err := file.WriteAt(appendHeader(nil, salt, uint64(w.size)), 0); err != nil {
		return nil, 0, s, fmt.Errorf("write checkpoint: %w", err)
	}
	if err := file.Sync(); err != nil { // 1. bytes
		return nil, 0, s, fmt.Errorf("sync checkpoint: %w", err)
	}
	if err := u.dir.Rename(freshName, journalName); err != nil { // 2. name
		return nil, 0, s, fmt.Errorf("put checkpoint in place: %w", err)
	}
	if err := syncDir(u.dir); err != nil { // 3. directory
		// Which of the two journals a power loss would leave is unknown, and
		// only the new one may be appended to.
		if u.journal != nil {
			u.journal.fail(fmt.Errorf("sync upper's directory: %w", err))
		}
		return nil, 0, s, fmt.Errorf("sync upper's directory: %w", err)
	}
	return file, w.size, s, nil
}

// checkpointer gathers changes into frames and writes them.
type checkpointer struct {
	file *os.File
	seal seal
	op   tree.Op // of every frame, so that maxOp outlives the frames replaced
	buf  []byte
	size int64
	err  error
}

func (w *checkpointer) add(c Change) {
	if w.err != nil {
		return
	}
	if len(w.buf) == 0 {
		w.buf = appendFrame(append(w.buf, make([]byte, frameHead)...), Frame{Op: w.op})
	}
	w.buf = appendChange(w.buf, &c)
	if len(w.buf) >= checkpointFrame {
		w.flush()
	}
}

func (w *checkpointer) flush() {
	if len(w.buf) == 0 || w.err != nil {
		return
	}
	w.seal.close(w.buf)
	_, w.err = w.file.WriteAt(w.buf, w.size)
	w.size += int64(len(w.buf))
	w.buf = w.buf[:0]
}

// checkpoint says the whole state as changes.
func (s *state) checkpoint(w *checkpointer) {
	w.add(Change{Type: Base, Start: s.base})
	for _, r := range s.order {
		w.add(Change{Type: Remember, Start: r, Ino: s.requests[r]})
	}
	s.inodes.Ascend(func(n *Inode) bool {
		w.add(Change{Type: PutInode, Inode: n})
		n.Extents().Each(func(g Segment) bool {
			w.add(n.Segment(g))
			return w.err == nil
		})
		return w.err == nil
	})
	s.dirents.Ascend(func(d *Dirent) bool {
		w.add(Change{Type: PutDirent, Dirent: *d})
		return w.err == nil
	})
}

// Segment is the change that gives n a segment.
func (n *Inode) Segment(g Segment) Change {
	if g.Zero {
		return Change{Type: Zero, Ino: n.Ino, Start: g.Start, End: g.End}
	}
	return Change{Type: Own, Ino: n.Ino, Start: g.Start, End: g.End}
}

// Sync makes every committed frame durable, and removes the data files that
// were discarded before it.
func (u *Upper) Sync() error { return u.syncGarbage() }

// Close releases the files. What was committed and not synced is with the
// kernel.
func (u *Upper) Close() error {
	u.garbage.close()
	return errors.Join(u.journal.close(), u.data.Close(), u.dir.Close())
}

func dataFile(ino tree.Ino, gen uint32) string { return fmt.Sprintf("%x.%x", uint64(ino), gen) }

// OpenData opens the data file of n's private bytes, making it when create is
// set; without create and file the error is fs.ErrNotExist.
func (u *Upper) OpenData(ino tree.Ino, gen uint32, create bool) (*os.File, error) {
	flags := os.O_RDWR
	if create {
		flags |= os.O_CREATE
	}
	f, err := u.data.OpenFile(dataFile(ino, gen), flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open data file: %w", err)
	}
	if create {
		// Only now: a SyncNames that ran before the file was there must not
		// take the note away.
		u.fresh.Store(true)
	}
	return f, nil
}

// RemoveData removes a data file, if there is one, at once. It is for files
// that no committed frame ever gave an owner; all others are for Discard.
func (u *Upper) RemoveData(ino tree.Ino, gen uint32) error {
	if err := u.data.Remove(dataFile(ino, gen)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove data file: %w", err)
	}
	return nil
}

// SyncNames makes the names of data files durable.
func (u *Upper) SyncNames() error {
	u.namesMu.Lock()
	defer u.namesMu.Unlock()
	if !u.fresh.Swap(false) {
		return nil
	}
	if err := syncDir(u.data); err != nil {
		u.journal.fail(fmt.Errorf("sync data directory, outcome unknown until reopened: %w", err))
		return err
	}
	return nil
}

// Fail makes every later Commit and Sync return err: the owner saw a data file
// fail in a way that leaves its content unknown.
func (u *Upper) Fail(err error) { u.journal.fail(err) }

// sweep removes data files that no record owns: what a crash left between the
// journal and the file.
func (u *Upper) sweep() error {
	entries, err := fs.ReadDir(u.data.FS(), ".")
	if err != nil {
		return fmt.Errorf("list data files: %w", err)
	}
	owned := make(map[string]bool, u.inodes.Len())
	u.inodes.Ascend(func(n *Inode) bool {
		if n.Data {
			owned[dataFile(n.Ino, n.Gen)] = true
		}
		return true
	})
	stray := slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return owned[e.Name()] })
	if len(stray) == 0 {
		return nil
	}
	// The frame that took a file's owner away may be with the kernel only.
	if err := u.journal.sync(); err != nil {
		return err
	}
	for _, e := range stray {
		if err := u.data.Remove(e.Name()); err != nil {
			return fmt.Errorf("remove stray data file: %w", err)
		}
	}
	return nil
}

func syncDir(r *os.Root) error {
	d, err := r.Open(".")
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	return errors.Join(unix.Fsync(int(d.Fd())), d.Close())
}
