package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
)

// ToolName is the name of a surface's command-line tool.
func ToolName(s catalog.Surface) string { return "sandbox-" + string(s) + "-cli" }

var surfaceSummaries = map[catalog.Surface]string{
	catalog.Manager:       "make, list and remove sandboxes",
	catalog.Runtime:       "sessions, commands, files and publication of one sandbox",
	catalog.Observability: "what runs, what happened, and who touched what",
}

// Surface runs the command-line tool of a surface and returns its exit code.
func Surface(ctx context.Context, app App, s catalog.Surface) int {
	return app.run(ctx, newSurface(app, s).root())
}

// surface is one run of a surface's tool.
type surface struct {
	app  App
	kind catalog.Surface

	stateDir  string
	sandboxID string
	requestID string
	json      bool
	autoStart bool
	progress  bool
}

func newSurface(app App, s catalog.Surface) *surface { return &surface{app: app, kind: s} }

func (s *surface) root() *cobra.Command {
	root := &cobra.Command{
		Use:   ToolName(s.kind),
		Short: surfaceSummaries[s.kind],
		Long: strings.ToUpper(surfaceSummaries[s.kind][:1]) + surfaceSummaries[s.kind][1:] + ".\n\n" +
			"Talks to the sandboxd of a state directory: --state-dir, else $" + config.StateDirVar + ",\n" +
			"else $XDG_STATE_HOME/ephemeral-sandbox, else ~/.local/state/ephemeral-sandbox.",
		Annotations: map[string]string{"exit": exitCodes},
	}
	root.SetHelpTemplate(helpTemplate)
	f := root.PersistentFlags()
	f.SortFlags = false
	if s.kind != catalog.Manager {
		f.StringVar(&s.sandboxID, "sandbox-id", "", "`ID` of the sandbox to work on")
	}
	f.StringVar(&s.stateDir, "state-dir", "", "`DIR` that holds the daemon's state")
	f.BoolVar(&s.json, "json", false, "write one JSON document, errors as one on stderr")
	f.BoolVar(&s.autoStart, "auto-start", false, "start a daemon when none is running")
	f.StringVar(&s.requestID, "request-id", "", "`ID` of this operation in traces, blame and commits; absent makes one up")
	f.BoolVar(&s.progress, "progress", false, "report progress on stderr though it is no terminal")
	for _, op := range catalog.Operations() {
		if op.Surface == s.kind {
			root.AddCommand(s.operation(op))
		}
	}
	s.complete(root, "sandbox-id", s.sandboxIDs)
	return root
}

// flag is an argument of an operation as a flag. What is given is checked at
// once and put into the request later, when all of the command line is known.
type flag struct {
	p     catalog.Param
	op    catalog.Operation
	given []string
}

func (f *flag) Set(v string) error {
	if !f.p.Stdin || v != "-" {
		if err := f.p.Set(f.op.NewRequest(), v); err != nil {
			return err
		}
	}
	if f.p.Type != catalog.ListParam {
		f.given = nil
	}
	f.given = append(f.given, v)
	return nil
}

func (f *flag) String() string { return f.p.Default }

func (f *flag) Type() string {
	if f.p.Type == catalog.BoolParam {
		return "bool"
	}
	return f.p.Arg
}

// invocation is an operation's subcommand with its flags.
type invocation struct {
	s     *surface
	op    catalog.Operation
	flags []*flag
}

func (s *surface) operation(op catalog.Operation) *cobra.Command {
	in := &invocation{s: s, op: op}
	cmd := &cobra.Command{
		Use:                   op.Name,
		Aliases:               op.Aliases,
		Short:                 op.Summary,
		Long:                  wrap(strings.ToUpper(op.Summary[:1])+op.Summary[1:]+". "+op.About, 80),
		Args:                  cobra.ArbitraryArgs,
		DisableFlagsInUseLine: true,
		Annotations:           map[string]string{"exit": exitCodesOf(op)},
		RunE:                  in.run,
		ValidArgsFunction:     cobra.NoFileCompletions,
	}
	cmd.Flags().SortFlags = false
	if s.kind == catalog.Manager && op.Sandbox != catalog.NoSandbox {
		cmd.Flags().StringVar(&s.sandboxID, "sandbox-id", "", "`ID` of the sandbox to work on; may be given without the flag")
		cmd.Use += " ID"
		cmd.ValidArgsFunction = s.sandboxIDs
		s.complete(cmd, "sandbox-id", s.sandboxIDs)
	}
	for _, p := range op.Params() {
		in.addFlag(cmd, p)
	}
	cmd.Use += " [flags]"
	return cmd
}

func (in *invocation) addFlag(cmd *cobra.Command, p catalog.Param) {
	f := &flag{p: p, op: in.op}
	in.flags = append(in.flags, f)
	switch {
	case p.Positional == "rest":
		cmd.Use = cmd.Use[:strings.LastIndexByte(cmd.Use, ' ')] + " (" + cmd.Use[strings.LastIndexByte(cmd.Use, ' ')+1:] + " | -- " + p.Arg + "...)"
		return
	case p.Positional != "" && (p.Required || in.op.Name == catalog.ExecCommand):
		cmd.Use += " " + p.Arg
	case p.Positional != "":
		cmd.Use += " [" + p.Arg + "]"
	}
	help := p.Help
	if p.Required {
		help += " (required)"
	}
	pf := cmd.Flags().VarPF(f, p.Flag(), "", help)
	if p.Type == catalog.BoolParam {
		pf.NoOptDefVal = "true"
	}
	switch {
	case len(p.Enum) > 0:
		in.s.complete(cmd, p.Flag(), cobra.FixedCompletions(p.Enum, cobra.ShellCompDirectiveNoFileComp))
	case p.Name == "workspace_session_id":
		in.s.complete(cmd, p.Flag(), in.s.sessionIDs)
	case !p.HostPath:
		in.s.complete(cmd, p.Flag(), cobra.NoFileCompletions)
	}
}

func (s *surface) complete(cmd *cobra.Command, flag string, fn cobra.CompletionFunc) {
	if cmd.Flag(flag) == nil && cmd.PersistentFlags().Lookup(flag) == nil {
		return
	}
	if err := cmd.RegisterFlagCompletionFunc(flag, fn); err != nil {
		panic(fmt.Sprintf("completion of --%s: %v", flag, err)) // registered twice: a fault in this file
	}
}

func (in *invocation) run(cmd *cobra.Command, args []string) error {
	if err := in.positional(cmd, args); err != nil {
		return err
	}
	req, err := in.request()
	if err != nil {
		return usagef(cmd, "%w", err)
	}
	if in.op.Sandbox == catalog.RequiredSandbox && in.s.sandboxID == "" {
		return usagef(cmd, "--sandbox-id is missing: %s works on one sandbox, and \"%s list_sandboxes\" shows the ids", in.op.Name, ToolName(catalog.Manager))
	}
	c, err := in.s.connect(cmd.Context())
	if err != nil {
		return err
	}
	defer c.Close()
	call := client.Call{Op: in.op.Name, SandboxID: in.s.sandboxID, RequestID: in.s.requestID, Request: req}
	if in.op.Name == catalog.ExecCommand && !in.s.json {
		return in.s.exec(cmd.Context(), c, call)
	}
	meter := in.s.meter()
	var raw json.RawMessage
	err = c.Call(cmd.Context(), call, &raw, meter.report)
	meter.clear()
	if err != nil {
		return err
	}
	res := in.op.NewResult()
	if err := json.Unmarshal(raw, res); err != nil {
		return fmt.Errorf("read the result: %w", err)
	}
	if in.s.json {
		_, err = in.s.app.Stdout.Write(append(raw, '\n'))
	} else {
		err = in.s.show(res)
	}
	if err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	if code := exitOf(res); code != catalog.ExitOK {
		return exitError(code)
	}
	return nil
}

// exitOf is the exit code that goes with a result.
func exitOf(res any) int {
	switch r := res.(type) {
	case *catalog.ExecCommandResult:
		return execExit(r)
	case *catalog.LayerStackResult:
		if r.Verify != nil && !r.Verify.OK {
			return catalog.ExitFailed
		}
	}
	return catalog.ExitOK
}

// positional gives the arguments without a flag to the parameters that may be
// given so and were not given by flag, in order.
func (in *invocation) positional(cmd *cobra.Command, args []string) error {
	rest := []string(nil)
	if dash := cmd.ArgsLenAtDash(); dash >= 0 && in.rest() != nil {
		args, rest = args[:dash], args[dash:]
	}
	if in.s.kind == catalog.Manager && in.op.Sandbox != catalog.NoSandbox && in.s.sandboxID == "" && len(args) > 0 {
		in.s.sandboxID, args = args[0], args[1:]
	}
	for _, f := range in.flags {
		if len(args) > 0 && f.p.Positional != "" && f != in.rest() && len(f.given) == 0 {
			if err := f.Set(args[0]); err != nil {
				return usagef(cmd, "%w", err)
			}
			args = args[1:]
		}
	}
	if len(args) > 0 {
		if in.rest() != nil {
			return usagef(cmd, "unexpected argument %q: the command is one argument, so quote it, or put its words after \"--\"", args[0])
		}
		return usagef(cmd, "unexpected argument %q", args[0])
	}
	for _, word := range rest {
		if err := in.rest().Set(word); err != nil {
			return usagef(cmd, "%w", err)
		}
	}
	return nil
}

// rest is the parameter that takes what follows "--", nil when there is none.
func (in *invocation) rest() *flag {
	for _, f := range in.flags {
		if f.p.Positional == "rest" {
			return f
		}
	}
	return nil
}

// request puts the request together and validates it.
func (in *invocation) request() (any, error) {
	req := in.op.NewRequest()
	stdin := ""
	for _, f := range in.flags {
		for _, v := range f.given {
			if f.p.Stdin && v == "-" {
				if stdin != "" {
					return nil, fmt.Errorf("--%s and --%s both want standard input: give one of them another way", stdin, f.p.Flag())
				}
				stdin = f.p.Flag()
				b, err := readInput(in.s.app.Stdin)
				if err != nil {
					return nil, fmt.Errorf("read standard input for --%s: %w", f.p.Flag(), err)
				}
				v = string(b)
			}
			if f.p.HostPath && v != "" {
				abs, err := filepath.Abs(v)
				if err != nil {
					return nil, fmt.Errorf("%s %q: %w", f.p.Name, v, err)
				}
				v = abs
			}
			if err := f.p.Set(req, v); err != nil {
				return nil, err
			}
		}
	}
	return req, catalog.Validate(req)
}

// maxInput bounds what is read from standard input; a daemon takes no more in
// one request anyway.
const maxInput = 1 << 30

func readInput(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxInput+1))
	if err == nil && len(b) > maxInput {
		err = fmt.Errorf("it has more than %d bytes", maxInput)
	}
	return b, err
}

// connect returns a client of the chosen daemon, which it starts when that is
// wanted and none is running.
func (s *surface) connect(ctx context.Context) (*client.Client, error) {
	dir, err := config.StateDir(s.stateDir, s.app.Getenv)
	if err != nil {
		return nil, err
	}
	c := client.New(dir)
	if !s.autoStart {
		return c, nil
	}
	var health json.RawMessage
	err = c.Health(ctx, &health)
	if e := catalog.AsError(err); e == nil || e.Kind != catalog.Unavailable {
		return c, err
	}
	if err := s.app.startDaemon(ctx, dir); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// completionTime bounds how long a shell waits for suggestions.
const completionTime = 2 * time.Second

func (s *surface) sandboxIDs(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	var res catalog.ListSandboxesResult
	if s.ask(cmd, client.Call{Op: catalog.ListSandboxes}, &res) != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ids := make([]cobra.Completion, 0, len(res.Sandboxes))
	for _, b := range res.Sandboxes {
		ids = append(ids, cobra.CompletionWithDesc(b.SandboxID, printable(b.WorkspaceRoot)))
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}

func (s *surface) sessionIDs(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	var res catalog.ListWorkspaceSessionsResult
	if s.ask(cmd, client.Call{Op: catalog.ListWorkspaceSessions, SandboxID: s.sandboxID}, &res) != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ids := make([]cobra.Completion, 0, len(res.Sessions))
	for _, w := range res.Sessions {
		ids = append(ids, cobra.CompletionWithDesc(w.WorkspaceSessionID, "on "+w.Base))
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}

func (s *surface) ask(cmd *cobra.Command, call client.Call, res any) error {
	parent := cmd.Context()
	if parent == nil {
		parent = context.Background()
	}
	ctx, stop := context.WithTimeout(parent, completionTime)
	defer stop()
	dir, err := config.StateDir(s.stateDir, s.app.Getenv)
	if err != nil {
		return err
	}
	c := client.New(dir)
	defer c.Close()
	return c.Call(ctx, call, res, nil)
}

// wrap breaks text into lines of at most width characters.
func wrap(text string, width int) string {
	var b strings.Builder
	n := 0
	for _, word := range strings.Fields(text) {
		switch {
		case n == 0:
		case n+1+len(word) > width:
			b.WriteByte('\n')
			n = 0
		default:
			b.WriteByte(' ')
			n++
		}
		b.WriteString(word)
		n += len(word)
	}
	return b.String()
}

var errNoOutput = errors.New("the output cannot be read back")
