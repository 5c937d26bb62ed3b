package linediff

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Unified prints the change from a to b as git does, with context unchanged
// lines around each: the two file lines, then hunks with the heading of the
// function they are in, then a note where a last line has no terminator. It is
// empty when a and b are equal. Names are printed as given, quoted when they
// hold what a terminal should not see; the caller puts "a/" and "b/" before
// them, or gives "/dev/null".
func Unified(nameA, nameB string, a, b []byte, context int) []byte {
	if bytes.Equal(a, b) {
		return nil
	}
	if !IsText(a) || !IsText(b) {
		return fmt.Appendf(nil, "Binary files %s and %s differ\n", quote(nameA), quote(nameB))
	}
	p := printer{a: Cut(a), b: Cut(b)}
	ids := Intern(p.a, p.b)
	edits := DiffIDs(ids[0], ids[1])
	p.out = fmt.Appendf(p.out, "--- %s\n+++ %s\n", label(nameA), label(nameB))
	for len(edits) > 0 {
		n := 1
		for n < len(edits) && edits[n].A0-edits[n-1].A1 <= 2*context {
			n++
		}
		p.hunk(edits[:n], context)
		edits = edits[n:]
	}
	return p.out
}

type printer struct {
	a, b    Text
	out     []byte
	scanned int    // lines of a that heading has seen
	heading []byte // the newest function line among them
}

func (p *printer) hunk(edits []Edit, context int) {
	first, last := edits[0], edits[len(edits)-1]
	before := min(context, first.A0)
	after := min(context, p.a.Len()-last.A1)
	at, end := first.A0-before, last.A1+after
	bStart, bEnd := first.B0-before, last.B1+after

	p.out = append(p.out, "@@ -"...)
	p.rangeOf(at, end)
	p.out = append(p.out, " +"...)
	p.rangeOf(bStart, bEnd)
	p.out = append(p.out, " @@"...)
	if h := p.headingBefore(at); len(h) > 0 {
		p.out = append(append(p.out, ' '), h...)
	}
	p.out = append(p.out, '\n')
	for _, e := range edits {
		for ; at < e.A0; at++ {
			p.line(' ', p.a.Line(at))
		}
		for ; at < e.A1; at++ {
			p.line('-', p.a.Line(at))
		}
		for i := e.B0; i < e.B1; i++ {
			p.line('+', p.b.Line(i))
		}
	}
	for ; at < end; at++ {
		p.line(' ', p.a.Line(at))
	}
}

// rangeOf prints lines [start,end) as "first,count"; of no lines, the line
// before them.
func (p *printer) rangeOf(start, end int) {
	n := end - start
	if n > 0 {
		start++
	}
	p.out = strconv.AppendInt(p.out, int64(start), 10)
	if n != 1 {
		p.out = strconv.AppendInt(append(p.out, ','), int64(n), 10)
	}
}

func (p *printer) line(sign byte, line []byte) {
	p.out = append(append(p.out, sign), line...)
	if !bytes.HasSuffix(line, newline) {
		p.out = append(p.out, "\n\\ No newline at end of file\n"...)
	}
}

const headingMax = 80 // bytes

// headingBefore is the nearest line above line at of the old text that begins
// like the head of a function: with a letter, an underscore or a dollar sign.
func (p *printer) headingBefore(at int) []byte {
	for ; p.scanned < at; p.scanned++ {
		line := p.a.Line(p.scanned)
		if c := line[0]; 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c == '_' || c == '$' {
			p.heading = bytes.TrimRight(line[:min(len(line), headingMax)], " \t\n\v\f\r")
		}
	}
	return p.heading
}

// label is a name as it stands in a file line: a tab ends one that has spaces,
// so that patch(1) can tell where it ends.
func label(name string) string {
	q := quote(name)
	if q == name && strings.Contains(name, " ") {
		return name + "\t"
	}
	return q
}

// quote puts a name with control bytes, quotes, backslashes or broken UTF-8
// between double quotes, in C's escapes.
func quote(name string) string {
	plain := utf8.ValidString(name)
	for i := 0; plain && i < len(name); i++ {
		plain = name[i] >= ' ' && name[i] != '"' && name[i] != '\\' && name[i] != 0x7f
	}
	if plain {
		return name
	}
	const short = "\a\b\t\n\v\f\r\"\\"
	var out strings.Builder
	out.WriteByte('"')
	for i := 0; i < len(name); i++ {
		c := name[i]
		switch at := strings.IndexByte(short, c); {
		case at >= 0:
			out.WriteByte('\\')
			out.WriteByte(`abtnvfr"\`[at])
		case c < ' ' || c >= 0x7f:
			fmt.Fprintf(&out, `\%03o`, c)
		default:
			out.WriteByte(c)
		}
	}
	out.WriteByte('"')
	return out.String()
}
