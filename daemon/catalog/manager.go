package catalog

import "time"

// CreateSandboxRequest asks for a sandbox made from a directory.
type CreateSandboxRequest struct {
	WorkspaceRoot Text   `json:"workspace_root" help:"directory to import; sessions see it at this path" required:"true" positional:"1" host:"path" arg:"DIR"`
	HostPaths     []Text `json:"host_paths,omitempty" help:"further directory of the host that sessions see read-only at its own absolute path, such as a module cache; may be repeated" arg:"DIR"`
}

// CreateSandboxResult tells what was imported.
type CreateSandboxResult struct {
	SandboxID     string `json:"sandbox_id"`
	Commit        string `json:"commit"` // L000000
	WorkspaceRoot Text   `json:"workspace_root"`
	Files         int64  `json:"files"`
	Dirs          int64  `json:"dirs"`
	Bytes         int64  `json:"bytes"`        // content, before compression
	StoredBytes   int64  `json:"stored_bytes"` // the base layer on disk
	DurationMS    int64  `json:"duration_ms"`
}

// ListSandboxesRequest has no arguments.
type ListSandboxesRequest struct{}

// ListSandboxesResult lists sandboxes, oldest first.
type ListSandboxesResult struct {
	Sandboxes []Sandbox `json:"sandboxes"`
}

// Sandbox is one workspace's layers and what runs on them.
type Sandbox struct {
	SandboxID     string    `json:"sandbox_id"`
	WorkspaceRoot Text      `json:"workspace_root"`
	State         string    `json:"state"`             // ready, broken
	Problem       string    `json:"problem,omitempty"` // why it is broken, and the remedy
	Head          string    `json:"head"`
	Layers        int       `json:"layers"`
	HostPaths     []Text    `json:"host_paths"`
	Files         int64     `json:"files"` // as imported
	Bytes         int64     `json:"bytes"` // as imported
	StoredBytes   int64     `json:"stored_bytes"`
	Sessions      int       `json:"sessions"`
	CreatedAt     time.Time `json:"created_at"`
}

// InspectSandboxRequest has no arguments besides the sandbox id.
type InspectSandboxRequest struct{}

// InspectSandboxResult is a sandbox with its open sessions.
type InspectSandboxResult struct {
	Sandbox
	OpenSessions []Session `json:"open_sessions"`
	HeadCommit   *Commit   `json:"head_commit"`
}

// DestroySandboxRequest asks for the end of a sandbox.
type DestroySandboxRequest struct {
	Force bool `json:"force,omitempty" help:"also when sessions hold unpublished changes"`
}

// DestroySandboxResult tells what went.
type DestroySandboxResult struct {
	SandboxID     string `json:"sandbox_id"`
	Destroyed     bool   `json:"destroyed"`
	SessionsEnded int    `json:"sessions_ended"`
	FreedBytes    int64  `json:"freed_bytes"`
}

// Commit is the record that made a layer part of the history.
type Commit struct {
	Commit       string           `json:"commit"` // Lnnnnnn
	Session      string           `json:"session"`
	Operation    string           `json:"operation"`
	RequestID    string           `json:"request_id"`
	Message      string           `json:"message"`
	Time         time.Time        `json:"time"`
	Merged       []Text           `json:"merged"`
	Counts       map[string]int64 `json:"counts"`
	Pack         string           `json:"pack"` // digest of the layer file
	Inline       bool             `json:"inline"`
	LogicalBytes int64            `json:"logical_bytes"`
	StoredBytes  int64            `json:"stored_bytes"`
}
