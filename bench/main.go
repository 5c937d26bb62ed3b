// Command bench measures what a user waits for: importing a tree, opening a
// session up to the first byte of its first command, and publishing ten changed
// files. It drives the built programs, and does the same work on kernel
// overlayfs beside each round where the kernel lets it. One table and one JSON
// file come out, with the machine in both: a figure without its machine says
// nothing.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"ephemeral-sandbox/bench/drive"
)

func main() {
	bin := flag.String("bin", "bin", "directory of the built programs")
	dir := flag.String("dir", "", "tree to import; empty: GOROOT")
	n := flag.Int("n", 30, "rounds of session start and of publication")
	imports := flag.Int("imports", 3, "rounds of the import")
	out := flag.String("json", "", "file for the figures; empty: none")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *bin, *dir, *n, *imports, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, bin, dir string, n, imports int, out string) (err error) {
	if dir == "" {
		goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
		if err != nil {
			return fmt.Errorf("find GOROOT, or name a tree with --dir: %w", err)
		}
		dir = strings.TrimSpace(string(goroot))
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return err
	}
	family, err := drive.NewFamily()
	if err != nil {
		return err
	}
	defer family.Close()
	temp, err := os.MkdirTemp("", "sandbox-bench-")
	if err != nil {
		return err
	}
	rig, err := drive.New(bin, filepath.Join(temp, "state"), family)
	if err != nil {
		return errors.Join(err, os.RemoveAll(temp))
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		err = errors.Join(err, rig.Stop(ctx))
		family.Kill()
		err = errors.Join(err, os.RemoveAll(temp))
	}()
	if err := rig.Start(ctx); err != nil {
		return err
	}
	b := &bench{rig: rig, temp: temp, dir: dir, report: report{Machine: machine(ctx), Tree: dir, Began: time.Now().UTC()}}
	if b.overlay, err = newOverlay(temp, dir); err != nil {
		return err
	}
	if b.overlay == nil {
		b.report.Notes = append(b.report.Notes, "no kernel overlayfs for this user here: its column is empty")
	}
	for _, measure := range []func(context.Context, int) error{b.importTree, b.start, b.publish} {
		rounds := n
		if len(b.report.Rows) == 0 {
			rounds = imports
		}
		if err := measure(ctx, rounds); err != nil {
			return err
		}
	}
	fmt.Print(b.report.table())
	if out == "" {
		return nil
	}
	js, err := json.MarshalIndent(b.report, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(js, '\n'), 0o644)
}
