package session

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"ephemeral-sandbox/attribution"
	"ephemeral-sandbox/daemon/store"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// history is a store as workspaces see it, with faults.
type history struct {
	*store.Store
	seal    error  // fails Seal
	advance error  // fails Advance
	lease   error  // fails the lease of a commit
	before  func() // runs before the next Advance, once
}

func (h *history) LeaseHead() (Lease, error) { return h.Store.LeaseHead() }

func (h *history) Lease(n uint64) (Lease, error) {
	if h.lease != nil {
		return nil, h.lease
	}
	return h.Store.Lease(n)
}

func (h *history) Seal(build func(*layerfmt.Writer) error) (Sealed, error) {
	if h.seal != nil {
		return nil, h.seal
	}
	return h.Store.Seal(build)
}

func (h *history) Advance(parent uint64, l Sealed, m Meta) (Commit, bool, error) {
	if f := h.before; f != nil {
		h.before = nil
		f()
	}
	if h.advance != nil {
		return Commit{}, false, h.advance
	}
	c, won, err := h.Store.Advance(parent, l.(*store.Sealed), store.CommitMeta(m))
	return Commit{Number: c.Number, StoredBytes: c.StoredBytes}, won, err
}

func (h *history) Origin(n uint64) (Meta, error) {
	c, err := h.Commit(n)
	return Meta(c.CommitMeta), err
}

// newHistory makes a store of one base layer with files in its root.
func newHistory(t *testing.T, files map[string]string) *history {
	t.Helper()
	s, err := store.Create(filepath.Join(t.TempDir(), "store"), store.Options{}, func(w *layerfmt.Writer) error {
		root := tree.Inode{Attr: tree.Attr{Ino: tree.RootIno, Kind: tree.Dir, Mode: 0o755, Nlink: 2}}
		if err := w.AddInode(root); err != nil {
			return err
		}
		ino := tree.RootIno
		for name, content := range files {
			ino++
			if err := w.AddDirent(layerfmt.Dirent{Op: layerfmt.Put, Dirent: tree.Dirent{Dir: tree.RootIno, Name: name, Ino: ino, Kind: tree.File}}); err != nil {
				return err
			}
			n := tree.Inode{Attr: tree.Attr{Ino: ino, Kind: tree.File, Mode: 0o644, Nlink: 1, Size: uint64(len(content))}}
			if _, err := w.AddFile(n, strings.NewReader(content), nil); err != nil {
				return err
			}
		}
		return nil
	})
	check(t, err)
	t.Cleanup(func() { check(t, s.Close()) })
	return &history{Store: s}
}

// agent is a workspace and the number of its last operation.
type agent struct {
	t *testing.T
	*Workspace
	dir string
	n   int
}

func openAgent(t *testing.T, h History, dir, id string) *agent {
	t.Helper()
	w, err := OpenWorkspace(dir, id, Options{History: h})
	check(t, err)
	return &agent{t: t, Workspace: w, dir: dir}
}

func newAgent(t *testing.T, h History, id string) *agent {
	t.Helper()
	a := openAgent(t, h, filepath.Join(t.TempDir(), id), id)
	t.Cleanup(func() { check(t, a.Workspace.Close()) })
	return a
}

// op begins another operation.
func (a *agent) op() Operation {
	a.t.Helper()
	a.n++
	op, err := a.Begin(Operation{ID: fmt.Sprintf("%s-%d", a.id, a.n), Kind: "test"})
	check(a.t, err)
	return op
}

func (a *agent) write(path, content string) {
	a.t.Helper()
	_, err := a.WriteFile(a.op(), Unrecorded{}, path, []byte(content))
	check(a.t, err)
}

// overwriteInPlace changes a file as a program does that opens it for writing.
func (a *agent) overwriteInPlace(path, content string) {
	a.t.Helper()
	op := a.op()
	n, err := Walk(a.Tree(op.Number, Unrecorded{}), path)
	check(a.t, err)
	c := overlay.Caller{Op: op.Number}
	check(a.t, writeAll(a.fs, c, n.Ino, []byte(content)))
	size := uint64(len(content))
	_, err = a.fs.SetAttr(c, n.Ino, overlay.SetAttr{Size: &size})
	check(a.t, err)
}

func (a *agent) read(path string) string {
	a.t.Helper()
	_, b, err := ReadFile(a.Tree(0, Unrecorded{}), path)
	check(a.t, err)
	return string(b)
}

func (a *agent) publish() (Publication, error) {
	return a.Publish(a.t.Context(), PublishRequest{Operation: a.op()})
}

func (a *agent) publishes() Publication {
	a.t.Helper()
	p, err := a.publish()
	check(a.t, err)
	return p
}

func (a *agent) refreshes() Refreshed {
	a.t.Helper()
	r, err := a.Refresh(a.t.Context(), RefreshRequest{Operation: a.op()})
	check(a.t, err)
	return r
}

// owners gives the session that owns each line, "" where it is original.
func owners(t *testing.T, list []attribution.Range) []string {
	t.Helper()
	var out []string
	for _, r := range list {
		if r.Start != len(out)+1 {
			t.Fatalf("a range starts at line %d, where %d is due", r.Start, len(out)+1)
		}
		o := r.Origin.Owner()
		switch r.Origin.Kind {
		case attribution.Original:
			o = ""
		case attribution.Session:
			o = r.Origin.Session
		}
		out = append(out, slices.Repeat([]string{o}, r.Count)...)
	}
	return out
}

func headBlame(t *testing.T, h History, path string) (string, []string) {
	t.Helper()
	l, err := h.LeaseHead()
	check(t, err)
	defer l.Release()
	_, b, err := ReadFile(AtCommit(l), path)
	check(t, err)
	r, err := BlameAt(l, path)
	check(t, err)
	return string(b), owners(t, r)
}

// TestOwnersAgainstModel lets agents edit, save over, publish and refresh files
// whose lines are all different, so that who wrote a line is known by its text.
func TestOwnersAgainstModel(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { ownersAgainstModel(t, rand.New(rand.NewPCG(seed, 7))) })
	}
}

func ownersAgainstModel(t *testing.T, r *rand.Rand) {
	files := map[string]string{}
	names := []string{"a", "b"}
	writer := map[string]string{} // of each line
	next := 0
	line := func(who string) string {
		next++
		l := fmt.Sprintf("token %d\n", next)
		writer[l] = who
		return l
	}
	for _, n := range names {
		for range 12 {
			files[n] += line("")
		}
	}
	h := newHistory(t, files)
	agents := []*agent{newAgent(t, h, "s0"), newAgent(t, h, "s1"), newAgent(t, h, "s2")}
	verify := func(when, content string, got []string) {
		t.Helper()
		lines := strings.SplitAfter(content, "\n")
		lines = lines[:len(lines)-1]
		if len(lines) != len(got) {
			t.Fatalf("%s: %d lines have %d owners", when, len(lines), len(got))
		}
		for i, l := range lines {
			want, known := writer[l]
			if known && got[i] != want {
				t.Fatalf("%s: line %d, %q, is owned by %q, want %q", when, i+1, l, got[i], want)
			}
		}
	}
	marker := func(l string) bool {
		return strings.HasPrefix(l, "<<<<<<<") || strings.HasPrefix(l, "|||||||") || strings.HasPrefix(l, "=======") || strings.HasPrefix(l, ">>>>>>>")
	}
	for step := range 120 {
		i := r.IntN(len(agents))
		a, name := agents[i], names[r.IntN(len(names))]
		when := fmt.Sprintf("step %d, %s of %s", step, name, a.id)
		switch k := r.IntN(10); {
		case k < 6:
			lines := strings.SplitAfter(a.read(name), "\n")
			lines = lines[:len(lines)-1]
			at := r.IntN(len(lines) + 1)
			switch r.IntN(3) {
			case 0:
				lines = slices.Insert(lines, at, line(a.id))
			case 1:
				if at < len(lines) && len(lines) > 4 {
					lines = slices.Delete(lines, at, at+1)
				}
			default:
				if at < len(lines) {
					lines[at] = line(a.id)
				}
			}
			if text := strings.Join(lines, ""); r.IntN(2) == 0 {
				a.write(name, text)
			} else {
				a.overwriteInPlace(name, text)
			}
		case k < 8:
			_, err := a.publish()
			if _, clash := errors.AsType[*ConflictError](err); clash {
				a.refreshes()
				for _, n := range names {
					text := a.read(n)
					if !strings.Contains(text, "<<<<<<<") {
						continue
					}
					verify(when+" with markers", text, blameOf(t, a, n))
					lines := slices.DeleteFunc(strings.SplitAfter(text, "\n"), marker)
					a.write(n, strings.Join(lines, ""))
				}
				_, err = a.publish()
			}
			check(t, err)
			for _, n := range names {
				content, got := headBlame(t, h, n)
				verify(when+", the head", content, got)
			}
		case k < 9:
			r := a.refreshes()
			for _, c := range r.Conflicts {
				lines := slices.DeleteFunc(strings.SplitAfter(a.read(c.Path), "\n"), marker)
				a.write(c.Path, strings.Join(lines, ""))
			}
		default: // a daemon that begins anew
			check(t, a.Workspace.Close())
			n := a.n
			*a = *openAgent(t, h, a.dir, a.id)
			a.n = n
		}
		verify(when, a.read(name), blameOf(t, a, name))
	}
}

func blameOf(t *testing.T, a *agent, path string) []string {
	t.Helper()
	r, err := a.Blame(path)
	check(t, err)
	return owners(t, r)
}

// TestPublishFaults fails each step of a publication. The head stays or moves,
// and the workspace can go on either way.
func TestPublishFaults(t *testing.T) {
	full := fmt.Errorf("write: %w", syscall.ENOSPC)
	for name, fail := range map[string]func(*history){
		"seal":    func(h *history) { h.seal = full },
		"advance": func(h *history) { h.advance = full },
		"land":    func(h *history) { h.lease = full },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHistory(t, map[string]string{"f": "1\n2\n"})
			a := newAgent(t, h, "s")
			a.write("f", "one\n2\n")
			a.write("new", "n\n")
			fail(h)
			p, err := a.publish()
			*h = history{Store: h.Store}
			if name == "land" {
				// It is committed, whatever came after.
				if h.HeadCommit().Number != 1 {
					t.Fatalf("the head is %d", h.HeadCommit().Number)
				}
				if err != nil && p.Commit != 1 {
					t.Errorf("published %+v, %v", p, err)
				}
				// The next one finds nothing new, and stands on the commit.
				if p := a.publishes(); p.Committed || p.Commit != 1 || a.Base() != 1 {
					t.Errorf("published again %+v, base %d", p, a.Base())
				}
			} else {
				if !errors.Is(err, syscall.ENOSPC) || h.HeadCommit().Number != 0 || a.Base() != 0 {
					t.Fatalf("published %+v, %v; the head is %d", p, err, h.HeadCommit().Number)
				}
				if p := a.publishes(); !p.Committed || p.Commit != 1 {
					t.Errorf("published again %+v", p)
				}
			}
			content, got := headBlame(t, h, "f")
			if content != "one\n2\n" || !slices.Equal(got, []string{"s", ""}) {
				t.Errorf("the head holds %q of %q", content, got)
			}
			if d, err := a.Diff(t.Context(), DiffRequest{}); err != nil || len(d) > 0 {
				t.Errorf("the workspace differs in %+v, %v", d, err)
			}
			if rep, err := h.Verify(t.Context()); err != nil || len(rep.Problems) > 0 {
				t.Errorf("%+v, %v", rep, err)
			}
		})
	}
}

// TestLostRace has another commit land between the check and the commit.
func TestLostRace(t *testing.T) {
	h := newHistory(t, map[string]string{"f": "1\n2\n3\n4\n5\n"})
	a, b := newAgent(t, h, "a"), newAgent(t, h, "b")
	a.write("f", "A\n2\n3\n4\n5\n")
	b.write("f", "1\n2\n3\n4\nB\n")
	h.before = func() { b.publishes() }
	p := a.publishes()
	if p.Commit != 2 || p.Parent != 1 || !slices.Equal(p.Merged, []string{"f"}) {
		t.Errorf("published %+v", p)
	}
	content, got := headBlame(t, h, "f")
	if content != "A\n2\n3\n4\nB\n" || !slices.Equal(got, []string{"a", "", "", "", "b"}) {
		t.Errorf("the head holds %q of %q", content, got)
	}
	// One that contradicts what lands first is refused.
	a.write("f", "AA\n2\n3\n4\nB\n")
	b.refreshes()
	b.write("f", "BB\n2\n3\n4\nB\n")
	h.before = func() { b.publishes() }
	if _, err := a.publish(); !errors.As(err, new(*ConflictError)) {
		t.Errorf("published: %v", err)
	}
	if h.HeadCommit().Number != 3 || a.read("f") != "AA\n2\n3\n4\nB\n" {
		t.Errorf("the head is %d, the workspace holds %q", h.HeadCommit().Number, a.read("f"))
	}
}

// TestOperationTableTorn cuts the table of operations anywhere.
func TestOperationTableTorn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "operations")
	ops, err := openOps(path)
	check(t, err)
	for i := range 3 {
		_, err := ops.add(Operation{ID: fmt.Sprint("op", i), Command: "c\nd"})
		check(t, err)
	}
	check(t, ops.close())
	whole, err := os.ReadFile(path)
	check(t, err)
	ends := 0
	for cut := 0; cut <= len(whole); cut++ {
		check(t, os.WriteFile(path, whole[:cut], 0o600))
		ops, err := openOps(path)
		check(t, err)
		if cut > 0 && whole[cut-1] == '\n' {
			ends++
		}
		if got := len(ops.list); got != ends {
			t.Fatalf("cut at %d: %d operations, want %d", cut, got, ends)
		}
		op, err := ops.add(Operation{ID: "more"})
		check(t, err)
		if int(op.Number) != ends+1 {
			t.Fatalf("cut at %d: the next is number %d", cut, op.Number)
		}
		check(t, ops.close())
		again, err := openOps(path)
		check(t, err)
		if _, ok := again.find("more"); !ok {
			t.Fatalf("cut at %d: the next is lost", cut)
		}
		check(t, again.close())
	}
}

func sampleOwners() fileOwners {
	text := []byte("a\nb\nc\n")
	lines, _, _ := attribution.HashLines(bytes.NewReader(text))
	return fileOwners{lines: lines, spans: attribution.FileSpans{Lines: 3, Spans: attribution.Whole(3, attribution.Origin{Kind: attribution.Session, Session: "s", Operation: "o"})}}
}

// FuzzOwners reads owner files that are damaged: they are refused, or they are
// what was written.
func FuzzOwners(f *testing.F) {
	good := encodeOwners(5, sampleOwners())
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		o, ok := decodeOwners(5, b)
		if ok && !bytes.Equal(encodeOwners(5, o), b) {
			t.Error("another state than the one read")
		}
	})
}

// TestStatesOverlap enters and leaves the gate's states in every order.
func TestStatesOverlap(t *testing.T) {
	for _, order := range [][2]int{{0, 1}, {1, 0}} {
		s := &Session{state: Ready}
		var leave [2]func()
		for i, st := range []State{Publishing, Refreshing} {
			var err error
			leave[i], err = s.enter(st)
			check(t, err)
			if got, _, _ := s.Status(); got != Publishing && got != Refreshing {
				t.Errorf("in the gate it is %s", got)
			}
		}
		leave[order[0]]()
		leave[order[1]]()
		if got, _, _ := s.Status(); got != Ready {
			t.Errorf("left in the order %v it is %s", order, got)
		}
	}
}

// TestAttributesPublished publishes extended attributes alone, keeps those of
// both sides, and refuses one with two values.
func TestAttributesPublished(t *testing.T) {
	h := newHistory(t, map[string]string{"f": "1\n"})
	a, b := newAgent(t, h, "a"), newAgent(t, h, "b")
	set := func(w *agent, name, value string) {
		t.Helper()
		n, err := Walk(w.Tree(0, Unrecorded{}), "f")
		check(t, err)
		check(t, w.fs.SetXattr(overlay.Caller{Op: w.op().Number}, n.Ino, name, []byte(value), 0))
	}
	set(a, "user.a", "1")
	set(b, "user.b", "2")
	b.overwriteInPlace("f", "1\n2\n")
	if p := a.publishes(); p.Commit != 1 {
		t.Errorf("published %+v", p)
	}
	b.publishes()
	l, err := h.LeaseHead()
	check(t, err)
	defer l.Release()
	n, err := Walk(AtCommit(l), "f")
	check(t, err)
	got := ""
	for _, x := range n.Xattrs {
		got += x.Name + "=" + string(x.Value) + " "
	}
	if got != "user.a=1 user.b=2 " {
		t.Errorf("the head has attributes %s", got)
	}
	content, who := headBlame(t, h, "f")
	if content != "1\n2\n" || !slices.Equal(who, []string{"", "b"}) {
		t.Errorf("the head holds %q of %q", content, who)
	}
	a.refreshes()
	set(a, "user.b", "mine")
	set(b, "user.b", "yours")
	b.publishes()
	_, err = a.publish()
	c, ok := errors.AsType[*ConflictError](err)
	if !ok || len(c.Conflicts) != 1 || c.Conflicts[0].Kind != "xattr" {
		t.Errorf("published: %+v, %v", c, err)
	}
}
