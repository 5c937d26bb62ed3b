package catalog

import "time"

// SnapshotRequest has no arguments besides the sandbox id.
type SnapshotRequest struct{}

// SnapshotResult is the state of everything at one instant.
type SnapshotResult struct {
	Time      time.Time         `json:"time"`
	Daemon    DaemonState       `json:"daemon"`
	Sandboxes []SandboxSnapshot `json:"sandboxes"`
}

// DaemonState describes the daemon's own process.
type DaemonState struct {
	PID         int              `json:"pid"`
	Version     string           `json:"version"`
	StateDir    Text             `json:"state_dir"`
	StartedAt   time.Time        `json:"started_at"`
	Restarts    int              `json:"restarts"` // times its parent replaced it
	RSSBytes    int64            `json:"rss_bytes"`
	HeapBytes   int64            `json:"heap_bytes"`
	Goroutines  int              `json:"goroutines"`
	OpenFiles   int              `json:"open_files"`
	CacheBytes  int64            `json:"cache_bytes"`
	TraceBytes  int64            `json:"trace_bytes"`
	FUSECounts  map[string]int64 `json:"fuse_requests,omitempty"`
	RequestsNow int              `json:"requests_in_flight"`
}

// SandboxSnapshot is one sandbox with its sessions.
type SandboxSnapshot struct {
	Sandbox
	Leases       int       `json:"leases"`
	Dirents      int64     `json:"dirents"` // changed names since the base, in memory
	Inodes       int64     `json:"inodes"`
	OpenSessions []Session `json:"open_sessions"`
}

// TraceRequest names a trace.
type TraceRequest struct {
	TraceID string `json:"trace_id,omitempty" help:"request id of the operation, or last" default:"last" positional:"1" arg:"ID"`
}

// TraceResult is the spans of one operation, parents before children, siblings
// in order of their start.
type TraceResult struct {
	TraceID    string    `json:"trace_id"`
	Name       string    `json:"name"`
	Start      time.Time `json:"start"`
	DurationUS int64     `json:"duration_us"`
	Spans      []Span    `json:"spans"`
}

// Span is one stage of an operation.
type Span struct {
	SpanID     string         `json:"span_id"`
	ParentID   string         `json:"parent_id"` // empty for the root
	Name       string         `json:"name"`
	Depth      int            `json:"depth"`
	OffsetUS   int64          `json:"offset_us"` // from the start of the trace
	DurationUS int64          `json:"duration_us"`
	Error      string         `json:"error,omitempty"`
	Open       bool           `json:"open,omitempty"` // has not ended
	Attrs      map[string]any `json:"attrs,omitempty"`
	Events     []SpanEvent    `json:"events,omitempty"`
}

// SpanEvent is an instant within a span.
type SpanEvent struct {
	Name     string         `json:"name"`
	OffsetUS int64          `json:"offset_us"`
	Attrs    map[string]any `json:"attrs,omitempty"`
}

// EventsRequest selects events.
type EventsRequest struct {
	Name               string `json:"name,omitempty" help:"only events of this name" arg:"NAME"`
	WorkspaceSessionID string `json:"workspace_session_id,omitempty" help:"only this session's" arg:"ID"`
	SinceMS            int64  `json:"since_ms,omitempty" help:"only events of the last so many milliseconds; 0 all" default:"0" min:"0" arg:"N"`
	LastN              int64  `json:"last_n,omitempty" help:"only the newest so many" default:"50" min:"1" max:"10000" arg:"N"`
}

// EventsResult lists events, oldest first.
type EventsResult struct {
	Events []Event `json:"events"`
	Lost   int64   `json:"lost"` // older events given up to the size bound
}

// Event is something that happened.
type Event struct {
	Time               time.Time      `json:"time"`
	Name               string         `json:"name"`
	SandboxID          string         `json:"sandbox_id,omitempty"`
	WorkspaceSessionID string         `json:"workspace_session_id,omitempty"`
	Operation          string         `json:"operation,omitempty"`
	TraceID            string         `json:"trace_id,omitempty"`
	Attrs              map[string]any `json:"attrs,omitempty"`
}

// ActivityRequest selects accesses.
type ActivityRequest struct {
	WorkspaceSessionID string `json:"workspace_session_id,omitempty" help:"only this session's, open or ended" arg:"ID"`
	Path               Text   `json:"path,omitempty" help:"only this path and what is beneath it" arg:"PATH"`
	Kind               string `json:"kind,omitempty" help:"only this kind of access" enum:"lookup,absent,list,read,write,create,rename,remove,attr,link"`
	Operation          string `json:"operation,omitempty" help:"only this operation's" arg:"ID"`
	Limit              int64  `json:"limit,omitempty" help:"entries at most" default:"10000" min:"1" max:"1000000" arg:"N"`
}

// ActivityResult is the access record.
type ActivityResult struct {
	SandboxID string            `json:"sandbox_id"`
	Sessions  []ActivitySession `json:"sessions"`
	Entries   []Access          `json:"entries"`
	Truncated bool              `json:"truncated"`
}

// ActivitySession says how complete a session's record is.
type ActivitySession struct {
	WorkspaceSessionID string `json:"workspace_session_id"`
	TraceLevel         string `json:"trace_level"`
	CountsComplete     bool   `json:"counts_complete"` // only at level io
	Gaps               uint64 `json:"gaps"`            // accesses that could not be recorded
	Open               bool   `json:"open"`
}

// Access is one operation's use of one path.
type Access struct {
	WorkspaceSessionID string    `json:"workspace_session_id"`
	Operation          string    `json:"operation"` // request id; empty when not known
	Command            Text      `json:"command"`
	Kind               string    `json:"kind"` // lookup, absent, list, read, write, create, rename, remove, attr, link
	Path               Text      `json:"path"`
	Ino                uint64    `json:"ino"`
	Count              uint64    `json:"count"`
	First              time.Time `json:"first"`
	Last               time.Time `json:"last"`
}

// LayerStackRequest asks for the layers.
type LayerStackRequest struct {
	Verify bool `json:"verify,omitempty" help:"read every byte and check it"`
}

// LayerStackResult lists the layers, newest first.
type LayerStackResult struct {
	SandboxID    string       `json:"sandbox_id"`
	Head         string       `json:"head"`
	Layers       []Layer      `json:"layers"`
	Leases       int          `json:"leases"`
	LogicalBytes int64        `json:"logical_bytes"`
	StoredBytes  int64        `json:"stored_bytes"`
	Verify       *VerifyState `json:"verify"` // null unless asked for
}

// Layer is one commit with its layer.
type Layer struct {
	Commit
	LeasedBy []string `json:"leased_by"` // sessions that stand on it
}

// VerifyState is what a verification found.
type VerifyState struct {
	OK       bool     `json:"ok"`
	Commits  int      `json:"commits"`
	Layers   int      `json:"layers"`
	Bytes    int64    `json:"bytes"`
	Problems []string `json:"problems"`
}
