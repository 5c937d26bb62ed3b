package fusefs

import (
	"errors"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// maxCopy bounds one COPY_FILE_RANGE, so that a handler is not busy for long.
// The caller sees a short copy and goes on.
const maxCopy = 32 << 20

// openReply says how the kernel is to treat an open file. The pages it has stay
// valid: what changes them from elsewhere is told through InvalidateInode.
func (v *view) openReply(out *fuse.OpenOut, op tree.Op, flags uint32) {
	out.OpenFlags = fuse.FOPEN_KEEP_CACHE
	if flags&syscall.O_ACCMODE == syscall.O_RDONLY {
		out.OpenFlags |= fuse.FOPEN_NOFLUSH
	}
	epoch := v.epoch
	switch v.level {
	case TraceIO:
		out.OpenFlags |= fuse.FOPEN_DIRECT_IO
	case TraceSet:
		// Files that CREATE opened are not released to us either, once the
		// kernel has learned that it need not ask for opens.
		epoch = 0
	case TraceOpen:
	}
	out.Fh = uint64(newHandle(epoch, op))
}

// acquire counts an open, where opens are seen.
func (v *view) acquire(ino tree.Ino) error {
	if v.level == TraceSet {
		return nil
	}
	return v.fs.Acquire(ino)
}

func (v *view) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	h := &in.InHeader
	op, dir := v.begin(h), tree.Ino(in.NodeId)
	if ino, ok := v.done(h); ok {
		if st := v.madeBefore(h, &out.EntryOut, ino); st != fuse.OK {
			return st
		}
		return v.created(h, ino, op, in.Flags, out)
	}
	c := v.caller(h, op)
	a, err := v.fs.Create(c, dir, name, in.Mode&0o7777)
	if errors.Is(err, tree.ErrExist) && in.Flags&syscall.O_EXCL == 0 {
		// Made from elsewhere since the kernel looked: then this is an open.
		return v.createExisting(in, name, op, out)
	}
	if err != nil {
		return v.fail(h, err)
	}
	v.made(op, &out.EntryOut, a, dir, name)
	return v.created(h, a.Ino, op, in.Flags, out)
}

func (v *view) created(h *fuse.InHeader, ino tree.Ino, op tree.Op, flags uint32, out *fuse.CreateOut) fuse.Status {
	if err := v.acquire(ino); err != nil {
		return v.failInode(h, err)
	}
	v.openReply(&out.OpenOut, op, flags)
	return fuse.OK
}

func (v *view) createExisting(in *fuse.CreateIn, name string, op tree.Op, out *fuse.CreateOut) fuse.Status {
	h := &in.InHeader
	a, err := v.fs.Lookup(tree.Ino(in.NodeId), name)
	if err != nil {
		return v.failInode(h, err)
	}
	if a.Kind != tree.File {
		return fuse.Status(syscall.ESTALE) // the kernel walks the path once more
	}
	if in.Flags&syscall.O_TRUNC != 0 {
		if a, err = v.truncate(h, a.Ino, op, in.OpenFlags); err != nil {
			return v.failInode(h, err)
		}
	}
	v.entry(&out.EntryOut, a)
	return v.created(h, a.Ino, op, in.Flags, out)
}

// truncate empties a file that is opened with O_TRUNC; flags are the OPEN_*.
func (v *view) truncate(h *fuse.InHeader, ino tree.Ino, op tree.Op, flags uint32) (tree.Attr, error) {
	c := v.caller(h, op)
	c.KillPriv = flags&fuse.OPEN_KILL_SUIDGID != 0
	size := uint64(0)
	a, err := v.fs.SetAttr(c, ino, overlay.SetAttr{Size: &size})
	if err == nil {
		v.note(op, access.Write, ino, 0, "")
	}
	return a, err
}

// Tmpfile makes a file without a name. The overlay hands it out acquired, which
// is what keeps it until the kernel forgets it.
func (v *view) Tmpfile(_ <-chan struct{}, in *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	h := &in.InHeader
	op := v.begin(h)
	a, err := v.fs.Tmpfile(v.caller(h, op), tree.Ino(in.NodeId), in.Mode&0o7777)
	if err != nil {
		return v.fail(h, err)
	}
	v.pins.keep(v.fs, a.Ino)
	v.made(op, &out.EntryOut, a, 0, "")
	return v.created(h, a.Ino, op, in.Flags, out)
}

func (v *view) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	h := &in.InHeader
	op, ino := v.begin(h), tree.Ino(in.NodeId)
	if v.level == TraceSet {
		return fuse.ENOSYS
	}
	if err := v.fs.Acquire(ino); err != nil {
		return v.failInode(h, err)
	}
	if in.Flags&syscall.O_TRUNC != 0 {
		if _, err := v.truncate(h, ino, op, in.Mode); err != nil {
			v.fs.Release(ino)
			return v.failInode(h, err)
		}
	}
	if in.Flags&syscall.O_ACCMODE != syscall.O_WRONLY {
		v.note(op, access.Read, ino, 0, "")
	}
	v.openReply(out, op, in.Flags)
	return fuse.OK
}

func (v *view) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	v.begin(&in.InHeader)
	if handle(in.Fh).epoch() == v.epoch {
		v.fs.Release(tree.Ino(in.NodeId))
	}
}

func (v *view) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	op, ino := v.beginOpen(&in.InHeader, in.Fh), tree.Ino(in.NodeId)
	n, err := v.fs.ReadAt(ino, buf[:min(int(in.Size), len(buf))], in.Offset)
	if err != nil {
		return nil, v.failInode(&in.InHeader, err)
	}
	v.note(op, access.Read, ino, 0, "")
	return fuse.ReadResultData(buf[:n]), fuse.OK
}

func (v *view) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	h := &in.InHeader
	op, ino := v.beginOpen(h, in.Fh), tree.Ino(in.NodeId)
	if in.WriteFlags&fuse.WRITE_CACHE != 0 {
		// Pages written through a mapping: whoever the kernel names, it is not
		// the process that wrote them.
		op = handle(in.Fh).op()
	}
	c := v.caller(h, op)
	c.KillPriv = in.WriteFlags&fuse.WRITE_KILL_SUIDGID != 0
	n, err := v.fs.WriteAt(c, ino, data, in.Offset)
	if n > 0 {
		v.note(op, access.Write, ino, 0, "")
		return uint32(n), fuse.OK
	}
	if err != nil {
		return 0, v.failInode(h, err)
	}
	return 0, fuse.OK
}

// Flush is never asked again after this: every write was written through, and
// the kernel writes mapped pages back by itself when a file is closed.
func (v *view) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	v.begin(&in.InHeader)
	return fuse.ENOSYS
}

func (v *view) Fsync(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	v.begin(&in.InHeader)
	const dataOnly = 1
	if err := v.fs.Sync(tree.Ino(in.NodeId), in.FsyncFlags&dataOnly != 0); err != nil {
		return v.failInode(&in.InHeader, err)
	}
	return fuse.OK
}

func (v *view) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return v.Fsync(cancel, in)
}

func (v *view) Fallocate(_ <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	h := &in.InHeader
	op, ino := v.beginOpen(h, in.Fh), tree.Ino(in.NodeId)
	if err := v.fs.Fallocate(v.caller(h, op), ino, in.Mode, in.Offset, in.Length); err != nil {
		return v.failInode(h, err)
	}
	v.note(op, access.Write, ino, 0, "")
	return fuse.OK
}

func (v *view) Lseek(_ <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	v.begin(&in.InHeader)
	off, err := v.fs.Seek(tree.Ino(in.NodeId), in.Offset, int(in.Whence))
	if err != nil {
		return v.failInode(&in.InHeader, err)
	}
	out.Offset = off
	return fuse.OK
}

func (v *view) CopyFileRange(_ <-chan struct{}, in *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	h := &in.InHeader
	op, src, dst := v.beginOpen(h, in.FhOut), tree.Ino(in.NodeId), tree.Ino(in.NodeIdOut)
	if in.Flags != 0 {
		return 0, fuse.EINVAL
	}
	n, err := v.fs.CopyRange(v.caller(h, op), src, in.OffIn, dst, in.OffOut, min(in.Len, maxCopy))
	if n == 0 && err != nil {
		return 0, v.failInode(h, err)
	}
	v.note(op, access.Read, src, 0, "")
	v.note(op, access.Write, dst, 0, "")
	return uint32(n), fuse.OK
}
