// Package merge joins two edited versions of a text with the version they both
// came from. Texts are lines of bytes: nothing is decoded, and a merged text is
// made of lines that stand in one of the three versions, terminators included.
package merge

// MaxBytes is the size beyond which a file is not merged line by line.
const MaxBytes = 32 << 20

// Side names a version.
type Side uint8

// The versions; Marker is a conflict marker line, which is nobody's.
const (
	Base Side = iota
	Head
	Session
	Marker
)

// Span is a run of lines, counted from 0.
type Span struct{ Start, Count int }

// Piece is a run of output lines and the version they come from. For Marker,
// Start is 0.
type Piece struct {
	Side         Side
	Start, Count int
}

// Hunk is a conflict: the lines of each version that stand against each other.
type Hunk struct{ Base, Head, Session Span }
