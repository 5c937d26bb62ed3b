package telemetry

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clock is a wall clock that a test moves.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Unix(1_700_000_000, 0)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// never is a FlushEvery that no test waits for: what is read was flushed by the
// query itself.
const never = time.Hour

func open(t testing.TB, dir string, o Options) *Store {
	t.Helper()
	if o.FlushEvery == 0 {
		o.FlushEvery = never
	}
	s, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// outline is a trace as one line per span: indent, name, offset, duration.
func outline(v TraceView) string {
	var b strings.Builder
	v.Walk(func(depth int, n *Node) {
		fmt.Fprintf(&b, "%s%s %d+%d", strings.Repeat(" ", depth), n.Name, n.Offset.Milliseconds(), n.Duration.Milliseconds())
		if n.Running {
			b.WriteString(" running")
		}
		if n.Failed {
			b.WriteString(" failed: " + n.Error)
		}
		b.WriteByte('\n')
	})
	return b.String()
}

func TestTraceIsATreeOfOffsetsAndDurations(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), Options{Clock: c.Now})
	ctx, root := s.Start(context.Background(), "exec_command", String(KeySandbox, "sb"), Int("argc", 1<<60))
	c.pass(2 * time.Millisecond)
	_, spawn := s.Start(ctx, "spawn")
	c.pass(3 * time.Millisecond)
	spawn.Event("started", Int("pid", 7))
	spawn.End(nil)
	wctx, wait := s.Start(ctx, "wait")
	c.pass(5 * time.Millisecond)
	_, inner := s.Start(wctx, "publish")
	inner.End(errors.New("conflict"))
	wait.SetAttr(Bool("timed_out", false), Float("load", 0.5))

	v, err := s.Trace(TraceID(ctx), "")
	if err != nil {
		t.Fatal(err)
	}
	want := "exec_command 0+10 running\n spawn 2+3\n wait 5+5 running\n  publish 10+0 failed: conflict\n"
	if got := outline(v); got != want {
		t.Errorf("while it runs:\n%swant:\n%s", got, want)
	}
	if v.Running != 2 || v.Spans != 4 {
		t.Errorf("running %d of %d spans, want 2 of 4", v.Running, v.Spans)
	}

	wait.End(nil)
	root.End(nil)
	root.End(errors.New("a second end counts for nothing"))
	v, err = s.Trace("last", "sb")
	if err != nil {
		t.Fatal(err)
	}
	want = "exec_command 0+10\n spawn 2+3\n wait 5+5\n  publish 10+0 failed: conflict\n"
	if got := outline(v); got != want {
		t.Errorf("when done:\n%swant:\n%s", got, want)
	}
	if !v.Start.Equal(time.Unix(1_700_000_000, 0)) || v.Duration != 10*time.Millisecond {
		t.Errorf("trace starts %v, lasts %v", v.Start, v.Duration)
	}
	got := map[string]map[string]any{}
	v.Walk(func(_ int, n *Node) {
		if n.Attrs != nil {
			got[n.Name] = n.Attrs
		}
		for _, e := range n.Events {
			got[n.Name+"/"+e.Name] = map[string]any{"at": e.Offset, "attrs": e.Attrs}
		}
	})
	if d := cmp.Diff(map[string]map[string]any{
		"exec_command":  {KeySandbox: "sb", "argc": int64(1 << 60)},
		"wait":          {"timed_out": false, "load": 0.5},
		"spawn/started": {"at": 5 * time.Millisecond, "attrs": map[string]any{"pid": int64(7)}},
	}, got); d != "" {
		t.Errorf("attributes (-want +got):\n%s", d)
	}
}

func TestLastTrace(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	if _, err := s.Trace("last", ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("empty store: %v, want ErrNotFound", err)
	}
	one := func(name string, attrs ...Attr) string {
		ctx, sp := s.Start(context.Background(), name, attrs...)
		_, child := s.Start(ctx, "stage")
		child.End(nil)
		sp.End(nil)
		return TraceID(ctx)
	}
	a := one("a", String(KeySandbox, "sb1"))
	b := one("b", String(KeySandbox, "sb2"))
	one("trace", String(KeySandbox, "sb1"), Bool(KeyObserver, true))
	for sandbox, want := range map[string]string{"sb1": a, "sb2": b, "": b} {
		v, err := s.Trace("last", sandbox)
		if err != nil || v.TraceID != want || v.Spans != 2 {
			t.Errorf("last of %q: %s with %d spans, %v; want %s with 2", sandbox, v.TraceID, v.Spans, err, want)
		}
	}
	ctx, sp := s.Start(context.Background(), "long", String(KeySandbox, "sb3"))
	defer sp.End(nil)
	v, err := s.Trace("last", "sb3")
	if err != nil || v.TraceID != TraceID(ctx) || v.Running != 1 {
		t.Errorf("last that still runs: %+v, %v", v, err)
	}
	ctx, byRequest := s.Start(WithTraceparent(context.Background(), "00-"+strings.Repeat("cd", 16)+"-b7ad6b7169203331-01"), "asked",
		String(KeySandbox, "sb1"), String(KeyRequest, "req-7"))
	byRequest.End(nil)
	for _, sandbox := range []string{"", "sb1"} {
		if v, err := s.Trace("req-7", sandbox); err != nil || v.TraceID != TraceID(ctx) {
			t.Errorf("by request id: %+v, %v", v, err)
		}
	}
	if _, err := s.Trace("req-7", "sb2"); !errors.Is(err, ErrNotFound) {
		t.Errorf("request of another sandbox: %v, want ErrNotFound", err)
	}
	for _, id := range []string{"", "zz", strings.Repeat("0", 32), strings.Repeat("ab", 16)} {
		if _, err := s.Trace(id, ""); !errors.Is(err, ErrNotFound) {
			t.Errorf("trace %q: %v, want ErrNotFound", id, err)
		}
	}
}

func TestTraceparent(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	const trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	for header, joins := range map[string]bool{
		"00-" + trace + "-" + parent + "-01":       true,
		"00-" + trace + "-" + parent + "-00":       true,
		"cc-" + trace + "-" + parent + "-01-later": true,
		"":                                   false,
		"00-" + trace + "-01":                false,
		"ff-" + trace + "-" + parent + "-01": false,
		"00-" + strings.ToUpper(trace) + "-" + parent + "-01":  false,
		"00-" + strings.Repeat("0", 32) + "-" + parent + "-01": false,
		"00-" + trace + "-" + strings.Repeat("0", 16) + "-01":  false,
	} {
		ctx, sp := s.Start(WithTraceparent(context.Background(), header), "op")
		if got := TraceID(ctx) == trace; got != joins {
			t.Errorf("header %q: joins %v, want %v", header, got, joins)
		}
		if want := "00-" + TraceID(ctx) + "-" + SpanID(ctx) + "-01"; Traceparent(ctx) != want {
			t.Errorf("traceparent %q, want %q", Traceparent(ctx), want)
		}
		sp.End(nil)
	}
	if got := Traceparent(context.Background()); got != "" {
		t.Errorf("traceparent of an empty context: %q", got)
	}
	v, err := s.Trace(trace, "")
	if err != nil || len(v.Roots) != 3 {
		t.Errorf("spans whose parent lives elsewhere are roots: %+v, %v", v, err)
	}
}

func TestEventsNewestFirstWithFilters(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), Options{Clock: c.Now})
	start := c.Now()
	for i, e := range []Event{
		{Name: "session.created", Sandbox: "a", Session: "s1"},
		{Name: "commit", Sandbox: "a", Session: "s1", Operation: "op1", Trace: "t1", Attrs: map[string]any{"n": 5, "why": "x"}},
		{Name: "commit", Sandbox: "b", Session: "s2", Operation: "op2"},
		{Name: "session.closed", Sandbox: "a", Session: "s1"},
	} {
		if i == 3 {
			c.pass(time.Second)
		}
		s.Emit(e)
	}
	_, sp := s.Start(context.Background(), "not an event")
	sp.End(nil)
	names := func(f Filter, n int) string {
		t.Helper()
		es, err := s.Events(f, n)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, e := range es {
			out = append(out, fmt.Sprintf("%d:%s@%s", e.Number, e.Name, e.Sandbox))
		}
		return strings.Join(out, " ")
	}
	for _, c := range []struct {
		f    Filter
		n    int
		want string
	}{
		{Filter{}, 0, "4:session.closed@a 3:commit@b 2:commit@a 1:session.created@a"},
		{Filter{}, 2, "4:session.closed@a 3:commit@b"},
		{Filter{Before: 3}, 1, "2:commit@a"},
		{Filter{Sandbox: "a"}, 2, "4:session.closed@a 2:commit@a"},
		{Filter{Session: "s2"}, 0, "3:commit@b"},
		{Filter{Operation: "op1"}, 0, "2:commit@a"},
		{Filter{Trace: "t1"}, 0, "2:commit@a"},
		{Filter{Name: "commit"}, 0, "3:commit@b 2:commit@a"},
		{Filter{Since: start.Add(time.Second)}, 0, "4:session.closed@a"},
		{Filter{Sandbox: "none"}, 0, ""},
	} {
		if got := names(c.f, c.n); got != c.want {
			t.Errorf("%+v last %d: %q, want %q", c.f, c.n, got, c.want)
		}
	}
	es, err := s.Events(Filter{Operation: "op1"}, 1)
	if err != nil || len(es) != 1 {
		t.Fatal(es, err)
	}
	want := Event{
		Number: 2, Time: start.UTC(), Name: "commit", Sandbox: "a", Session: "s1", Operation: "op1", Trace: "t1",
		Attrs: map[string]any{"n": int64(5), "why": "x"},
	}
	if d := cmp.Diff(want, es[0]); d != "" {
		t.Errorf("event (-want +got):\n%s", d)
	}
}

func TestRetentionDropsTheOldestAndCounts(t *testing.T) {
	s := open(t, t.TempDir(), Options{MaxBytes: 1 << 20, MaxPending: 1 << 20})
	const n = 8000
	pad := strings.Repeat("x", 200)
	for i := range n {
		s.Emit(Event{Name: "e", Attrs: map[string]any{"i": i, "pad": pad}})
	}
	es, err := s.Events(Filter{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	st := s.Stats()
	var onDisk int64
	files, err := filepath.Glob(filepath.Join(st.Directory, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		onDisk += info.Size()
	}
	if onDisk > 1<<20 || onDisk != st.Bytes {
		t.Errorf("%d bytes on disk, stats say %d, bound %d", onDisk, st.Bytes, 1<<20)
	}
	if st.Records != n || st.Expired == 0 || int(st.Expired)+len(es) != n {
		t.Errorf("%d records, %d expired, %d left; want %d in all", st.Records, st.Expired, len(es), n)
	}
	for i, e := range es {
		if want := int64(n - 1 - i); e.Attrs["i"] != want || e.Number != uint64(want+1) {
			t.Fatalf("event %d from the end is number %d, i=%v", i, e.Number, e.Attrs["i"])
		}
	}
}

func TestOverflowIsAGapNotASilence(t *testing.T) {
	s := open(t, t.TempDir(), Options{MaxPending: 4})
	s.files.Lock() // the writer stands still, as on a slow disk
	for range 10 {
		s.Emit(Event{Name: "e"})
	}
	s.files.Unlock()
	es, err := s.Events(Filter{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	st := s.Stats()
	if int(st.Overflowed)+len(es) != 10 || st.Overflowed == 0 {
		t.Errorf("%d kept, %d counted as lost; want 10 in all", len(es), st.Overflowed)
	}
	if got := gaps(t, s); got != st.Overflowed {
		t.Errorf("gap records on disk tell of %d, want %d", got, st.Overflowed)
	}
}

// gaps adds up what the gap records tell of.
func gaps(t *testing.T, s *Store) (lost uint64) {
	t.Helper()
	err := s.newestFirst([]byte(`"kind":"gap"`), func(r *record) bool {
		lost += uint64(r.Lost)
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return lost
}

func TestAFailedWriteLosesItsBatchOnly(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	s.Emit(Event{Name: "before"})
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	s.files.Lock()
	s.swapOut(t, os.O_RDONLY)
	s.files.Unlock()
	s.Emit(Event{Name: "lost"})
	if err := s.Flush(); err == nil {
		t.Fatal("a write to a read-only file went well")
	}
	if st := s.Stats(); st.LastError == "" || st.Overflowed != 1 {
		t.Errorf("stats after the failure: %+v", st)
	}
	s.Emit(Event{Name: "after"})
	es, err := s.Events(Filter{}, 0)
	if err != nil || len(es) != 2 || es[0].Name != "after" || es[1].Name != "before" {
		t.Errorf("events %+v, %v; want after and before", es, err)
	}
	if st := s.Stats(); st.LastError != "" {
		t.Errorf("error %q stays after a good write", st.LastError)
	}
	if got := gaps(t, s); got != 1 {
		t.Errorf("gap of %d, want 1", got)
	}
}

// swapOut reopens the segment that is being written with other flags, so that
// the next write meets a disk that refuses. The caller holds s.files.
func (s *Store) swapOut(t *testing.T, flags int) {
	f, err := os.OpenFile(s.log.out.Name(), flags, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.log.out.Close(); err != nil {
		t.Error(err)
	}
	s.log.out = f
}

func TestRecordsTooLargeAreLostAlone(t *testing.T) {
	s := open(t, t.TempDir(), Options{MaxBytes: 1 << 20})
	_, sp := s.Start(context.Background(), "big")
	for i := range 2 * maxSpanEvents {
		sp.Event("e", String("text", strings.Repeat("y", 2*maxText)), Int("i", int64(i)))
	}
	s.Emit(Event{Name: "one"})
	sp.End(nil)
	s.Emit(Event{Name: "two"})
	es, err := s.Events(Filter{}, 0)
	if err != nil || len(es) != 2 {
		t.Errorf("events %v, %v; want both neighbours", es, err)
	}
	if st := s.Stats(); st.Overflowed != 1 {
		t.Errorf("%d lost, want the one that was too large", st.Overflowed)
	}
}

func TestBoundsOfASpan(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	ctx, sp := s.Start(context.Background(), "op", String("text", strings.Repeat("z", maxText+1)))
	for i := range maxAttrs + 9 {
		sp.SetAttr(Int(fmt.Sprint("k", i), int64(i)))
	}
	for range maxSpanEvents + 3 {
		sp.Event("e")
	}
	sp.End(nil)
	v, err := s.Trace(TraceID(ctx), "")
	if err != nil {
		t.Fatal(err)
	}
	n := v.Roots[0]
	if len(n.Attrs) != maxAttrs || len(n.Events) != maxSpanEvents || n.Lost != 10+3 {
		t.Errorf("%d attributes, %d events, %d lost", len(n.Attrs), len(n.Events), n.Lost)
	}
	if got := n.Attrs["text"].(string); got != strings.Repeat("z", maxText)+"[cut]" {
		t.Errorf("long text kept as %d bytes", len(got))
	}
}

// A store is reopened on what a killed process left: any prefix of its files.
func TestReopenOnAnyPrefix(t *testing.T) {
	src := t.TempDir()
	s := open(t, src, Options{})
	for i := range 20 {
		s.Emit(Event{Name: fmt.Sprint("e", i)})
	}
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	name := segmentName(1)
	data, err := os.ReadFile(filepath.Join(src, name))
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(src, "cut")
		if err != nil {
			rt.Fatal(err)
		}
		cut := rapid.IntRange(0, len(data)).Draw(rt, "cut")
		whole := strings.Count(string(data[:cut]), "\n")
		if err := os.WriteFile(filepath.Join(dir, name), data[:cut], 0o600); err != nil {
			rt.Fatal(err)
		}
		again, err := Open(dir, Options{FlushEvery: never})
		if err != nil {
			rt.Fatal(err)
		}
		defer func() {
			if err := again.Close(); err != nil {
				rt.Error(err)
			}
		}()
		again.Emit(Event{Name: "new"})
		es, err := again.Events(Filter{}, 0)
		if err != nil || len(es) != whole+1 || es[0].Name != "new" || es[0].Number != uint64(whole+1) {
			rt.Errorf("after a cut at %d: %d events, newest %+v, %v; want %d", cut, len(es), es[0], err, whole+1)
		}
	})
}

// One flipped byte costs at most the line that it lies in, and the next line
// when it was the line feed.
func TestAFlippedByteCostsOneLine(t *testing.T) {
	src := t.TempDir()
	s := open(t, src, Options{})
	for i := range 20 {
		s.Emit(Event{Name: fmt.Sprint("e", i)})
	}
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(src, segmentName(1)))
	if err != nil {
		t.Fatal(err)
	}
	for at := range len(data) - 1 { // the last line feed is a torn tail, tested above
		for _, mask := range []byte{1, 0x80, data[at] ^ '\n'} {
			if mask == 0 {
				continue
			}
			hurt := append([]byte(nil), data...)
			hurt[at] ^= mask
			want := strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
			var got []string
			eachBackward(hurt, []byte(`"kind":"event"`), func(r *record) bool {
				line, err := appendLine(nil, r)
				if err != nil {
					t.Fatal(err)
				}
				got = append([]string{strings.TrimSuffix(string(line), "\n")}, got...)
				return true
			})
			hit := strings.Count(string(data[:at]), "\n")
			keep := append(append([]string(nil), want[:hit]...), want[hit+1:]...)
			if data[at] == '\n' {
				keep = append(append([]string(nil), want[:hit]...), want[hit+2:]...)
			}
			if d := cmp.Diff(keep, got); d != "" {
				t.Fatalf("byte %d flipped (-want +got):\n%s", at, d)
			}
		}
	}
}

func TestReopenAfterDamageNeverReusesANumber(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	for range 5 {
		s.Emit(Event{Name: "e"})
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, segmentName(1))
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-4] ^= 1 // in the last line
	if err := os.WriteFile(name, data, 0o600); err != nil {
		t.Fatal(err)
	}
	again := open(t, dir, Options{})
	again.Emit(Event{Name: "new"})
	es, err := again.Events(Filter{}, 1)
	if err != nil || es[0].Number != 6 {
		t.Errorf("newest is %+v, %v; want number 6", es, err)
	}
}

func TestForeignFilesAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"notes.jsonl", "7.jsonl", "00000000000000000000.jsonl", "x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("mine\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := open(t, dir, Options{})
	if st := s.Stats(); st.Segments != 0 {
		t.Errorf("%d segments seen among files that are not ours", st.Segments)
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(file, Options{}); err == nil {
		t.Error("opened a file as a directory")
	}
	for _, e := range []string{"localhost:4318", "ftp://host", "http://", "::"} {
		if _, err := Open(t.TempDir(), Options{Export: Export{Endpoint: e}}); err == nil || !strings.Contains(err.Error(), e) {
			t.Errorf("endpoint %q: %v, want an error that names it", e, err)
		}
	}
}

func TestTheWriterWritesUnasked(t *testing.T) {
	s := open(t, t.TempDir(), Options{FlushEvery: time.Millisecond})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	s.files.Lock()
	s.log.list, s.log.out = []segment{{first: 1}}, w // the test reads what the writer writes
	s.files.Unlock()
	s.Emit(Event{Name: "e"})
	line, err := bufio.NewReader(r).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := checkLine(line[:len(line)-1]); !ok {
		t.Errorf("wrote %q", line)
	}
}

func TestManyAtOnce(t *testing.T) {
	s := open(t, t.TempDir(), Options{FlushEvery: time.Millisecond})
	const workers, each = 8, 50
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for range each {
				ctx, sp := s.Start(context.Background(), "op", Int("worker", int64(w)))
				_, child := s.Start(ctx, "stage")
				child.Event("note")
				child.End(nil)
				s.Emit(Event{Name: "done", Trace: TraceID(ctx)})
				if _, err := s.Trace(TraceID(ctx), ""); err != nil {
					t.Error(err)
				}
				sp.End(nil)
			}
		})
	}
	wg.Wait()
	es, err := s.Events(Filter{Name: "done"}, 0)
	if err != nil || len(es) != workers*each {
		t.Fatalf("%d events, %v; want %d", len(es), err, workers*each)
	}
	for _, e := range es {
		if v, err := s.Trace(e.Trace, ""); err != nil || v.Spans != 2 || v.Running != 0 || len(v.Roots) != 1 {
			t.Fatalf("trace %s: %+v, %v", e.Trace, v, err)
		}
	}
	if st := s.Stats(); st.OpenSpans != 0 || st.Records != 3*workers*each {
		t.Errorf("stats %+v", st)
	}
}

func TestANilStoreKeepsNothing(t *testing.T) {
	var s *Store
	ctx, sp := s.Start(context.Background(), "op", String("k", "v"))
	sp.SetAttr(Int("n", 1))
	sp.Event("e")
	sp.End(nil)
	s.Emit(Event{Name: "e"})
	if TraceID(ctx) != "" || SpanID(ctx) != "" {
		t.Error("a nil store gave a trace id")
	}
	if es, err := s.Events(Filter{}, 0); err != nil || es != nil {
		t.Error(es, err)
	}
	if _, err := s.Trace("last", ""); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if s.Stats() != (Stats{}) || s.Flush() != nil || s.Close() != nil {
		t.Error("a nil store has state")
	}
}

func TestAfterCloseNothingIsKept(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	_, sp := s.Start(context.Background(), "late")
	s.Emit(Event{Name: "in time"})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	sp.End(nil)
	s.Emit(Event{Name: "late"})
	if err := s.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	es, err := open(t, dir, Options{}).Events(Filter{}, 0)
	if err != nil || len(es) != 1 || es[0].Name != "in time" {
		t.Errorf("kept %+v, %v", es, err)
	}
}

// Forged ids must not make a view that never ends or loses a span.
func TestAssembleHoldsEverySpanOnce(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		id := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"})
		var spans []*record
		ids := map[string]bool{}
		for range rapid.IntRange(1, 12).Draw(rt, "n") {
			r := &record{
				Kind: kindSpan, Span: id.Draw(rt, "id"), Parent: rapid.SampledFrom([]string{"", "a", "b", "c", "d", "x"}).Draw(rt, "parent"),
				Time: rapid.Int64Range(0, 9).Draw(rt, "t"), Dur: rapid.Int64Range(0, 9).Draw(rt, "dur"),
			}
			ids[r.Span] = true
			spans = append(spans, r)
		}
		v := assemble("t", spans, nil)
		seen := map[string]int{}
		v.Walk(func(_ int, n *Node) {
			seen[n.SpanID]++
			if n.Offset < 0 || n.Offset+n.Duration > v.Duration {
				rt.Errorf("span %s at %d+%d lies outside the trace of %d", n.SpanID, n.Offset, n.Duration, v.Duration)
			}
		})
		if len(seen) != len(ids) || v.Spans != len(ids) {
			rt.Errorf("%d spans in the view, %d counted, want %d", len(seen), v.Spans, len(ids))
		}
		for s, n := range seen {
			if n != 1 {
				rt.Errorf("span %s is there %d times", s, n)
			}
		}
	})
}

func FuzzSegment(f *testing.F) {
	line, err := appendLine(nil, &record{Number: 1, Kind: kindEvent, Time: 5, Name: "e", Attrs: map[string]any{"k": int64(3)}})
	if err != nil {
		f.Fatal(err)
	}
	span, err := appendLine(nil, &record{Number: 2, Kind: kindSpan, Trace: "t", Span: "s", Events: []spanEvent{{Name: "x", Offset: 1}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte{})
	f.Add(line)
	f.Add(append(append([]byte("torn\n"), line...), span...))
	dir := f.TempDir() // of this worker, which runs one input at a time
	f.Fuzz(func(t *testing.T, data []byte) {
		var forward []uint64
		_, whole := eachLine(data, func(js []byte) bool {
			if r, err := decodeRecord(js); err == nil {
				forward = append(forward, r.Number)
				if _, err := appendLine(nil, r); err != nil {
					t.Errorf("a decoded record does not encode: %v", err)
				}
			}
			return true
		})
		if whole > len(data) || whole < len(data) && strings.IndexByte(string(data[whole:]), '\n') >= 0 {
			t.Errorf("%d of %d bytes taken as whole lines", whole, len(data))
		}
		var backward []uint64
		eachBackward(data, nil, func(r *record) bool {
			backward = append([]uint64{r.Number}, backward...)
			return true
		})
		if d := cmp.Diff(forward, backward); d != "" {
			t.Errorf("the two directions disagree:\n%s", d)
		}
		if err := os.WriteFile(filepath.Join(dir, segmentName(1)), data, 0o600); err != nil {
			t.Fatal(err)
		}
		g, err := openSegments(dir, 1<<20)
		if err != nil {
			t.Fatalf("open: %v", err)
		}
		if err := g.close(); err != nil {
			t.Error(err)
		}
	})
}

func BenchmarkSpan(b *testing.B) {
	s := open(b, b.TempDir(), Options{MaxBytes: 8 << 20})
	b.ReportAllocs()
	for b.Loop() {
		_, sp := s.Start(context.Background(), "op", String(KeySandbox, "sb"))
		sp.End(nil)
	}
}
