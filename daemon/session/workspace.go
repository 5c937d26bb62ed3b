// Package session is one agent's workspace: a private tree over a leased
// commit, the processes that run in it, and its way back into the history.
//
// Words. A Workspace is the tree without processes: an overlay over a leased
// stack, the table of operations, and the owners of the lines that were
// written. A Session is a Workspace with a holder, a mounted view, commands and
// an access record. A sessionless file write uses a Workspace that lives for
// one operation, so both go through the same gate.
//
// Promises. What an operation wrote is in the upper before it returns. Publish
// makes one layer of everything, or changes nothing. Each changed line is
// charged to the operation that wrote it.
//
// Lock order: Session.life, then Workspace.gate, then the overlay's freeze, then
// Session.mu, then Workspace.mu, then lineOwners.mu. The overlay calls settle
// with an inode's lock held, so settle takes only the last two. While the kernel
// is notified at most life and gate are held, which no request waits for.
package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"ephemeral-sandbox/daemon/telemetry"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// History is what a workspace asks of the sandbox's layers and commit log.
type History interface {
	LeaseHead() (Lease, error)
	Lease(commit uint64) (Lease, error)
	// Seal writes a layer and makes its bytes durable, under no lock.
	Seal(build func(*layerfmt.Writer) error) (Sealed, error)
	// Advance appends the commit after parent; won is false when the head is
	// another one by now.
	Advance(parent uint64, l Sealed, m Meta) (c Commit, won bool, err error)
	AllocInos(n uint64) (first tree.Ino, err error)
}

// Lease pins a commit's layers until it is released.
type Lease interface {
	Stack() *stack.Stack
	Release()
}

// Sealed is a layer on disk that no commit names yet.
type Sealed interface{ Discard() error }

// Meta is what the author of a commit says of it.
type Meta struct {
	Session, Operation, RequestID, Message string
	Time                                   time.Time
	Merged                                 []string
	Counts                                 map[string]int64
}

// Commit is the answer of a won Advance.
type Commit struct {
	Number      uint64
	StoredBytes int64
}

// Invalidator tells the kernel that names or inodes of a mounted view changed
// other than through it. The first two only queue; Drain returns when the
// kernel knows of everything queued before.
type Invalidator interface {
	InvalidateEntry(parent tree.Ino, name string)
	InvalidateInode(ino tree.Ino)
	Drain()
}

// Options are what every workspace of a sandbox shares.
type Options struct {
	History History
	Trace   *telemetry.Store
	Quota   overlay.Quota
	Clock   func() time.Time // nil is time.Now
}

// Workspace is a private tree over a leased commit.
type Workspace struct {
	id   string // session id; empty for a sessionless operation
	dir  string
	opts Options

	fs     *overlay.FS
	ops    *opTable
	who    owner
	lines  *lineOwners
	tables *ownerTables
	inos   inoBlock

	gate   sync.Mutex      // one publication or refresh at a time
	closed bool            // guarded by gate
	ending context.Context // done when the workspace is about to be closed
	end    context.CancelFunc

	mu    sync.Mutex
	lease Lease       // guarded by mu
	view  Invalidator // guarded by mu; nil while nothing is mounted
}

// OpenWorkspace opens the tree kept in dir, or begins one on the head.
func OpenWorkspace(dir, id string, o Options) (*Workspace, error) {
	if o.Clock == nil {
		o.Clock = time.Now
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open workspace: %w", err)
	}
	w := &Workspace{id: id, dir: dir, opts: o, tables: newOwnerTables(), inos: inoBlock{history: o.History, size: inosPerBlock}}
	if id == "" {
		w.inos.size = inosPerOperation
	}
	w.ending, w.end = context.WithCancel(context.Background())
	var err error
	defer func() {
		if err != nil {
			w.abandon()
		}
	}()
	if w.lease, err = leaseFor(filepath.Join(dir, "upper"), o.History); err != nil {
		return nil, err
	}
	if w.ops, err = openOps(filepath.Join(dir, "operations")); err != nil {
		return nil, err
	}
	w.who = owner{session: id, ops: w.ops}
	if w.lines, err = openLines(filepath.Join(dir, "owners"), w.lease.Stack().Commit()); err != nil {
		return nil, err
	}
	w.fs, err = overlay.Open(overlay.Options{
		Dir:    filepath.Join(dir, "upper"),
		Lower:  w.lease.Stack(),
		NewIno: w.inos.next,
		Quota:  o.Quota,
		Clock:  o.Clock,
		Hooks:  overlay.Hooks{Settle: w.settle},
		// A restarted daemon may serve the same mount again, where files that
		// have lost their names are still open.
		KeepOrphans: id != "",
	})
	if err != nil {
		return nil, fmt.Errorf("open workspace %s: %w", id, err)
	}
	if err = w.ops.reserve(w.fs.MaxOp()); err != nil {
		return nil, errors.Join(err, w.fs.Close())
	}
	return w, nil
}

// leaseFor leases the commit that the journal in dir stands on, or the head
// where there is no journal yet.
func leaseFor(dir string, h History) (Lease, error) {
	commit, ok, err := overlay.PeekBase(dir)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the base of a workspace: %w", err)
	case ok:
		return h.Lease(commit)
	}
	return h.LeaseHead()
}

func (w *Workspace) abandon() {
	if w.ops != nil {
		_ = w.ops.close() // only read so far
	}
	if w.lease != nil {
		w.lease.Release()
	}
}

// ID is the session id, empty for the workspace of a sessionless operation.
func (w *Workspace) ID() string { return w.id }

// FS is the private tree.
func (w *Workspace) FS() *overlay.FS { return w.fs }

// Base is the number of the commit the workspace stands on.
func (w *Workspace) Base() uint64 { return w.base().Stack().Commit() }

func (w *Workspace) base() Lease {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lease
}

// swapBase puts the workspace on another leased commit and lets go of the old.
func (w *Workspace) swapBase(l Lease) {
	w.mu.Lock()
	old := w.lease
	w.lease = l
	w.mu.Unlock()
	old.Release()
}

// Begin numbers an operation. The same ID keeps its number.
func (w *Workspace) Begin(op Operation) (Operation, error) {
	if op.Time.IsZero() {
		op.Time = w.opts.Clock()
	}
	return w.ops.add(op)
}

// OperationByID looks up an operation that was begun.
func (w *Workspace) OperationByID(id string) (Operation, bool) { return w.ops.find(id) }

// Exclusive runs f while no other Exclusive, publication or refresh runs: what
// f reads is what it writes upon, as far as the API's own operations go.
func (w *Workspace) Exclusive(f func() error) error {
	leave, err := w.enterGate()
	if err != nil {
		return err
	}
	defer leave()
	return f()
}

// enterGate waits for its turn; a workspace that has been closed meanwhile lets
// nobody in.
func (w *Workspace) enterGate() (leave func(), err error) {
	w.gate.Lock()
	if w.closed || w.ending.Err() != nil {
		w.gate.Unlock()
		return nil, ErrEnding
	}
	return w.gate.Unlock, nil
}

// working is ctx, ended also when the workspace is.
func (w *Workspace) working(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(w.ending, func() { cancel(ErrEnding) })
	return ctx, func() {
		unhook()
		cancel(nil)
	}
}

// Close waits for a publication or refresh under way and lets go of the tree;
// what is in it stays on disk.
func (w *Workspace) Close() error {
	w.gate.Lock()
	defer w.gate.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	w.end()
	err := errors.Join(w.fs.Close(), w.ops.close())
	w.base().Release()
	return err
}

// notify makes the kernel forget what changed other than through it, and
// returns when it has: who is told of the change sees it. Nothing may be held
// that a request of the session waits for.
func (w *Workspace) notify(entries []overlay.Key, inos []tree.Ino) {
	w.mu.Lock()
	v := w.view
	w.mu.Unlock()
	if v == nil {
		return
	}
	for _, e := range entries {
		v.InvalidateEntry(e.Dir, e.Name)
	}
	for _, ino := range inos {
		v.InvalidateInode(ino)
	}
	v.Drain()
}

func (w *Workspace) span(ctx context.Context, name string) (context.Context, *telemetry.Span) {
	return w.opts.Trace.Start(ctx, name)
}

// inoBlock hands out inode numbers from blocks that the store has set aside,
// so that creating a file seldom waits for the disk.
type inoBlock struct {
	history History
	size    uint64 // of a block

	mu        sync.Mutex
	free, end tree.Ino // guarded by mu
}

// Blocks are small, since what a workspace leaves over is never used again; a
// sessionless operation makes a file and perhaps its directories.
const (
	inosPerBlock     = 1024
	inosPerOperation = 8
)

func (b *inoBlock) next() (tree.Ino, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.free == b.end {
		first, err := b.history.AllocInos(b.size)
		if err != nil {
			return 0, fmt.Errorf("inode numbers: %w", err)
		}
		b.free, b.end = first, first+tree.Ino(b.size)
	}
	ino := b.free
	b.free++
	return ino, nil
}
