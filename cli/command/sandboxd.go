package command

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/config"
)

// Server is an opened daemon.
type Server interface {
	// Serve answers requests until ctx ends.
	Serve(ctx context.Context) error
	Close() error
}

// Problem is something that keeps sessions from running here.
type Problem struct {
	What   string `json:"what"`
	Remedy string `json:"remedy"`
}

// Checked is what a check of one sandbox's stored layers found.
type Checked struct {
	SandboxID string `json:"sandbox_id"`
	catalog.VerifyState
}

// Daemon is what sandboxd runs; its main brings it in, so that the other tools
// need not carry it.
type Daemon struct {
	Open func(context.Context, config.Config) (Server, error)
	// Doctor looks for what keeps sessions from running on this machine.
	Doctor func() []Problem
	// Check verifies every sandbox of a state directory whose daemon is not
	// running. It may be nil.
	Check func(context.Context, config.Config) ([]Checked, error)
}

// Sandboxd runs the daemon's tool and returns its exit code.
func Sandboxd(ctx context.Context, app App, d Daemon) int {
	return app.run(ctx, newSandboxd(app, d).root())
}

// sandboxd is one run of the daemon's tool.
type sandboxd struct {
	app      App
	daemon   Daemon
	stateDir string
	json     bool
}

func newSandboxd(app App, d Daemon) *sandboxd { return &sandboxd{app: app, daemon: d} }

func (s *sandboxd) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "sandboxd",
		Short: "the daemon: sandboxes, sessions and their history",
		Long: "The daemon: sandboxes, sessions and their history.\n\n" +
			"One daemon serves one state directory: --state-dir, else $" + config.StateDirVar + ",\n" +
			"else $XDG_STATE_HOME/ephemeral-sandbox, else ~/.local/state/ephemeral-sandbox.",
		Annotations: map[string]string{"exit": daemonExitCodes},
	}
	root.SetHelpTemplate(helpTemplate)
	f := root.PersistentFlags()
	f.SortFlags = false
	f.StringVar(&s.stateDir, "state-dir", "", "`DIR` that holds the daemon's state")
	f.BoolVar(&s.json, "json", false, "write one JSON document, errors as one on stderr")
	root.AddCommand(s.serveCommand(), s.startCommand(), s.stopCommand(), s.statusCommand(), s.doctorCommand(), s.checkCommand(), s.layerCommand())
	for _, c := range root.Commands() {
		c.Annotations = map[string]string{"exit": daemonExitCodes}
	}
	return root
}

const daemonExitCodes = `Exit codes:
  0  ok
  1  failed, not running, or a problem was found
  2  wrong usage`

// config loads the settings of the chosen state directory.
func (s *sandboxd) config() (config.Config, error) {
	dir, err := config.StateDir(s.stateDir, s.app.Getenv)
	if err != nil {
		return config.Config{}, err
	}
	c, err := config.Load(dir, s.app.Getenv)
	if err != nil {
		return config.Config{}, catalog.Errorf(catalog.InvalidRequest, "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return c, nil
}

// dir is the chosen state directory, for commands that must work whatever its
// settings say.
func (s *sandboxd) dir() (config.Config, error) {
	dir, err := config.StateDir(s.stateDir, s.app.Getenv)
	return config.Default(dir), err
}

// prepare makes the state directory.
func prepare(c config.Config) error {
	if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
		return catalog.Errorf(catalog.PreconditionFailed, "state directory %s cannot be made: choose another with --state-dir: %w", c.StateDir, err)
	}
	probe, err := os.CreateTemp(c.StateDir, ".writable-*")
	if err != nil {
		return catalog.Errorf(catalog.PreconditionFailed, "state directory %s cannot be written: make it yours, or choose another with --state-dir: %w", c.StateDir, err)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

func (s *sandboxd) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "say what keeps sessions from running on this machine, and the remedy",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			problems := s.daemon.Doctor()
			if s.json {
				if err := writeJSON(s.app.Stdout, map[string]any{"problems": append([]Problem{}, problems...)}); err != nil {
					return err
				}
			} else if err := s.printDoctor(problems); err != nil {
				return err
			}
			if len(problems) > 0 {
				return exitError(catalog.ExitFailed)
			}
			return nil
		},
	}
}

func (s *sandboxd) printDoctor(problems []Problem) error {
	w := &strings.Builder{}
	for _, p := range problems {
		fmt.Fprintf(w, "%s: %s\n", p.What, p.Remedy)
	}
	if len(problems) == 0 {
		fmt.Fprintln(w, "sessions can run here")
	}
	_, err := fmt.Fprint(s.app.Stdout, w)
	return err
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef(cmd, "unexpected argument %q", args[0])
	}
	return nil
}

func isMissing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
