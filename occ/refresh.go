package occ

import (
	"errors"

	"ephemeral-sandbox/fs/tree"
)

// Labels names the three versions in conflict markers.
type Labels struct{ Base, Head, Session string }

// FileEdit is new content for an inode of the upper.
type FileEdit struct {
	InodePlan
	// Marked is set when Merged holds conflict markers.
	Marked bool
}

// Plan is what makes a session's upper, taken over base, stand over the head.
type Plan struct {
	// DropDirents and DropInodes leave the upper: the head shows through.
	DropDirents []Key
	DropInodes  []tree.Ino
	// Dirents and Inodes are put into the upper; Ino 0 hides the head's name.
	Dirents []tree.Dirent
	Inodes  []FileEdit
	// Merged lists the paths whose content was merged without conflict.
	Merged    []string
	Conflicts []Conflict
}

// Refresh plans how the session moves from base to head.
func Refresh(base View, baseCommit uint64, head HeadView, session View, d Delta, l Labels, newIno func() (tree.Ino, error), o Options) (*Plan, error) {
	return nil, errors.ErrUnsupported
}
