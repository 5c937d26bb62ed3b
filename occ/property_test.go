package occ_test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ"
	"ephemeral-sandbox/occ/merge"
)

// user does random things to a world. Every line it writes is a token of its
// own, so that a lost line can be named.
type user struct {
	*world
	r      *rand.Rand
	id     string
	tokens *int
	// moves allows renames and links; without them a path is all there is to a
	// file, and the truth table can be told by path.
	moves bool
	// links allows hard links, where moves are allowed.
	links bool
	log   []string
}

func (u *user) token() string {
	*u.tokens++
	return fmt.Sprintf("%s%d\n", u.id, *u.tokens)
}

func (u *user) pick(kinds ...tree.Kind) (string, bool) {
	var all []string
	for _, p := range slices.Sorted(maps.Keys(u.paths())) {
		if d, _ := u.find(p); slices.Contains(kinds, d.Kind) {
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return "", false
	}
	return all[u.r.IntN(len(all))], true
}

// fresh is a path that is free, from few names, so that users meet.
func (u *user) fresh() (string, bool) {
	dir, ok := u.pick(tree.Dir)
	if !ok || u.r.IntN(3) == 0 {
		dir = ""
	} else {
		dir += "/"
	}
	p := dir + string(rune('a'+u.r.IntN(5)))
	_, taken := u.find(p)
	return p, !taken && strings.Count(p, "/") < 4
}

// edited changes some lines of a text.
func (u *user) edited(text string) string {
	lines := strings.SplitAfter(text, "\n")
	lines = lines[:len(lines)-1]
	at := u.r.IntN(len(lines) + 1)
	drop := min(u.r.IntN(2), len(lines)-at)
	return strings.Join(slices.Concat(lines[:at], []string{u.token()}, lines[at+drop:]), "")
}

func (u *user) content(path string) string {
	d, _ := u.find(path)
	return u.inodes[d.Ino].data
}

func (u *user) step() {
	choice := u.r.IntN(14)
	if !u.moves {
		choice %= 9
	}
	file, haveFile := u.pick(tree.File)
	fresh, free := u.fresh()
	note := func(format string, args ...any) { u.log = append(u.log, fmt.Sprintf(format, args...)) }
	switch {
	case choice == 0 && free:
		var text string
		for range u.r.IntN(4) {
			text += u.token()
		}
		u.create(fresh, text)
		note("create %s %q", fresh, text)
	case choice == 1 && free:
		u.mkdir(fresh)
		note("mkdir %s", fresh)
	case choice <= 3 && haveFile:
		u.write(file, u.edited(u.content(file)))
		note("write %s %q", file, u.content(file))
	case choice == 4 && haveFile:
		u.chmod(file, []uint32{0o644, 0o755, 0o600}[u.r.IntN(3)])
		note("chmod %s", file)
	case choice == 5:
		if p, ok := u.pick(tree.File, tree.Dir); ok {
			u.remove(p)
			note("remove %s", p)
		}
	case choice == 6 && haveFile && u.moves:
		u.save(file, u.edited(u.content(file)))
		note("save %s %q", file, u.content(file))
	case choice == 6 && haveFile:
		d, _ := u.find(file)
		text, mode := u.edited(u.content(file)), u.inodes[d.Ino].Mode
		u.remove(file)
		u.create(file, text)
		u.chmod(file, mode)
		note("recreate %s %q", file, text)
	case choice == 7:
		if p, ok := u.pick(tree.Dir); ok {
			u.chmod(p, []uint32{0o755, 0o700}[u.r.IntN(2)])
			note("chmod %s", p)
		}
	case choice == 8 && haveFile:
		u.touch(file)
		note("touch %s", file)
	case choice <= 10 && free && u.moves:
		p, ok := u.pick(tree.File, tree.Dir)
		if ok && !strings.HasPrefix(fresh+"/", p+"/") {
			u.rename(p, fresh)
			note("rename %s %s", p, fresh)
		}
	case choice == 11 && haveFile && u.moves:
		p, ok := u.pick(tree.File)
		from, _ := u.find(file)
		to, _ := u.find(p)
		if ok && from.Ino != to.Ino {
			u.rename(file, p)
			note("rename %s over %s", file, p)
		}
	case choice == 12 && haveFile && free && u.links:
		u.link(file, fresh)
		note("link %s %s", file, fresh)
	case choice == 13 && u.moves:
		// A directory made anew with what it had, as a build does.
		if p, ok := u.pick(tree.Dir); ok {
			old := maps.Clone(u.paths())
			files := map[string]string{}
			for q := range old {
				if d, _ := u.find(q); d.Kind == tree.File && strings.HasPrefix(q, p+"/") && strings.Count(q, "/") == strings.Count(p, "/")+1 {
					files[q] = u.content(q)
				}
			}
			u.remove(p)
			u.mkdir(p)
			for _, q := range slices.Sorted(maps.Keys(files)) {
				u.create(q, files[q])
			}
			note("remake %s", p)
		}
	}
}

// scene is a base and what two users made of it.
type scene struct {
	base, head, session *world
	log                 string
}

func newScene(seed uint64, moves, links bool) scene {
	r := rand.New(rand.NewPCG(seed, 21))
	tokens := 0
	act := func(w *world, id string, steps int) *user {
		u := &user{world: w, r: r, id: id, tokens: &tokens, moves: moves, links: links}
		for range steps {
			u.step()
		}
		return u
	}
	base := newWorld()
	base.mkdir("a")
	base.create("a/a", "b01\nb02\nb03\nb04\nb05\nb06\n")
	base.create("b", "b11\nb12\nb13\nb14\nb15\nb16\n")
	base.mkdir("a/c")
	base.create("a/c/d", "b21\n")
	act(base, "b", r.IntN(8))
	s := scene{base: base, head: base.clone(), session: base.clone()}
	most := 5
	if seed%5 == 0 {
		most = 14
	}
	h := act(s.head, "h", r.IntN(most))
	s.head.mark(base)
	u := act(s.session, "s", r.IntN(most))
	s.log = fmt.Sprintf("seed %d\nbase\n%shead did %s\n%ssession did %s\n%s", seed, base,
		strings.Join(h.log, "; "), s.head, strings.Join(u.log, "; "), s.session)
	return s
}

func (s scene) validate(t *testing.T) *occ.Verdict {
	t.Helper()
	v, err := occ.Validate(s.base, s.base.number, s.head, s.session, s.session.delta(s.base), occ.Options{})
	if err != nil {
		t.Fatalf("%v\n%s", err, s.log)
	}
	return v
}

// tokensOf is the set of lines in a tree.
func tokensOf(w *world) map[string]bool {
	set := map[string]bool{}
	for p := range w.paths() {
		if d, _ := w.find(p); d.Kind == tree.File {
			for l := range strings.SplitAfterSeq(w.inodes[d.Ino].data, "\n") {
				set[l] = true
			}
		}
	}
	return set
}

var (
	sceneCount = flag.Uint64("occ.scenes", 1500, "random scenes for each property")
	firstScene = flag.Uint64("occ.first", 0, "seed of the first scene")
)

// scenes are the seeds to go through.
func scenes(yield func(uint64) bool) {
	for seed := *firstScene; seed < *firstScene+*sceneCount; seed++ {
		if !yield(seed) {
			return
		}
	}
}

// TestNothingIsLost: whatever two users do, the outcome is a sound tree in which
// each line that either of them wrote is still there: published when there is no
// conflict, in the session after a refresh when there is one.
func TestNothingIsLost(t *testing.T) {
	clean := 0
	for seed := range scenes {
		if nothingIsLost(t, newScene(seed, true, true)) {
			clean++
		}
	}
	t.Logf("%d of %d without conflict", clean, *sceneCount)
}

func nothingIsLost(t *testing.T, s scene) (clean bool) {
	t.Helper()
	v := s.validate(t)
	defer func() {
		if t.Failed() {
			t.Logf("%s%v", s.log, conflictList(v))
		}
	}()
	out := checkRefresh(t, s.base, s.head, s.session, v, nil)
	if len(v.Conflicts) == 0 {
		out = s.head.sealed(t, v, s.session)
	}
	have, old := tokensOf(out), tokensOf(s.base)
	for _, side := range []*world{s.head, s.session} {
		for l := range tokensOf(side) {
			if !have[l] && !old[l] {
				t.Fatalf("line %q is lost\n%s", l, out)
			}
		}
	}
	return len(v.Conflicts) == 0
}

func conflictList(v *occ.Verdict) []string {
	var out []string
	for _, c := range v.Conflicts {
		out = append(out, c.Kind+" "+c.Path)
	}
	return out
}

// state is one path on one side, as the truth table compares it.
type state struct {
	kind tree.Kind // 0: absent
	mode uint32
	data string
}

func stateOf(w *world, path string) state {
	d, ok := w.find(path)
	if !ok {
		return state{}
	}
	n := w.inodes[d.Ino]
	return state{n.Kind, n.Mode, n.data}
}

// tell is the truth table told by path, for trees without renames and links.
func tell(b, h, s state) (m state, ok bool) {
	switch {
	case s == b, s == h:
		return h, true
	case h == b:
		return s, true
	case h.kind == 0 || s.kind == 0 || h.kind != s.kind:
		return h, false
	case h.kind == tree.Dir && b.kind != tree.Dir:
		return state{kind: h.kind, mode: h.mode & s.mode}, true // made twice
	case b.kind != h.kind:
		return h, false
	}
	m = state{kind: h.kind, mode: s.mode&(b.mode^s.mode) | h.mode&^(b.mode^s.mode)}
	switch {
	case s.data == b.data:
		m.data = h.data
	case h.data == b.data:
		m.data = s.data
	default:
		r := merge.Three([]byte(b.data), []byte(h.data), []byte(s.data))
		if !r.Clean {
			return h, false
		}
		m.data = string(r.Text([]byte(b.data), []byte(h.data), []byte(s.data)))
	}
	return m, true
}

// TestPathByPath holds the verdict against the table told by path.
func TestPathByPath(t *testing.T) {
	clean := 0
	for seed := range scenes {
		s := newScene(seed, false, false)
		if remade(s.base, s.session) {
			continue // 15: what the session put away with a directory is not told by path
		}
		v := s.validate(t)
		want, ok := map[string]state{}, true
		paths := map[string]bool{}
		for _, w := range []*world{s.base, s.head, s.session} {
			for p := range w.paths() {
				paths[p] = true
			}
		}
		for p := range paths {
			m, fine := tell(stateOf(s.base, p), stateOf(s.head, p), stateOf(s.session, p))
			ok = ok && fine
			if m.kind != 0 {
				want[p] = m
			}
		}
		for p := range want {
			if at := strings.LastIndexByte(p, '/'); at >= 0 && want[p[:at]].kind != tree.Dir {
				ok = false // 14 and 15
			}
		}
		if got := len(v.Conflicts) == 0; got != ok {
			t.Fatalf("clean is %v, by path it is %v: %v\n%s", got, ok, conflictList(v), s.log)
		}
		if !ok {
			continue
		}
		clean++
		out := s.head.sealed(t, v, s.session)
		got := map[string]state{}
		for p := range out.paths() {
			got[p] = stateOf(out, p)
		}
		if !maps.Equal(got, want) {
			t.Fatalf("merged\n%sby path %v\n%s", out, want, s.log)
		}
	}
	t.Logf("%d of %d without conflict", clean, *sceneCount)
}

// TestOrderDoesNotMatter: two deltas that publish in both orders make the same
// tree. Disjoint ones that publish in one order publish in the other.
func TestOrderDoesNotMatter(t *testing.T) {
	both, disjoint := 0, 0
	for seed := range scenes {
		s := newScene(seed, seed%4 > 0, false)
		if remade(s.base, s.head) || remade(s.base, s.session) {
			continue // 13 and 15: it matters who made a directory anew
		}
		first := s.validate(t)
		swapped := scene{base: s.base, head: s.session.clone(), session: s.head, log: s.log}
		swapped.head.number = s.base.number
		swapped.head.mark(s.base)
		second := swapped.validate(t)
		clean := len(first.Conflicts) == 0
		apart := !meet(touched(s.base, s.head), touched(s.base, s.session))
		if apart {
			disjoint++
		}
		if clean != (len(second.Conflicts) == 0) {
			if apart || seed%4 == 0 {
				t.Fatalf("one order gives %v, the other %v\n%s", conflictList(first), conflictList(second), s.log)
			}
			continue
		}
		if !clean {
			continue
		}
		both++
		a, b := s.head.sealed(t, first, s.session), swapped.head.sealed(t, second, swapped.session)
		if !maps.Equal(a.paths(), b.paths()) {
			t.Fatalf("one order makes\n%sthe other\n%s%s", a, b, s.log)
		}
	}
	t.Logf("%d publish in both orders, %d are disjoint", both, disjoint)
}

// touched is the entries and inodes that now has different from base.
func touched(base, now *world) map[any]bool {
	out := map[any]bool{}
	d := now.delta(base)
	for _, c := range d.Dirents {
		out[occ.Key{Dir: c.Dir, Name: c.Name}], out[c.Ino], out[c.Was] = true, true, true
	}
	for _, c := range d.Inodes {
		b, n := base.inodes[c.Ino], now.inodes[c.Ino]
		if b.data != n.data || b.Mode != n.Mode {
			out[c.Ino] = true
		}
	}
	delete(out, tree.Ino(0))
	return out
}

func meet(a, b map[any]bool) bool {
	for k := range a {
		if b[k] {
			return true
		}
	}
	return false
}

// remade reports whether now has another directory in the place of one of the
// base.
func remade(base, now *world) bool {
	for k, b := range base.dirents {
		if n := now.dirents[k]; b.Kind == tree.Dir && n.Kind == tree.Dir && b.Ino != n.Ino {
			return true
		}
	}
	return false
}
