package attribution_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"ephemeral-sandbox/attribution"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ/linediff"
	"ephemeral-sandbox/occ/merge"
)

func op(n int) attribution.Origin {
	return attribution.Origin{
		Kind: attribution.Session, Session: "s" + fmt.Sprint(n%7), Operation: "op" + fmt.Sprint(n),
		Command: "edit", Time: time.Unix(1_700_000_000+int64(n), 5).UTC(),
	}
}

func hashLines(t testing.TB, b []byte) attribution.Lines {
	t.Helper()
	lines, text, err := attribution.HashLines(bytes.NewReader(b))
	if err != nil || !text {
		t.Fatalf("hash lines: text %v, %v", text, err)
	}
	return lines
}

// world makes texts of lines that are each a unique token, and remembers who
// made which: the model that blame is held against.
type world struct {
	r     *rand.Rand
	made  map[string]attribution.Origin
	tally int
}

func (w *world) line(o attribution.Origin) string {
	w.tally++
	l := fmt.Sprintf("token %d\n", w.tally)
	w.made[l] = o
	return l
}

// edit changes lines at up to three places as operation o.
func (w *world) edit(lines []string, o attribution.Origin) []string {
	out := slices.Clone(lines)
	for range w.r.IntN(4) {
		at := w.r.IntN(len(out) + 1)
		drop := min(w.r.IntN(3), len(out)-at)
		var put []string
		for range w.r.IntN(3) {
			put = append(put, w.line(o))
		}
		out = slices.Replace(out, at, at+drop, put...)
	}
	return out
}

func (w *world) check(t *testing.T, what string, lines []string, spans attribution.Spans) {
	t.Helper()
	at := 0
	for i, sp := range spans {
		if sp.Lines <= 0 || at+sp.Lines > len(lines) || i > 0 && sp.Origin.Equal(spans[i-1].Origin) {
			t.Fatalf("%s: span %d of %v at line %d of %d", what, i, spans, at, len(lines))
		}
		for _, l := range lines[at : at+sp.Lines] {
			if want := w.made[l]; !want.Equal(sp.Origin) {
				t.Fatalf("%s: line %q is given to %v, %v wrote it", what, l, sp.Origin, want)
			}
		}
		at += sp.Lines
	}
	if at != len(lines) {
		t.Fatalf("%s: spans cover %d of %d lines", what, at, len(lines))
	}
}

// version is a text with its blame.
type version struct {
	lines []string
	spans attribution.Spans
}

func (v version) bytes() []byte { return []byte(strings.Join(v.lines, "")) }

func (w *world) carry(t *testing.T, v version, o attribution.Origin) version {
	next := version{lines: w.edit(v.lines, o)}
	next.spans = attribution.Carry(hashLines(t, v.bytes()), v.spans, hashLines(t, next.bytes()), o)
	w.check(t, "carry", next.lines, next.spans)
	return next
}

// TestHistoryAgainstModel runs histories of edits and merges on both sides of a
// base, and asks of every line of every version who wrote it.
func TestHistoryAgainstModel(t *testing.T) {
	merges := 0
	for seed := range uint64(1000) {
		w := &world{r: rand.New(rand.NewPCG(seed, 9)), made: map[string]attribution.Origin{}}
		original := attribution.Origin{Kind: attribution.Original}
		var head version
		for range w.r.IntN(40) {
			head.lines = append(head.lines, w.line(original))
		}
		head.spans = attribution.Whole(len(head.lines), original)
		opNo := 0
		next := func() attribution.Origin { opNo++; return op(opNo) }
		for range 5 {
			base, session := head, head
			for range w.r.IntN(3) {
				head = w.carry(t, head, next())
			}
			for range w.r.IntN(3) {
				session = w.carry(t, session, next())
			}
			res := merge.Three(base.bytes(), head.bytes(), session.bytes())
			if !res.Clean {
				continue // the session loses; the history goes on from the head
			}
			merges++
			sides := [3]attribution.Spans{merge.Head: head.spans, merge.Session: session.spans}
			var pieces []attribution.PieceOf
			for _, p := range res.Pieces {
				pieces = append(pieces, attribution.PieceOf{Spans: sides[p.Side], Start: p.Start, Count: p.Count})
			}
			merged := version{spans: attribution.Select(pieces)}
			for _, l := range linediff.Split(res.Text(base.bytes(), head.bytes(), session.bytes())) {
				merged.lines = append(merged.lines, string(l))
			}
			w.check(t, "merge", merged.lines, merged.spans)

			section := attribution.Encode(map[tree.Ino]attribution.FileSpans{7: {Lines: len(merged.lines), Spans: merged.spans}})
			table, err := attribution.Decode(section)
			if err != nil {
				t.Fatal(err)
			}
			stored, ok := table.File(7)
			if !ok || stored.Lines != len(merged.lines) {
				t.Fatalf("stored %+v, %v", stored, ok)
			}
			w.check(t, "section", merged.lines, stored.Spans)
			head = merged
		}
	}
	if merges < 1000 {
		t.Errorf("only %d merges were clean", merges)
	}
}

func TestCarry(t *testing.T) {
	a, b := op(1), op(2)
	for _, c := range []struct {
		name     string
		old, now string
		spans    attribution.Spans
		want     attribution.Spans
	}{
		{"new file", "", "x\ny\n", nil, attribution.Spans{{2, b}}},
		{"untouched", "x\ny\n", "x\ny\n", attribution.Spans{{2, a}}, attribution.Spans{{2, a}}},
		{"white space is a change", "x\ny\n", "x \ny\n", attribution.Spans{{2, a}}, attribution.Spans{{1, b}, {1, a}}},
		{"a line end is a change", "x\ny\n", "x\r\ny\n", attribution.Spans{{2, a}}, attribution.Spans{{1, b}, {1, a}}},
		{"so is the last line's", "x\ny", "x\ny\n", attribution.Spans{{2, a}}, attribution.Spans{{1, a}, {1, b}}},
		{"emptied", "x\n", "", attribution.Spans{{1, a}}, nil},
		{"spans too short", "x\ny\n", "x\ny\n", attribution.Spans{{1, a}}, attribution.Spans{{1, a}, {1, attribution.Origin{}}}},
		{"middle removed", "x\ny\nz\n", "x\nz\n", attribution.Spans{{3, a}}, attribution.Spans{{2, a}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := attribution.Carry(hashLines(t, []byte(c.old)), c.spans, hashLines(t, []byte(c.now)), b)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSelectTakesPiecesInAnyOrder(t *testing.T) {
	s := attribution.Spans{{2, op(1)}, {2, op(2)}}
	got := attribution.Select([]attribution.PieceOf{
		{Spans: s, Start: 3, Count: 1}, {Spans: s, Start: 0, Count: 3}, {Spans: nil, Start: 5, Count: 1}, {Spans: s, Start: 3, Count: 2},
	})
	want := attribution.Spans{{1, op(2)}, {2, op(1)}, {1, op(2)}, {1, attribution.Origin{}}, {1, op(2)}, {1, attribution.Origin{}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestOwnerAndCommit(t *testing.T) {
	session := op(3)
	for _, c := range []struct {
		origin attribution.Origin
		owner  string
		commit uint64
	}{
		{session, "workspace_session:s3", 9},
		{attribution.Origin{Kind: attribution.Operation, Operation: "req-1", Commit: 4}, "operation:req-1", 4},
		{attribution.Origin{Kind: attribution.Original}, "original", 0},
		{attribution.Origin{}, "unknown", 0},
	} {
		if got := c.origin.Owner(); got != c.owner {
			t.Errorf("owner %q, want %q", got, c.owner)
		}
		if got := c.origin.In(9).Commit; got != c.commit {
			t.Errorf("%s: commit %d, want %d", c.owner, got, c.commit)
		}
	}
	again := session
	again.Commit = 9
	if got := (attribution.Spans{{1, session}, {1, again}}).In(9); len(got) != 1 || got[0].Lines != 2 {
		t.Errorf("spans that become equal are not joined: %v", got)
	}
}

func TestRanges(t *testing.T) {
	got := attribution.Ranges(attribution.Spans{{2, op(1)}, {3, op(2)}})
	if diff := cmp.Diff([]attribution.Range{{1, 2, op(1)}, {3, 3, op(2)}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestHashLines(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for n := range 50 {
		var b []byte
		for range r.IntN(30) {
			b = append(b, bytes.Repeat([]byte{byte('a' + r.IntN(3))}, r.IntN(1+(n%3)*40_000))...)
			b = append(b, '\n')
		}
		if n%2 == 0 {
			b = append(b, "tail"...)
		}
		want := attribution.Lines{}
		for _, l := range linediff.Split(b) {
			want = append(want, hashLines(t, l)...)
		}
		if got := hashLines(t, b); !slices.Equal(got, want) {
			t.Fatalf("case %d: hashes of the whole differ from those of its lines", n)
		}
		if got, _, _ := attribution.HashLines(iotest.OneByteReader(bytes.NewReader(b[:min(len(b), 9000)]))); len(got) != linediff.Cut(b[:min(len(b), 9000)]).Len() {
			t.Fatalf("case %d: %d lines when read by bytes", n, len(got))
		}
	}
	for name, b := range map[string][]byte{
		"NUL":            []byte("a\x00\n"),
		"over the limit": bytes.Repeat([]byte("x"), linediff.MaxBytes+1),
		"too many lines": bytes.Repeat([]byte("\n"), linediff.MaxLines),
	} {
		if lines, text, err := attribution.HashLines(bytes.NewReader(b)); lines != nil || text || err != nil {
			t.Errorf("%s: %d lines, text %v, %v", name, len(lines), text, err)
		}
	}
	if _, _, err := attribution.HashLines(iotest.ErrReader(io.ErrClosedPipe)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a reader's error is lost: %v", err)
	}
}

func TestSection(t *testing.T) {
	unknown := attribution.Origin{}
	late := op(2)
	late.Commit = 1 << 40
	late.Time = time.Time{}
	files := map[tree.Ino]attribution.FileSpans{
		1 << 60: {Lines: 5, Spans: attribution.Spans{{2, op(1)}, {1, late}, {2, op(1)}}},
		3:       {Lines: 1, Spans: attribution.Whole(1, unknown), Wholesale: true},
		4:       {},
		9:       {Lines: 3, Spans: attribution.Spans{{1, attribution.Origin{Kind: attribution.Original}}, {2, late}}},
	}
	section := attribution.Encode(files)
	table, err := attribution.Decode(section)
	if err != nil {
		t.Fatal(err)
	}
	for ino, want := range files {
		got, ok := table.File(ino)
		if want.Spans == nil {
			want.Spans = attribution.Spans{}
		}
		if diff := cmp.Diff(want, got); !ok || diff != "" {
			t.Errorf("file %d: %v %s", ino, ok, diff)
		}
	}
	if _, ok := table.File(5); ok || table.Len() != len(files) {
		t.Errorf("the table has files it was not given: %d", table.Len())
	}
	for n := range section {
		if _, err := attribution.Decode(section[:n]); !errors.Is(err, attribution.ErrMalformed) {
			t.Fatalf("cut at %d of %d: %v", n, len(section), err)
		}
	}
	if _, err := attribution.Decode(append(slices.Clone(section), 0)); !errors.Is(err, attribution.ErrMalformed) {
		t.Errorf("a byte too many: %v", err)
	}
	if again := attribution.Encode(files); !bytes.Equal(again, section) {
		t.Error("equal input, different bytes")
	}
}

func TestSectionJoinsWhatIsEqual(t *testing.T) {
	a := op(1)
	local := a
	local.Time = local.Time.In(time.FixedZone("x", 3600))
	table, err := attribution.Decode(attribution.Encode(map[tree.Ino]attribution.FileSpans{
		2: {Lines: 3, Spans: attribution.Spans{{1, a}, {0, op(5)}, {2, local}}},
		3: {Wholesale: true},
	}))
	if err != nil {
		t.Fatal(err)
	}
	if f, _ := table.File(2); len(f.Spans) != 1 || f.Lines != 3 {
		t.Errorf("got %+v", f)
	}
	if f, _ := table.File(3); !f.Wholesale || f.Lines != 1 || f.Spans[0].Origin.Kind != attribution.Unknown {
		t.Errorf("got %+v", f)
	}
}

// FuzzDecode: what is accepted is the one encoding of what it says.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{1, 0, 0})
	f.Add(attribution.Encode(map[tree.Ino]attribution.FileSpans{
		5: {Lines: 3, Spans: attribution.Spans{{1, op(1)}, {2, attribution.Origin{Kind: attribution.Original}}}},
		6: {Lines: 1, Spans: attribution.Whole(1, op(2)), Wholesale: true},
	}))
	f.Fuzz(func(t *testing.T, section []byte) {
		table, err := attribution.Decode(section)
		if err != nil {
			if !errors.Is(err, attribution.ErrMalformed) {
				t.Fatalf("an error of another kind: %v", err)
			}
			return
		}
		files := map[tree.Ino]attribution.FileSpans{}
		table.Files(func(ino tree.Ino, fs attribution.FileSpans) bool {
			if fs.Spans.Lines() != fs.Lines {
				t.Fatalf("file %d: spans cover %d of %d lines", ino, fs.Spans.Lines(), fs.Lines)
			}
			files[ino] = fs
			return true
		})
		if again := attribution.Encode(files); !bytes.Equal(again, section) {
			t.Fatalf("accepted %x, which encodes as %x", section, again)
		}
	})
}
