package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/daemon/store"
	"ephemeral-sandbox/daemon/telemetry"
)

func (d *Daemon) handleExec(ctx context.Context, c *call, r *catalog.ExecCommandRequest) (*catalog.ExecCommandResult, error) {
	s := c.sandbox
	implicit := r.WorkspaceSessionID == ""
	ws, err := d.sessionFor(ctx, c, r)
	if err != nil {
		return nil, err
	}
	req := session.ExecRequest{
		Operation: c.op(), CommandID: newID("cmd"), Shell: string(r.Cmd), Dir: string(r.Cwd),
		Timeout: time.Duration(r.TimeoutMS) * time.Millisecond,
	}
	if r.Stdin != nil {
		req.Stdin = bytes.NewReader([]byte(*r.Stdin))
	}
	for _, a := range r.Argv {
		req.Argv = append(req.Argv, string(a))
	}
	for _, kv := range r.Env {
		req.Env = append(req.Env, string(kv))
	}
	cmd, err := ws.Exec(ctx, req)
	if err != nil {
		if implicit {
			_, e := s.retire(ws)
			err = errors.Join(err, e)
		}
		return nil, err
	}
	d.emit("command.started", s, ws.Info.ID, c.RequestID, map[string]any{"command_id": req.CommandID, "command": cmd.State().Command})
	_, sp := d.trace.Start(ctx, "command runtime", telemetry.String("command_id", req.CommandID))
	go func() { // ends with the command, as Session.Stop makes certain
		<-cmd.Done()
		st := cmd.State()
		sp.SetAttr(telemetry.String("status", st.Status), telemetry.Int("exit_code", int64(st.Code)))
		sp.End(nil)
		d.emit("command.ended", s, ws.Info.ID, c.RequestID, map[string]any{"command_id": st.ID, "status": st.Status, "exit_code": int64(st.Code)})
	}()
	finished := cmd.Done()
	if implicit {
		finished = d.finishOneShot(ctx, s, ws, cmd)
	}
	wait := ctx
	if r.YieldTimeMS != nil {
		var stop context.CancelFunc
		wait, stop = context.WithTimeout(ctx, time.Duration(*r.YieldTimeMS)*time.Millisecond)
		defer stop()
	}
	if c.Streams {
		s.stream(wait, req.CommandID, cmd.Done(), c.Progress)
	}
	select {
	case <-finished:
	case <-wait.Done():
	}
	return s.execResult(ws.Info.ID, cmd.State(), r.MaxOutputBytes)
}

func (d *Daemon) sessionFor(ctx context.Context, c *call, r *catalog.ExecCommandRequest) (*session.Session, error) {
	if r.WorkspaceSessionID != "" {
		return c.sandbox.session(r.WorkspaceSessionID)
	}
	ctx, sp := d.trace.Start(ctx, "session create")
	ws, err := c.sandbox.newSession(ctx, session.Info{Implicit: true, Network: r.Network, Level: "open", Message: r.Message})
	sp.End(err)
	return ws, err
}

// execResult puts a command's state and the ends of its streams together.
func (s *sandbox) execResult(sessionID string, st session.CommandState, limit int64) (*catalog.ExecCommandResult, error) {
	res := &catalog.ExecCommandResult{
		Status: st.Status, Signal: st.Signal, CommandID: st.ID, WorkspaceSessionID: sessionID,
		DurationMS: duration(st).Milliseconds(), UserMS: st.User.Milliseconds(), SystemMS: st.System.Milliseconds(),
		MaxRSSBytes: st.MaxRSS, DroppedBytes: st.Dropped[0] + st.Dropped[1],
	}
	res.Truncated = res.DroppedBytes > 0
	if st.Status != session.StatusRunning {
		res.ExitCode = &st.Code
	}
	for _, o := range []struct {
		stream string
		text   *catalog.Text
		total  *int64
	}{{"stdout", &res.Stdout, &res.StdoutBytes}, {"stderr", &res.Stderr, &res.StderrBytes}} {
		out, err := s.output(st.ID, o.stream, -limit, int(limit))
		if err != nil {
			return nil, err
		}
		*o.text, *o.total = catalog.Text(out.data), out.total
		res.Truncated = res.Truncated || int64(len(out.data)) < out.total
	}
	var err error
	res.Publish, err = s.outcome(st.ID)
	return res, err
}

// transcript is where a command's output is: with an open session, or with what
// is kept of one that ended.
type transcript struct {
	cmd     *session.Command
	session string
	dir     string
}

func (s *sandbox) sessionDir(id string) string { return filepath.Join(s.dir, "sessions", id) }

func (s *sandbox) transcript(id string) (transcript, error) {
	for _, ws := range s.allSessions() {
		cmd, ok := ws.Command(id)
		if !ok {
			continue
		}
		dir := filepath.Join(s.sessionDir(ws.Info.ID), "commands", id)
		if _, err := os.Stat(dir); err == nil { // else its session ends, and it is kept already
			return transcript{cmd, ws.Info.ID, dir}, nil
		}
	}
	kept, err := filepath.Glob(filepath.Join(s.dir, "ended", "*", "commands", "*"))
	if err != nil {
		return transcript{}, err
	}
	for _, dir := range kept {
		if filepath.Base(dir) != id {
			continue
		}
		cmd, err := session.LoadCommand(dir)
		if err != nil {
			return transcript{}, err
		}
		return transcript{cmd, filepath.Base(filepath.Dir(filepath.Dir(dir))), dir}, nil
	}
	return transcript{}, catalog.Errorf(catalog.NotFound, "no command %q in sandbox %s: exec_command gives the id, and the newest %d ended sessions keep their commands", id, s.info.ID, keepEnded)
}

// piece is a part of a stream.
type piece struct {
	data         []byte
	start, total int64
}

// output reads a part of a command's stream, wherever it is. A session that
// ends at this moment moves its transcripts; a second look then finds them.
func (s *sandbox) output(id, stream string, off int64, limit int) (piece, error) {
	for again := true; ; again = false {
		t, err := s.transcript(id)
		if err != nil {
			return piece{}, err
		}
		var p piece
		p.data, p.start, p.total, err = session.ReadOutput(t.dir, stream, off, limit)
		if err == nil || !again || !errors.Is(err, fs.ErrNotExist) {
			return p, err
		}
	}
}

// outcome is how the publication of a one-command session ended; nil for other
// commands and while it runs.
func (s *sandbox) outcome(id string) (*catalog.PublishOutcome, error) {
	for again := true; ; again = false {
		t, err := s.transcript(id)
		if err != nil {
			return nil, err
		}
		raw, err := os.ReadFile(filepath.Join(t.dir, "publish.json"))
		if errors.Is(err, fs.ErrNotExist) {
			if again {
				continue
			}
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		o := &catalog.PublishOutcome{}
		return o, json.Unmarshal(raw, o)
	}
}

// stream sends a command's output to the client as it appears, until the
// command or the client is gone.
func (s *sandbox) stream(ctx context.Context, id string, done <-chan struct{}, send func(catalog.Progress)) {
	at := map[string]int64{}
	drain := func() error {
		for _, stream := range []string{"stdout", "stderr"} {
			for {
				p, err := s.output(id, stream, at[stream], 64<<10)
				if err != nil {
					return err
				}
				if len(p.data) == 0 {
					break
				}
				send(catalog.Progress{Stage: stream, Output: catalog.Text(p.data), Offset: p.start})
				at[stream] = p.start + int64(len(p.data))
			}
		}
		return nil
	}
	t, err := s.transcript(id)
	if err != nil {
		return
	}
	// Without a watch the output still comes whole with the result.
	_ = session.Watch(ctx, t.dir, done, drain)
}

// finishOneShot publishes the session that was made for one command when the
// command has succeeded, and ends it unless the publication was refused. The
// channel is closed when that is done.
func (d *Daemon) finishOneShot(ctx context.Context, s *sandbox, ws *session.Session, cmd *session.Command) <-chan struct{} {
	ctx = context.WithoutCancel(ctx)
	done := make(chan struct{})
	s.oneShots.Go(func() {
		defer close(done)
		<-cmd.Done()
		if st, _, _ := ws.Status(); st == session.Closing {
			return // the daemon or the sandbox is ending
		}
		o := d.publishOneShot(ctx, s, ws, cmd.State())
		if o == nil {
			return // the daemon is ending; the next one publishes it
		}
		raw, err := json.Marshal(o)
		if err == nil {
			err = session.WriteDurably(filepath.Join(s.sessionDir(ws.Info.ID), "commands", cmd.State().ID, "publish.json"), raw)
		}
		if err == nil && o.WorkspaceSessionID == "" {
			_, err = s.retire(ws)
		}
		if err != nil {
			d.log.Error("a one-command session did not end", "session", ws.Info.ID, "error", err)
		}
	})
	return done
}

func (d *Daemon) publishOneShot(ctx context.Context, s *sandbox, ws *session.Session, st session.CommandState) *catalog.PublishOutcome {
	if st.Status != session.StatusExited || st.Code != 0 {
		return &catalog.PublishOutcome{Status: catalog.PublishSkipped}
	}
	if c, ok := s.store.FindRequest(st.Operation); ok && c.Session == ws.Info.ID {
		// An earlier daemon died right behind the commit.
		return &catalog.PublishOutcome{
			Status: catalog.PublishCommitted, Commit: store.CommitName(c.Number), Parent: store.CommitName(c.Number - 1),
			Merged: texts(c.Merged), Counts: c.Counts,
		}
	}
	ctx, sp := d.trace.Start(ctx, "publish")
	op, _ := ws.OperationByID(st.Operation)
	pub, err := ws.Publish(ctx, session.PublishRequest{Operation: op, Message: ws.Info.Message})
	sp.End(err)
	if landed(err) {
		if pub.Committed {
			d.emit("layer.published", s, ws.Info.ID, st.Operation, map[string]any{"commit": store.CommitName(pub.Commit)})
		}
		return &catalog.PublishOutcome{
			Status: status(pub), Commit: store.CommitName(pub.Commit), Parent: store.CommitName(pub.Parent),
			Merged: texts(pub.Merged), Counts: pub.Counts,
		}
	}
	if errors.Is(err, session.ErrEnding) {
		return nil
	}
	o := &catalog.PublishOutcome{Status: catalog.PublishFailed, WorkspaceSessionID: ws.Info.ID, Error: catalog.AsError(s.fault(s.withSession(err, ws.Info.ID)))}
	if o.Error.Kind == catalog.Conflicted {
		o.Status, o.Conflicts = catalog.PublishConflict, o.Error.Conflicts()
		d.emit("publish.refused", s, ws.Info.ID, st.Operation, map[string]any{"conflicts": int64(len(o.Conflicts))})
	}
	return o
}

// resumeOneShots takes up one-command sessions that an earlier daemon left, at
// whatever step it was.
func (d *Daemon) resumeOneShots() {
	for _, s := range d.listSandboxes() {
		for _, ws := range s.openSessions() {
			if ws.Info.Implicit {
				d.resumeOneShot(s, ws)
			}
		}
	}
}

func (d *Daemon) resumeOneShot(s *sandbox, ws *session.Session) {
	commands := ws.Commands()
	var o *catalog.PublishOutcome
	var err error
	if len(commands) > 0 {
		// The first command is the one it was made for; later ones were run in
		// it by someone who puts a refused publication right.
		if o, err = s.outcome(commands[0].State().ID); err == nil && o == nil {
			d.finishOneShot(context.Background(), s, ws, commands[0])
			return
		}
	}
	if err == nil && (o == nil || o.WorkspaceSessionID == "") { // never begun, or done but not ended
		_, err = s.retire(ws)
	}
	if err != nil {
		d.log.Error("a one-command session cannot be finished", "session", ws.Info.ID, "error", err)
	}
}

func (d *Daemon) handleReadLines(ctx context.Context, c *call, r *catalog.ReadCommandLinesRequest) (*catalog.ReadCommandLinesResult, error) {
	s := c.sandbox
	t, err := s.transcript(r.CommandID)
	if err != nil {
		return nil, err
	}
	st := t.cmd.State() // before the output: what has ended writes no more
	out, err := s.output(r.CommandID, r.Stream, r.StartOffset, int(r.MaxBytes))
	if err != nil {
		return nil, err
	}
	if len(out.data) == 0 && r.WaitMS > 0 {
		ctx, cancel := context.WithTimeout(ctx, time.Duration(r.WaitMS)*time.Millisecond)
		defer cancel()
		err := session.Watch(ctx, t.dir, t.cmd.Done(), func() error {
			var err error
			st = t.cmd.State()
			if out, err = s.output(r.CommandID, r.Stream, r.StartOffset, int(r.MaxBytes)); err == nil && len(out.data) > 0 {
				cancel()
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			return nil, err
		}
	}
	res := &catalog.ReadCommandLinesResult{
		CommandID: r.CommandID, WorkspaceSessionID: t.session, Status: st.Status, Signal: st.Signal, Stream: r.Stream,
		StartOffset: r.StartOffset, TotalBytes: out.total,
	}
	if st.Status != session.StatusRunning {
		res.ExitCode = &st.Code
	}
	data, _ := lineWindow(out.data, 1, r.Limit)
	data = wholeLines(data, r.StartOffset+int64(len(data)) >= out.total)
	res.Output, res.Lines = catalog.Text(data), countLines(data)
	res.EndOffset = r.StartOffset + int64(len(data))
	res.EOF = st.Status != session.StatusRunning && res.EndOffset >= out.total
	if res.Publish, err = s.outcome(r.CommandID); err != nil {
		return nil, err
	}
	return res, nil
}

// wholeLines cuts an unfinished last line off, unless the stream ends there or
// there is nothing else.
func wholeLines(b []byte, atEnd bool) []byte {
	if i := bytes.LastIndexByte(b, '\n'); !atEnd && i >= 0 {
		return b[:i+1]
	}
	return b
}
