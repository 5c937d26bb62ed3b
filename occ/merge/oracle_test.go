package merge_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"ephemeral-sandbox/occ/merge"
)

var oracleCases = flag.Int("oracle.cases", 300, "random triples to hold against git merge-file")

// triple is a base and two edits of it.
type triple struct{ base, head, session []byte }

// shape says how the texts of random triples look.
type shape struct {
	lines, words, edits int
	eol                 string
	unique              bool // no line is copied within a text
}

var shapes = []shape{
	{lines: 12, words: 5, edits: 3, eol: "\n"}, // heavily repeated lines
	{lines: 60, words: 25, edits: 6, eol: "\n"},
	{lines: 60, words: 1 << 30, edits: 6, eol: "\n"},
	{lines: 30, words: 200, edits: 4, eol: "\r\n"},
	{lines: 300, words: 60, edits: 20, eol: "\n"},
}

func (s shape) word(r *rand.Rand) string { return fmt.Sprintf("w%d%s", r.IntN(s.words), s.eol) }

func (s shape) text(r *rand.Rand) []string {
	out := make([]string, r.IntN(s.lines+1))
	for i := range out {
		out[i] = s.word(r)
	}
	return out
}

func (s shape) edit(r *rand.Rand, base []string) []string {
	out := append([]string(nil), base...)
	for range r.IntN(s.edits + 1) {
		at := r.IntN(len(out) + 1)
		drop := min(r.IntN(4), len(out)-at)
		var put []string
		for range r.IntN(4) {
			put = append(put, s.word(r))
		}
		if !s.unique && r.IntN(5) == 0 && len(out) > 0 { // moved or copied lines
			from := r.IntN(len(out))
			put = append(put, out[from:min(len(out), from+3)]...)
		}
		out = append(out[:at:at], append(put, out[at+drop:]...)...)
	}
	return out
}

func (s shape) join(r *rand.Rand, lines []string) []byte {
	out := bytes.Join(bytesOf(lines), nil)
	if r.IntN(6) == 0 {
		out = bytes.TrimRight(out, "\r\n")
	}
	return out
}

func bytesOf(lines []string) [][]byte {
	out := make([][]byte, len(lines))
	for i, l := range lines {
		out[i] = []byte(l)
	}
	return out
}

func (s shape) triple(r *rand.Rand) triple {
	base := s.text(r)
	head, session := s.edit(r, base), s.edit(r, base)
	if r.IntN(4) == 0 { // some edits in common
		common := s.edit(r, base)
		head, session = s.edit(r, common), s.edit(r, common)
	}
	return triple{s.join(r, base), s.join(r, head), s.join(r, session)}
}

type git struct{ dir string }

// merge runs git merge-file with the session as "ours".
func (g git) merge(t *testing.T, c triple, flags ...string) (out []byte, clean bool) {
	t.Helper()
	var names []string
	for _, f := range []struct {
		name string
		data []byte
	}{{"session", c.session}, {"base", c.base}, {"head", c.head}} {
		name := filepath.Join(g.dir, f.name)
		if err := os.WriteFile(name, f.data, 0o600); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	args := append([]string{"merge-file", "-p", "-q", "-L", "S", "-L", "B", "-L", "H"}, flags...)
	cmd := exec.Command("git", append(args, names...)...)
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
	cmd.Dir = g.dir
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() > 127) {
		t.Fatalf("git merge-file: %v", err)
	}
	return out, err == nil
}

// TestGitMergeFile holds the merge against git: where both are clean the bytes
// are equal, always; how often one is clean and the other not is bounded, and
// only texts of heavily repeated lines may differ in that.
func TestGitMergeFile(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Fatalf("the oracle is missing: %v", err)
	}
	g := git{t.TempDir()}
	var conflicts, sameMarked, falseConflict, falseClean int
	for n := range *oracleCases {
		r := rand.New(rand.NewPCG(uint64(n), 17))
		s := shapes[n%len(shapes)]
		c := s.triple(r)
		want, wantClean := g.merge(t, c, "--diff3")
		res := merge.Three(c.base, c.head, c.session)
		switch {
		case res.Clean && wantClean:
			if got := res.Text(c.base, c.head, c.session); !bytes.Equal(got, want) {
				t.Errorf("case %d: clean but different\nbase %q\nhead %q\nsession %q\ngot  %q\nwant %q",
					n, c.base, c.head, c.session, got, want)
			}
		case res.Clean:
			// git's --diff3 does not look inside a region; without it, it does.
			zealous, ok := g.merge(t, c)
			got := res.Text(c.base, c.head, c.session)
			if ok && bytes.Equal(got, zealous) {
				continue
			}
			falseClean++
			t.Logf("case %d (%d words): clean where git conflicts: base %q head %q session %q", n, s.words, c.base, c.head, c.session)
		case wantClean:
			falseConflict++
			t.Logf("case %d (%d words): conflict where git is clean: base %q head %q session %q", n, s.words, c.base, c.head, c.session)
		default:
			conflicts++
			if got, _ := res.Marked(c.base, c.head, c.session, [3]string{"B", "H", "S"}); bytes.Equal(got, want) {
				sameMarked++
			}
		}
	}
	t.Logf("%d cases: %d conflicts in both (%d with equal markers), %d only here, %d only in git",
		*oracleCases, conflicts, sameMarked, falseConflict, falseClean)
	if bound := *oracleCases / 200; falseConflict > bound || falseClean > bound {
		t.Errorf("disagreements above 0.5 %% of %d: %d conflicts only here, %d only in git", *oracleCases, falseConflict, falseClean)
	}
}
