// Command acceptance runs the release gate against the built programs: many
// sessions that publish at once, a daemon that is killed at random moments of a
// publish loop, and real toolchains inside a session. Every run ends by looking
// for processes and mounts that were left behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"ephemeral-sandbox/bench/drive"
)

func main() {
	bin := flag.String("bin", "bin", "directory of the built programs")
	only := flag.String("only", "sessions,crash,toolchain", "which runs, separated by commas")
	sessions := flag.Int("sessions", 64, "sessions open at once in the run \"sessions\"")
	kills := flag.Int("kills", 200, "kills of the daemon in the run \"crash\"")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the random moments in the run \"crash\"")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	family, err := drive.NewFamily()
	if err != nil {
		fmt.Fprintln(os.Stderr, "acceptance:", err)
		os.Exit(1)
	}
	defer family.Close()

	runs := map[string]func(context.Context, *run) error{
		"sessions":  func(ctx context.Context, r *run) error { return manySessions(ctx, r, *sessions) },
		"crash":     func(ctx context.Context, r *run) error { return crashLoop(ctx, r, *kills, *seed) },
		"toolchain": toolchain,
	}
	passed, failed := 0, 0
	for name := range strings.SplitSeq(*only, ",") {
		fn, ok := runs[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "acceptance: no run called %q\n", name)
			os.Exit(2)
		}
		began := time.Now()
		fmt.Printf("== %s\n", name)
		if err := isolated(ctx, *bin, family, fn); err != nil {
			failed++
			fmt.Printf("FAIL %s after %.0f s: %v\n", name, time.Since(began).Seconds(), err)
			continue
		}
		passed++
		fmt.Printf("ok %s in %.0f s\n", name, time.Since(began).Seconds())
	}
	fmt.Printf("%d passed, %d failed\n", passed, failed)
	if failed > 0 {
		os.Exit(1)
	}
}

// run is one acceptance run: a daemon of its own and a directory for it.
type run struct {
	*drive.Rig
	dir string // removed afterwards
}

func (r *run) say(format string, args ...any) { fmt.Printf("   "+format+"\n", args...) }

// isolated starts a daemon on a fresh state directory, calls fn, stops the
// daemon and reports whatever it left behind.
func isolated(ctx context.Context, bin string, family *drive.Family, fn func(context.Context, *run) error) (err error) {
	before, err := drive.FUSEMounts()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "sandbox-acceptance-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	rig, err := drive.New(bin, filepath.Join(dir, "state"), family)
	if err != nil {
		return err
	}
	r := &run{Rig: rig, dir: dir}
	defer func() { err = errors.Join(err, r.end(before)) }()
	if err := r.Start(ctx); err != nil {
		return err
	}
	return fn(ctx, r)
}

// end stops the daemon and looks for leftovers. It has a context of its own.
func (r *run) end(before map[string]string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	errs := []error{r.Stop(ctx)}
	for _, p := range r.Family.Remaining(5 * time.Second) {
		errs = append(errs, fmt.Errorf("process left behind: %s", p))
	}
	r.Family.Kill()
	after, err := drive.FUSEMounts()
	errs = append(errs, err)
	for id, m := range after {
		if _, ok := before[id]; !ok {
			errs = append(errs, fmt.Errorf("FUSE mount left behind: %s", m))
		}
	}
	return errors.Join(errs...)
}

// verify checks every byte of the sandbox's layers and returns the head's
// number.
func (r *run) verify(ctx context.Context, sandbox string) (int, error) {
	l, err := r.Layers(ctx, sandbox, true)
	if err != nil {
		return 0, err
	}
	if l.Verify == nil || !l.Verify.OK {
		return 0, fmt.Errorf("layerstack --verify: %+v", l.Verify)
	}
	return drive.CommitNumber(l.Head)
}

// each calls fn for 0 to n-1 on several goroutines and joins the errors, the
// first few of them.
func each(n, atOnce int, fn func(i int) error) error {
	var (
		mu   sync.Mutex
		errs []error
		wg   sync.WaitGroup
	)
	next := make(chan int)
	for range atOnce {
		wg.Go(func() {
			for i := range next {
				if err := fn(i); err != nil {
					mu.Lock()
					errs = append(errs, fmt.Errorf("%d: %w", i, err))
					mu.Unlock()
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	if len(errs) > 5 {
		errs = append(errs[:5], fmt.Errorf("and %d more", len(errs)-5))
	}
	return errors.Join(errs...)
}

// command runs a shell command in a session and returns what it printed; any
// outcome but exit code 0 is an error.
func (r *run) command(ctx context.Context, sandbox, session, command string, flags ...string) (string, error) {
	e, err := r.Exec(ctx, sandbox, session, command, flags...)
	if err != nil {
		return "", err
	}
	if !e.OK() {
		code := "no exit code"
		if e.ExitCode != nil {
			code = fmt.Sprintf("exit code %d", *e.ExitCode)
		}
		return e.Stdout, fmt.Errorf("%q: %s, %s: %s", command, e.Status, code, tail(e.Stdout+e.Stderr))
	}
	return e.Stdout, nil
}

// tail is the end of a long text.
func tail(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > 600 {
		s = "... " + s[len(s)-600:]
	}
	return s
}

// writeFiles makes files in a new directory beneath the run's and returns it.
func (r *run) writeFiles(name string, files map[string]string) (string, error) {
	top := filepath.Join(r.dir, name)
	for f, text := range files {
		p := filepath.Join(top, f)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			return "", err
		}
	}
	return top, nil
}
