// Package attribution knows who wrote each line of a text, and carries that
// knowledge through edits and merges. It sees hashes of lines, never sessions'
// files, and encodes its own section of a layer.
//
// Words. An origin is who wrote a line. A span is a run of lines of one origin;
// a file's spans tile it from its first line to its last. A file that is not
// text, or too large to be one, is wholesale: it counts as a single line.
//
// A line keeps its origin as long as edits leave it alone. The edit script is
// that of occ/linediff, the one that the merge uses too, so that blame after a
// merge is carried, not guessed.
package attribution

import (
	"time"

	"ephemeral-sandbox/occ/linediff"
)

// Kind says what sort of origin a line has. The numbers are part of the layer
// format.
type Kind uint8

const (
	// Unknown: nothing is recorded.
	Unknown Kind = 0
	// Original: the line stood in the imported workspace.
	Original Kind = 1
	// Session: an operation inside a workspace session wrote it.
	Session Kind = 2
	// Operation: a file operation without a session wrote it.
	Operation Kind = 3
)

// Origin is who wrote a line.
type Origin struct {
	Kind      Kind
	Session   string // id of the workspace session
	Operation string // id of the operation
	Command   string // what the operation ran, for people
	Time      time.Time
	// Commit that published the line; 0 means the commit whose layer carries
	// the origin, or none yet. For Unknown and Original it is always 0.
	Commit uint64
}

// Owner is the origin as reports name it: workspace_session:ID, operation:ID,
// original or unknown.
func (o Origin) Owner() string {
	switch o.Kind {
	case Original:
		return "original"
	case Session:
		return "workspace_session:" + o.Session
	case Operation:
		return "operation:" + o.Operation
	default:
		return "unknown"
	}
}

// Equal reports whether o and p are the same origin, their times compared as
// instants.
func (o Origin) Equal(p Origin) bool {
	if !o.Time.Equal(p.Time) {
		return false
	}
	o.Time, p.Time = time.Time{}, time.Time{}
	return o == p
}

// In resolves a Commit of 0 to the commit that carries the origin.
func (o Origin) In(commit uint64) Origin {
	if o.Commit == 0 && (o.Kind == Session || o.Kind == Operation) {
		o.Commit = commit
	}
	return o
}

// Span is a run of lines of one origin.
type Span struct {
	Lines  int
	Origin Origin
}

// Spans tile a file. No span is empty, and neighbours differ in origin.
type Spans []Span

// Whole is the spans of a file of n lines with one origin.
func Whole(n int, o Origin) Spans { return Spans(nil).add(n, o) }

// Lines is how many lines the spans cover.
func (s Spans) Lines() int {
	n := 0
	for _, sp := range s {
		n += sp.Lines
	}
	return n
}

// In resolves every Commit of 0 to the commit that carries the spans.
func (s Spans) In(commit uint64) Spans {
	var out Spans
	for _, sp := range s {
		out = out.add(sp.Lines, sp.Origin.In(commit))
	}
	return out
}

// add appends n lines, joined with the last span when that has the same origin.
func (s Spans) add(n int, o Origin) Spans {
	switch last := len(s) - 1; {
	case n <= 0:
		return s
	case last >= 0 && s[last].Origin.Equal(o):
		s[last].Lines += n
		return s
	default:
		return append(s, Span{n, o})
	}
}

// cursor reads spans from front to back.
type cursor struct {
	spans Spans
	used  int // lines of spans[0] already passed
}

// take moves n lines on, appending their spans to out. Lines beyond the last
// span are unknown.
func (c *cursor) take(n int, out Spans) Spans {
	for n > 0 && len(c.spans) > 0 {
		step := min(n, c.spans[0].Lines-c.used)
		out = out.add(step, c.spans[0].Origin)
		n -= step
		c.skip(step)
	}
	return out.add(n, Origin{})
}

// skip moves n lines on.
func (c *cursor) skip(n int) {
	for n > 0 && len(c.spans) > 0 {
		step := min(n, c.spans[0].Lines-c.used)
		n -= step
		if c.used += step; c.used == c.spans[0].Lines {
			c.spans, c.used = c.spans[1:], 0
		}
	}
}

// Carry gives the spans of the new text: lines that the edit from old left
// alone keep their origin, the others have origin o. Lines of old that oldSpans
// do not cover are of unknown origin.
func Carry(old Lines, oldSpans Spans, now Lines, o Origin) Spans {
	var out Spans
	c := cursor{spans: oldSpans}
	at := 0
	for _, e := range linediff.DiffHashes(old, now) {
		out = c.take(e.A0-at, out)
		c.skip(e.A1 - e.A0)
		out = out.add(e.B1-e.B0, o)
		at = e.A1
	}
	return c.take(len(old)-at, out)
}

// PieceOf is a run of lines of a version whose spans are known.
type PieceOf struct {
	Spans        Spans
	Start, Count int
}

// Select gives the spans of a text put together from pieces of others, as a
// merge does it.
func Select(pieces []PieceOf) Spans {
	var out Spans
	places := map[*Span]*place{} // a merge takes from each version front to back
	for _, p := range pieces {
		pl := &place{cursor: cursor{spans: p.Spans}}
		if len(p.Spans) > 0 {
			if known := places[&p.Spans[0]]; known != nil && known.line <= p.Start {
				pl = known
			}
			places[&p.Spans[0]] = pl
		}
		pl.skip(p.Start - pl.line)
		out = pl.take(p.Count, out)
		pl.line = p.Start + p.Count
	}
	return out
}

// place is a cursor that knows the line it is at.
type place struct {
	cursor
	line int
}

// Range is a run of lines of one origin with its place in the file. Start
// counts from 1.
type Range struct {
	Start, Count int
	Origin       Origin
}

// Ranges places the spans.
func Ranges(s Spans) []Range {
	ranges := make([]Range, 0, len(s))
	start := 1
	for _, sp := range s {
		ranges = append(ranges, Range{start, sp.Lines, sp.Origin})
		start += sp.Lines
	}
	return ranges
}
