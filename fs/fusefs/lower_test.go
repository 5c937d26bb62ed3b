package fusefs

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// memLower is a lower tree in memory. It is built once and then only read.
type memLower struct {
	commit  uint64
	dirents map[tree.Ino][]tree.Dirent // by name
	inodes  map[tree.Ino]tree.Inode
	data    map[tree.Ino][]byte
	fail    func(ino tree.Ino) error // asked on every Inode and Open; nil = never
}

var _ overlay.Lower = (*memLower)(nil)

const (
	lowerTime = 1_600_000_000
	firstIno  = 1 << 20 // of what a session makes
)

func newLower() *memLower {
	l := &memLower{dirents: map[tree.Ino][]tree.Dirent{}, inodes: map[tree.Ino]tree.Inode{}, data: map[tree.Ino][]byte{}}
	l.inodes[tree.RootIno] = tree.Inode{Attr: tree.Attr{
		Ino: tree.RootIno, Kind: tree.Dir, Mode: 0o755, Nlink: 2, Mtime: tree.Time{Sec: lowerTime}, Ctime: tree.Time{Sec: lowerTime},
	}}
	return l
}

// add makes the inode with the next number and one name.
func (l *memLower) add(dir tree.Ino, name string, kind tree.Kind, mode uint32, content string) tree.Ino {
	ino := tree.Ino(len(l.inodes) + 1)
	n := tree.Inode{Attr: tree.Attr{
		Ino: ino, Kind: kind, Mode: mode, Nlink: 1, Mtime: tree.Time{Sec: lowerTime, Nsec: uint32(ino)}, Ctime: tree.Time{Sec: lowerTime},
	}}
	switch kind {
	case tree.Dir:
		n.Nlink = 2
		p := l.inodes[dir]
		p.Nlink++
		l.inodes[dir] = p
	case tree.File:
		n.Size, n.Alloc = uint64(len(content)), uint64(len(content))
		l.data[ino] = []byte(content)
	case tree.Symlink:
		n.Link, n.Size = content, uint64(len(content))
	case tree.Char, tree.Block, tree.Fifo, tree.Socket:
	}
	l.inodes[ino] = n
	l.link(dir, name, ino)
	return ino
}

func (l *memLower) link(dir tree.Ino, name string, ino tree.Ino) {
	l.dirents[dir] = append(l.dirents[dir], tree.Dirent{Dir: dir, Name: name, Ino: ino, Kind: l.inodes[ino].Kind})
	slices.SortFunc(l.dirents[dir], func(a, b tree.Dirent) int { return strings.Compare(a.Name, b.Name) })
}

// sampleLower is the tree that most tests stand on.
func sampleLower() *memLower {
	l := newLower()
	d := l.add(tree.RootIno, "lower", tree.Dir, 0o755, "")
	l.add(d, "a.txt", tree.File, 0o644, "alpha\n")
	l.add(d, "big", tree.File, 0o644, strings.Repeat("0123456789abcdef", 64<<10))
	linked := l.add(d, "link1", tree.File, 0o644, strings.Repeat("linked ", 3000))
	l.link(d, "link2", linked)
	n := l.inodes[linked]
	n.Nlink = 2
	l.inodes[linked] = n
	l.add(d, "sym", tree.Symlink, 0o777, "a.txt")
	suid := l.add(d, "suid", tree.File, 0o6777, "privileged")
	n = l.inodes[suid]
	n.Xattrs = []tree.Xattr{{Name: "security.capability", Value: []byte("\x01\x00\x00\x02aaaabbbbccccdddd")}, {Name: "user.x", Value: []byte("y")}}
	l.inodes[suid] = n
	sub := l.add(d, "sub", tree.Dir, 0o755, "")
	for i := range 30 {
		l.add(sub, fmt.Sprintf("f%02d", i), tree.File, 0o644, fmt.Sprint(i))
	}
	l.add(d, "empty", tree.Dir, 0o755, "")
	return l
}

func (l *memLower) Commit() uint64 { return l.commit }

func (l *memLower) Lookup(dir tree.Ino, name string) (tree.Dirent, error) {
	for _, d := range l.dirents[dir] {
		if d.Name == name {
			return d, nil
		}
	}
	return tree.Dirent{}, fmt.Errorf("%q: %w", name, tree.ErrNotExist)
}

func (l *memLower) Inode(ino tree.Ino) (tree.Inode, error) {
	if l.fail != nil {
		if err := l.fail(ino); err != nil {
			return tree.Inode{}, err
		}
	}
	n, ok := l.inodes[ino]
	if !ok {
		return tree.Inode{}, fmt.Errorf("inode %d: %w", ino, tree.ErrNotExist)
	}
	return n, nil
}

func (l *memLower) ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error {
	for _, d := range l.dirents[dir] {
		if d.Name >= from && !fn(d) {
			break
		}
	}
	return nil
}

func (l *memLower) Names(ino tree.Ino) ([]tree.Dirent, error) {
	var out []tree.Dirent
	for _, ds := range l.dirents {
		for _, d := range ds {
			if d.Ino == ino {
				out = append(out, d)
			}
		}
	}
	return out, nil
}

func (l *memLower) Open(ino tree.Ino) (overlay.File, error) {
	if l.fail != nil {
		if err := l.fail(ino); err != nil {
			return nil, err
		}
	}
	b, ok := l.data[ino]
	if !ok {
		return nil, fmt.Errorf("content of inode %d: %w", ino, tree.ErrNotExist)
	}
	return memFile{bytes.NewReader(b)}, nil
}

// memFile is content without holes.
type memFile struct{ *bytes.Reader }

func (f memFile) Size() uint64 { return uint64(f.Reader.Size()) }

func (f memFile) Data(off uint64) (tree.Range, bool) {
	return tree.Range{Start: off, End: f.Size()}, off < f.Size()
}

var _ io.ReaderAt = memFile{}

// lowerStamp is the modification time of inode ino in the sample tree.
func lowerStamp(ino tree.Ino) time.Time { return time.Unix(lowerTime, int64(ino)) }
