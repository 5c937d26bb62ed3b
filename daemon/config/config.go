// Package config holds the daemon's one Config: where its state is, how much it
// may use, where its spans go. Defaults come first, then config.json in the
// state directory where there is one, then the environment; flags of a command
// line set fields afterwards. The package is a leaf.
package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
)

// Config is every setting of a daemon. Sizes are bytes; zero is fit for none
// of them, so start from Default or Load.
type Config struct {
	// StateDir is the absolute path of the state directory. It is not read
	// from config.json, which lies in it.
	StateDir string `json:"-"`

	CacheBytes      int64    `json:"cache_bytes"`       // decoded content kept in memory, all sandboxes together
	SessionBytes    uint64   `json:"session_bytes"`     // a session's private bytes; over it, writes get EDQUOT
	SessionInodes   uint64   `json:"session_inodes"`    // a session's private inodes
	MaxSessions     int      `json:"max_sessions"`      // open at once, all sandboxes together
	TraceBytes      int64    `json:"trace_bytes"`       // spans and events kept on disk
	AccessBytes     int64    `json:"access_bytes"`      // access record of one session on disk
	OutputBytes     int64    `json:"output_bytes"`      // kept output of one stream of a command; the rest is counted and dropped
	MaxRequestBytes int64    `json:"max_request_bytes"` // one request's body
	MaxRequests     int      `json:"max_requests"`      // in flight at once
	MaxCommands     int      `json:"max_commands"`      // running at once in one session
	ImportWorkers   int      `json:"import_workers"`    // 0 chooses by the number of processors
	HostPaths       []string `json:"host_paths"`        // more host directories sessions see read-only
	OTLPEndpoint    string   `json:"otlp_endpoint"`     // URL spans are exported to; empty exports nothing
	TemporaryBytes  int64    `json:"temporary_bytes"`   // size of a session's private /tmp
	ShutdownSeconds int      `json:"shutdown_seconds"`  // grace for requests in flight when the daemon ends
}

// Default returns the settings of a daemon over stateDir when nothing else is
// said.
func Default(stateDir string) Config {
	return Config{
		StateDir:        stateDir,
		CacheBytes:      256 << 20,
		SessionBytes:    64 << 30,
		SessionInodes:   4 << 20,
		MaxSessions:     1024,
		TraceBytes:      256 << 20,
		AccessBytes:     64 << 20,
		OutputBytes:     256 << 20,
		MaxRequestBytes: 64 << 20,
		MaxRequests:     1024,
		MaxCommands:     256,
		TemporaryBytes:  1 << 30,
		ShutdownSeconds: 5,
	}
}

// Paths in a state directory.

// Socket is the gateway's unix socket.
func (c Config) Socket() string { return filepath.Join(c.StateDir, SocketName) }

// TokenFile holds the bearer token of the gateway.
func (c Config) TokenFile() string { return filepath.Join(c.StateDir, TokenName) }

// LockFile is locked by a running daemon and names its processes.
func (c Config) LockFile() string { return filepath.Join(c.StateDir, LockName) }

// LogFile takes the output of a daemon in the background.
func (c Config) LogFile() string { return filepath.Join(c.StateDir, "sandboxd.log") }

// File is the optional file of settings.
func (c Config) File() string { return filepath.Join(c.StateDir, "config.json") }

// Sandboxes is the directory with one directory per sandbox.
func (c Config) Sandboxes() string { return filepath.Join(c.StateDir, "sandboxes") }

// Telemetry is the directory of spans and events.
func (c Config) Telemetry() string { return filepath.Join(c.StateDir, "telemetry") }

// Names of the files a client needs.
const (
	SocketName = "gateway.sock"
	TokenName  = "token"
	LockName   = "lock"
)

// StateDirVar is the environment variable that chooses the state directory.
const StateDirVar = "SANDBOX_STATE_DIR"

// StateDir returns the absolute state directory: flag where it is not empty,
// else the environment's, else the user's own place for state.
func StateDir(flag string, getenv func(string) string) (string, error) {
	for _, chosen := range []string{flag, getenv(StateDirVar)} {
		if chosen != "" {
			abs, err := filepath.Abs(chosen)
			if err != nil {
				return "", fmt.Errorf("state directory %q: %w", chosen, err)
			}
			return abs, nil
		}
	}
	if d := getenv("XDG_STATE_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "ephemeral-sandbox"), nil
	}
	if home := getenv("HOME"); filepath.IsAbs(home) {
		return filepath.Join(home, ".local", "state", "ephemeral-sandbox"), nil
	}
	return "", errors.New("no state directory: neither " + StateDirVar + " nor XDG_STATE_HOME nor HOME is set to an absolute path; choose one with --state-dir")
}

// Load returns the settings of a daemon over stateDir: the defaults, changed by
// config.json where it exists, changed by the environment.
func Load(stateDir string, getenv func(string) string) (Config, error) {
	c := Default(stateDir)
	b, err := os.ReadFile(c.File())
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR): // defaults; whoever makes the directory complains
	case err != nil:
		return Config{}, fmt.Errorf("read settings: %w", err)
	default:
		if err := c.merge(b); err != nil {
			return Config{}, fmt.Errorf("settings in %s: %w", c.File(), err)
		}
	}
	if c.OTLPEndpoint == "" {
		c.OTLPEndpoint = getenv("OTEL_EXPORTER_OTLP_ENDPOINT")
	}
	if err := c.Validate(); err != nil {
		return Config{}, err
	}
	return c, nil
}

func (c *Config) merge(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(c); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after the JSON object")
	}
	return nil
}

// Validate returns every complaint about c at once, nil when there is none.
func (c Config) Validate() error {
	var all []error
	complain := func(format string, args ...any) { all = append(all, fmt.Errorf(format, args...)) }
	if !filepath.IsAbs(c.StateDir) {
		complain("state directory %q: must be an absolute path", c.StateDir)
	}
	for _, n := range []struct {
		name  string
		value int64
		least int64
	}{
		{"cache_bytes", c.CacheBytes, 1 << 20},
		{"trace_bytes", c.TraceBytes, 1 << 20},
		{"access_bytes", c.AccessBytes, 1 << 20},
		{"output_bytes", c.OutputBytes, 64 << 10},
		{"max_request_bytes", c.MaxRequestBytes, 64 << 10},
		{"temporary_bytes", c.TemporaryBytes, 1 << 20},
		{"max_sessions", int64(c.MaxSessions), 1},
		{"max_requests", int64(c.MaxRequests), 1},
		{"max_commands", int64(c.MaxCommands), 1},
		{"import_workers", int64(c.ImportWorkers), 0},
		{"shutdown_seconds", int64(c.ShutdownSeconds), 0},
	} {
		if n.value < n.least {
			complain("%s %d: must be at least %d", n.name, n.value, n.least)
		}
	}
	if c.SessionBytes < 1<<20 {
		complain("session_bytes %d: must be at least %d", c.SessionBytes, 1<<20)
	}
	if c.SessionInodes < 16 {
		complain("session_inodes %d: must be at least 16", c.SessionInodes)
	}
	for _, p := range c.HostPaths {
		if !filepath.IsAbs(p) {
			complain("host_paths %q: must be absolute paths", p)
		}
	}
	if c.OTLPEndpoint != "" {
		if u, err := url.Parse(c.OTLPEndpoint); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			complain("otlp_endpoint %q: must be a URL such as http://127.0.0.1:4318", c.OTLPEndpoint)
		}
	}
	return errors.Join(all...)
}
