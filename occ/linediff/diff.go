package linediff

// Edit says that lines [A0,A1) of the old text became lines [B0,B1) of the new
// one. In a script edits ascend, and at least one unchanged line stands between
// two of them.
type Edit struct{ A0, A1, B0, B1 int }

// Diff returns the edit script from a to b, whose lines carry their
// terminators.
func Diff(a, b [][]byte) []Edit {
	in := newInterner()
	number := func(lines [][]byte) []uint32 {
		ids := make([]uint32, len(lines))
		for i, line := range lines {
			ids[i] = in.id(line)
		}
		return ids
	}
	return DiffIDs(number(a), number(b))
}

// DiffHashes is Diff over hashes of lines: equal hashes are equal lines.
func DiffHashes(a, b []uint64) []Edit {
	known := make(map[uint64]uint32, max(len(a), len(b)))
	number := func(hashes []uint64) []uint32 {
		ids := make([]uint32, len(hashes))
		for i, h := range hashes {
			id, ok := known[h]
			if !ok {
				id = uint32(len(known))
				known[h] = id
			}
			ids[i] = id
		}
		return ids
	}
	return DiffIDs(number(a), number(b))
}

// DiffIDs is Diff over lines that Intern has numbered.
func DiffIDs(a, b []uint32) []Edit {
	distinct := uint32(0)
	for _, ids := range [2][]uint32{a, b} {
		for _, id := range ids {
			distinct = max(distinct, id+1)
		}
	}
	s := side{ids: a, changed: make([]bool, len(a))}
	t := side{ids: b, changed: make([]bool, len(b))}
	search(&s, &t, int(distinct))
	s.compact(&t)
	t.compact(&s)
	return script(s.changed, t.changed)
}

// side is one text under comparison: a line that is not changed stands in both
// texts, and the unchanged lines of both sides pair up in order.
type side struct {
	ids     []uint32
	changed []bool
}

// script reads the edits off the flags.
func script(a, b []bool) []Edit {
	var edits []Edit
	for i, j := 0, 0; i < len(a) || j < len(b); {
		e := Edit{A0: i, B0: j}
		for i < len(a) && a[i] {
			i++
		}
		for j < len(b) && b[j] {
			j++
		}
		if i > e.A0 || j > e.B0 {
			e.A1, e.B1 = i, j
			edits = append(edits, e)
		}
		i, j = i+1, j+1
	}
	return edits
}

// search marks the changed lines of both sides: common ends are trimmed, lines
// that cannot help to align are set aside, and the rest is compared.
func search(s, t *side, distinct int) {
	lo, a1, b1 := 0, len(s.ids), len(t.ids)
	for lo < a1 && lo < b1 && s.ids[lo] == t.ids[lo] {
		lo++
	}
	for a1 > lo && b1 > lo && s.ids[a1-1] == t.ids[b1-1] {
		a1, b1 = a1-1, b1-1
	}
	if lo == a1 && lo == b1 {
		return
	}
	inA, inB := make([]uint32, distinct), make([]uint32, distinct)
	for _, id := range s.ids {
		inA[id]++
	}
	for _, id := range t.ids {
		inB[id]++
	}
	m := matcher{
		a: s.pick(lo, a1, inB), b: t.pick(lo, b1, inA),
		countA: inA, countB: inB,
	}
	clear(inA)
	clear(inB)
	m.run()
}

const (
	manyMatches = 1024 // a line that occurs so often is no landmark in any file
	window      = 100  // lines looked at on each side of such a line
)

// pick returns the lines of [lo,hi) that are worth comparing and marks the
// others as changed: those that the other text (whose counts are given) does
// not have at all, and very frequent ones in a neighbourhood of mostly such
// lines, where a match would be by chance and would only tear an edit apart.
func (s *side) pick(lo, hi int, other []uint32) selection {
	many := min(roughRoot(len(s.ids)), manyMatches)
	class := make([]uint8, hi-lo)
	kept := 0
	for i := range class {
		switch n := other[s.ids[lo+i]]; {
		case n == 0:
			class[i] = lonely
		case int(n) >= many:
			class[i] = common
		default:
			class[i] = good
		}
		if class[i] != lonely {
			kept++
		}
	}
	sel := selection{
		ids: make([]uint32, 0, kept), line: make([]uint32, 0, kept), changed: s.changed,
	}
	for i, c := range class {
		if c == lonely || c == common && drowned(class, i) {
			s.changed[lo+i] = true
			continue
		}
		sel.ids = append(sel.ids, s.ids[lo+i])
		sel.line = append(sel.line, uint32(lo+i))
	}
	return sel
}

const (
	lonely uint8 = iota // occurs on this side only
	good
	common
)

// drowned reports whether the common line at i stands among lonely ones: there
// are some on both sides before the next good line, and in all they are more
// than three times as many as the common ones.
func drowned(class []uint8, i int) bool {
	lonelies, commons := 0, 2 // the line itself counts once for each direction
	for _, step := range [2]int{-1, 1} {
		before := lonelies
		for j, n := i+step, 0; j >= 0 && j < len(class) && class[j] != good && n < window; j, n = j+step, n+1 {
			if class[j] == lonely {
				lonelies++
			} else {
				commons++
			}
		}
		if lonelies == before {
			return false
		}
	}
	return 3*commons < lonelies
}

// roughRoot is the square root of n, rounded up to a power of two or so.
func roughRoot(n int) int {
	root := 1
	for ; n > 0; n >>= 2 {
		root <<= 1
	}
	return root
}

// slideBudget bounds the steps that compact spends for each line.
const slideBudget = 64

// compact moves each group of changed lines that could stand in several places
// to where git puts it: joined with its neighbours where they meet, next to a
// change of the other text where there is one, and as far down as it goes
// otherwise. The other side's flags stay as they are.
func (s *side) compact(other *side) {
	// gap[u] tells whether the other text has changes between the unchanged
	// lines u-1 and u.
	gap := make([]bool, 1, len(s.ids)+2)
	for _, changed := range other.changed {
		if changed {
			gap[len(gap)-1] = true
		} else {
			gap = append(gap, false)
		}
	}
	budget := slideBudget * (len(s.ids) + 1)
	n := len(s.ids)
	for at, u := 0, 0; at < n; {
		if !s.changed[at] {
			at, u = at+1, u+1
			continue
		}
		g := group{side: s, start: at, end: at, before: u}
		g.absorb()
		g.settle(gap, &budget)
		at, u = g.end, g.before
	}
}

// group is a maximal run of changed lines [start,end) with before unchanged
// lines above it.
type group struct {
	*side
	start, end, before int
}

// absorb widens the group over changed lines that it touches.
func (g *group) absorb() {
	for g.start > 0 && g.changed[g.start-1] {
		g.start--
	}
	for g.end < len(g.changed) && g.changed[g.end] {
		g.end++
	}
}

// up moves the group up by one line when that leaves the same text.
func (g *group) up() bool {
	if g.start == 0 || g.ids[g.start-1] != g.ids[g.end-1] {
		return false
	}
	g.start, g.end, g.before = g.start-1, g.end-1, g.before-1
	g.changed[g.start], g.changed[g.end] = true, false
	g.absorb()
	return true
}

// down moves the group down by one line when that leaves the same text.
func (g *group) down() bool {
	if g.end == len(g.ids) || g.ids[g.start] != g.ids[g.end] {
		return false
	}
	g.changed[g.start], g.changed[g.end] = false, true
	g.start, g.end, g.before = g.start+1, g.end+1, g.before+1
	g.absorb()
	return true
}

// settle slides the group to its place. Sliding may join it with others, which
// can open further room, so it goes up and down until its size stays.
func (g *group) settle(gap []bool, budget *int) {
	aligned, top := -1, 0 // before, where the other text last had a change
	for size := -1; size != g.end-g.start; {
		size, aligned = g.end-g.start, -1
		for *budget > 0 && g.up() {
			*budget--
		}
		top = g.before
		if gap[g.before] {
			aligned = g.before
		}
		for *budget > 0 && g.down() {
			*budget--
			if gap[g.before] {
				aligned = g.before
			}
		}
	}
	if g.before == top || aligned < 0 {
		return
	}
	for g.before > aligned && g.up() {
	}
}
