// Package client calls a daemon's operations over the unix socket of its state
// directory. The directory is all it needs to know: socket and token lie in it.
package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/config"
)

// Client calls one daemon. It is safe for concurrent use.
type Client struct {
	paths config.Config
	http  *http.Client
}

// New returns a client of the daemon over stateDir, an absolute path. It does
// not connect yet.
func New(stateDir string) *Client {
	c := &Client{paths: config.Default(stateDir)}
	c.http = &http.Client{Transport: &http.Transport{
		DialContext:        c.dial,
		DisableCompression: true,
	}}
	return c
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Call is one request.
type Call struct {
	Op        string // an operation of the catalogue
	SandboxID string
	RequestID string // empty lets the daemon make one up
	Request   any    // pointer to the operation's request struct; nil is one without arguments
}

// Call sends a request and stores its result in res, a pointer to the
// operation's result struct, or nil to drop it. Reports go to progress, one
// after the other, when it is not nil. Every error is a *catalog.Error; its
// kind is Unavailable when no daemon answers.
func (c *Client) Call(ctx context.Context, call Call, res any, progress func(catalog.Progress)) error {
	op, ok := catalog.Find(call.Op)
	if !ok {
		return catalog.Errorf(catalog.InvalidRequest, "operation %q does not exist", call.Op)
	}
	if call.Request == nil {
		call.Request = op.NewRequest()
	}
	body, err := op.EncodeRequest(call.Request, call.SandboxID)
	if err != nil {
		return catalog.AsError(err)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandboxd/v1/"+op.Name, bytes.NewReader(body))
	if err != nil {
		return catalog.AsError(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if call.RequestID != "" {
		r.Header.Set("X-Request-Id", call.RequestID)
	}
	if progress != nil {
		r.Header.Set("Accept", "application/x-ndjson")
	}
	resp, err := c.send(r)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // read to its end, or given up
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "application/x-ndjson") {
		err = stream(resp.Body, res, progress)
	} else {
		err = document(resp, res)
	}
	return c.outcome(ctx, op, resp.Header.Get("X-Request-Id"), err)
}

// outcome explains an answer that broke off.
func (c *Client) outcome(ctx context.Context, op catalog.Operation, id string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*catalog.Error](err); ok {
		return e
	}
	if ctx.Err() != nil {
		return catalog.Errorf(catalog.Unavailable, "%s: gave up waiting for the answer (request id %s): %w", op.Name, id, ctx.Err())
	}
	return catalog.Errorf(catalog.Unavailable, "%s: the daemon's answer broke off (%w), so its outcome is unknown: look with trace and events for request id %s", op.Name, err, id)
}

// Health asks whether the daemon answers, and decodes what it says into v.
func (c *Client) Health(ctx context.Context, v any) error { return c.get(ctx, "health", v) }

// Catalog asks for the daemon's own catalogue.
func (c *Client) Catalog(ctx context.Context) (catalog.Description, error) {
	var d catalog.Description
	err := c.get(ctx, "catalog", &d)
	return d, err
}

func (c *Client) get(ctx context.Context, what string, v any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandboxd/v1/"+what, nil)
	if err != nil {
		return catalog.AsError(err)
	}
	resp, err := c.send(r)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // read to its end, or given up
	if err := document(resp, v); err != nil {
		return catalog.AsError(fmt.Errorf("%s: %w", what, err))
	}
	return nil
}

func (c *Client) send(r *http.Request) (*http.Response, error) {
	token, err := os.ReadFile(c.paths.TokenFile())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// No daemon was ever here, or it is older than its first token: what
		// the socket says is the better message.
	case err != nil:
		return nil, catalog.Errorf(catalog.Unauthorized, "cannot read the token of state directory %s: run as the user who runs its daemon, or as root: %w", c.paths.StateDir, err)
	default:
		r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	}
	resp, err := c.http.Do(r)
	if err == nil {
		return resp, nil
	}
	if e, ok := errors.AsType[*catalog.Error](err); ok {
		return nil, e
	}
	if r.Context().Err() != nil {
		return nil, catalog.Errorf(catalog.Unavailable, "gave up waiting for the daemon of state directory %s: %w", c.paths.StateDir, r.Context().Err())
	}
	return nil, catalog.Errorf(catalog.Unavailable, "the daemon of state directory %s ended in the middle of the request, so its outcome is unknown: %w", c.paths.StateDir, err)
}

// replaceTime bounds how long a request waits for the socket of a daemon that
// holds its lock but is still starting, or being replaced after a crash.
const replaceTime = 10 * time.Second

func (c *Client) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	conn, err := c.connect(ctx)
	if err == nil || !notThere(err) {
		return conn, c.noDaemon(err)
	}
	if _, held, lockErr := c.paths.Holders(); lockErr != nil || !held {
		return nil, c.noDaemon(err)
	}
	conn, err = c.awaitSocket(ctx)
	return conn, c.noDaemon(err)
}

func (c *Client) awaitSocket(ctx context.Context) (net.Conn, error) {
	ctx, stop := context.WithTimeout(ctx, replaceTime)
	defer stop()
	w, err := WatchDir(c.paths.StateDir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = w.Close() }() // it only listens
	for {
		conn, err := c.connect(ctx)
		if err == nil || !notThere(err) {
			return conn, err
		}
		if _, held, lockErr := c.paths.Holders(); lockErr != nil || !held {
			return nil, err // it was on its way out
		}
		name, wait := w.Await(ctx, config.SocketName, config.LockName)
		if wait != nil {
			return nil, errStarting
		}
		if name == config.LockName {
			// The lock's end follows the file's close after a moment.
			_ = c.paths.AwaitFree(ctx, lockLag) // Holders tells
		}
	}
}

// lockLag is how long after its file's last close a lock may still be held.
const lockLag = 100 * time.Millisecond

var errStarting = errors.New("it is running, but has no socket yet: try again, or look into its log")

func notThere(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOTDIR)
}

// connect goes to the socket through its directory's descriptor, because the
// path may be longer than a socket address.
func (c *Client) connect(ctx context.Context) (net.Conn, error) {
	dir, err := os.Open(c.paths.StateDir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }() // a directory: nothing was written
	var d net.Dialer
	return d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), config.SocketName))
}

func (c *Client) noDaemon(err error) error {
	switch {
	case err == nil:
		return nil
	case notThere(err):
		return catalog.Errorf(catalog.Unavailable, "no daemon is running for state directory %s: start one with \"sandboxd start --state-dir %s\", or pass --auto-start", c.paths.StateDir, Quote(c.paths.StateDir)).
			With(map[string]string{"state_dir": c.paths.StateDir})
	case errors.Is(err, fs.ErrPermission):
		return catalog.Errorf(catalog.Unauthorized, "state directory %s belongs to another user: run as the user who runs its daemon, or as root, or choose another with --state-dir", c.paths.StateDir)
	}
	return catalog.Errorf(catalog.Unavailable, "cannot reach the daemon of state directory %s: %w", c.paths.StateDir, err)
}

// Quote writes s as one word of a shell command.
func Quote(s string) string {
	if s != "" && strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-+:,@%=", r))
	}) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func document(resp *http.Response, res any) error {
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		var body catalog.ErrorBody
		if err := json.Unmarshal(b, &body); err != nil || body.Error == nil {
			return catalog.Errorf(catalog.Internal, "the daemon answered %s without an error of its own", resp.Status)
		}
		return body.Error
	}
	return result(b, res)
}

func result(b []byte, res any) error {
	if res == nil {
		return nil
	}
	if err := json.Unmarshal(b, res); err != nil {
		return catalog.Errorf(catalog.Internal, "the daemon's result cannot be read (are daemon and tool of one version?): %w", err)
	}
	return nil
}

// stream reads lines up to the one that ends the answer.
func stream(body io.Reader, res any, progress func(catalog.Progress)) error {
	r := bufio.NewReader(body)
	for {
		b, err := r.ReadBytes('\n')
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		var line struct {
			Progress *catalog.Progress `json:"progress"`
			Result   json.RawMessage   `json:"result"`
			Error    *catalog.Error    `json:"error"`
		}
		if err := json.Unmarshal(b, &line); err != nil {
			return catalog.Errorf(catalog.Internal, "the daemon sent a line that cannot be read: %w", err)
		}
		switch {
		case line.Error != nil:
			return line.Error
		case line.Result != nil:
			return result(line.Result, res)
		case line.Progress != nil && progress != nil:
			progress(*line.Progress)
		}
	}
}
