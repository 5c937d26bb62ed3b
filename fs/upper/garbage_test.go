package upper

import (
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"

	"ephemeral-sandbox/fs/tree"
)

// syncWatch calls fn before each Datasync.
type syncWatch struct {
	logFile
	fn func()
}

func (s *syncWatch) Datasync() error {
	s.fn()
	return s.logFile.Datasync()
}

func makeData(t *testing.T, u *Upper, ino tree.Ino, gen uint32) {
	t.Helper()
	f, err := u.OpenData(ino, gen, true)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func dataFiles(t *testing.T, dir string) (names []string) {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, dataName, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		names = append(names, filepath.Base(name))
	}
	return names
}

func commitBase(t *testing.T, u *Upper, n uint64) {
	t.Helper()
	if err := u.Commit(Frame{Changes: []Change{{Type: Base, Start: n}}}); err != nil {
		t.Fatal(err)
	}
}

// TestDiscard sees a data file stay until the frame before it is durable, and
// its generation stay taken as long.
func TestDiscard(t *testing.T) {
	dir := t.TempDir()
	u := mustOpen(t, dir, Options{})
	for gen := range uint32(3) {
		makeData(t, u, 7, gen)
	}
	commitBase(t, u, 1)
	u.Discard([]Unused{{Ino: 7, Gen: 0}, {Ino: 7, Gen: 1}})
	if got := u.NextGen(7); got != 2 {
		t.Fatalf("next generation beside a discarded 1 is %d", got)
	}
	good := u.journal.file
	u.journal.file = &syncWatch{good, func() {
		if files := dataFiles(t, dir); len(files) != 3 {
			t.Errorf("before the journal is synced there are %q", files)
		}
		// This one's frame may come too late for the sync under way.
		u.Discard([]Unused{{Ino: 7, Gen: 2}})
	}}
	if err := u.Sync(); err != nil {
		t.Fatal(err)
	}
	if files := dataFiles(t, dir); !slices.Equal(files, []string{"7.2"}) {
		t.Fatalf("after the sync there are %q", files)
	}
	if got := u.NextGen(7); got != 3 {
		t.Fatalf("next generation beside a discarded 2 is %d", got)
	}
	u.journal.file = good
	if err := u.Sync(); err != nil {
		t.Fatal(err)
	}
	if files := dataFiles(t, dir); files != nil || u.NextGen(7) != 1 {
		t.Fatalf("in the end there are %q, and the next generation is %d", files, u.NextGen(7))
	}
}

// TestDiscardFails removes nothing while the journal cannot be synced, in Sync
// or by itself.
func TestDiscardFails(t *testing.T) {
	dir := t.TempDir()
	u := mustOpen(t, dir, Options{})
	makeData(t, u, 7, 0)
	commitBase(t, u, 1)
	good := u.journal.file
	u.journal.file = &faultFile{logFile: good, sync: syscall.EIO}
	u.Discard([]Unused{{Ino: 7, Bytes: garbageBytes + 1}})
	u.garbage.work.Wait()
	if err := u.Sync(); !errors.Is(err, syscall.EIO) {
		t.Fatalf("sync: %v", err)
	}
	u.journal.file = good
	if files := dataFiles(t, dir); len(files) != 1 {
		t.Fatalf("there are %q", files)
	}
	_ = u.Close()
	u = mustOpen(t, dir, Options{})
	if files := dataFiles(t, dir); files != nil {
		t.Fatalf("after opening again there are %q", files)
	}
	if u.journal.synced != u.journal.size {
		t.Fatal("swept before the journal was durable")
	}
}

// TestDiscardBounded syncs by itself when much has been discarded.
func TestDiscardBounded(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files int
		bytes uint64
		syncs bool
	}{
		{"few", garbageFiles, 1, false},
		{"many", garbageFiles + 1, 1, true},
		{"large", 3, garbageBytes / 2, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			u := mustOpen(t, t.TempDir(), Options{})
			var syncs atomic.Int32
			u.journal.file = &syncWatch{u.journal.file, func() { syncs.Add(1) }}
			for i := range tt.files {
				makeData(t, u, tree.Ino(i), 0)
			}
			commitBase(t, u, 1)
			for i := range tt.files {
				u.Discard([]Unused{{Ino: tree.Ino(i), Bytes: tt.bytes}})
			}
			u.garbage.work.Wait()
			_, err := u.OpenData(0, 0, false)
			if gone := errors.Is(err, fs.ErrNotExist); gone != tt.syncs || (syncs.Load() > 0) != tt.syncs {
				t.Fatalf("first file gone: %v, syncs: %d", gone, syncs.Load())
			}
			if err := u.Close(); err != nil {
				t.Fatal(err)
			}
			u.Discard([]Unused{{Ino: 1, Bytes: garbageBytes + 1}}) // comes too late, and is for the sweep
		})
	}
}
