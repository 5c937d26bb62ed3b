package telemetry

import (
	"context"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
)

// Attr is one key and value of a span, a span event or an event. A value is a
// string, a bool, an int64 or a float64; strings longer than 4 KiB are cut.
type Attr struct {
	Key   string
	value any
}

// String, Int, Bool and Float make attributes.
func String(key, v string) Attr { return Attr{key, v} }

// Int makes a whole-number attribute.
func Int(key string, v int64) Attr { return Attr{key, v} }

// Bool makes a yes-or-no attribute.
func Bool(key string, v bool) Attr { return Attr{key, v} }

// Float makes a floating-point attribute.
func Float(key string, v float64) Attr { return Attr{key, v} }

// Bounds on one span, so that no caller can make a record that does not fit.
const (
	maxAttrs      = 64
	maxSpanEvents = 128
	maxText       = 4 << 10
)

// Span is one timed piece of work. A nil *Span takes every call and keeps
// nothing.
type Span struct {
	store  *Store    // immutable
	trace  string    // immutable
	id     string    // immutable
	parent string    // immutable; empty for a root
	name   string    // immutable
	start  time.Time // immutable

	mu      sync.Mutex
	attrs   map[string]any // guarded by mu
	events  []spanEvent    // guarded by mu
	dropped int            // guarded by mu; attributes and span events beyond the bounds
	ended   bool           // guarded by mu
}

type spanEvent struct {
	Name   string         `json:"name"`
	Offset int64          `json:"at"` // nanoseconds after the span's start
	Attrs  map[string]any `json:"attrs,omitempty"`
}

type contextKey struct{}

// place is what a context carries: the span that new spans become children of.
type place struct{ trace, span string }

// Start begins a span, a child of the context's span if there is one and
// otherwise the root of a new trace, and returns a context that carries it. The
// caller ends the span.
func (s *Store) Start(ctx context.Context, name string, attrs ...Attr) (context.Context, *Span) {
	if s == nil {
		return ctx, nil
	}
	up, _ := ctx.Value(contextKey{}).(place)
	sp := &Span{store: s, trace: up.trace, id: newID(8), parent: up.span, name: clip(name), start: s.opts.Clock()}
	if sp.trace == "" {
		sp.trace = newID(16)
	}
	sp.SetAttr(attrs...)
	s.mu.Lock()
	if !s.closed {
		s.live[spanKey{sp.trace, sp.id}] = sp
	}
	s.mu.Unlock()
	return context.WithValue(ctx, contextKey{}, place{sp.trace, sp.id}), sp
}

// SetAttr sets attributes; a key that is set again takes the newer value.
func (sp *Span) SetAttr(attrs ...Attr) {
	if sp == nil || len(attrs) == 0 {
		return
	}
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if sp.ended {
		return
	}
	if sp.attrs == nil {
		sp.attrs = make(map[string]any, len(attrs))
	}
	for _, a := range attrs {
		if _, known := sp.attrs[a.Key]; !known && len(sp.attrs) >= maxAttrs {
			sp.dropped++
			continue
		}
		sp.attrs[clip(a.Key)] = clipValue(a.value)
	}
}

// Event notes an instant within the span.
func (sp *Span) Event(name string, attrs ...Attr) {
	if sp == nil {
		return
	}
	at := sp.store.opts.Clock().Sub(sp.start)
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if sp.ended {
		return
	}
	if len(sp.events) >= maxSpanEvents {
		sp.dropped++
		return
	}
	sp.events = append(sp.events, spanEvent{Name: clip(name), Offset: int64(at), Attrs: attrMap(attrs)})
}

// End finishes the span; err, when not nil, marks it failed and is kept as
// text. Only the first call counts.
func (sp *Span) End(err error) {
	if sp == nil {
		return
	}
	s := sp.store
	now := s.opts.Clock()
	sp.mu.Lock()
	if sp.ended {
		sp.mu.Unlock()
		return
	}
	sp.ended = true
	r := sp.recordLocked(now, err)
	sp.mu.Unlock()

	s.mu.Lock()
	delete(s.live, spanKey{sp.trace, sp.id})
	s.mu.Unlock()
	s.add(r)
	s.export.send(r)
}

// recordLocked is the span as it stands at now. After End nothing changes the
// maps that it shares; before it, they are copied.
func (sp *Span) recordLocked(now time.Time, err error) *record {
	r := &record{
		Kind:   kindSpan,
		Time:   sp.start.UnixNano(),
		Trace:  sp.trace,
		Span:   sp.id,
		Parent: sp.parent,
		Name:   sp.name,
		Dur:    max(int64(now.Sub(sp.start)), 0),
		Attrs:  sp.attrs,
		Events: sp.events,
		Lost:   sp.dropped,
	}
	if err != nil {
		r.Failed, r.Error = true, clip(err.Error())
	}
	return r
}

// TraceID is the context's trace id, 32 hex digits, or "" when it has none.
func TraceID(ctx context.Context) string {
	up, _ := ctx.Value(contextKey{}).(place)
	return up.trace
}

// SpanID is the id of the context's span, 16 hex digits, or "" when it has none.
func SpanID(ctx context.Context) string {
	up, _ := ctx.Value(contextKey{}).(place)
	return up.span
}

// Traceparent is the context's place as a W3C traceparent header, or "" when it
// has none.
func Traceparent(ctx context.Context) string {
	up, _ := ctx.Value(contextKey{}).(place)
	if up.trace == "" {
		return ""
	}
	return "00-" + up.trace + "-" + up.span + "-01"
}

// WithTraceparent makes spans that are started in the returned context children
// of the span that the header names. A header that is empty or malformed gives
// ctx back unchanged: whoever sends a bad one gets a trace of its own.
func WithTraceparent(ctx context.Context, header string) context.Context {
	part := strings.Split(header, "-")
	if len(part) < 4 || len(part[0]) != 2 || part[0] == "ff" || !validID(part[1], 16) || !validID(part[2], 8) {
		return ctx
	}
	return context.WithValue(ctx, contextKey{}, place{part[1], part[2]})
}

// newID returns a random id of n bytes in hex, never all zeros.
func newID(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	b[0] |= 1
	return hex.EncodeToString(b)
}

// validID reports whether id is n bytes in lower-case hex, not all zeros.
func validID(id string, n int) bool {
	return len(id) == 2*n && strings.Trim(id, "0123456789abcdef") == "" && strings.Trim(id, "0") != ""
}

func attrMap(attrs []Attr) map[string]any {
	if len(attrs) == 0 {
		return nil
	}
	m := make(map[string]any, len(attrs))
	for _, a := range attrs {
		if len(m) < maxAttrs {
			m[clip(a.Key)] = clipValue(a.value)
		}
	}
	return m
}

// clipValue brings a value into the four kinds that are kept.
func clipValue(v any) any {
	switch v := v.(type) {
	case string:
		return clip(v)
	case bool, int64:
		return v
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return fmt.Sprint(v) // JSON has no number for them
		}
		return v
	case int:
		return int64(v)
	case uint64:
		return int64(v)
	default:
		return clip(fmt.Sprint(v))
	}
}

func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return s[:maxText] + "[cut]"
}
