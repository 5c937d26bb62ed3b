// Package drive runs the built programs the way a user does: by their command
// lines, reading their JSON. The demo, the benchmarks and the acceptance runs
// are written on it, so that none of them can see more than a user sees.
package drive

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// The programs.
const (
	Daemon  = "sandboxd"
	Manager = "sandbox-manager-cli"
	Runtime = "sandbox-runtime-cli"
	Observe = "sandbox-observability-cli"
)

// Rig is one state directory and the programs that work on it.
type Rig struct {
	Bin    string    // directory of the programs
	State  string    // state directory; its parent exists
	Shown  io.Writer // each command line is written here before it runs; nil: nowhere
	Stderr io.Writer // standard error of programs that report progress; nil: nowhere
	Family *Family   // watches what is started
}

// New looks for the programs in bin.
func New(bin, state string, family *Family) (*Rig, error) {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return nil, fmt.Errorf("programs: %w", err)
	}
	for _, p := range []string{Daemon, Manager, Runtime, Observe} {
		if _, err := os.Stat(filepath.Join(bin, p)); err != nil {
			return nil, fmt.Errorf("program missing, run make build: %w", err)
		}
	}
	return &Rig{Bin: bin, State: state, Family: family}, nil
}

// Error is the error document of a program, or what it said in its place.
type Error struct {
	Command string
	Exit    int
	Kind    string
	Message string
	Details json.RawMessage
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: exit %d: %s: %s", e.Command, e.Exit, e.Kind, e.Message)
}

// IsKind reports whether err is a program's error of that kind.
func IsKind(err error, kind string) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Kind == kind
}

// Output is what a program left.
type Output struct {
	Stdout, Stderr []byte
	Exit           int // 128 + signal number when a signal ended it
}

// Run runs a program to its end. A non-zero exit is no error here. When ctx
// ends, the program is interrupted, and killed 5 seconds later.
func (r *Rig) Run(ctx context.Context, stdin io.Reader, program string, args ...string) (Output, error) {
	cmd := r.command(ctx, program, args)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
	if r.Stderr != nil {
		cmd.Stderr = io.MultiWriter(&errs, r.Stderr)
	}
	err := r.Family.run(cmd)
	o := Output{Stdout: out.Bytes(), Stderr: errs.Bytes()}
	if ctx.Err() != nil {
		return o, fmt.Errorf("%s: %w", program, context.Cause(ctx))
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		o.Exit = exit.ExitCode()
		if st, ok := exit.Sys().(syscall.WaitStatus); ok && st.Signaled() {
			o.Exit = 128 + int(st.Signal())
		}
		return o, nil
	}
	if err != nil {
		return o, fmt.Errorf("run %s: %w", program, err)
	}
	return o, nil
}

func (r *Rig) command(ctx context.Context, program string, args []string) *exec.Cmd {
	if r.Shown != nil {
		// As one would type it: --json and --progress are for the caller here.
		fmt.Fprintln(r.Shown, "$", Shell(program, slices.DeleteFunc(slices.Clone(args), func(a string) bool { return a == "--json" || a == "--progress" })...))
	}
	cmd := exec.CommandContext(ctx, filepath.Join(r.Bin, program), args...)
	cmd.Env = append(os.Environ(), "SANDBOX_STATE_DIR="+r.State)
	// A process group of its own: Ctrl-C reaches us, and we decide what ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// Call runs a program with --json and decodes its result, which may be nil. An
// error document becomes an *Error.
func (r *Rig) Call(ctx context.Context, result any, program string, args ...string) error {
	return r.CallIn(ctx, nil, result, program, args...)
}

// CallIn is Call with a standard input.
func (r *Rig) CallIn(ctx context.Context, stdin io.Reader, result any, program string, args ...string) error {
	o, err := r.Run(ctx, stdin, program, jsonArgs(args)...)
	if err != nil {
		return err
	}
	return o.decode(result, program+" "+strings.Join(args, " "))
}

// jsonArgs puts --json in front of what may be a command's own words.
func jsonArgs(args []string) []string { return append([]string{"--json"}, args...) }

func (o Output) decode(result any, command string) error {
	var doc struct {
		Error *struct {
			Kind, Message string
			Details       json.RawMessage
		}
	}
	var decodeErr error
	if len(o.Stdout) > 0 && result != nil {
		decodeErr = json.Unmarshal(o.Stdout, result)
	}
	if o.Exit != 0 && json.Unmarshal(lastDocument(o.Stderr), &doc) == nil && doc.Error != nil {
		return &Error{Command: command, Exit: o.Exit, Kind: doc.Error.Kind, Message: doc.Error.Message, Details: doc.Error.Details}
	}
	if decodeErr != nil {
		return fmt.Errorf("%s: exit %d: result is not one JSON document: %w\n%s", command, o.Exit, decodeErr, o.Stdout)
	}
	if len(o.Stdout) == 0 && (o.Exit != 0 || result != nil) {
		return &Error{Command: command, Exit: o.Exit, Kind: "none", Message: "no document at all: " + strings.TrimSpace(string(o.Stderr))}
	}
	return nil
}

// lastDocument cuts what a program printed before its error document.
func lastDocument(b []byte) []byte {
	if i := bytes.LastIndex(b, []byte("\n{")); i >= 0 {
		return b[i+1:]
	}
	return b
}

// Start starts the daemon in the background and returns when it answers.
func (r *Rig) Start(ctx context.Context) error {
	o, err := r.Run(ctx, nil, Daemon, "start")
	if err != nil {
		return err
	}
	if o.Exit != 0 {
		return fmt.Errorf("sandboxd start: exit %d: %s", o.Exit, bytes.TrimSpace(o.Stderr))
	}
	return nil
}

// Stop stops the daemon with everything that it runs.
func (r *Rig) Stop(ctx context.Context) error {
	o, err := r.Run(ctx, nil, Daemon, "stop")
	if err != nil {
		return err
	}
	if o.Exit != 0 {
		return fmt.Errorf("sandboxd stop: exit %d: %s", o.Exit, bytes.TrimSpace(o.Stderr))
	}
	return nil
}

// Shell writes a command line as one would type it.
func Shell(program string, args ...string) string {
	var b strings.Builder
	b.WriteString(program)
	for _, a := range args {
		b.WriteByte(' ')
		b.WriteString(Quote(a))
	}
	return b.String()
}

// Quote quotes one word for a shell.
func Quote(s string) string {
	plain := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("_-./:=@%+,", c)
	}
	if s != "" && strings.IndexFunc(s, func(c rune) bool { return !plain(c) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// FirstByte runs a program to its end and returns how long its first byte of
// standard output took. A program that prints nothing or fails is an error.
func (r *Rig) FirstByte(ctx context.Context, program string, args ...string) (time.Duration, error) {
	cmd := r.command(ctx, program, args)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", program, err)
	}
	began := time.Now()
	if err := r.Family.start(cmd); err != nil {
		return 0, fmt.Errorf("run %s: %w", program, err)
	}
	_, readErr := io.ReadFull(out, make([]byte, 1))
	took := time.Since(began)
	_, drainErr := io.Copy(io.Discard, out)
	if err := errors.Join(readErr, drainErr, r.Family.wait(cmd)); err != nil {
		return 0, fmt.Errorf("%s: %w: %s", Shell(program, args...), err, bytes.TrimSpace(errs.Bytes()))
	}
	return took, nil
}
