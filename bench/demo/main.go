// Command demo tells the product's story on a real repository: three sessions
// at once, one clean publication, one merge, one refused conflict that is
// refreshed and resolved, then blame, a trace and the file activity. It drives
// the built programs as a user would, checks what it shows, and leaves no
// process and no mount behind, whatever happens.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"ephemeral-sandbox/bench/drive"
)

func main() {
	bin := flag.String("bin", "bin", "directory of the built programs")
	dir := flag.String("dir", "", "repository to work on; empty: a copy of the checkout in the current directory")
	limit := flag.Duration("limit", 10*time.Minute, "give up after this long")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demo: unexpected argument %q\n", flag.Arg(0))
		os.Exit(2)
	}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	ctx, cancel := context.WithTimeoutCause(context.Background(), *limit, fmt.Errorf("not done after %s", *limit))
	defer cancel()
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	go func() {
		s := <-signals
		fmt.Fprintf(os.Stderr, "\n%s: stopping everything\n", s)
		interrupt(errInterrupted)
	}()
	err := run(ctx, *bin, *dir, os.Stdout)
	switch {
	case err == nil:
	case errors.Is(err, errInterrupted) && context.Cause(ctx) == errInterrupted:
		fmt.Fprintln(os.Stderr, "demo: interrupted")
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

var errInterrupted = errors.New("interrupted")

// run tells the story in a temporary directory and then clears up, also when
// ctx has ended.
func run(ctx context.Context, bin, dir string, out io.Writer) (err error) {
	begin := time.Now()
	family, err := drive.NewFamily()
	if err != nil {
		return err
	}
	defer family.Close()
	mounts, err := drive.FUSEMounts()
	if err != nil {
		return err
	}
	temp, err := os.MkdirTemp("", "sandbox-demo-")
	if err != nil {
		return err
	}
	rig, err := drive.New(bin, filepath.Join(temp, "state"), family)
	if err != nil {
		return errors.Join(err, os.RemoveAll(temp))
	}
	s := &story{rig: rig, out: out}
	defer func() {
		err = errors.Join(err, s.clearUp(temp, mounts))
		if err == nil {
			fmt.Fprintf(out, "\nDone in %.1f s.\n", time.Since(begin).Seconds())
		}
	}()
	if dir == "" {
		if dir, err = copyCheckout(ctx, ".", filepath.Join(temp, "ephemeral-sandbox")); err != nil {
			return err
		}
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return err
	}
	return s.tell(ctx, dir)
}

// clearUp stops the daemon, then looks whether anything of it is left. It runs
// on a context of its own: an interrupt must not interrupt it.
func (s *story) clearUp(temp string, before map[string]string) error {
	s.heading("Stop everything")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if s.started {
		s.rig.Shown = s.out
		if err := s.rig.Stop(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	left := s.rig.Family.Remaining(5 * time.Second)
	for _, p := range left {
		errs = append(errs, fmt.Errorf("process left behind: %s", p))
	}
	s.rig.Family.Kill()
	after, err := drive.FUSEMounts()
	errs = append(errs, err)
	for id, m := range after {
		if _, ok := before[id]; !ok {
			errs = append(errs, fmt.Errorf("FUSE mount left behind: %s", m))
		}
	}
	errs = append(errs, os.RemoveAll(temp))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	s.say("No process and no FUSE mount of ours is left; the state directory is removed.")
	return nil
}
