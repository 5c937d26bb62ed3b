package linediff

// selection is the lines of one text that take part in the comparison, with
// their places in the text, whose flags it sets.
type selection struct {
	ids     []uint32
	line    []uint32
	changed []bool
}

func (s selection) mark(from, to int) {
	for _, line := range s.line[from:to] {
		s.changed[line] = true
	}
}

// box is a part of the edit graph: lines [a0,a1) against lines [b0,b1).
type box struct{ a0, a1, b0, b1 int }

func (x box) size() int { return x.a1 - x.a0 + x.b1 - x.b0 }

// matcher compares two selections by Myers' linear-space search: from both
// corners of a box at once, until the paths meet; the meeting point splits the
// box. A box that costs too much is split at a run of rare lines instead, and
// when there is none, or too much was spent on looking for them, at the point
// that a search got farthest to.
type matcher struct {
	a, b selection

	forward, backward []int32 // farthest a-line per diagonal, offset by shift
	shift             int

	countA, countB []uint32 // per line number, zero between calls
	first, next    []uint32 // occurrences in b, index+1; used by rare
	budget         int      // what rare may still spend
}

const (
	minRounds   = 256     // a box may always cost that many edits
	maxSteps    = 4 << 20 // matches and edits looked at for one box
	rareBudget  = 48      // per line
	maxOccurs   = 64      // a line that occurs more often is not rare
	shortestRun = 3       // a shorter run of equal lines may be chance
	noBackward  = 1<<31 - 1
	noForward   = -1
	guardFields = 3
)

func (m *matcher) run() {
	n := len(m.a.ids) + len(m.b.ids)
	m.shift = len(m.b.ids) + 1
	m.forward = make([]int32, n+guardFields)
	m.backward = make([]int32, n+guardFields)
	m.budget = rareBudget * n
	m.compare(box{0, len(m.a.ids), 0, len(m.b.ids)})
}

// compare marks the changed lines of x. It recurses into the smaller part of a
// split and goes on with the larger, so that its depth is logarithmic.
func (m *matcher) compare(x box) {
	for {
		for x.a0 < x.a1 && x.b0 < x.b1 && m.a.ids[x.a0] == m.b.ids[x.b0] {
			x.a0, x.b0 = x.a0+1, x.b0+1
		}
		for x.a0 < x.a1 && x.b0 < x.b1 && m.a.ids[x.a1-1] == m.b.ids[x.b1-1] {
			x.a1, x.b1 = x.a1-1, x.b1-1
		}
		if x.a0 == x.a1 || x.b0 == x.b1 {
			m.a.mark(x.a0, x.a1)
			m.b.mark(x.b0, x.b1)
			return
		}
		p, q := m.split(x)
		if p.size() == x.size() || q.size() == x.size() {
			m.a.mark(x.a0, x.a1)
			m.b.mark(x.b0, x.b1)
			return
		}
		if p.size() > q.size() {
			p, q = q, p
		}
		m.compare(p)
		x = q
	}
}

// split finds where a shortest script through x passes its middle.
func (m *matcher) split(x box) (box, box) {
	var (
		a, b       = m.a.ids, m.b.ids
		fwd, bwd   = m.forward, m.backward
		fmid, bmid = x.a0 - x.b0, x.a1 - x.b1
		lowest     = x.a0 - x.b1
		highest    = x.a1 - x.b0
		odd        = (fmid-bmid)&1 != 0
		flo, fhi   = fmid, fmid
		blo, bhi   = bmid, bmid
		rounds     = max(minRounds, roughRoot(highest-lowest+guardFields))
		steps      = 0
	)
	at := func(k int) int { return k + m.shift }
	fwd[at(fmid)], bwd[at(bmid)] = int32(x.a0), int32(x.a1)
	for round := 1; ; round++ {
		// A diagonal enters the search with an unreachable neighbour, and
		// leaves it where it runs out of the box.
		if flo > lowest {
			flo--
			fwd[at(flo-1)] = noForward
		} else {
			flo++
		}
		if fhi < highest {
			fhi++
			fwd[at(fhi+1)] = noForward
		} else {
			fhi--
		}
		for k := fhi; k >= flo; k -= 2 {
			i := int(fwd[at(k+1)])
			if below := int(fwd[at(k-1)]); below >= i {
				i = below + 1
			}
			from := i
			for j := i - k; i < x.a1 && j < x.b1 && a[i] == b[j]; i, j = i+1, j+1 {
			}
			steps += i - from + 1
			fwd[at(k)] = int32(i)
			if odd && blo <= k && k <= bhi && int(bwd[at(k)]) <= i {
				return x.cut(i, i-k)
			}
		}
		if blo > lowest {
			blo--
			bwd[at(blo-1)] = noBackward
		} else {
			blo++
		}
		if bhi < highest {
			bhi++
			bwd[at(bhi+1)] = noBackward
		} else {
			bhi--
		}
		for k := bhi; k >= blo; k -= 2 {
			i := int(bwd[at(k-1)])
			if above := int(bwd[at(k+1)]); i >= above {
				i = above - 1
			}
			from := i
			for j := i - k; i > x.a0 && j > x.b0 && a[i-1] == b[j-1]; i, j = i-1, j-1 {
			}
			steps += from - i + 1
			bwd[at(k)] = int32(i)
			if !odd && flo <= k && k <= fhi && i <= int(fwd[at(k)]) {
				return x.cut(i, i-k)
			}
		}
		if round >= rounds || steps > maxSteps {
			if p, q, ok := m.rare(x); ok {
				return p, q
			}
			return m.farthest(x, span{flo, fhi}, span{blo, bhi})
		}
	}
}

func (x box) cut(i, j int) (box, box) {
	return box{x.a0, i, x.b0, j}, box{i, x.a1, j, x.b1}
}

// span is an inclusive range of diagonals, of which every second is in use.
type span struct{ lo, hi int }

// farthest splits x at the point that lies farthest from the corner where the
// search for it began.
func (m *matcher) farthest(x box, f, b span) (box, box) {
	clip := func(i, k int) (int, int) {
		i = max(x.a0, min(i, x.a1))
		j := max(x.b0, min(i-k, x.b1))
		return j + k, j
	}
	fi, fj, ahead := x.a0, x.b0, 0
	for k := f.hi; k >= f.lo; k -= 2 {
		if i, j := clip(int(m.forward[k+m.shift]), k); i >= x.a0 && i <= x.a1 && i-x.a0+j-x.b0 > ahead {
			fi, fj, ahead = i, j, i-x.a0+j-x.b0
		}
	}
	bi, bj, back := x.a1, x.b1, 0
	for k := b.hi; k >= b.lo; k -= 2 {
		if i, j := clip(int(m.backward[k+m.shift]), k); i >= x.a0 && i <= x.a1 && x.a1-i+x.b1-j > back {
			bi, bj, back = i, j, x.a1-i+x.b1-j
		}
	}
	if ahead > back {
		return x.cut(fi, fj)
	}
	return x.cut(bi, bj)
}

// rare splits x around the longest run of equal lines that holds one of the
// rarest lines the two sides have in common.
func (m *matcher) rare(x box) (p, q box, ok bool) {
	if m.budget < x.size() {
		return p, q, false
	}
	m.budget -= x.size()
	if m.first == nil {
		m.first = make([]uint32, len(m.countA))
		m.next = make([]uint32, len(m.b.ids))
	}
	a, b := m.a.ids, m.b.ids
	for _, id := range a[x.a0:x.a1] {
		m.countA[id]++
	}
	for j := x.b1 - 1; j >= x.b0; j-- {
		id := b[j]
		m.countB[id]++
		m.next[j] = m.first[id]
		m.first[id] = uint32(j) + 1
	}
	defer func() {
		for _, id := range a[x.a0:x.a1] {
			m.countA[id] = 0
		}
		for _, id := range b[x.b0:x.b1] {
			m.countB[id], m.first[id] = 0, 0
		}
	}()

	rank := func(id uint32) uint32 {
		if m.countA[id] > maxOccurs || m.countB[id] > maxOccurs {
			return 0
		}
		return m.countA[id] * m.countB[id]
	}
	rarest := uint32(0)
	for _, id := range a[x.a0:x.a1] {
		if r := rank(id); r > 0 && (rarest == 0 || r < rarest) {
			rarest = r
		}
	}
	if rarest == 0 {
		return p, q, false
	}
	var best box
	seen := box{} // the last run looked at; its own lines need not be tried again
	for i := x.a0; i < x.a1; i++ {
		if rank(a[i]) != rarest {
			continue
		}
		for at := m.first[a[i]]; at != 0 && m.budget > 0; at = m.next[at-1] {
			j := int(at) - 1
			if i < seen.a1 && i >= seen.a0 && i-j == seen.a0-seen.b0 {
				continue
			}
			run := box{i, i + 1, j, j + 1}
			for run.a0 > x.a0 && run.b0 > x.b0 && a[run.a0-1] == b[run.b0-1] {
				run.a0, run.b0 = run.a0-1, run.b0-1
			}
			for run.a1 < x.a1 && run.b1 < x.b1 && a[run.a1] == b[run.b1] {
				run.a1, run.b1 = run.a1+1, run.b1+1
			}
			m.budget -= run.size()
			if seen = run; run.size() > best.size() {
				best = run
			}
		}
	}
	if best.a1-best.a0 < shortestRun {
		return p, q, false
	}
	return box{x.a0, best.a0, x.b0, best.b0}, box{best.a1, x.a1, best.b1, x.b1}, true
}
