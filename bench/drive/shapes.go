package drive

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"
	"time"
)

// The results below hold the fields that their users here read; the programs
// give more.

// Sandbox is the result of create_sandbox.
type Sandbox struct {
	ID          string `json:"sandbox_id"`
	Commit      string `json:"commit"`
	Root        string `json:"workspace_root"`
	Files       int64  `json:"files"`
	Bytes       int64  `json:"bytes"`
	StoredBytes int64  `json:"stored_bytes"`
}

// Session is the result of create_workspace_session.
type Session struct {
	ID   string `json:"workspace_session_id"`
	Base string `json:"base"`
}

// Exec is the result of exec_command.
type Exec struct {
	Status     string   `json:"status"`
	ExitCode   *int     `json:"exit_code"`
	Signal     string   `json:"signal"`
	CommandID  string   `json:"command_id"`
	Session    string   `json:"workspace_session_id"`
	Stdout     string   `json:"stdout"`
	Stderr     string   `json:"stderr"`
	DurationMS int64    `json:"duration_ms"`
	Publish    *Publish `json:"publish"`
}

// OK reports whether the command exited with 0.
func (e Exec) OK() bool { return e.Status == "exited" && e.ExitCode != nil && *e.ExitCode == 0 }

// Publish is the result of publish_workspace_session.
type Publish struct {
	Status string           `json:"status"`
	Commit string           `json:"commit"`
	Parent string           `json:"parent"`
	Merged []string         `json:"merged"`
	Counts map[string]int64 `json:"counts"`
}

// Version is one side's state of a conflicting path.
type Version struct {
	Kind string `json:"kind"`
	Hash string `json:"hash"`
	Size int64  `json:"size"`
	Mode string `json:"mode"`
}

// Span is a run of lines, counted from 1.
type Span struct {
	Start int64 `json:"start"`
	Count int64 `json:"count"`
}

// Conflict is one path on which head and session contradict each other.
type Conflict struct {
	Path       string   `json:"path"`
	Kind       string   `json:"kind"`
	Base       *Version `json:"base"`
	Head       *Version `json:"head"`
	Session    *Version `json:"session"`
	HeadCommit string   `json:"head_commit"`
	Hunks      []struct {
		Base    Span `json:"base"`
		Head    Span `json:"head"`
		Session Span `json:"session"`
	} `json:"hunks"`
	Remedy string `json:"remedy"`
}

// Conflicts reads the conflicts from a publication's error.
func (e *Error) Conflicts() []Conflict {
	var d struct {
		Conflicts []Conflict `json:"conflicts"`
	}
	if json.Unmarshal(e.Details, &d) != nil {
		return nil
	}
	return d.Conflicts
}

// Refresh is the result of refresh_workspace_session.
type Refresh struct {
	Base      string     `json:"base"`
	Moved     []string   `json:"moved"`
	Merged    []string   `json:"merged"`
	Conflicts []Conflict `json:"conflicts"`
}

// Blame is the result of file_blame.
type Blame struct {
	Path   string       `json:"path"`
	Commit string       `json:"commit"`
	Ranges []BlameRange `json:"ranges"`
}

// BlameRange is a run of lines of one owner.
type BlameRange struct {
	Start     int64      `json:"start_line"`
	Count     int64      `json:"line_count"`
	Owner     string     `json:"owner"`
	Session   string     `json:"session"`
	Operation string     `json:"operation"`
	Command   string     `json:"command"`
	Commit    string     `json:"commit"`
	Time      *time.Time `json:"time"`
}

// Owners returns the owner of each line, the first line first.
func (b Blame) Owners() []string {
	var out []string
	for _, r := range b.Ranges {
		for range r.Count {
			out = append(out, r.Owner)
		}
	}
	return out
}

// File is the result of file_read.
type File struct {
	Path    string `json:"path"`
	Commit  string `json:"commit"`
	Content string `json:"content"`
}

// Trace is the result of trace.
type Trace struct {
	ID         string      `json:"trace_id"`
	Name       string      `json:"name"`
	DurationUS int64       `json:"duration_us"`
	Spans      []TraceSpan `json:"spans"`
}

// TraceSpan is one stage of a traced operation.
type TraceSpan struct {
	Name       string `json:"name"`
	Depth      int    `json:"depth"`
	OffsetUS   int64  `json:"offset_us"`
	DurationUS int64  `json:"duration_us"`
	Error      string `json:"error"`
	Open       bool   `json:"open"`
}

// Activity is the result of activity.
type Activity struct {
	Sessions []struct {
		ID    string `json:"workspace_session_id"`
		Level string `json:"trace_level"`
		Gaps  uint64 `json:"gaps"`
	} `json:"sessions"`
	Entries []Access `json:"entries"`
}

// Access is one operation's use of one path.
type Access struct {
	Session   string `json:"workspace_session_id"`
	Operation string `json:"operation"`
	Command   string `json:"command"`
	Kind      string `json:"kind"`
	Path      string `json:"path"`
	Count     uint64 `json:"count"`
}

// LayerStack is the result of layerstack.
type LayerStack struct {
	Head   string `json:"head"`
	Layers []struct {
		Commit    string `json:"commit"`
		Session   string `json:"session"`
		Operation string `json:"operation"`
		RequestID string `json:"request_id"`
		Message   string `json:"message"`
	} `json:"layers"`
	Verify *struct {
		OK       bool     `json:"ok"`
		Layers   int      `json:"layers"`
		Problems []string `json:"problems"`
	} `json:"verify"`
}

// Snapshot is the result of snapshot.
type Snapshot struct {
	Daemon struct {
		PID      int   `json:"pid"`
		RSSBytes int64 `json:"rss_bytes"`
	} `json:"daemon"`
}

// CreateSandbox imports a directory.
func (r *Rig) CreateSandbox(ctx context.Context, dir string) (Sandbox, error) {
	var s Sandbox
	err := r.Call(ctx, &s, Manager, "create_sandbox", "--workspace-root", dir)
	return s, err
}

// ImportSandbox is CreateSandbox with reports of how many files were read.
func (r *Rig) ImportSandbox(ctx context.Context, dir string, report func(files int64)) (Sandbox, error) {
	watched := *r
	watched.Stderr = &progressLines{report: report}
	var s Sandbox
	err := watched.Call(ctx, &s, Manager, "create_sandbox", "--progress", "--workspace-root", dir)
	return s, err
}

// progressLines is a writer that picks the progress documents out of what a
// program writes to standard error.
type progressLines struct {
	report func(done int64)
	rest   []byte
}

func (p *progressLines) Write(b []byte) (int, error) {
	p.rest = append(p.rest, b...)
	for {
		line, rest, ok := bytes.Cut(p.rest, []byte("\n"))
		if !ok {
			return len(b), nil
		}
		p.rest = rest
		var doc struct {
			Progress *struct {
				Done int64 `json:"done"`
			} `json:"progress"`
		}
		if json.Unmarshal(line, &doc) == nil && doc.Progress != nil {
			p.report(doc.Progress.Done)
		}
	}
}

// CreateSession opens a session on the head.
func (r *Rig) CreateSession(ctx context.Context, sandbox string) (Session, error) {
	var s Session
	err := r.Call(ctx, &s, Runtime, "--sandbox-id", sandbox, "create_workspace_session")
	return s, err
}

// Exec runs a shell command in a session; without a session id in one of its
// own.
func (r *Rig) Exec(ctx context.Context, sandbox, session, command string, flags ...string) (Exec, error) {
	var e Exec
	args := []string{"--sandbox-id", sandbox, "exec_command"}
	if session != "" {
		args = append(args, "--workspace-session-id", session)
	}
	args = append(append(args, flags...), command)
	err := r.Call(ctx, &e, Runtime, args...)
	return e, err
}

// Publish publishes a session.
func (r *Rig) Publish(ctx context.Context, sandbox, session string, flags ...string) (Publish, error) {
	var p Publish
	args := append([]string{"--sandbox-id", sandbox, "publish_workspace_session", "--workspace-session-id", session}, flags...)
	err := r.Call(ctx, &p, Runtime, args...)
	return p, err
}

// Refresh moves a session onto the head.
func (r *Rig) Refresh(ctx context.Context, sandbox, session string) (Refresh, error) {
	var f Refresh
	err := r.Call(ctx, &f, Runtime, "--sandbox-id", sandbox, "refresh_workspace_session", "--workspace-session-id", session)
	return f, err
}

// DestroySession ends a session.
func (r *Rig) DestroySession(ctx context.Context, sandbox, session string) error {
	return r.Call(ctx, nil, Runtime, "--sandbox-id", sandbox, "destroy_workspace_session", "--workspace-session-id", session)
}

// Read reads a file of the head, or of a session when its id is not empty.
func (r *Rig) Read(ctx context.Context, sandbox, session, path string) (File, error) {
	var f File
	args := []string{"--sandbox-id", sandbox, "file_read", "--path", path}
	if session != "" {
		args = append(args, "--workspace-session-id", session)
	}
	err := r.Call(ctx, &f, Runtime, args...)
	return f, err
}

// Edit is one replacement of file_edit.
type Edit struct {
	Old        string `json:"old_string"`
	New        string `json:"new_string"`
	ReplaceAll bool   `json:"replace_all,omitempty"`
}

// EditFile replaces strings in a session's file.
func (r *Rig) EditFile(ctx context.Context, sandbox, session, path string, edits ...Edit) error {
	js, err := json.Marshal(edits)
	if err != nil {
		return err
	}
	return r.Call(ctx, nil, Runtime, "--sandbox-id", sandbox, "file_edit", "--workspace-session-id", session, "--path", path, "--edits", string(js))
}

// Blame asks who wrote a file's lines at the head.
func (r *Rig) Blame(ctx context.Context, sandbox, path string) (Blame, error) {
	var b Blame
	err := r.Call(ctx, &b, Runtime, "--sandbox-id", sandbox, "file_blame", "--path", path)
	return b, err
}

// Layers lists the commits, and checks every byte of them when asked to.
func (r *Rig) Layers(ctx context.Context, sandbox string, verify bool) (LayerStack, error) {
	var l LayerStack
	args := []string{"layerstack", "--sandbox-id", sandbox}
	if verify {
		args = append(args, "--verify")
	}
	err := r.Call(ctx, &l, Observe, args...)
	return l, err
}

// CommitNumber reads L000024 as 24.
func CommitNumber(name string) (int, error) {
	if len(name) < 2 || name[0] != 'L' {
		return 0, strconv.ErrSyntax
	}
	return strconv.Atoi(name[1:])
}
