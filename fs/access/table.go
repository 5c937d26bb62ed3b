package access

import (
	"slices"
	"strings"
)

// entryCost is what one entry is reckoned to hold in memory besides its name:
// key, stat and their share of the map's buckets. An estimate on the high side.
const entryCost = 160

// table aggregates accesses in memory. It has no lock of its own.
type table struct {
	index map[key]uint32 // position in stats
	stats []stat
	bytes int // estimate
	notes uint64
}

func newTable() *table { return &table{index: make(map[key]uint32)} }

// bump counts an access whose key is known and reports whether it was.
func (t *table) bump(k key, now int64) bool {
	i, ok := t.index[k]
	if !ok {
		return false
	}
	s := &t.stats[i]
	s.count++
	// The clock may step back; First and Last stay the true bounds.
	s.first = min(s.first, now)
	s.last = max(s.last, now)
	t.notes++
	return true
}

// cost is what inserting k would add to bytes.
func (t *table) cost(k key) int { return entryCost + len(k.name) }

// insert adds a key that bump did not know.
func (t *table) insert(k key, now int64) {
	k.name = strings.Clone(k.name)
	t.index[k] = uint32(len(t.stats))
	t.stats = append(t.stats, stat{count: 1, first: now, last: now})
	t.bytes += t.cost(k)
	t.notes++
}

// sorted returns the entries in key order.
func (t *table) sorted() []record {
	out := make([]record, 0, len(t.stats))
	for k, i := range t.index {
		out = append(out, record{key: k, stat: t.stats[i]})
	}
	slices.SortFunc(out, func(a, b record) int { return a.compare(b.key) })
	return out
}

// span returns the earliest first and the latest last of entries.
func span(entries []record) (first, last int64) {
	for i, e := range entries {
		if i == 0 {
			first, last = e.first, e.last
			continue
		}
		first, last = min(first, e.first), max(last, e.last)
	}
	return first, last
}
