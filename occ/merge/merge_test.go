package merge_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"ephemeral-sandbox/occ/linediff"
	"ephemeral-sandbox/occ/merge"
)

func text(lines string) []byte {
	if lines == "" {
		return nil
	}
	return []byte(strings.ReplaceAll(lines, " ", "\n") + "\n")
}

func TestRules(t *testing.T) {
	for _, c := range []struct{ name, base, head, session, want string }{
		{"disjoint", "a b c d e", "A b c d e", "a b c d E", "A b c d E"},
		{"touching edits conflict", "a b c d", "a B c d", "a b C d", ""},
		{"insertion at the edge of an edit conflicts", "a b c", "a B c", "a b x c", ""},
		{"two insertions at one place conflict", "a b", "a x b", "a y b", ""},
		{"one line between suffices", "a b c", "A b c", "a b C", "A b C"},
		{"identical edits are one", "a b c", "a X c", "a X c", "a X c"},
		{"identical and another", "a b c d e", "a X c d e", "a X c d E", "a X c d E"},
		{"both deleted", "a b c", "a c", "a c", "a c"},
		{"delete against edit", "a b c", "a c", "a X c", ""},
		{"both from nothing", "", "a", "b", ""},
		{"session emptied", "a b", "a b", "", "empty"},
	} {
		t.Run(c.name, func(t *testing.T) {
			base, head, session := text(c.base), text(c.head), text(c.session)
			r := merge.Three(base, head, session)
			if r.Clean != (c.want != "") {
				t.Fatalf("clean is %v", r.Clean)
			}
			if c.want == "" {
				if len(r.Hunks) == 0 || r.Pieces != nil {
					t.Errorf("hunks %v, pieces %v", r.Hunks, r.Pieces)
				}
				return
			}
			want := text(strings.TrimSuffix(c.want, "empty"))
			if got := r.Text(base, head, session); !bytes.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

func TestMarked(t *testing.T) {
	base, head, session := []byte("a\nb\nc"), []byte("a\nB\nc"), []byte("a\nx\ny\nc2")
	r := merge.Three(base, head, session)
	got, pieces := r.Marked(base, head, session, [3]string{"L000001", "L000002", "s-1"})
	want := "a\n<<<<<<< s-1\nx\ny\nc2\n||||||| L000001\nb\nc\n=======\nB\nc\n>>>>>>> L000002\n"
	if string(got) != want {
		t.Errorf("got %q", got)
	}
	checkPieces(t, pieces, [3][]byte{base, head, session}, got)

	crlf := func(s string) []byte { return []byte(strings.ReplaceAll(s, "\n", "\r\n")) }
	base, head, session = crlf("a\nb\n"), crlf("a\nB\n"), crlf("a\nc\n")
	got, _ = merge.Three(base, head, session).Marked(base, head, session, [3]string{"b", "h", "s"})
	if want := crlf("a\n<<<<<<< s\nc\n||||||| b\nb\n=======\nB\n>>>>>>> h\n"); !bytes.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// checkPieces fails unless the pieces tile out with the lines they name; a line
// before a marker may have gained a terminator.
func checkPieces(t fataler, pieces []merge.Piece, versions [3][]byte, out []byte) {
	t.Helper()
	lines := linediff.Cut(out)
	at := 0
	for _, p := range pieces {
		if p.Count <= 0 || at+p.Count > lines.Len() {
			t.Fatalf("piece %+v at line %d of %d", p, at, lines.Len())
		}
		if p.Side != merge.Marker {
			got, want := lines.Lines(at, p.Count), linediff.Cut(versions[p.Side]).Lines(p.Start, p.Count)
			if !bytes.Equal(bytes.TrimRight(got, "\r\n"), bytes.TrimRight(want, "\r\n")) {
				t.Fatalf("piece %+v: %q, its version has %q", p, got, want)
			}
		}
		at += p.Count
	}
	if at != lines.Len() {
		t.Fatalf("pieces cover %d of %d lines", at, lines.Len())
	}
}

type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

func drawText() *rapid.Generator[[]byte] {
	return rapid.Custom(func(t *rapid.T) []byte {
		eol := rapid.SampledFrom([]string{"\n", "\r\n"}).Draw(t, "eol")
		words := rapid.SliceOfN(rapid.IntRange(0, 6), 0, 14).Draw(t, "words")
		var out []byte
		for _, w := range words {
			out = fmt.Appendf(out, "%d%s", w, eol)
		}
		if rapid.Bool().Draw(t, "torn") {
			out = bytes.TrimRight(out, "\r\n")
		}
		return out
	})
}

func TestLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, a, b := drawText().Draw(t, "o"), drawText().Draw(t, "a"), drawText().Draw(t, "b")
		for _, law := range []struct {
			name          string
			head, session []byte
			want          []byte
			side          merge.Side
		}{
			{"only the head changed", a, o, a, merge.Head},
			{"only the session changed", o, a, a, merge.Session},
			{"both changed alike", a, a, a, merge.Head},
		} {
			r := merge.Three(o, law.head, law.session)
			if !r.Clean {
				t.Fatalf("%s: conflict", law.name)
			}
			if got := r.Text(o, law.head, law.session); !bytes.Equal(got, law.want) {
				t.Fatalf("%s: %q, want %q", law.name, got, law.want)
			}
			checkPieces(t, r.Pieces, [3][]byte{o, law.head, law.session}, law.want)
		}
		ab, ba := merge.Three(o, a, b), merge.Three(o, b, a)
		if ab.Clean != ba.Clean || len(ab.Hunks) != len(ba.Hunks) {
			t.Fatalf("not symmetric: %+v and %+v", ab, ba)
		}
		if ab.Clean {
			x, y := ab.Text(o, a, b), ba.Text(o, b, a)
			if !bytes.Equal(x, y) {
				t.Fatalf("not symmetric: %q and %q", x, y)
			}
			checkPieces(t, ab.Pieces, [3][]byte{o, a, b}, x)
		}
		marked, pieces := ab.Marked(o, a, b, [3]string{"o", "a", "b"})
		checkPieces(t, pieces, [3][]byte{o, a, b}, marked)
	})
}

// TestSidesOfPieces: of unique lines, each one of the output is the head's
// unless only the session has it.
func TestSidesOfPieces(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 2))
		s := shape{lines: 40, words: 1 << 30, edits: 3, eol: "\n", unique: true}
		c := s.triple(r)
		res := merge.Three(c.base, c.head, c.session)
		if !res.Clean {
			continue
		}
		inHead := map[string]bool{}
		for _, l := range linediff.Split(c.head) {
			inHead[string(l)] = true
		}
		out := linediff.Split(res.Text(c.base, c.head, c.session))
		for _, p := range res.Pieces {
			for _, l := range out[:p.Count] {
				if inHead[string(l)] != (p.Side == merge.Head) {
					t.Fatalf("seed %d: line %q in a piece of side %d", seed, l, p.Side)
				}
			}
			out = out[p.Count:]
		}
	}
}

func FuzzThree(f *testing.F) {
	f.Add([]byte("a\nb\nc\n"), []byte("a\nB\nc\n"), []byte("a\nb\nc\nd"))
	f.Add([]byte("a\r\n"), []byte(""), []byte("a\r\nb"))
	f.Fuzz(func(t *testing.T, base, head, session []byte) {
		r := merge.Three(base, head, session)
		versions := [3][]byte{base, head, session}
		if r.Clean {
			checkPieces(t, r.Pieces, versions, r.Text(base, head, session))
		}
		marked, pieces := r.Marked(base, head, session, [3]string{"b", "h", "s"})
		checkPieces(t, pieces, versions, marked)
	})
}
