// Package occ is the gate's judgement: it decides whether what a session
// changed may become a layer on top of the current head, and what that layer
// holds. Values in, values out; it writes nothing and locks nothing.
//
// Words. Base is the tree the session leased, head the newest commit, session
// the session's own view. A delta names the directory entries and inodes that
// the session changed. A verdict is the layer to seal, or every conflict that
// stands in its way.
//
// Promises. Inode numbers are persistent, so a rename is two directory entries
// and content follows it. What only one side changed is taken; what both sides
// changed alike is one change; texts are merged line by line; bits, owners and
// extended attributes are merged one by one; anything else is a conflict. All
// conflicts of a delta are reported, and nothing of the head is overwritten
// without one.
package occ

import (
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ/merge"
)

// View is a tree as of one instant.
type View interface {
	// Lookup returns tree.ErrNotExist when the directory has no such name.
	Lookup(dir tree.Ino, name string) (tree.Dirent, error)
	// Inode returns tree.ErrNotExist when the view has no record of ino.
	Inode(ino tree.Ino) (tree.Inode, error)
	// Names lists the names of ino; none, or tree.ErrNotExist, when it has none.
	Names(ino tree.Ino) ([]tree.Dirent, error)
	// Content returns the bytes of a regular file. It is asked only for files
	// of at most merge.MaxBytes.
	Content(ino tree.Ino) ([]byte, error)
	// Hash returns the content hash of a regular file.
	Hash(ino tree.Ino) (tree.Hash, error)
	// ReadDir calls fn with the names of dir that are >= from, in byte order,
	// until fn returns false.
	ReadDir(dir tree.Ino, from string, fn func(tree.Dirent) bool) error
}

// HeadView is the tree at the head, which also knows when it last changed.
type HeadView interface {
	View
	// DirentChanged is the last commit that changed the entry, 0 when none did.
	DirentChanged(dir tree.Ino, name string) uint64
	// InodeChanged is the last commit that wrote a record for ino.
	InodeChanged(ino tree.Ino) uint64
	// SubtreeChanged is the last commit that changed anything beneath dir.
	SubtreeChanged(dir tree.Ino) uint64
	// Number is the head's commit number.
	Number() uint64
}

// Key names one directory entry.
type Key struct {
	Dir  tree.Ino
	Name string
}

// DirentChange is an entry that the session's view has different from its
// base: Ino 0 means removed, Was is what the base has there (0: nothing).
type DirentChange struct {
	Dir  tree.Ino
	Name string
	Ino  tree.Ino
	Kind tree.Kind
	Was  tree.Ino
}

// InodeChange is an inode that the session touched. Meta and Data tell what
// was touched; the verdict compares for itself, so they may be generous.
// Lineage is the inode whose content this one's replaces.
type InodeChange struct {
	tree.Inode
	New, Data, Meta bool
	Lineage         tree.Ino
	LastOp          tree.Op
}

// Delta is everything that a session changed against its base, in any order.
type Delta struct {
	Dirents []DirentChange
	Inodes  []InodeChange
}

// Merger combines three contents of one path; pieces, when not nil, tile the
// merged bytes by origin. ok is false when it cannot, which is a conflict.
type Merger func(base, head, session []byte) (merged []byte, pieces []merge.Piece, ok bool)

// Options adjusts Validate and Refresh. Zero is fit for production.
type Options struct {
	// Policy chooses the merger for a path that both sides changed. Nil, or a
	// nil Merger, means the three-way merge of text lines.
	Policy func(path string) Merger
	// Now is the modification time of merged content, moved up when the head's
	// or the session's is not earlier.
	Now tree.Time
}

// Source tells where the bytes of an inode in a verdict are.
type Source uint8

const (
	// FromNothing: not a regular file; the record is all there is.
	FromNothing Source = iota
	// FromSession: the content that the session's view has under SessionIno.
	FromSession
	// FromHead: the content that the head has under HeadIno; the layer may
	// point at it instead of storing it.
	FromHead
	// FromMerged: the bytes in Merged.
	FromMerged
)

// InodePlan is one inode record of the layer. The embedded Inode is complete
// but for Hash and Alloc of content from FromSession and FromMerged.
type InodePlan struct {
	tree.Inode
	From   Source
	Merged []byte
	Pieces []merge.Piece // origins of Merged's lines; nil when not a line merge
	// The inodes whose versions went in, each in its own view; 0 means none.
	BaseIno, HeadIno, SessionIno tree.Ino
	// Path of the inode in the session, or in the head when it has none there.
	Path string
}

// Verdict is the outcome of Validate. With conflicts there are no Dirents and no
// Inodes: nothing of the delta can be published.
type Verdict struct {
	// Dirents to write over the head; Ino 0 removes. Sorted by (Dir, Name).
	Dirents []tree.Dirent
	// Inodes to write over the head, sorted by inode number.
	Inodes []InodePlan
	// Merged lists the paths whose content was merged from both sides.
	Merged []string
	// Converged lists the paths that both sides changed alike.
	Converged []string
	Conflicts []Conflict
	// TimeOnly counts inodes whose times alone had changed.
	TimeOnly int
}

// Empty reports whether there is nothing to publish.
func (v *Verdict) Empty() bool {
	return len(v.Dirents) == 0 && len(v.Inodes) == 0 && len(v.Conflicts) == 0
}

// The kinds of conflict. Of two words the first is the session's deed, the second the
// head's.
const (
	ConflictContent      = "content"       // texts whose changes touch
	ConflictBinary       = "binary"        // both changed what is not text
	ConflictModifyDelete = "modify/delete" // the session changed what the head deleted
	ConflictDeleteModify = "delete/modify" // the session deleted what the head changed
	ConflictAddAdd       = "add/add"       // both made the name, differently
	ConflictKind         = "kind"          // a different type of file on each side
	ConflictSymlink      = "symlink"       // two targets
	ConflictParentGone   = "parent-gone"   // the head removed the directory
	ConflictRename       = "rename/rename" // two new names for one file
	ConflictCycle        = "cycle"         // two moves put directories into each other
	ConflictXattr        = "xattr"         // one key, two values
	ConflictOwner        = "owner"         // two new owners or groups
)

// Version is one side of a conflict.
type Version struct {
	Path string
	Kind tree.Kind
	Mode uint32
	Size uint64
	Hash tree.Hash // zero unless Kind is File
	Link string
}

// Conflict is one reason why a delta cannot be published as it stands. A nil
// version means that the path is absent on that side.
type Conflict struct {
	Path                string
	AlsoNames           []string // the other names of the same inode
	Kind                string
	Base, Head, Session *Version
	HeadCommit          uint64       // the last commit that changed it at the head
	Hunks               []merge.Hunk // for ConflictContent, and ConflictAddAdd of texts
	Lost                []string     // for ConflictParentGone: what the head has no place for
	Attr                string       // for ConflictXattr and ConflictOwner: which one
	Remedy              string       // what to do, one sentence

	// What the versions are made of, each in its own view; 0 means absent.
	BaseIno, HeadIno, SessionIno tree.Ino
	// SessionKey is the entry in the session's tree, HeadKey the one in the
	// head's; the zero Key means that the side has none.
	SessionKey, HeadKey Key
}
