// Package overlay joins the immutable lower tree and one session's private
// changes into one POSIX tree.
package overlay

import "ephemeral-sandbox/fs/tree"

// FS is a session's tree.
type FS struct{}

func Open(o Options) (*FS, error) { return nil, tree.ErrNotSup }

// PeekBase reads the commit that the journal in dir stands on; ok is false when there is no journal yet.
func PeekBase(dir string) (commit uint64, ok bool, err error) { return 0, false, tree.ErrNotSup }

func (f *FS) Lookup(parent tree.Ino, name string) (tree.Attr, error) {
	return tree.Attr{}, tree.ErrNotSup
}
func (f *FS) Attr(ino tree.Ino) (tree.Attr, error)   { return tree.Attr{}, tree.ErrNotSup }
func (f *FS) Inode(ino tree.Ino) (tree.Inode, error) { return tree.Inode{}, tree.ErrNotSup }
func (f *FS) Parent(dir tree.Ino) (tree.Ino, error)  { return 0, tree.ErrNotSup }
func (f *FS) SetAttr(c Caller, ino tree.Ino, s SetAttr) (tree.Attr, error) {
	return tree.Attr{}, tree.ErrNotSup
}
func (f *FS) Create(c Caller, parent tree.Ino, name string, mode uint32) (tree.Attr, error) {
	return tree.Attr{}, tree.ErrNotSup
}
func (f *FS) Mknod(c Caller, parent tree.Ino, name string, kind tree.Kind, mode, rdev uint32) (tree.Attr, error) {
	return tree.Attr{}, tree.ErrNotSup
}
func (f *FS) Mkdir(c Caller, parent tree.Ino, name string, mode uint32) (tree.Attr, error) {
	return tree.Attr{}, tree.ErrNotSup
}
func (f *FS) Symlink(c Caller, parent tree.Ino, name, target string) (tree.Attr, error) {
	return tree.Attr{}, tree.ErrNotSup
}
func (f *FS) Link(c Caller, ino, parent tree.Ino, name string) (tree.Attr, error) {
	return tree.Attr{}, tree.ErrNotSup
}

// Tmpfile makes an unlinked regular file in parent's tree, already acquired once.
func (f *FS) Tmpfile(c Caller, parent tree.Ino, mode uint32) (tree.Attr, error) {
	return tree.Attr{}, tree.ErrNotSup
}
func (f *FS) Unlink(c Caller, parent tree.Ino, name string) error { return tree.ErrNotSup }
func (f *FS) Rmdir(c Caller, parent tree.Ino, name string) error  { return tree.ErrNotSup }
func (f *FS) Rename(c Caller, p1 tree.Ino, n1 string, p2 tree.Ino, n2 string, flags uint32) error {
	return tree.ErrNotSup
}

// Acquire counts an open; ErrStale when the inode is gone.
func (f *FS) Acquire(ino tree.Ino) error { return tree.ErrNotSup }
func (f *FS) Release(ino tree.Ino)       {}

// ReadAt is read(2): fewer bytes than asked, or none, only at the end of the file; never io.EOF.
func (f *FS) ReadAt(ino tree.Ino, p []byte, off uint64) (int, error) { return 0, tree.ErrNotSup }
func (f *FS) WriteAt(c Caller, ino tree.Ino, p []byte, off uint64) (int, error) {
	return 0, tree.ErrNotSup
}
func (f *FS) Fallocate(c Caller, ino tree.Ino, mode uint32, off, n uint64) error {
	return tree.ErrNotSup
}
func (f *FS) Seek(ino tree.Ino, off uint64, whence int) (uint64, error) { return 0, tree.ErrNotSup }
func (f *FS) CopyRange(c Caller, src tree.Ino, srcOff uint64, dst tree.Ino, dstOff, n uint64) (uint64, error) {
	return 0, tree.ErrNotSup
}
func (f *FS) Sync(ino tree.Ino, dataOnly bool) error             { return tree.ErrNotSup }
func (f *FS) SyncAll() error                                     { return tree.ErrNotSup }
func (f *FS) Readlink(ino tree.Ino) (string, error)              { return "", tree.ErrNotSup }
func (f *FS) GetXattr(ino tree.Ino, name string) ([]byte, error) { return nil, tree.ErrNotSup }
func (f *FS) SetXattr(c Caller, ino tree.Ino, name string, value []byte, flags int) error {
	return tree.ErrNotSup
}
func (f *FS) ListXattr(ino tree.Ino) ([]string, error)              { return nil, tree.ErrNotSup }
func (f *FS) RemoveXattr(c Caller, ino tree.Ino, name string) error { return tree.ErrNotSup }
func (f *FS) StatFS() (StatFS, error)                               { return StatFS{}, tree.ErrNotSup }
func (f *FS) ReadDir(dir tree.Ino, cookie uint64, fn func(d tree.Dirent, next uint64) bool) error {
	return tree.ErrNotSup
}
func (f *FS) Path(ino tree.Ino) (string, error)             { return "", tree.ErrNotSup }
func (f *FS) Names(ino tree.Ino) ([]tree.Dirent, error)     { return nil, tree.ErrNotSup }
func (f *FS) Resolve(path string) (tree.Dirent, error)      { return tree.Dirent{}, tree.ErrNotSup }
func (f *FS) Freeze()                                       {}
func (f *FS) Thaw()                                         {}
func (f *FS) Delta() (*Delta, error)                        { return nil, tree.ErrNotSup }
func (f *FS) Data(ino tree.Ino) (File, error)               { return nil, tree.ErrNotSup }
func (f *FS) Rebase(lower Lower, e Edit) error              { return tree.ErrNotSup }
func (f *FS) Lineage(ino tree.Ino) (prior, oldest tree.Ino) { return 0, 0 }

// Done tells whether the request with that number is in the journal, and the inode it made or named.
func (f *FS) Done(request uint64) (ino tree.Ino, ok bool) { return 0, false }
func (f *FS) Usage() Usage                                { return Usage{} }
func (f *FS) Close() error                                { return nil }
