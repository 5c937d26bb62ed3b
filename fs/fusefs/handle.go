package fusefs

import (
	"crypto/rand"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// handle is what the kernel keeps for an open file and gives back with each
// request: the operation that opened it, and the server that counted the open.
// It points at nothing, so one that an earlier server gave out serves as well;
// only its RELEASE counts for nothing.
//
//	bits 0-31   operation
//	bits 40-63  the server's epoch; 0 when the open was not counted
type handle uint64

const epochBits = 24

func newHandle(epoch uint32, op tree.Op) handle { return handle(epoch)<<40 | handle(op) }

func (h handle) op() tree.Op   { return tree.Op(h) }
func (h handle) epoch() uint32 { return uint32(h >> 40) }

// newNonce returns a random number of that many bits that is not zero.
func newNonce(bits int) uint32 {
	var b [4]byte
	for {
		rand.Read(b[:]) // never fails
		if n := binary.LittleEndian.Uint32(b[:]) >> (32 - bits); n != 0 {
			return n
		}
	}
}

// pins holds the inodes without a name that the kernel still knows. Each is
// acquired once, until the kernel forgets it.
type pins struct {
	n  atomic.Int64 // len(inos), readable without mu
	mu sync.Mutex
	// inos is guarded by mu.
	inos map[tree.Ino]bool
}

// keep takes over one acquisition of ino, or gives it back when there is one.
func (p *pins) keep(fs *overlay.FS, ino tree.Ino) {
	p.mu.Lock()
	known := p.inos[ino]
	if !known {
		if p.inos == nil {
			p.inos = map[tree.Ino]bool{}
		}
		p.inos[ino] = true
		p.n.Store(int64(len(p.inos)))
	}
	p.mu.Unlock()
	if known {
		fs.Release(ino)
	}
}

// forget releases ino when it is pinned.
func (p *pins) forget(fs *overlay.FS, ino tree.Ino) {
	if p.n.Load() == 0 {
		return
	}
	p.mu.Lock()
	known := p.inos[ino]
	delete(p.inos, ino)
	p.n.Store(int64(len(p.inos)))
	p.mu.Unlock()
	if known {
		fs.Release(ino)
	}
}

// releaseAll is for the end of the connection: nothing is known to the kernel
// any more.
func (p *pins) releaseAll(fs *overlay.FS) {
	p.mu.Lock()
	inos := p.inos
	p.inos = nil
	p.n.Store(0)
	p.mu.Unlock()
	for ino := range inos {
		fs.Release(ino)
	}
}
