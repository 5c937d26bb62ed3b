package layerfmt

import (
	"sync/atomic"
)

// index is one tree of a pack.
type index struct {
	section
	class blockClass
	root  atomic.Pointer[page] // kept once loaded, unless the tree is but one page
}

// pageAt is the place of a page in the pack.
func (t *index) pageAt(no uint32) (off, n uint64) {
	if t.count == 1 {
		return t.off, t.raw
	}
	at := uint64(no) * pageSize
	return t.off + at, min(pageSize, t.raw-at)
}

func (r *Reader) page(t *index, no uint32) (*page, error) {
	last := t.pages() - 1
	isRoot := uint64(no) == last
	if isRoot {
		if p := t.root.Load(); p != nil {
			return p, nil
		}
	}
	b, err := r.cache.get(r.key(t.class, uint64(no)), func() (block, error) {
		off, n := t.pageAt(no)
		data := make([]byte, n)
		if err := r.read(data, off, t.name); err != nil {
			return block{}, err
		}
		p, reason := parsePage(data, t.name, no)
		if reason == "" && (p.level == 0) != (uint64(no) < t.count) {
			reason = "page is on the wrong level"
		}
		if reason != "" {
			return block{}, r.corrupt(t.name, off, reason)
		}
		return block{data: data, page: p}, nil
	})
	if err != nil {
		return nil, err
	}
	if isRoot && last > 0 {
		t.root.Store(b.page)
	}
	return b.page, nil
}

// leaf descends to the leaf that covers key.
func (r *Reader) leaf(t *index, key []byte) (*page, uint32, error) {
	no := uint32(t.pages() - 1)
	p, err := r.page(t, no)
	for err == nil && p.level > 0 {
		level := p.level
		no = p.child(key)
		if p, err = r.page(t, no); err == nil && p.level != level-1 {
			off, _ := t.pageAt(no)
			err = r.corrupt(t.name, off, "page is on the wrong level")
		}
	}
	return p, no, err
}

// lookup returns the value of key.
func (r *Reader) lookup(t *index, key []byte) (value []byte, found bool, err error) {
	if t.raw == 0 {
		return nil, false, nil
	}
	p, _, err := r.leaf(t, key)
	if err != nil {
		return nil, false, err
	}
	i, found := p.find(key)
	if !found {
		return nil, false, nil
	}
	_, value = p.cell(i)
	return value, true, nil
}

// scan calls fn with the cells from key on, in order, until it returns false.
// key and value are only good during the call.
func (r *Reader) scan(t *index, from []byte, fn func(key, value []byte) (bool, error)) error {
	if t.raw == 0 {
		return nil
	}
	p, no, err := r.leaf(t, from)
	if err != nil {
		return err
	}
	i, _ := p.find(from)
	var key, before []byte
	for {
		for ; i < p.n; i++ {
			key = p.appendKey(key[:0], i)
			_, value := p.cell(i)
			if more, err := fn(key, value); err != nil || !more {
				return err
			}
		}
		if p.n > 0 {
			before = p.appendKey(before[:0], p.n-1)
		}
		if no++; uint64(no) >= t.count {
			return nil
		}
		if p, err = r.page(t, no); err != nil {
			return err
		}
		i = 0
		if key = p.appendKey(key[:0], 0); string(before) >= string(key) {
			off, _ := t.pageAt(no)
			return r.corrupt(t.name, off, "page does not follow the one before it")
		}
	}
}

// cellCorrupt is the error about the cell of a key; it names the cell's page.
func (r *Reader) cellCorrupt(t *index, key []byte, reason string) error {
	off := t.off
	if _, no, err := r.leaf(t, key); err == nil {
		off, _ = t.pageAt(no)
	}
	return r.corrupt(t.name, off, reason)
}
