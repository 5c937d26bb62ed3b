package layerfmt

import (
	"context"
	"errors"
	"io"

	"ephemeral-sandbox/fs/tree"
)

type location struct{}

type FrameCache struct{}

func NewFrameCache(maxBytes int64) *FrameCache { return &FrameCache{} }

type ReaderOptions struct {
	Name            string
	Cache           *FrameCache
	MaxLogicalBytes int64
}

type Reader struct{}

func Open(r io.ReaderAt, size int64, o ReaderOptions) (*Reader, error) {
	return nil, errors.ErrUnsupported
}
func (r *Reader) ID() PackID   { return PackID{} }
func (r *Reader) Info() Info   { return Info{} }
func (r *Reader) Name() string { return "" }
func (r *Reader) Lookup(dir tree.Ino, name string) (Dirent, bool, error) {
	return Dirent{}, false, errors.ErrUnsupported
}
func (r *Reader) Inode(ino tree.Ino) (Inode, bool, error) {
	return Inode{}, false, errors.ErrUnsupported
}
func (r *Reader) Parent(ino tree.Ino) (tree.Dirent, bool, error) {
	return tree.Dirent{}, false, errors.ErrUnsupported
}
func (r *Reader) Dirents(dir tree.Ino, from string, fn func(Dirent) bool) error {
	return errors.ErrUnsupported
}
func (r *Reader) AllDirents(fn func(Dirent) bool) error { return errors.ErrUnsupported }
func (r *Reader) AllInodes(fn func(Inode) bool) error   { return errors.ErrUnsupported }
func (r *Reader) File(n Inode) (*File, error)           { return nil, errors.ErrUnsupported }
func (r *Reader) Section(name string) ([]byte, bool, error) {
	return nil, false, errors.ErrUnsupported
}
func (r *Reader) Verify(ctx context.Context) error { return errors.ErrUnsupported }

type File struct{}

func (f *File) ReadAt(p []byte, off int64) (int, error) { return 0, errors.ErrUnsupported }
func (f *File) Size() uint64                            { return 0 }
func (f *File) Data(off uint64) (tree.Range, bool)      { return tree.Range{}, false }
