package overlay_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// withTwins is a lower tree in which others made "log" and "dir" too, and
// removed f and g: f's inode is still known by number, g's is not.
func withTwins() *lower {
	low := smallLower()
	low.commit = 2
	file, dir := low.inodes[2], low.inodes[3]
	file.Ino, dir.Ino = 50, 51
	low.put(file, []byte("start\n"))
	low.put(dir, nil)
	low.names[51] = map[string]tree.Dirent{}
	low.names[root]["log"] = tree.Dirent{Dir: root, Name: "log", Ino: 50, Kind: tree.File}
	low.names[root]["dir"] = tree.Dirent{Dir: root, Name: "dir", Ino: 51, Kind: tree.Dir}
	delete(low.names[root], "f")
	delete(low.names[3], "g")
	delete(low.inodes, 4)
	delete(low.content, 4)
	return low
}

// TestRebaseDropsOpen drops what the new lower tree has under other numbers, or
// not at all, while processes have it open or work in it.
func TestRebaseDropsOpen(t *testing.T) {
	for _, all := range []bool{false, true} {
		t.Run(fmt.Sprintf("all %v", all), func(t *testing.T) {
			b := newBench(t, func(o *overlay.Options) { o.KeepOrphans = true })
			log := b.create(op(1), root, "log", "start\n")
			closed := b.create(op(1), root, "closed", "x")
			dir, err := b.Mkdir(op(1), root, "dir", 0o750)
			b.must(err)
			pinned, err := b.Mkdir(op(1), root, "pinned", 0o755)
			b.must(err)
			b.write(op(1), 2, "L", 0)
			b.write(op(1), 4, "S", 4097)
			open := []tree.Ino{log, 2, 4, pinned.Ino}
			for _, ino := range open {
				b.must(b.Acquire(ino))
			}
			e := overlay.Edit{DropAll: all}
			if !all {
				d, err := b.Delta()
				b.must(err)
				for _, c := range d.Dirents {
					e.DropDirents = append(e.DropDirents, overlay.Key{Dir: c.Dir, Name: c.Name})
				}
				for _, c := range d.Inodes {
					e.DropInodes = append(e.DropInodes, c.Ino)
				}
			}
			head := withTwins()
			b.must(b.rebase(head, e))
			b.write(op(1), log, "more\n", 6)
			want := "start\nmore\n"
			same := func() {
				t.Helper()
				if b.read(log) != want || b.read(2) != "Lower\n" || b.read(4) != strings.Repeat("g", 4097)+"S"+strings.Repeat("g", 3*4096-4098) {
					t.Fatal("an open file lost its content")
				}
				for _, ino := range append(open, dir.Ino) {
					a, err := b.Attr(ino)
					if err != nil || a.Nlink != 0 {
						t.Fatalf("inode %d: %d names, %v", ino, a.Nlink, err)
					}
				}
				if a, _ := b.Attr(dir.Ino); a.Kind != tree.Dir || a.Mode != 0o750 || len(b.list(dir.Ino)) != 0 {
					t.Fatalf("the working directory is %+v with %q in it", a, b.list(dir.Ino))
				}
				_, err := b.Create(op(1), dir.Ino, "x", 0o644)
				b.want(err, tree.ErrNotExist)
				_, err = b.Lookup(dir.Ino, "x")
				b.want(err, tree.ErrNotExist)
				if d, err := b.Delta(); err != nil || len(d.Dirents)+len(d.Inodes) > 0 {
					t.Fatalf("delta: %+v, %v", d, err)
				}
				if b.lookup(root, "log").Ino != 50 || b.lookup(root, "dir").Ino != 51 {
					t.Fatal("the new lower tree does not show")
				}
			}
			same()
			_, err = b.Attr(closed)
			b.want(err, tree.ErrStale)
			head.commit = 3
			b.must(b.rebase(head, overlay.Edit{DropAll: all}))
			same()
			b.o.Lower = head
			b.reopen()
			same()

			b.o.KeepOrphans = false
			b.reopen()
			for _, ino := range append(open, dir.Ino) {
				if _, err := b.Attr(ino); ino != 2 && err == nil {
					t.Fatalf("inode %d is back", ino)
				}
			}
			b.must(b.SyncAll())
			if files := b.dataFiles(); len(files) != 0 {
				t.Fatalf("data files are left: %q", files)
			}
		})
	}
}

// TestRebaseDropsReleased is rid of a dropped inode with its last Release.
func TestRebaseDropsReleased(t *testing.T) {
	b := newBench(t, nil)
	log := b.create(op(1), root, "log", "start\n")
	dir, err := b.Mkdir(op(1), root, "dir", 0o755)
	b.must(err)
	link, err := b.Symlink(op(1), root, "link", "to")
	b.must(err)
	inos := []tree.Ino{log, dir.Ino, link.Ino}
	e := overlay.Edit{DropInodes: inos}
	for _, name := range []string{"log", "dir", "link"} {
		e.DropDirents = append(e.DropDirents, overlay.Key{Dir: root, Name: name})
	}
	for _, ino := range inos {
		b.must(b.Acquire(ino))
		b.must(b.Acquire(ino))
	}
	b.must(b.rebase(withTwins(), e))
	for _, ino := range inos {
		b.Release(ino)
		_, err := b.Attr(ino)
		b.must(err)
		b.Release(ino)
		_, err = b.Attr(ino)
		b.want(err, tree.ErrStale)
		b.want(b.Acquire(ino), tree.ErrStale)
	}
	b.must(b.SyncAll())
	if files, use := b.dataFiles(), b.Usage(); len(files) != 0 || use != (overlay.Usage{}) {
		t.Fatalf("left: %q, %+v", files, use)
	}
}

// TestRebaseReaders reads files while what the session made of them is dropped:
// each read is of one tree or of the other.
func TestRebaseReaders(t *testing.T) {
	b := newBench(t, nil)
	stop := make(chan struct{})
	errs := make(chan error, 4)
	var readers sync.WaitGroup
	for range cap(errs) {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				p := make([]byte, 10)
				n, err := b.ReadAt(2, p, 0)
				if got := string(p[:n]); err != nil || got != "lower\n" && got != "Lower\n" {
					errs <- fmt.Errorf("read %q: %w", got, err)
					return
				}
			}
		})
	}
	for i := range 200 {
		b.write(op(tree.Op(i+1)), 2, "L", 0)
		b.must(b.rebase(b.low, overlay.Edit{DropAll: i%2 == 0, DropInodes: []tree.Ino{2}}))
		if i%10 == 0 {
			b.must(b.SyncAll())
		}
	}
	close(stop)
	readers.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

// countLower counts what is asked of it.
type countLower struct {
	*lower
	calls int
}

func (l *countLower) Lookup(dir tree.Ino, name string) (tree.Dirent, error) {
	l.calls++
	return l.lower.Lookup(dir, name)
}

func (l *countLower) Inode(ino tree.Ino) (tree.Inode, error) {
	l.calls++
	return l.lower.Inode(ino)
}

func (l *countLower) Names(ino tree.Ino) ([]tree.Dirent, error) {
	l.calls++
	return l.lower.Names(ino)
}

// TestRebaseMany counts what Delta and Rebase ask of the lower trees: a few
// questions an inode, however many there are.
func TestRebaseMany(t *testing.T) {
	for _, count := range []int{100, 2000} {
		b := newBench(t, nil)
		old, head := &countLower{lower: b.low}, &countLower{lower: smallLower()}
		b.o.Lower, head.commit = old, 2
		b.reopen()
		dir, err := b.Mkdir(op(1), root, "dir", 0o755)
		b.must(err)
		for i := range count {
			_, err := b.Create(op(1), dir.Ino, fmt.Sprint(i), 0o644)
			b.must(err)
		}
		old.calls = 0
		d, err := b.Delta()
		b.must(err)
		var e overlay.Edit
		for _, c := range d.Dirents {
			e.DropDirents = append(e.DropDirents, overlay.Key{Dir: c.Dir, Name: c.Name})
			head.lower.put(tree.Inode{Attr: tree.Attr{Ino: c.Ino, Kind: c.Kind}}, nil)
		}
		for _, c := range d.Inodes {
			e.DropInodes = append(e.DropInodes, c.Ino)
		}
		b.must(b.rebase(head, e))
		if most := 3 * (count + 10); old.calls > most || head.calls > most {
			t.Errorf("%d inodes: %d questions to the old tree, %d to the new", count, old.calls, head.calls)
		}
	}
}
