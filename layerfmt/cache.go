package layerfmt

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
)

// blockClass is the sort of thing that a cached block is.
type blockClass uint8

const (
	blockDirents blockClass = iota // page of the dirent tree
	blockInodes                    // page of the inode tree
	blockFrames                    // piece of the frame table
	blockHeap                      // heap record
	blockData                      // decoded frame
)

type blockKey struct {
	reader uint64
	index  uint64
	class  blockClass
}

// block is what the cache holds: bytes that were checked, and the page read
// from them if they are one. It is never written to.
type block struct {
	data []byte
	page *page
}

// blockOverhead is what a cached block costs beside its bytes, roughly.
const blockOverhead = 256

func (b block) cost() int64 { return int64(cap(b.data)) + blockOverhead }

type cacheEntry struct {
	key    blockKey
	loaded chan struct{} // closed when block and err are set
	ok     atomic.Bool   // set before loaded is closed, when err is nil
	used   atomic.Bool   // looked up since the hand last passed
	block  block
	err    error
}

// cacheShard is one part of a cache, evicted by the clock algorithm.
type cacheShard struct {
	max    int64 // bytes
	hits   atomic.Uint64
	misses atomic.Uint64

	mu      sync.RWMutex
	entries map[blockKey]*cacheEntry // guarded by mu; holds entries being loaded, too
	ring    []*cacheEntry            // guarded by mu; those that count
	hand    int                      // guarded by mu
	bytes   int64                    // guarded by mu
}

// FrameCache holds decoded frames and checked pages of any number of Readers,
// within a bound of bytes. A block that many goroutines want at once is loaded
// once. Errors are not kept.
type FrameCache struct {
	shards  []*cacheShard
	readers atomic.Uint64 // the number of the last Reader opened
	decoder *zstd.Decoder
	broken  error // why there is no decoder
}

// The number of shards, and the least each must hold to be worth having.
const (
	maxShards     = 16
	minShardBytes = 1 << 20
)

// NewFrameCache returns a cache that keeps at most about maxBytes.
func NewFrameCache(maxBytes int64) *FrameCache {
	shards := max(1, min(maxShards, maxBytes/minShardBytes))
	c := &FrameCache{}
	for range shards {
		c.shards = append(c.shards, &cacheShard{
			max:     maxBytes / shards,
			entries: make(map[blockKey]*cacheEntry),
		})
	}
	c.decoder, c.broken = zstd.NewReader(nil,
		zstd.WithDecoderConcurrency(0),
		zstd.WithDecoderMaxMemory(maxNamedSection),
		zstd.WithDecodeAllCapLimit(true))
	return c
}

// CacheStats counts what a cache holds and how well it served.
type CacheStats struct {
	Hits, Misses uint64
	Blocks       int
	Bytes        int64
}

// Stats returns the counts so far.
func (c *FrameCache) Stats() CacheStats {
	var s CacheStats
	for _, sh := range c.shards {
		s.Hits += sh.hits.Load()
		s.Misses += sh.misses.Load()
		sh.mu.RLock()
		s.Blocks += len(sh.ring)
		s.Bytes += sh.bytes
		sh.mu.RUnlock()
	}
	return s
}

func (c *FrameCache) shard(k blockKey) *cacheShard {
	// Odd factors with well mixed bits spread neighbours over the shards.
	h := k.reader*0x9e3779b97f4a7c15 ^ (k.index<<3|uint64(k.class))*0xc2b2ae3d27d4eb4f
	return c.shards[(h>>32)%uint64(len(c.shards))]
}

// get returns the block of key k, loading it if need be. No lock is held while
// load runs.
func (c *FrameCache) get(k blockKey, load func() (block, error)) (block, error) {
	s := c.shard(k)
	s.mu.RLock()
	e := s.entries[k]
	s.mu.RUnlock()
	if e == nil {
		var mine bool
		if e, mine = s.claim(k); mine {
			s.misses.Add(1)
			return s.fill(e, load)
		}
	}
	if !e.ok.Load() {
		<-e.loaded
		if e.err != nil {
			return block{}, e.err
		}
	}
	if !e.used.Load() {
		e.used.Store(true)
	}
	s.hits.Add(1)
	return e.block, nil
}

// claim returns the entry for k and whether the caller is the one to fill it.
func (s *cacheShard) claim(k blockKey) (*cacheEntry, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[k]; e != nil {
		return e, false
	}
	e := &cacheEntry{key: k, loaded: make(chan struct{})}
	s.entries[k] = e
	return e, true
}

// errLoadPanicked is what waiters get when the goroutine that loaded for them
// did not come back.
var errLoadPanicked = errors.New("loading a block did not finish")

func (s *cacheShard) fill(e *cacheEntry, load func() (block, error)) (block, error) {
	e.err = errLoadPanicked
	defer close(e.loaded)
	defer s.settle(e)
	e.block, e.err = load()
	e.ok.Store(e.err == nil)
	return e.block, e.err
}

// settle makes a filled entry count, or forgets it when it failed or is more
// than the shard can hold.
func (s *cacheShard) settle(e *cacheEntry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cost := e.block.cost()
	if e.err != nil || cost > s.max {
		delete(s.entries, e.key)
		return
	}
	s.ring = append(s.ring, e)
	s.bytes += cost
	for s.bytes > s.max {
		s.evictLocked(e)
	}
}

// evictLocked drops the next entry not used since the hand last passed. It
// spares keep, which just came in, as long as there is any other.
func (s *cacheShard) evictLocked(keep *cacheEntry) {
	for {
		s.hand %= len(s.ring)
		e := s.ring[s.hand]
		if e == keep && len(s.ring) > 1 || e.used.Swap(false) {
			s.hand++
			continue
		}
		last := len(s.ring) - 1
		s.ring[s.hand], s.ring[last] = s.ring[last], nil
		s.ring = s.ring[:last]
		delete(s.entries, e.key)
		s.bytes -= e.block.cost()
		return
	}
}

// decode decompresses stored, which must give exactly raw bytes.
func (c *FrameCache) decode(stored []byte, raw int) ([]byte, error) {
	if c.broken != nil {
		return nil, fmt.Errorf("make a decompressor: %w", c.broken)
	}
	// The decoder writes faster when it may overrun the end by a little.
	out, err := c.decoder.DecodeAll(stored, make([]byte, 0, raw+decodeSlack))
	switch {
	case err != nil:
		return nil, err
	case len(out) != raw:
		return nil, fmt.Errorf("%d bytes came out, not %d", len(out), raw)
	}
	return out, nil
}

// decodeSlack is room after the output that lets the decoder copy in whole
// words.
const decodeSlack = 16
