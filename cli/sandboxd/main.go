// Command sandboxd is the daemon, and the tool that starts, stops and examines
// it. The same binary is the parent that keeps a daemon running and, where none
// is embedded, the holder of a session.
package main

import (
	"context"
	"os"

	"ephemeral-sandbox/cli/command"
	"ephemeral-sandbox/daemon"
	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/holder"
)

func main() {
	holder.MaybeRun()
	os.Exit(command.Main(func(ctx context.Context, app command.App) int {
		return command.Sandboxd(ctx, app, command.Daemon{Open: open, Doctor: doctor, Check: check})
	}))
}

func open(ctx context.Context, cfg config.Config) (command.Server, error) {
	d, err := daemon.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func doctor() []command.Problem {
	var all []command.Problem
	for _, p := range holder.Probe() {
		all = append(all, command.Problem{What: p.What, Remedy: p.Remedy})
	}
	return all
}

func check(ctx context.Context, cfg config.Config) ([]command.Checked, error) {
	found, err := daemon.Check(ctx, cfg)
	var all []command.Checked
	for _, c := range found {
		all = append(all, command.Checked{SandboxID: c.SandboxID, VerifyState: catalog.VerifyState{
			OK: len(c.Report.Problems) == 0, Commits: c.Report.Commits, Layers: c.Report.Layers,
			Bytes: c.Report.Bytes, Problems: c.Report.Problems,
		}})
	}
	return all, err
}
