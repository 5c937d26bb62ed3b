package telemetry

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Filter selects events; an empty field selects all.
type Filter struct {
	Sandbox   string
	Session   string
	Operation string
	Trace     string
	Name      string
	Since     time.Time // at or after
	Before    uint64    // numbers below this one, to page backwards; 0 = from the newest
}

func (f Filter) match(r *record) bool {
	return r.Kind == kindEvent &&
		(f.Sandbox == "" || f.Sandbox == r.Sandbox) &&
		(f.Session == "" || f.Session == r.Session) &&
		(f.Operation == "" || f.Operation == r.Operation) &&
		(f.Trace == "" || f.Trace == r.Trace) &&
		(f.Name == "" || f.Name == r.Name) &&
		(f.Since.IsZero() || r.Time >= f.Since.UnixNano()) &&
		(f.Before == 0 || r.Number < f.Before)
}

// Events returns up to lastN events that pass the filter, newest first. lastN
// of 0 or less means all.
func (s *Store) Events(f Filter, lastN int) ([]Event, error) {
	var out []Event
	err := s.newestFirst([]byte(`"kind":"event"`), func(r *record) bool {
		if f.match(r) {
			out = append(out, r.event())
		}
		return lastN <= 0 || len(out) < lastN
	})
	return out, err
}

func (r *record) event() Event {
	return Event{
		Number: r.Number, Time: time.Unix(0, r.Time).UTC(), Name: r.Name, Sandbox: r.Sandbox,
		Session: r.Session, Operation: r.Operation, Trace: r.Trace, Attrs: r.Attrs,
	}
}

// TraceView is one trace as a forest. Roots are the spans whose parent is not
// here: normally one, more when a parent was lost or lives in another process.
type TraceView struct {
	TraceID  string        `json:"trace_id"`
	Start    time.Time     `json:"start"`
	Duration time.Duration `json:"duration_ns"` // from the first start to the last end
	Spans    int           `json:"spans"`
	Running  int           `json:"running"` // of them, those that have not ended
	Roots    []*Node       `json:"roots"`
}

// Node is one span of a trace with the spans beneath it, in order of start.
type Node struct {
	SpanID   string         `json:"span_id"`
	ParentID string         `json:"parent_id,omitempty"`
	Name     string         `json:"name"`
	Offset   time.Duration  `json:"offset_ns"`   // from the trace's start
	Duration time.Duration  `json:"duration_ns"` // so far, when running
	Running  bool           `json:"running,omitempty"`
	Failed   bool           `json:"failed,omitempty"`
	Error    string         `json:"error,omitempty"`
	Attrs    map[string]any `json:"attrs,omitempty"`
	Events   []NodeEvent    `json:"events,omitempty"`
	Lost     int            `json:"lost,omitempty"` // attributes and events beyond the bounds
	Children []*Node        `json:"children,omitempty"`
}

// NodeEvent is an instant within a span.
type NodeEvent struct {
	Name   string         `json:"name"`
	Offset time.Duration  `json:"offset_ns"` // from the trace's start
	Attrs  map[string]any `json:"attrs,omitempty"`
}

// Walk visits every node, parents before children, with its depth.
func (v TraceView) Walk(fn func(depth int, n *Node)) {
	var walk func(depth int, nodes []*Node)
	walk = func(depth int, nodes []*Node) {
		for _, n := range nodes {
			fn(depth, n)
			walk(depth+1, n.Children)
		}
	}
	walk(0, v.Roots)
}

// Trace returns the trace with the given id: a trace id, the request id that a
// root span carries as KeyRequest, or "last", which means the trace whose root
// span ended last. A sandbox that is not empty narrows a request id and "last"
// to roots that carry it. "last" passes over traces marked with KeyObserver.
// Spans that have not ended are in the answer, marked as running. ErrNotFound
// when there is none.
func (s *Store) Trace(id, sandbox string) (TraceView, error) {
	if s == nil || id == "" {
		return TraceView{}, fmt.Errorf("trace %q: %w", id, ErrNotFound)
	}
	if validID(id, 16) {
		v, err := s.traceOf(id)
		if !errors.Is(err, ErrNotFound) {
			return v, err
		}
	}
	found, err := s.findRoot(func(r *record) bool {
		if sandbox != "" && r.Attrs[KeySandbox] != sandbox {
			return false
		}
		if id == "last" {
			observer, _ := r.Attrs[KeyObserver].(bool)
			return !observer
		}
		return r.Attrs[KeyRequest] == id
	})
	if err != nil {
		return TraceView{}, err
	}
	if found == "" {
		return TraceView{}, fmt.Errorf("trace %q: %w", id, ErrNotFound)
	}
	return s.traceOf(found)
}

// traceOf collects the spans of one trace.
func (s *Store) traceOf(id string) (TraceView, error) {
	spans := s.liveSpans(id)
	running := make(map[string]bool, len(spans))
	for _, r := range spans {
		running[r.Span] = true
	}
	err := s.newestFirst([]byte(`"trace":"`+id+`"`), func(r *record) bool {
		if r.Kind == kindSpan && r.Trace == id {
			if running[r.Span] { // ended between the two looks
				delete(running, r.Span)
				spans = slices.DeleteFunc(spans, func(o *record) bool { return o.Span == r.Span })
			}
			spans = append(spans, r)
		}
		return true
	})
	if err != nil {
		return TraceView{}, err
	}
	if len(spans) == 0 {
		return TraceView{}, fmt.Errorf("trace %s: %w", id, ErrNotFound)
	}
	return assemble(id, spans, running), nil
}

// findRoot returns the trace of the root span that matches and ended last, or,
// when none has ended, started last; empty when none matches. Spans whose
// parent lives in another process count as roots when a request id marks them.
func (s *Store) findRoot(match func(*record) bool) (string, error) {
	root := func(r *record) bool {
		return r.Kind == kindSpan && (r.Parent == "" || r.Attrs[KeyRequest] != nil) && match(r)
	}
	id := ""
	err := s.newestFirst([]byte(`"kind":"span"`), func(r *record) bool {
		if root(r) {
			id = r.Trace
		}
		return id == ""
	})
	if err != nil || id != "" {
		return id, err
	}
	newest := int64(0)
	for _, r := range s.liveSpans("") {
		if root(r) && r.Time >= newest {
			newest, id = r.Time, r.Trace
		}
	}
	return id, nil
}

// liveSpans returns the spans of a trace, or of all when trace is empty, that
// have not ended, as they stand.
func (s *Store) liveSpans(trace string) []*record {
	s.mu.Lock()
	var live []*Span
	for k, sp := range s.live {
		if trace == "" || k.trace == trace {
			live = append(live, sp)
		}
	}
	s.mu.Unlock()
	now := s.opts.Clock()
	out := make([]*record, 0, len(live))
	for _, sp := range live {
		sp.mu.Lock()
		r := sp.recordLocked(now, nil)
		r.Attrs = maps.Clone(r.Attrs)
		r.Events = slices.Clone(r.Events)
		sp.mu.Unlock()
		out = append(out, r)
	}
	return out
}

// assemble builds the tree. A span whose chain of parents does not end at a
// root (possible only with forged ids) becomes a root itself, so that every
// span is in the view exactly once.
func assemble(id string, spans []*record, running map[string]bool) TraceView {
	slices.SortFunc(spans, func(a, b *record) int {
		return cmp.Or(cmp.Compare(a.Time, b.Time), cmp.Compare(a.Span, b.Span))
	})
	begin, end := spans[0].Time, spans[0].Time
	nodes := make(map[string]*Node, len(spans))
	var order []*Node
	for _, r := range spans {
		if nodes[r.Span] != nil {
			continue
		}
		end = max(end, r.Time+r.Dur)
		n := &Node{
			SpanID: r.Span, ParentID: r.Parent, Name: r.Name,
			Offset: time.Duration(r.Time - begin), Duration: time.Duration(r.Dur),
			Running: running[r.Span], Failed: r.Failed, Error: r.Error, Attrs: r.Attrs, Lost: r.Lost,
		}
		for _, e := range r.Events {
			n.Events = append(n.Events, NodeEvent{Name: e.Name, Offset: n.Offset + time.Duration(e.Offset), Attrs: e.Attrs})
		}
		nodes[r.Span] = n
		order = append(order, n)
	}
	v := TraceView{
		TraceID: id, Start: time.Unix(0, begin).UTC(), Duration: time.Duration(end - begin),
		Spans: len(order), Running: len(running),
	}
	for _, n := range order {
		if p := nodes[n.ParentID]; p != nil && !cyclic(n, nodes) {
			p.Children = append(p.Children, n)
		} else {
			v.Roots = append(v.Roots, n)
		}
	}
	return v
}

// cyclic reports whether following parents from n leads back to n.
func cyclic(n *Node, nodes map[string]*Node) bool {
	at := nodes[n.ParentID]
	for range len(nodes) {
		if at == nil {
			return false
		}
		if at == n {
			return true
		}
		at = nodes[at.ParentID]
	}
	return false
}

// newestFirst flushes, then decodes the records whose line contains hint,
// newest first, until fn returns false. Damaged lines are passed over.
func (s *Store) newestFirst(hint []byte, fn func(*record) bool) error {
	if s == nil {
		return nil
	}
	// A batch that could not be written is lost whether we ask or not, and
	// Stats tells of it; what is on disk still answers.
	_ = s.Flush()
	s.files.Lock()
	dir, list := s.log.dir, slices.Clone(s.log.list)
	s.files.Unlock()
	for _, seg := range slices.Backward(list) {
		data, err := os.ReadFile(filepath.Join(dir, segmentName(seg.first)))
		if errors.Is(err, fs.ErrNotExist) {
			continue // retention dropped it meanwhile
		}
		if err != nil {
			return fmt.Errorf("read telemetry: %w", err)
		}
		if !eachBackward(data, hint, fn) {
			return nil
		}
	}
	return nil
}

// eachBackward walks data's lines from the last to the first and reports
// whether fn wants more.
func eachBackward(data, hint []byte, fn func(*record) bool) bool {
	end := bytes.LastIndexByte(data, '\n')
	for end > 0 {
		begin := bytes.LastIndexByte(data[:end], '\n') + 1
		line := data[begin:end]
		end = begin - 1
		if !bytes.Contains(line, hint) {
			continue
		}
		js, ok := checkLine(line)
		if !ok {
			continue
		}
		if r, err := decodeRecord(js); err == nil && !fn(r) {
			return false
		}
	}
	return true
}
