package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/importer"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/daemon/store"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// sandbox is one workspace's layers and the sessions on them. On disk:
//
//	sandbox.json  what it is; written last
//	store/        layers and commit log
//	sessions/ID/  open sessions
//	ended/ID/     transcripts and activity of the newest ended sessions
//	tmp/          workspaces of sessionless operations
type sandbox struct {
	dir   string
	info  sandboxInfo
	store *store.Store // nil when broken
	d     *Daemon

	problem error // why it is broken; immutable

	mu       sync.Mutex
	sessions map[string]*session.Session // guarded by mu
	retiring map[string]bool             // guarded by mu; sessions that are being ended
	ending   bool                        // guarded by mu
	oneShots sync.WaitGroup              // publications of one-command sessions under way
}

type sandboxInfo struct {
	ID            string    `json:"id"`
	WorkspaceRoot []byte    `json:"workspace_root"` // a path need not be UTF-8
	HostPaths     [][]byte  `json:"host_paths,omitempty"`
	Files         int64     `json:"files"`
	Dirs          int64     `json:"dirs"`
	Bytes         int64     `json:"bytes"`
	Created       time.Time `json:"created"`
}

func (s *sandbox) root() string { return string(s.info.WorkspaceRoot) }

// keepEnded is how many ended sessions' transcripts and records a sandbox keeps.
const keepEnded = 256

// createSandbox imports root. Nothing is left behind when it fails.
func (d *Daemon) createSandbox(ctx context.Context, op string, root string, hostPaths []catalog.Text, progress func(importer.Progress)) (made *sandbox, err error) {
	root, err = checkRoot(root)
	if err != nil {
		return nil, err
	}
	id := newID("sb")
	s := d.newSandbox(filepath.Join(d.cfg.Sandboxes(), id))
	s.info = sandboxInfo{ID: id, WorkspaceRoot: []byte(root), Created: time.Now().UTC()}
	for _, p := range hostPaths {
		if err := d.checkHostPath(string(p), root); err != nil {
			return nil, err
		}
		s.info.HostPaths = append(s.info.HostPaths, []byte(filepath.Clean(string(p))))
	}
	if err := os.MkdirAll(filepath.Join(s.dir, "sessions"), 0o700); err != nil {
		return nil, fmt.Errorf("make a sandbox: %w", err)
	}
	defer func() {
		if err != nil {
			if s.store != nil {
				err = errors.Join(err, s.store.Close())
			}
			err = errors.Join(err, os.RemoveAll(s.dir))
		}
	}()
	opts := d.storeOptions()
	opts.Meta = store.CommitMeta{Operation: op, RequestID: op, Message: "import of " + root, Time: s.info.Created}
	var imported importer.Result
	s.store, err = store.Create(filepath.Join(s.dir, "store"), opts, func(w *layerfmt.Writer) error {
		imported, err = importer.Import(ctx, root, w, importer.Options{
			Progress: progress, Workers: d.cfg.ImportWorkers, Exclude: []string{d.cfg.StateDir},
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	s.info.Files, s.info.Dirs, s.info.Bytes = imported.Files, imported.Dirs, imported.Bytes
	raw, err := json.Marshal(s.info)
	if err != nil {
		return nil, err
	}
	if err := session.WriteDurably(filepath.Join(s.dir, "sandbox.json"), raw); err != nil {
		return nil, err
	}
	d.mu.Lock()
	d.sandboxes[s.info.ID] = s
	d.mu.Unlock()
	return s, nil
}

// checkRoot resolves the directory to import, or says what is wrong with it.
func checkRoot(root string) (string, error) {
	real, err := filepath.EvalSymlinks(root)
	switch {
	case !filepath.IsAbs(root):
		return "", catalog.Errorf(catalog.InvalidRequest, "workspace root %q is not an absolute path: give one", root)
	case errors.Is(err, fs.ErrNotExist):
		return "", catalog.Errorf(catalog.NotFound, "workspace root %q does not exist: name a directory that does", root)
	case errors.Is(err, fs.ErrPermission):
		return "", catalog.Errorf(catalog.PreconditionFailed, "workspace root %q cannot be read by the daemon's user: give it read and search permission", root)
	case err != nil:
		return "", catalog.Errorf(catalog.InvalidRequest, "workspace root %q: %w", root, err)
	case real == "/":
		return "", catalog.Errorf(catalog.InvalidRequest, "workspace root %q is the root of the host: name a directory beneath it", root)
	case beneath(real, "/proc") || beneath(real, "/sys") || beneath(real, "/dev"):
		return "", catalog.Errorf(catalog.InvalidRequest, "workspace root %q shows the host's kernel and devices, not files: name another directory", root)
	}
	st, err := os.Stat(real)
	switch {
	case err != nil:
		return "", catalog.Errorf(catalog.NotFound, "workspace root %q: %w", root, err)
	case !st.IsDir():
		return "", catalog.Errorf(catalog.InvalidRequest, "workspace root %q is not a directory: name one", root)
	}
	f, err := os.Open(real)
	if err != nil {
		return "", catalog.Errorf(catalog.PreconditionFailed, "workspace root %q cannot be read by the daemon's user: give it read and search permission", root)
	}
	return real, f.Close()
}

// checkHostPath refuses what could not be shown to a session beside its view,
// and what would show it the daemon's own token and socket.
func (d *Daemon) checkHostPath(p, root string) error {
	real, err := filepath.EvalSymlinks(p)
	if !filepath.IsAbs(p) {
		return catalog.Errorf(catalog.InvalidRequest, "host path %q is not absolute: give an absolute one", p)
	}
	if err != nil {
		return catalog.Errorf(catalog.NotFound, "host path %q: %w: name a directory that exists", p, err)
	}
	st, err := os.Stat(real)
	if err != nil {
		return err
	}
	state, err := filepath.EvalSymlinks(d.cfg.StateDir)
	if err != nil {
		return err
	}
	switch {
	case !st.IsDir():
		return catalog.Errorf(catalog.InvalidRequest, "host path %q is not a directory: name one", p)
	case beneath(real, root):
		return catalog.Errorf(catalog.InvalidRequest, "host path %q lies in the workspace, which covers it: leave it out", p)
	case beneath(state, real) || beneath(real, state):
		return catalog.Errorf(catalog.InvalidRequest, "host path %q would show sessions the daemon's state directory %q: name directories beside it", p, d.cfg.StateDir)
	}
	return nil
}

// beneath reports whether p is dir or lies in it. Both are clean.
func beneath(p, dir string) bool {
	rest, ok := strings.CutPrefix(p, dir)
	return ok && (rest == "" || rest[0] == '/' || dir == "/")
}

func (d *Daemon) newSandbox(dir string) *sandbox {
	return &sandbox{d: d, dir: dir, sessions: map[string]*session.Session{}, retiring: map[string]bool{}}
}

// openSandbox takes up what an earlier daemon left in dir. A sandbox whose
// store cannot be opened is kept as broken, with the reason, and harms no
// other.
func (d *Daemon) openSandbox(dir string) (*sandbox, error) {
	if strings.HasPrefix(filepath.Base(dir), goneMark) {
		return nil, os.RemoveAll(dir) // its destruction was cut off
	}
	raw, err := os.ReadFile(filepath.Join(dir, "sandbox.json"))
	if errors.Is(err, fs.ErrNotExist) {
		if !store.Exists(filepath.Join(dir, "store")) {
			return nil, os.RemoveAll(dir) // its import was cut off
		}
		return nil, fmt.Errorf("%s is missing: put it back from a copy, or move its store to another place", filepath.Join(dir, "sandbox.json"))
	}
	if err != nil {
		return nil, err
	}
	s := d.newSandbox(dir)
	if err := json.Unmarshal(raw, &s.info); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, "sandbox.json"), err)
	}
	if err := os.RemoveAll(filepath.Join(dir, "tmp")); err != nil {
		return nil, err
	}
	opts := d.storeOptions()
	opts.Salvage = true
	if s.store, err = store.Open(filepath.Join(dir, "store"), opts); err != nil {
		s.problem = err
		return s, nil
	}
	if s.store.Damage() == nil { // what a crash left behind that no commit names
		if _, err := s.store.Sweep(); err != nil {
			d.log.Warn("orphaned layers stay", "sandbox", s.info.ID, "error", err)
		}
	}
	if s.problem = s.store.Damage(); s.problem == nil {
		s.problem = s.reopenSessions()
	}
	return s, nil
}

func (s *sandbox) reopenSessions() error {
	entries, err := os.ReadDir(filepath.Join(s.dir, "sessions"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		dir := filepath.Join(s.dir, "sessions", e.Name())
		if _, err := os.Stat(filepath.Join(dir, "session.json")); errors.Is(err, fs.ErrNotExist) {
			if err := os.RemoveAll(dir); err != nil { // its creation was cut off
				return err
			}
			continue
		}
		ws, err := session.Reopen(dir, s.sessionOptions(), s.runtime())
		if err != nil {
			s.d.emit("session.lost", s, e.Name(), "", map[string]any{"error": err.Error()})
			continue // its files stay for another try
		}
		s.sessions[ws.Info.ID] = ws
	}
	return nil
}

func (s *sandbox) sessionOptions() session.Options {
	return session.Options{
		History: history{s.store}, Trace: s.d.trace,
		Quota: overlay.Quota{Bytes: s.d.cfg.SessionBytes, Inodes: s.d.cfg.SessionInodes},
	}
}

// runtime is what the daemon lends to the sandbox's sessions.
func (s *sandbox) runtime() session.Runtime {
	r := s.d.runtime()
	r.HostPaths = slices.Clone(r.HostPaths)
	for _, p := range s.info.HostPaths {
		r.HostPaths = append(r.HostPaths, string(p))
	}
	return r
}

// usable refuses work on a sandbox whose store could not be opened whole.
func (s *sandbox) usable() error {
	if s.problem == nil {
		return nil
	}
	return fmt.Errorf("sandbox %s is broken: %w", s.info.ID, s.problem)
}

// readable refuses reads only where there is nothing to read.
func (s *sandbox) readable() error {
	if s.store != nil {
		return nil
	}
	return s.usable()
}

// newSession makes a session on the head.
func (s *sandbox) newSession(ctx context.Context, info session.Info) (*session.Session, error) {
	if err := s.usable(); err != nil {
		return nil, err
	}
	if n := s.d.countSessions(); n >= s.d.cfg.MaxSessions {
		return nil, catalog.Errorf(catalog.ResourceExhausted, "%d sessions are open, which is the limit (max_sessions): end one first", n)
	}
	info.ID, info.Sandbox, info.Workspace, info.Created = newID("ws"), s.info.ID, s.root(), time.Now().UTC()
	ws, err := session.Create(ctx, filepath.Join(s.dir, "sessions", info.ID), info, s.sessionOptions(), s.runtime())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	ending := s.ending
	if !ending {
		s.sessions[info.ID] = ws
	}
	s.mu.Unlock()
	if ending {
		_, err := ws.Retire(filepath.Join(s.dir, "ended", info.ID))
		return nil, errors.Join(catalog.Errorf(catalog.NotFound, "sandbox %s is being destroyed", s.info.ID), err)
	}
	return ws, nil
}

func (s *sandbox) session(id string) (*session.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ws, ok := s.sessions[id]; ok {
		return ws, nil
	}
	if _, err := os.Stat(filepath.Join(s.dir, "ended", filepath.Base(id))); err == nil && id != "" {
		return nil, catalog.Errorf(catalog.NotFound, "session %q has ended: open another with create_workspace_session", id)
	}
	return nil, catalog.Errorf(catalog.NotFound, "no session %q in sandbox %s: list_workspace_sessions shows those there are", id, s.info.ID)
}

// openSessions lists the sessions that are not ending, oldest first.
func (s *sandbox) openSessions() []*session.Session {
	return slices.DeleteFunc(s.allSessions(), func(ws *session.Session) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.retiring[ws.Info.ID]
	})
}

// allSessions lists the sessions that have not ended, oldest first.
func (s *sandbox) allSessions() []*session.Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.sessions), func(a, b *session.Session) int {
		return cmp.Or(a.Info.Created.Compare(b.Info.Created), strings.Compare(a.Info.ID, b.Info.ID))
	})
}

// retire ends a session and keeps its record. Until that is done the session
// can be found, so that its commands can be asked for at any time; one that
// could not be ended whole stays, and can be destroyed again.
func (s *sandbox) retire(ws *session.Session) (processes int, err error) {
	id := ws.Info.ID
	s.mu.Lock()
	mine := s.sessions[id] == ws && !s.retiring[id]
	if mine {
		s.retiring[id] = true
	}
	s.mu.Unlock()
	if !mine {
		return 0, catalog.Errorf(catalog.NotFound, "session %q is ending already", id)
	}
	processes, err = ws.Retire(filepath.Join(s.dir, "ended", id))
	s.mu.Lock()
	delete(s.retiring, id)
	if err == nil {
		delete(s.sessions, id)
	}
	s.mu.Unlock()
	if e := s.pruneEnded(); e != nil {
		s.d.log.Warn("old sessions' records stay", "sandbox", s.info.ID, "error", e)
	}
	return processes, err
}

// pruneEnded removes the records of the oldest ended sessions.
func (s *sandbox) pruneEnded() error {
	list, err := s.ended()
	if err != nil {
		return err
	}
	for len(list) > keepEnded {
		err = errors.Join(err, os.RemoveAll(filepath.Join(s.dir, "ended", list[0].Info.ID)))
		list = list[1:]
	}
	return err
}

// ended lists the records of ended sessions, oldest first.
func (s *sandbox) ended() ([]*session.Ended, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "ended"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []*session.Ended
	for _, e := range entries {
		rec, err := session.OpenEnded(filepath.Join(s.dir, "ended", e.Name()))
		if err != nil {
			continue // cut off while it was being kept
		}
		list = append(list, rec)
	}
	slices.SortFunc(list, func(a, b *session.Ended) int { return a.Info.Created.Compare(b.Info.Created) })
	return list, nil
}

// destroy ends every session and deletes the sandbox.
func (s *sandbox) destroy() (sessions int, err error) {
	s.mu.Lock()
	s.ending = true
	s.mu.Unlock()
	for _, ws := range s.openSessions() {
		if _, e := s.retire(ws); e != nil {
			err = errors.Join(err, e)
			continue
		}
		sessions++
	}
	s.oneShots.Wait()
	if err != nil {
		return sessions, err
	}
	if s.store != nil {
		err = s.store.Close()
	}
	// From the renaming on it is gone, whatever stops us now.
	gone := filepath.Join(filepath.Dir(s.dir), goneMark+s.info.ID)
	if e := os.Rename(s.dir, gone); e != nil {
		return sessions, errors.Join(err, fmt.Errorf("delete the sandbox: %w", e))
	}
	return sessions, errors.Join(err, os.RemoveAll(gone))
}

// goneMark begins the name of a sandbox's directory that is being deleted.
const goneMark = ".gone-"

// close ends every session's processes and lets go of the sandbox; the sessions
// themselves stay on disk for the next daemon.
func (s *sandbox) close() error {
	var errs []error
	for _, ws := range s.openSessions() {
		errs = append(errs, ws.Close())
	}
	s.oneShots.Wait()
	if s.store != nil {
		errs = append(errs, s.store.Close())
	}
	return errors.Join(errs...)
}

// operate runs one sessionless operation in a workspace of its own and
// publishes what it did as one commit.
func (s *sandbox) operate(ctx context.Context, op session.Operation, message string, do func(*session.Workspace, session.Operation) error) (pub session.Publication, err error) {
	if err := s.usable(); err != nil {
		return pub, err
	}
	dir := filepath.Join(s.dir, "tmp", newID("op"))
	w, err := session.OpenWorkspace(dir, "", s.sessionOptions())
	if err != nil {
		return pub, errors.Join(err, os.RemoveAll(dir))
	}
	defer func() {
		// Not an error of the operation, which may have been committed; what
		// stays is swept when the sandbox is opened.
		if e := errors.Join(w.Close(), os.RemoveAll(dir)); e != nil {
			s.d.log.Warn("a finished operation's workspace stays", "dir", dir, "error", e)
		}
	}()
	if op, err = w.Begin(op); err != nil {
		return pub, err
	}
	if err := do(w, op); err != nil {
		return pub, err
	}
	pub, err = w.Publish(ctx, session.PublishRequest{Operation: op, Message: message})
	if landed(err) {
		return pub, nil
	}
	return pub, err
}

// at gives the tree of a commit, the head when commit is empty.
func (s *sandbox) at(commit string) (session.Lease, error) {
	if err := s.readable(); err != nil {
		return nil, err
	}
	if commit == "" {
		return history{s.store}.LeaseHead()
	}
	n, err := parseCommit(commit)
	if err != nil {
		return nil, err
	}
	if _, err := s.store.Commit(n); err != nil {
		return nil, catalog.Errorf(catalog.NotFound, "no commit %s in sandbox %s: the head is %s", commit, s.info.ID, store.CommitName(s.store.HeadCommit().Number))
	}
	return history{s.store}.Lease(n)
}

func parseCommit(name string) (uint64, error) {
	n, err := store.ParseCommit(name)
	if err != nil {
		return 0, catalog.Errorf(catalog.InvalidRequest, "commit %q: it must look like L000024", name)
	}
	return n, nil
}

// relative turns a path as a caller gives it into one from the workspace's root.
func (s *sandbox) relative(p string) (string, error) {
	if !filepath.IsAbs(p) {
		return p, nil
	}
	rest, ok := strings.CutPrefix(p, s.root())
	if !ok || rest != "" && rest[0] != '/' {
		return "", catalog.Errorf(catalog.InvalidRequest, "path %q is outside the workspace %q: give one inside it, or a relative one", p, s.root())
	}
	return rest, nil
}

// history shows a store to the sessions on it.
type history struct{ s *store.Store }

func (h history) LeaseHead() (session.Lease, error) { return leased(h.s.LeaseHead()) }

func (h history) Lease(n uint64) (session.Lease, error) { return leased(h.s.Lease(n)) }

// leased keeps a nil lease from becoming an interface that is not nil.
func leased(l *store.Lease, err error) (session.Lease, error) {
	if err != nil {
		return nil, err
	}
	return l, nil
}

func (h history) Seal(build func(*layerfmt.Writer) error) (session.Sealed, error) {
	l, err := h.s.Seal(build)
	if err != nil {
		return nil, err
	}
	return l, nil
}

func (h history) Advance(parent uint64, l session.Sealed, m session.Meta) (session.Commit, bool, error) {
	sealed, ok := l.(*store.Sealed)
	if !ok {
		return session.Commit{}, false, fmt.Errorf("a %T was not sealed by this store", l)
	}
	c, won, err := h.s.Advance(parent, sealed, store.CommitMeta(m))
	return session.Commit{Number: c.Number, StoredBytes: c.StoredBytes}, won, err
}

func (h history) AllocInos(n uint64) (tree.Ino, error) { return h.s.AllocInos(n) }
