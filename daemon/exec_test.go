package daemon_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
)

// run runs a request and demands an answer.
func (h *harness) run(r *catalog.ExecCommandRequest) *catalog.ExecCommandResult {
	h.t.Helper()
	return must[catalog.ExecCommandResult](h, catalog.ExecCommand, r)
}

func TestExec(t *testing.T) {
	h := open(t, map[string]string{"sub/f": "f\n"})
	ws := h.session()
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	cases := []struct {
		name           string
		req            catalog.ExecCommandRequest
		code           int
		status, signal string
		stdout, stderr string
		stdoutContains string
		truncated      bool
		totalOut       int64
	}{
		{name: "bytes", req: catalog.ExecCommandRequest{Cmd: `printf 'a\0b\377\nc'; printf '\200\0' >&2`}, stdout: "a\x00b\xff\nc", stderr: "\x80\x00"},
		{name: "code", req: catalog.ExecCommandRequest{Cmd: "exit 77"}, code: 77},
		{name: "argv", req: catalog.ExecCommandRequest{Argv: texts("printf", "%s|", "a b", "", "$x", "\xff")}, stdout: "a b||$x|\xff|"},
		{name: "no such program", req: catalog.ExecCommandRequest{Cmd: "/no/such/program"}, code: 127, stderr: "*"},
		{name: "signal", req: catalog.ExecCommandRequest{Cmd: "kill -SEGV $$"}, code: 128 + 11, status: "signaled", signal: "SIGSEGV"},
		{name: "stdin", req: catalog.ExecCommandRequest{Argv: texts("cat"), Stdin: text(string(every))}, stdout: string(every)},
		{name: "no stdin", req: catalog.ExecCommandRequest{Cmd: "cat; echo end"}, stdout: "end\n"},
		{name: "empty stdin", req: catalog.ExecCommandRequest{Cmd: "cat; echo end", Stdin: text("")}, stdout: "end\n"},
		{name: "cwd", req: catalog.ExecCommandRequest{Cmd: "pwd; cat f", Cwd: "sub"}, stdout: h.root + "/sub\nf\n"},
		{name: "absolute cwd", req: catalog.ExecCommandRequest{Cmd: "pwd", Cwd: "/tmp"}, stdout: "/tmp\n"},
		{name: "env", req: catalog.ExecCommandRequest{Cmd: `printf %s "$A|$B|$USER"`, Env: texts("A=1", "B=x=y \n\xff", "A=2", "USER=me")}, stdout: "2|x=y \n\xff|me"},
		{name: "names", req: catalog.ExecCommandRequest{Cmd: "echo $SANDBOX_SESSION_ID $SANDBOX_WORKSPACE $SANDBOX_ID"}, stdout: ws + " " + h.root + " " + h.sb + "\n"},
		{name: "last bytes", req: catalog.ExecCommandRequest{Cmd: "printf 0123456789", MaxOutputBytes: 4}, stdout: "6789", truncated: true, totalOut: 10},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			c.req.WorkspaceSessionID = ws
			x := h.run(&c.req)
			if c.status == "" {
				c.status = "exited"
			}
			if x.Status != c.status || x.ExitCode == nil || *x.ExitCode != c.code || x.Signal != c.signal || x.WorkspaceSessionID != ws || x.Publish != nil {
				t.Errorf("%s, code %d, signal %q: %+v", x.Status, *x.ExitCode, x.Signal, x)
			}
			if c.totalOut == 0 {
				c.totalOut = int64(len(c.stdout))
			}
			if string(x.Stdout) != c.stdout || x.StdoutBytes != c.totalOut || x.Truncated != c.truncated {
				t.Errorf("stdout %q of %d bytes, want %q", x.Stdout, x.StdoutBytes, c.stdout)
			}
			if c.stderr != "*" && string(x.Stderr) != c.stderr || x.StderrBytes != int64(len(x.Stderr)) {
				t.Errorf("stderr %q of %d bytes, want %q", x.Stderr, x.StderrBytes, c.stderr)
			}
		})
	}
	for name, req := range map[string]catalog.ExecCommandRequest{
		"a directory that is not there": {Cmd: "true", Cwd: "nowhere"},
		"a program that is not there":   {Argv: texts("no-such-program")},
	} {
		req.WorkspaceSessionID = ws
		if _, err := try[catalog.ExecCommandResult](h, catalog.ExecCommand, &req); err == nil || catalog.AsError(err).Kind == catalog.Internal {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := h.sh(ws, "echo on"); got != "on\n" {
		t.Errorf("afterwards: %q", got)
	}
}

// TestExecTimeout lets a command run out of time that has left children in
// sessions and process groups of their own. None may be left.
func TestExecTimeout(t *testing.T) {
	h := open(t, map[string]string{"f": ""})
	ws := h.session()
	for _, c := range []struct{ name, cmd string }{
		{"gives way", `setsid sh -c 'trap "" TERM HUP; echo $$ >setsid; sleep 1000 & wait; sleep 1000' & (sleep 1000 &); while [ ! -s setsid ]; do :; done; echo started; sleep 1000`},
		{"does not", `trap "" TERM; setsid sleep 1000 & echo started; while :; do sleep 1000; done`},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := h.run(&catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: catalog.Text(c.cmd), TimeoutMS: 400})
			if x.Status != "timed_out" || x.ExitCode == nil || *x.ExitCode < 128 || string(x.Stdout) != "started\n" {
				t.Errorf("%+v %q", x, x.Stdout)
			}
			if got := h.sh(ws, `n=0; for p in /proc/[0-9]*; do c=$(tr '\0' ' ' <$p/cmdline 2>/dev/null) || continue; case "$c" in "sleep 1000 ") echo "$p $c";; esac; done`); got != "" {
				t.Errorf("left behind:\n%s", got)
			}
		})
	}
	if got := h.sh(ws, "echo on"); got != "on\n" {
		t.Errorf("afterwards: %q", got)
	}
}

func TestYieldAndRead(t *testing.T) {
	h := open(t, map[string]string{"f": ""})
	ws := h.session()
	h.sh(ws, "mkfifo go")
	x := h.run(&catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: `printf 'a\nb\n'; echo err >&2; until read x <go; do :; done; printf 'c\nun'; until read x <go; do :; done; printf 'finished'; exit 3`, YieldTimeMS: new(int64)})
	if x.Status != "running" || x.ExitCode != nil || x.CommandID == "" {
		t.Fatalf("%+v", x)
	}
	run := &running{h: h, id: x.CommandID, ws: ws}
	run.says("a\nb\n")
	h.sh(ws, "echo x >go")
	run.says("c\nun")
	h.sh(ws, "echo x >go")
	run.says("finished")
	res := run.ends()
	if res.Status != "exited" || *res.ExitCode != 3 || res.TotalBytes != 16 || res.EndOffset != 16 {
		t.Errorf("at the end: %+v", res)
	}
	read := func(r catalog.ReadCommandLinesRequest) *catalog.ReadCommandLinesResult {
		t.Helper()
		r.CommandID = x.CommandID
		return must[catalog.ReadCommandLinesResult](h, catalog.ReadCommandLines, &r)
	}
	check := func(when string) {
		t.Helper()
		if r := read(catalog.ReadCommandLinesRequest{}); r.Output != "a\nb\nc\nunfinished" || !r.EOF || r.Lines != 4 || r.WorkspaceSessionID != ws || *r.ExitCode != 3 {
			t.Errorf("%s: %+v", when, r)
		}
		if r := read(catalog.ReadCommandLinesRequest{StartOffset: 2, Limit: 2}); r.Output != "b\nc\n" || r.EndOffset != 6 || r.EOF {
			t.Errorf("%s, two lines: %+v", when, r)
		}
		if r := read(catalog.ReadCommandLinesRequest{MaxBytes: 3}); r.Output != "a\n" || r.EndOffset != 2 {
			t.Errorf("%s, three bytes: %+v", when, r)
		}
		if r := read(catalog.ReadCommandLinesRequest{StartOffset: 16}); r.Output != "" || !r.EOF || r.EndOffset != 16 {
			t.Errorf("%s, at the end: %+v", when, r)
		}
		if r := read(catalog.ReadCommandLinesRequest{StartOffset: 99}); r.Output != "" || r.EndOffset < r.StartOffset {
			t.Errorf("%s, behind the end: %+v", when, r)
		}
		if r := read(catalog.ReadCommandLinesRequest{Stream: "stderr"}); r.Output != "err\n" || !r.EOF {
			t.Errorf("%s, stderr: %+v", when, r)
		}
	}
	check("in the session")
	h.destroy(ws)
	check("after the session has ended")
	fails(h, catalog.NotFound, catalog.ReadCommandLines, &catalog.ReadCommandLinesRequest{CommandID: "cmd-000000000000"})
}

func TestOneShot(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n2\n3\n"})
	sessions := func() []catalog.Session {
		t.Helper()
		return must[catalog.ListWorkspaceSessionsResult](h, catalog.ListWorkspaceSessions, nil).Sessions
	}
	x := h.run(&catalog.ExecCommandRequest{Cmd: "sed -i 1s/1/one/ f && cat f", Message: "the first"})
	if x.Publish == nil || x.Publish.Status != "committed" || x.Publish.Commit != "L000001" || x.Publish.Parent != "L000000" || string(x.Stdout) != "one\n2\n3\n" {
		t.Fatalf("%+v, %+v", x, x.Publish)
	}
	h.wantOwners("", "f", by(x.WorkspaceSessionID), original, original)
	layer := must[catalog.LayerStackResult](h, catalog.LayerStack, nil).Layers[0]
	if layer.Message != "the first" || layer.Session != x.WorkspaceSessionID || layer.Operation == "" {
		t.Errorf("the layer is %+v", layer)
	}
	if x := h.run(&catalog.ExecCommandRequest{Cmd: "cat f"}); x.Publish == nil || x.Publish.Status != "no_op" || x.Publish.Commit != "L000001" {
		t.Errorf("%+v, %+v", x, x.Publish)
	}
	x = h.run(&catalog.ExecCommandRequest{Cmd: "echo x >new; exit 1"})
	if *x.ExitCode != 1 || x.Publish == nil || x.Publish.Status != "skipped" {
		t.Errorf("%+v, %+v", x, x.Publish)
	}
	if x := h.run(&catalog.ExecCommandRequest{Cmd: "echo x >new; sleep 1000", TimeoutMS: 100}); x.Status != "timed_out" || x.Publish == nil || x.Publish.Status != "skipped" {
		t.Errorf("%+v, %+v", x, x.Publish)
	}
	if s := sessions(); len(s) > 0 || h.ls("", "") != "f" {
		t.Errorf("sessions %+v are left, the head holds %s", s, h.ls("", ""))
	}

	// One that loses a race.
	lost := &running{h: h}
	y := h.run(&catalog.ExecCommandRequest{Cmd: "mkfifo steps; sed -i 2s/2/mine/ f; echo ready; read x <steps; rm steps; echo out; echo err >&2", YieldTimeMS: new(int64)})
	lost.id, lost.ws = y.CommandID, y.WorkspaceSessionID
	lost.says("ready\n")
	h.run(&catalog.ExecCommandRequest{Cmd: "sed -i 2s/2/theirs/ f"})
	h.sh(lost.ws, "echo x >steps")
	lost.says("out\n")
	end := lost.ends()
	for end.Publish == nil { // it is told after the command has ended
		end = lost.next()
	}
	o := end.Publish
	if o.Status != "conflict" || o.WorkspaceSessionID != lost.ws || len(o.Conflicts) != 1 || o.Conflicts[0].Path != "f" || o.Error == nil || o.Error.Kind != catalog.Conflicted {
		t.Fatalf("the outcome is %+v", o)
	}
	if s := sessions(); len(s) != 1 || s[0].WorkspaceSessionID != lost.ws || !s[0].Implicit {
		t.Errorf("sessions %+v", s)
	}
	// The session that stays can be put right and published.
	h.refresh(lost.ws)
	h.sh(lost.ws, `printf 'one\nboth\n3\n' >f`)
	if p := must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: lost.ws, Close: true}); p.Commit != "L000003" {
		t.Errorf("published %+v", p)
	}
	h.wantContent("", "f", "one\nboth\n3\n")
}

// TestStream takes the output of a one-command session as it appears. Pieces
// may be left out, when nobody takes them fast enough; none is wrong.
func TestStream(t *testing.T) {
	h := open(t, map[string]string{"f": ""})
	type piece struct {
		stream, text string
		off          int64
	}
	var pieces []piece
	req := &catalog.ExecCommandRequest{Cmd: "i=0; while [ $i -lt 2000 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done", MaxOutputBytes: 16}
	x := &catalog.ExecCommandResult{}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := h.c.Call(ctx, client.Call{Op: catalog.ExecCommand, SandboxID: h.sb, Request: req}, x, func(p catalog.Progress) {
		pieces = append(pieces, piece{p.Stage, string(p.Output), p.Offset})
	})
	if err != nil {
		t.Fatal(err)
	}
	whole := map[string]string{}
	for _, stream := range []string{"stdout", "stderr"} {
		whole[stream] = string(must[catalog.ReadCommandLinesResult](h, catalog.ReadCommandLines, &catalog.ReadCommandLinesRequest{CommandID: x.CommandID, Stream: stream, Limit: 10000}).Output)
		if n := strings.Count(whole[stream], "\n"); n != 2000 {
			t.Errorf("%s has %d lines", stream, n)
		}
	}
	if x.StdoutBytes != int64(len(whole["stdout"])) || x.StderrBytes != int64(len(whole["stderr"])) || !strings.HasSuffix(whole["stdout"], string(x.Stdout)) || len(x.Stdout) != 16 {
		t.Errorf("%+v", x)
	}
	if len(pieces) == 0 {
		t.Error("nothing came before the end")
	}
	end := map[string]int64{}
	for _, p := range pieces {
		if p.off < end[p.stream] || !strings.HasPrefix(whole[p.stream][p.off:], p.text) {
			t.Fatalf("a piece of %s at %d, after %d: %q", p.stream, p.off, end[p.stream], p.text)
		}
		end[p.stream] = p.off + int64(len(p.text))
	}
}

// TestDestroyLeavesNothing ends a session with commands of every kind in it.
func TestDestroyLeavesNothing(t *testing.T) {
	h := open(t, map[string]string{"f": ""})
	keep, ws := h.session(), h.session()
	dir := filepath.Join(h.state, "sandboxes", h.sb, "sessions", ws)
	if _, err := os.Stat(dir); err != nil {
		t.Fatal(err)
	}
	result := make(chan *catalog.ExecCommandResult, 1)
	go func() {
		x, err := try[catalog.ExecCommandResult](h, catalog.ExecCommand, &catalog.ExecCommandRequest{
			WorkspaceSessionID: ws, Cmd: `trap "" TERM; echo x >held; exec 3>>held; setsid sleep 1000 & echo started; sleep 1000`,
		})
		if err != nil {
			t.Errorf("a command whose session is destroyed: %v", err)
		}
		result <- x
	}()
	var list []catalog.Session
	for len(list) != 2 || len(list[1].Commands) == 0 {
		list = must[catalog.ListWorkspaceSessionsResult](h, catalog.ListWorkspaceSessions, nil).Sessions
	}
	run := &running{h: h, id: list[1].Commands[0].CommandID, ws: ws}
	run.says("started\n")
	pid := list[1].HolderPID
	ns, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	res := h.destroy(ws)
	if !res.Destroyed || res.ProcessesEnded < 1 || res.Unpublished == 0 {
		t.Errorf("destroyed: %+v", res)
	}
	x := <-result
	if x.Status != "cancelled" || x.ExitCode == nil || string(x.Stdout) != "started\n" {
		t.Errorf("the command ended as %+v", x)
	}
	if err := unix.Kill(pid, 0); err != unix.ESRCH {
		t.Errorf("the holder %d is there: %v", pid, err)
	}
	procs, err := filepath.Glob("/proc/[0-9]*/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		if got, err := os.Readlink(p); err == nil && got == ns {
			t.Errorf("%s is in the session's mount namespace", p)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v", dir, err)
	}
	snap := must[catalog.SnapshotResult](h, catalog.Snapshot, nil).Sandboxes[0]
	if len(snap.OpenSessions) != 1 || snap.OpenSessions[0].WorkspaceSessionID != keep || snap.Leases != 1 {
		t.Errorf("%d sessions and %d leases are left", len(snap.OpenSessions), snap.Leases)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), h.state) || strings.Contains(string(mounts), h.root) {
		t.Error("a mount shows on the host")
	}
	for _, op := range []string{catalog.DestroyWorkspaceSession, catalog.PublishWorkspaceSession, catalog.RefreshWorkspaceSession} {
		var req any = &catalog.DestroyWorkspaceSessionRequest{WorkspaceSessionID: ws}
		switch op {
		case catalog.PublishWorkspaceSession:
			req = &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws}
		case catalog.RefreshWorkspaceSession:
			req = &catalog.RefreshWorkspaceSessionRequest{WorkspaceSessionID: ws}
		}
		fails(h, catalog.NotFound, op, req)
	}
}

// TestDestroySandbox refuses to lose what was not published, and otherwise
// leaves no file.
func TestDestroySandbox(t *testing.T) {
	h := open(t, map[string]string{"f": ""})
	ws := h.session()
	h.sh(ws, "echo x >f")
	e := fails(h, catalog.PreconditionFailed, catalog.DestroySandbox, &catalog.DestroySandboxRequest{})
	if !strings.Contains(e.Message, ws) {
		t.Errorf("refused with %q", e.Message)
	}
	h.sh(ws, "cat f")
	res := must[catalog.DestroySandboxResult](h, catalog.DestroySandbox, &catalog.DestroySandboxRequest{Force: true})
	if !res.Destroyed || res.SessionsEnded != 1 {
		t.Errorf("destroyed: %+v", res)
	}
	left, err := os.ReadDir(filepath.Join(h.state, "sandboxes"))
	if err != nil || len(left) > 0 {
		t.Errorf("%v, %v are left", err, left)
	}
	fails(h, catalog.NotFound, catalog.InspectSandbox, nil)
	if b, err := os.ReadFile(filepath.Join(h.root, "f")); err != nil || len(b) > 0 {
		t.Errorf("the workspace's own file holds %q, %v", b, err)
	}
}
