// Package daemon joins the rooms into the running product: it opens every
// sandbox of a state directory, serves the operation catalogue through the
// gateway, and unwinds in reverse. It is the only place where rooms meet.
//
// Lock order: Daemon.mu, then sandbox.mu, then whatever a session locks.
// Neither is held over file work, a publication or a command.
package daemon

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/fdstore"
	"ephemeral-sandbox/daemon/gateway"
	"ephemeral-sandbox/daemon/holder"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/daemon/store"
	"ephemeral-sandbox/daemon/telemetry"
	"ephemeral-sandbox/layerfmt"
)

// Daemon is every sandbox of one state directory, and the door to them.
type Daemon struct {
	cfg     config.Config
	log     *slog.Logger
	started time.Time
	trace   *telemetry.Store
	cache   *layerfmt.FrameCache
	binary  *holder.Binary
	stash   *fdstore.Client // nil without a parent
	gateway *gateway.Gateway
	door    net.Listener // nil until Open is done

	restarts int          // times the parent has replaced the daemon
	requests atomic.Int64 // in flight

	mu        sync.Mutex
	sandboxes map[string]*sandbox // guarded by mu
}

// Open takes up the state directory. Sessions whose holders the parent kept go
// on; the others wait for their next command.
func Open(ctx context.Context, cfg config.Config) (d *Daemon, err error) {
	d = &Daemon{
		cfg: cfg, log: slog.Default(), started: time.Now().UTC(),
		cache: layerfmt.NewFrameCache(cfg.CacheBytes), sandboxes: map[string]*sandbox{},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := os.MkdirAll(cfg.Sandboxes(), 0o700); err != nil {
		return d, fmt.Errorf("state directory: %w", err)
	}
	if d.trace, err = telemetry.Open(cfg.Telemetry(), telemetry.Options{
		MaxBytes: cfg.TraceBytes, Export: telemetry.Export{Endpoint: cfg.OTLPEndpoint},
	}); err != nil {
		return d, fmt.Errorf("open telemetry: %w", err)
	}
	if d.binary, err = holder.OpenBinary(); err != nil {
		return d, fmt.Errorf("open the holder's binary: %w", err)
	}
	kept, err := d.connectStash()
	if err != nil {
		return d, err
	}
	if err := d.openSandboxes(); err != nil {
		return d, err
	}
	d.adopt(ctx, kept)
	for _, s := range d.listSandboxes() {
		for _, ws := range s.openSessions() {
			ws.Abandon()
		}
	}
	d.resumeOneShots()
	token, err := gateway.EnsureToken(cfg.TokenFile())
	if err != nil {
		return d, err
	}
	if d.gateway, err = gateway.New(d.gatewayOptions(token)); err != nil {
		return d, fmt.Errorf("open the gateway: %w", err)
	}
	if d.door, err = gateway.Listen(ctx, cfg.Socket()); err != nil {
		return d, err
	}
	return d, nil
}

func (d *Daemon) connectStash() ([]fdstore.Item, error) {
	end, err := fdstore.FromEnv()
	if err != nil || end == nil {
		return nil, err
	}
	client, kept, err := fdstore.Connect(end)
	if err != nil {
		return nil, fmt.Errorf("connect to the descriptor store: %w", err)
	}
	d.stash = client
	kept = slices.DeleteFunc(kept, func(k fdstore.Item) bool {
		if k.Key != livesKey {
			return false
		}
		d.restarts, err = strconv.Atoi(string(k.Meta))
		d.restarts++
		return true
	})
	if err != nil {
		return kept, fmt.Errorf("descriptor store: %w", err)
	}
	if err := client.Put(livesKey, []byte(strconv.Itoa(d.restarts))); err != nil {
		return kept, fmt.Errorf("descriptor store: %w", err)
	}
	return kept, nil
}

// livesKey is the entry without descriptors that counts how often the parent
// has replaced the daemon.
const livesKey = "restarts"

func (d *Daemon) openSandboxes() error {
	entries, err := os.ReadDir(d.cfg.Sandboxes())
	if err != nil {
		return err
	}
	for _, e := range entries {
		dir := filepath.Join(d.cfg.Sandboxes(), e.Name())
		s, err := d.openSandbox(dir)
		if err != nil { // it harms no other
			s = d.newSandbox(dir)
			s.info.ID, s.problem = e.Name(), err
		}
		if s == nil {
			continue
		}
		d.sandboxes[s.info.ID] = s
		if s.problem != nil {
			d.log.Error("sandbox is broken", "sandbox", s.info.ID, "error", s.problem)
		}
	}
	return nil
}

// adopt gives the kept descriptors back to their sessions. What cannot be taken
// back is closed: the kernel then ends the mount, and the holder ends itself.
func (d *Daemon) adopt(ctx context.Context, kept []fdstore.Item) {
	for _, item := range kept {
		if err := d.adoptOne(ctx, item); err != nil {
			d.log.Warn("a session's processes are lost", "key", item.Key, "error", err)
			_ = d.stash.Drop(item.Key) // only frees the parent's copies
		}
		_ = item.Close() // the session has duplicates of its own
	}
}

func (d *Daemon) adoptOne(ctx context.Context, item fdstore.Item) error {
	var st session.Stashed
	if err := json.Unmarshal(item.Meta, &st); err != nil {
		return err
	}
	if len(item.Files) != 2 {
		return fmt.Errorf("%d descriptors were kept, not 2", len(item.Files))
	}
	s, ok := d.sandboxes[st.Sandbox]
	if !ok {
		return fmt.Errorf("sandbox %s is gone", st.Sandbox)
	}
	ws, err := s.session(st.Session)
	if err != nil {
		return err
	}
	control, err := dupFD(item.Files[0])
	if err != nil {
		return err
	}
	fuse, err := dupFD(item.Files[1])
	if err != nil {
		return errors.Join(err, closeFD(control))
	}
	return ws.Adopt(ctx, st, control, fuse)
}

// Serve answers requests until ctx ends. Those that arrive after Open has
// returned wait for it.
func (d *Daemon) Serve(ctx context.Context) error {
	d.emit("daemon.started", nil, "", "", map[string]any{"pid": int64(os.Getpid()), "restarts": int64(d.restarts)})
	return d.gateway.Serve(ctx, d.door)
}

// Close ends every session with its processes, and lets go of everything, in
// reverse order of Open.
func (d *Daemon) Close() error {
	var errs []error
	if d.door != nil {
		if err := d.door.Close(); err != nil && !errors.Is(err, net.ErrClosed) { // Serve closes it
			errs = append(errs, err)
		}
	}
	for _, s := range d.listSandboxes() {
		errs = append(errs, s.close())
	}
	if d.stash != nil {
		errs = append(errs, d.stash.Close())
	}
	if d.binary != nil {
		errs = append(errs, d.binary.Close())
	}
	d.emit("daemon.stopped", nil, "", "", nil)
	if d.trace != nil {
		errs = append(errs, d.trace.Close())
	}
	return errors.Join(errs...)
}

func (d *Daemon) storeOptions() store.Options { return store.Options{Cache: d.cache} }

func (d *Daemon) runtime() session.Runtime {
	r := session.Runtime{
		Mounter: mounter{d.log}, Binary: d.binary, HostPaths: d.cfg.HostPaths,
		Path: insidePath(os.Getenv("PATH")), ScratchBytes: uint64(d.cfg.TemporaryBytes),
		AccessBytes: d.cfg.AccessBytes, MaxCommands: d.cfg.MaxCommands, OutputBytes: d.cfg.OutputBytes,
	}
	if d.stash != nil {
		r.Stash = stash{d.stash}
	}
	return r
}

func (d *Daemon) emit(name string, s *sandbox, sessionID, operation string, attrs map[string]any) {
	e := telemetry.Event{Name: name, Session: sessionID, Operation: operation, Attrs: attrs}
	if s != nil {
		e.Sandbox = s.info.ID
	}
	d.trace.Emit(e)
}

// find is the sandbox with an id.
func (d *Daemon) find(id string) (*sandbox, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s, ok := d.sandboxes[id]; ok {
		return s, nil
	}
	return nil, catalog.Errorf(catalog.NotFound, "no sandbox %q: list_sandboxes shows those there are", id)
}

// newID makes an id that was never given before: a prefix that says what it
// names, and 48 random bits.
func newID(prefix string) string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return prefix + "-" + hex.EncodeToString(b[:])
}
