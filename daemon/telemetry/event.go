package telemetry

import "time"

// Event is one domain fact at an instant, such as "commit" or
// "session.created". Time is set by Emit when it is zero, Number by the store.
type Event struct {
	Number    uint64         `json:"number"` // grows with time; 0 until written
	Time      time.Time      `json:"time"`
	Name      string         `json:"name"`
	Sandbox   string         `json:"sandbox_id,omitempty"`
	Session   string         `json:"workspace_session_id,omitempty"`
	Operation string         `json:"operation,omitempty"`
	Trace     string         `json:"trace_id,omitempty"`
	Attrs     map[string]any `json:"attrs,omitempty"` // strings, bools, int64 and float64; others as text
}

// Emit records e.
func (s *Store) Emit(e Event) {
	if s == nil {
		return
	}
	if e.Time.IsZero() {
		e.Time = s.opts.Clock()
	}
	var attrs map[string]any
	if len(e.Attrs) > 0 {
		attrs = make(map[string]any, len(e.Attrs))
		for k, v := range e.Attrs {
			if len(attrs) < maxAttrs {
				attrs[clip(k)] = clipValue(v)
			}
		}
	}
	s.add(&record{
		Kind:      kindEvent,
		Time:      e.Time.UnixNano(),
		Trace:     clip(e.Trace),
		Name:      clip(e.Name),
		Sandbox:   clip(e.Sandbox),
		Session:   clip(e.Session),
		Operation: clip(e.Operation),
		Attrs:     attrs,
	})
}
