package importer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

const (
	// smallFile is the size up to which a file is read into memory ahead of the
	// writer. The writer reads larger ones itself, while the host reads ahead.
	smallFile = 1 << 20
	// readAhead bounds the bytes read ahead, a larger file counting as much as
	// a small one can, and so the number of those that are open.
	readAhead = 64 << 20
	// itemCost is what anything counts at least.
	itemCost = 4 << 10
	// queued is how many items may be on their way to the writer; each may hold
	// a directory open.
	queued = 512
)

// item is one inode on its way to the writer, in the order of the numbers of
// directories. Whoever fills it in closes done.
type item struct {
	node   *node
	cost   int64
	done   chan struct{}
	xattrs []tree.Xattr
	data   []tree.Range // nil: no holes
	bytes  []byte       // of a small file
	file   *hostFile    // of a large one, open
	ok     bool         // false: a fault is noted, nothing is to be written
}

// reader opens and reads everything a second time. One goroutine goes through
// the directories in order, several read files, the caller writes.
type reader struct {
	ctx    context.Context
	faults *faults
	ids    idMap
	budget *budget
	order  chan *item // to the writer
	work   chan job   // to those who read files
}

// job is a file to be read, in an open directory.
type job struct {
	in   *dir
	item *item
}

// read writes the tree found by the walk to w. It takes over top. After the
// first fault nothing is read or written any more, but everything is still
// looked at, so that all faults are named.
func read(ctx context.Context, top *dir, root *node, w *layerfmt.Writer, o Options, m *meter, f *faults) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &reader{
		ctx: ctx, faults: f,
		ids:    idMap{uid: root.meta.uid, gid: root.meta.gid},
		budget: newBudget(ctx, readAhead),
		order:  make(chan *item, queued),
		work:   make(chan job, queued),
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(r.order)
		defer close(r.work)
		r.directory(top, root)
		top.release(r.recheck)
	})
	for range o.Workers {
		wg.Go(func() {
			for j := range r.work {
				r.file(j)
			}
		})
	}
	err := r.write(w, m)
	cancel()
	for it := range r.order {
		<-it.done
		it.discard()
	}
	wg.Wait()
	return errors.Join(err, f.err())
}

// directory sends the open directory d and all beneath it on their way. It
// returns early when the import is cancelled.
func (r *reader) directory(d *dir, n *node) {
	it := &item{node: n, done: make(chan struct{}), ok: true}
	close(it.done)
	var err error
	if it.xattrs, err = xattrsOf(d.fd, tree.Dir, r.ids); err != nil {
		r.blame(n, err)
		it.ok = false
	}
	if !r.send(it) {
		return
	}
	for i := range n.children {
		child := &n.children[i]
		switch {
		case child.first != nil || child.meta.kind() == tree.Dir:
		case !r.leaf(d, child):
			return
		}
	}
	for i := range n.children {
		child := &n.children[i]
		if child.meta.kind() != tree.Dir {
			continue
		}
		if r.ctx.Err() != nil {
			return
		}
		if sub := r.enter(d, child); sub != nil {
			r.directory(sub, child)
			sub.release(r.recheck)
		}
	}
}

// enter opens the directory n in d again.
func (r *reader) enter(d *dir, n *node) *dir {
	fd, err := openAt(d.fd, n.name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		r.blame(n, err)
		return nil
	}
	sub := newDir(fd, n)
	if now, err := stat(fd, ""); err != nil || now.identity != n.meta.identity {
		r.blame(n, orChanged(err))
		sub.release(nil)
		return nil
	}
	return sub
}

// errChanged stands for a difference from what the walk saw.
var errChanged = fmt.Errorf("changed: %w", unix.ENOENT)

func orChanged(err error) error {
	if err == nil {
		return errChanged
	}
	return err
}

// recheck compares a directory, all of whose files have been opened, with what
// the walk saw.
func (r *reader) recheck(d *dir) {
	if now, err := stat(d.fd, ""); err != nil || !now.same(d.node.meta) {
		r.blame(d.node, orChanged(err))
	}
}

func (r *reader) blame(n *node, err error) {
	if swapped(err) {
		r.faults.addChanged(n.path())
	} else {
		r.faults.addUnreadable(n.path(), err)
	}
}

// leaf sends anything but a directory on its way.
func (r *reader) leaf(d *dir, n *node) bool {
	it := &item{node: n, cost: itemCost, done: make(chan struct{})}
	if n.meta.kind() == tree.File {
		it.cost = max(itemCost, min(int64(n.meta.size), smallFile))
		if !r.send(it) {
			return false
		}
		r.work <- job{in: d.hold(), item: it}
		return true
	}
	it.ok = r.special(d, it)
	close(it.done)
	return r.send(it)
}

// send puts an item in line for the writer, false when the import is cancelled.
// A file is in line before it is read, so that whoever waits for it waits for
// one that someone has in hand.
func (r *reader) send(it *item) bool {
	if !r.budget.take(it.cost) {
		return false
	}
	r.order <- it
	return true
}

// special looks again at a link, a device, a fifo or a socket.
func (r *reader) special(d *dir, it *item) bool {
	n := it.node
	err := r.specialErr(d, it)
	if err == nil {
		return true
	}
	r.blame(n, err)
	return false
}

func (r *reader) specialErr(d *dir, it *item) error {
	fd, err := openAt(d.fd, it.node.name, unix.O_PATH)
	if err != nil {
		return err
	}
	f := hostFile{fd}
	defer f.close()
	now, err := stat(fd, "")
	if err != nil {
		return err
	}
	if !now.same(it.node.meta) {
		return errChanged
	}
	if it.node.meta.kind() != tree.Symlink {
		it.xattrs, err = xattrsOf(fd, it.node.meta.kind(), r.ids)
	}
	return err
}

// file reads one file into its item.
func (r *reader) file(j job) {
	defer close(j.item.done)
	defer j.in.release(r.recheck)
	if r.ctx.Err() != nil {
		return
	}
	if err := r.fileErr(j.in, j.item); err != nil {
		r.blame(j.item.node, err)
		return
	}
	j.item.ok = true
}

func (r *reader) fileErr(d *dir, it *item) (err error) {
	n := it.node
	fd, err := openAt(d.fd, n.name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	f := hostFile{fd}
	defer func() {
		if it.file == nil {
			f.close()
		}
	}()
	now, err := stat(fd, "")
	if err != nil {
		return err
	}
	if !now.same(n.meta) {
		return errChanged
	}
	if r.faults.any() {
		return nil
	}
	if it.xattrs, err = xattrsOf(fd, tree.File, r.ids); err != nil {
		return err
	}
	if n.meta.sparse() {
		if it.data, err = f.data(n.meta.size); err != nil {
			return err
		}
	}
	if n.meta.size > smallFile {
		// Advice only: the bytes come all the same.
		_ = unix.Fadvise(fd, 0, 0, unix.FADV_SEQUENTIAL)
		_ = unix.Fadvise(fd, 0, smallFile, unix.FADV_WILLNEED)
		it.file = &f
		return nil
	}
	it.bytes, err = readWhole(f, n, it.data)
	return err
}

// readWhole reads a file that is the same before and after. Where data, if not
// nil, has holes, nothing is read.
func readWhole(f hostFile, n *node, data []tree.Range) ([]byte, error) {
	if data == nil {
		data = []tree.Range{{End: n.meta.size}}
	}
	b := make([]byte, n.meta.size)
	for _, r := range data {
		if _, err := f.ReadAt(b[r.Start:r.End], int64(r.Start)); err == io.EOF {
			return nil, errChanged
		} else if err != nil {
			return nil, err
		}
	}
	return b, recheckFile(f, n)
}

func recheckFile(f hostFile, n *node) error {
	now, err := stat(f.fd, "")
	if err != nil {
		return err
	}
	if !now.same(n.meta) {
		return errChanged
	}
	return nil
}

func (it *item) discard() {
	if it.file != nil {
		it.file.close()
		it.file = nil
	}
	it.bytes = nil
}

// write takes the items in order and gives them to w. It stops at w's own
// errors and at cancellation.
func (r *reader) write(w *layerfmt.Writer, m *meter) error {
	for it := range r.order {
		select {
		case <-it.done:
		case <-r.ctx.Done():
			<-it.done
			it.discard()
			return context.Cause(r.ctx)
		}
		err := r.writeItem(w, it, m)
		it.discard()
		r.budget.give(it.cost)
		if err != nil {
			return err
		}
		m.tick()
	}
	return context.Cause(r.ctx)
}

func (r *reader) writeItem(w *layerfmt.Writer, it *item, m *meter) error {
	if !it.ok || r.faults.any() {
		return nil
	}
	n := it.node
	inode := r.inode(it)
	switch n.meta.kind() {
	case tree.Dir:
		m.p.Dirs++
		for i := range n.children {
			child := &n.children[i]
			if child.meta.kind() != tree.Dir {
				m.p.Files++
			}
			err := w.AddDirent(layerfmt.Dirent{Op: layerfmt.Put, Dirent: tree.Dirent{
				Dir: n.ino, Name: child.name, Ino: child.ino, Kind: child.meta.kind(),
			}})
			if err != nil {
				return err
			}
		}
		return w.AddInode(inode)
	case tree.File:
		m.p.Bytes += int64(inode.Size)
		if it.file == nil {
			_, err := w.AddFile(inode, bytes.NewReader(it.bytes), it.data)
			return err
		}
		return r.writeLarge(w, it, inode)
	default:
		return w.AddInode(inode)
	}
}

// writeLarge lets the writer read the file and tells errors of the file from
// errors of the writer.
func (r *reader) writeLarge(w *layerfmt.Writer, it *item, inode tree.Inode) error {
	src := &watched{r: *it.file}
	_, err := w.AddFile(inode, src, it.data)
	if src.err == io.EOF {
		src.err = errChanged
	}
	if src.err == nil && err != nil {
		return err
	}
	if src.err == nil {
		src.err = recheckFile(*it.file, it.node)
	}
	if src.err != nil {
		r.blame(it.node, src.err)
	}
	return nil
}

// watched remembers the error of a reader. It belongs to one goroutine.
type watched struct {
	r   io.ReaderAt
	err error
}

// ReadAt implements io.ReaderAt.
func (w *watched) ReadAt(p []byte, off int64) (int, error) {
	n, err := w.r.ReadAt(p, off)
	if err != nil && n < len(p) {
		w.err = err
	}
	return n, err
}

// inode is the record of an item. Hash and allocation are the writer's to fill.
func (r *reader) inode(it *item) tree.Inode {
	n := it.node
	out := tree.Inode{
		Attr: tree.Attr{
			Ino: n.ino, Kind: n.meta.kind(), Mode: n.meta.mode & 0o7777,
			UID: r.ids.user(n.meta.uid), GID: r.ids.group(n.meta.gid),
			Nlink: n.names, Mtime: n.meta.mtime, Ctime: n.meta.ctime,
		},
		Link: n.link, Xattrs: it.xattrs,
	}
	switch out.Kind {
	case tree.File:
		out.Size = n.meta.size
	case tree.Symlink:
		out.Size = uint64(len(n.link))
	case tree.Char, tree.Block:
		out.Rdev = n.meta.rdev
	case tree.Dir:
		out.Nlink = 2
		for i := range n.children {
			if n.children[i].meta.kind() == tree.Dir {
				out.Nlink++
			}
		}
	}
	return out
}

// budget bounds what is read ahead.
type budget struct {
	ctx  context.Context
	mu   sync.Mutex
	free *sync.Cond
	left int64 // guarded by mu
}

func newBudget(ctx context.Context, size int64) *budget {
	b := &budget{ctx: ctx, left: size}
	b.free = sync.NewCond(&b.mu)
	context.AfterFunc(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.free.Broadcast()
	})
	return b
}

// take waits for n bytes, false when the import is cancelled.
func (b *budget) take(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.left < n && b.ctx.Err() == nil {
		b.free.Wait()
	}
	b.left -= n
	return b.ctx.Err() == nil
}

func (b *budget) give(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left += n
	b.free.Broadcast()
}
