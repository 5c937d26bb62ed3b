package overlay_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// node is an inode of the model.
type node struct {
	tree.Inode
	data    []byte
	names   map[string]*node // of a directory
	lastOp  tree.Op
	written bool // since lastOp was set by making the file
	changed bool // bytes differ in origin from the lower tree
	handles int  // opens
}

func (n *node) GoString() string { return fmt.Sprintf("%v %d of %d bytes", n.Kind, n.Ino, n.Size) }

// model is a plain POSIX tree: what an overlay must look like from outside.
type model struct {
	root *node
	now  tree.Time
}

func newDir(ino tree.Ino) *node {
	n := &node{names: map[string]*node{}}
	n.Ino, n.Kind, n.Mode, n.Nlink = ino, tree.Dir, 0o755, 2
	return n
}

// walk visits every name, directories before what they hold.
func (m *model) walk(fn func(dir *node, name string, n *node)) {
	var visit func(d *node)
	visit = func(d *node) {
		for _, name := range slices.Sorted(maps.Keys(d.names)) {
			n := d.names[name]
			fn(d, name, n)
			if n.Kind == tree.Dir {
				visit(n)
			}
		}
	}
	visit(m.root)
}

// inodes gives every inode with a name, once.
func (m *model) inodes() map[tree.Ino]*node {
	all := map[tree.Ino]*node{m.root.Ino: m.root}
	m.walk(func(_ *node, _ string, n *node) { all[n.Ino] = n })
	return all
}

func (m *model) parentOf(d *node) *node {
	found := m.root
	m.walk(func(dir *node, _ string, n *node) {
		if n == d {
			found = dir
		}
	})
	return found
}

func (m *model) within(d, top *node) bool {
	for ; d != top; d = m.parentOf(d) {
		if d == m.root {
			return false
		}
	}
	return true
}

func (m *model) stamp(dirs ...*node) {
	for _, d := range dirs {
		d.Mtime, d.Ctime = m.now, m.now
	}
}

// add gives a new inode a name; its number is filled in by the caller.
func (m *model) add(c overlay.Caller, dir *node, name string, kind tree.Kind, mode uint32) (*node, error) {
	if dir.Kind != tree.Dir {
		return nil, tree.ErrNotDir
	}
	if dir.names[name] != nil {
		return nil, tree.ErrExist
	}
	n := &node{lastOp: c.Op}
	n.Kind, n.Mode, n.UID, n.GID, n.Nlink = kind, mode, c.UID, c.GID, 1
	if dir.Mode&0o2000 != 0 {
		n.GID = dir.GID
		if kind == tree.Dir {
			n.Mode |= 0o2000
		}
	}
	n.Mtime, n.Ctime = m.now, m.now
	if kind == tree.Dir {
		n.names = map[string]*node{}
		n.Nlink = 2
		dir.Nlink++
	}
	n.changed = true
	dir.names[name] = n
	m.stamp(dir)
	return n, nil
}

func (m *model) link(n, dir *node, name string) error {
	switch {
	case dir.Kind != tree.Dir:
		return tree.ErrNotDir
	case dir.names[name] != nil:
		return tree.ErrExist
	case n.Kind == tree.Dir:
		return tree.ErrPerm
	}
	dir.names[name] = n
	n.Nlink++
	n.Ctime = m.now
	m.stamp(dir)
	return nil
}

// replace gives n, which has no name, the name of what is there.
func (m *model) replace(n, dir *node, name string) error {
	if dir.Kind != tree.Dir {
		return tree.ErrNotDir
	}
	if old := dir.names[name]; old != nil {
		if old.Kind == tree.Dir {
			return tree.ErrIsDir
		}
		m.lose(old)
		delete(dir.names, name)
	}
	return m.link(n, dir, name)
}

func (m *model) lose(n *node) {
	n.Ctime = m.now
	if n.Kind == tree.Dir {
		n.Nlink = 0
	} else {
		n.Nlink--
	}
}

func (m *model) unlink(dir *node, name string) error {
	if dir.Kind != tree.Dir {
		return tree.ErrNotDir
	}
	n := dir.names[name]
	switch {
	case n == nil:
		return tree.ErrNotExist
	case n.Kind == tree.Dir:
		return tree.ErrIsDir
	}
	delete(dir.names, name)
	m.lose(n)
	m.stamp(dir)
	return nil
}

func (m *model) rmdir(dir *node, name string) error {
	if dir.Kind != tree.Dir {
		return tree.ErrNotDir
	}
	n := dir.names[name]
	switch {
	case n == nil:
		return tree.ErrNotExist
	case n.Kind != tree.Dir:
		return tree.ErrNotDir
	case len(n.names) > 0:
		return tree.ErrNotEmpty
	}
	delete(dir.names, name)
	m.lose(n)
	dir.Nlink--
	m.stamp(dir)
	return nil
}

func (m *model) rename(d1 *node, n1 string, d2 *node, n2 string, flags uint32) error {
	if d1.Kind != tree.Dir || d2.Kind != tree.Dir {
		return tree.ErrNotDir
	}
	src, dst := d1.names[n1], d2.names[n2]
	switch {
	case src == nil:
		return tree.ErrNotExist
	case dst != nil && flags == overlay.RenameNoReplace:
		return tree.ErrExist
	case dst == nil && flags == overlay.RenameExchange:
		return tree.ErrNotExist
	case src.Kind == tree.Dir && m.within(d2, src):
		return tree.ErrInvalid
	case src == dst:
		return nil
	case flags == overlay.RenameExchange && dst.Kind == tree.Dir && m.within(d1, dst):
		return tree.ErrInvalid
	}
	count := func(n *node, from, to *node) {
		if n.Kind == tree.Dir {
			from.Nlink--
			to.Nlink++
		}
		n.Ctime = m.now
	}
	if flags == overlay.RenameExchange {
		d1.names[n1], d2.names[n2] = dst, src
		count(src, d1, d2)
		count(dst, d2, d1)
		m.stamp(d1, d2)
		return nil
	}
	if dst != nil {
		switch {
		case src.Kind == tree.Dir && dst.Kind != tree.Dir:
			return tree.ErrNotDir
		case src.Kind != tree.Dir && dst.Kind == tree.Dir:
			return tree.ErrIsDir
		case len(dst.names) > 0:
			return tree.ErrNotEmpty
		}
		if dst.Kind == tree.Dir {
			d2.Nlink--
		}
		m.lose(dst)
	}
	delete(d1.names, n1)
	d2.names[n2] = src
	count(src, d1, d2)
	m.stamp(d1, d2)
	return nil
}

// wrote books a change of n's bytes.
func (m *model) wrote(c overlay.Caller, n *node) {
	n.Mtime, n.Ctime = m.now, m.now
	n.Size = uint64(len(n.data))
	n.lastOp, n.written, n.changed = c.Op, true, true
	m.kill(c, n)
}

func (m *model) kill(c overlay.Caller, n *node) {
	if c.UID == 0 && !c.KillPriv {
		return
	}
	n.Mode &^= 0o4000
	if n.Mode&0o010 != 0 {
		n.Mode &^= 0o2000
	}
	n.Xattrs = slices.DeleteFunc(slices.Clone(n.Xattrs), func(x tree.Xattr) bool { return x.Name == "security.capability" })
}

func (m *model) resize(n *node, size uint64) {
	if size <= uint64(len(n.data)) {
		n.data = n.data[:size:size]
		return
	}
	n.data = append(n.data, make([]byte, size-uint64(len(n.data)))...)
}

func (m *model) write(c overlay.Caller, n *node, p []byte, off uint64) {
	if end := off + uint64(len(p)); end > uint64(len(n.data)) {
		m.resize(n, end)
	}
	n.data = slices.Clone(n.data)
	copy(n.data[off:], p)
	m.wrote(c, n)
}

// lower is the model frozen: a lower tree in memory, as fs/stack would give it.
type lower struct {
	commit  uint64
	names   map[tree.Ino]map[string]tree.Dirent
	inodes  map[tree.Ino]tree.Inode
	content map[tree.Ino][]byte
}

var _ overlay.Lower = (*lower)(nil)

// freeze copies m into a lower tree.
func (m *model) freeze(commit uint64) *lower {
	l := &lower{
		commit: commit, names: map[tree.Ino]map[string]tree.Dirent{},
		inodes: map[tree.Ino]tree.Inode{}, content: map[tree.Ino][]byte{},
	}
	for ino, n := range m.inodes() {
		l.put(n.Inode, n.data)
		if n.Kind == tree.Dir {
			l.names[ino] = map[string]tree.Dirent{}
		}
	}
	m.walk(func(dir *node, name string, n *node) {
		l.names[dir.Ino][name] = tree.Dirent{Dir: dir.Ino, Name: name, Ino: n.Ino, Kind: n.Kind}
	})
	return l
}

func (l *lower) put(in tree.Inode, data []byte) {
	if in.Kind == tree.File {
		in.Size = uint64(len(data))
		in.Hash = sha256.Sum256(data)
		l.content[in.Ino] = slices.Clone(data)
		in.Alloc = 0
		f := &lowerFile{data: data}
		for r, ok := f.Data(0); ok; r, ok = f.Data(r.End) {
			in.Alloc += r.End - r.Start
		}
	}
	l.inodes[in.Ino] = in
}

func (l *lower) Commit() uint64 { return l.commit }

func (l *lower) Lookup(dir tree.Ino, name string) (tree.Dirent, error) {
	if d, ok := l.names[dir][name]; ok {
		return d, nil
	}
	return tree.Dirent{}, tree.ErrNotExist
}

func (l *lower) Inode(ino tree.Ino) (tree.Inode, error) {
	if n, ok := l.inodes[ino]; ok {
		return n, nil
	}
	return tree.Inode{}, tree.ErrNotExist
}

func (l *lower) ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error {
	for _, name := range slices.Sorted(maps.Keys(l.names[dir])) {
		if name >= from && !fn(l.names[dir][name]) {
			break
		}
	}
	return nil
}

func (l *lower) Open(ino tree.Ino) (overlay.File, error) {
	data, ok := l.content[ino]
	if !ok {
		return nil, tree.ErrNotExist
	}
	return &lowerFile{data: data}, nil
}

func (l *lower) Names(ino tree.Ino) (names []tree.Dirent, err error) {
	var visit func(dir tree.Ino)
	visit = func(dir tree.Ino) {
		for _, name := range slices.Sorted(maps.Keys(l.names[dir])) {
			d := l.names[dir][name]
			if d.Ino == ino {
				names = append(names, d)
			}
			if d.Kind == tree.Dir {
				visit(d.Ino)
			}
		}
	}
	visit(tree.RootIno)
	return names, nil
}

// lowerFile calls aligned kilobytes of zeros holes.
type lowerFile struct{ data []byte }

func (f *lowerFile) Size() uint64 { return uint64(len(f.data)) }

func (f *lowerFile) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(f.data).ReadAt(p, off)
}

const lowerHole = 1024

func (f *lowerFile) Data(off uint64) (tree.Range, bool) {
	zero := func(block uint64) bool {
		b := f.data[block*lowerHole : min(uint64(len(f.data)), (block+1)*lowerHole)]
		return len(bytes.Trim(b, "\x00")) == 0
	}
	size := uint64(len(f.data))
	block := off / lowerHole
	for block*lowerHole < size && zero(block) {
		block++
	}
	start := max(off, block*lowerHole)
	if start >= size {
		return tree.Range{}, false
	}
	for block*lowerHole < size && !zero(block) {
		block++
	}
	return tree.Range{Start: start, End: min(size, block*lowerHole)}, true
}

// commit applies what a session changed to a copy of l, as publishing would.
func (l *lower) apply(f *overlay.FS, d *overlay.Delta) (*lower, error) {
	next := &lower{
		commit: l.commit + 1, names: map[tree.Ino]map[string]tree.Dirent{},
		inodes: maps.Clone(l.inodes), content: maps.Clone(l.content),
	}
	for ino, names := range l.names {
		next.names[ino] = maps.Clone(names)
	}
	for _, c := range d.Inodes {
		data := l.content[c.Ino]
		if c.Data {
			content, err := f.Data(c.Ino)
			if err != nil {
				return nil, err
			}
			if data, err = io.ReadAll(io.NewSectionReader(content, 0, int64(content.Size()))); err != nil {
				return nil, err
			}
		}
		next.put(c.Inode, data)
		if c.Kind == tree.Dir && next.names[c.Ino] == nil {
			next.names[c.Ino] = map[string]tree.Dirent{}
		}
	}
	for _, c := range d.Dirents {
		if next.names[c.Dir] == nil {
			return nil, fmt.Errorf("delta names %q in %d, which is no directory", c.Name, c.Dir)
		}
		if c.Ino == 0 {
			delete(next.names[c.Dir], c.Name)
		} else {
			next.names[c.Dir][c.Name] = tree.Dirent{Dir: c.Dir, Name: c.Name, Ino: c.Ino, Kind: c.Kind}
		}
	}
	return next, nil
}

// render says a tree as one line an inode's name, for comparing.
func (m *model) render() string {
	var b strings.Builder
	line := func(path string, n *node) {
		renderInode(&b, path, n.Inode, n.data)
	}
	line("", m.root)
	var visit func(path string, d *node)
	visit = func(path string, d *node) {
		for _, name := range slices.Sorted(maps.Keys(d.names)) {
			n := d.names[name]
			line(path+"/"+name, n)
			if n.Kind == tree.Dir {
				visit(path+"/"+name, n)
			}
		}
	}
	visit("", m.root)
	return b.String()
}

func renderInode(b *strings.Builder, path string, n tree.Inode, data []byte) {
	size := n.Size
	if n.Kind == tree.Dir {
		size = 0
	}
	fmt.Fprintf(b, "%s ino=%d %v %04o %d:%d links=%d size=%d rdev=%d m=%d c=%d -> %q", path, n.Ino, n.Kind, n.Mode,
		n.UID, n.GID, n.Nlink, size, n.Rdev, n.Mtime.Sec, n.Ctime.Sec, n.Link)
	for _, x := range n.Xattrs {
		fmt.Fprintf(b, " %s=%q", x.Name, x.Value)
	}
	if n.Kind == tree.File {
		fmt.Fprintf(b, " %x", sha256.Sum256(data))
	}
	b.WriteByte('\n')
}

// renderFS says what an overlay shows, through every door it has.
func renderFS(f *overlay.FS) (string, error) {
	var b strings.Builder
	var visit func(path string, ino tree.Ino) error
	line := func(path string, ino tree.Ino) error {
		n, err := f.Inode(ino)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		var data []byte
		if n.Kind == tree.File {
			data = make([]byte, n.Size+10)
			got, err := f.ReadAt(ino, data, 0)
			if err != nil {
				return fmt.Errorf("read %s: %w", path, err)
			}
			data = data[:got]
			if err := checkSeek(f, ino, data); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
		renderInode(&b, path, n, data)
		return nil
	}
	visit = func(path string, dir tree.Ino) error {
		var entries []tree.Dirent
		var cookie uint64
		for more := true; more; { // three names a call, as a small buffer would
			more = false
			count := 0
			err := f.ReadDir(dir, cookie, func(d tree.Dirent, next uint64) bool {
				if count == 3 {
					more = true
					return false
				}
				entries = append(entries, d)
				count, cookie = count+1, next
				return true
			})
			if err != nil {
				return fmt.Errorf("list %s: %w", path, err)
			}
		}
		for _, d := range entries {
			p := path + "/" + d.Name
			a, err := f.Lookup(dir, d.Name)
			if err != nil {
				return fmt.Errorf("lookup %s: %w", p, err)
			}
			r, err := f.Resolve(p)
			if err != nil || a.Ino != d.Ino || a.Kind != d.Kind || r.Ino != d.Ino || d.Dir != dir {
				return fmt.Errorf("%s: listed as %+v, looked up as %+v, resolved as %+v: %v", p, d, a, r, err)
			}
			names, err := f.Names(d.Ino)
			if err != nil || !slices.Contains(names, d) {
				return fmt.Errorf("%s: names are %+v: %v", p, names, err)
			}
			if d.Kind != tree.Dir && len(names) != int(a.Nlink) {
				return fmt.Errorf("%s: %d names, link count %d", p, len(names), a.Nlink)
			}
			if err := line(p, d.Ino); err != nil {
				return err
			}
			if d.Kind == tree.Dir {
				if path, err := f.Path(d.Ino); err != nil || "/"+path != p {
					return fmt.Errorf("%s: path is %q: %v", p, path, err)
				}
				if err := visit(p, d.Ino); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := line("", tree.RootIno); err != nil {
		return "", err
	}
	err := visit("", tree.RootIno)
	return b.String(), err
}

// checkSeek walks a file by SeekData and SeekHole: holes read as zeros, and the
// allocation counted is what the walk calls data.
func checkSeek(f *overlay.FS, ino tree.Ino, data []byte) error {
	sum := uint64(0)
	for off := uint64(0); off < uint64(len(data)); {
		start, err := f.Seek(ino, off, overlay.SeekData)
		if err != nil {
			start = uint64(len(data))
		}
		if len(bytes.Trim(data[off:start], "\x00")) > 0 {
			return fmt.Errorf("hole [%d, %d) holds data", off, start)
		}
		if start == uint64(len(data)) {
			break
		}
		if off, err = f.Seek(ino, start, overlay.SeekHole); err != nil || off <= start {
			return fmt.Errorf("hole after %d is at %d: %v", start, off, err)
		}
		sum += off - start
	}
	a, err := f.Attr(ino)
	if err != nil || a.Alloc != sum {
		return fmt.Errorf("allocation is %d, data is %d: %v", a.Alloc, sum, err)
	}
	return nil
}
