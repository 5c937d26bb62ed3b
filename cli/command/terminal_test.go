package command_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"ephemeral-sandbox/cli/command"
	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/gateway"
)

// serveFake serves the canned answers in this process.
func serveFake(t *testing.T) config.Config {
	t.Helper()
	cfg := config.Default(t.TempDir())
	g, err := new(fake).open(cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	l, err := gateway.Listen(t.Context(), cfg.Socket())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return cfg
}

func TestProgressOnATerminal(t *testing.T) {
	cfg := serveFake(t)
	run := func(s catalog.Surface, args ...string) (stdout, stderr string) {
		t.Helper()
		var out, errs bytes.Buffer
		code := command.Surface(t.Context(), command.App{
			Name: command.ToolName(s), Args: append([]string{"--state-dir", cfg.StateDir}, args...),
			Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs, Terminal: true,
			Getenv: func(string) string { return "" },
		}, s)
		if code != catalog.ExitOK {
			t.Errorf("%v: exit code %d, %s", args, code, errs.String())
		}
		return out.String(), errs.String()
	}
	const erase = "\r\x1b[K"
	if _, stderr := run(catalog.Manager, "create", "/ws"); stderr != erase+"import 1 files"+erase+`import 2.0 KiB of 4.0 KiB: "src\x1b"`+erase {
		t.Errorf("stderr %q", stderr)
	}
	if _, stderr := run(catalog.Manager, "--json", "create", "/ws"); stderr != "" {
		t.Errorf("with --json: stderr %q", stderr)
	}
	stdout, stderr := run(catalog.Runtime, "--sandbox-id", "sb-1", "exec", "published")
	if stdout != "" || stderr != "sandbox-runtime-cli: published L000004\n" {
		t.Errorf("stdout %q, stderr %q", stdout, stderr)
	}
}

// Every result has a text form.
func TestEveryOperationHasATextForm(t *testing.T) {
	cfg := serveFake(t)
	required := map[string][]string{
		catalog.CreateSandbox:    {"/w"},
		catalog.ExecCommand:      {"hello"},
		catalog.ReadCommandLines: {"c-7"},
		catalog.FileRead:         {"a"},
		catalog.FileWrite:        {"a", "b"},
		catalog.FileEdit:         {"a", "--edits", `[{"old_string":"a","new_string":"b"}]`},
		catalog.FileBlame:        {"a"},
	}
	for _, op := range catalog.Operations() {
		args := []string{"--state-dir", cfg.StateDir}
		if op.Surface != catalog.Manager && op.Sandbox != catalog.NoSandbox {
			args = append(args, "--sandbox-id", "sb-1")
		}
		args = append(args, op.Name)
		if op.Surface == catalog.Manager && op.Sandbox != catalog.NoSandbox {
			args = append(args, "sb-1")
		}
		args = append(args, required[op.Name]...)
		if strings.HasSuffix(op.Name, "_workspace_session") && op.Name != catalog.CreateWorkspaceSession {
			args = append(args, "ws-1")
		}
		var out, errs bytes.Buffer
		code := command.Surface(t.Context(), command.App{
			Name: "tool", Args: args, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
			Getenv: func(string) string { return "" },
		}, op.Surface)
		if code != catalog.ExitOK || out.Len() == 0 {
			t.Errorf("%v: exit code %d, stdout %q, stderr %q", args, code, out.String(), errs.String())
		}
	}
}
