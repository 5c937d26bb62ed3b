package access

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"ephemeral-sandbox/fs/tree"
)

// fakeClock ticks a microsecond at every reading.
type fakeClock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *fakeClock { return &fakeClock{now: time.Unix(1_700_000_000, 0)} }

func (c *fakeClock) read() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(time.Microsecond)
	return c.now
}

func open(t *testing.T, dir string, o Options) *Recorder {
	t.Helper()
	r, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func closeRec(t *testing.T, r *Recorder) {
	t.Helper()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

func entries(t *testing.T, r *Recorder) []Entry {
	t.Helper()
	var out []Entry
	if err := r.Each(func(e Entry) bool {
		out = append(out, e)
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func gaps(r *Recorder) []Gap {
	var out []Gap
	r.EachGap(func(g Gap) bool {
		out = append(out, g)
		return true
	})
	return out
}

func TestEqualAccessesAreOneEntry(t *testing.T) {
	r := open(t, t.TempDir(), Options{Clock: newClock().read})
	defer closeRec(t, r)
	r.Note(1, Lookup, 5, 1, "a")
	r.Note(1, Lookup, 5, 1, "a")
	r.Note(2, Lookup, 5, 1, "a")
	r.Note(1, Absent, 0, 1, "b")
	r.Note(1, Lookup, 5, 1, "a")
	var got []string
	for _, e := range entries(t, r) {
		got = append(got, fmt.Sprintf("%d %v %d %d %s %d", e.Op, e.Kind, e.Ino, e.Dir, e.Name, e.Count))
		if e.Count == 1 && !e.First.Equal(e.Last) || e.Last.Before(e.First) {
			t.Errorf("%v: first %v, last %v", e, e.First, e.Last)
		}
	}
	want := []string{"1 lookup 5 1 a 3", "1 absent 0 1 b 1", "2 lookup 5 1 a 1"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if r.Gaps() != 0 {
		t.Errorf("gaps: %v", gaps(r))
	}
}

func TestKnownAccessAllocatesNothing(t *testing.T) {
	r := open(t, t.TempDir(), Options{})
	defer closeRec(t, r)
	r.Note(1, Read, 7, 0, "")
	r.Note(1, Lookup, 7, 1, "name")
	if n := testing.AllocsPerRun(100, func() {
		r.Note(1, Read, 7, 0, "")
		r.Note(1, Lookup, 7, 1, "name")
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestAgainstModel checks that notes, flushes, reopenings and merges give the
// sums a plain map gives.
func TestAgainstModel(t *testing.T) {
	base := t.TempDir()
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		dir := filepath.Join(base, fmt.Sprint(n))
		clock := newClock()
		o := Options{MaxMemory: 2 * minTable, Clock: clock.read}
		r, err := Open(dir, o)
		if err != nil {
			t.Fatal(err)
		}
		model := map[key]stat{}
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			switch rapid.IntRange(0, 30).Draw(t, "step") {
			case 0:
				if err := r.Flush(); err != nil {
					t.Fatal(err)
				}
			case 1:
				if err := r.Close(); err != nil {
					t.Fatal(err)
				}
				if r, err = Open(dir, o); err != nil {
					t.Fatal(err)
				}
			default:
				k := key{
					op: tree.Op(rapid.IntRange(0, 3).Draw(t, "op")), kind: Kind(rapid.IntRange(1, 10).Draw(t, "kind")),
					ino: tree.Ino(rapid.IntRange(0, 3).Draw(t, "ino")), dir: tree.Ino(rapid.IntRange(0, 2).Draw(t, "dir")),
					name: rapid.SampledFrom([]string{"", "a", "b\xff", "long name\n"}).Draw(t, "name"),
				}
				r.Note(k.op, k.kind, k.ino, k.dir, k.name)
				now := clock.now.UnixNano()
				s, ok := model[k]
				if !ok {
					s = stat{first: now, last: now}
				}
				s.add(stat{count: 1, first: now, last: now})
				model[k] = s
			}
		}
		got := map[key]stat{}
		var prev *key
		if err := r.Each(func(e Entry) bool {
			k := key{e.Op, e.Kind, e.Ino, e.Dir, e.Name}
			if prev != nil && prev.compare(k) >= 0 {
				t.Fatalf("%v after %v", k, *prev)
			}
			prev = &k
			got[k] = stat{e.Count, e.First.UnixNano(), e.Last.UnixNano()}
			return true
		}); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(model, got, cmp.AllowUnexported(key{}, stat{})); d != "" {
			t.Fatal(d)
		}
		if r.Gaps() != 0 {
			t.Fatalf("gaps: %v", gaps(r))
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestManyFlushesAreMerged(t *testing.T) {
	dir := t.TempDir()
	r := open(t, dir, Options{Clock: newClock().read})
	const rounds = 100
	for i := range rounds {
		r.Note(1, Read, 1, 0, "")
		r.Note(tree.Op(i), Read, 2, 0, "")
		if err := r.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"+segmentSuffix))
	if err != nil || len(files) >= 2*mergeAt {
		t.Errorf("%d segments (%v)", len(files), err)
	}
	closeRec(t, r)
	r = open(t, dir, Options{})
	defer closeRec(t, r)
	all := entries(t, r)
	if len(all) != rounds+1 {
		t.Errorf("%d entries, want %d", len(all), rounds+1)
	}
	for _, e := range all {
		if e.Ino == 1 && e.Count != rounds {
			t.Errorf("merged count %d, want %d", e.Count, rounds)
		}
	}
	if r.Gaps() != 0 {
		t.Errorf("gaps: %v", gaps(r))
	}
}

func TestByteBoundLeavesOneGap(t *testing.T) {
	dir := t.TempDir()
	const bound = 64 << 10
	r := open(t, dir, Options{MaxBytes: bound, Clock: newClock().read})
	noted := uint64(0)
	for i := range 60 {
		for j := range 200 {
			// Names that do not compress well, so that the bound is met.
			r.Note(tree.Op(i), Lookup, tree.Ino(j), 1, fmt.Sprintf("%x", uint64(i*7919+j)*0x9e3779b97f4a7c15))
			noted++
		}
		if err := r.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	size := int64(0)
	for _, s := range r.segments {
		size += s.size
	}
	if size > bound {
		t.Errorf("%d bytes on disk, bound %d", size, bound)
	}
	closeRec(t, r)
	r = open(t, dir, Options{MaxBytes: bound, Clock: newClock().read})
	defer closeRec(t, r)
	kept := uint64(0)
	for _, e := range entries(t, r) {
		kept += e.Count
	}
	g := gaps(r)
	if len(g) != 1 || g[0].Reason != Dropped || g[0].Notes+kept != noted {
		t.Errorf("%d of %d kept, gaps %v", kept, noted, g)
	}
}

func TestOverflowIsAGap(t *testing.T) {
	r, err := load(t.TempDir(), Options{MaxMemory: 2 * minTable, Clock: newClock().read})
	if err != nil {
		t.Fatal(err)
	}
	// Nothing spills yet: with both tables full, notes are refused.
	const n = 1000
	for i := range n {
		r.Note(1, Read, tree.Ino(i), 0, "")
	}
	kept := uint64(len(entries(t, r)))
	g := gaps(r)
	if len(g) != 1 || g[0].Reason != Overflow || g[0].Notes+kept != n || kept == 0 {
		t.Errorf("%d kept, gaps %v", kept, g)
	}
	go r.spill()
	defer closeRec(t, r)
	if err := r.Flush(); err != nil {
		t.Fatal(err)
	}
	if r.Gaps() != 1 {
		t.Errorf("after a flush: %v", gaps(r))
	}
}

func TestCrashIsAGap(t *testing.T) {
	dir := t.TempDir()
	r := open(t, dir, Options{})
	r.Note(1, Read, 1, 0, "")
	if err := r.Flush(); err != nil {
		t.Fatal(err)
	}
	r.Note(1, Read, 2, 0, "")
	// What a killed process leaves is the directory as it is now.
	after := t.TempDir()
	if err := os.CopyFS(after, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	closeRec(t, r)
	r = open(t, after, Options{})
	if got := entries(t, r); len(got) != 1 || got[0].Ino != 1 {
		t.Errorf("entries %v", got)
	}
	if g := gaps(r); len(g) != 1 || g[0].Reason != Crashed {
		t.Errorf("gaps %v", g)
	}
	closeRec(t, r)
	r = open(t, after, Options{})
	defer closeRec(t, r)
	if g := gaps(r); len(g) != 1 || g[0].Reason != Crashed {
		t.Errorf("gaps after a clean close %v", g)
	}
}

// segmentBytes is a segment of n records with one gap.
func segmentBytes(t testing.TB, n int) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := newSegmentWriter(&b, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := w.add(record{key{1, Lookup, tree.Ino(i + 2), 1, fmt.Sprintf("%06d", i)}, stat{1, int64(i), int64(i + 5)}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.finish([]gap{{reason: Overflow, first: 1, last: 2, notes: 3}}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestDamageIsAGap breaks a segment at many places, in one of two ways: no
// record may come out that did not go in, and a gap must tell of it.
func TestDamageIsAGap(t *testing.T) {
	const n = 9000
	good := segmentBytes(t, n)
	base := t.TempDir()
	step := len(good)/40 + 1
	for at := 0; at < len(good); at += step {
		for _, cut := range []bool{true, false} {
			t.Run(fmt.Sprintf("%d,%v", at, cut), func(t *testing.T) {
				dir := filepath.Join(base, fmt.Sprintf("%d-%v", at, cut))
				b := bytes.Clone(good)
				if cut {
					b = b[:at]
				} else {
					b[at] ^= 0x10
				}
				if err := os.Mkdir(dir, 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, "0000000000000001.acc"), b, 0o600); err != nil {
					t.Fatal(err)
				}
				for range 2 { // the second opening must not count it again
					r := open(t, dir, Options{})
					for i, e := range entries(t, r) {
						if e.Name != fmt.Sprintf("%06d", i) || e.Ino != tree.Ino(i+2) {
							t.Fatalf("entry %d is %v", i, e)
						}
					}
					damage := 0
					for _, g := range gaps(r) {
						if g.Reason == Damaged {
							damage++
						}
					}
					if damage != 1 {
						t.Errorf("gaps %v", gaps(r))
					}
					closeRec(t, r)
				}
			})
		}
	}
}

func TestDamageAfterOpen(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "0000000000000001.acc")
	b := segmentBytes(t, 100)
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	r := open(t, dir, Options{})
	defer closeRec(t, r)
	if got := len(entries(t, r)); got != 100 || r.Gaps() != 1 {
		t.Fatalf("%d entries, gaps %v", got, gaps(r))
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if got := len(entries(t, r)); got != 0 {
			t.Errorf("%d entries of a damaged block", got)
		}
	}
	if r.Gaps() != 2 {
		t.Errorf("gaps %v", gaps(r))
	}
}

func TestUnfinishedMergeIsForgotten(t *testing.T) {
	build := func(t *testing.T, finish bool) string {
		dir := t.TempDir()
		r := open(t, dir, Options{})
		for i := range 3 {
			r.Note(1, Read, tree.Ino(i), 0, "")
			if err := r.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		closeRec(t, r)
		var b bytes.Buffer
		w, err := newSegmentWriter(&b, []uint64{1, 2})
		if err != nil {
			t.Fatal(err)
		}
		for i := range 2 {
			if err := w.add(record{key{op: 1, kind: Read, ino: tree.Ino(i)}, stat{1, 1, 1}}); err != nil {
				t.Fatal(err)
			}
		}
		if finish {
			err = w.finish(nil)
		} else {
			err = w.flush()
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "0000000000000009.acc"), b.Bytes(), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	for _, finish := range []bool{false, true} {
		r := open(t, build(t, finish), Options{})
		for _, e := range entries(t, r) {
			if e.Count != 1 {
				t.Errorf("finished %v: %v counted %d times", finish, e, e.Count)
			}
		}
		if got := len(entries(t, r)); got != 3 || r.Gaps() != 0 {
			t.Errorf("finished %v: %d entries, gaps %v", finish, got, gaps(r))
		}
		closeRec(t, r)
	}
}

func TestFailedSpillIsAGap(t *testing.T) {
	dir := t.TempDir()
	r := open(t, dir, Options{})
	defer closeRec(t, r)
	// The next segment's name is taken, so that it cannot be written.
	blocker := r.path(1)
	if err := os.WriteFile(blocker, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.Note(1, Read, 1, 0, "")
	if err := r.Flush(); !errors.Is(err, os.ErrExist) {
		t.Fatalf("flush: %v", err)
	}
	if g := gaps(r); len(g) != 1 || g[0].Reason != Failed || g[0].Notes != 1 {
		t.Errorf("gaps %v", g)
	}
	r.Note(1, Read, 2, 0, "")
	if err := r.Flush(); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, r); len(got) != 1 || r.Gaps() != 1 {
		t.Errorf("%v, gaps %v", got, gaps(r))
	}
}

func TestConcurrentNotes(t *testing.T) {
	r := open(t, t.TempDir(), Options{MaxMemory: 64 << 10})
	const writers, each = 4, 3000
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				r.Note(tree.Op(w), Read, tree.Ino(i), 0, "")
			}
		})
	}
	wg.Go(func() {
		for range 5 {
			if err := r.Each(func(Entry) bool { return true }); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	sum := uint64(0)
	for _, e := range entries(t, r) {
		sum += e.Count
	}
	for _, g := range gaps(r) {
		sum += g.Notes
	}
	if sum != writers*each {
		t.Errorf("%d accounted for, %d noted", sum, writers*each)
	}
	closeRec(t, r)
}

func FuzzSegment(f *testing.F) {
	f.Add(segmentBytes(f, 0))
	f.Add(segmentBytes(f, 3))
	f.Add(segmentBytes(f, 9000))
	f.Add([]byte(segmentMagic))
	dec, err := newDecoder()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		sr, err := openSegment(bytes.NewReader(b), dec)
		if err != nil {
			if !errors.Is(err, errDamaged) {
				t.Fatal(err)
			}
			return
		}
		var got []record
		for {
			r, err := sr.next()
			if err == io.EOF {
				break
			}
			if err != nil {
				if !errors.Is(err, errDamaged) {
					t.Fatal(err)
				}
				return
			}
			got = append(got, r)
		}
		// What was accepted survives another round.
		var out bytes.Buffer
		w, err := newSegmentWriter(&out, sr.heads)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range got {
			if err := w.add(r); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.finish(sr.tail.gaps); err != nil {
			t.Fatal(err)
		}
		again, err := openSegment(bytes.NewReader(out.Bytes()), dec)
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			r, err := again.next()
			if err != nil || r != got[i] {
				t.Fatalf("record %d: %v, %v; want %v", i, r, err, got[i])
			}
		}
	})
}

// FuzzEntries decodes the payload of an entries block without the checksum and
// the compression in front of it.
func FuzzEntries(f *testing.F) {
	f.Add(appendRecord(nil, record{key{1, Absent, 0, 1, "x"}, stat{1, 5, 6}}, 0))
	f.Add(appendSummary(nil, summary{entries: 1, gaps: []gap{{reason: Crashed}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := cursor{b: b}
		for prev := int64(0); len(c.b) > 0; {
			r, err := c.record(prev)
			if err != nil {
				break
			}
			d := cursor{b: appendRecord(nil, r, prev)}
			if again, err := d.record(prev); err != nil || again != r {
				t.Fatalf("%v became %v, %v", r, again, err)
			}
			prev = r.first
		}
		c = cursor{b: b}
		if s, err := c.summary(); err == nil {
			d := cursor{b: appendSummary(nil, s)}
			if again, err := d.summary(); err != nil || !cmp.Equal(again, s, cmp.AllowUnexported(summary{}, gap{})) {
				t.Fatalf("%v became %v, %v", s, again, err)
			}
		}
	})
}
