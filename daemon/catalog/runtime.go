package catalog

import (
	"bytes"
	"time"
)

// CreateWorkspaceSessionRequest asks for a session on the head.
type CreateWorkspaceSessionRequest struct {
	Network    string `json:"network,omitempty" help:"network of the session: none has loopback only, shared is the host's" default:"none" enum:"none,shared"`
	TraceLevel string `json:"trace_level,omitempty" help:"what is recorded: io every read and write, open every open, set each file once" default:"open" enum:"io,open,set"`
}

// CreateWorkspaceSessionResult names the session and what it stands on.
type CreateWorkspaceSessionResult struct {
	WorkspaceSessionID string `json:"workspace_session_id"`
	Base               string `json:"base"`
	Workspace          Text   `json:"workspace"` // where the view is mounted inside
	Network            string `json:"network"`
	TraceLevel         string `json:"trace_level"`
	IDMapping          string `json:"id_mapping"` // how user ids inside relate to the host's
	DurationMS         int64  `json:"duration_ms"`
}

// ListWorkspaceSessionsRequest has no arguments besides the sandbox id.
type ListWorkspaceSessionsRequest struct{}

// ListWorkspaceSessionsResult lists sessions, oldest first.
type ListWorkspaceSessionsResult struct {
	Sessions []Session `json:"sessions"`
}

// Session is one private view and what runs in it.
type Session struct {
	WorkspaceSessionID string    `json:"workspace_session_id"`
	Base               string    `json:"base"`
	State              string    `json:"state"` // opening, ready, publishing, refreshing, closing, asleep, broken
	Problem            string    `json:"problem,omitempty"`
	Implicit           bool      `json:"implicit"` // made for one command
	Network            string    `json:"network"`
	TraceLevel         string    `json:"trace_level"`
	CreatedAt          time.Time `json:"created_at"`
	Changes            int64     `json:"changes"`     // unpublished changed names and inodes
	UpperBytes         int64     `json:"upper_bytes"` // private bytes on disk
	HolderPID          int       `json:"holder_pid"`
	Commands           []Command `json:"commands"`
}

// Command is one command of a session.
type Command struct {
	CommandID  string    `json:"command_id"`
	Command    Text      `json:"command"`
	Status     string    `json:"status"`
	ExitCode   *int      `json:"exit_code"`
	StartedAt  time.Time `json:"started_at"`
	DurationMS int64     `json:"duration_ms"`
}

// Values of a command's status.
const (
	StatusRunning   = "running"
	StatusExited    = "exited"
	StatusSignaled  = "signaled"
	StatusTimedOut  = "timed_out"
	StatusCancelled = "cancelled"
)

// ExecCommandRequest asks for a command. Exactly one of Cmd and Argv is given.
type ExecCommandRequest struct {
	Cmd                Text   `json:"cmd,omitempty" help:"command line for the shell" positional:"1" arg:"CMD"`
	Argv               []Text `json:"argv,omitempty" help:"program and arguments, run without a shell" positional:"rest" arg:"ARGV"`
	WorkspaceSessionID string `json:"workspace_session_id,omitempty" help:"session to run in; without one a session is made, published on exit 0, and ended" arg:"ID"`
	Cwd                Text   `json:"cwd,omitempty" help:"working directory, absolute or relative to the workspace" arg:"DIR"`
	Env                []Text `json:"env,omitempty" help:"environment variable K=V; may be repeated" arg:"K=V"`
	Stdin              *Text  `json:"stdin,omitempty" help:"text for standard input, or - for the caller's own" stdin:"-" arg:"TEXT"`
	TimeoutMS          int64  `json:"timeout_ms,omitempty" help:"end the command after this many milliseconds; 0 never" default:"0" min:"0" arg:"N"`
	YieldTimeMS        *int64 `json:"yield_time_ms,omitempty" help:"return after this many milliseconds though the command runs on; absent waits for its end" min:"0" arg:"N"`
	MaxOutputBytes     int64  `json:"max_output_bytes,omitempty" help:"bytes of each stream to return; the last ones are kept" default:"1048576" min:"1" max:"16777216" arg:"N"`
	Network            string `json:"network,omitempty" help:"network of the session that is made when none is named" default:"none" enum:"none,shared"`
	Message            string `json:"message,omitempty" help:"commit message of the publication when no session is named" arg:"TEXT"`
}

// Validate says which rule between fields the request breaks.
func (r *ExecCommandRequest) Validate() error {
	switch {
	case r.Cmd == "" && len(r.Argv) == 0:
		return Errorf(InvalidRequest, "no command: give one shell string as cmd, or program and arguments as argv (after \"--\" on a command line)")
	case r.Cmd != "" && len(r.Argv) > 0:
		return Errorf(InvalidRequest, "cmd and argv are both given: use one of them")
	case len(r.Argv) > 0 && r.Argv[0] == "":
		return Errorf(InvalidRequest, "argv[0] is empty: it must name a program")
	}
	for _, kv := range r.Env {
		if i := bytes.IndexByte([]byte(kv), '='); i <= 0 {
			return Errorf(InvalidRequest, "env %q: must have the form NAME=VALUE", kv)
		}
	}
	for _, s := range append([]Text{r.Cmd, r.Cwd}, append(r.Argv, r.Env...)...) {
		if err := noNUL("command", s); err != nil {
			return err
		}
	}
	return nil
}

// ExecCommandResult tells what became of a command. Stdout and Stderr hold the
// last bytes of each stream, up to the limit: the first byte of Stdout is byte
// StdoutBytes - len(Stdout) of the stream.
type ExecCommandResult struct {
	Status             string          `json:"status"`    // running, exited, signaled, timed_out, cancelled
	ExitCode           *int            `json:"exit_code"` // null while running; 128 + signal number when a signal ended it
	Signal             string          `json:"signal"`    // SIGKILL ...; empty when none
	CommandID          string          `json:"command_id"`
	WorkspaceSessionID string          `json:"workspace_session_id"`
	Stdout             Text            `json:"stdout"`
	Stderr             Text            `json:"stderr"`
	StdoutBytes        int64           `json:"stdout_bytes"` // of the whole stream so far
	StderrBytes        int64           `json:"stderr_bytes"`
	Truncated          bool            `json:"truncated"`     // a stream is longer than what is returned
	DroppedBytes       int64           `json:"dropped_bytes"` // printed beyond output_bytes, or with the disk full, and not kept
	DurationMS         int64           `json:"duration_ms"`
	Publish            *PublishOutcome `json:"publish"` // null when a session was named, or while running
	UserMS             int64           `json:"user_ms"`
	SystemMS           int64           `json:"system_ms"`
	MaxRSSBytes        int64           `json:"max_rss_bytes"`
}

// Values of a publication's status.
const (
	PublishCommitted = "committed"
	PublishNoOp      = "no_op"
	PublishConflict  = "conflict" // in PublishOutcome only: refused, the session stays
	PublishSkipped   = "skipped"  // in PublishOutcome only: the command failed, nothing was published
	PublishFailed    = "failed"   // in PublishOutcome only: see Error; the session stays
)

// PublishOutcome is how the publication of a one-command session ended.
type PublishOutcome struct {
	Status             string           `json:"status"` // committed, no_op, conflict, skipped, failed
	Commit             string           `json:"commit"`
	Parent             string           `json:"parent"`
	Merged             []Text           `json:"merged"`
	Counts             map[string]int64 `json:"counts"`
	Conflicts          []Conflict       `json:"conflicts,omitempty"`
	WorkspaceSessionID string           `json:"workspace_session_id,omitempty"` // the session that stays
	Error              *Error           `json:"error,omitempty"`                // for conflict and failed
}

// ReadCommandLinesRequest asks for a part of a command's output.
type ReadCommandLinesRequest struct {
	CommandID   string `json:"command_id" help:"command, as given by exec_command" required:"true" positional:"1" arg:"ID"`
	Stream      string `json:"stream,omitempty" help:"which output" default:"stdout" enum:"stdout,stderr"`
	StartOffset int64  `json:"start_offset,omitempty" help:"first byte" default:"0" min:"0" arg:"N"`
	Limit       int64  `json:"limit,omitempty" help:"lines at most" default:"1000" min:"1" max:"1000000" arg:"N"`
	MaxBytes    int64  `json:"max_bytes,omitempty" help:"bytes at most" default:"1048576" min:"1" max:"16777216" arg:"N"`
	WaitMS      int64  `json:"wait_ms,omitempty" help:"wait this many milliseconds for output or the end when there is nothing yet" default:"0" min:"0" max:"600000" arg:"N"`
}

// ReadCommandLinesResult is a part of a command's output.
type ReadCommandLinesResult struct {
	CommandID          string `json:"command_id"`
	WorkspaceSessionID string `json:"workspace_session_id"`
	Status             string `json:"status"` // as in ExecCommandResult
	ExitCode           *int   `json:"exit_code"`
	Signal             string `json:"signal"`
	Stream             string `json:"stream"`
	Output             Text   `json:"output"`
	StartOffset        int64  `json:"start_offset"`
	EndOffset          int64  `json:"end_offset"` // where the next read starts
	Lines              int64  `json:"lines"`      // line ends in Output, plus one for an unfinished last line
	TotalBytes         int64  `json:"total_bytes"`
	EOF                bool   `json:"eof"` // the command has ended and EndOffset is TotalBytes
	// Publish is how the publication of a one-command session ended; null for
	// other commands and while the command runs.
	Publish *PublishOutcome `json:"publish"`
}

// FileReadRequest asks for a file's content.
type FileReadRequest struct {
	Path               Text   `json:"path" help:"file, relative to the workspace or absolute beneath it" required:"true" positional:"1" arg:"PATH"`
	WorkspaceSessionID string `json:"workspace_session_id,omitempty" help:"session to read in; without one the head answers" arg:"ID"`
	Commit             string `json:"commit,omitempty" help:"read at this commit, for example L000024" arg:"Lnnnnnn"`
	StartLine          int64  `json:"start_line,omitempty" help:"first line, counted from 1" default:"1" min:"1" arg:"N"`
	LineCount          int64  `json:"line_count,omitempty" help:"lines at most; 0 all" default:"0" min:"0" arg:"N"`
	MaxBytes           int64  `json:"max_bytes,omitempty" help:"bytes at most" default:"16777216" min:"1" max:"33554432" arg:"N"`
}

// Validate says which rule between fields the request breaks.
func (r *FileReadRequest) Validate() error {
	return validatePlace(r.Path, r.WorkspaceSessionID, r.Commit)
}

// FileReadResult is a file's content, or a window of it.
type FileReadResult struct {
	Path               Text   `json:"path"`
	Commit             string `json:"commit"` // the commit read, or the session's base
	WorkspaceSessionID string `json:"workspace_session_id"`
	Content            Text   `json:"content"`
	Size               int64  `json:"size"` // of the whole file
	Mode               string `json:"mode"` // octal, "0644"
	Hash               string `json:"hash"` // SHA-256 of the whole file, hex
	StartLine          int64  `json:"start_line"`
	LineCount          int64  `json:"line_count"`
	TotalLines         int64  `json:"total_lines"`
	Truncated          bool   `json:"truncated"` // content ends before the file does
}

// FileWriteRequest asks for a file's whole content to be set.
type FileWriteRequest struct {
	Path               Text   `json:"path" help:"file, relative to the workspace or absolute beneath it" required:"true" positional:"1" arg:"PATH"`
	Content            *Text  `json:"content" help:"the new content, or - for the caller's standard input" required:"true" positional:"2" stdin:"-" arg:"TEXT"`
	WorkspaceSessionID string `json:"workspace_session_id,omitempty" help:"session to write in; without one the write is published as a commit" arg:"ID"`
	Message            string `json:"message,omitempty" help:"commit message when no session is named" arg:"TEXT"`
}

// Validate says which rule between fields the request breaks.
func (r *FileWriteRequest) Validate() error {
	if r.Message != "" && r.WorkspaceSessionID != "" {
		return errMessageInSession
	}
	return noNUL("path", r.Path)
}

// FileWriteResult tells what was written. Without a session Status, Commit and
// Parent tell the publication; with one they are empty.
type FileWriteResult struct {
	Path               Text   `json:"path"`
	Type               string `json:"type"` // create, update
	BytesWritten       int64  `json:"bytes_written"`
	Operation          string `json:"operation"`
	WorkspaceSessionID string `json:"workspace_session_id"`
	Status             string `json:"status"` // committed, no_op
	Commit             string `json:"commit"`
	Parent             string `json:"parent"`
	Merged             []Text `json:"merged"`
}

// Edit is one replacement in a file's text.
type Edit struct {
	OldString  Text `json:"old_string"`
	NewString  Text `json:"new_string"`
	ReplaceAll bool `json:"replace_all,omitempty"`
}

// FileEditRequest asks for replacements in a file.
type FileEditRequest struct {
	Path               Text   `json:"path" help:"file, relative to the workspace or absolute beneath it" required:"true" positional:"1" arg:"PATH"`
	Edits              []Edit `json:"edits" help:"list of {\"old_string\",\"new_string\",\"replace_all\"}, or - for standard input" required:"true" stdin:"-" arg:"JSON"`
	WorkspaceSessionID string `json:"workspace_session_id,omitempty" help:"session to edit in; without one the edit is published as a commit" arg:"ID"`
	Message            string `json:"message,omitempty" help:"commit message when no session is named" arg:"TEXT"`
}

// Validate says which rule between fields the request breaks.
func (r *FileEditRequest) Validate() error {
	for i, e := range r.Edits {
		switch {
		case e.OldString == "":
			return Errorf(InvalidRequest, "edits[%d]: old_string is empty: it must be text that occurs in the file", i)
		case e.OldString == e.NewString:
			return Errorf(InvalidRequest, "edits[%d]: old_string and new_string are equal: the edit would change nothing", i)
		}
	}
	if r.Message != "" && r.WorkspaceSessionID != "" {
		return errMessageInSession
	}
	return noNUL("path", r.Path)
}

// FileEditResult tells what was replaced. Status, Commit and Parent are as in
// FileWriteResult.
type FileEditResult struct {
	Path               Text   `json:"path"`
	EditsApplied       int    `json:"edits_applied"`
	Replacements       int    `json:"replacements"`
	BytesWritten       int64  `json:"bytes_written"`
	Operation          string `json:"operation"`
	WorkspaceSessionID string `json:"workspace_session_id"`
	Status             string `json:"status"`
	Commit             string `json:"commit"`
	Parent             string `json:"parent"`
	Merged             []Text `json:"merged"`
}

// FileListRequest asks for a directory's entries.
type FileListRequest struct {
	Path               Text   `json:"path,omitempty" help:"directory, relative to the workspace or absolute beneath it; absent is its root" positional:"1" arg:"PATH"`
	WorkspaceSessionID string `json:"workspace_session_id,omitempty" help:"session to look in; without one the head answers" arg:"ID"`
	Commit             string `json:"commit,omitempty" help:"list at this commit, for example L000024" arg:"Lnnnnnn"`
	After              Text   `json:"after,omitempty" help:"start behind this name, to go on after a truncated list" arg:"NAME"`
	Limit              int64  `json:"limit,omitempty" help:"entries at most" default:"10000" min:"1" max:"100000" arg:"N"`
}

// Validate says which rule between fields the request breaks.
func (r *FileListRequest) Validate() error {
	return validatePlace(r.Path, r.WorkspaceSessionID, r.Commit)
}

// FileListResult lists a directory in byte order of names.
type FileListResult struct {
	Path               Text    `json:"path"`
	Commit             string  `json:"commit"`
	WorkspaceSessionID string  `json:"workspace_session_id"`
	Entries            []Entry `json:"entries"`
	Truncated          bool    `json:"truncated"`
}

// Entry is one name in a directory.
type Entry struct {
	Name   Text      `json:"name"`
	Kind   string    `json:"kind"` // file, dir, symlink, char, block, fifo, socket
	Size   int64     `json:"size"`
	Mode   string    `json:"mode"` // octal, "0644"
	Mtime  time.Time `json:"mtime"`
	Target Text      `json:"target,omitempty"` // of a symlink
}

// FileBlameRequest asks who wrote a file's lines.
type FileBlameRequest struct {
	Path               Text   `json:"path" help:"file, relative to the workspace or absolute beneath it" required:"true" positional:"1" arg:"PATH"`
	WorkspaceSessionID string `json:"workspace_session_id,omitempty" help:"also blame this session's unpublished lines" arg:"ID"`
	Commit             string `json:"commit,omitempty" help:"blame at this commit, for example L000024" arg:"Lnnnnnn"`
}

// Validate says which rule between fields the request breaks.
func (r *FileBlameRequest) Validate() error {
	return validatePlace(r.Path, r.WorkspaceSessionID, r.Commit)
}

// FileBlameResult tiles a file with the origins of its lines.
type FileBlameResult struct {
	Path               Text         `json:"path"`
	Commit             string       `json:"commit"`
	WorkspaceSessionID string       `json:"workspace_session_id,omitempty"`
	Ranges             []BlameRange `json:"ranges"`
}

// BlameRange is a run of lines of one origin.
type BlameRange struct {
	StartLine int64      `json:"start_line"` // counted from 1
	LineCount int64      `json:"line_count"`
	Owner     string     `json:"owner"` // workspace_session:<id>, operation:<id>, original, unknown
	Session   string     `json:"session"`
	Operation string     `json:"operation"`
	Command   Text       `json:"command"`
	Commit    string     `json:"commit"` // empty for lines that are not published
	Time      *time.Time `json:"time"`
}

// DiffWorkspaceSessionRequest asks for a session's changes.
type DiffWorkspaceSessionRequest struct {
	WorkspaceSessionID string `json:"workspace_session_id" help:"session" required:"true" positional:"1" arg:"ID"`
	Path               Text   `json:"path,omitempty" help:"only this path and what is beneath it" arg:"PATH"`
	Context            int64  `json:"context" help:"unchanged lines around each change" default:"3" min:"0" max:"1000" arg:"N"`
	Stat               bool   `json:"stat,omitempty" help:"only names and counts, no diff text"`
}

// DiffWorkspaceSessionResult lists a session's changes in byte order of paths.
type DiffWorkspaceSessionResult struct {
	WorkspaceSessionID string   `json:"workspace_session_id"`
	Base               string   `json:"base"`
	Changes            []Change `json:"changes"`
}

// Change is one changed path.
type Change struct {
	Path       Text     `json:"path"`
	Change     string   `json:"change"`         // added, modified, removed, renamed, metadata
	From       Text     `json:"from,omitempty"` // the old path, for renamed
	Kind       string   `json:"kind"`           // of the new version, or of what was removed
	Old        *Version `json:"old"`            // null for added
	New        *Version `json:"new"`            // null for removed
	Binary     bool     `json:"binary"`
	LinesAdded int64    `json:"lines_added"`
	LinesGone  int64    `json:"lines_removed"`
	Diff       Text     `json:"diff"` // unified; empty for binary files and other kinds
}

// Version is one side's state of a path.
type Version struct {
	Kind   string `json:"kind"`
	Hash   string `json:"hash,omitempty"` // SHA-256, hex, of a file
	Size   int64  `json:"size"`
	Mode   string `json:"mode"`             // octal, "0644"
	Target Text   `json:"target,omitempty"` // of a symlink
}

// PublishWorkspaceSessionRequest asks for a session's changes to become a
// commit.
type PublishWorkspaceSessionRequest struct {
	WorkspaceSessionID string `json:"workspace_session_id" help:"session" required:"true" positional:"1" arg:"ID"`
	Message            string `json:"message,omitempty" help:"commit message" arg:"TEXT"`
	Close              bool   `json:"close,omitempty" help:"end the session after it is published"`
	ExpectHead         string `json:"expect_head,omitempty" help:"refuse unless the head is this commit" arg:"Lnnnnnn"`
}

// PublishWorkspaceSessionResult tells what was committed. With status no_op
// Commit and Parent both name the head.
type PublishWorkspaceSessionResult struct {
	WorkspaceSessionID string           `json:"workspace_session_id"`
	Status             string           `json:"status"` // committed, no_op
	Commit             string           `json:"commit"`
	Parent             string           `json:"parent"`
	Merged             []Text           `json:"merged"` // paths whose text was merged with the head's
	Counts             map[string]int64 `json:"counts"` // added, modified, removed, metadata, time_only ...
	StoredBytes        int64            `json:"stored_bytes"`
	Warning            string           `json:"warning,omitempty"` // committed, but something after it went wrong
	Closed             bool             `json:"closed"`
	DurationMS         int64            `json:"duration_ms"`
}

// Conflict is one path at which head and session contradict each other. A
// version is null where the path is absent.
type Conflict struct {
	Path       Text     `json:"path"`
	AlsoNames  []Text   `json:"also_names"`
	Kind       string   `json:"kind"` // content, binary, modify/delete, delete/modify, add/add, kind, symlink, xattr, parent-gone, rename/rename
	Base       *Version `json:"base"`
	Head       *Version `json:"head"`
	Session    *Version `json:"session"`
	HeadCommit string   `json:"head_commit"` // the commit that changed it
	HeadOrigin *Origin  `json:"head_origin"` // who made that commit
	Hunks      []Hunk   `json:"hunks"`
	Remedy     string   `json:"remedy"`
}

// Origin says who made something.
type Origin struct {
	Owner     string     `json:"owner"`
	Session   string     `json:"session"`
	Operation string     `json:"operation"`
	Command   Text       `json:"command"`
	Time      *time.Time `json:"time"`
}

// Hunk is one clash of a line merge, by lines of each version, counted from 1.
type Hunk struct {
	Base    LineSpan `json:"base"`
	Head    LineSpan `json:"head"`
	Session LineSpan `json:"session"`
}

// LineSpan is a run of lines; Start is the line before which an empty span
// lies.
type LineSpan struct {
	Start int64 `json:"start"`
	Count int64 `json:"count"`
}

// ConflictDetails is the details object of a conflict error.
type ConflictDetails struct {
	WorkspaceSessionID string     `json:"workspace_session_id,omitempty"` // the session that stays
	Base               string     `json:"base"`
	Head               string     `json:"head"`
	Conflicts          []Conflict `json:"conflicts"`
}

// RefreshWorkspaceSessionRequest asks for a session to move to the head.
type RefreshWorkspaceSessionRequest struct {
	WorkspaceSessionID string `json:"workspace_session_id" help:"session" required:"true" positional:"1" arg:"ID"`
}

// RefreshWorkspaceSessionResult tells how the move went.
type RefreshWorkspaceSessionResult struct {
	WorkspaceSessionID string     `json:"workspace_session_id"`
	Base               string     `json:"base"` // the new base, which is the head
	PreviousBase       string     `json:"previous_base"`
	Moved              []Text     `json:"moved"`     // paths that now show the head's version
	Merged             []Text     `json:"merged"`    // paths whose text was merged cleanly
	Conflicts          []Conflict `json:"conflicts"` // paths to resolve before publishing
	DurationMS         int64      `json:"duration_ms"`
}

// DestroyWorkspaceSessionRequest asks for a session's end.
type DestroyWorkspaceSessionRequest struct {
	WorkspaceSessionID string `json:"workspace_session_id" help:"session" required:"true" positional:"1" arg:"ID"`
}

// DestroyWorkspaceSessionResult tells what went with the session.
type DestroyWorkspaceSessionResult struct {
	WorkspaceSessionID string `json:"workspace_session_id"`
	Destroyed          bool   `json:"destroyed"`
	Unpublished        int64  `json:"unpublished_changes"`
	FreedBytes         int64  `json:"freed_bytes"`
	ProcessesEnded     int    `json:"processes_ended"`
}

var errMessageInSession = &Error{Kind: InvalidRequest, Message: "message and workspace_session_id are both given: a write in a session is not a commit; give the message to publish_workspace_session"}

func validatePlace(path Text, session, commit string) error {
	if session != "" && commit != "" {
		return Errorf(InvalidRequest, "workspace_session_id and commit are both given: use one of them")
	}
	return noNUL("path", path)
}

func noNUL(what string, t Text) error {
	if i := bytes.IndexByte([]byte(t), 0); i >= 0 {
		return Errorf(InvalidRequest, "%s %q has a NUL byte at offset %d: remove it", what, t, i)
	}
	return nil
}
