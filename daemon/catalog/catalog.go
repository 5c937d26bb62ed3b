// Package catalog lists every operation of the product as plain Go values: its
// name, arguments with types and defaults, result, the errors it may give and
// the authority it needs. The gateway, the command-line tools, their help and
// completion, and docs/operations.md all derive from it; nothing about an
// operation is written down a second time.
//
// A request and a result are one exported struct each. Field tags of a request
// carry what Go types cannot say:
//
//	json        the name on the wire; the flag is the same with dashes
//	help        one line for help, documents and schemas
//	default     the value when the argument is absent
//	required    "true": absent or empty is refused
//	enum        the allowed values, comma separated
//	min, max    bounds of a number
//	arg         the word that stands for the value in help
//	positional  "1": may be given without its flag; "rest": takes what follows "--"
//	host        "path": a path of the caller's machine, made absolute by the caller
//	stdin       "-": the value "-" means the caller's standard input
//
// The package is a leaf: it imports nothing of ours.
package catalog

import "reflect"

// Surface names the command-line tool that offers an operation.
type Surface string

// The three surfaces.
const (
	Manager       Surface = "manager"
	Runtime       Surface = "runtime"
	Observability Surface = "observability"
)

// Authority is the scope a token must hold for an operation. Each scope
// includes the ones after it.
type Authority string

// The three scopes, widest first.
const (
	Manage  Authority = "management"    // make and remove sandboxes
	Work    Authority = "runtime"       // sessions, commands, files, publication
	Observe Authority = "observability" // read what happened
)

// Need says whether an operation takes a sandbox id.
type Need uint8

// The three needs.
const (
	NoSandbox Need = iota
	OptionalSandbox
	RequiredSandbox
)

func (n Need) String() string { return [...]string{"none", "optional", "required"}[n] }

// Operation describes one operation.
type Operation struct {
	Name      string
	Aliases   []string // short forms of the command line; unique within a surface
	Surface   Surface
	Authority Authority
	Summary   string // one line, no full stop
	About     string // a paragraph for help and documents
	Request   any    // zero value of the request struct
	Result    any    // zero value of the result struct
	Errors    []Kind // kinds besides internal, unauthorized, unavailable
	Sandbox   Need
	Progress  bool // sends Progress while it works, to clients that stream
	Detached  bool // goes on when the client disconnects
	Waits     bool // may take as long as what it waits for; given up at once when the daemon ends
}

// NewRequest returns a pointer to a new request with its defaults filled in.
func (o Operation) NewRequest() any {
	p := reflect.New(reflect.TypeOf(o.Request))
	applyDefaults(p.Elem())
	return p.Interface()
}

// NewResult returns a pointer to a new, empty result.
func (o Operation) NewResult() any { return reflect.New(reflect.TypeOf(o.Result)).Interface() }

// Progress is one report of a long operation.
type Progress struct {
	Stage   string `json:"stage,omitempty"`   // import, seal, stdout, stderr ...
	Message string `json:"message,omitempty"` // for people
	Done    int64  `json:"done,omitempty"`    // in units of Unit
	Total   int64  `json:"total,omitempty"`   // 0 when not known
	Unit    string `json:"unit,omitempty"`    // files, bytes
	// Output is a piece of a command's output as it appears: Stage names the
	// stream (stdout or stderr) and Offset the place of its first byte. Pieces
	// of one stream come in order; one that a slow client could not take is
	// missing, and read_command_lines has it.
	Output Text  `json:"output,omitempty"`
	Offset int64 `json:"offset,omitempty"`
}

// Names of the operations.
const (
	CreateSandbox  = "create_sandbox"
	ListSandboxes  = "list_sandboxes"
	InspectSandbox = "inspect_sandbox"
	DestroySandbox = "destroy_sandbox"

	CreateWorkspaceSession  = "create_workspace_session"
	ListWorkspaceSessions   = "list_workspace_sessions"
	ExecCommand             = "exec_command"
	ReadCommandLines        = "read_command_lines"
	FileRead                = "file_read"
	FileWrite               = "file_write"
	FileEdit                = "file_edit"
	FileList                = "file_list"
	FileBlame               = "file_blame"
	DiffWorkspaceSession    = "diff_workspace_session"
	PublishWorkspaceSession = "publish_workspace_session"
	RefreshWorkspaceSession = "refresh_workspace_session"
	DestroyWorkspaceSession = "destroy_workspace_session"

	Snapshot   = "snapshot"
	Trace      = "trace"
	Events     = "events"
	Activity   = "activity"
	LayerStack = "layerstack"
)

// Operations returns the catalogue in the order in which help and documents
// show it.
func Operations() []Operation {
	return []Operation{
		{
			Name: CreateSandbox, Aliases: []string{"create"}, Surface: Manager, Authority: Manage,
			Summary: "make a sandbox from a directory",
			About: "Imports the directory as the base layer L000000. The directory is only read. " +
				"An import that finds an unreadable entry, or an entry that changes while it is read, " +
				"names every such path and leaves nothing behind.",
			Request: CreateSandboxRequest{}, Result: CreateSandboxResult{},
			Errors:   []Kind{InvalidRequest, NotFound, PreconditionFailed, ResourceExhausted},
			Progress: true, Waits: true,
		},
		{
			Name: ListSandboxes, Aliases: []string{"ls"}, Surface: Manager, Authority: Observe,
			Summary: "list all sandboxes",
			Request: ListSandboxesRequest{}, Result: ListSandboxesResult{},
		},
		{
			Name: InspectSandbox, Aliases: []string{"inspect"}, Surface: Manager, Authority: Observe,
			Summary: "show one sandbox with its sessions",
			Request: InspectSandboxRequest{}, Result: InspectSandboxResult{},
			Errors: []Kind{NotFound, Corrupt}, Sandbox: RequiredSandbox,
		},
		{
			Name: DestroySandbox, Aliases: []string{"destroy"}, Surface: Manager, Authority: Manage,
			Summary: "end a sandbox with its sessions and delete its layers",
			About: "The imported directory is not touched. Sessions that hold unpublished changes " +
				"make it refuse, unless force is set.",
			Request: DestroySandboxRequest{}, Result: DestroySandboxResult{},
			Errors: []Kind{NotFound, PreconditionFailed}, Sandbox: RequiredSandbox, Detached: true,
		},

		{
			Name: CreateWorkspaceSession, Aliases: []string{"create"}, Surface: Runtime, Authority: Work,
			Summary: "open a session on the head",
			About: "A session is a private view of the workspace at one commit, mounted at the " +
				"workspace's own path inside it, together with the processes that run in it.",
			Request: CreateWorkspaceSessionRequest{}, Result: CreateWorkspaceSessionResult{},
			Errors: []Kind{InvalidRequest, NotFound, PreconditionFailed, ResourceExhausted, Corrupt}, Sandbox: RequiredSandbox,
		},
		{
			Name: ListWorkspaceSessions, Aliases: []string{"ps"}, Surface: Runtime, Authority: Observe,
			Summary: "list the sessions and the commands in them",
			Request: ListWorkspaceSessionsRequest{}, Result: ListWorkspaceSessionsResult{},
			Errors: []Kind{NotFound}, Sandbox: RequiredSandbox,
		},
		{
			Name: ExecCommand, Aliases: []string{"exec"}, Surface: Runtime, Authority: Work,
			Summary: "run a command in a session",
			About: "Give the command as one shell string, or as words after \"--\" to run without a shell. " +
				"Without a session id a session is made for the command; its changes are published when the " +
				"command exits with 0 and the session ends. When that publication is refused the session stays " +
				"and is named, so that it can be refreshed and published. The command goes on when the client " +
				"disconnects or its yield time is over.",
			Request: ExecCommandRequest{}, Result: ExecCommandResult{},
			Errors:  []Kind{InvalidRequest, NotFound, PreconditionFailed, ResourceExhausted, Corrupt},
			Sandbox: RequiredSandbox, Progress: true, Detached: true, Waits: true,
		},
		{
			Name: ReadCommandLines, Aliases: []string{"lines"}, Surface: Runtime, Authority: Work,
			Summary: "read a command's output by offset, running or ended",
			About: "Returns whole lines from a byte offset of one stream; a line is cut only where it is " +
				"longer than the byte limit, or where the output ends for now.",
			Request: ReadCommandLinesRequest{}, Result: ReadCommandLinesResult{},
			Errors: []Kind{InvalidRequest, NotFound}, Sandbox: RequiredSandbox, Waits: true,
		},
		{
			Name: FileRead, Aliases: []string{"read"}, Surface: Runtime, Authority: Work,
			Summary: "read a file of the head or of a session",
			Request: FileReadRequest{}, Result: FileReadResult{},
			Errors: []Kind{InvalidRequest, NotFound, Corrupt}, Sandbox: RequiredSandbox,
		},
		{
			Name: FileWrite, Aliases: []string{"write"}, Surface: Runtime, Authority: Work,
			Summary: "create a file or replace its content",
			About: "Missing parent directories are made; an existing file keeps its mode. Without a session " +
				"the write is published as one commit attributed to operation:<request id>.",
			Request: FileWriteRequest{}, Result: FileWriteResult{},
			Errors: []Kind{InvalidRequest, NotFound, Conflicted, ResourceExhausted, Corrupt}, Sandbox: RequiredSandbox, Detached: true,
		},
		{
			Name: FileEdit, Aliases: []string{"edit"}, Surface: Runtime, Authority: Work,
			Summary: "replace strings in a file, all or none",
			About: "Edits apply in order, each to the text the one before it left. An old_string that is " +
				"missing, or that occurs more than once without replace_all, refuses the whole call. Without a " +
				"session the edit is published as one commit attributed to operation:<request id>.",
			Request: FileEditRequest{}, Result: FileEditResult{},
			Errors: []Kind{InvalidRequest, NotFound, Conflicted, PreconditionFailed, ResourceExhausted, Corrupt}, Sandbox: RequiredSandbox, Detached: true,
		},
		{
			Name: FileList, Aliases: []string{"ls"}, Surface: Runtime, Authority: Work,
			Summary: "list a directory of the head or of a session",
			Request: FileListRequest{}, Result: FileListResult{},
			Errors: []Kind{InvalidRequest, NotFound, Corrupt}, Sandbox: RequiredSandbox,
		},
		{
			Name: FileBlame, Aliases: []string{"blame"}, Surface: Runtime, Authority: Work,
			Summary: "say who wrote each line of a file",
			About: "Ranges tile the file. An owner is workspace_session:<id>, operation:<id>, original " +
				"(imported) or unknown.",
			Request: FileBlameRequest{}, Result: FileBlameResult{},
			Errors: []Kind{InvalidRequest, NotFound, Corrupt}, Sandbox: RequiredSandbox,
		},
		{
			Name: DiffWorkspaceSession, Aliases: []string{"diff"}, Surface: Runtime, Authority: Work,
			Summary: "show what a session changed against its base",
			Request: DiffWorkspaceSessionRequest{}, Result: DiffWorkspaceSessionResult{},
			Errors: []Kind{InvalidRequest, NotFound, Corrupt}, Sandbox: RequiredSandbox,
		},
		{
			Name: PublishWorkspaceSession, Aliases: []string{"publish"}, Surface: Runtime, Authority: Work,
			Summary: "commit a session's changes onto the head, or refuse them whole",
			About: "Changes that the head does not contradict become one layer; text changed on both sides is " +
				"merged by lines. Any conflict refuses the publication with every conflicting path in " +
				"details.conflicts; the session keeps all it has, and goes on.",
			Request: PublishWorkspaceSessionRequest{}, Result: PublishWorkspaceSessionResult{},
			Errors: []Kind{InvalidRequest, NotFound, Conflicted, PreconditionFailed, ResourceExhausted, Corrupt}, Sandbox: RequiredSandbox, Detached: true,
		},
		{
			Name: RefreshWorkspaceSession, Aliases: []string{"refresh"}, Surface: Runtime, Authority: Work,
			Summary: "bring a session onto the current head",
			About: "Disjoint changes of the head appear silently. Text that clashes is left with conflict " +
				"markers; where any other kind clashes the session's version stays and the head's is put beside " +
				"it as NAME.head-Lnnnnnn. Both are listed.",
			Request: RefreshWorkspaceSessionRequest{}, Result: RefreshWorkspaceSessionResult{},
			Errors: []Kind{InvalidRequest, NotFound, PreconditionFailed, ResourceExhausted, Corrupt}, Sandbox: RequiredSandbox, Detached: true,
		},
		{
			Name: DestroyWorkspaceSession, Aliases: []string{"destroy"}, Surface: Runtime, Authority: Work,
			Summary: "end a session and everything that runs in it",
			Request: DestroyWorkspaceSessionRequest{}, Result: DestroyWorkspaceSessionResult{},
			Errors: []Kind{InvalidRequest, NotFound}, Sandbox: RequiredSandbox, Detached: true,
		},

		{
			Name: Snapshot, Surface: Observability, Authority: Observe,
			Summary: "show the daemon, its sandboxes and sessions now",
			Request: SnapshotRequest{}, Result: SnapshotResult{},
			Errors: []Kind{NotFound}, Sandbox: OptionalSandbox,
		},
		{
			Name: Trace, Surface: Observability, Authority: Observe,
			Summary: "show the spans of one operation",
			About:   "The trace of an operation bears its request id; \"last\" is the newest that ended.",
			Request: TraceRequest{}, Result: TraceResult{},
			Errors: []Kind{InvalidRequest, NotFound}, Sandbox: OptionalSandbox,
		},
		{
			Name: Events, Surface: Observability, Authority: Observe,
			Summary: "show what happened, oldest first",
			Request: EventsRequest{}, Result: EventsResult{},
			Errors: []Kind{InvalidRequest, NotFound}, Sandbox: OptionalSandbox,
		},
		{
			Name: Activity, Surface: Observability, Authority: Observe,
			Summary: "show who read, wrote, created, renamed and removed which files",
			About: "One entry for each operation, kind of access and path. The set of paths is complete at " +
				"every trace level; counts are complete only at level io, because the kernel answers repeated " +
				"accesses from its cache.",
			Request: ActivityRequest{}, Result: ActivityResult{},
			Errors: []Kind{InvalidRequest, NotFound}, Sandbox: RequiredSandbox,
		},
		{
			Name: LayerStack, Aliases: []string{"layers"}, Surface: Observability, Authority: Observe,
			Summary: "list the layers, or verify every byte of them",
			Request: LayerStackRequest{}, Result: LayerStackResult{},
			Errors: []Kind{NotFound, Corrupt}, Sandbox: RequiredSandbox, Progress: true, Waits: true,
		},
	}
}

// Find returns the operation called name; aliases are not considered, since
// they are unique only within a surface.
func Find(name string) (Operation, bool) {
	for _, o := range Operations() {
		if o.Name == name {
			return o, true
		}
	}
	return Operation{}, false
}
