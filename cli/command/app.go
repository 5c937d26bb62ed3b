// Package command is the command-line tools: the three surfaces, whose
// subcommands, flags, help and completion all come from the catalogue, and
// sandboxd, which runs the daemon. A tool is one function from an App, which is
// the world around it, to an exit code; the mains are nothing more.
package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/catalog"
)

// App is what a tool has of the world around it.
type App struct {
	Name       string   // how the tool was called
	Args       []string // what follows the name
	Stdin      io.Reader
	Stdout     io.Writer
	Stderr     io.Writer
	Getenv     func(string) string
	Executable string // path of the tool's own file
	Terminal   bool   // Stderr is a terminal
}

// OS returns the App of this process.
func OS() (App, error) {
	exe, err := os.Executable()
	if err != nil {
		return App{}, fmt.Errorf("find the tool's own file: %w", err)
	}
	_, noTTY := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS)
	return App{
		Name: filepath.Base(os.Args[0]), Args: os.Args[1:],
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Getenv: os.Getenv, Executable: exe, Terminal: noTTY == nil,
	}, nil
}

// Main runs a tool in this process and returns its exit code. SIGINT and
// SIGTERM end the tool's context.
func Main(tool func(context.Context, App) int) int {
	app, err := OS()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return catalog.ExitFailed
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return tool(ctx, app)
}

// usageError is a command line that is wrong; it ends the tool with ExitUsage.
type usageError struct {
	command string // whose help tells more
	err     error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(cmd *cobra.Command, format string, args ...any) error {
	return &usageError{command: cmd.CommandPath(), err: fmt.Errorf(format, args...)}
}

// exitError ends the tool with a code and no message: all was said.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// run executes root and turns its error into a message and an exit code.
func (a App) run(ctx context.Context, root *cobra.Command) int {
	root.SetArgs(a.Args)
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.CompletionOptions.HiddenDefaultCmd = false
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usagef(cmd, "%w", err) })
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return catalog.ExitOK
	}
	if code, ok := errors.AsType[exitError](err); ok {
		return int(code)
	}
	usage, isUsage := errors.AsType[*usageError](err)
	if !isUsage && !isCatalogError(err) && strings.HasPrefix(err.Error(), "unknown command") { // cobra has no type for it
		usage, isUsage = &usageError{command: cmd.CommandPath(), err: err}, true
	}
	if isUsage {
		a.complain(catalog.Errorf(catalog.InvalidRequest, "%w", usage.err), usage.command)
		return catalog.ExitUsage
	}
	e := catalog.AsError(err)
	a.complain(e, "")
	return e.ExitCode()
}

func isCatalogError(err error) bool {
	_, ok := errors.AsType[*catalog.Error](err)
	return ok
}

// complain writes e to stderr, as a document or as lines.
func (a App) complain(e *catalog.Error, helpOf string) {
	if a.wantsJSON() {
		_ = writeJSON(a.Stderr, catalog.ErrorBody{Error: e}) // there is nowhere left to report to
		return
	}
	w := &strings.Builder{}
	fmt.Fprintf(w, "%s: %s\n", a.Name, e.Message)
	renderConflicts(w, e.Conflicts())
	if helpOf != "" {
		fmt.Fprintf(w, "See \"%s --help\".\n", helpOf)
	}
	_, _ = io.WriteString(a.Stderr, w.String()) // there is nowhere left to report to
}

// wantsJSON looks for --json in the raw arguments, since the flags may be what
// is wrong with the command line.
func (a App) wantsJSON() bool {
	args := a.Args
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.Contains(args, "--json") || slices.Contains(args, "--json=true")
}

// writeJSON writes v as one line.
func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// helpTemplate shows what cobra's own shows, with the exit codes after it.
const helpTemplate = `{{with (or .Long .Short)}}{{. | trimTrailingWhitespaces}}

{{end}}{{if or .Runnable .HasSubCommands}}{{.UsageString}}{{end}}{{with index .Annotations "exit"}}
{{.}}
{{end}}`

const (
	plainExitCodes = `Exit codes:
  0  ok
  1  failed
  2  wrong usage`
	exitCodes = plainExitCodes + `
  3  conflict: nothing was published`
)

// exitCodesOf is the part of an operation's help about exit codes.
func exitCodesOf(op catalog.Operation) string {
	switch {
	case op.Name == catalog.ExecCommand:
		return execExitCodes
	case slices.Contains(op.Errors, catalog.Conflicted):
		return exitCodes
	}
	return plainExitCodes
}

const execExitCodes = `Exit codes:
  The command's own code, or 128 + the number of the signal that ended it; 0
  while it runs on after its yield time. Otherwise:
  1  failed
  2  wrong usage
  3  the command succeeded, but its changes conflict and were not published`
