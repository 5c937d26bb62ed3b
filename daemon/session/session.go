package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder"
	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
)

// Mounter serves a workspace's tree on an opened and mounted /dev/fuse.
type Mounter interface {
	Mount(MountSpec) (Mount, error)
}

// MountSpec is what a mount serves and whom it tells.
type MountSpec struct {
	FS     *overlay.FS
	FD     int                      // stays the caller's
	Op     func(pid uint32) tree.Op // the operation a request belongs to
	Record *access.Recorder
	Show   func(id uint32) uint32 // a stored id as it can be shown inside
	Level  string                 // io, open, set
	Resume []byte                 // what InitState gave to an earlier daemon on the same mount
}

// Mount is a served view.
type Mount interface {
	Invalidator
	InitState() []byte
	Counts() map[string]uint64
	// Close returns when the kernel's side of the connection is gone.
	Close() error
}

// Stash keeps duplicates of descriptors outside the daemon, so that the next
// daemon finds the mounts and holders of this one alive.
type Stash interface {
	Put(key string, meta []byte, fds ...int) error
	Drop(key string) error
}

// State is where a session stands.
type State string

// The states of a session. Asleep means that the daemon was restarted and the
// session's processes ended with the last one, Broken that its holder died; in
// both the next command starts another holder.
const (
	Opening    State = "opening"
	Ready      State = "ready"
	Publishing State = "publishing"
	Refreshing State = "refreshing"
	Closing    State = "closing"
	Asleep     State = "asleep"
	Broken     State = "broken"
)

// Info is what a session is; it never changes and is kept beside the upper.
type Info struct {
	ID        string    `json:"id"`
	Sandbox   string    `json:"sandbox"`
	Workspace string    `json:"workspace"` // absolute path of the view inside
	Network   string    `json:"network"`
	Level     string    `json:"trace_level"`
	Implicit  bool      `json:"implicit"`          // made for one command
	Message   string    `json:"message,omitempty"` // of the commit, when Implicit
	Created   time.Time `json:"created"`
}

// Runtime is what the daemon lends to every session.
type Runtime struct {
	Mounter   Mounter
	Stash     Stash // nil: sessions lose their processes with the daemon
	Binary    *holder.Binary
	HostPaths []string // further host directories shown read-only
	Path      string   // PATH inside

	ScratchBytes uint64 // bound of a session's /tmp, HOME and the like together; 0 leaves it to the holder
	AccessBytes  int64  // bound of a session's access record on disk; 0 leaves it to the recorder
	OutputBytes  int64  // bound of what is kept of each stream of a command; 0 is none
	MaxCommands  int    // commands that may run at once in one session; 0 is no bound
}

// What a session answers besides errors of the tree and of its holder.
var (
	ErrEnding          = errors.New("the session is ending: open another one")
	ErrTooManyCommands = errors.New("too many commands run in the session: wait for one to end")
)

// Session is a workspace with the processes that run in it.
type Session struct {
	*Workspace
	Info    Info
	runtime Runtime
	record  *access.Recorder

	life sync.Mutex // held while the holder is started or stopped
	kept bool       // Retire has written the activity down; one Retire at a time

	mu       sync.Mutex
	state    State               // guarded by mu; never Publishing or Refreshing
	gating   []State             // guarded by mu; publications and refreshes under way or waiting
	problem  error               // guarded by mu; why Broken
	holder   *holder.Holder      // guarded by mu; nil when none runs
	mount    Mount               // guarded by mu; nil when none is served
	mapping  string              // guarded by mu; how ids inside relate to the host's
	commands map[string]*Command // guarded by mu; by command id
	order    []*Command          // guarded by mu; oldest first
	waiters  sync.WaitGroup      // one for each command that runs
}

// Create makes a session in dir on the head and starts its holder.
func Create(ctx context.Context, dir string, info Info, o Options, r Runtime) (*Session, error) {
	s, err := open(dir, info, o, r)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(info)
	if err == nil {
		err = WriteDurably(filepath.Join(dir, "session.json"), raw)
	}
	if err == nil {
		err = s.ensureHolder(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close(), os.RemoveAll(dir))
	}
	return s, nil
}

// Reopen takes up a session that an earlier daemon left in dir. Its holder, if
// the stash kept one, is adopted with Adopt; otherwise the next command starts
// a new one.
func Reopen(dir string, o Options, r Runtime) (*Session, error) {
	raw, err := os.ReadFile(filepath.Join(dir, "session.json"))
	if err != nil {
		return nil, fmt.Errorf("reopen session: %w", err)
	}
	var info Info
	if err := json.Unmarshal(raw, &info); err != nil {
		return nil, fmt.Errorf("reopen session: %s: %w", filepath.Join(dir, "session.json"), err)
	}
	s, err := open(dir, info, o, r)
	if err != nil {
		return nil, err
	}
	s.setState(Asleep, nil)
	if err := s.loadCommands(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func open(dir string, info Info, o Options, r Runtime) (*Session, error) {
	w, err := OpenWorkspace(dir, info.ID, o)
	if err != nil {
		return nil, err
	}
	rec, err := access.Open(filepath.Join(dir, "access"), access.Options{MaxBytes: r.AccessBytes})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open access record: %w", err), w.Close())
	}
	if err := os.MkdirAll(filepath.Join(dir, "commands"), 0o700); err != nil {
		return nil, errors.Join(err, rec.Close(), w.Close())
	}
	return &Session{Workspace: w, Info: info, runtime: r, record: rec, state: Opening, commands: map[string]*Command{}}, nil
}

// Status is where the session stands, the host pid of its holder (0 when none
// runs), and why it is broken if it is.
func (s *Session) Status() (st State, holderPID int, problem error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holder != nil {
		holderPID = s.holder.Pid()
	}
	if len(s.gating) > 0 && s.state != Closing {
		return s.gating[0], holderPID, s.problem
	}
	return s.state, holderPID, s.problem
}

// Mapping says how user ids inside relate to the host's: range, subuid, single.
func (s *Session) Mapping() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mapping
}

// Requests counts the kernel's requests by name since the view was mounted.
func (s *Session) Requests() map[string]uint64 {
	s.mu.Lock()
	m := s.mount
	s.mu.Unlock()
	if m == nil {
		return nil
	}
	return m.Counts()
}

func (s *Session) setState(st State, problem error) {
	s.mu.Lock()
	s.state, s.problem = st, problem
	s.mu.Unlock()
}

// ensureHolder starts the session's holder and serves its view, unless that is
// done already.
func (s *Session) ensureHolder(ctx context.Context) error {
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	running, closing := s.holder != nil, s.state == Closing
	s.mu.Unlock()
	switch {
	case closing:
		return fmt.Errorf("session %s: %w", s.Info.ID, ErrEnding)
	case running:
		return nil
	}
	_, sp := s.span(ctx, "namespace launch")
	h, err := holder.Start(ctx, holder.Config{
		Session: s.Info.ID, Workspace: s.Info.Workspace, Network: s.Info.Network,
		HostPaths: s.runtime.HostPaths, RuntimeDir: s.dir, Binary: s.runtime.Binary,
		ScratchBytes: s.runtime.ScratchBytes,
	})
	sp.End(err)
	if err != nil {
		return err // it names the session
	}
	_, sp = s.span(ctx, "mount view")
	err = s.serve(ctx, h, nil)
	sp.End(err)
	return err
}

// serve mounts the view on the holder's descriptor and lets the holder finish
// its root.
func (s *Session) serve(ctx context.Context, h *holder.Holder, resume []byte) (err error) {
	mapping, show := h.IDs()
	m, err := s.runtime.Mounter.Mount(MountSpec{
		FS: s.fs, FD: h.FuseFD(), Op: s.opOf(h), Record: s.record, Show: show, Level: s.Info.Level, Resume: resume,
	})
	if err != nil {
		return errors.Join(fmt.Errorf("serve the view of session %s: %w", s.Info.ID, err), h.Close())
	}
	if resume == nil {
		err = h.Ready(ctx)
	}
	if err == nil && s.runtime.Stash != nil {
		err = s.stash(h, m)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("session %s: %w", s.Info.ID, err), h.Close(), m.Close())
	}
	s.mu.Lock()
	s.holder, s.mount, s.mapping = h, m, mapping
	s.state, s.problem = Ready, nil
	s.mu.Unlock()
	s.Workspace.mu.Lock()
	s.view = m
	s.Workspace.mu.Unlock()
	go s.watch(h, m)
	return nil
}

// watch waits for the end of a holder, whatever ended it, and takes the mount
// down behind it. It lives as long as the holder, whose Close it outlasts.
func (s *Session) watch(h *holder.Holder, m Mount) {
	<-h.Done()
	s.Workspace.mu.Lock()
	s.view = nil
	s.Workspace.mu.Unlock()
	err := m.Close()
	if s.runtime.Stash != nil {
		// Before the next holder can be started, which is kept under the same
		// key. What stays there is dead, and the next daemon drops it.
		_ = s.runtime.Stash.Drop(s.stashKey())
	}
	s.mu.Lock()
	if s.holder == h {
		s.holder, s.mount = nil, nil
		if s.state != Closing {
			s.state = Broken
			s.problem = errors.Join(errors.New("its holder has ended: the next command starts a new one"), err)
		}
	}
	s.mu.Unlock()
}

// Stashed is what the next daemon needs, besides the descriptors of the control
// socket and of /dev/fuse, to take a session's holder back.
type Stashed struct {
	Sandbox string       `json:"sandbox"`
	Session string       `json:"session"`
	Holder  holder.State `json:"holder"`
	Init    []byte       `json:"init"`
}

func (s *Session) stashKey() string { return s.Info.Sandbox + "/" + s.Info.ID }

func (s *Session) stash(h *holder.Holder, m Mount) error {
	meta, err := json.Marshal(Stashed{Sandbox: s.Info.Sandbox, Session: s.Info.ID, Holder: h.State(), Init: m.InitState()})
	if err != nil {
		return err
	}
	if err := s.runtime.Stash.Put(s.stashKey(), meta, h.ControlFD(), h.FuseFD()); err != nil {
		return fmt.Errorf("keep descriptors: %w", err)
	}
	return nil
}

// Adopt takes a holder back that an earlier daemon started, and goes on serving
// its mount. Commands that run are waited for again. The descriptors are the
// session's from here on, whatever comes of it.
func (s *Session) Adopt(ctx context.Context, st Stashed, control, fuse int) error {
	s.life.Lock()
	defer s.life.Unlock()
	h, err := holder.Adopt(ctx, control, fuse, st.Holder)
	if err != nil {
		// A descriptor left open would keep the mount alive with nobody to serve it.
		return errors.Join(fmt.Errorf("take back the holder of session %s: %w", s.Info.ID, err), unix.Close(control), unix.Close(fuse))
	}
	if err := s.serve(ctx, h, st.Init); err != nil {
		return err
	}
	// Apart, because it waits for the kernel, which may wait for a request that
	// only the rest of the daemon can answer.
	s.waiters.Go(s.forgetStale)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.order {
		if c.running() {
			ctx, stop := context.WithCancelCause(context.Background())
			c.stop = stop
			s.waiters.Add(1)
			go s.follow(ctx, h, c)
		}
	}
	return nil
}

// Abandon settles the fate of a reopened session whose holder is not to be had
// back: its commands died with the holder.
func (s *Session) Abandon() {
	s.mu.Lock()
	adopted := s.holder != nil
	s.mu.Unlock()
	if !adopted {
		s.loseCommands()
	}
}

// forgetStale makes the kernel drop what it may know wrongly after a takeover:
// the last daemon may have died between moving the session to another commit
// and telling the kernel what changed.
func (s *Session) forgetStale() {
	delta, err := s.fs.Delta()
	if err != nil {
		return // the tree cannot be read: there is nothing right to show either
	}
	var entries []overlay.Key
	var inos []tree.Ino
	for _, n := range delta.Inodes {
		inos = append(inos, n.Ino)
	}
	s.base().Stack().Changes(0, func(c stack.Change) bool {
		if c.Dirent != nil {
			entries = append(entries, overlay.Key{Dir: c.Dirent.Dir, Name: c.Dirent.Name})
		} else {
			inos = append(inos, c.Inode)
		}
		return true
	})
	s.notify(entries, inos)
}

// opOf resolves the pid of a file system request to the operation whose command
// made it. It runs for every request.
func (s *Session) opOf(h *holder.Holder) func(pid uint32) tree.Op {
	return func(pid uint32) tree.Op {
		id, ok := h.CommandOf(pid)
		if !ok {
			return 0
		}
		return s.ops.byCommand(id)
	}
}

// Flush writes the dirty pages of shared mappings into the view, where one is
// mounted.
func (s *Session) Flush(ctx context.Context) error {
	s.mu.Lock()
	h := s.holder
	s.mu.Unlock()
	if h == nil {
		return nil
	}
	return h.Syncfs(ctx)
}

// Publish is Workspace.Publish with the mapped pages flushed first.
func (s *Session) Publish(ctx context.Context, r PublishRequest) (Publication, error) {
	leave, err := s.enter(Publishing)
	if err != nil {
		return Publication{}, err
	}
	defer leave()
	r.Flush = s.Flush
	return s.Workspace.Publish(ctx, r)
}

// Refresh is Workspace.Refresh with the mapped pages flushed first.
func (s *Session) Refresh(ctx context.Context, r RefreshRequest) (Refreshed, error) {
	leave, err := s.enter(Refreshing)
	if err != nil {
		return Refreshed{}, err
	}
	defer leave()
	r.Flush = s.Flush
	return s.Workspace.Refresh(ctx, r)
}

// enter shows a state while the gate works, and refuses a session that ends.
func (s *Session) enter(st State) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == Closing {
		return nil, fmt.Errorf("session %s: %w", s.Info.ID, ErrEnding)
	}
	s.gating = append(s.gating, st)
	return func() {
		s.mu.Lock()
		s.gating = slices.Delete(s.gating, slices.Index(s.gating, st), slices.Index(s.gating, st)+1)
		s.mu.Unlock()
	}, nil
}

// Stop ends the holder with every process in it, and waits until the last one
// is reaped and the view is gone.
func (s *Session) Stop() (processes int, err error) {
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	h, m := s.holder, s.mount
	s.state = Closing
	for _, c := range s.order {
		if c.cancel() {
			processes++
		}
	}
	s.mu.Unlock()
	// While the tree is frozen, processes that write cannot be killed: they wait
	// for an answer from us. Publications look at ending, and are soon over.
	s.end()
	s.gate.Lock()
	defer s.gate.Unlock()
	if h != nil {
		if err = h.Close(); errors.Is(err, holder.ErrStuck) {
			return processes, err // its mount would never end
		}
		err = errors.Join(err, m.Close())
	}
	s.waiters.Wait()
	return processes, err
}

// Close stops the session and lets go of its files, which stay.
func (s *Session) Close() error {
	_, err := s.Stop()
	return errors.Join(err, s.record.Close(), s.Workspace.Close())
}
