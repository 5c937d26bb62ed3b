package importer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/fs/tree"
)

// node is one name found by the walk.
type node struct {
	name     string
	parent   *node // nil for the root
	meta     meta
	link     string // target of a symbolic link
	children []node // of a directory, in name order

	ino   tree.Ino
	first *node  // the first name of the same inode, when this is another
	names uint32 // of the inode, counted at its first name
}

// path is the node's path relative to the imported directory.
func (n *node) path() string {
	if n.parent == nil {
		return "."
	}
	var names []string
	for ; n.parent != nil; n = n.parent {
		names = append(names, n.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "/")
}

// walker lists directories on several goroutines. Work is taken from the end,
// so that directories are open only along as many paths as there are workers.
type walker struct {
	exclude map[identity]bool
	faults  *faults

	mu     sync.Mutex
	ready  *sync.Cond
	todo   []errand // guarded by mu
	active int      // guarded by mu; errands being run
	err    error    // guarded by mu; stops the walk
	meter  *meter   // guarded by mu
}

// errand is a directory to be listed, found in an open one.
type errand struct {
	in   *dir
	node *node
}

// walk finds everything in the directory top.
func walk(ctx context.Context, top *dir, o Options, m *meter, f *faults) (*node, error) {
	root := &node{}
	var err error
	if root.meta, err = stat(top.fd, ""); err != nil {
		return nil, err
	}
	w := &walker{exclude: make(map[identity]bool), faults: f, meter: m}
	w.ready = sync.NewCond(&w.mu)
	for _, path := range o.Exclude {
		out, err := stat(unix.AT_FDCWD, path)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "stat", Path: path, Err: err}
		}
		w.exclude[out.identity] = true
	}
	if w.exclude[root.meta.identity] {
		return nil, fmt.Errorf("the directory itself is excluded: %w", tree.ErrInvalid)
	}
	stop := context.AfterFunc(ctx, func() { w.fail(context.Cause(ctx)) })
	defer stop()

	top.node = root
	w.list(top.hold(), root)
	var wg sync.WaitGroup
	for range o.Workers {
		wg.Go(w.run)
	}
	wg.Wait()
	for _, left := range w.todo {
		left.in.release(nil)
	}
	return root, w.err
}

func (w *walker) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
	w.ready.Broadcast()
}

func (w *walker) run() {
	for {
		e, ok := w.take()
		if !ok {
			return
		}
		w.visit(e)
		w.mu.Lock()
		w.active--
		w.ready.Broadcast()
		w.mu.Unlock()
	}
}

func (w *walker) take() (errand, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.todo) == 0 && w.active > 0 && w.err == nil {
		w.ready.Wait()
	}
	if len(w.todo) == 0 || w.err != nil {
		return errand{}, false
	}
	e := w.todo[len(w.todo)-1]
	w.todo = w.todo[:len(w.todo)-1]
	w.active++
	return e, true
}

// blame files an error met at one path.
func (w *walker) blame(path string, err error) {
	if swapped(err) {
		w.faults.addChanged(path)
	} else {
		w.faults.addUnreadable(path, err)
	}
}

func (w *walker) visit(e errand) {
	fd, err := openAt(e.in.fd, e.node.name, unix.O_RDONLY|unix.O_DIRECTORY)
	e.in.release(nil)
	if err != nil {
		w.blame(e.node.path(), err)
		return
	}
	d := newDir(fd, e.node)
	now, err := stat(fd, "")
	switch {
	case err != nil:
		w.blame(e.node.path(), err)
	case !now.same(e.node.meta):
		w.faults.addChanged(e.node.path())
	default:
		w.list(d, e.node)
		return
	}
	d.release(nil)
}

// list reads the open directory d and takes over one hold on it.
func (w *walker) list(d *dir, n *node) {
	defer d.release(nil)
	names, err := d.names()
	if err != nil {
		w.blame(n.path(), err)
		return
	}
	n.children = make([]node, 0, len(names))
	var files, dirs, bytes int64
	for _, name := range names {
		child := node{name: name, parent: n}
		keep, err := w.look(d, &child)
		if err != nil {
			w.blame(child.path(), err)
			continue
		}
		if !keep {
			continue
		}
		switch child.meta.kind() {
		case tree.Dir:
			dirs++
		case tree.File:
			files++
			bytes += int64(child.meta.size)
		default:
			files++
		}
		n.children = append(n.children, child)
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	for i := len(n.children) - 1; i >= 0; i-- {
		if child := &n.children[i]; child.meta.kind() == tree.Dir {
			w.todo = append(w.todo, errand{in: d.hold(), node: child})
		}
	}
	w.meter.p.TotalFiles += files
	w.meter.p.TotalDirs += dirs
	w.meter.p.TotalBytes += bytes
	if n.parent == nil {
		w.meter.p.TotalDirs++
	}
	w.meter.tick()
	w.ready.Broadcast()
}

// look fills in what is to be known of one name. keep is false for what is
// excluded.
func (w *walker) look(d *dir, n *node) (keep bool, err error) {
	if n.meta, err = stat(d.fd, n.name); err != nil {
		return false, err
	}
	if w.exclude[n.meta.identity] {
		return false, nil
	}
	if err := tree.CheckName(n.name); err != nil {
		return false, err
	}
	switch n.meta.kind() {
	case 0:
		return false, fmt.Errorf("mode %#o is of no known type: %w", n.meta.mode, tree.ErrNotSup)
	case tree.File:
		if n.meta.size > tree.MaxFileSize {
			return false, fmt.Errorf("%d bytes long: %w", n.meta.size, tree.ErrTooBig)
		}
	case tree.Symlink:
		n.link, err = readlink(d.fd, n.name)
	}
	return err == nil, err
}

// number gives every inode its number and counts its names: directories before
// what is beneath them, the children of each consecutively in name order, save
// those whose inode has come up before. It returns the highest number.
func number(root *node) tree.Ino {
	last := tree.RootIno
	root.ino = last
	linked := make(map[identity]*node)
	var children func(dir *node)
	children = func(dir *node) {
		for i := range dir.children {
			n := &dir.children[i]
			if n.meta.kind() != tree.Dir && n.meta.nlink > 1 {
				if n.first = linked[n.meta.identity]; n.first != nil {
					n.ino = n.first.ino
					n.first.names++
					continue
				}
				linked[n.meta.identity] = n
			}
			last++
			n.ino, n.names = last, 1
		}
		for i := range dir.children {
			if n := &dir.children[i]; n.meta.kind() == tree.Dir {
				children(n)
			}
		}
	}
	children(root)
	return last
}
