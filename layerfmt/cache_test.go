package layerfmt

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"ephemeral-sandbox/fs/tree"
)

func keyOf(i int) blockKey { return blockKey{reader: 1, class: blockData, index: uint64(i)} }

func loadN(n int) func() (block, error) {
	return func() (block, error) { return block{data: make([]byte, n)}, nil }
}

func TestCacheStaysWithinItsBound(t *testing.T) {
	for _, bound := range []int64{0, 1000, 1 << 20, 40 << 20} {
		t.Run(fmt.Sprint(bound), func(t *testing.T) {
			c := NewFrameCache(bound)
			rng := rand.New(rand.NewPCG(1, 2))
			for range 3000 {
				_, err := c.get(keyOf(rng.IntN(500)), loadN(rng.IntN(chunkSize)))
				must(t, err)
				if s := c.Stats(); s.Bytes > bound {
					t.Fatalf("%d bytes, more than %d", s.Bytes, bound)
				}
			}
			s := c.Stats()
			if s.Hits+s.Misses != 3000 {
				t.Errorf("%d hits and %d misses", s.Hits, s.Misses)
			}
			if bound >= 1<<20 && (s.Hits == 0 || s.Blocks == 0 || s.Bytes < bound/4) {
				t.Errorf("the cache is of little use: %+v", s)
			}
			for _, sh := range c.shards {
				if len(sh.entries) != len(sh.ring) {
					t.Errorf("%d entries, %d of them count", len(sh.entries), len(sh.ring))
				}
			}
		})
	}
}

func TestCacheKeepsWhatIsUsed(t *testing.T) {
	c := NewFrameCache(minShardBytes) // one shard
	var loads atomic.Int64
	hot := func() {
		_, err := c.get(keyOf(-1), func() (block, error) {
			loads.Add(1)
			return block{data: make([]byte, 100<<10)}, nil
		})
		must(t, err)
	}
	for i := range 1000 {
		hot()
		_, err := c.get(keyOf(i), loadN(100<<10))
		must(t, err)
	}
	if n := loads.Load(); n != 1 {
		t.Errorf("a block in constant use was loaded %d times", n)
	}
}

func TestCacheLoadsOnce(t *testing.T) {
	c := NewFrameCache(1 << 20)
	var loads atomic.Int64
	inside, gate := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	get := func() {
		b, err := c.get(keyOf(1), func() (block, error) {
			loads.Add(1)
			close(inside)
			<-gate
			return block{data: []byte("once")}, nil
		})
		if err != nil || string(b.data) != "once" {
			t.Errorf("got %q, %v", b.data, err)
		}
	}
	wg.Go(get)
	<-inside
	for range 20 {
		wg.Go(get)
	}
	// Another block is not held up meanwhile.
	_, err := c.get(keyOf(2), loadN(1))
	must(t, err)
	close(gate)
	wg.Wait()
	if n := loads.Load(); n != 1 {
		t.Errorf("loaded %d times", n)
	}
}

func TestCacheForgetsErrors(t *testing.T) {
	c := NewFrameCache(1 << 20)
	boom := errors.New("boom")
	if _, err := c.get(keyOf(1), func() (block, error) { return block{}, boom }); !errors.Is(err, boom) {
		t.Fatalf("first: %v", err)
	}
	if b, err := c.get(keyOf(1), loadN(3)); err != nil || len(b.data) != 3 {
		t.Fatalf("second: %v, %v", b, err)
	}
	// A load that never returns a value must not strand those who wait for it.
	inside, waited := make(chan struct{}), make(chan error, 1)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_, err := c.get(keyOf(2), func() (block, error) {
			go func() {
				close(inside)
				_, err := c.get(keyOf(2), loadN(3))
				waited <- err
			}()
			<-inside
			panic("in the disk")
		})
		t.Errorf("came back: %v", err)
	}()
	// The waiter saw the failed load or came after it and loaded for itself.
	if err := <-waited; err != nil && !errors.Is(err, errLoadPanicked) {
		t.Errorf("waiter: %v", err)
	}
}

// TestManyReadersOfOneCache has goroutines read packs through a cache far too
// small for them.
func TestManyReadersOfOneCache(t *testing.T) {
	pack := everythingPack(t, WriterOptions{Kind: Base})
	want, err := dump(open(t, pack))
	must(t, err)
	cache := NewFrameCache(64 << 10)
	var shared []*Reader
	for range 2 {
		r, err := Open(bytes.NewReader(pack), int64(len(pack)), ReaderOptions{Name: "test", Cache: cache})
		must(t, err)
		shared = append(shared, r)
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 5 {
				if got, err := dump(shared[i%2]); err != nil || got != want {
					t.Errorf("read otherwise: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestWarmReadsDoNotAllocate holds the hot paths of a mounted view.
func TestWarmReadsDoNotAllocate(t *testing.T) {
	pack := everythingPack(t, WriterOptions{Kind: Base})
	r := open(t, pack)
	n, _, err := r.Inode(19)
	must(t, err)
	f, err := r.File(n)
	must(t, err)
	p := make([]byte, 4096)
	paths := map[string]func(){
		"lookup": func() { r.Lookup(2, "large") },        //nolint:errcheck // only counted
		"absent": func() { r.Lookup(2, "no such name") }, //nolint:errcheck // only counted
		"inode":  func() { r.Inode(19) },                 //nolint:errcheck // only counted
		"read":   func() { f.ReadAt(p, 5000) },           //nolint:errcheck // only counted
	}
	for name, path := range paths {
		if n := testing.AllocsPerRun(100, path); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

// TestOpenReadsLittle counts what Open asks the disk for.
func TestOpenReadsLittle(t *testing.T) {
	large, _ := write(t, WriterOptions{}, func(w *Writer) {
		addFile(t, w, attr(2, tree.File), noise(1, 1<<20))
	})
	for _, tt := range []struct {
		name  string
		pack  []byte
		reads int
		bytes int64
	}{
		{"small", smallPackOf(t), 1, smallPack},
		{"large", large, 2, headerLen + tailRead},
	} {
		disk := &countingDisk{ReaderAt: bytes.NewReader(tt.pack)}
		r, err := Open(disk, int64(len(tt.pack)), ReaderOptions{})
		must(t, err)
		if disk.reads != tt.reads || disk.bytes > tt.bytes {
			t.Errorf("%s: %d reads of %d bytes in all", tt.name, disk.reads, disk.bytes)
		}
		before := disk.reads
		must(t, r.AllDirents(func(Dirent) bool { return true }))
		if tt.name == "small" && disk.reads != before {
			t.Errorf("small: %d more reads for what was read already", disk.reads-before)
		}
	}
}
