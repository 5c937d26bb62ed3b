package holder

import (
	"bytes"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/run"
	"ephemeral-sandbox/daemon/holder/wire"
)

// ownerSlots is the size of the table of pids whose command is known. Pids are
// dealt in order, so those in use at a time seldom share a slot.
const ownerSlots = 2048

// ownerTrust is how long an entry is believed without a look at the process.
// A pid comes back only after all others have been dealt, which takes longer.
const ownerTrust = 100 * time.Millisecond

// maxAncestors bounds the walk from a process to its stub.
const maxAncestors = 1 << 10

// owner says which command a pid belongs to. Only checked changes.
type owner struct {
	pid     uint32
	ident   uint64 // which process of that pid
	id      string
	checked atomic.Int64 // nanoseconds on the cache's clock
}

// ownerCache is a lossy table from inner pids to commands. Reading it takes no
// lock and allocates nothing.
type ownerCache struct {
	slots [ownerSlots]atomic.Pointer[owner]
}

func (c *ownerCache) slot(pid uint32) *atomic.Pointer[owner] { return &c.slots[pid%ownerSlots] }

func (c *ownerCache) find(pid uint32) *owner {
	if o := c.slot(pid).Load(); o != nil && o.pid == pid {
		return o
	}
	return nil
}

// CommandOf names the command that a process or thread belongs to, by its
// inner pid, as a FUSE request carries it. It reads only the session's procfs,
// there only what never waits for the view, and usually not even that. A process that has just ended is
// still known if it was before. It is false for the holder, for requests
// without a process, and for what ended unseen.
func (h *Holder) CommandOf(pid uint32) (id string, ok bool) {
	if pid <= 1 {
		return "", false
	}
	now := int64(time.Since(h.born))
	if o := h.owners.find(pid); o != nil && now-o.checked.Load() < int64(ownerTrust) {
		return o.id, true
	}
	h.procMu.RLock()
	defer h.procMu.RUnlock()
	if h.proc < 0 {
		return "", false
	}
	return h.resolveOwner(pid, now)
}

// resolveOwner walks from pid up to a process that is known, or to the stub of
// a command, and remembers all it passed. The caller holds procMu.
func (h *Holder) resolveOwner(pid uint32, now int64) (id string, ok bool) {
	type passed struct {
		pid   uint32
		ident uint64
	}
	var room [16]passed
	path := room[:0]
	for at, steps := pid, 0; !ok; steps++ {
		if at <= 1 || steps > maxAncestors {
			return "", false
		}
		known := h.owners.find(at)
		if known != nil {
			ident, err := run.Ident(h.proc, at)
			if err != nil || ident == known.ident { // the same, or it has ended and nobody has its pid yet
				known.checked.Store(now)
				id, ok = known.id, true
				continue
			}
		}
		st, err := run.ReadStat(h.proc, at)
		switch {
		case err != nil && len(path) > 0: // a parent has ended: its child has another now
			at = path[len(path)-1].pid
			path = path[:len(path)-1]
		case err != nil:
			return "", false
		default:
			path = append(path, passed{at, st.Ident})
			if st.Parent == 1 {
				if id, ok = h.stubOf(at); !ok {
					return "", false
				}
			}
			at = st.Parent
		}
	}
	for _, p := range path {
		o := &owner{pid: p.pid, ident: p.ident, id: id}
		o.checked.Store(now)
		h.owners.slot(p.pid).Store(o)
	}
	return id, true
}

// stubOf reads from a stub's arguments which command it is for. They say so
// before the stub does anything in the view, so no request can come too early.
func (h *Holder) stubOf(pid uint32) (id string, ok bool) {
	fd, err := unix.Openat(h.proc, strconv.FormatUint(uint64(pid), 10)+"/cmdline", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", false
	}
	defer unix.Close(fd)
	var buf [256]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return "", false
	}
	words := bytes.Split(buf[:n], []byte{0})
	if len(words) != 4 || string(words[0]) != run.Name || string(words[1]) != run.ModeStub {
		return "", false
	}
	id = string(words[2])
	h.mu.Lock()
	defer h.mu.Unlock()
	return id, h.commands[id] != nil || h.adopting && wire.ValidID(id)
}
