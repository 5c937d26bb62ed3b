package overlay

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"
)

func isAbsent(err error) bool { return errors.Is(err, tree.ErrNotExist) }

// Delta tells everything the session changed, at one instant.
func (f *FS) Delta() (*Delta, error) {
	f.mu.Lock()
	snap, lower := f.up.Snapshot(), f.lower
	f.mu.Unlock()

	d := new(Delta)
	replaced := map[tree.Ino]tree.Ino{} // new file -> removed lower file of the same name
	var err error
	snap.Dirents(func(u *upper.Dirent) bool {
		var was tree.Dirent
		if dir := snap.Inode(u.Dir); dir == nil || !dir.New {
			if was, err = lower.Lookup(u.Dir, u.Name); isAbsent(err) {
				was, err = tree.Dirent{}, nil
			}
		}
		if err != nil {
			err = fmt.Errorf("look %q up in %d: %w", u.Name, u.Dir, err)
			return false
		}
		if was.Ino == u.Ino {
			return true
		}
		d.Dirents = append(d.Dirents, DirentChange{Dir: u.Dir, Name: u.Name, Ino: u.Ino, Kind: u.Kind, Was: was.Ino})
		if gone := snap.Inode(was.Ino); u.Ino != 0 && was.Kind == tree.File && gone != nil && gone.Nlink == 0 {
			replaced[u.Ino] = was.Ino
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	snap.Inodes(func(n *upper.Inode) bool {
		if n.Nlink == 0 {
			return true
		}
		var c InodeChange
		if c, err = change(n, lower); err != nil {
			return false
		}
		if c.New && c.Kind == tree.File && c.Lineage == 0 {
			c.Lineage = replaced[n.Ino]
		}
		d.Inodes = append(d.Inodes, c)
		return true
	})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// change compares a record with the lower inode.
func change(n *upper.Inode, lower Lower) (InodeChange, error) {
	c := InodeChange{
		Inode: n.Inode, New: n.New, Data: n.Data, Meta: n.New,
		Lineage: n.Lineage, Prior: n.Prior, LastOp: n.LastOp,
	}
	if n.New {
		return c, nil
	}
	low, err := lower.Inode(n.Ino)
	if err != nil {
		return c, fmt.Errorf("inode %d: %w", n.Ino, err)
	}
	c.Meta = n.Mode != low.Mode || n.UID != low.UID || n.GID != low.GID || n.Rdev != low.Rdev || n.Link != low.Link ||
		!slices.EqualFunc(n.Xattrs, low.Xattrs, func(a, b tree.Xattr) bool {
			return a.Name == b.Name && bytes.Equal(a.Value, b.Value)
		})
	return c, nil
}

// Rebase puts the session on another lower tree and makes e's changes, in one
// journal step: after a crash both have happened or neither, and on an error
// nothing has changed. The caller has frozen FS. What e does not drop stays as
// the session had it: content that still showed through from the old lower tree,
// and differs in the new one, is copied first; link counts are counted anew.
//
// What e drops and the new lower tree does not have in its place goes on without
// a name while it is open, with its content, until the last Release. So does a
// directory, open or not, for it may be the working directory of a process, which
// nobody tells: it stays, empty, until FS is opened again without KeepOrphans.
//
// Data files that are no longer needed go after the next Sync; that they cannot
// be removed is no error, and the next Open is rid of them.
func (f *FS) Rebase(lower Lower, e Edit) error {
	r := rebase{
		f: f, e: e, lower: lower, now: f.now(),
		drop: map[tree.Ino]bool{}, given: map[tree.Ino]bool{},
		orphans: map[tree.Ino]bool{}, held: map[tree.Ino]*file{},
	}
	defer r.unlock()
	for _, ino := range e.DropInodes {
		r.drop[ino] = true
	}
	// Sources may be content of this FS, which is read under its lock: files
	// come first. Nothing refers to them yet, and the freeze keeps what they
	// are made from.
	err := r.writeFiles()
	for _, n := range e.NewInodes {
		r.given[n.Ino] = true
	}
	if err == nil {
		err = r.move()
	}
	if err != nil {
		r.discard()
	}
	return err
}

// move does what is left once the files of the edit are written. Committing the
// frame is the last step that can fail.
func (r *rebase) move() error {
	f := r.f
	if err := r.completeKept(); err != nil {
		return err
	}
	f.mu.Lock()
	for {
		// Whoever comes for a content from here on waits for mu and then sees
		// the new tree; who came before is waited for, and may not have mu then.
		used := r.used()
		if len(used) == 0 {
			break
		}
		f.mu.Unlock()
		for _, ino := range used {
			if err := r.take(ino); err != nil {
				return err
			}
		}
		f.mu.Lock()
	}
	defer f.mu.Unlock()
	r.t = f.begin(Caller{Op: r.e.Op})
	if err := r.stage(); err != nil {
		return err
	}
	if err := r.recount(); err != nil {
		return err
	}
	if err := r.t.commit(); err != nil {
		return err
	}
	f.lower = r.lower
	f.listings.changedAll()
	for _, h := range r.held {
		h.forget()
	}
	for ino := range r.orphans {
		if n := f.up.Inode(ino); n != nil && n.Kind == tree.Dir && n.New && n.Nlink == 0 && !r.referred(n) {
			f.kept[ino] = true
		}
	}
	r.t.removeData()
	return nil
}

// discard gives the space back of data files that a Rebase made which failed.
func (r *rebase) discard() {
	for _, h := range r.held {
		h.forget() // it may have one of them open
	}
	for _, d := range r.made {
		_ = r.f.up.RemoveData(d.Ino, d.Gen) // else the next Open gets it
	}
}

// rebase is one Rebase under way.
type rebase struct {
	f     *FS
	e     Edit
	lower Lower
	now   tree.Time
	drop  map[tree.Ino]bool
	given map[tree.Ino]bool // what e.Files and e.NewInodes put in place
	held  map[tree.Ino]*file

	orphans map[tree.Ino]bool // dropped, and go on without a name

	kept  []*upper.Inode // content completed from the old lower tree, with all its segments
	files []*upper.Inode // content of e.Files
	made  []upper.Unused // data files that no record names before the frame is in

	segments []upper.Change // what was written of kept and of files

	t *txn
}

// used gives the files with a record that something refers to and that are not
// locked yet. The caller holds mu.
func (r *rebase) used() (inos []tree.Ino) {
	add := func(ino tree.Ino) {
		if n := r.f.up.Inode(ino); n != nil && n.Kind == tree.File && r.held[ino] == nil {
			inos = append(inos, ino)
		}
	}
	for ino := range r.f.kept {
		add(ino)
	}
	for _, ino := range r.f.handles.all() {
		if !r.f.kept[ino] {
			add(ino)
		}
	}
	return inos
}

// lock locks the content of ino until the Rebase is over. Nobody else holds two
// while FS is frozen, so that any order will do.
func (r *rebase) lock(ino tree.Ino) *file {
	h := r.f.handles.grab(ino)
	h.mu.Lock()
	r.held[ino] = h
	return h
}

func (r *rebase) unlock() {
	for _, h := range r.held {
		h.mu.Unlock()
		r.f.Release(h.ino)
	}
}

// take locks a file that something refers to. If it is dropped, what it needs to
// go on without a name is decided and done.
func (r *rebase) take(ino tree.Ino) error {
	f := r.f
	h := r.lock(ino)
	f.mu.RLock()
	n := f.up.Inode(ino)
	f.mu.RUnlock()
	if n == nil || !r.drops(n) || r.given[ino] {
		return nil
	}
	stays, err := r.outlives(n)
	if err != nil || !stays {
		return err
	}
	r.orphans[ino] = true
	if n.New {
		return nil
	}
	return r.completeOne(r.nameless(n), h)
}

// drops tells whether the edit drops the record of n.
func (r *rebase) drops(n *upper.Inode) bool { return r.e.DropAll || r.drop[n.Ino] }

// referred tells whether anything but Rebase itself refers to n.
func (r *rebase) referred(n *upper.Inode) bool {
	own := 0
	if r.held[n.Ino] != nil {
		own = 1
	}
	return r.f.kept[n.Ino] || r.f.handles.refs(n.Ino) > own
}

// outlives tells whether n, which the edit drops, goes on without a name.
func (r *rebase) outlives(n *upper.Inode) (bool, error) {
	if r.orphans[n.Ino] {
		return true, nil
	}
	switch referred := r.referred(n); {
	case !referred && (n.Kind != tree.Dir || n.Nlink == 0):
		return false, nil
	case n.Nlink == 0 && r.e.DropAll:
		return true, nil
	}
	_, err := r.lower.Inode(n.Ino)
	if isAbsent(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("inode %d in the new lower tree: %w", n.Ino, err)
	}
	if n.Kind != tree.File || !n.Data {
		return false, nil // the new lower tree answers for it, by number
	}
	names, err := r.lower.Names(n.Ino)
	if err != nil && !isAbsent(err) {
		return false, fmt.Errorf("names of inode %d in the new lower tree: %w", n.Ino, err)
	}
	return len(names) == 0, nil
}

// nameless is n once it has lost its names.
func (r *rebase) nameless(n *upper.Inode) *upper.Inode {
	own := *n
	if n.Nlink != 0 {
		own.Nlink, own.Linkable, own.Ctime = 0, false, r.now
	}
	return &own
}

// writeFiles writes the contents of e.Files to data files of their own.
func (r *rebase) writeFiles() error {
	for i := range r.e.Files {
		fe := &r.e.Files[i]
		if r.given[fe.Ino] {
			return fmt.Errorf("new content for inode %d twice: %w", fe.Ino, tree.ErrInvalid)
		}
		n, err := r.newRecord(fe)
		if err != nil {
			return err
		}
		if err := r.newContent(n, fe); err != nil {
			return err
		}
		r.files = append(r.files, n)
		r.given[n.Ino] = true
	}
	return nil
}

// completeKept writes what kept files lack to their data files.
func (r *rebase) completeKept() error {
	f := r.f
	f.mu.Lock()
	snap := f.up.Snapshot()
	f.mu.Unlock()
	var err error
	snap.Inodes(func(n *upper.Inode) bool {
		if n.Kind == tree.File && !n.New && !r.drops(n) && !r.given[n.Ino] {
			err = r.completeOne(n, nil)
		}
		return err == nil
	})
	return err
}

// completeOne writes what n, which stays, lacks to its data file. h is its
// content if that is locked already.
func (r *rebase) completeOne(n *upper.Inode, h *file) error {
	f := r.f
	old := f.lower // only Rebase changes it
	same, err := sameContent(n.Ino, old, r.lower)
	if err != nil || same {
		return err
	}
	switch _, err := r.lower.Inode(n.Ino); {
	case err != nil && !isAbsent(err):
		return fmt.Errorf("inode %d in the new lower tree: %w", n.Ino, err)
	case err == nil && !n.Data && n.Nlink != 0:
		return nil // its attributes are ours, its content goes along
	}
	if h == nil {
		h = r.lock(n.Ino)
	}
	own := *n
	if own.CopyUp(f.up.NextGen(n.Ino)); !n.Data {
		r.made = append(r.made, upper.Unused{Ino: own.Ino, Gen: own.Gen})
	}
	return r.complete(&content{f: f, fl: h, n: &own, lower: old})
}

// sameContent tells whether ino has the same bytes in both trees, by hash; what
// has no hash is taken to differ.
func sameContent(ino tree.Ino, a, b Lower) (bool, error) {
	in1, err := a.Inode(ino)
	if err != nil {
		return false, fmt.Errorf("inode %d in the old lower tree: %w", ino, err)
	}
	in2, err := b.Inode(ino)
	if isAbsent(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("inode %d in the new lower tree: %w", ino, err)
	}
	return in1.Hash == in2.Hash && in1.Hash != tree.Hash{}, nil
}

// complete copies what shows through from the old lower tree into c's data file.
func (r *rebase) complete(c *content) error {
	n := c.n
	var own []tree.Range
	for off := uint64(0); off < n.Shown; {
		src, end := n.Piece(off)
		end = min(end, n.Shown)
		if src == upper.Beneath {
			got, err := c.copyData(off, end)
			if err != nil {
				return err
			}
			own = append(own, got...)
		}
		off = end
	}
	r.kept = append(r.kept, n)
	r.own(n.Ino, own)
	n.Shown = 0
	return nil
}

// own notes ranges of ino that are private once the frame is in.
func (r *rebase) own(ino tree.Ino, ranges []tree.Range) {
	for _, x := range ranges {
		r.segments = append(r.segments, upper.Change{Type: upper.Own, Ino: ino, Start: x.Start, End: x.End})
	}
}

// copyData writes the lower data in [off, end) to the data file.
func (c *content) copyData(off, end uint64) ([]tree.Range, error) {
	return copyData(c, off, end, func(p []byte, at uint64) error {
		fd, err := c.f.data(c.fl, c.n.Gen, true)
		if err != nil {
			return err
		}
		_, err = fd.WriteAt(p, int64(at))
		return err
	})
}

// copyData gives what src has in [off, end), without its holes, to write in
// pieces, and tells the ranges written.
func copyData(src File, off, end uint64, write func(p []byte, at uint64) error) (done []tree.Range, err error) {
	var buf []byte
	for off < end {
		x, ok := src.Data(off)
		if !ok || x.Start >= end {
			break
		}
		x.Start, x.End = max(x.Start, off), min(x.End, end)
		if x.Start >= x.End {
			return nil, fmt.Errorf("copy content: data after %d is said to end at %d", off, x.End)
		}
		if buf == nil {
			buf = make([]byte, min(end-x.Start, copyPiece))
		}
		x.End = min(x.End, x.Start+uint64(len(buf)))
		p := buf[:x.End-x.Start]
		if n, err := src.ReadAt(p, int64(x.Start)); n < len(p) {
			if err == nil || errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, fmt.Errorf("copy content at %d: %w", x.Start, err)
		}
		if err := write(p, x.Start); err != nil {
			return nil, hostErr(fmt.Sprintf("copy content at %d", x.Start), err)
		}
		if last := len(done) - 1; last >= 0 && done[last].End == x.Start {
			done[last].End = x.End
		} else {
			done = append(done, x)
		}
		off = x.End
	}
	return done, nil
}

// newRecord makes the record that an inode has once fe is its content; only
// what depends on the content is left out.
func (r *rebase) newRecord(fe *FileEdit) (*upper.Inode, error) {
	f := r.f
	f.mu.RLock()
	old := f.up.Inode(fe.Ino)
	f.mu.RUnlock()
	n := new(upper.Inode)
	low, err := r.lower.Inode(fe.Ino)
	switch {
	case err == nil:
		n.Inode = low
	case isAbsent(err):
		n.New = true
	default:
		return nil, fmt.Errorf("inode %d in the new lower tree: %w", fe.Ino, err)
	}
	if old != nil && !r.drops(old) {
		n.Inode, n.Lineage, n.Prior = old.Inode, old.Lineage, old.Prior
	}
	if fe.Attr != nil {
		n.Inode = *fe.Attr
	} else if n.Kind == 0 {
		return nil, fmt.Errorf("new content for inode %d, which has no attributes: %w", fe.Ino, tree.ErrInvalid)
	}
	n.Ino, n.Kind = fe.Ino, tree.File
	n.Data, n.Written, n.Shown, n.LastOp = true, true, 0, fe.Op
	n.Gen = f.nextGen(n.Ino, old)
	n.Hash = tree.Hash{}
	if fe.Lineage != 0 {
		n.Lineage, n.Prior = fe.Lineage, fe.Lineage
	}
	if fe.Attr == nil {
		n.Mtime, n.Ctime = r.now, r.now
	}
	return n, nil
}

// nextGen is a generation for a data file that is not old's, nor one that old
// had.
func (f *FS) nextGen(ino tree.Ino, old *upper.Inode) uint32 {
	gen := f.up.NextGen(ino)
	if old != nil {
		gen = max(gen, old.Gen+1)
	}
	return gen
}

// newContent writes fe's bytes to n's data file, which nothing refers to yet.
func (r *rebase) newContent(n *upper.Inode, fe *FileEdit) error {
	src := fe.Source
	switch {
	case src == nil:
		src = plain(fe.Content)
	case fe.Content != nil:
		return fmt.Errorf("new content for inode %d from two places: %w", n.Ino, tree.ErrInvalid)
	case src.Size() > tree.MaxFileSize:
		return fmt.Errorf("new content for inode %d of %d bytes: %w", n.Ino, src.Size(), tree.ErrTooBig)
	}
	n.Size, n.Alloc = src.Size(), 0
	if _, ok := src.Data(0); !ok {
		return nil // no byte that a data file would have to hold
	}
	r.made = append(r.made, upper.Unused{Ino: n.Ino, Gen: n.Gen})
	fd, err := r.f.up.OpenData(n.Ino, n.Gen, true)
	if err != nil {
		return hostErr(fmt.Sprintf("inode %d", n.Ino), err)
	}
	ranges, err := copyData(src, 0, n.Size, func(p []byte, at uint64) error {
		_, err := fd.WriteAt(p, int64(at))
		return err
	})
	if err = errors.Join(err, fd.Close()); err != nil {
		return fmt.Errorf("new content for inode %d: %w", n.Ino, err)
	}
	for _, x := range ranges {
		n.Alloc += x.End - x.Start
	}
	r.own(n.Ino, ranges)
	return nil
}

// plain is content in memory, all of it data.
type plain []byte

func (p plain) Size() uint64 { return uint64(len(p)) }

func (p plain) ReadAt(b []byte, off int64) (int, error) { return bytes.NewReader(p).ReadAt(b, off) }

func (p plain) Data(off uint64) (tree.Range, bool) {
	return tree.Range{Start: off, End: p.Size()}, off < p.Size()
}

// stage puts together what the edit says, in order.
func (r *rebase) stage() error {
	t, up := r.t, r.f.up
	add := func(c ...upper.Change) { t.changes = append(t.changes, c...) }
	add(upper.Change{Type: upper.Base, Start: r.lower.Commit()})
	var orphans []*upper.Inode
	var err error
	up.Snapshot().Inodes(func(n *upper.Inode) bool {
		if !r.drops(n) {
			return true
		}
		if !r.given[n.Ino] {
			var stays bool
			if stays, err = r.outlives(n); err != nil {
				return false
			}
			if stays {
				r.orphans[n.Ino] = true
				orphans = append(orphans, n)
				return true
			}
		}
		if n.Data {
			t.discard(n)
		}
		if !r.e.DropAll {
			add(upper.Change{Type: upper.DropInode, Ino: n.Ino})
		}
		return true
	})
	if err != nil {
		return err
	}
	if r.e.DropAll {
		add(upper.Change{Type: upper.Reset})
	}
	for _, n := range orphans {
		add(upper.Change{Type: upper.PutInode, Inode: r.nameless(n)})
		if r.e.DropAll {
			n.Extents().Each(func(s upper.Segment) bool {
				add(n.Segment(s))
				return true
			})
		}
	}
	for _, k := range r.e.DropDirents {
		add(upper.Change{Type: upper.DropDirent, Dirent: upper.Dirent{Dirent: tree.Dirent{Dir: k.Dir, Name: k.Name}}})
	}
	for _, n := range r.kept {
		add(upper.Change{Type: upper.PutInode, Inode: n})
		r.f.dirty.add(n.Ino)
	}
	for _, n := range r.files {
		if old := up.Inode(n.Ino); old != nil && old.Data && !r.drops(old) {
			t.discard(old)
		}
		add(upper.Change{Type: upper.PutInode, Inode: n})
		r.f.dirty.add(n.Ino)
	}
	add(r.segments...)
	for _, ni := range r.e.NewInodes {
		n := &upper.Inode{Inode: ni.Inode, LastOp: ni.Op, Data: ni.Kind == tree.File}
		if n.Data {
			n.Gen = r.f.nextGen(n.Ino, up.Inode(n.Ino))
		}
		add(upper.Change{Type: upper.PutInode, Inode: n})
	}
	for _, d := range r.e.Dirents {
		if err := tree.CheckName(d.Name); err != nil {
			return err
		}
		add(upper.Change{Type: upper.PutDirent, Dirent: upper.Dirent{Dirent: d}})
	}
	return nil
}

// recount works out, on a copy of the tables as they are going to be, what
// depends on both trees: link counts, which inodes the lower tree has, and
// which records say no more than it.
func (r *rebase) recount() error {
	after := &FS{lower: r.lower, up: r.f.up.Scratch()}
	if err := after.up.Try(r.t.changes); err != nil {
		return fmt.Errorf("rebase: %w", err)
	}
	// Inodes that names were given to or taken from need a record of their count.
	touched := map[tree.Ino]*upper.Inode{}
	for _, d := range r.e.Dirents {
		inos := []tree.Ino{d.Dir, d.Ino}
		if was, ok, err := r.f.name(d.Dir, d.Name); err != nil && !errors.Is(err, tree.ErrStale) {
			return err
		} else if ok {
			inos = append(inos, was.Ino)
		}
		if was, err := r.lower.Lookup(d.Dir, d.Name); err == nil {
			inos = append(inos, was.Ino)
		} else if !isAbsent(err) {
			return fmt.Errorf("look %q up in %d: %w", d.Name, d.Dir, err)
		}
		for _, ino := range inos {
			if ino == 0 {
				continue
			}
			if n, err := after.record(ino); err == nil {
				touched[ino] = n
			} else if !errors.Is(err, tree.ErrStale) {
				return err
			}
		}
	}
	snap := after.up.Snapshot()
	snap.Inodes(func(n *upper.Inode) bool { touched[n.Ino] = n; return true })
	inos := make([]*upper.Inode, 0, len(touched))
	for _, n := range touched {
		inos = append(inos, n)
	}
	slices.SortFunc(inos, func(a, b *upper.Inode) int { return cmp.Compare(a.Ino, b.Ino) })
	for _, n := range inos {
		if err := r.recountInode(after, n); err != nil {
			return err
		}
	}
	var err error
	snap.Dirents(func(d *upper.Dirent) bool {
		low, ok, e := after.lowerName(d.Dir, d.Name)
		if err = e; err != nil {
			return false
		}
		if ok && low.Ino == d.Ino && low.Kind == d.Kind || !ok && d.Ino == 0 && d.Removed == 0 {
			r.t.changes = append(r.t.changes, upper.Change{Type: upper.DropDirent, Dirent: *d})
		}
		return true
	})
	return err
}

// recountInode puts the record of n that is right above the new lower tree.
func (r *rebase) recountInode(after *FS, n *upper.Inode) error {
	fix := *n
	low, err := r.lower.Inode(n.Ino)
	switch {
	case err == nil:
		if n.New {
			fix.New, fix.Lineage, fix.Prior = false, 0, 0
		}
		if n.Kind == tree.File && !n.Data && n.Nlink != 0 && low.Hash != n.Hash {
			fix.Size, fix.Alloc, fix.Hash, fix.Mtime = low.Size, low.Alloc, low.Hash, low.Mtime
		}
	case isAbsent(err):
		fix.New = true
	default:
		return fmt.Errorf("inode %d in the new lower tree: %w", n.Ino, err)
	}
	if fix.Nlink, err = after.links(&fix); err != nil {
		return err
	}
	switch {
	case fix.Nlink == 0 && fix.New && !r.orphans[n.Ino] && !r.referred(n):
		if n.Data {
			r.t.discard(n)
		}
		r.t.changes = append(r.t.changes, upper.Change{Type: upper.DropInode, Ino: n.Ino})
	case after.up.Inode(n.Ino) == nil && fix.Nlink == n.Nlink:
	case fix.Nlink != n.Nlink || fix.New != n.New || fix.Hash != n.Hash || fix.Size != n.Size || fix.Lineage != n.Lineage:
		r.t.changes = append(r.t.changes, upper.Change{Type: upper.PutInode, Inode: &fix})
	}
	return nil
}

// links counts the names of n, and for a directory its subdirectories.
func (f *FS) links(n *upper.Inode) (uint32, error) {
	names, err := f.namesOf(n.Ino)
	if err != nil {
		return 0, err
	}
	if n.Kind != tree.Dir {
		return uint32(len(names)), nil
	}
	if len(names) == 0 && n.Ino != tree.RootIno {
		return 0, nil
	}
	links := uint32(2)
	err = f.each(n.Ino, "", func(d tree.Dirent) bool {
		if d.Kind == tree.Dir {
			links++
		}
		return true
	})
	return links, err
}
