package session

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"

	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// Tree is a tree that files can be looked up and read in: a commit's stack, or
// a workspace.
type Tree interface {
	Lookup(dir tree.Ino, name string) (tree.Dirent, error)
	Inode(ino tree.Ino) (tree.Inode, error)
	Data(ino tree.Ino) (overlay.File, error)
	// Names gives the names of dir behind after, in byte order.
	Names(dir tree.Ino, after string, fn func(tree.Dirent) bool) error
}

// PathError says which part of a path is wrong.
type PathError struct {
	Path   string // as it was given
	Reason string // why it cannot be followed, and what to do
	Err    error  // a sentinel of fs/tree
}

func (e *PathError) Error() string { return fmt.Sprintf("path %q: %s", e.Path, e.Reason) }

func (e *PathError) Unwrap() error { return e.Err }

// Walk follows a path from the root of t. No symbolic link is followed: a link
// inside a workspace may point anywhere, and what the caller meant is then a
// guess.
func Walk(t Tree, p string) (tree.Inode, error) {
	names, err := tree.SplitPath(p)
	if err != nil {
		return tree.Inode{}, &PathError{p, "a part of it is not a name (\"..\" is not allowed): give a path inside the workspace", tree.ErrInvalid}
	}
	n, err := t.Inode(tree.RootIno)
	for i, name := range names {
		if err != nil {
			return tree.Inode{}, err
		}
		at := path.Join(names[:i]...)
		switch n.Kind {
		case tree.Dir:
		case tree.Symlink:
			return tree.Inode{}, &PathError{p, fmt.Sprintf("%q is a symbolic link to %q, which is not followed: give the path it leads to", at, n.Link), tree.ErrInvalid}
		default:
			return tree.Inode{}, &PathError{p, fmt.Sprintf("%q is a %s, not a directory", at, n.Kind), tree.ErrNotDir}
		}
		var d tree.Dirent
		if d, err = t.Lookup(n.Ino, name); errors.Is(err, tree.ErrNotExist) {
			return tree.Inode{}, &PathError{p, fmt.Sprintf("%q does not exist", path.Join(names[:i+1]...)), tree.ErrNotExist}
		}
		if err == nil {
			n, err = t.Inode(d.Ino)
		}
	}
	return n, err
}

// MaxRead is the size in bytes of the largest file that is read whole.
const MaxRead = 64 << 20

// ReadFile gives a regular file's record and content, of at most MaxRead bytes.
func ReadFile(t Tree, p string) (tree.Inode, []byte, error) {
	n, err := Walk(t, p)
	if err != nil {
		return n, nil, err
	}
	if n.Kind != tree.File {
		return n, nil, notRegular(p, n)
	}
	if n.Size > MaxRead {
		return n, nil, &PathError{p, fmt.Sprintf("it has %d bytes, and file operations take at most %d: read it with a command", n.Size, MaxRead), tree.ErrTooBig}
	}
	f, err := t.Data(n.Ino)
	if err != nil {
		return n, nil, fmt.Errorf("read %q: %w", p, err)
	}
	b, err := readAll(f)
	if err != nil {
		return n, nil, fmt.Errorf("read %q: %w", p, err)
	}
	return n, b, nil
}

func notRegular(p string, n tree.Inode) error {
	err := tree.ErrInvalid
	if n.Kind == tree.Dir {
		err = tree.ErrIsDir
	}
	return &PathError{p, fmt.Sprintf("it is a %s, not a regular file", n.Kind), err}
}

// AtCommit shows a commit as a Tree.
func AtCommit(l Lease) Tree { return commitTree{stackView{l.Stack()}} }

type commitTree struct{ stackView }

func (t commitTree) Data(ino tree.Ino) (overlay.File, error) { return t.Open(ino) }

func (t commitTree) Names(dir tree.Ino, after string, fn func(tree.Dirent) bool) error {
	from := after
	if after != "" {
		from = after + "\x00" // the least name behind it
	}
	return t.ReadDir(dir, from, fn)
}

// Tree shows the workspace, and notes what op reads through it.
func (w *Workspace) Tree(op tree.Op, note Noter) Tree { return liveTree{w.fs, op, note} }

// Noter is an access record, as the file operations use it.
type Noter interface {
	Note(op tree.Op, k access.Kind, ino, dir tree.Ino, name string)
}

// Unrecorded is the Noter of a workspace without an access record.
type Unrecorded struct{}

// Note does nothing.
func (Unrecorded) Note(tree.Op, access.Kind, tree.Ino, tree.Ino, string) {}

// Record is the session's access record.
func (s *Session) Record() *access.Recorder { return s.record }

type liveTree struct {
	fs   *overlay.FS
	op   tree.Op
	note Noter
}

func (t liveTree) Lookup(dir tree.Ino, name string) (tree.Dirent, error) {
	a, err := t.fs.Lookup(dir, name)
	if errors.Is(err, tree.ErrNotExist) {
		t.note.Note(t.op, access.Absent, 0, dir, name)
	}
	if err != nil {
		return tree.Dirent{}, err
	}
	t.note.Note(t.op, access.Lookup, a.Ino, dir, name)
	return tree.Dirent{Dir: dir, Name: name, Ino: a.Ino, Kind: a.Kind}, nil
}

func (t liveTree) Inode(ino tree.Ino) (tree.Inode, error) { return t.fs.Inode(ino) }

func (t liveTree) Data(ino tree.Ino) (overlay.File, error) {
	t.note.Note(t.op, access.Read, ino, 0, "")
	return t.fs.Data(ino)
}

func (t liveTree) Names(dir tree.Ino, after string, fn func(tree.Dirent) bool) error {
	t.note.Note(t.op, access.List, dir, 0, "")
	return t.fs.ReadDir(dir, 0, func(d tree.Dirent, _ uint64) bool {
		return d.Name <= after || fn(d)
	})
}

// WriteFile sets a file's whole content, making parent directories as needed,
// and tells whether it made the file. An existing file keeps its mode; other
// readers see the old content or the new, never a part.
func (w *Workspace) WriteFile(op Operation, note Noter, p string, data []byte) (created bool, err error) {
	names, err := tree.SplitPath(p)
	if err != nil || len(names) == 0 {
		return false, &PathError{p, "it must name a file inside the workspace", tree.ErrInvalid}
	}
	c := overlay.Caller{Op: op.Number}
	t := w.Tree(op.Number, note)
	for i := 1; i < len(names); i++ {
		dir := path.Join(names[:i]...)
		n, err := Walk(t, dir)
		switch {
		case errors.Is(err, tree.ErrNotExist):
			if err := w.mkdir(c, note, path.Dir(dir), names[i-1]); err != nil {
				return false, err
			}
		case err != nil:
			return false, err
		case n.Kind == tree.Symlink:
			_, err := Walk(t, p) // for its words
			return false, err
		case n.Kind != tree.Dir:
			return false, &PathError{p, fmt.Sprintf("%q is a %s, not a directory", dir, n.Kind), tree.ErrNotDir}
		}
	}
	name := names[len(names)-1]
	dir, err := Walk(t, path.Join(names[:len(names)-1]...))
	if err != nil {
		return false, err
	}
	old, err := Walk(t, p)
	switch {
	case errors.Is(err, tree.ErrNotExist):
		return true, w.replace(c, note, dir.Ino, name, 0o644, nil, data)
	case err != nil:
		return false, err
	case old.Kind != tree.File:
		return false, notRegular(p, old)
	case w.holds(old, data):
		return false, nil
	case old.Nlink > 1:
		// Its other names must see the new content too.
		return false, w.overwrite(c, note, old.Ino, data)
	}
	return false, w.replace(c, note, dir.Ino, name, old.Mode, &old, data)
}

// holds tells whether a file's content is data already: writing it again would
// be a change of its times alone.
func (w *Workspace) holds(n tree.Inode, data []byte) bool {
	if n.Size != uint64(len(data)) {
		return false
	}
	f, err := w.fs.Data(n.Ino)
	if err != nil {
		return false
	}
	b, err := readAll(f)
	return err == nil && bytes.Equal(b, data)
}

func (w *Workspace) mkdir(c overlay.Caller, note Noter, parent, name string) error {
	dir, err := Walk(w.Tree(c.Op, Unrecorded{}), parent)
	if err != nil {
		return err
	}
	a, err := w.fs.Mkdir(c, dir.Ino, name, 0o755)
	if err != nil {
		return fmt.Errorf("make directory %q: %w", name, err)
	}
	note.Note(c.Op, access.Create, a.Ino, dir.Ino, name)
	w.notify([]overlay.Key{{Dir: dir.Ino, Name: name}}, []tree.Ino{dir.Ino})
	return nil
}

// replace writes data into an inode of its own and puts it into place at once.
func (w *Workspace) replace(c overlay.Caller, note Noter, dir tree.Ino, name string, mode uint32, old *tree.Inode, data []byte) error {
	a, err := w.fs.Tmpfile(c, dir, mode)
	if err != nil {
		return fmt.Errorf("write %q: %w", name, err)
	}
	defer w.fs.Release(a.Ino)
	if err := writeAll(w.fs, c, a.Ino, data); err != nil {
		return fmt.Errorf("write %q: %w", name, err)
	}
	kind, stale := access.Create, []tree.Ino{dir}
	if old != nil {
		kind, stale = access.Write, append(stale, old.Ino)
		for _, x := range old.Xattrs {
			if err := w.fs.SetXattr(c, a.Ino, x.Name, x.Value, 0); err != nil {
				return fmt.Errorf("write %q: keep attribute %s: %w", name, x.Name, err)
			}
		}
		if _, err := w.fs.SetAttr(c, a.Ino, overlay.SetAttr{Mode: &old.Mode, UID: &old.UID, GID: &old.GID}); err != nil {
			return fmt.Errorf("write %q: keep owner and mode: %w", name, err)
		}
	}
	if err := w.fs.Replace(c, a.Ino, dir, name); err != nil {
		return fmt.Errorf("write %q: %w", name, err)
	}
	note.Note(c.Op, kind, a.Ino, dir, name)
	w.notify([]overlay.Key{{Dir: dir, Name: name}}, stale)
	return nil
}

func (w *Workspace) overwrite(c overlay.Caller, note Noter, ino tree.Ino, data []byte) error {
	if err := w.fs.Acquire(ino); err != nil {
		return err
	}
	defer w.fs.Release(ino)
	if err := writeAll(w.fs, c, ino, data); err != nil {
		return err
	}
	size := uint64(len(data))
	if _, err := w.fs.SetAttr(c, ino, overlay.SetAttr{Size: &size}); err != nil {
		return err
	}
	note.Note(c.Op, access.Write, ino, 0, "")
	w.notify(nil, []tree.Ino{ino})
	return nil
}

func writeAll(f *overlay.FS, c overlay.Caller, ino tree.Ino, data []byte) error {
	for off := 0; off < len(data); {
		n, err := f.WriteAt(c, ino, data[off:], uint64(off))
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrShortWrite
		}
		off += n
	}
	return nil
}
