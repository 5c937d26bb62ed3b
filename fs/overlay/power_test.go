package overlay_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// TestPowerLoss has the power fail with the journal as it was at the last sync
// and with everything that was done to the data files since: what was synced
// then is there, whatever took its owner away later.
func TestPowerLoss(t *testing.T) {
	next := func(b *bench) *lower {
		low := smallLower()
		low.commit = b.low.commit + 1
		return low
	}
	for name, after := range map[string]func(b *bench, mine tree.Ino){
		"unlink": func(b *bench, _ tree.Ino) {
			b.must(b.Unlink(op(2), root, "mine"))
			b.must(b.Unlink(op(2), root, "f"))
		},
		"rename over": func(b *bench, _ tree.Ino) {
			b.create(op(2), root, "x", "x")
			b.must(b.Rename(op(2), root, "x", root, "mine", 0))
			b.must(b.Rename(op(2), root, "mine", root, "f", 0))
		},
		"last close": func(b *bench, mine tree.Ino) {
			b.must(b.Acquire(mine))
			b.must(b.Unlink(op(2), root, "mine"))
			b.Release(mine)
		},
		"drop": func(b *bench, _ tree.Ino) {
			b.must(b.rebase(next(b), overlay.Edit{DropAll: true}))
		},
		"drop, and write again": func(b *bench, _ tree.Ino) {
			b.must(b.rebase(next(b), overlay.Edit{DropInodes: []tree.Ino{2}}))
			b.write(op(2), 2, "XXXXXX", 0)
			if b.read(2) != "XXXXXX" {
				b.t.Fatal("what was written after the drop is not there")
			}
		},
		"drop, and new content": func(b *bench, _ tree.Ino) {
			low := next(b)
			low.put(low.inodes[2], []byte("head"))
			b.must(b.rebase(low, overlay.Edit{DropInodes: []tree.Ino{2}, Files: []overlay.FileEdit{{Ino: 2, Content: []byte("again")}}}))
		},
		"new content": func(b *bench, mine tree.Ino) {
			b.must(b.rebase(next(b), overlay.Edit{Files: []overlay.FileEdit{
				{Ino: mine, Content: []byte("other")}, {Ino: 2, Content: []byte("other")},
			}}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, nil)
			mine := b.create(op(1), root, "mine", "mine")
			b.write(op(1), 2, "L", 0)
			b.must(b.SyncAll())
			journal, err := os.ReadFile(filepath.Join(b.o.Dir, "journal"))
			b.must(err)
			after(b, mine)
			lost := newBench(t, func(o *overlay.Options) {
				b.must(os.CopyFS(o.Dir, os.DirFS(b.o.Dir)))
				b.must(os.WriteFile(filepath.Join(o.Dir, "journal"), journal, 0o600))
			})
			if lost.read(lost.lookup(root, "mine").Ino) != "mine" || lost.read(2) != "Lower\n" {
				t.Fatal("synced bytes are lost")
			}
			b.must(b.SyncAll())
			before := b.dataFiles()
			b.o.Lower = b.lowerNow()
			b.reopen() // sweeps
			if left := b.dataFiles(); !slices.Equal(left, before) {
				t.Fatalf("a sync leaves %q, a sweep %q", before, left)
			}
		})
	}
}

// lowerNow is the lower tree of the commit that the journal stands on.
func (b *bench) lowerNow() *lower {
	b.t.Helper()
	commit, _, err := overlay.PeekBase(b.o.Dir)
	b.must(err)
	low := smallLower()
	low.commit = commit
	return low
}
