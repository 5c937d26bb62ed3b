// Package importer reads a directory of the host into a base layer.
//
// It goes through the directory twice. The walk lists every directory and notes
// what stat says of every name; then the numbers are given, children of a
// directory consecutively in name order; then the bytes are read, many files at
// once ahead of the one writer, and each file and directory is compared with
// what the walk saw of it. What has changed in between makes the import fail,
// because the layer would show a state that the directory was never in.
//
// Everything is opened by name from the descriptor of its directory, never
// through a symbolic link, and the second time must be the inode it was the
// first time. Owner and group of the imported directory itself become 0; other
// ids stay as they are. Sparse files stay sparse, hard links within the
// directory stay linked, and names and link targets are bytes.
package importer

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"time"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// Options of an import. The zero value is fit for use.
type Options struct {
	// Progress is told how far the import is, never from two goroutines at once.
	Progress func(Progress)
	// Workers read at the same time; 0 is twice the number of processors.
	Workers int
	// Exclude lists absolute paths that are left out with all that is beneath.
	// They are recognised by inode, so that it does not matter by which path the
	// import comes past them.
	Exclude []string
}

// Progress is how far an import is. The totals grow while the walk is under way
// and are final as soon as Files, Dirs or Bytes is not zero.
type Progress struct {
	Files, Dirs, Bytes                int64 // read; Files counts everything but directories
	TotalFiles, TotalDirs, TotalBytes int64 // found
	Done                              bool
}

// Result sums an import up.
type Result struct {
	Files  int64 // names of everything but directories
	Dirs   int64 // with the root
	Bytes  int64 // lengths of all regular files, hard links once
	MaxIno tree.Ino
}

// ChangedError means that the directory changed while it was read. Repeating
// the import when nobody writes to it helps.
type ChangedError struct {
	Paths []string // every path that changed, relative to the directory, sorted
}

func (e *ChangedError) Error() string {
	return "changed while it was imported: " + quoteSome(e.Paths, len(e.Paths))
}

// UnreadableError means that files or directories could not be read.
type UnreadableError struct {
	Paths []string // the first of them, relative to the directory, sorted
	Total int      // how many there are in all
	Err   error    // why the first could not be read
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("cannot read %s: %v", quoteSome(e.Paths, e.Total), e.Err)
}

func (e *UnreadableError) Unwrap() error { return e.Err }

// maxUnreadable is how many paths an UnreadableError names.
const maxUnreadable = 20

func quoteSome(paths []string, total int) string {
	const shown = maxUnreadable
	var b strings.Builder
	for i, p := range paths[:min(len(paths), shown)] {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%q", p)
	}
	if more := total - min(len(paths), shown); more > 0 {
		fmt.Fprintf(&b, " and %d more", more)
	}
	return b.String()
}

// Import writes the directory root to w: its dirents, inodes and content, not
// the end of the pack. On an error w holds part of it and is to be aborted. The
// error is, or joins, a *ChangedError or an *UnreadableError when that is what
// went wrong.
func Import(ctx context.Context, root string, w *layerfmt.Writer, o Options) (Result, error) {
	if o.Workers <= 0 {
		o.Workers = 2 * runtime.GOMAXPROCS(0)
	}
	res, err := importTree(ctx, root, w, o)
	if err != nil {
		return Result{}, fmt.Errorf("import %s: %w", root, err)
	}
	return res, nil
}

func importTree(ctx context.Context, root string, w *layerfmt.Writer, o Options) (Result, error) {
	top, err := openRoot(root)
	if err != nil {
		return Result{}, err
	}
	m := &meter{report: o.Progress}
	faults := &faults{}
	found, err := walk(ctx, top, o, m, faults)
	if err == nil {
		err = faults.err()
	}
	if err != nil {
		return Result{}, errors.Join(err, top.close())
	}
	last := number(found)
	if err := read(ctx, top, found, w, o, m, faults); err != nil {
		return Result{}, err
	}
	m.finish()
	return Result{Files: m.p.Files, Dirs: m.p.Dirs, Bytes: m.p.Bytes, MaxIno: last}, nil
}

// meter counts and reports. It belongs to one goroutine at a time.
type meter struct {
	report func(Progress)
	p      Progress
	told   time.Time
}

// tick reports, though not more often than anyone can look.
func (m *meter) tick() {
	const pause = 100 * time.Millisecond
	if m.report == nil {
		return
	}
	if now := time.Now(); now.Sub(m.told) >= pause {
		m.told = now
		m.report(m.p)
	}
}

func (m *meter) finish() {
	m.p.Done = true
	if m.report != nil {
		m.report(m.p)
	}
}

// faults collects what is wrong with single paths, so that all of them can be
// named at once.
type faults struct {
	mu         sync.Mutex
	changed    map[string]bool  // guarded by mu
	unreadable map[string]error // guarded by mu
}

func (f *faults) addChanged(path string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.changed == nil {
		f.changed = make(map[string]bool)
	}
	f.changed[path] = true
}

func (f *faults) addUnreadable(path string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unreadable == nil {
		f.unreadable = make(map[string]error)
	}
	f.unreadable[path] = err
}

// any reports whether there is something to fail for.
func (f *faults) any() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.changed)+len(f.unreadable) > 0
}

func (f *faults) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	if len(f.unreadable) > 0 {
		paths := sortedKeys(f.unreadable)
		errs = append(errs, &UnreadableError{
			Paths: paths[:min(len(paths), maxUnreadable)], Total: len(paths), Err: f.unreadable[paths[0]],
		})
	}
	if len(f.changed) > 0 {
		errs = append(errs, &ChangedError{Paths: sortedKeys(f.changed)})
	}
	return errors.Join(errs...)
}
