package overlay_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// TestParallel has many goroutines at work in one tree: in directories of their
// own, on one file they share, and on names they fight for, while others list,
// take deltas, freeze, sync and rebase.
func TestParallel(t *testing.T) {
	const workers, rounds = 6, 60
	b := newBench(t, func(o *overlay.Options) {
		o.Hooks.Settle = func(ino tree.Ino, _ tree.Op, c overlay.File) {
			p := make([]byte, 16)
			_, _ = c.ReadAt(p, 0)
		}
	})
	shared := b.create(op(99), root, "shared", strings.Repeat("-", workers*4096))
	var work, watch sync.WaitGroup
	stop := make(chan struct{})
	errs := make(chan error, 2*workers)
	for w := range workers {
		work.Go(func() { errs <- worker(b, w, shared, rounds) })
	}
	watchers := []func() error{
		func() error { _, err := b.Delta(); return err },
		func() error { b.Freeze(); defer b.Thaw(); _, err := b.Delta(); return err },
		func() error { return b.SyncAll() },
		func() error {
			return b.ReadDir(root, 0, func(d tree.Dirent, _ uint64) bool { _, _ = b.Attr(d.Ino); return true })
		},
		func() error {
			b.Freeze()
			defer b.Thaw()
			return b.Rebase(b.low, overlay.Edit{})
		},
	}
	for _, fn := range watchers {
		watch.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := fn(); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	work.Wait()
	close(stop)
	watch.Wait()
	close(errs)
	for err := range errs {
		b.must(err)
	}
	want := ""
	for w := range workers {
		want += strings.Repeat(string(rune('a'+w)), 4096)
	}
	for range 2 {
		if b.read(shared) != want {
			t.Fatal("a write to the shared file was lost")
		}
		for w := range workers {
			dir := b.lookup(root, fmt.Sprintf("dir%d", w))
			if names := b.list(dir.Ino); len(names) != rounds {
				t.Fatalf("worker %d has %d files of %d", w, len(names), rounds)
			}
		}
		if _, err := renderFS(b.FS); err != nil {
			t.Fatal(err)
		}
		b.reopen()
	}
}

func worker(b *bench, w int, shared tree.Ino, rounds int) error {
	c := op(tree.Op(w + 1))
	dir, err := b.Mkdir(c, root, fmt.Sprintf("dir%d", w), 0o755)
	if err != nil {
		return err
	}
	for i := range rounds {
		name := fmt.Sprintf("f%d", i)
		a, err := b.Create(c, dir.Ino, "tmp", 0o644)
		if err != nil {
			return err
		}
		if err := b.Acquire(a.Ino); err != nil {
			return err
		}
		data := bytes.Repeat([]byte(name), 100)
		if _, err := b.WriteAt(c, a.Ino, data, 0); err != nil {
			return err
		}
		if err := b.Rename(c, dir.Ino, "tmp", dir.Ino, name, 0); err != nil {
			return err
		}
		got := make([]byte, len(data))
		if n, err := b.ReadAt(a.Ino, got, 0); err != nil || !bytes.Equal(got[:n], data) {
			return fmt.Errorf("worker %d reads %d bytes back: %w", w, n, err)
		}
		b.Release(a.Ino)
		part := bytes.Repeat([]byte{byte('a' + w)}, 4096/rounds+1)
		at := i * len(part)
		part = part[:max(0, min(len(part), 4096-at))]
		if _, err := b.WriteAt(c, shared, part, uint64(w*4096+at)); err != nil {
			return err
		}
		if err := fight(b, c, i); err != nil {
			return err
		}
	}
	return nil
}

// fight makes, moves and removes names that others do the same to; only answers
// that such a race explains are fine.
func fight(b *bench, c overlay.Caller, i int) error {
	names := []string{"x", "y", "z"}
	from, to := names[i%3], names[(i+int(c.Op))%3]
	var err error
	switch rand.IntN(5) {
	case 0:
		_, err = b.Create(c, root, from, 0o644)
	case 1:
		err = b.Unlink(c, root, from)
	case 2:
		err = b.Rename(c, root, from, root, to, uint32(rand.IntN(3)))
	case 3:
		var a tree.Attr
		if a, err = b.Lookup(root, from); err == nil {
			_, err = b.WriteAt(c, a.Ino, []byte("fight"), uint64(i))
		}
	case 4:
		var a tree.Attr
		if a, err = b.Lookup(root, from); err == nil {
			_, err = b.Link(c, a.Ino, root, to)
		}
	}
	for _, fine := range []error{tree.ErrExist, tree.ErrNotExist, tree.ErrStale} {
		if errors.Is(err, fine) {
			return nil
		}
	}
	return err
}

const childDir = "OVERLAY_TEST_CHILD_DIR"

// TestMain runs the victim of TestKilled when that started it.
func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		victim(dir)
		return
	}
	os.Exit(m.Run())
}

// victim works on the tree in dir and says each step on stdout once its call
// has returned, until it is killed.
func victim(dir string) {
	next := tree.Ino(1000)
	f, err := overlay.Open(overlay.Options{Dir: dir, Lower: smallLower(), NewIno: func() (tree.Ino, error) { next++; return next, nil }})
	for i := 0; err == nil; i++ {
		var a tree.Attr
		name := fmt.Sprintf("n%d", i)
		if a, err = f.Create(op(1), root, "tmp", 0o644); err != nil {
			break
		}
		if _, err = f.WriteAt(op(1), a.Ino, []byte(name), 0); err != nil {
			break
		}
		fmt.Printf("written %s\n", name)
		if err = f.Rename(op(1), root, "tmp", root, name, 0); err != nil {
			break
		}
		fmt.Printf("renamed %s\n", name)
		if _, err = f.WriteAt(op(1), 4, []byte{byte(i)}, uint64(i)); err != nil {
			break
		}
		fmt.Printf("marked %d\n", i)
		if i%3 == 2 {
			if err = f.Unlink(op(1), root, name); err != nil {
				break
			}
			fmt.Printf("removed %s\n", name)
		}
	}
	fmt.Println("failed", err)
}

// TestKilled kills a process at work with SIGKILL and finds, on opening its
// tree again, everything that it had been told was done.
func TestKilled(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for range 15 {
		b := newBench(t, nil)
		b.must(b.Close())
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), childDir+"="+b.o.Dir)
		out, err := cmd.StdoutPipe()
		b.must(err)
		b.must(cmd.Start())
		steps := bufio.NewScanner(out)
		var done []string
		for after := 1 + rand.IntN(300); after > 0 && steps.Scan(); after-- {
			done = append(done, steps.Text())
		}
		b.must(cmd.Process.Kill())
		for steps.Scan() { // told before the end came
			done = append(done, steps.Text())
		}
		_ = cmd.Wait()
		b.FS = nil
		b.reopen()
		checkKilled(b, done)
	}
}

func checkKilled(b *bench, done []string) {
	b.t.Helper()
	removed := map[string]bool{}
	for i, step := range done {
		what, name, _ := strings.Cut(step, " ")
		last := i >= len(done)-1
		switch what {
		case "removed":
			if _, err := b.Lookup(root, name); !errors.Is(err, tree.ErrNotExist) {
				b.t.Fatalf("%s: %v", step, err)
			}
		case "renamed":
			removed[name] = len(done) > i+2 && strings.HasPrefix(done[i+2], "removed")
			// The step after the last told may have happened.
			if a, err := b.Lookup(root, name); !removed[name] && i < len(done)-2 && err != nil {
				b.t.Fatalf("%s: %v", step, err)
			} else if err == nil && b.read(a.Ino) != name {
				b.t.Fatalf("%s holds %q", step, b.read(a.Ino))
			}
		case "written":
			if a, err := b.Lookup(root, "tmp"); last && err == nil && b.read(a.Ino) != name {
				b.t.Fatalf("%s: tmp holds %q", step, b.read(a.Ino))
			}
		case "marked":
			var n int
			if _, err := fmt.Sscanf(name, "%d", &n); err != nil || b.read(4)[n] != byte(n) {
				b.t.Fatalf("%s: not there, %v", step, err)
			}
		default:
			b.t.Fatal(step)
		}
	}
	if _, err := renderFS(b.FS); err != nil {
		b.t.Fatal(err)
	}
}
