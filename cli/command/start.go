package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
)

// Limits of waiting for a daemon to come up or go.
const (
	startTime = time.Minute
	stopTime  = time.Minute
	leaveTime = 20 * time.Second // for an earlier daemon to leave
)

func (s *sandboxd) startCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "start",
		Short: "run the daemon in the background",
		Long: "Run the daemon in the background and wait until it answers. Its output goes to\n" +
			"sandboxd.log in the state directory. A daemon that runs already is left alone.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := s.config()
			if err != nil {
				return err
			}
			started, err := s.start(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			o, _, err := cfg.Holders()
			if err != nil {
				return err
			}
			if s.json {
				return writeJSON(s.app.Stdout, map[string]any{
					"started": started, "pid": o.PID, "state_dir": cfg.StateDir, "socket": cfg.Socket(), "log": cfg.LogFile(),
				})
			}
			what := "started"
			if !started {
				what = "runs already"
			}
			_, err = fmt.Fprintf(s.app.Stdout, "sandboxd %s, pid %d, socket %s\n", what, o.PID, cfg.Socket())
			return err
		},
	}
}

// start returns when a daemon answers; started is false when one did before.
func (s *sandboxd) start(ctx context.Context, cfg config.Config) (started bool, err error) {
	ctx, stop := context.WithTimeout(ctx, startTime)
	defer stop()
	if err := prepare(cfg); err != nil {
		return false, err
	}
	// One start at a time, so that the second finds the first one's daemon.
	turn, err := os.OpenFile(filepath.Join(cfg.StateDir, "start.lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return false, fmt.Errorf("start: %w", err)
	}
	defer func() { err = errors.Join(err, turn.Close()) }()
	if err := config.LockFile(ctx, turn, startTime); err != nil {
		return false, catalog.Errorf(catalog.Unavailable, "another start of the daemon of state directory %s has not ended: %w", cfg.StateDir, err)
	}
	c := client.New(cfg.StateDir)
	defer c.Close()
	var health any
	err = c.Health(ctx, &health)
	if e := catalog.AsError(err); e == nil || e.Kind != catalog.Unavailable {
		return false, err
	}
	return true, s.spawn(ctx, cfg, c)
}

// spawn starts a daemon in a session of its own and waits until it answers or
// has ended.
func (s *sandboxd) spawn(ctx context.Context, cfg config.Config, c *client.Client) (err error) {
	watch, err := client.WatchDir(cfg.StateDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, watch.Close()) }()
	log, err := os.OpenFile(cfg.LogFile(), os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("open the daemon's log: %w", err)
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	old, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("read the daemon's log: %w", err)
	}
	cmd := exec.Command(s.app.Executable, "serve", "--state-dir", cfg.StateDir, "--lock-wait", leaveTime.String())
	cmd.Args[0] = s.app.Name
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the daemon: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // the daemon outlives this process
	named := make(chan error, 1)
	go func() { // ends with ctx or the watch
		_, err := watch.Await(ctx, config.SocketName)
		named <- err
	}()
	for {
		select {
		case <-ended:
			return catalog.Errorf(catalog.Unavailable, "the daemon did not start: %s", lastLine(log, old, s.app.Name))
		case <-ctx.Done():
			return catalog.Errorf(catalog.Unavailable, "the daemon did not answer within %s: see %s", startTime, cfg.LogFile())
		case err := <-named:
			if err != nil {
				return fmt.Errorf("wait for the daemon's socket: %w", err)
			}
			var health any
			if err := c.Health(ctx, &health); err != nil {
				named = nil // the daemon has ended since, or is about to
				continue
			}
			return nil
		}
	}
}

// lastLine is the last line of what a daemon that failed has logged since
// offset from.
func lastLine(log *os.File, from int64, name string) string {
	const most = 64 << 10
	if end, err := log.Seek(0, io.SeekEnd); err == nil {
		from = max(from, end-most)
	}
	b, err := io.ReadAll(io.NewSectionReader(log, from, most))
	if err != nil {
		return "its log cannot be read: " + err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	last := strings.TrimPrefix(lines[len(lines)-1], name+": ")
	if last == "" {
		return "it ended without a word; try \"sandboxd serve\""
	}
	return last
}

// startDaemon runs "sandboxd start" from beside this tool or from $PATH.
func (a App) startDaemon(ctx context.Context, dir string) error {
	exe := filepath.Join(filepath.Dir(a.Executable), "sandboxd")
	if _, err := os.Stat(exe); err != nil {
		found, err := exec.LookPath("sandboxd")
		if err != nil {
			return catalog.Errorf(catalog.Unavailable, "cannot start a daemon: there is no sandboxd beside %s and none in $PATH", a.Executable)
		}
		exe = found
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, exe, "start", "--state-dir", dir)
	cmd.Stdout, cmd.Stderr = io.Discard, &out
	if err := cmd.Run(); err != nil {
		said := strings.TrimPrefix(strings.TrimSpace(out.String()), "sandboxd: ")
		return catalog.Errorf(catalog.Unavailable, "cannot start a daemon: %s (%w)", said, err)
	}
	return nil
}

func (s *sandboxd) stopCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "stop",
		Short: "end the daemon with its sessions, and wait until all is gone",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := s.dir()
			if err != nil {
				return err
			}
			stopped, err := stopDaemon(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if s.json {
				return writeJSON(s.app.Stdout, map[string]any{"stopped": stopped, "state_dir": cfg.StateDir})
			}
			what := "sandboxd stopped"
			if !stopped {
				what = "no sandboxd is running for state directory " + cfg.StateDir
			}
			_, err = fmt.Fprintln(s.app.Stdout, what)
			return err
		},
	}
}

// stopDaemon asks the daemon to end and returns when its processes have gone;
// stopped is false when there was none.
func stopDaemon(ctx context.Context, cfg config.Config) (stopped bool, err error) {
	o, held, err := cfg.Holders()
	if err != nil || !held {
		return false, err
	}
	if o.PID == 0 {
		return false, catalog.Errorf(catalog.Unavailable, "state directory %s is locked by a process that has not named itself yet: try again", cfg.StateDir)
	}
	// The lock is free a moment before the last process has ended, so those are
	// waited for too.
	parent, child := watchProcess(o.PID), watchProcess(o.Child)
	defer parent.close()
	defer child.close()
	err = unix.Kill(o.PID, unix.SIGTERM)
	if errors.Is(err, unix.ESRCH) && o.Child > 1 {
		err = unix.Kill(o.Child, unix.SIGTERM) // the parent was killed; its child is ending anyway
	}
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return false, catalog.Errorf(catalog.Unauthorized, "cannot stop sandboxd with pid %d: run as its user, or as root: %w", o.PID, err)
	}
	if err := errors.Join(cfg.AwaitFree(ctx, stopTime), parent.wait(), child.wait()); err != nil {
		return false, catalog.Errorf(catalog.Unavailable, "sandboxd with pid %d has not ended within %s: see %s", o.PID, stopTime, cfg.LogFile())
	}
	return true, nil
}

// processWatch waits for the end of a process; below 0 it watches none.
type processWatch int

// watchProcess watches pid, unless that has ended already.
func watchProcess(pid int) processWatch {
	if pid <= 1 {
		return -1
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1
	}
	return processWatch(fd)
}

// wait returns when the process has ended, or an error after stopTime.
func (w processWatch) wait() error {
	if w < 0 {
		return nil
	}
	for deadline := time.Now().Add(stopTime); ; {
		left := time.Until(deadline)
		if left <= 0 {
			return context.DeadlineExceeded
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(w), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if n > 0 {
			return nil
		}
	}
}

func (w processWatch) close() {
	if w >= 0 {
		_ = unix.Close(int(w)) // nothing was written to it
	}
}

// status is what "sandboxd status" tells.
type status struct {
	Running  bool   `json:"running"`
	PID      int    `json:"pid"`
	ChildPID int    `json:"child_pid"`
	StateDir string `json:"state_dir"`
	Socket   string `json:"socket"`
	Log      string `json:"log"`
	Health   any    `json:"health"`
	Problem  string `json:"problem,omitempty"`
}

func (s *sandboxd) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "say whether the daemon runs and answers",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := s.dir()
			if err != nil {
				return err
			}
			st, err := daemonStatus(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if s.json {
				err = writeJSON(s.app.Stdout, st)
			} else {
				_, err = fmt.Fprintln(s.app.Stdout, st)
			}
			if err == nil && !st.Running {
				err = exitError(catalog.ExitFailed)
			}
			return err
		},
	}
}

func (s status) String() string {
	switch {
	case s.Running:
		return fmt.Sprintf("sandboxd runs, pid %d, socket %s", s.PID, s.Socket)
	case s.PID != 0:
		return fmt.Sprintf("sandboxd with pid %d does not answer: %s", s.PID, s.Problem)
	}
	return "no sandboxd is running for state directory " + s.StateDir
}

// answerTime bounds how long a daemon may take to say that it is well.
const answerTime = 10 * time.Second

func daemonStatus(ctx context.Context, cfg config.Config) (status, error) {
	st := status{StateDir: cfg.StateDir, Socket: cfg.Socket(), Log: cfg.LogFile()}
	o, held, err := cfg.Holders()
	if err != nil || !held {
		return st, err
	}
	st.PID, st.ChildPID = o.PID, o.Child
	ctx, stop := context.WithTimeout(ctx, answerTime)
	defer stop()
	c := client.New(cfg.StateDir)
	defer c.Close()
	if err := c.Health(ctx, &st.Health); err != nil {
		st.Problem = err.Error()
		return st, nil
	}
	st.Running = true
	return st, nil
}
