package fusefs

import (
	"errors"
	"log/slog"
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

const (
	// forever is how long the kernel may keep what it was told, in seconds. It
	// is cut there to the longest time the kernel can count.
	forever = 1 << 40

	// resent marks the number of a request that the kernel sends once more to a
	// new server.
	resent = 1 << 63

	blockSize = 4096
)

// view answers the kernel's requests. It embeds the file system that answers
// ENOSYS for the requests that are not here on purpose: ACCESS (the mount has
// default_permissions), STATX (there are no birth times to tell), and locks
// (the kernel's own do).
type view struct {
	fuse.RawFileSystem

	fs         *overlay.FS
	opOf       func(pid uint32) tree.Op
	record     *access.Recorder
	mapID      func(id uint32, gid bool) uint32
	logger     *slog.Logger
	level      TraceLevel
	epoch      uint32 // of this server's handles
	connection uint32

	counts [64]atomic.Uint64 // by opcode
	pins   pins
	errors errorLog
}

func newView(o Options, connection uint32) *view {
	return &view{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		fs:            o.FS, opOf: o.Op, record: o.Record, mapID: o.MapID, logger: o.Logger, level: o.Level,
		epoch: newNonce(epochBits), connection: connection,
	}
}

func (v *view) String() string { return "sandbox" }

// begin counts a request and says on whose behalf it comes.
func (v *view) begin(h *fuse.InHeader) tree.Op {
	if h.Opcode < uint32(len(v.counts)) {
		v.counts[h.Opcode].Add(1)
	}
	if v.opOf == nil {
		return 0
	}
	return v.opOf(h.Pid)
}

// beginOpen is begin for a request on an open file: where the process is not
// known, as when the kernel writes mapped pages back, it counts for the
// operation that opened the file.
func (v *view) beginOpen(h *fuse.InHeader, fh uint64) tree.Op {
	if op := v.begin(h); op != 0 {
		return op
	}
	return handle(fh).op()
}

func (v *view) caller(h *fuse.InHeader, op tree.Op) overlay.Caller {
	return overlay.Caller{Op: op, UID: h.Uid, GID: h.Gid, Request: v.request(h)}
}

// request numbers a request for the journal. The kernel's own numbers begin
// anew with each connection, and a journal may outlive several.
func (v *view) request(h *fuse.InHeader) uint64 {
	const low = 64 - connectionBits
	return uint64(v.connection)<<low | h.Unique&^resent&(1<<low-1)
}

// done reports whether an earlier server carried out this request and died
// before it could answer, and the inode that it made or named.
func (v *view) done(h *fuse.InHeader) (tree.Ino, bool) {
	if h.Unique&resent == 0 {
		return 0, false
	}
	return v.fs.Done(v.request(h))
}

func (v *view) note(op tree.Op, k access.Kind, ino, dir tree.Ino, name string) {
	if v.record != nil {
		v.record.Note(op, k, ino, dir, name)
	}
}

// entry fills in the answer to a lookup.
func (v *view) entry(out *fuse.EntryOut, a tree.Attr) {
	out.NodeId = uint64(a.Ino)
	out.EntryValid = forever
	out.AttrValid = forever
	v.attr(&out.Attr, a)
}

func (v *view) attr(out *fuse.Attr, a tree.Attr) {
	uid, gid := a.UID, a.GID
	if v.mapID != nil {
		uid, gid = v.mapID(uid, false), v.mapID(gid, true)
	}
	*out = fuse.Attr{
		Ino:    uint64(a.Ino),
		Size:   a.Size,
		Blocks: (a.Alloc + 511) / 512,
		// No access time is kept; the modification time is the honest bound.
		Atime: uint64(a.Mtime.Sec), Atimensec: a.Mtime.Nsec,
		Mtime: uint64(a.Mtime.Sec), Mtimensec: a.Mtime.Nsec,
		Ctime: uint64(a.Ctime.Sec), Ctimensec: a.Ctime.Nsec,
		Mode:    kindBits(a.Kind) | a.Mode,
		Nlink:   a.Nlink,
		Owner:   fuse.Owner{Uid: uid, Gid: gid},
		Rdev:    a.Rdev,
		Blksize: blockSize,
	}
}

func kindBits(k tree.Kind) uint32 {
	switch k {
	case tree.File:
		return syscall.S_IFREG
	case tree.Dir:
		return syscall.S_IFDIR
	case tree.Symlink:
		return syscall.S_IFLNK
	case tree.Char:
		return syscall.S_IFCHR
	case tree.Block:
		return syscall.S_IFBLK
	case tree.Fifo:
		return syscall.S_IFIFO
	case tree.Socket:
		return syscall.S_IFSOCK
	}
	return 0
}

// kindOf is the inverse of kindBits; mknod(2) means a file when it says nothing.
func kindOf(mode uint32) (tree.Kind, bool) {
	switch mode & syscall.S_IFMT {
	case 0, syscall.S_IFREG:
		return tree.File, true
	case syscall.S_IFCHR:
		return tree.Char, true
	case syscall.S_IFBLK:
		return tree.Block, true
	case syscall.S_IFIFO:
		return tree.Fifo, true
	case syscall.S_IFSOCK:
		return tree.Socket, true
	}
	return 0, false
}

// Lookup answers with the name's inode, or that it is absent, which the kernel
// keeps as well.
func (v *view) Lookup(_ <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	op, dir := v.begin(h), tree.Ino(h.NodeId)
	if len(name) > tree.MaxName {
		return fuse.Status(syscall.ENAMETOOLONG)
	}
	a, err := v.fs.Lookup(dir, name)
	switch {
	case err == nil:
		v.note(op, access.Lookup, a.Ino, dir, name)
		v.entry(out, a)
		return fuse.OK
	case errors.Is(err, tree.ErrNotExist):
		v.note(op, access.Absent, 0, dir, name)
		out.EntryValid = forever
		return fuse.OK
	}
	return v.fail(h, err)
}

// Forget comes when the kernel has dropped an inode. Only those without a name
// were kept for it.
func (v *view) Forget(node, _ uint64) {
	v.counts[opForget].Add(1)
	v.pins.forget(v.fs, tree.Ino(node))
}

func (v *view) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	v.begin(&in.InHeader)
	a, err := v.fs.Attr(tree.Ino(in.NodeId))
	if err != nil {
		return v.failInode(&in.InHeader, err)
	}
	out.AttrValid = forever
	v.attr(&out.Attr, a)
	return fuse.OK
}

func (v *view) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	op := v.begin(&in.InHeader)
	if fh, ok := in.GetFh(); ok && op == 0 {
		op = handle(fh).op()
	}
	c := v.caller(&in.InHeader, op)
	c.KillPriv = in.Valid&fuse.FATTR_KILL_SUIDGID != 0
	var s overlay.SetAttr
	if mode, ok := in.GetMode(); ok {
		s.Mode = &mode
	}
	if uid, ok := in.GetUID(); ok {
		s.UID = &uid
	}
	if gid, ok := in.GetGID(); ok {
		s.GID = &gid
	}
	if size, ok := in.GetSize(); ok {
		s.Size = &size
	}
	if mtime, ok := in.GetMTime(); ok {
		at := tree.At(mtime)
		s.Mtime = &at
	}
	ino := tree.Ino(in.NodeId)
	a, err := v.fs.SetAttr(c, ino, s)
	if err != nil {
		return v.failInode(&in.InHeader, err)
	}
	if s.Size != nil {
		v.note(op, access.Write, ino, 0, "")
	} else {
		v.note(op, access.Attr, ino, 0, "")
	}
	out.AttrValid = forever
	v.attr(&out.Attr, a)
	return fuse.OK
}

// made answers a request that made an inode.
func (v *view) made(op tree.Op, out *fuse.EntryOut, a tree.Attr, dir tree.Ino, name string) fuse.Status {
	v.note(op, access.Create, a.Ino, dir, name)
	v.entry(out, a)
	return fuse.OK
}

// madeBefore answers a request that an earlier server carried out.
func (v *view) madeBefore(h *fuse.InHeader, out *fuse.EntryOut, ino tree.Ino) fuse.Status {
	a, err := v.fs.Attr(ino)
	if err != nil {
		return v.failInode(h, err)
	}
	v.entry(out, a)
	return fuse.OK
}

func (v *view) Mknod(_ <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	op, dir := v.begin(&in.InHeader), tree.Ino(in.NodeId)
	if ino, ok := v.done(&in.InHeader); ok {
		return v.madeBefore(&in.InHeader, out, ino)
	}
	kind, ok := kindOf(in.Mode)
	if !ok {
		return fuse.EINVAL
	}
	a, err := v.fs.Mknod(v.caller(&in.InHeader, op), dir, name, kind, in.Mode&0o7777, in.Rdev)
	if err != nil {
		return v.fail(&in.InHeader, err)
	}
	return v.made(op, out, a, dir, name)
}

func (v *view) Mkdir(_ <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	op, dir := v.begin(&in.InHeader), tree.Ino(in.NodeId)
	if ino, ok := v.done(&in.InHeader); ok {
		return v.madeBefore(&in.InHeader, out, ino)
	}
	a, err := v.fs.Mkdir(v.caller(&in.InHeader, op), dir, name, in.Mode&0o7777)
	if err != nil {
		return v.fail(&in.InHeader, err)
	}
	return v.made(op, out, a, dir, name)
}

func (v *view) Symlink(_ <-chan struct{}, h *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	op, dir := v.begin(h), tree.Ino(h.NodeId)
	if ino, ok := v.done(h); ok {
		return v.madeBefore(h, out, ino)
	}
	if len(target) > tree.MaxLink {
		return fuse.Status(syscall.ENAMETOOLONG)
	}
	a, err := v.fs.Symlink(v.caller(h, op), dir, name, target)
	if err != nil {
		return v.fail(h, err)
	}
	return v.made(op, out, a, dir, name)
}

func (v *view) Readlink(_ <-chan struct{}, h *fuse.InHeader) ([]byte, fuse.Status) {
	op, ino := v.begin(h), tree.Ino(h.NodeId)
	target, err := v.fs.Readlink(ino)
	if err != nil {
		return nil, v.failInode(h, err)
	}
	v.note(op, access.Read, ino, 0, "")
	return []byte(target), fuse.OK
}

func (v *view) Link(_ <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	op, dir, ino := v.begin(&in.InHeader), tree.Ino(in.NodeId), tree.Ino(in.Oldnodeid)
	if ino, ok := v.done(&in.InHeader); ok {
		return v.madeBefore(&in.InHeader, out, ino)
	}
	a, err := v.fs.Link(v.caller(&in.InHeader, op), ino, dir, name)
	if err != nil {
		return v.fail(&in.InHeader, err)
	}
	v.note(op, access.Link, ino, dir, name)
	v.entry(out, a)
	return fuse.OK
}

// leaving is an inode that is about to lose a name. It is held, so that it
// stays when that was the last one.
type leaving struct {
	attr tree.Attr
	held bool
}

// hold looks up a name that is about to go.
func (v *view) hold(dir tree.Ino, name string) (leaving, error) {
	a, err := v.fs.Lookup(dir, name)
	if err != nil {
		return leaving{}, err
	}
	// Without the acquisition the inode is gone at once, which is no more than
	// an open file or working directory of somebody that goes stale.
	return leaving{attr: a, held: v.fs.Acquire(a.Ino) == nil}, nil
}

// gone keeps what was held, once its name is gone, if nothing else does.
func (v *view) gone(l leaving) {
	if !l.held {
		return
	}
	if a, err := v.fs.Attr(l.attr.Ino); err == nil && (a.Nlink == 0 || a.Kind == tree.Dir) {
		v.pins.keep(v.fs, l.attr.Ino)
		return
	}
	v.fs.Release(l.attr.Ino)
}

// stayed lets go of what was held, when its name did not go.
func (v *view) stayed(l leaving) {
	if l.held {
		v.fs.Release(l.attr.Ino)
	}
}

func (v *view) Unlink(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return v.remove(h, name, v.fs.Unlink)
}

func (v *view) Rmdir(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return v.remove(h, name, v.fs.Rmdir)
}

func (v *view) remove(h *fuse.InHeader, name string, do func(overlay.Caller, tree.Ino, string) error) fuse.Status {
	op, dir := v.begin(h), tree.Ino(h.NodeId)
	if _, ok := v.done(h); ok {
		return fuse.OK
	}
	l, err := v.hold(dir, name)
	if err != nil {
		return v.fail(h, err)
	}
	if err := do(v.caller(h, op), dir, name); err != nil {
		v.stayed(l)
		return v.fail(h, err)
	}
	v.gone(l)
	v.note(op, access.Remove, l.attr.Ino, dir, name)
	return fuse.OK
}

func (v *view) Rename(_ <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	h := &in.InHeader
	op, from, to := v.begin(h), tree.Ino(in.NodeId), tree.Ino(in.Newdir)
	if _, ok := v.done(h); ok {
		return fuse.OK
	}
	if in.Flags&^(overlay.RenameNoReplace|overlay.RenameExchange) != 0 {
		return fuse.EINVAL
	}
	src, err := v.fs.Lookup(from, oldName)
	if err != nil {
		return v.fail(h, err)
	}
	dst, err := v.hold(to, newName)
	if err != nil && !errors.Is(err, tree.ErrNotExist) {
		return v.fail(h, err)
	}
	if err := v.fs.Rename(v.caller(h, op), from, oldName, to, newName, in.Flags); err != nil {
		v.stayed(dst)
		return v.fail(h, err)
	}
	v.note(op, access.Rename, src.Ino, from, oldName)
	v.note(op, access.Rename, src.Ino, to, newName)
	switch {
	case in.Flags&overlay.RenameExchange != 0:
		v.stayed(dst)
		v.note(op, access.Rename, dst.attr.Ino, to, newName)
		v.note(op, access.Rename, dst.attr.Ino, from, oldName)
	case dst.attr.Ino != 0 && dst.attr.Ino != src.Ino:
		v.gone(dst)
		v.note(op, access.Remove, dst.attr.Ino, to, newName)
	default:
		v.stayed(dst)
	}
	return fuse.OK
}

func (v *view) StatFs(_ <-chan struct{}, h *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	v.begin(h)
	st, err := v.fs.StatFS()
	if err != nil {
		return v.fail(h, err)
	}
	bs := max(uint64(st.BlockSize), 1)
	*out = fuse.StatfsOut{
		Blocks: st.Bytes / bs, Bfree: st.BytesFree / bs, Bavail: st.BytesFree / bs,
		Files: st.Inodes, Ffree: st.InodesFree,
		Bsize: uint32(bs), Frsize: uint32(bs), NameLen: st.NameMax,
	}
	return fuse.OK
}

// Access is never asked again after this: the mount has default_permissions.
func (v *view) Access(_ <-chan struct{}, in *fuse.AccessIn) fuse.Status {
	v.begin(&in.InHeader)
	return fuse.ENOSYS
}

func (v *view) Ioctl(_ <-chan struct{}, in *fuse.IoctlIn, _ []byte, _ *fuse.IoctlOut, _ []byte) fuse.Status {
	v.begin(&in.InHeader)
	return fuse.Status(syscall.ENOTTY)
}
