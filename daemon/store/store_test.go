package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"ephemeral-sandbox/daemon/store"
	"ephemeral-sandbox/fs/hostfs"
	"ephemeral-sandbox/fs/hostfs/faultfs"
	"ephemeral-sandbox/fs/hostfs/memfs"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// The tests' tree is the root, inode 1, and files in it.

func inode(ino tree.Ino, kind tree.Kind) tree.Inode {
	return tree.Inode{Attr: tree.Attr{Ino: ino, Kind: kind, Mode: 0o755, Nlink: 1}}
}

func addFile(w *layerfmt.Writer, ino tree.Ino, name, text string) error {
	n := inode(ino, tree.File)
	n.Size = uint64(len(text))
	_, err := w.AddFile(n, strings.NewReader(text), nil)
	return errors.Join(err, w.AddDirent(layerfmt.Dirent{
		Dirent: tree.Dirent{Dir: tree.RootIno, Name: name, Ino: ino, Kind: tree.File},
	}))
}

func baseTree(w *layerfmt.Writer) error {
	return errors.Join(w.AddInode(inode(tree.RootIno, tree.Dir)), addFile(w, 2, "base", "base-text"))
}

func mustCreate(t *testing.T, o store.Options) *store.Store {
	t.Helper()
	s, err := store.Create("box", o, baseTree)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustOpen(t *testing.T, o store.Options) *store.Store {
	t.Helper()
	s, err := store.Open("box", o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustClose(t *testing.T, s *store.Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// publish commits one file more on top of the head.
func publish(s *store.Store, name, text string) (store.Commit, error) {
	ino, err := s.AllocInos(1)
	if err != nil {
		return store.Commit{}, err
	}
	for {
		parent := s.HeadCommit().Number
		l, err := s.Seal(func(w *layerfmt.Writer) error { return addFile(w, ino, name, text) })
		if err != nil {
			return store.Commit{}, err
		}
		c, won, err := s.Advance(parent, l, store.CommitMeta{RequestID: "request " + name})
		if won || err != nil {
			return c, errors.Join(err, l.Discard())
		}
		if err := l.Discard(); err != nil {
			return store.Commit{}, err
		}
	}
}

func mustPublish(t *testing.T, s *store.Store, name, text string) store.Commit {
	t.Helper()
	c, err := publish(s, name, text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// show returns the files of a tree, "name=text ...".
func show(t *testing.T, view *stack.Stack) string {
	t.Helper()
	text, err := tryShow(view)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func tryShow(view *stack.Stack) (string, error) {
	var out []string
	var errs []error
	err := view.ReadDir(tree.RootIno, "", func(d tree.Dirent) bool {
		text, err := readAll(view, d.Ino)
		errs = append(errs, err)
		out = append(out, d.Name+"="+text)
		return true
	})
	return strings.Join(out, " "), errors.Join(append(errs, err)...)
}

func readAll(view *stack.Stack, ino tree.Ino) (string, error) {
	f, err := view.Open(ino)
	if err != nil {
		return "", err
	}
	b, err := io.ReadAll(io.NewSectionReader(f, 0, int64(f.Size())))
	return string(b), err
}

func requireSound(t *testing.T, s *store.Store) {
	t.Helper()
	rep, err := s.Verify(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if len(rep.Problems) > 0 || rep.Commits != len(s.Commits()) || rep.Layers != rep.Commits {
		t.Fatalf("verify: %+v of %d commits", rep, len(s.Commits()))
	}
}

// sizes are the two ways a pack is kept.
var sizes = map[string]int{"inline": 0, "pack": -1}

func TestCommitsSurviveReopening(t *testing.T) {
	for name, inlineMax := range sizes {
		t.Run(name, func(t *testing.T) {
			o := store.Options{Disk: memfs.New(), InlineMax: inlineMax, Meta: store.CommitMeta{Message: "import"}}
			s := mustCreate(t, o)
			var want []store.Commit
			want = append(want, s.HeadCommit())
			for i := range 5 {
				c := mustPublish(t, s, fmt.Sprint("f", i), fmt.Sprint("text ", i))
				if c.Inline != (inlineMax == 0) {
					t.Fatalf("commit %d is inline: %v", c.Number, c.Inline)
				}
				want = append(want, c)
			}
			const text = "base=base-text f0=text 0 f1=text 1 f2=text 2 f3=text 3 f4=text 4"
			if got := show(t, s.Head()); got != text {
				t.Fatalf("head shows %q, want %q", got, text)
			}
			requireSound(t, s)
			mustClose(t, s)

			s = mustOpen(t, o)
			defer mustClose(t, s)
			if got := show(t, s.Head()); got != text {
				t.Errorf("head shows %q after reopening, want %q", got, text)
			}
			if got := fmt.Sprint(s.Commits()); got != fmt.Sprint(want) {
				t.Errorf("commits after reopening\n%s\nwant\n%s", got, fmt.Sprint(want))
			}
			if c, ok := s.FindRequest("request f3"); !ok || c.Number != 4 {
				t.Errorf("FindRequest = %d, %v; want 4", c.Number, ok)
			}
			if _, ok := s.FindRequest(""); ok {
				t.Error("the empty request id is found")
			}
			if c, err := s.Commit(0); err != nil || c.Message != "import" {
				t.Errorf("commit 0 = %+v, %v", c, err)
			}
			if _, err := s.Commit(6); !errors.Is(err, tree.ErrNotExist) {
				t.Errorf("commit 6: %v, want %v", err, tree.ErrNotExist)
			}
			requireSound(t, s)
		})
	}
}

func TestStepsOfACommit(t *testing.T) {
	for name, tc := range map[string]struct {
		inlineMax int
		want      []string
	}{
		"inline": {0, []string{"write log", "sync log"}},
		"pack": {-1, []string{
			"temp tmp", "write tmp/(unnamed)", "sync tmp/(unnamed)",
			"mkdir packs/XX", "link PACK", "sync-dir packs/XX", "sync-dir packs", "open PACK",
			"write log", "sync log",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			disk := faultfs.New(memfs.New(), faultfs.Plan{Nth: -1})
			s := mustCreate(t, store.Options{Disk: disk, InlineMax: tc.inlineMax})
			defer mustClose(t, s)
			if _, err := s.AllocInos(1); err != nil {
				t.Fatal(err)
			}
			before := len(disk.Steps())
			c := mustPublish(t, s, "f", "text")
			id := c.Pack.String()
			var got []string
			for _, step := range disk.Steps()[before:] {
				step = strings.ReplaceAll(step, "packs/"+id[:2]+"/"+id+".lay", "PACK")
				step = strings.ReplaceAll(step, "packs/"+id[:2], "packs/XX")
				if !strings.HasPrefix(step, "read ") {
					got = append(got, step)
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("steps\n%q\nwant\n%q", got, tc.want)
			}
		})
	}
}

func TestOneWinsANumber(t *testing.T) {
	for name, inlineMax := range sizes {
		t.Run(name, func(t *testing.T) {
			o := store.Options{Disk: memfs.New(), InlineMax: inlineMax}
			s := mustCreate(t, o)
			const writers, each = 8, 5
			var wg sync.WaitGroup
			for i := range writers {
				wg.Go(func() {
					for j := range each {
						if _, err := publish(s, fmt.Sprint("f", i, "-", j), fmt.Sprint(i, j)); err != nil {
							t.Errorf("publish: %v", err)
						}
					}
				})
			}
			wg.Wait()
			if got, want := s.HeadCommit().Number, uint64(writers*each); got != want {
				t.Errorf("head is %d, want %d", got, want)
			}
			text := show(t, s.Head())
			requireSound(t, s)
			mustClose(t, s)
			s = mustOpen(t, o)
			defer mustClose(t, s)
			if got := show(t, s.Head()); got != text {
				t.Errorf("after reopening\n%s\nwant\n%s", got, text)
			}
			requireSound(t, s)
		})
	}
}

func TestALoserMayTryAgain(t *testing.T) {
	s := mustCreate(t, store.Options{Disk: memfs.New()})
	defer mustClose(t, s)
	late, err := s.AllocInos(1)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Seal(func(w *layerfmt.Writer) error { return addFile(w, late, "late", "late") })
	if err != nil {
		t.Fatal(err)
	}
	mustPublish(t, s, "f", "first")
	if _, won, err := s.Advance(0, l, store.CommitMeta{}); won || err != nil {
		t.Fatalf("Advance from an old head: %v, %v; want a loss", won, err)
	}
	if _, won, err := s.Advance(1, l, store.CommitMeta{}); !won || err != nil {
		t.Fatalf("Advance from the head: %v, %v; want a win", won, err)
	}
	if err := l.Discard(); err != nil {
		t.Errorf("Discard after a win: %v", err)
	}
	if got, want := show(t, s.Head()), "base=base-text f=first late=late"; got != want {
		t.Errorf("head shows %q, want %q", got, want)
	}
	gone, err := s.Seal(func(w *layerfmt.Writer) error { return addFile(w, late, "gone", "gone") })
	if err != nil {
		t.Fatal(err)
	}
	if err := gone.Discard(); err != nil {
		t.Fatal(err)
	}
	if _, won, err := s.Advance(2, gone, store.CommitMeta{}); won || !errors.Is(err, tree.ErrInvalid) {
		t.Errorf("Advance with a discarded layer: %v, %v; want %v", won, err, tree.ErrInvalid)
	}
}

func TestALayerThatFitsNoTreeIsRefused(t *testing.T) {
	s := mustCreate(t, store.Options{Disk: memfs.New()})
	defer mustClose(t, s)
	for name, build := range map[string]func(w *layerfmt.Writer) error{
		"a name without an inode": func(w *layerfmt.Writer) error {
			return w.AddDirent(layerfmt.Dirent{Dirent: tree.Dirent{Dir: 1, Name: "x", Ino: 77, Kind: tree.File}})
		},
		"a number never given out": func(w *layerfmt.Writer) error { return addFile(w, 1000, "x", "x") },
	} {
		l, err := s.Seal(build)
		if err != nil {
			t.Fatal(err)
		}
		if _, won, err := s.Advance(0, l, store.CommitMeta{}); won || !errors.Is(err, tree.ErrInvalid) {
			t.Errorf("Advance with %s: %v, %v; want %v", name, won, err, tree.ErrInvalid)
		}
	}
	mustPublish(t, s, "f", "text")
	requireSound(t, s)
}

func TestLeases(t *testing.T) {
	for name, inlineMax := range sizes {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "box")
			s, err := store.Create(dir, store.Options{InlineMax: inlineMax}, baseTree)
			if err != nil {
				t.Fatal(err)
			}
			mustPublish(t, s, "f", "text")
			l, err := s.LeaseHead()
			if err != nil {
				t.Fatal(err)
			}
			old, err := s.Lease(0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Lease(2); !errors.Is(err, tree.ErrNotExist) {
				t.Errorf("lease of a commit to come: %v", err)
			}
			mustPublish(t, s, "g", "text")
			if got := s.Leases(); len(got) != 2 || got[0] != 1 || got[1] != 1 {
				t.Errorf("leases: %v", got)
			}
			mustClose(t, s)
			mustClose(t, s)
			if got, want := show(t, l.Stack()), "base=base-text f=text"; got != want {
				t.Errorf("leased tree shows %q after Close, want %q", got, want)
			}
			if got, want := show(t, old.Stack()), "base=base-text"; got != want {
				t.Errorf("leased tree shows %q after Close, want %q", got, want)
			}
			old.Release()
			l.Release()
			l.Release()
			if got := s.Leases(); len(got) != 0 {
				t.Errorf("leases after release: %v", got)
			}
			if _, err := s.LeaseHead(); !errors.Is(err, store.ErrClosed) {
				t.Errorf("lease after Close: %v, want %v", err, store.ErrClosed)
			}
			if _, err := publish(s, "h", ""); !errors.Is(err, store.ErrClosed) {
				t.Errorf("publish after Close: %v, want %v", err, store.ErrClosed)
			}
		})
	}
}

func TestInosAreNeverGivenTwice(t *testing.T) {
	disk := memfs.New()
	s := mustCreate(t, store.Options{Disk: disk})
	var next tree.Ino = 3
	take := func(n uint64) {
		t.Helper()
		first, err := s.AllocInos(n)
		if err != nil {
			t.Fatal(err)
		}
		if first < next {
			t.Fatalf("inode number %d was given out twice", first)
		}
		next = first + tree.Ino(n)
	}
	take(1)
	take(100_000)
	for _, n := range []uint64{0, 1 << 63} {
		if _, err := s.AllocInos(n); !errors.Is(err, tree.ErrInvalid) {
			t.Errorf("AllocInos(%d): %v, want %v", n, err, tree.ErrInvalid)
		}
	}
	for range 3 {
		// A crash, a close, a crash.
		disk = disk.CrashClone(nil)
		s = mustOpen(t, store.Options{Disk: disk})
		take(5)
		before := next
		mustClose(t, s)
		s = mustOpen(t, store.Options{Disk: disk})
		take(1)
		if next != before+1 {
			t.Errorf("closing lost inode numbers: %d follows %d", next-1, before-1)
		}
	}
	mustClose(t, s)

	// A mark below what the layers use is damage.
	for _, off := range []int64{10, 512 + 10} {
		if err := disk.Corrupt("inos", off, 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := store.Open("box", store.Options{Disk: disk}); !layerfmt.IsCorrupt(err) {
		t.Errorf("open with a damaged mark: %v, want a corrupt store", err)
	}
}

func TestTwoCannotHoldOneDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "box")
	s, err := store.Create(dir, store.Options{}, baseTree)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(dir, store.Options{}); !errors.Is(err, hostfs.ErrLocked) {
		t.Errorf("second Open: %v, want %v", err, hostfs.ErrLocked)
	}
	if _, err := store.Create(dir, store.Options{}, baseTree); !errors.Is(err, hostfs.ErrLocked) {
		t.Errorf("second Create: %v, want %v", err, hostfs.ErrLocked)
	}
	mustClose(t, s)
	if _, err := store.Create(dir, store.Options{}, baseTree); !errors.Is(err, tree.ErrExist) {
		t.Errorf("Create over a sandbox: %v, want %v", err, tree.ErrExist)
	}
	s, err = store.Open(dir, store.Options{})
	if err != nil {
		t.Fatalf("Open after a refused Create: %v", err)
	}
	requireSound(t, s)
	mustClose(t, s)
}

func TestCreateRefusesAndTidiesUp(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "box")
	boom := errors.New("boom")
	if _, err := store.Create(dir, store.Options{}, func(*layerfmt.Writer) error { return boom }); !errors.Is(err, boom) {
		t.Errorf("Create: %v, want %v", err, boom)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(dir, store.Options{}); !errors.Is(err, store.ErrNotStore) {
		t.Errorf("Open of an empty directory: %v, want %v", err, store.ErrNotStore)
	}
	if err := os.WriteFile(filepath.Join(dir, "diary"), []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Create(dir, store.Options{}, baseTree); !errors.Is(err, tree.ErrNotEmpty) {
		t.Errorf("Create in a directory with something in it: %v, want %v", err, tree.ErrNotEmpty)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "diary")); err != nil || string(b) != "mine" {
		t.Errorf("what was in it: %q, %v", b, err)
	}
	if _, err := store.Open(filepath.Join(dir, "none"), store.Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open of no directory: %v", err)
	}
}

func TestFormatOfALaterProgramIsRefused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "box")
	s, err := store.Create(dir, store.Options{}, baseTree)
	if err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	if err := os.WriteFile(filepath.Join(dir, "FORMAT"), []byte("ephemeral-sandbox store 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(dir, store.Options{}); !errors.Is(err, store.ErrNotStore) || !strings.Contains(err.Error(), "store 2") {
		t.Errorf("Open: %v, want %v with what FORMAT says", err, store.ErrNotStore)
	}
}

func TestDiscardAndSweep(t *testing.T) {
	disk := memfs.New()
	s := mustCreate(t, store.Options{Disk: disk, InlineMax: -1})
	ino, err := s.AllocInos(1)
	if err != nil {
		t.Fatal(err)
	}
	seal := func(text string) *store.Sealed {
		t.Helper()
		l, err := s.Seal(func(w *layerfmt.Writer) error { return addFile(w, ino, "x", text) })
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	// Two layers of the same bytes are one file, and live while one of them does.
	a, b := seal("same"), seal("same")
	if err := a.Discard(); err != nil {
		t.Fatal(err)
	}
	if swept, err := s.Sweep(); err != nil || swept.Packs != 0 {
		t.Errorf("sweep with a sealed layer: %+v, %v; want nothing", swept, err)
	}
	if _, won, err := s.Advance(0, b, store.CommitMeta{}); !won || err != nil {
		t.Fatalf("Advance: %v, %v", won, err)
	}
	if err := a.Discard(); err != nil {
		t.Fatal(err)
	}
	seal("never published")
	crashed := disk.CrashClone(nil)
	mustClose(t, s)

	s = mustOpen(t, store.Options{Disk: crashed, InlineMax: -1})
	defer mustClose(t, s)
	if swept, err := s.Sweep(); err != nil || swept.Packs != 1 || swept.Bytes == 0 {
		t.Errorf("sweep after a crash: %+v, %v; want one pack", swept, err)
	}
	requireSound(t, s)
	if got, want := show(t, s.Head()), "base=base-text x=same"; got != want {
		t.Errorf("head shows %q, want %q", got, want)
	}
}

func TestDamagedPack(t *testing.T) {
	const size = 100_000
	text := make([]byte, size)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range text {
		text[i] = byte(rng.Uint32())
	}
	setUp := func(t *testing.T) (dir string, pack string) {
		dir = filepath.Join(t.TempDir(), "box")
		s, err := store.Create(dir, store.Options{InlineMax: -1}, baseTree)
		if err != nil {
			t.Fatal(err)
		}
		mustPublish(t, s, "one", "first")
		c := mustPublish(t, s, "two", string(text))
		mustPublish(t, s, "three", "third")
		mustClose(t, s)
		id := c.Pack.String()
		return dir, filepath.Join(dir, "packs", id[:2], id+".lay")
	}
	edit := func(t *testing.T, name string, change func(b []byte) []byte) {
		b, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(name, change(b), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	t.Run("content", func(t *testing.T) {
		dir, pack := setUp(t)
		edit(t, pack, func(b []byte) []byte {
			b[len(b)/2] ^= 1
			return b
		})
		s, err := store.Open(dir, store.Options{InlineMax: -1})
		if err != nil {
			t.Fatal(err)
		}
		defer mustClose(t, s)
		read := func(name string) error {
			d, err := s.Head().Resolve(name)
			if err == nil {
				_, err = readAll(s.Head(), d.Ino)
			}
			return err
		}
		if err := read("two"); !layerfmt.IsCorrupt(err) || !strings.Contains(err.Error(), "L000002") {
			t.Errorf("damaged file: %v, want a corrupt layer L000002", err)
		}
		for _, name := range []string{"base", "one", "three"} {
			if err := read(name); err != nil {
				t.Errorf("file %s in a sound layer: %v", name, err)
			}
		}
		rep, err := s.Verify(context.Background())
		if err != nil || len(rep.Problems) != 1 || !strings.Contains(rep.Problems[0], filepath.Base(pack)) {
			t.Errorf("verify: %+v, %v; want one problem that names the file", rep, err)
		}
		mustPublishOn(t, s, "four")
	})

	for name, change := range map[string]func(b []byte) []byte{
		"truncated": func(b []byte) []byte { return b[:len(b)-1] },
		"trailer": func(b []byte) []byte {
			b[len(b)-30] ^= 4
			return b
		},
		"another pack": func([]byte) []byte {
			var b bytes.Buffer
			w := layerfmt.NewWriter(&b, layerfmt.WriterOptions{Kind: layerfmt.Delta})
			if _, err := w.Finish(); err != nil {
				panic(err)
			}
			return b.Bytes()
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, pack := setUp(t)
			edit(t, pack, change)
			requireSalvage(t, dir)
		})
	}
	t.Run("missing", func(t *testing.T) {
		dir, pack := setUp(t)
		if err := os.Remove(pack); err != nil {
			t.Fatal(err)
		}
		requireSalvage(t, dir)
	})
}

func mustPublishOn(t *testing.T, s *store.Store, name string) {
	t.Helper()
	if c := mustPublish(t, s, name, "text"); c.Number != s.HeadCommit().Number {
		t.Errorf("published %d, the head is %d", c.Number, s.HeadCommit().Number)
	}
}

// requireSalvage checks a store whose layer 2 of 3 cannot be read.
func requireSalvage(t *testing.T, dir string) {
	t.Helper()
	if _, err := store.Open(dir, store.Options{}); !layerfmt.IsCorrupt(err) || !strings.Contains(err.Error(), "L000002") {
		t.Errorf("Open: %v, want a corrupt layer L000002", err)
	}
	s, err := store.Open(dir, store.Options{Salvage: true})
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, s)
	if !layerfmt.IsCorrupt(s.Damage()) {
		t.Errorf("Damage: %v", s.Damage())
	}
	if got, want := show(t, s.Head()), "base=base-text one=first"; got != want {
		t.Errorf("salvaged head shows %q, want %q", got, want)
	}
	if _, err := publish(s, "x", ""); !layerfmt.IsCorrupt(err) {
		t.Errorf("publish: %v, want a refusal", err)
	}
	if _, err := s.Sweep(); !layerfmt.IsCorrupt(err) {
		t.Errorf("sweep: %v, want a refusal", err)
	}
	rep, err := s.Verify(context.Background())
	if err != nil || len(rep.Problems) == 0 {
		t.Errorf("verify: %+v, %v; want the damage", rep, err)
	}
}

func TestFullDisk(t *testing.T) {
	text := strings.Repeat("0123456789", 50)
	for name, inlineMax := range sizes {
		t.Run(name, func(t *testing.T) {
			disk := memfs.New()
			s := mustCreate(t, store.Options{Disk: disk, InlineMax: inlineMax})
			mustPublish(t, s, "one", text)
			var refused error
			for i := 0; refused == nil; i++ {
				// Inline commits fit into what the log has ahead of it, until it
				// has to grow.
				disk.SetCapacity(disk.Used() + 100)
				before := s.HeadCommit().Number
				_, refused = publish(s, fmt.Sprint("f", i), text+fmt.Sprint(i))
				if refused != nil && s.HeadCommit().Number != before {
					t.Error("the head moved")
				}
				if i > 5000 {
					t.Fatal("the disk never fills up")
				}
			}
			if !errors.Is(refused, syscall.ENOSPC) || errors.Is(refused, store.ErrBroken) {
				t.Fatalf("publish on a full disk: %v, want %v", refused, syscall.ENOSPC)
			}
			text := show(t, s.Head())
			requireSound(t, s)
			disk.SetCapacity(0)
			mustPublish(t, s, "zz", "after")
			requireSound(t, s)
			mustClose(t, s)
			s = mustOpen(t, store.Options{Disk: disk, InlineMax: inlineMax})
			defer mustClose(t, s)
			if got, want := show(t, s.Head()), text+" zz=after"; got != want {
				t.Errorf("after reopening %q, want %q", got, want)
			}
		})
	}
}

// crashes returns what a power loss may leave: nothing unsynced, all of it, and
// some mixtures.
func crashes(disk *memfs.FS, seed int) map[string]*memfs.FS {
	rng := rand.New(rand.NewPCG(7, uint64(seed)))
	out := map[string]*memfs.FS{
		"nothing":    disk.CrashClone(nil),
		"everything": disk.CrashClone(func() bool { return true }),
	}
	for i, percent := range []int{10, 50, 50, 50, 90} {
		out[fmt.Sprintf("%d%% (%d)", percent, i)] = disk.CrashClone(func() bool { return rng.IntN(100) < percent })
	}
	return out
}

var errDisk = fmt.Errorf("disk: %w", syscall.EIO)

func plans(n int) map[string]faultfs.Plan {
	return map[string]faultfs.Plan{
		"once":    {Nth: n, Err: errDisk},
		"forever": {Nth: n, Count: -1, Err: errDisk},
	}
}

// TestEveryStepOfAPublishMayFail fails step after step of opening a store and
// publishing on it, and looks at what is left, with and without a power loss.
func TestEveryStepOfAPublishMayFail(t *testing.T) {
	const old, new = "base=base-text f=one", "base=base-text f=one g=two"
	for name, inlineMax := range sizes {
		for _, planName := range []string{"once", "forever"} {
			t.Run(name+" "+planName, func(t *testing.T) {
				o := store.Options{InlineMax: inlineMax}
				mem := memfs.New()
				o.Disk = mem
				s := mustCreate(t, o)
				mustPublish(t, s, "f", "one")
				mustClose(t, s)
				start := mem.CrashClone(nil)

				for i := 0; ; i++ {
					mem := start.CrashClone(nil)
					disk := faultfs.New(mem, plans(i)[planName])
					o.Disk = disk
					acked := false
					s, err := store.Open("box", o)
					if err == nil {
						_, err = publish(s, "g", "two")
						acked = err == nil
						head, readErr := tryShow(s.Head())
						if want := map[bool]string{false: old, true: new}[acked]; readErr == nil && head != want {
							t.Fatalf("step %d: the head shows %q after %v", i, head, err)
						}
					}
					if err != nil && !errors.Is(err, syscall.EIO) || layerfmt.IsCorrupt(err) {
						t.Fatalf("step %d: %v, want an error of the disk", i, err)
					}
					for what, left := range crashes(mem, i) {
						requireOneOf(t, fmt.Sprint("step ", i, ", crash keeping ", what), left, inlineMax, acked, old, new)
					}
					if s != nil {
						// Errors of a broken disk are not of interest here.
						_ = s.Close()
						requireOneOf(t, fmt.Sprint("step ", i, ", closed"), mem, inlineMax, acked, old, new)
					}
					if !disk.Fired() {
						return
					}
				}
			})
		}
	}
}

// requireOneOf opens what is left and requires the old state or the new one,
// and the new one when the commit had been acknowledged. What it shows once it
// shows after a power loss too. Then it goes on.
func requireOneOf(t *testing.T, what string, disk *memfs.FS, inlineMax int, acked bool, old, new string) {
	t.Helper()
	o := store.Options{Disk: disk, InlineMax: inlineMax}
	s, err := store.Open("box", o)
	if err != nil {
		t.Fatalf("%s: reopen: %v", what, err)
	}
	defer mustClose(t, s)
	got := show(t, s.Head())
	requireHead(t, what+", then a power loss", disk.CrashClone(nil), got)
	if got != new && (acked || got != old) {
		t.Fatalf("%s: the head shows %q; acknowledged: %v", what, got, acked)
	}
	requireSound(t, s)
	mustPublish(t, s, "z", "on")
	if want := got + " z=on"; show(t, s.Head()) != want {
		t.Fatalf("%s: going on shows %q, want %q", what, show(t, s.Head()), want)
	}
	if _, err := s.Sweep(); err != nil {
		t.Fatalf("%s: sweep: %v", what, err)
	}
	requireSound(t, s)
}

func requireHead(t *testing.T, what string, disk *memfs.FS, want string) {
	t.Helper()
	s, err := store.Open("box", store.Options{Disk: disk})
	if err != nil {
		t.Fatalf("%s: reopen: %v", what, err)
	}
	defer mustClose(t, s)
	if got := show(t, s.Head()); got != want {
		t.Fatalf("%s: the head shows %q, want %q", what, got, want)
	}
}

// TestARecordThatOnlyTheCacheHas: after a failed sync the kernel may go on
// showing what it has given up bringing to the disk. Once a reopened store has
// shown it, it must be there.
func TestARecordThatOnlyTheCacheHas(t *testing.T) {
	mem := memfs.New()
	mustClose(t, mustCreate(t, store.Options{Disk: mem}))
	disk := faultfs.New(mem, faultfs.Plan{Nth: -1})
	s := mustOpen(t, store.Options{Disk: disk})
	if _, err := s.AllocInos(1); err != nil {
		t.Fatal(err)
	}
	next := len(disk.Steps()) + 1 // the sync after the write
	mustClose(t, s)

	mem = mem.CrashClone(nil)
	s = mustOpen(t, store.Options{Disk: faultfs.New(mem, faultfs.Plan{Nth: next, Err: errDisk})})
	if _, err := publish(s, "f", "text"); !errors.Is(err, store.ErrBroken) {
		t.Fatalf("publish: %v, want %v", err, store.ErrBroken)
	}
	_ = s.Close()
	if err := mem.ForgetUnsynced("log"); err != nil {
		t.Fatal(err)
	}
	const want = "base=base-text f=text"
	s = mustOpen(t, store.Options{Disk: mem})
	if got := show(t, s.Head()); got != want {
		t.Fatalf("the cache shows %q, want %q", got, want)
	}
	requireHead(t, "after a power loss", mem.CrashClone(nil), want)
	mustClose(t, s)
}

// TestAShorterRecordAfterOneThatFailed must not have the rest of the longer one
// behind it.
func TestAShorterRecordAfterOneThatFailed(t *testing.T) {
	mem := memfs.New()
	mustClose(t, mustCreate(t, store.Options{Disk: mem}))
	for i := 0; ; i++ {
		mem := mem.CrashClone(nil)
		disk := faultfs.New(mem, faultfs.Plan{Nth: i, Err: fmt.Errorf("full: %w", syscall.ENOSPC)})
		s, err := store.Open("box", store.Options{Disk: disk})
		if err != nil {
			continue
		}
		_, err = publish(s, "f", noise(rand.New(rand.NewPCG(1, 1)), 10_000))
		if err != nil && disk.Steps()[i] != "write log" {
			_ = s.Close()
			continue
		}
		if err == nil {
			t.Fatal("the write to the log did not fail")
		}
		if !errors.Is(err, syscall.ENOSPC) || errors.Is(err, store.ErrBroken) {
			t.Fatalf("publish: %v, want %v", err, syscall.ENOSPC)
		}
		mustPublish(t, s, "g", "short")
		mustClose(t, s)
		requireHead(t, "after the shorter one", mem, "base=base-text g=short")
		return
	}
}

// noise is text that does not compress well.
func noise(rng *rand.Rand, n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = 'a' + byte(rng.IntN(26))
	}
	return string(b)
}

func TestEveryStepOfACreateMayFail(t *testing.T) {
	for _, planName := range []string{"once", "forever"} {
		t.Run(planName, func(t *testing.T) {
			for i := 0; ; i++ {
				mem := memfs.New()
				disk := faultfs.New(mem, plans(i)[planName])
				s, err := store.Create("box", store.Options{Disk: disk}, baseTree)
				if err == nil && disk.Fired() {
					t.Fatalf("step %d: failed unnoticed; steps %q", i, disk.Steps())
				}
				if err != nil && !errors.Is(err, syscall.EIO) {
					t.Fatalf("step %d: %v, want an error of the disk", i, err)
				}
				for what, left := range crashes(mem, i) {
					requireCreated(t, fmt.Sprint("step ", i, ", crash keeping ", what), left, err == nil)
				}
				if err == nil {
					mustClose(t, s)
					return
				}
				if planName == "once" {
					if names, err := mem.List("."); err != nil || len(names) > 0 {
						t.Fatalf("step %d: left behind %q, %v", i, names, err)
					}
				}
				requireCreated(t, fmt.Sprint("step ", i, ", later"), mem, false)
			}
		})
	}
}

// requireCreated requires a whole sandbox, or when it had not been acknowledged
// none, in whose place one can be created.
func requireCreated(t *testing.T, what string, disk *memfs.FS, acked bool) {
	t.Helper()
	s, err := store.Open("box", store.Options{Disk: disk})
	if !acked && errors.Is(err, store.ErrNotStore) {
		s, err = store.Create("box", store.Options{Disk: disk}, baseTree)
	}
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer mustClose(t, s)
	if got, want := show(t, s.Head()), "base=base-text"; got != want {
		t.Fatalf("%s: the head shows %q, want %q", what, got, want)
	}
	requireSound(t, s)
	mustPublish(t, s, "z", "on")
}

// TestAFailedSyncStopsTheStore: no commit and no inode number may follow one of
// which nobody knows whether it is on the disk.
func TestAFailedSyncStopsTheStore(t *testing.T) {
	mem := memfs.New()
	mustClose(t, mustCreate(t, store.Options{Disk: mem}))
	for i := 0; ; i++ {
		disk := faultfs.New(mem.CrashClone(nil), faultfs.Plan{Nth: i, Err: errDisk})
		s, err := store.Open("box", store.Options{Disk: disk})
		if err != nil {
			continue
		}
		_, err = publish(s, "f", "text")
		if !disk.Fired() {
			_ = s.Close() // may be the step that fails
			return
		}
		step := disk.Steps()[i]
		if sync := strings.HasPrefix(step, "sync "); sync != errors.Is(err, store.ErrBroken) {
			t.Errorf("%s failed: %v", step, err)
		}
		if errors.Is(err, store.ErrBroken) {
			if _, again := publish(s, "g", "text"); !errors.Is(again, store.ErrBroken) {
				t.Errorf("publish after that: %v, want %v", again, store.ErrBroken)
			}
			if got, want := show(t, s.Head()), "base=base-text"; got != want {
				t.Errorf("reads show %q, want %q", got, want)
			}
		} else if err != nil {
			mustPublish(t, s, "g", "text")
		}
		mustClose(t, s)
	}
}

// TestCrashAtAnyStep publishes for a while, loses power after a random step,
// and requires every acknowledged commit and at most one more.
func TestCrashAtAnyStep(t *testing.T) {
	for seed := range 60 {
		rng := rand.New(rand.NewPCG(3, uint64(seed)))
		disk := memfs.New()
		mustClose(t, mustCreate(t, store.Options{Disk: disk}))
		acked := "base=base-text"
		for range 4 {
			faulty := faultfs.New(disk, faultfs.Plan{Nth: rng.IntN(80), Count: -1, Err: errDisk})
			o := store.Options{Disk: faulty, InlineMax: []int{0, -1, 400}[rng.IntN(3)]}
			next := acked
			s, err := store.Open("box", o)
			for i := 0; err == nil && i < 10; i++ {
				name := fmt.Sprint(seed, "-", rng.Uint32())
				text := noise(rng, rng.IntN(6000))
				next = sorted(acked, name+"="+text)
				if _, err = publish(s, name, text); err == nil {
					acked = next
				}
			}
			keep := rng.IntN(4)
			disk = disk.CrashClone(func() bool { return rng.IntN(4) < keep })
			s, err = store.Open("box", store.Options{Disk: disk})
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			requireSound(t, s)
			if got := show(t, s.Head()); got != acked && got != next {
				t.Fatalf("seed %d: the head shows\n%.300q\nacknowledged was\n%.300q", seed, got, acked)
			} else {
				acked = got
			}
			mustClose(t, s)
		}
	}
}

func sorted(files, more string) string {
	all := append(strings.Split(files, " "), more)
	slices.Sort(all)
	return strings.Join(all, " ")
}

func TestOnTheRealDisk(t *testing.T) {
	for name, inlineMax := range sizes {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "box")
			s, err := store.Create(dir, store.Options{InlineMax: inlineMax}, baseTree)
			if err != nil {
				t.Fatal(err)
			}
			for i := range 10 {
				mustPublish(t, s, fmt.Sprint("f", i), strings.Repeat("x", i))
			}
			text := show(t, s.Head())
			requireSound(t, s)
			mustClose(t, s)
			s, err = store.Open(dir, store.Options{InlineMax: inlineMax, Cache: layerfmt.NewFrameCache(1 << 20)})
			if err != nil {
				t.Fatal(err)
			}
			defer mustClose(t, s)
			if got := show(t, s.Head()); got != text {
				t.Errorf("after reopening %q, want %q", got, text)
			}
			if names, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(names) > 0 {
				t.Errorf("left in tmp: %v, %v", names, err)
			}
			requireSound(t, s)
		})
	}
}
