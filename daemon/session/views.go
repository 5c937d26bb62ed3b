package session

import (
	"context"
	"fmt"
	"io"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
)

// stackView shows a commit to the gate.
type stackView struct{ *stack.Stack }

func (v stackView) Number() uint64 { return v.Commit() }

func (v stackView) Content(ino tree.Ino) ([]byte, error) {
	f, err := v.Open(ino)
	if err != nil {
		return nil, err
	}
	return readAll(f)
}

func (v stackView) Hash(ino tree.Ino) (tree.Hash, error) {
	n, err := v.Inode(ino)
	return n.Hash, err
}

// upperView shows a frozen workspace to the gate. Hashes of changed content are
// worked out when they are asked for, once.
type upperView struct {
	*overlay.FS
	ctx    context.Context // ends the hashing; a view lives for one call
	hashes map[tree.Ino]tree.Hash
}

func (w *Workspace) upperView(ctx context.Context) upperView {
	return upperView{w.fs, ctx, map[tree.Ino]tree.Hash{}}
}

func (v upperView) Content(ino tree.Ino) ([]byte, error) {
	f, err := v.Data(ino)
	if err != nil {
		return nil, err
	}
	return readAll(f)
}

func (v upperView) Hash(ino tree.Ino) (tree.Hash, error) {
	if h, ok := v.hashes[ino]; ok {
		return h, nil
	}
	n, err := v.Inode(ino)
	if err != nil || n.Hash != (tree.Hash{}) {
		return n.Hash, err
	}
	f, err := v.Data(ino)
	if err != nil {
		return tree.Hash{}, err
	}
	sum, err := tree.HashContent(v.ctx, f, f.Size(), dataRanges(f))
	if err != nil {
		return tree.Hash{}, fmt.Errorf("hash inode %d: %w", ino, err)
	}
	v.hashes[ino] = sum
	return sum, nil
}

// Lookup hides the overlay's own Lookup, which answers with attributes.
func (v upperView) Lookup(dir tree.Ino, name string) (tree.Dirent, error) {
	a, err := v.FS.Lookup(dir, name)
	return tree.Dirent{Dir: dir, Name: name, Ino: a.Ino, Kind: a.Kind}, err
}

// ReadDir hides the overlay's own ReadDir, whose cookies are for the kernel.
func (v upperView) ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error {
	return v.FS.ReadDir(dir, 0, func(d tree.Dirent, _ uint64) bool {
		return d.Name < from || fn(d)
	})
}

func content(f overlay.File) io.Reader { return io.NewSectionReader(f, 0, int64(f.Size())) }

// readAll reads a content whole. Size is what a session says it is, so it is
// bounded before it is believed.
func readAll(f overlay.File) ([]byte, error) {
	if f.Size() > MaxRead {
		return nil, fmt.Errorf("read content of %d bytes: %w", f.Size(), tree.ErrTooBig)
	}
	b := make([]byte, f.Size())
	n, err := f.ReadAt(b, 0)
	if n == len(b) {
		return b, nil
	}
	if err == nil || err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return nil, fmt.Errorf("read content: %w", err)
}

// dataRanges lists what f holds besides holes.
func dataRanges(f overlay.File) []tree.Range {
	list := []tree.Range{}
	for off := uint64(0); ; {
		r, ok := f.Data(off)
		if !ok {
			return list
		}
		list = append(list, r)
		off = r.End
	}
}
