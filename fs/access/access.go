// Package access keeps, for one session, what each operation looked up, found
// absent, listed, read and changed. It serves people who ask what a command
// touched, and the gate, which takes a session's read set from it.
//
// The record is a set with counts: equal accesses (same operation, kind, inode,
// directory and name) are one Entry whose Count and Last grow. It is kept in a
// bounded table in memory and spilled, sorted and compressed, to segment files
// of a bounded total size. What could not be kept is recorded as a Gap: an
// empty list of gaps means that the record is complete, and nothing else does.
//
// Segments survive the death of the process, not a power cut: they are written
// without a sync, and a torn one is found by its checksums and becomes a gap.
// What was noted since the last Flush dies with the process, which the next
// Open finds out and records as a gap too.
//
// There is one lock, Recorder.mu; it is never held across I/O but for Each and
// Open, which open files under it.
package access

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"ephemeral-sandbox/fs/tree"
)

// Kind says what was done.
type Kind uint8

// The kinds of access. The numbers are part of the segment format.
const (
	Lookup Kind = 1  // a name was found; Dir, Name and the Ino it led to
	Absent Kind = 2  // a name was looked for and not found; Dir and Name
	List   Kind = 3  // a directory was listed, its entries' attributes included; Ino
	Read   Kind = 4  // content or a link target was read, or opened for reading; Ino
	Write  Kind = 5  // content was changed; Ino
	Create Kind = 6  // an inode was made; Ino, Dir, Name (no name: O_TMPFILE)
	Rename Kind = 7  // a name moved; noted once for the old place, once for the new
	Remove Kind = 8  // a name went away, or was replaced by a rename; Ino, Dir, Name
	Attr   Kind = 9  // attributes or extended attributes were changed; Ino
	Link   Kind = 10 // an inode got one more name; Ino, Dir, Name
)

var kindNames = [...]string{"none", "lookup", "absent", "list", "read", "write", "create", "rename", "remove", "attr", "link"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Valid reports whether k is one of the ten kinds.
func (k Kind) Valid() bool { return k >= Lookup && k <= Link }

// Entry is all equal accesses taken together. Times are wall clock, of the
// first and the last of them.
type Entry struct {
	Op    tree.Op
	Kind  Kind
	Ino   tree.Ino
	Dir   tree.Ino
	Name  string
	Count uint64
	First time.Time
	Last  time.Time
}

// Reason says why accesses are missing.
type Reason uint8

// The reasons of a gap. The numbers are part of the segment format.
const (
	Overflow Reason = 1 // noted faster than the disk took it
	Dropped  Reason = 2 // the oldest segments went to keep Options.MaxBytes
	Crashed  Reason = 3 // the process ended without Close
	Damaged  Reason = 4 // a segment failed its checksum
	Failed   Reason = 5 // a segment could not be written
)

var reasonNames = [...]string{"none", "overflow", "dropped", "crashed", "damaged", "failed"}

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

// Gap is a stretch of time from which accesses are missing.
type Gap struct {
	Reason Reason
	First  time.Time
	Last   time.Time
	Notes  uint64 // accesses lost; 0 when not known
}

// record is an Entry as tables and segments hold it.
type record struct {
	key
	stat
}

// key is what equal accesses have in common.
type key struct {
	op   tree.Op
	kind Kind
	ino  tree.Ino
	dir  tree.Ino
	name string
}

// stat is what accumulates. Times are nanoseconds since the epoch.
type stat struct {
	count       uint64
	first, last int64
}

func (k key) compare(o key) int {
	return cmp.Or(
		cmp.Compare(k.op, o.op),
		cmp.Compare(k.kind, o.kind),
		cmp.Compare(k.dir, o.dir),
		strings.Compare(k.name, o.name),
		cmp.Compare(k.ino, o.ino),
	)
}

func (s *stat) add(o stat) {
	s.count += o.count
	s.first = min(s.first, o.first)
	s.last = max(s.last, o.last)
}

func (r record) entry() Entry {
	return Entry{
		Op: r.op, Kind: r.kind, Ino: r.ino, Dir: r.dir, Name: r.name,
		Count: r.count, First: time.Unix(0, r.first), Last: time.Unix(0, r.last),
	}
}
