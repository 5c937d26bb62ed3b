package overlay

import (
	"io"
	"time"

	"ephemeral-sandbox/fs/tree"
)

// File is the whole content of a regular file. ReadAt follows io.ReaderAt;
// holes read as zeros. Data gives the first range at or after off that may hold
// anything but zeros, and false when only a hole follows.
//
// It is an alias, so that any package which spells the same three methods as an
// alias satisfies Lower without an adapter.
type File = interface {
	io.ReaderAt
	Size() uint64
	Data(off uint64) (tree.Range, bool)
}

// Lower is the immutable tree beneath a session's changes, as fs/stack gives
// it. Names are answered with tree.ErrNotExist when absent; any other error is
// passed on to the caller unchanged.
type Lower interface {
	// Commit is the number of the commit this tree shows.
	Commit() uint64
	Lookup(dir tree.Ino, name string) (tree.Dirent, error)
	Inode(ino tree.Ino) (tree.Inode, error)
	// ReadDir gives the names at or after from in byte order.
	ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error
	Open(ino tree.Ino) (File, error)
	// Names gives every live name of ino.
	Names(ino tree.Ino) ([]tree.Dirent, error)
}

// Caller is who asks for a mutation.
type Caller struct {
	Op  tree.Op // the operation on whose account the change is booked
	UID uint32
	GID uint32

	// KillPriv asks that set-id bits and file capabilities are dropped, as the
	// kernel does with FUSE_WRITE_KILL_SUIDGID and FATTR_KILL_SUIDGID. A caller
	// whose UID is not 0 always drops them.
	KillPriv bool

	// Request is the kernel's number for this request, zero for none. It is
	// kept in the journal, so that Done can tell after a restart whether a
	// request that the kernel sends again was carried out already.
	Request uint64
}

// Quota bounds what one session may hold. Zero means no bound.
type Quota struct {
	Bytes  uint64 // private file content, symlink targets and xattrs
	Inodes uint64 // inodes the session made
}

// Usage is what a session holds, in the units of Quota.
type Usage struct{ Bytes, Inodes uint64 }

// Hooks let the owner follow who wrote what. A nil hook is not called.
type Hooks struct {
	// Settle is called before the bytes of ino are changed, or lose their last
	// name, through another operation than the one that wrote them last; by is
	// that last writer and content what it left. The hook runs on the writer's
	// own path with the inode's data lock held: content is valid during the
	// call only, and of FS only Attr, Inode, Lineage, Lookup, Path and Resolve
	// may be called. The change may still fail, and the same content be told
	// again. A removed name's inode is told before it loses the name, and the
	// other names of an inode that keeps some are no reason to tell.
	Settle func(ino tree.Ino, by tree.Op, content File)
}

// Options say where a session's tree lives and what it stands on.
type Options struct {
	Dir         string                   // the session's private directory; made when missing
	Lower       Lower                    // must show the commit that the journal was last based on
	NewIno      func() (tree.Ino, error) // a number never handed out before
	Quota       Quota
	Hooks       Hooks
	Clock       func() time.Time // nil is time.Now
	KeepOrphans bool             // keep unlinked inodes that were open when the journal was last written
}

// SetAttr names the attributes to change; nil fields stay. Setting a size also
// sets the modification time to now unless Mtime is given.
type SetAttr struct {
	Mode     *uint32 // permission, set-id and sticky bits
	UID, GID *uint32
	Size     *uint64
	Mtime    *tree.Time
	Ctime    *tree.Time // nil is now
}

// Flags of Rename, with the numbers of renameat2(2).
const (
	RenameNoReplace uint32 = 1
	RenameExchange  uint32 = 2
)

// Modes of Fallocate, with the numbers of fallocate(2).
const (
	FallocKeepSize  uint32 = 0x01
	FallocPunchHole uint32 = 0x02
	FallocZeroRange uint32 = 0x10
)

// Whence values of Seek, with the numbers of lseek(2).
const (
	SeekData = 3
	SeekHole = 4
)

// Flags of SetXattr, with the numbers of setxattr(2).
const (
	XattrCreate  = 1
	XattrReplace = 2
)

// StatFS is what statfs(2) shows, in bytes and inodes.
type StatFS struct {
	BlockSize  uint32
	Bytes      uint64
	BytesFree  uint64
	Inodes     uint64
	InodesFree uint64
	NameMax    uint32
}

// Key names one directory entry.
type Key struct {
	Dir  tree.Ino
	Name string
}

// Delta is everything a session changed against its lower tree.
type Delta struct {
	Dirents []DirentChange // by directory, then name
	Inodes  []InodeChange  // by number
}

// DirentChange is one name that differs from the lower tree. Names inside a
// lower directory that the session removed are listed too.
type DirentChange struct {
	Dir  tree.Ino
	Name string
	Ino  tree.Ino // 0 when the name was removed
	Kind tree.Kind
	Was  tree.Ino // what the lower tree has there; 0 for nothing
}

// InodeChange is one live inode that the session made or touched. When New,
// Data and Meta are all false only times or the link count moved.
type InodeChange struct {
	tree.Inode      // as it is now; Hash is zero when the content changed
	New        bool // not in the lower tree
	Data       bool // content differs, or is new
	Meta       bool // mode, owner, xattrs, link target or device differ, or are new

	// Lineage is the lower inode whose content this one's replaces: what it was
	// renamed over, or what had its name before. Zero for none.
	Lineage tree.Ino
	// Prior is the inode that this one replaced directly; it differs from
	// Lineage when the session replaced a name more than once.
	Prior  tree.Ino
	LastOp tree.Op // the operation that changed the bytes last
}

// FileEdit gives an inode new content during Rebase.
type FileEdit struct {
	Ino     tree.Ino
	Content []byte      // the bytes; nil with Source
	Attr    *tree.Inode // attributes of an inode the session does not have yet, or to replace; nil keeps them
	Lineage tree.Ino
	Op      tree.Op // booked as the last writer

	// Source, when not nil, is where the bytes are copied from instead, by
	// pieces and without its holes. It may be content of either lower tree, or
	// what FS.Data of the frozen session gave for any inode.
	Source File
}

// NewInode is an inode without content that Rebase adds.
type NewInode struct {
	tree.Inode
	Op tree.Op
}

// Edit is what Rebase changes in the session together with the lower tree.
// Drops come first, then inodes and files, then names. Link counts are worked
// out by Rebase.
type Edit struct {
	DropAll     bool       // forget every change; unlinked inodes that are still open stay
	DropDirents []Key      // names the new lower tree holds as the session has them
	DropInodes  []tree.Ino // inodes the new lower tree holds as the session has them
	Files       []FileEdit
	NewInodes   []NewInode
	Dirents     []tree.Dirent // Ino 0 removes the name
	Op          tree.Op
}
