package hostfs_test

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"ephemeral-sandbox/fs/hostfs"
	"ephemeral-sandbox/fs/hostfs/faultfs"
	"ephemeral-sandbox/fs/hostfs/memfs"
)

// implementations are all the directories the seam stands for.
func implementations(t *testing.T) map[string]hostfs.FS {
	disk, made, err := hostfs.MakeDir(filepath.Join(t.TempDir(), "d"))
	if err != nil || !made {
		t.Fatalf("MakeDir: %v, made: %v", err, made)
	}
	return map[string]hostfs.FS{
		"disk":  disk,
		"mem":   memfs.New(),
		"fault": faultfs.New(memfs.New(), faultfs.Plan{Nth: -1}),
	}
}

func write(t *testing.T, f hostfs.File, off int64, text string) {
	t.Helper()
	if n, err := f.WriteAt([]byte(text), off); n != len(text) || err != nil {
		t.Fatalf("write: %d, %v", n, err)
	}
}

func requireText(t *testing.T, d hostfs.FS, name, want string) {
	t.Helper()
	f, err := d.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	size, err := f.Size()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, size)
	if n, err := f.ReadAt(b, 0); n != len(b) || err != nil && err != io.EOF {
		t.Fatalf("read %s: %d of %d, %v", name, n, size, err)
	}
	if string(b) != want {
		t.Errorf("%s holds %q, want %q", name, b, want)
	}
	if err := f.Close(); err != nil {
		t.Errorf("close %s: %v", name, err)
	}
}

func TestContract(t *testing.T) {
	for name, d := range implementations(t) {
		t.Run(name, func(t *testing.T) {
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			fails := func(err, want error) {
				t.Helper()
				if !errors.Is(err, want) {
					t.Errorf("got %v, want %v", err, want)
				}
			}
			must(d.Mkdir("sub"))
			must(d.Mkdir("sub"))
			fails(d.Mkdir("none/sub"), fs.ErrNotExist)

			f, err := d.Create("sub/f")
			must(err)
			write(t, f, 3, "three")
			write(t, f, 0, "012")
			must(f.Sync())
			must(f.Close())
			requireText(t, d, "sub/f", "012three")
			_, err = d.Create("sub/f")
			fails(err, fs.ErrExist)
			fails(d.Mkdir("sub/f"), fs.ErrExist)
			_, err = d.Open("sub/none")
			fails(err, fs.ErrNotExist)
			_, err = d.Create("none/f")
			fails(err, fs.ErrNotExist)

			f, err = d.Open("sub/f")
			must(err)
			_, err = f.WriteAt([]byte("x"), 0)
			if err == nil {
				t.Error("a file opened for reading takes a write")
			}
			if n, err := f.ReadAt(make([]byte, 100), 4); n != 4 || err != io.EOF {
				t.Errorf("short read: %d, %v", n, err)
			}
			if n, err := f.ReadAt(make([]byte, 1), 100); n != 0 || err != io.EOF {
				t.Errorf("read behind the end: %d, %v", n, err)
			}
			must(f.Close())

			f, err = d.OpenWrite("sub/f")
			must(err)
			write(t, f, 7, "E!")
			must(f.Close())
			must(d.Rename("sub/f", "g"))
			requireText(t, d, "g", "012threE!")
			fails(d.Rename("none", "x"), fs.ErrNotExist)

			temp, err := d.Temp("sub")
			must(err)
			write(t, temp, 0, "temp")
			must(temp.Sync())
			fails(temp.Link("g"), fs.ErrExist)
			fails(temp.Link("none/x"), fs.ErrNotExist)
			must(temp.Link("sub/t"))
			must(temp.Close())
			requireText(t, d, "sub/t", "temp")
			temp, err = d.Temp("sub")
			must(err)
			must(temp.Close())
			_, err = d.Temp("none")
			fails(err, fs.ErrNotExist)

			names, err := d.List("sub")
			must(err)
			if !slices.Equal(names, []string{"t"}) {
				t.Errorf("sub lists %q", names)
			}
			names, err = d.List(".")
			must(err)
			if !slices.Equal(names, []string{"g", "sub"}) {
				t.Errorf("the directory lists %q", names)
			}
			_, err = d.List("none")
			fails(err, fs.ErrNotExist)
			must(d.SyncDir("."))
			must(d.SyncDir("sub"))
			fails(d.SyncDir("none"), fs.ErrNotExist)
			if err := d.Remove("sub"); err == nil {
				t.Error("a directory that is not empty was removed")
			}
			must(d.Remove("sub/t"))
			must(d.Remove("sub"))
			fails(d.Remove("sub"), fs.ErrNotExist)

			lock, err := d.Lock()
			must(err)
			_, err = d.Lock()
			fails(err, hostfs.ErrLocked)
			must(lock.Close())
			lock, err = d.Lock()
			must(err)
			must(lock.Close())
			must(d.Close())
		})
	}
}

func TestDirHasNoOutside(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "secret"), []byte("s"), 0o600); err != nil {
		t.Fatal(err)
	}
	d, _, err := hostfs.MakeDir(filepath.Join(dir, "d"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../secret", filepath.Join(dir, "d", "link")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"../secret", "link", filepath.Join(dir, "secret")} {
		if _, err := d.Open(name); err == nil {
			t.Errorf("opened %q, which is outside", name)
		}
	}
	// The directory is where its descriptor is, whatever becomes of its name.
	if err := os.Rename(filepath.Join(dir, "d"), filepath.Join(dir, "e")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Create("new"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "e", "new")); err != nil {
		t.Error(err)
	}
}

func TestMakeDirTakesADirectoryThatIsThere(t *testing.T) {
	dir := t.TempDir()
	d, made, err := hostfs.MakeDir(dir)
	if err != nil || made {
		t.Errorf("MakeDir: made %v, %v", made, err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if _, _, err := hostfs.MakeDir(filepath.Join(dir, "none", "d")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("MakeDir beneath nothing: %v", err)
	}
}

// TestCrashClone: what was synced stays, what was not is kept or not as told.
func TestCrashClone(t *testing.T) {
	none := func() bool { return false }
	all := func() bool { return true }
	m := memfs.New()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(m.Mkdir("a"))
	must(m.Mkdir("b"))
	must(m.SyncDir("."))
	f, err := m.Create("a/f")
	must(err)
	write(t, f, 0, "synced")
	must(f.Sync())
	lists := func(m *memfs.FS, dir string, want ...string) {
		t.Helper()
		if got, err := m.List(dir); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s lists %q, %v; want %q", dir, got, err, want)
		}
	}
	lists(m.CrashClone(none), "a")
	lists(m.CrashClone(all), "a", "f")
	must(m.SyncDir("a"))
	write(t, f, 3, "more to come")
	requireText(t, m.CrashClone(none), "a/f", "synced")
	requireText(t, m.CrashClone(all), "a/f", "synmore to come")

	must(m.Rename("a/f", "b/g"))
	lists(m.CrashClone(none), "a", "f")
	lists(m.CrashClone(none), "b")
	lists(m.CrashClone(all), "b", "g")
	must(m.SyncDir("b"))
	clone := m.CrashClone(none)
	lists(clone, "a")
	requireText(t, clone, "b/g", "synced")

	must(m.Remove("b/g"))
	lists(m.CrashClone(none), "b", "g")
	must(m.SyncDir("b"))
	lists(m.CrashClone(none), "b")

	// A name in a directory whose own name was lost is lost.
	must(m.Mkdir("c"))
	_, err = m.Create("c/f")
	must(err)
	must(m.SyncDir("c"))
	lists(m.CrashClone(none), ".", "a", "b")
	lists(m.CrashClone(all), "c", "f")
}

func TestSectorsSurviveOneByOne(t *testing.T) {
	m := memfs.New()
	f, err := m.Create("f")
	if err != nil {
		t.Fatal(err)
	}
	if err := m.SyncDir("."); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 3*memfs.SectorSize)
	for i := range b {
		b[i] = 'x'
	}
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	asked := 0
	clone := m.CrashClone(func() bool {
		asked++
		return asked == 3
	})
	if asked != 3 {
		t.Errorf("asked for %d changes, want one a sector", asked)
	}
	clear(b[:2*memfs.SectorSize])
	requireText(t, clone, "f", string(b))
}

func TestCapacity(t *testing.T) {
	m := memfs.New()
	f, err := m.Create("f")
	if err != nil {
		t.Fatal(err)
	}
	m.SetCapacity(10)
	if n, err := f.WriteAt(make([]byte, 15), 0); n != 10 || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("write beyond the capacity: %d, %v; want 10, %v", n, err, syscall.ENOSPC)
	}
	if n, err := f.WriteAt(make([]byte, 10), 0); n != 10 || err != nil {
		t.Errorf("write over what is there: %d, %v", n, err)
	}
	if got := m.Used(); got != 10 {
		t.Errorf("used %d, want 10", got)
	}
}

func TestFaults(t *testing.T) {
	boom := errors.New("boom")
	run := func(plan faultfs.Plan) (failed []bool, d *faultfs.FS) {
		d = faultfs.New(memfs.New(), plan)
		for range 5 {
			failed = append(failed, errors.Is(d.Mkdir("d"), boom))
		}
		return failed, d
	}
	for _, tc := range []struct {
		plan faultfs.Plan
		want []bool
	}{
		{faultfs.Plan{Nth: -1, Err: boom}, []bool{false, false, false, false, false}},
		{faultfs.Plan{Nth: 1, Err: boom}, []bool{false, true, false, false, false}},
		{faultfs.Plan{Nth: 1, Count: 2, Err: boom}, []bool{false, true, true, false, false}},
		{faultfs.Plan{Nth: 3, Count: -1, Err: boom}, []bool{false, false, false, true, true}},
	} {
		got, d := run(tc.plan)
		if !slices.Equal(got, tc.want) || d.Fired() != slices.Contains(tc.want, true) || len(d.Steps()) != 5 {
			t.Errorf("%+v failed %v of %q, want %v", tc.plan, got, d.Steps(), tc.want)
		}
	}

	mem := memfs.New()
	d := faultfs.New(mem, faultfs.Plan{Nth: 1, Err: boom})
	f, err := d.Create("f")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := f.WriteAt([]byte("12345678"), 0); n != 4 || !errors.Is(err, boom) {
		t.Errorf("failing write: %d, %v; want half of it, %v", n, err, boom)
	}
	requireText(t, mem, "f", "1234")
}
