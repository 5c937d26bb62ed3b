package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/fdstore"
)

// What a child inherits from its parent, besides the store's end.
const (
	lockFD     = 3 // the lock file, open
	lifelineFD = 4 // a pipe whose other end closes with the parent
)

func (s *sandboxd) serveCommand() *cobra.Command {
	var child bool
	var lockWait time.Duration
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "run the daemon in the foreground",
		Long: "Run the daemon in the foreground until SIGINT or SIGTERM.\n\n" +
			"A small parent process keeps what a crashed daemon's successor needs, and starts\n" +
			"that successor; sessions and their commands live on.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := s.config()
			if err != nil {
				return err
			}
			if child {
				return s.serveChild(cmd.Context(), cfg)
			}
			return s.serveParent(cmd.Context(), cfg, lockWait)
		},
	}
	cmd.Flags().BoolVar(&child, "child", false, "be the process that the parent starts")
	cmd.Flags().DurationVar(&lockWait, "lock-wait", time.Second, "wait so long for an earlier daemon that is ending")
	for _, hidden := range []string{"child", "lock-wait"} {
		if err := cmd.Flags().MarkHidden(hidden); err != nil {
			panic(err) // a flag of this function's own
		}
	}
	return cmd
}

// takeLock takes the state directory's lock, or says who has it.
func takeLock(ctx context.Context, cfg config.Config, wait time.Duration) (*config.Lock, error) {
	l, err := cfg.TakeLock(ctx, wait)
	if used, ok := errors.AsType[*config.InUseError](err); ok {
		return nil, catalog.Errorf(catalog.PreconditionFailed, "%w: stop it with \"sandboxd stop --state-dir %s\", or choose another with --state-dir", used, client.Quote(cfg.StateDir))
	}
	if err != nil {
		return nil, catalog.Errorf(catalog.PreconditionFailed, "state directory %s cannot be locked: %w", cfg.StateDir, err)
	}
	return l, nil
}

// serveParent holds the state directory's lock and the descriptors of live
// sessions, and keeps a daemon running.
func (s *sandboxd) serveParent(ctx context.Context, cfg config.Config, lockWait time.Duration) (err error) {
	if err := prepare(cfg); err != nil {
		return err
	}
	l, err := takeLock(ctx, cfg, lockWait)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	own := config.Owners{PID: os.Getpid()}
	if err := l.Name(own); err != nil {
		return err
	}
	end, life, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make the lifeline: %w", err)
	}
	defer func() { err = errors.Join(err, end.Close(), life.Close()) }()

	log := slog.New(slog.NewTextHandler(s.app.Stderr, nil))
	hurry := make(chan os.Signal, 1)
	stopHurry := context.AfterFunc(ctx, func() { signal.Notify(hurry, syscall.SIGINT, syscall.SIGTERM) })
	defer func() {
		stopHurry()
		signal.Stop(hurry)
	}()
	p := fdstore.Parent{
		Command: func() *exec.Cmd {
			cmd := exec.Command(s.app.Executable, "serve", "--child", "--state-dir", cfg.StateDir)
			cmd.Args[0] = s.app.Name
			cmd.Stdout, cmd.Stderr = s.app.Stdout, s.app.Stderr
			cmd.ExtraFiles = []*os.File{l.File, end}
			// The terminal's Ctrl-C comes to the parent alone, which passes it on.
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			return cmd
		},
		Started: func(pid int) error {
			own.Child = pid
			return l.Name(own)
		},
		Died: func(pid int, state *os.ProcessState) {
			log.Error("the daemon died and is replaced; its sessions live on", "pid", pid, "state", state.String())
		},
	}
	code, err := p.Run(ctx, hurry)
	if err != nil {
		return err
	}
	if code != catalog.ExitOK {
		return exitError(code)
	}
	return nil
}

// serveChild is the daemon proper.
func (s *sandboxd) serveChild(ctx context.Context, cfg config.Config) error {
	if s.app.Getenv(fdstore.EnvFD) == "" {
		return errors.New("serve --child is for sandboxd's own use: run \"sandboxd serve\"")
	}
	for _, fd := range []int{lockFD, lifelineFD} {
		syscall.CloseOnExec(fd) // no session may hold the lock
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	life := os.NewFile(lifelineFD, "lifeline")
	// The parent shares the pipe's description and may make it blocking again
	// at any time, so nothing can be relied on to end this read but the end of
	// the parent. It is the one goroutine that lasts as long as the process.
	go func() {
		_, _ = life.Read(make([]byte, 1)) // nothing is ever written
		stop()
	}()
	slog.SetDefault(slog.New(slog.NewTextHandler(s.app.Stderr, nil)))
	d, err := s.daemon.Open(ctx, cfg)
	if err != nil {
		return err
	}
	slog.Info("serving", "state_dir", cfg.StateDir, "socket", cfg.Socket(), "pid", os.Getpid())
	return errors.Join(d.Serve(ctx), d.Close())
}
