package fusefs

import (
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"

	"ephemeral-sandbox/fs/tree"
)

// notifier is what the queue wants of a go-fuse server.
type notifier interface {
	EntryNotify(parent uint64, name string) fuse.Status
	DeleteNotify(parent, child uint64, name string) fuse.Status
	InodeNotify(node uint64, off, length int64) fuse.Status
}

// notice is one thing the kernel must be told.
type notice struct {
	dir   tree.Ino // of an entry; 0 for an inode alone
	name  string
	child tree.Ino // of an entry that was deleted
	ino   tree.Ino
}

// queue hands notices to the kernel from a goroutine of its own.
type queue struct {
	kernel notifier

	mu     sync.Mutex
	cond   *sync.Cond // any of the below changed
	todo   []notice   // guarded by mu, as all below
	queued uint64     // notices ever added
	told   uint64     // notices the kernel was told of
	closed bool
}

func newQueue(k notifier) *queue {
	q := &queue{kernel: k}
	q.cond = sync.NewCond(&q.mu)
	return q
}

func (q *queue) add(n notice) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.todo = append(q.todo, n)
	q.queued++
	q.cond.Broadcast()
}

// run is the goroutine.
func (q *queue) run() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for len(q.todo) == 0 && !q.closed {
			q.cond.Wait()
		}
		if q.closed {
			return
		}
		batch := q.todo
		q.todo = nil
		q.mu.Unlock()
		q.tell(batch)
		q.mu.Lock()
		q.told += uint64(len(batch))
		q.cond.Broadcast()
	}
}

// tell passes a batch on. What the kernel answers does not matter: it does not
// know the entry or inode, or the connection is gone, and either way it holds
// nothing stale.
//
// The entries come first and then, once each, their directories, whose cached
// listing and attributes the kernel drops with the inode. Telling of an entry
// waits for the directory's lock, and so for every lookup and listing that was
// answered before the change; a listing made after that is fresh, and what the
// older ones left in the cache goes with the inode.
func (q *queue) tell(batch []notice) {
	dirs := map[tree.Ino]bool{}
	for _, n := range batch {
		if n.dir == 0 {
			continue
		}
		if n.child != 0 {
			q.kernel.DeleteNotify(uint64(n.dir), uint64(n.child), n.name)
		} else {
			q.kernel.EntryNotify(uint64(n.dir), n.name)
		}
		dirs[n.dir] = true
	}
	for dir := range dirs {
		q.kernel.InodeNotify(uint64(dir), 0, 0)
	}
	for _, n := range batch {
		if n.ino != 0 && !dirs[n.ino] {
			q.kernel.InodeNotify(uint64(n.ino), 0, 0)
		}
	}
}

// drain returns when the kernel was told of all that was added before.
func (q *queue) drain() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for want := q.queued; q.told < want && !q.closed; {
		q.cond.Wait()
	}
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.cond.Broadcast()
}

// InvalidateEntry makes the kernel forget what it knows of a name in a
// directory: that it is there, what it leads to, that it is absent. The
// directory's listing and attributes go too. It only queues; see Drain.
func (s *Server) InvalidateEntry(parent tree.Ino, name string) {
	s.queue.add(notice{dir: parent, name: name})
}

// InvalidateDeleted is InvalidateEntry for a name that led to ino and is gone
// for good: a process that has the directory as its working directory sees it
// as removed.
func (s *Server) InvalidateDeleted(parent tree.Ino, name string, ino tree.Ino) {
	s.queue.add(notice{dir: parent, name: name, child: ino})
}

// InvalidateInode makes the kernel forget an inode's attributes and its pages,
// or its listing when it is a directory. Mapped pages that the session has
// written are written out first. It only queues; see Drain.
func (s *Server) InvalidateInode(ino tree.Ino) { s.queue.add(notice{ino: ino}) }

// Drain returns when the kernel has acted on everything queued before. It waits
// for requests of the session to end, so the caller must hold nothing that one
// of them may wait for: no lock, and no Freeze of the overlay.
func (s *Server) Drain() { s.queue.drain() }
