// Package merge joins two edited versions of a text with the version they both
// came from. Texts are lines of bytes: nothing is decoded, and a merged text is
// made of lines that stand in one of the three versions, terminators included.
//
// Edits of the two sides that overlap or touch form one region. A region that
// one side left alone takes the other's text, one that both changed alike takes
// the head's, any other is a conflict: the rules of git merge-file.
package merge

import (
	"bytes"
	"slices"

	"ephemeral-sandbox/occ/linediff"
)

// MaxBytes is the size beyond which a file is not merged line by line.
const MaxBytes = linediff.MaxBytes

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

// Result is the outcome of a merge. Pieces tile the merged text and are nil
// unless Clean; text that both sides left alone is the head's. Hunks are the
// conflicts.
type Result struct {
	Pieces []Piece
	Hunks  []Hunk
	Clean  bool

	regions []region
}

// region is a part of the three versions, all unchanged ones included.
type region struct {
	Hunk
	take     Side // Head or Session
	conflict bool
}

// Three merges head and session, both made from base.
func Three(base, head, session []byte) Result {
	texts := [3]linediff.Text{linediff.Cut(base), linediff.Cut(head), linediff.Cut(session)}
	ids := linediff.Intern(texts[0], texts[1], texts[2])
	w := walker{
		ids:     [3][]uint32{ids[0], ids[1], ids[2]},
		head:    linediff.DiffIDs(ids[0], ids[1]),
		session: linediff.DiffIDs(ids[0], ids[2]),
	}
	w.run()
	r := Result{regions: w.out, Clean: true}
	for _, g := range r.regions {
		if g.conflict {
			r.Clean = false
			r.Hunks = append(r.Hunks, g.Hunk)
		}
	}
	if r.Clean {
		for _, g := range r.regions {
			r.Pieces = appendPiece(r.Pieces, g.take, g.side(g.take))
		}
	}
	return r
}

func (h Hunk) side(s Side) Span {
	switch s {
	case Head:
		return h.Head
	case Session:
		return h.Session
	default:
		return h.Base
	}
}

// appendPiece adds a piece, joined with the last when it goes on from there.
func appendPiece(pieces []Piece, side Side, s Span) []Piece {
	if s.Count == 0 {
		return pieces
	}
	if n := len(pieces); n > 0 && pieces[n-1].Side == side && side != Marker &&
		pieces[n-1].Start+pieces[n-1].Count == s.Start {
		pieces[n-1].Count += s.Count
		return pieces
	}
	return append(pieces, Piece{Side: side, Start: s.Start, Count: s.Count})
}

// walker goes down the base with both edit scripts.
type walker struct {
	ids           [3][]uint32
	head, session []linediff.Edit
	at            [3]int // lines of each version that are in out
	out           []region
}

func (w *walker) run() {
	for len(w.head) > 0 || len(w.session) > 0 {
		start := len(w.ids[Base])
		if len(w.head) > 0 {
			start = w.head[0].A0
		}
		if len(w.session) > 0 {
			start = min(start, w.session[0].A0)
		}
		w.same(start - w.at[Base])
		w.region(start)
	}
	w.same(len(w.ids[Base]) - w.at[Base])
}

// same adds n lines that all three versions share.
func (w *walker) same(n int) {
	if n > 0 {
		w.add(n, n, n, region{take: Head})
	}
}

func (w *walker) add(base, head, session int, r region) {
	r.Hunk = Hunk{Span{w.at[Base], base}, Span{w.at[Head], head}, Span{w.at[Session], session}}
	w.out = append(w.out, r)
	w.at[Base] += base
	w.at[Head] += head
	w.at[Session] += session
}

// region adds the region that begins at base line start: every edit of either
// side that touches what it already covers.
func (w *walker) region(start int) {
	end := start
	headGrowth, sessionGrowth := 0, 0
	headEdits, sessionEdits := 0, 0
	for {
		switch {
		case len(w.head) > 0 && w.head[0].A0 <= end:
			e := w.head[0]
			w.head = w.head[1:]
			end = max(end, e.A1)
			headGrowth += e.B1 - e.B0 - (e.A1 - e.A0)
			headEdits++
		case len(w.session) > 0 && w.session[0].A0 <= end:
			e := w.session[0]
			w.session = w.session[1:]
			end = max(end, e.A1)
			sessionGrowth += e.B1 - e.B0 - (e.A1 - e.A0)
			sessionEdits++
		default:
			base := end - start
			r := region{take: Head}
			head, session := base+headGrowth, base+sessionGrowth
			switch {
			case sessionEdits == 0:
			case headEdits == 0:
				r.take = Session
			default:
				r.conflict = !slices.Equal(
					w.ids[Head][w.at[Head]:w.at[Head]+head],
					w.ids[Session][w.at[Session]:w.at[Session]+session])
			}
			w.add(base, head, session, r)
			return
		}
	}
}

// Text is the merged text of a clean result; the arguments are those of Three.
func (r Result) Text(base, head, session []byte) []byte {
	texts := [3]linediff.Text{Head: linediff.Cut(head), Session: linediff.Cut(session)}
	out := make([]byte, 0, max(len(base), len(head), len(session)))
	for _, p := range r.Pieces {
		out = append(out, texts[p.Side].Lines(p.Start, p.Count)...)
	}
	return out
}

// Marked is the merged text with each conflict between diff3 markers: the
// session's lines, the base's, the head's. Labels are indexed by Side and stand
// behind the markers. The pieces tile the text.
func (r Result) Marked(base, head, session []byte, labels [3]string) ([]byte, []Piece) {
	m := marker{texts: [3]linediff.Text{linediff.Cut(base), linediff.Cut(head), linediff.Cut(session)}}
	for _, g := range r.regions {
		if !g.conflict {
			m.lines(g.take, g.side(g.take))
			continue
		}
		eol := m.eol(g.Hunk)
		m.mark("<<<<<<<", labels[Session], eol)
		m.block(Session, g.Session, eol)
		m.mark("|||||||", labels[Base], eol)
		m.block(Base, g.Base, eol)
		m.mark("=======", "", eol)
		m.block(Head, g.Head, eol)
		m.mark(">>>>>>>", labels[Head], eol)
	}
	return m.out, m.pieces
}

type marker struct {
	texts  [3]linediff.Text
	out    []byte
	pieces []Piece
}

func (m *marker) lines(side Side, s Span) {
	m.out = append(m.out, m.texts[side].Lines(s.Start, s.Count)...)
	m.pieces = appendPiece(m.pieces, side, s)
}

// block is lines with a marker after them, so that a missing terminator is
// made good.
func (m *marker) block(side Side, s Span, eol string) {
	m.lines(side, s)
	if s.Count > 0 && !bytes.HasSuffix(m.out, []byte{'\n'}) {
		m.out = append(m.out, eol...)
	}
}

func (m *marker) mark(sign, label, eol string) {
	m.out = append(m.out, sign...)
	if label != "" {
		m.out = append(append(m.out, ' '), label...)
	}
	m.out = append(m.out, eol...)
	m.pieces = append(m.pieces, Piece{Side: Marker, Count: 1})
}

// eol is the line end of the markers of a conflict: CRLF where the lines above
// it in the session and in the head and the base's first line, as far as they
// have line ends, all end so.
func (m *marker) eol(h Hunk) string {
	seen := false
	for _, look := range [3]struct {
		side Side
		line int
	}{{Session, max(0, h.Session.Start-1)}, {Head, max(0, h.Head.Start-1)}, {Base, 0}} {
		text := m.texts[look.side]
		line := look.line
		if line == text.Len()-1 && line > 0 && !bytes.HasSuffix(text.Line(line), []byte{'\n'}) {
			line--
		}
		if line >= text.Len() || !bytes.HasSuffix(text.Line(line), []byte{'\n'}) {
			continue
		}
		if !bytes.HasSuffix(text.Line(line), []byte("\r\n")) {
			return "\n"
		}
		seen = true
	}
	if seen {
		return "\r\n"
	}
	return "\n"
}
