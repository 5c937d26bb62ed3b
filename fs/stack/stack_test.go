package stack_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// tb is what testing.T and rapid.T have in common.
type tb interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// pack writes a pack with build and opens it.
func pack(t tb, name string, kind layerfmt.PackKind, build func(w *layerfmt.Writer) error) *layerfmt.Reader {
	t.Helper()
	var b bytes.Buffer
	w := layerfmt.NewWriter(&b, layerfmt.WriterOptions{Kind: kind})
	defer w.Abort()
	if err := build(w); err != nil {
		t.Fatalf("write %s: %v", name, err)
	}
	if _, err := w.Finish(); err != nil {
		t.Fatalf("finish %s: %v", name, err)
	}
	r, err := layerfmt.Open(bytes.NewReader(b.Bytes()), int64(b.Len()), layerfmt.ReaderOptions{Name: name})
	if err != nil {
		t.Fatalf("open %s: %v", name, err)
	}
	return r
}

func put(dir tree.Ino, name string, ino tree.Ino, kind tree.Kind) layerfmt.Dirent {
	return layerfmt.Dirent{Dirent: tree.Dirent{Dir: dir, Name: name, Ino: ino, Kind: kind}}
}

func whiteout(dir tree.Ino, name string) layerfmt.Dirent {
	return layerfmt.Dirent{Op: layerfmt.Whiteout, Dirent: tree.Dirent{Dir: dir, Name: name}}
}

func inode(ino tree.Ino, kind tree.Kind) tree.Inode {
	n := tree.Inode{Attr: tree.Attr{Ino: ino, Kind: kind, Mode: 0o755, Nlink: 1}}
	if kind == tree.Symlink {
		n.Link = "target"
	}
	return n
}

// all writes records of every sort the tests use.
func all(records ...any) func(w *layerfmt.Writer) error {
	return func(w *layerfmt.Writer) error {
		var errs []error
		for _, r := range records {
			switch r := r.(type) {
			case layerfmt.Dirent:
				errs = append(errs, w.AddDirent(r))
			case tree.Inode:
				errs = append(errs, w.AddInode(r))
			case file:
				n := inode(r.ino, tree.File)
				n.Size = uint64(len(r.text))
				_, err := w.AddFile(n, strings.NewReader(r.text), nil)
				errs = append(errs, err)
			case foreign:
				n := inode(r.ino, tree.File)
				n.Size, n.Alloc, n.Hash = uint64(len(r.text)), uint64(len(r.text)), sha256.Sum256([]byte(r.text))
				errs = append(errs, w.AddForeign(n, r.pack, r.from))
			default:
				errs = append(errs, fmt.Errorf("record of type %T", r))
			}
		}
		return errors.Join(errs...)
	}
}

type file struct {
	ino  tree.Ino
	text string
}

type foreign struct {
	ino  tree.Ino
	text string
	pack layerfmt.PackID
	from tree.Ino
}

func mustNew(t tb, r *layerfmt.Reader) *stack.Stack {
	t.Helper()
	s, err := stack.New(r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustApply(t tb, s *stack.Stack, records ...any) *stack.Stack {
	t.Helper()
	n := s.Commit() + 1
	next, err := s.Apply(n, pack(t, fmt.Sprint("layer ", n), layerfmt.Delta, all(records...)))
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// small is a base with a directory, two files in it, and one file beside it.
func small(t tb) *stack.Stack {
	return mustNew(t, pack(t, "base", layerfmt.Base, all(
		inode(1, tree.Dir), inode(2, tree.Dir),
		file{3, "three"}, file{4, "four"}, file{5, "five"},
		put(1, "d", 2, tree.Dir), put(2, "a", 3, tree.File), put(2, "b", 4, tree.File), put(1, "top", 5, tree.File),
	)))
}

func listing(t tb, s *stack.Stack, dir tree.Ino) string {
	t.Helper()
	var names []string
	err := s.ReadDir(dir, "", func(d tree.Dirent) bool {
		names = append(names, fmt.Sprintf("%s=%d", d.Name, d.Ino))
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(names, " ")
}

func content(t tb, s *stack.Stack, ino tree.Ino) string {
	t.Helper()
	f, err := s.Open(ino)
	if err != nil {
		t.Fatalf("open inode %d: %v", ino, err)
	}
	b := make([]byte, f.Size())
	if n, err := f.ReadAt(b, 0); n != len(b) || err != nil && err != io.EOF {
		t.Fatalf("read inode %d: %d of %d bytes: %v", ino, n, len(b), err)
	}
	return string(b)
}

func TestOpaqueHidesWhatIsBeneathAndNotWhatIsBeside(t *testing.T) {
	s := small(t)
	s = mustApply(t, s, file{6, "six"}, put(2, "c", 6, tree.File))
	s = mustApply(t, s,
		layerfmt.Dirent{Op: layerfmt.Opaque, Dirent: tree.Dirent{Dir: 2}},
		file{7, "seven"}, put(2, "b", 7, tree.File))
	if got, want := listing(t, s, 2), "b=7"; got != want {
		t.Errorf("directory under an opaque record lists %q, want %q", got, want)
	}
	for name, want := range map[string]uint64{"a": 2, "b": 2, "c": 2, "z": 0} {
		if got := s.DirentChanged(2, name); got != want {
			t.Errorf("DirentChanged(2, %q) = %d, want %d", name, got, want)
		}
	}
	var changed []string
	s.Changes(1, func(c stack.Change) bool {
		if c.Dirent != nil {
			changed = append(changed, fmt.Sprintf("%s=%d", c.Dirent.Name, c.Dirent.Ino))
		}
		return true
	})
	if want := []string{"a=0", "b=7", "c=0"}; !slices.Equal(changed, want) {
		t.Errorf("changes of the opaque commit: %q, want %q", changed, want)
	}
}

func TestRecreatedDirectoryIsEmpty(t *testing.T) {
	s := mustApply(t, small(t), inode(9, tree.Dir), put(1, "d", 9, tree.Dir))
	if got := listing(t, s, 9); got != "" {
		t.Errorf("recreated directory lists %q", got)
	}
	if _, err := s.Path(3); !errors.Is(err, tree.ErrNotExist) {
		t.Errorf("path of a file in the old directory: %v, want %v", err, tree.ErrNotExist)
	}
	if names, err := s.Names(3); err != nil || len(names) != 0 {
		t.Errorf("names of a file in the old directory: %v, %v; want none", names, err)
	}
	if _, err := s.Inode(3); err != nil {
		t.Errorf("inode of a file in the old directory: %v, want its record", err)
	}
}

func TestRenameOfADirectoryTakesItsChildrenAlong(t *testing.T) {
	s := small(t)
	s = mustApply(t, s, whiteout(1, "d"), put(1, "e", 2, tree.Dir))
	if got, err := s.Path(3); got != "e/a" || err != nil {
		t.Errorf("path = %q, %v; want e/a", got, err)
	}
	if _, err := s.Resolve("d/a"); !errors.Is(err, tree.ErrNotExist) {
		t.Errorf("old path: %v, want %v", err, tree.ErrNotExist)
	}
	if d, err := s.Resolve("/e//./a"); err != nil || d.Ino != 3 {
		t.Errorf("new path: %+v, %v; want inode 3", d, err)
	}
	if _, err := s.Resolve("top/x"); !errors.Is(err, tree.ErrNotDir) {
		t.Errorf("path through a file: %v, want %v", err, tree.ErrNotDir)
	}
	if d, err := s.Resolve(""); err != nil || d.Ino != tree.RootIno || d.Kind != tree.Dir {
		t.Errorf("root resolves to %+v, %v", d, err)
	}
}

func TestForeignContent(t *testing.T) {
	s := small(t)
	base := s.Layer(0).ID()
	s = mustApply(t, s, foreign{3, "three", base, 0}, foreign{8, "five", base, 5}, put(1, "copy", 8, tree.File))
	if got := content(t, s, 3) + content(t, s, 8); got != "threefive" {
		t.Errorf("foreign content reads %q", got)
	}
	if id, from, err := s.Locate(8); id != base || from != 5 || err != nil {
		t.Errorf("Locate(8) = %v, %d, %v; want the base, 5", id, from, err)
	}
	if commit, _, err := s.Holder(8); commit != 1 || err != nil {
		t.Errorf("Holder(8) = %d, %v; want 1", commit, err)
	}

	for name, rec := range map[string]foreign{
		"an unknown pack":  {3, "three", layerfmt.PackID{1}, 0},
		"an unknown inode": {3, "three", base, 77},
		"a directory":      {3, "three", base, 2},
		"other bytes":      {3, "throe", base, 0},
	} {
		bad := mustApply(t, s, rec)
		if _, err := bad.Open(3); !layerfmt.IsCorrupt(err) {
			t.Errorf("content said to be in %s: %v, want a corrupt layer", name, err)
		}
	}
}

func TestOpenRefusesWhatIsNoFile(t *testing.T) {
	s := mustApply(t, small(t), inode(9, tree.Symlink), put(1, "l", 9, tree.Symlink))
	for ino, want := range map[tree.Ino]error{1: tree.ErrIsDir, 9: tree.ErrInvalid, 99: tree.ErrNotExist} {
		if _, err := s.Open(ino); !errors.Is(err, want) {
			t.Errorf("Open(%d): %v, want %v", ino, err, want)
		}
	}
}

func TestApplyRefusesWhatIsNoTree(t *testing.T) {
	for name, records := range map[string][]any{
		"a name without an inode":          {put(1, "x", 99, tree.File)},
		"a name of another kind":           {put(1, "x", 3, tree.Dir)},
		"a name in a file":                 {put(5, "x", 3, tree.File)},
		"a name in a directory unknown":    {put(88, "x", 3, tree.File)},
		"a second name of a directory":     {put(1, "x", 2, tree.Dir)},
		"a name of the root":               {put(2, "x", 1, tree.Dir)},
		"a name in a removed directory":    {whiteout(1, "d"), put(2, "x", 5, tree.File)},
		"a directory moved beneath itself": {inode(7, tree.Dir), put(2, "sub", 7, tree.Dir), whiteout(1, "d"), put(7, "d", 2, tree.Dir)},
	} {
		t.Run(name, func(t *testing.T) {
			s := small(t)
			_, err := s.Apply(1, pack(t, "layer", layerfmt.Delta, all(records...)))
			if !errors.Is(err, tree.ErrInvalid) {
				t.Errorf("Apply: %v, want %v", err, tree.ErrInvalid)
			}
			if got, want := listing(t, s, 1), "d=2 top=5"; got != want {
				t.Errorf("the tree beneath now lists %q, want %q", got, want)
			}
		})
	}
	s := small(t)
	if _, err := s.Apply(2, s.Layer(0)); !errors.Is(err, tree.ErrInvalid) {
		t.Errorf("Apply of commit 2 on 0: %v, want %v", err, tree.ErrInvalid)
	}
}

func TestNewRefusesABaseWithoutARoot(t *testing.T) {
	r := pack(t, "base", layerfmt.Base, all(inode(2, tree.Dir)))
	if _, err := stack.New(r); !errors.Is(err, tree.ErrInvalid) {
		t.Errorf("New: %v, want %v", err, tree.ErrInvalid)
	}
}

func TestClimbLeavesACircle(t *testing.T) {
	// No layer that Apply takes makes one; a base is taken as it is.
	s := mustNew(t, pack(t, "base", layerfmt.Base, all(
		inode(1, tree.Dir), inode(2, tree.Dir), inode(3, tree.Dir), inode(4, tree.Dir), file{5, "x"},
		put(3, "a", 2, tree.Dir), put(4, "b", 3, tree.Dir), put(2, "c", 4, tree.Dir), put(2, "f", 5, tree.File),
	)))
	if _, err := s.Path(5); !errors.Is(err, tree.ErrNotExist) {
		t.Errorf("path out of a circle of directories: %v, want %v", err, tree.ErrNotExist)
	}
}

func TestReadDirOfManyChanges(t *testing.T) {
	records := []any{whiteout(2, "a")}
	want := []string{"b"}
	for i := range 300 {
		ino := tree.Ino(10 + i)
		name := fmt.Sprintf("c%03d", i)
		records = append(records, inode(ino, tree.Fifo), put(2, name, ino, tree.Fifo))
		want = append(want, name)
	}
	s := mustApply(t, small(t), records...)
	for from, i := range map[string]int{"": 0, "b": 0, "c": 1, "c063": 64, "c064": 65, "c2991": 301, "d": 301} {
		var got []string
		err := s.ReadDir(2, from, func(d tree.Dirent) bool {
			got = append(got, d.Name)
			return true
		})
		if err != nil || !slices.Equal(got, want[i:]) {
			t.Errorf("from %q: %d names, %v; want %d", from, len(got), err, len(want)-i)
		}
	}
}

// model is a tree as two plain maps, with the commits that changed each key.
type model struct {
	names  map[key]entry
	inodes map[tree.Ino]record

	nameCommit    map[key]uint64
	inodeCommit   map[tree.Ino]uint64
	subtreeCommit map[tree.Ino]uint64
	changes       [][]string // of each commit
}

type key struct {
	dir  tree.Ino
	name string
}

type entry struct {
	ino  tree.Ino
	kind tree.Kind
}

type record struct {
	kind tree.Kind
	mode uint32
	text string // of a file
}

func newModel() *model {
	return &model{
		names: map[key]entry{}, inodes: map[tree.Ino]record{tree.RootIno: {kind: tree.Dir, mode: 0o755}},
		nameCommit: map[key]uint64{}, inodeCommit: map[tree.Ino]uint64{}, subtreeCommit: map[tree.Ino]uint64{},
	}
}

func (m *model) clone() *model {
	return &model{
		names: maps.Clone(m.names), inodes: maps.Clone(m.inodes),
		nameCommit: maps.Clone(m.nameCommit), inodeCommit: maps.Clone(m.inodeCommit),
		subtreeCommit: maps.Clone(m.subtreeCommit), changes: slices.Clone(m.changes),
	}
}

func compareKeys(a, b key) int {
	if a.dir != b.dir {
		return int(a.dir) - int(b.dir)
	}
	return strings.Compare(a.name, b.name)
}

// list returns what is in a directory, in order.
func (m *model) list(dir tree.Ino) []tree.Dirent {
	var out []tree.Dirent
	for k, e := range m.names {
		if k.dir == dir {
			out = append(out, tree.Dirent{Dir: dir, Name: k.name, Ino: e.ino, Kind: e.kind})
		}
	}
	slices.SortFunc(out, func(a, b tree.Dirent) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// paths maps every inode that can be reached to the directories above it, and
// fills in the names in order of their keys.
func (m *model) reach() (names map[tree.Ino][]tree.Dirent, above map[tree.Ino]map[tree.Ino]bool, path map[tree.Ino]string) {
	names = map[tree.Ino][]tree.Dirent{}
	above = map[tree.Ino]map[tree.Ino]bool{tree.RootIno: {}}
	path = map[tree.Ino]string{tree.RootIno: ""}
	var visit func(dir tree.Ino)
	visit = func(dir tree.Ino) {
		for _, d := range m.list(dir) {
			names[d.Ino] = append(names[d.Ino], d)
			if above[d.Ino] == nil {
				above[d.Ino] = map[tree.Ino]bool{}
			}
			maps.Copy(above[d.Ino], above[dir])
			above[d.Ino][dir] = true
			if d.Kind == tree.Dir {
				path[d.Ino] = strings.TrimPrefix(path[dir]+"/"+d.Name, "/")
				visit(d.Ino)
			}
		}
	}
	visit(tree.RootIno)
	for ino, all := range names {
		slices.SortFunc(all, func(a, b tree.Dirent) int {
			return compareKeys(key{a.Dir, a.Name}, key{b.Dir, b.Name})
		})
		path[ino] = strings.TrimPrefix(path[all[0].Dir]+"/"+all[0].Name, "/")
	}
	return names, above, path
}

// editor makes random changes to a model and remembers the keys it touched.
type editor struct {
	*rapid.T
	m      *model
	next   *tree.Ino
	names  map[key]bool
	inodes map[tree.Ino]bool
	data   map[tree.Ino]bool // inodes whose bytes changed
}

func newEditor(t *rapid.T, m *model, next *tree.Ino) *editor {
	return &editor{T: t, m: m, next: next, names: map[key]bool{}, inodes: map[tree.Ino]bool{}, data: map[tree.Ino]bool{}}
}

var nameGen = rapid.SampledFrom([]string{"a", "b", "c", "d", ".wh.a", "\xff\xfe"})

func (e *editor) set(k key, to entry) {
	e.names[k] = true
	if to.ino == 0 {
		delete(e.m.names, k)
	} else {
		e.m.names[k] = to
	}
}

func (e *editor) add(k key, r record) {
	ino := *e.next
	*e.next++
	e.m.inodes[ino] = r
	e.inodes[ino], e.data[ino] = true, true
	e.set(k, entry{ino, r.kind})
}

// dirs returns the directories in the tree, in order.
func (e *editor) dirs() []tree.Ino {
	_, above, _ := e.m.reach()
	var out []tree.Ino
	for _, ino := range slices.Sorted(maps.Keys(above)) {
		if e.m.inodes[ino].kind == tree.Dir {
			out = append(out, ino)
		}
	}
	return out
}

// pick returns a name in the tree, if there is one.
func (e *editor) pick(label string) (key, entry, bool) {
	names, _, _ := e.m.reach()
	var all []key
	for _, ds := range names {
		for _, d := range ds {
			all = append(all, key{d.Dir, d.Name})
		}
	}
	if len(all) == 0 {
		return key{}, entry{}, false
	}
	slices.SortFunc(all, compareKeys)
	k := rapid.SampledFrom(all).Draw(e.T, label)
	return k, e.m.names[k], true
}

func (e *editor) place(label string) key {
	dir := rapid.SampledFrom(e.dirs()).Draw(e.T, label+" dir")
	return key{dir, nameGen.Draw(e.T, label+" name")}
}

func (e *editor) text() string { return rapid.StringN(0, 5, 20).Draw(e.T, "text") }

func (e *editor) step() {
	switch rapid.SampledFrom([]string{
		"create", "mkdir", "symlink", "link", "remove", "rename", "rename", "write", "chmod", "recreate", "remake", "touch name",
	}).Draw(e.T, "op") {
	case "create":
		e.add(e.place("at"), record{tree.File, 0o644, e.text()})
	case "mkdir":
		e.add(e.place("at"), record{kind: tree.Dir, mode: 0o755})
	case "symlink":
		e.add(e.place("at"), record{kind: tree.Symlink, mode: 0o777})
	case "link":
		if _, what, ok := e.pick("what"); ok && what.kind != tree.Dir {
			if to := e.place("to"); e.m.names[to].ino == 0 {
				e.set(to, what)
				e.inodes[what.ino] = true
			}
		}
	case "remove":
		if k, _, ok := e.pick("what"); ok {
			e.set(k, entry{})
		}
	case "rename":
		from, what, ok := e.pick("what")
		if !ok {
			return
		}
		to := e.place("to")
		if _, above, _ := e.m.reach(); what.kind == tree.Dir && (to.dir == what.ino || above[to.dir][what.ino]) {
			return
		}
		if to == from {
			return
		}
		e.set(to, what)
		e.set(from, entry{})
	case "write":
		if _, what, ok := e.pick("what"); ok && what.kind == tree.File {
			r := e.m.inodes[what.ino]
			r.text = e.text()
			e.m.inodes[what.ino] = r
			e.inodes[what.ino], e.data[what.ino] = true, true
		}
	case "chmod":
		if _, what, ok := e.pick("what"); ok && what.kind != tree.Symlink {
			r := e.m.inodes[what.ino]
			r.mode = uint32(rapid.IntRange(0, 0o7777).Draw(e.T, "mode"))
			e.m.inodes[what.ino] = r
			e.inodes[what.ino] = true
		}
	case "recreate":
		if k, what, ok := e.pick("what"); ok {
			e.add(k, record{what.kind, 0o700, ""})
		}
	case "remake": // rm -r, with a record for every name beneath, then mkdir
		k, what, ok := e.pick("what")
		if !ok || what.kind != tree.Dir {
			return
		}
		_, above, _ := e.m.reach()
		for _, d := range slices.SortedFunc(maps.Keys(e.m.names), compareKeys) {
			if d.dir == what.ino || above[d.dir][what.ino] {
				e.set(d, entry{})
			}
		}
		e.add(k, record{kind: tree.Dir, mode: 0o755})
	case "touch name": // a record that says what was so anyway
		k := e.place("at")
		e.set(k, e.m.names[k])
	}
}

// dropUnreachable forgets changes that no sealer would write: names put into a
// directory that is gone, and inodes of which no name is left.
func (e *editor) dropUnreachable(before *model) {
	_, above, _ := e.m.reach()
	for k := range e.names {
		if above[k.dir] == nil && e.m.names[k].ino != 0 {
			delete(e.names, k)
			restore(e.m.names, before.names, k)
		}
	}
	for ino := range e.inodes {
		if above[ino] == nil {
			delete(e.inodes, ino)
			restore(e.m.inodes, before.inodes, ino)
		}
	}
}

func restore[K comparable, V any](m, before map[K]V, k K) {
	if v, ok := before[k]; ok {
		m[k] = v
	} else {
		delete(m, k)
	}
}

// write writes the touched keys as a layer on top of before.
func (e *editor) write(before *stack.Stack, opaque map[tree.Ino]bool) func(w *layerfmt.Writer) error {
	return func(w *layerfmt.Writer) error {
		for dir := range opaque {
			if err := w.AddDirent(layerfmt.Dirent{Op: layerfmt.Opaque, Dirent: tree.Dirent{Dir: dir}}); err != nil {
				return err
			}
		}
		for k := range e.names {
			d := whiteout(k.dir, k.name)
			if to := e.m.names[k]; to.ino != 0 {
				d = put(k.dir, k.name, to.ino, to.kind)
			}
			if err := w.AddDirent(d); err != nil {
				return err
			}
		}
		for ino := range e.inodes {
			if err := e.writeInode(w, before, ino); err != nil {
				return err
			}
		}
		return nil
	}
}

func (e *editor) writeInode(w *layerfmt.Writer, before *stack.Stack, ino tree.Ino) error {
	r := e.m.inodes[ino]
	n := inode(ino, r.kind)
	n.Mode = r.mode
	if before == nil {
		// The base is asked for all names of what it says has several.
		names, _, _ := e.m.reach()
		n.Nlink = uint32(len(names[ino]))
	}
	if r.kind != tree.File {
		return w.AddInode(n)
	}
	n.Size = uint64(len(r.text))
	if before != nil && !e.data[ino] && len(r.text) > 0 {
		at, from, err := before.Locate(ino)
		if err != nil {
			return err
		}
		n.Alloc, n.Hash = n.Size, sha256.Sum256([]byte(r.text))
		return w.AddForeign(n, at, from)
	}
	_, err := w.AddFile(n, strings.NewReader(r.text), nil)
	return err
}

// commit notes the touched keys as changed by the next commit.
func (e *editor) commit(before *model) {
	n := uint64(len(e.m.changes) + 1)
	_, aboveBefore, _ := before.reach()
	_, aboveAfter, _ := e.m.reach()
	mark := func(dirs ...map[tree.Ino]bool) {
		for _, set := range dirs {
			for dir := range set {
				e.m.subtreeCommit[dir] = n
			}
		}
	}
	var changes []string
	for _, k := range slices.SortedFunc(maps.Keys(e.names), compareKeys) {
		e.m.nameCommit[k] = n
		e.m.subtreeCommit[k.dir] = n
		mark(aboveBefore[k.dir], aboveAfter[k.dir])
		changes = append(changes, fmt.Sprintf("%d %q = %d", k.dir, k.name, e.m.names[k].ino))
	}
	for _, ino := range slices.Sorted(maps.Keys(e.inodes)) {
		e.m.inodeCommit[ino] = n
		mark(aboveBefore[ino], aboveAfter[ino])
		changes = append(changes, fmt.Sprint("inode ", ino))
	}
	e.m.changes = append(e.m.changes, changes)
}

func compare(t *rapid.T, s *stack.Stack, m *model, last tree.Ino) {
	names, above, path := m.reach()
	for ino := tree.RootIno; ino < last; ino++ {
		r, known := m.inodes[ino]
		n, err := s.Inode(ino)
		if known != (err == nil) || !known && !errors.Is(err, tree.ErrNotExist) {
			t.Fatalf("inode %d: %v, known to the model: %v", ino, err, known)
		}
		if !known {
			continue
		}
		if n.Kind != r.kind || n.Mode != r.mode {
			t.Fatalf("inode %d is a %s of mode %o, want %s %o", ino, n.Kind, n.Mode, r.kind, r.mode)
		}
		if r.kind == tree.File {
			if got := content(t, s, ino); got != r.text {
				t.Fatalf("inode %d holds %q, want %q", ino, got, r.text)
			}
		}
		if r.kind == tree.Dir {
			compareDir(t, s, m, ino)
			if above[ino] != nil && s.SubtreeChanged(ino) != m.subtreeCommit[ino] {
				t.Fatalf("subtree %d changed in %d, want %d", ino, s.SubtreeChanged(ino), m.subtreeCommit[ino])
			}
		}
		if got, want := s.InodeChanged(ino), m.inodeCommit[ino]; got != want {
			t.Fatalf("inode %d changed in %d, want %d", ino, got, want)
		}
		if commit, _, err := s.Holder(ino); err != nil || commit != m.inodeCommit[ino] {
			t.Fatalf("inode %d is held by %d (%v), want %d", ino, commit, err, m.inodeCommit[ino])
		}
		got, err := s.Names(ino)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(names[ino], got, equateEmpty); diff != "" {
			t.Fatalf("names of inode %d (-want +got):\n%s", ino, diff)
		}
		p, err := s.Path(ino)
		if want, reachable := path[ino]; reachable != (err == nil) || p != want {
			t.Fatalf("path of inode %d = %q, %v; want %q", ino, p, err, want)
		}
		if err == nil {
			if d, err := s.Resolve(p); err != nil || d.Ino != ino {
				t.Fatalf("path %q of inode %d resolves to %d, %v", p, ino, d.Ino, err)
			}
		}
	}
	compareChanges(t, s, m)
}

var equateEmpty = cmp.FilterValues(
	func(a, b []tree.Dirent) bool { return len(a)+len(b) == 0 },
	cmp.Comparer(func(a, b []tree.Dirent) bool { return true }))

func compareDir(t *rapid.T, s *stack.Stack, m *model, dir tree.Ino) {
	want := m.list(dir)
	from := ""
	if len(want) > 0 && rapid.Bool().Draw(t, "from the middle") {
		i := rapid.IntRange(0, len(want)-1).Draw(t, "from")
		from, want = want[i].Name, want[i:]
	}
	stop := rapid.IntRange(0, len(want)).Draw(t, "stop")
	var got []tree.Dirent
	err := s.ReadDir(dir, from, func(d tree.Dirent) bool {
		got = append(got, d)
		return len(got) != stop
	})
	if err != nil {
		t.Fatal(err)
	}
	if stop > 0 {
		want = want[:stop]
	}
	if diff := cmp.Diff(want, got, equateEmpty); diff != "" {
		t.Fatalf("directory %d from %q, %d names (-want +got):\n%s", dir, from, stop, diff)
	}
	for _, name := range []string{"a", "b", "c", "d", ".wh.a", "\xff\xfe", "none"} {
		k := key{dir, name}
		d, err := s.Lookup(dir, name)
		if want, ok := m.names[k]; ok != (err == nil) || d.Ino != want.ino || d.Kind != want.kind {
			t.Fatalf("lookup of %q in %d = %+v, %v; want %+v", name, dir, d, err, want)
		}
		if got, want := s.DirentChanged(dir, name), m.nameCommit[k]; got != want {
			t.Fatalf("name %q in %d changed in %d, want %d", name, dir, got, want)
		}
	}
}

func compareChanges(t *rapid.T, s *stack.Stack, m *model) {
	since := rapid.IntRange(0, len(m.changes)).Draw(t, "since")
	var want, got []string
	for i, c := range m.changes[since:] {
		for _, what := range c {
			want = append(want, fmt.Sprint(since+i+1, " ", what))
		}
	}
	s.Changes(uint64(since), func(c stack.Change) bool {
		if d := c.Dirent; d != nil {
			got = append(got, fmt.Sprintf("%d %d %q = %d", c.Commit, d.Dir, d.Name, d.Ino))
		} else {
			got = append(got, fmt.Sprint(c.Commit, " inode ", c.Inode))
		}
		return true
	})
	if !slices.Equal(got, want) {
		t.Fatalf("changes since %d:\n%q\nwant\n%q", since, got, want)
	}
}

func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		next := tree.RootIno + 1
		m := newModel()
		e := newEditor(rt, m, &next)
		e.inodes[tree.RootIno] = true
		for range rapid.IntRange(0, 15).Draw(rt, "base steps") {
			e.step()
		}
		e.dropUnreachable(newModel())
		maps.DeleteFunc(e.names, func(k key, _ bool) bool { return m.names[k].ino == 0 })
		s := mustNew(t, pack(t, "base", layerfmt.Base, e.write(nil, nil)))

		type version struct {
			stack *stack.Stack
			model *model
			last  tree.Ino
		}
		versions := []version{{s, m, next}}
		compare(rt, s, m, next)
		for range rapid.IntRange(1, 6).Draw(rt, "layers") {
			before := versions[len(versions)-1]
			e := newEditor(rt, before.model.clone(), &next)
			for range rapid.IntRange(0, 6).Draw(rt, "steps") {
				e.step()
			}
			e.dropUnreachable(before.model)
			opaque := e.makeOpaque(before.model)
			n := before.stack.Commit() + 1
			s, err := before.stack.Apply(n, pack(t, fmt.Sprint("layer ", n), layerfmt.Delta, e.write(before.stack, opaque)))
			if err != nil {
				rt.Fatal(err)
			}
			e.closeOpaque(before.model, opaque)
			e.commit(before.model)
			versions = append(versions, version{s, e.m, next})
			compare(rt, s, e.m, next)
		}
		old := versions[rapid.IntRange(0, len(versions)-1).Draw(rt, "an older commit")]
		compare(rt, old.stack, old.model, old.last)
		if got := len(old.stack.Layers()); got != int(old.stack.Commit())+1 {
			rt.Fatalf("%d layers at commit %d", got, old.stack.Commit())
		}
	})
}

// makeOpaque chooses a directory whose names of the layers beneath are all to
// go, if that leaves a tree that the edits still fit in.
func (e *editor) makeOpaque(before *model) map[tree.Ino]bool {
	if !rapid.Bool().Draw(e.T, "opaque") {
		return nil
	}
	dir := rapid.SampledFrom(e.dirs()).Draw(e.T, "opaque dir")
	after := e.m.clone()
	for k := range before.names {
		if k.dir == dir && !e.names[k] {
			delete(after.names, k)
		}
	}
	_, above, _ := after.reach()
	for k := range e.names {
		if after.names[k].ino != 0 && above[k.dir] == nil {
			return nil
		}
	}
	return map[tree.Ino]bool{dir: true}
}

// closeOpaque makes the model's side of it, which the layer did not spell out.
func (e *editor) closeOpaque(before *model, opaque map[tree.Ino]bool) {
	for k := range before.names {
		if opaque[k.dir] && !e.names[k] {
			e.set(k, entry{})
		}
	}
}
