package session

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"ephemeral-sandbox/fs/access"
	"ephemeral-sandbox/fs/tree"
)

// Access is one operation's use of one path.
type Access struct {
	Operation string    `json:"operation"` // empty when not known
	Command   string    `json:"command,omitempty"`
	Kind      string    `json:"kind"`
	Path      string    `json:"-"`
	PathBytes []byte    `json:"path"` // a path need not be UTF-8
	Ino       tree.Ino  `json:"ino"`
	Count     uint64    `json:"count"`
	First     time.Time `json:"first"`
	Last      time.Time `json:"last"`
}

// Activity calls fn for everything that was read and written in the session,
// until fn returns false.
func (s *Session) Activity(fn func(Access) bool) error {
	named := map[tree.Ino]string{} // where inodes were seen that may have no name any more
	paths := pathNamer{s.fs, s.base().Stack(), named, map[tree.Ino]string{}}
	err := s.record.Each(func(e access.Entry) bool {
		if e.Name != "" && e.Ino != 0 && e.Kind != access.Remove {
			named[e.Ino] = paths.of(e)
		}
		return true
	})
	if err != nil {
		return err
	}
	clear(paths.known) // found before all was seen
	return s.record.Each(func(e access.Entry) bool {
		op, _ := s.ops.get(e.Op)
		a := Access{
			Operation: op.ID, Command: op.Command, Kind: e.Kind.String(), Path: paths.of(e), Ino: e.Ino,
			Count: e.Count, First: e.First, Last: e.Last,
		}
		a.PathBytes = []byte(a.Path)
		return fn(a)
	})
}

// pathNamer names what an access was about: by its directory and name where the
// access had a name, else by where the inode is now, was at the base, or was
// seen in the session.
type pathNamer struct {
	now interface {
		Path(tree.Ino) (string, error)
	}
	base interface {
		Path(tree.Ino) (string, error)
	}
	seen  map[tree.Ino]string
	known map[tree.Ino]string // answers so far
}

func (n pathNamer) of(e access.Entry) string {
	if e.Name != "" {
		return join(n.inode(e.Dir), e.Name)
	}
	return n.inode(e.Ino)
}

func (n pathNamer) inode(ino tree.Ino) string {
	p, ok := n.known[ino]
	if !ok {
		p = n.find(ino)
		n.known[ino] = p
	}
	return p
}

func (n pathNamer) find(ino tree.Ino) string {
	if p, err := n.now.Path(ino); err == nil {
		return p
	}
	if p, err := n.base.Path(ino); err == nil {
		return p
	}
	if p, ok := n.seen[ino]; ok {
		return p
	}
	return fmt.Sprintf("(inode %d)", ino)
}

// Ended is what is kept of a session that has ended: what it was, its
// transcripts, and who read and wrote what.
type Ended struct {
	Info Info
	Gaps uint64
	dir  string
}

// Retire ends the session and moves what is worth keeping of it to dir. The
// upper goes: what was not published is lost. After an error it can be called
// again; nothing is removed before all that is kept has its place.
func (s *Session) Retire(dir string) (processes int, err error) {
	processes, err = s.Stop()
	if err != nil {
		return processes, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return processes, fmt.Errorf("keep the record of session %s: %w", s.Info.ID, err)
	}
	if !s.kept {
		if err := s.keepActivity(filepath.Join(dir, "activity")); err != nil {
			return processes, err
		}
		s.kept = true
	}
	if err := errors.Join(s.record.Close(), s.Workspace.Close()); err != nil {
		return processes, err
	}
	// session.json last: without it the next daemon would take the directory for
	// rubbish while the transcripts are still in it.
	for _, name := range []string{"commands", "session.json"} {
		err := os.Rename(filepath.Join(s.dir, name), filepath.Join(dir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return processes, fmt.Errorf("keep the record of session %s: %w", s.Info.ID, err)
		}
	}
	return processes, os.RemoveAll(s.dir)
}

func (s *Session) keepActivity(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("keep activity: %w", err)
	}
	w := bufio.NewWriter(f)
	enc := json.NewEncoder(w)
	err = enc.Encode(struct {
		Gaps uint64 `json:"gaps"`
	}{s.record.Gaps()})
	if err == nil {
		e := s.Activity(func(a Access) bool {
			err = enc.Encode(a)
			return err == nil
		})
		err = errors.Join(err, e)
	}
	if err = errors.Join(err, w.Flush(), f.Close()); err != nil {
		return fmt.Errorf("keep activity: %w", err)
	}
	return nil
}

// OpenEnded reads what Retire kept in dir.
func OpenEnded(dir string) (*Ended, error) {
	raw, err := os.ReadFile(filepath.Join(dir, "session.json"))
	if err != nil {
		return nil, fmt.Errorf("read ended session: %w", err)
	}
	e := &Ended{dir: dir}
	if err := json.Unmarshal(raw, &e.Info); err != nil {
		return nil, fmt.Errorf("read ended session %s: %w", dir, err)
	}
	return e, nil
}

// Commands lists the session's commands with their transcripts.
func (e *Ended) Commands() ([]*Command, error) {
	return LoadCommands(filepath.Join(e.dir, "commands"))
}

// Activity is Session.Activity of a session that has ended; it fills in Gaps.
func (e *Ended) Activity(fn func(Access) bool) error {
	f, err := os.Open(filepath.Join(e.dir, "activity"))
	if err != nil {
		return fmt.Errorf("read activity: %w", err)
	}
	defer f.Close()
	dec := json.NewDecoder(bufio.NewReader(f))
	var head struct {
		Gaps uint64 `json:"gaps"`
	}
	if err := dec.Decode(&head); err != nil {
		return fmt.Errorf("read activity of session %s: %w", e.Info.ID, err)
	}
	e.Gaps = head.Gaps
	for {
		var a Access
		err := dec.Decode(&a)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read activity of session %s: %w", e.Info.ID, err)
		}
		a.Path = string(a.PathBytes)
		if !fn(a) {
			return nil
		}
	}
}
