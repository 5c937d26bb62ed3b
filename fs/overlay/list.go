package overlay

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"
)

// Bounds of what listings keeps: how many, and how many names in all.
const (
	maxListings = 256
	maxListed   = 1 << 17
	largeList   = 1 << 15 // a longer listing goes when its reader is through
	maxMarks    = 4096

	generationBits = 31 // a cookie is a loff_t to the kernel and must not be negative
)

// listings keeps the directory listings that readers are in the middle of. A
// cookie is the listing's generation and the ordinal of the next name, so that a
// reader sees each name that was there when it began exactly once, whatever is
// made or removed meanwhile. A listing that had to make room is remembered by
// where its reader was.
type listings struct {
	mu      sync.Mutex
	next    uint32                // generation to give out
	clock   uint64                // counts uses
	current map[tree.Ino]*listing // the newest, while the directory is unchanged
	byGen   map[uint32]*listing
	names   int // in all listings
	marks   map[uint32]mark
	evicted []uint32 // keys of marks, oldest first
}

type listing struct {
	gen     uint32
	dir     tree.Ino
	entries []tree.Dirent // immutable
	used    uint64
	reached int // ordinal up to which a reader came last
}

// mark is where the reader of a listing that is gone was.
type mark struct {
	dir     tree.Ino
	reached int
	name    string // the last one given
}

func (l *listings) init(now time.Time) {
	// Starting from the clock, cookies of an earlier server are not mistaken
	// for our own.
	l.next = uint32(now.UnixNano()>>10) & (1<<generationBits - 1)
	l.current = map[tree.Ino]*listing{}
	l.byGen = map[uint32]*listing{}
	l.marks = map[uint32]mark{}
}

// changed tells that dir's names are not what its current listing says.
func (l *listings) changed(dir tree.Ino) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.current, dir)
}

func (l *listings) changedAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.current)
}

// find gives the listing to continue: the current one of dir for generation 0.
func (l *listings) find(dir tree.Ino, gen uint32) *listing {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.current[dir]
	if gen != 0 {
		s = l.byGen[gen]
	}
	if s == nil || s.dir != dir {
		return nil
	}
	l.clock++
	s.used = l.clock
	return s
}

// add keeps a new listing, making room for it.
func (l *listings) add(dir tree.Ino, entries []tree.Dirent) *listing {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = (l.next + 1) & (1<<generationBits - 1)
	if l.next == 0 {
		l.next = 1
	}
	l.clock++
	s := &listing{gen: l.next, dir: dir, entries: entries, used: l.clock}
	l.current[dir], l.byGen[s.gen] = s, s
	l.names += len(entries)
	if len(l.byGen) > maxListings || l.names > maxListed {
		l.evict(s)
	}
	return s
}

// evict drops the least used quarter, keep excepted, until the bounds hold.
func (l *listings) evict(keep *listing) {
	all := make([]*listing, 0, len(l.byGen))
	for _, s := range l.byGen {
		if s != keep {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *listing) int { return cmp.Compare(a.used, b.used) })
	for i, s := range all {
		if i >= maxListings/4 && l.names <= maxListed {
			return
		}
		l.drop(s)
	}
}

func (l *listings) drop(s *listing) {
	delete(l.byGen, s.gen)
	if l.current[s.dir] == s {
		delete(l.current, s.dir)
	}
	l.names -= len(s.entries)
	if s.reached == 0 || s.reached == len(s.entries) {
		return
	}
	l.marks[s.gen] = mark{dir: s.dir, reached: s.reached, name: s.entries[s.reached-1].Name}
	if l.evicted = append(l.evicted, s.gen); len(l.evicted) > maxMarks {
		delete(l.marks, l.evicted[0])
		l.evicted = l.evicted[1:]
	}
}

// resume finds where in fresh the reader of a listing that is gone goes on.
func (l *listings) resume(fresh *listing, gen uint32, ordinal int) int {
	l.mu.Lock()
	m, ok := l.marks[gen]
	l.mu.Unlock()
	if !ok || m.dir != fresh.dir || m.reached != ordinal {
		return min(ordinal, len(fresh.entries)) // the best that is left
	}
	i, found := slices.BinarySearchFunc(fresh.entries, m.name, func(d tree.Dirent, name string) int { return cmp.Compare(d.Name, name) })
	if found {
		i++
	}
	return i
}

// reached notes where a reader is. One that asks at the end and gets nothing
// has read all.
func (l *listings) reached(s *listing, from, to int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.reached = to
	if from == len(s.entries) && from > largeList && l.byGen[s.gen] == s {
		l.drop(s)
	}
}

// ReadDir gives the names of dir in byte order, without "." and "..", from
// cookie on: 0 for the start, or a next that fn was given. It stops when fn
// returns false; that name is then the first of a call with the cookie before
// it. A reader that started at 0 sees the directory as it was then. fn may call
// FS.
func (f *FS) ReadDir(dir tree.Ino, cookie uint64, fn func(d tree.Dirent, next uint64) bool) error {
	gen, ordinal := uint32(cookie>>32), int(uint32(cookie))
	s := f.listings.find(dir, gen)
	if s == nil {
		var err error
		if s, err = f.list(dir); err != nil {
			return err
		}
		ordinal = f.listings.resume(s, gen, ordinal)
	}
	from := ordinal
	for ordinal < len(s.entries) {
		next := uint64(s.gen)<<32 | uint64(ordinal+1)
		if !fn(s.entries[ordinal], next) {
			break
		}
		ordinal++
	}
	f.listings.reached(s, from, ordinal)
	return nil
}

// list makes the listing of dir as it is now. It is known to listings before mu
// is let go, so that no change is missed.
func (f *FS) list(dir tree.Ino) (*listing, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if _, err := f.dirRecord(dir); err != nil {
		return nil, err
	}
	var entries []tree.Dirent
	if err := f.each(dir, "", func(d tree.Dirent) bool { entries = append(entries, d); return true }); err != nil {
		return nil, err
	}
	return f.listings.add(dir, entries), nil
}

// each gives the names of dir at or after from in byte order. The caller holds
// mu.
func (f *FS) each(dir tree.Ino, from string, fn func(tree.Dirent) bool) error {
	var own []*upper.Dirent
	f.up.Dirents(dir, from, func(d *upper.Dirent) bool { own = append(own, d); return true })
	more := true
	ownBefore := func(name string, all bool) {
		for more && len(own) > 0 && (all || own[0].Name < name) {
			if own[0].Ino != 0 {
				more = fn(own[0].Dirent)
			}
			own = own[1:]
		}
	}
	if n := f.up.Inode(dir); n == nil || !n.New {
		err := f.lower.ReadDir(dir, from, func(d tree.Dirent) bool {
			ownBefore(d.Name, false)
			switch {
			case !more:
			case len(own) > 0 && own[0].Name == d.Name:
				// The session's record of the name comes next, or hides it.
			default:
				more = fn(d)
			}
			return more
		})
		if err != nil && !isAbsent(err) {
			return fmt.Errorf("list directory %d: %w", dir, err)
		}
	}
	ownBefore("", true)
	return nil
}
