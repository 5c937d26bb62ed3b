package upper

import (
	"sync"

	"ephemeral-sandbox/fs/tree"
)

// Unused is a data file that a committed frame left without an owner.
type Unused struct {
	Ino   tree.Ino
	Gen   uint32
	Bytes uint64 // that counted in it
}

// How much garbage may wait for somebody else's Sync. With more than that the
// upper syncs its journal by itself, beside whoever discards.
const (
	garbageFiles = 512
	garbageBytes = 32 << 20
)

// garbage is the list of data files to remove. The frame that made a file
// garbage must outlive the machine before the file goes: a power loss in between
// would bring an owner back whose synced bytes are gone. A killed process
// forgets the list; what is on it then goes in the sweep at the next Open.
type garbage struct {
	mu      sync.Mutex
	list    []Unused            // oldest first; guarded by mu, as all below
	first   uint64              // number of list[0], counted from the first ever
	bytes   uint64              // in list
	gens    map[tree.Ino]uint32 // the highest generation in list
	durable uint64              // files below this number may be removed
	busy    bool                // somebody removes
	closed  bool

	work sync.WaitGroup // of the goroutine that removes, if any
}

// end is the number that the next file gets. The caller holds mu.
func (g *garbage) end() uint64 { return g.first + uint64(len(g.list)) }

// full tells whether the upper is to sync by itself. The caller holds mu.
func (g *garbage) full() bool { return len(g.list) > garbageFiles || g.bytes > garbageBytes }

// Discard removes data files once the frames committed so far are durable. It
// waits for no disk.
func (u *Upper) Discard(files []Unused) {
	g := &u.garbage
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || len(files) == 0 {
		return
	}
	if g.gens == nil {
		g.gens = map[tree.Ino]uint32{}
	}
	for _, x := range files {
		g.list = append(g.list, x)
		g.bytes += x.Bytes
		g.gens[x.Ino] = max(g.gens[x.Ino], x.Gen)
	}
	if g.full() && !g.busy {
		g.busy = true
		g.work.Go(u.collect)
	}
}

// NextGen is a generation for a new data file of ino. It is none whose file
// waits to be removed: that one's bytes may still come to count again.
func (u *Upper) NextGen(ino tree.Ino) uint32 {
	g := &u.garbage
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.gens[ino] + 1
}

// collect makes the journal durable and removes garbage until little is left.
func (u *Upper) collect() {
	g := &u.garbage
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.full() && !g.closed {
		end := g.end()
		g.mu.Unlock()
		err := u.journal.sync()
		g.mu.Lock()
		if err != nil {
			break // it sticks, and whoever commits next hears of it
		}
		g.durable = max(g.durable, end)
		u.removeDurable()
	}
	g.busy = false
}

// syncGarbage is Sync with the removal of what was discarded before it.
func (u *Upper) syncGarbage() error {
	g := &u.garbage
	g.mu.Lock()
	end := g.end()
	g.mu.Unlock()
	if err := u.journal.sync(); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.durable = max(g.durable, end)
	if !g.busy { // else that one goes on with these
		g.busy = true
		u.removeDurable()
		g.busy = false
	}
	return nil
}

// removeDurable removes what may be removed. The caller holds mu, which is let
// go while the disk works, and has set busy.
func (u *Upper) removeDurable() {
	g := &u.garbage
	for g.first < g.durable && len(g.list) > 0 && !g.closed {
		x := g.list[0]
		g.mu.Unlock()
		_ = u.RemoveData(x.Ino, x.Gen) // else the next Open gets it
		g.mu.Lock()
		// Only now: until the file is gone its generation is taken.
		if g.gens[x.Ino] == x.Gen {
			delete(g.gens, x.Ino)
		}
		g.bytes -= x.Bytes
		g.list = g.list[1:]
		g.first++
	}
	if len(g.list) == 0 {
		g.list = nil
	}
}

// close ends removals; what is left is for the next Open.
func (g *garbage) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.work.Wait()
}
