package layerfmt

import (
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"

	"ephemeral-sandbox/fs/tree"
)

type WriterOptions struct {
	Kind    PackKind
	Level   zstd.EncoderLevel
	Workers int
}

type Writer struct{}

func NewWriter(w io.Writer, o WriterOptions) *Writer { return &Writer{} }

func (w *Writer) AddDirent(d Dirent) error    { return errors.ErrUnsupported }
func (w *Writer) AddInode(n tree.Inode) error { return errors.ErrUnsupported }
func (w *Writer) AddFile(n tree.Inode, r io.ReaderAt, data []tree.Range) (tree.Hash, error) {
	return tree.Hash{}, errors.ErrUnsupported
}
func (w *Writer) AddForeign(n tree.Inode, pack PackID, fromIno tree.Ino) error {
	return errors.ErrUnsupported
}
func (w *Writer) SetSection(name string, data []byte) error { return errors.ErrUnsupported }
func (w *Writer) Finish() (Info, error)                     { return Info{}, errors.ErrUnsupported }
func (w *Writer) Abort()                                    {}
