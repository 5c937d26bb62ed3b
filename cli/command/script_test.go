package command_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"ephemeral-sandbox/cli/command"
	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/config"
)

var update = flag.Bool("update", false, "rewrite golden files and docs/operations.md")

func TestMain(m *testing.M) {
	tools := map[string]func(){
		"sandboxd": func() {
			os.Exit(command.Main(func(ctx context.Context, app command.App) int { return command.Sandboxd(ctx, app, fakeDaemon()) }))
		},
	}
	for _, s := range []catalog.Surface{catalog.Manager, catalog.Runtime, catalog.Observability} {
		tools[command.ToolName(s)] = func() {
			os.Exit(command.Main(func(ctx context.Context, app command.App) int { return command.Surface(ctx, app, s) }))
		}
	}
	testscript.Main(m, tools)
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:           "testdata",
		UpdateScripts: *update,
		Setup: func(e *testscript.Env) error {
			e.Setenv(config.StateDirVar, e.Getenv("WORK")+"/state")
			e.Setenv("TZ", "UTC")
			e.Setenv("GORACE", "atexit_sleep_ms=0") // the race detector delays every exit by a second
			e.Defer(func() { endDaemon(t, config.Default(e.Getenv("WORK")+"/state")) })
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits":   exits,
			"childof": childOf,
			"signal":  signal,
			"bytes":   exactBytes,
		},
	})
}

// endDaemon ends a daemon that a failed script has left.
func endDaemon(t *testing.T, c config.Config) {
	o, held, err := c.Holders()
	if err != nil {
		t.Error(err)
	}
	if !held {
		return
	}
	for _, pid := range []int{o.PID, o.Child} {
		if pid > 1 {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	if err := c.AwaitFree(context.Background(), time.Minute); err != nil {
		t.Error(err)
	}
}

// exits CODE COMMAND... runs a command that must end with CODE.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	code := 0
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		code = e.ExitCode()
	} else {
		ts.Check(err)
	}
	if code != want {
		ts.Fatalf("exit code %d, want %d", code, want)
	}
}

// exactBytes STREAM QUOTED compares the last command's output with a Go string.
func exactBytes(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: bytes stdout|stderr QUOTED")
	}
	want, err := strconv.Unquote(args[1])
	ts.Check(err)
	if got := ts.ReadFile(args[0]); got != want {
		ts.Fatalf("%s is %q, want %q", args[0], got, want)
	}
}

// childof VAR PVAR sets VAR to the daemon's process and PVAR to its parent's.
func childOf(ts *testscript.TestScript, neg bool, args []string) {
	o, held, err := config.Default(ts.Getenv(config.StateDirVar)).Holders()
	ts.Check(err)
	if neg || !held || len(args) != 2 {
		ts.Fatalf("no daemon runs")
	}
	ts.Setenv(args[0], strconv.Itoa(o.Child))
	ts.Setenv(args[1], strconv.Itoa(o.PID))
}

// signal NAME PID sends a signal and, for KILL, waits until the process is gone.
func signal(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: signal NAME PID")
	}
	pid, err := strconv.Atoi(args[1])
	ts.Check(err)
	fd, err := unix.PidfdOpen(pid, 0)
	ts.Check(err)
	defer unix.Close(fd)
	ts.Check(unix.PidfdSendSignal(fd, unix.SignalNum("SIG"+args[0]), nil, 0))
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if !errors.Is(err, unix.EINTR) {
			ts.Check(err)
			return
		}
	}
}

func quoteAll(list []catalog.Text) string {
	var parts []string
	for _, s := range list {
		parts = append(parts, strconv.Quote(string(s)))
	}
	return fmt.Sprint("[", strings.Join(parts, " "), "]")
}
