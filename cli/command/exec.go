package command

import (
	"context"
	"fmt"
	"io"
	"strings"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
)

// exec runs a command in text mode: its raw output goes to the tool's own as it
// appears, and its exit code becomes the tool's.
func (s *surface) exec(ctx context.Context, c *client.Client, call client.Call) error {
	out := &relay{w: s.app.Stdout, stream: "stdout"}
	errs := &relay{w: s.app.Stderr, stream: "stderr"}
	meter := s.meter()
	var res catalog.ExecCommandResult
	err := c.Call(ctx, call, &res, func(p catalog.Progress) {
		switch p.Stage {
		case out.stream:
			meter.clear()
			out.take(p.Offset, p.Output)
		case errs.stream:
			meter.clear()
			errs.take(p.Offset, p.Output)
		default:
			meter.report(p)
		}
	})
	meter.clear()
	if err != nil {
		return err
	}
	fetch := func(stream string, off int64) (catalog.ReadCommandLinesResult, error) {
		var part catalog.ReadCommandLinesResult
		err := c.Call(ctx, client.Call{Op: catalog.ReadCommandLines, SandboxID: call.SandboxID, Request: &catalog.ReadCommandLinesRequest{
			CommandID: res.CommandID, Stream: stream, StartOffset: off, Limit: 1 << 19, MaxBytes: 1 << 20,
		}}, &part, nil)
		return part, err
	}
	if err := out.complete(res.StdoutBytes, res.Stdout, fetch); err != nil {
		return err
	}
	if err := errs.complete(res.StderrBytes, res.Stderr, fetch); err != nil {
		return err
	}
	if err := s.execNotes(&res, out, errs, call); err != nil {
		return err
	}
	if code := execExit(&res); code != catalog.ExitOK {
		return exitError(code)
	}
	return nil
}

// execExit is the exit code that tells a command's end.
func execExit(res *catalog.ExecCommandResult) int {
	switch {
	case res.Status == catalog.StatusRunning:
		return catalog.ExitOK
	case res.ExitCode != nil && *res.ExitCode != 0:
		return *res.ExitCode & 0xff
	case res.Signal != "":
		return 128 + int(unix.SignalNum(res.Signal))
	case res.Status != catalog.StatusExited:
		return catalog.ExitFailed
	case res.Publish == nil:
		return catalog.ExitOK
	case res.Publish.Status == catalog.PublishConflict:
		return catalog.ExitConflict
	case res.Publish.Status == catalog.PublishFailed:
		return catalog.ExitFailed
	}
	return catalog.ExitOK
}

// execNotes says on stderr what the command's own output cannot: nothing, when
// it ended by itself and its changes are where they should be.
func (s *surface) execNotes(res *catalog.ExecCommandResult, out, errs *relay, call client.Call) error {
	w := s.app.Stderr
	note := func(format string, args ...any) error {
		_, err := fmt.Fprintf(w, s.app.Name+": "+format+"\n", args...)
		return err
	}
	req, ok := call.Request.(*catalog.ExecCommandRequest)
	if !ok {
		return fmt.Errorf("request of %s is a %T", call.Op, call.Request)
	}
	switch res.Status {
	case catalog.StatusRunning:
		return note("command %s runs on in session %s: read its output with \"read_command_lines %s --start-offset %d\"", res.CommandID, res.WorkspaceSessionID, res.CommandID, out.written)
	case catalog.StatusTimedOut:
		return note("command %s was ended after %d ms, its --timeout-ms", res.CommandID, req.TimeoutMS)
	case catalog.StatusCancelled:
		return note("command %s was cancelled", res.CommandID)
	}
	p := res.Publish
	switch {
	case p == nil:
		return nil
	case p.Status == catalog.PublishConflict || p.Status == catalog.PublishFailed:
		reason := "its changes conflict with the head"
		if p.Error != nil {
			reason = p.Error.Message
		}
		if err := note("not published: %s; session %s keeps them: refresh_workspace_session, resolve, publish_workspace_session", reason, p.WorkspaceSessionID); err != nil {
			return err
		}
		var b strings.Builder
		renderConflicts(&b, p.Conflicts)
		_, err := io.WriteString(w, b.String())
		return err
	case p.Status == catalog.PublishCommitted && s.app.Terminal:
		return note("published %s", p.Commit)
	}
	return nil
}

// relay writes one stream of a command to the tool's own, every byte once and
// in order, from pieces that may be late, missing or known already.
type relay struct {
	w       io.Writer
	stream  string
	written int64
	err     error
}

// take writes what of the piece at off has not been written. A piece behind a
// gap is left to complete.
func (r *relay) take(off int64, piece catalog.Text) {
	if r.err != nil || off > r.written || off+int64(len(piece)) <= r.written {
		return
	}
	n, err := io.WriteString(r.w, string(piece[r.written-off:]))
	r.written += int64(n)
	r.err = err
}

// complete writes the rest of a stream of total bytes whose last are tail,
// reading what lies between back from the daemon.
func (r *relay) complete(total int64, tail catalog.Text, fetch func(stream string, off int64) (catalog.ReadCommandLinesResult, error)) error {
	for r.err == nil && r.written < total-int64(len(tail)) {
		part, err := fetch(r.stream, r.written)
		if err != nil {
			return err
		}
		if len(part.Output) == 0 {
			return fmt.Errorf("%s at byte %d of %d: %w", r.stream, r.written, total, errNoOutput)
		}
		r.take(part.StartOffset, part.Output)
	}
	r.take(total-int64(len(tail)), tail)
	if r.err != nil {
		return fmt.Errorf("write %s: %w", r.stream, r.err)
	}
	return nil
}
