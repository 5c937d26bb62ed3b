package linediff_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"ephemeral-sandbox/occ/linediff"
)

// checkScript fails unless edits is a script from a to b in canonical shape.
func checkScript(t fataler, a, b []uint32, edits []linediff.Edit) {
	t.Helper()
	i, j := 0, 0
	for n, e := range edits {
		if e.A1 < e.A0 || e.B1 < e.B0 || e.A1 == e.A0 && e.B1 == e.B0 {
			t.Fatalf("edit %d is empty or inverted: %+v", n, e)
		}
		if e.A0-i != e.B0-j || e.A0 < i || n > 0 && e.A0 == i {
			t.Fatalf("edit %d %+v does not follow (%d,%d)", n, e, i, j)
		}
		if !slices.Equal(a[i:e.A0], b[j:e.B0]) {
			t.Fatalf("lines before edit %d %+v differ", n, e)
		}
		i, j = e.A1, e.B1
	}
	if !slices.Equal(a[i:], b[j:]) {
		t.Fatalf("lines after the last edit differ")
	}
}

type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

func drawIDs(words int) *rapid.Generator[[]uint32] {
	return rapid.SliceOfN(rapid.Uint32Range(0, uint32(words-1)), 0, 60)
}

func TestScriptRebuildsNewText(t *testing.T) {
	for _, words := range []int{1, 2, 5, 40} {
		t.Run(fmt.Sprint(words), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				a, b := drawIDs(words).Draw(t, "a"), drawIDs(words).Draw(t, "b")
				checkScript(t, a, b, linediff.DiffIDs(a, b))
			})
		})
	}
}

// longestCommon is the length of the longest common subsequence, by the table.
func longestCommon(a, b []uint32) int {
	row := make([]int, len(b)+1)
	for _, x := range a {
		diagonal := 0
		for j, y := range b {
			above := row[j+1]
			if x == y {
				row[j+1] = diagonal + 1
			} else {
				row[j+1] = max(above, row[j])
			}
			diagonal = above
		}
	}
	return row[len(b)]
}

// TestScriptIsShortest uses texts without very frequent lines, which are the
// only ones that the search sets aside.
func TestScriptIsShortest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := rapid.Custom(func(t *rapid.T) []uint32 {
			ids := make([]uint32, 40)
			for i := range ids {
				ids[i] = uint32(i % 20)
			}
			return rapid.Permutation(ids).Draw(t, "ids")[:rapid.IntRange(20, 40).Draw(t, "n")]
		})
		a, b := draw.Draw(t, "a"), draw.Draw(t, "b")
		kept := len(a)
		for _, e := range linediff.DiffIDs(a, b) {
			kept -= e.A1 - e.A0
		}
		if want := longestCommon(a, b); kept != want {
			t.Fatalf("%d lines kept, the longest common subsequence has %d", kept, want)
		}
	})
}

func TestFormsAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawIDs(5).Draw(t, "a"), drawIDs(5).Draw(t, "b")
		lines := func(ids []uint32) (out [][]byte, hashes []uint64) {
			for _, id := range ids {
				out = append(out, fmt.Appendf(nil, "%d\n", id))
				hashes = append(hashes, uint64(id)<<40)
			}
			return out, hashes
		}
		linesA, hashesA := lines(a)
		linesB, hashesB := lines(b)
		want := linediff.DiffIDs(a, b)
		if got := linediff.Diff(linesA, linesB); !slices.Equal(got, want) {
			t.Fatalf("Diff %v, DiffIDs %v", got, want)
		}
		if got := linediff.DiffHashes(hashesA, hashesB); !slices.Equal(got, want) {
			t.Fatalf("DiffHashes %v, DiffIDs %v", got, want)
		}
	})
}

func TestSlidesAsGitDoes(t *testing.T) {
	for _, c := range []struct {
		name, a, b string
		want       []linediff.Edit
	}{
		{"inserted block slides down", "{x}{y}", "{x}{x}{y}", []linediff.Edit{{4, 4, 4, 7}}},
		{"deleted line of a run is the last", "abbbc", "abbc", []linediff.Edit{{3, 4, 3, 3}}},
		{"two insertions that meet are one", "aXbXc", "aXbXbXc", []linediff.Edit{{4, 4, 4, 6}}},
		{"equal texts", "abc", "abc", nil},
		{"from nothing", "", "ab", []linediff.Edit{{0, 0, 0, 2}}},
		{"to nothing", "ab", "", []linediff.Edit{{0, 2, 0, 0}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := linediff.Diff(bytes.Split([]byte(c.a), nil), bytes.Split([]byte(c.b), nil))
			if !slices.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

// TestHostileInput is about ending at all: each of these takes a plain Myers
// search minutes or gigabytes.
func TestHostileInput(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 5))
	random := func(n, words int) []uint32 {
		ids := make([]uint32, n)
		for i := range ids {
			ids[i] = uint32(r.IntN(words))
		}
		return ids
	}
	shuffled := func(ids []uint32) []uint32 {
		out := slices.Clone(ids)
		r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
		return out
	}
	count := func(from, to int) []uint32 {
		var ids []uint32
		for i := from; i < to; i++ {
			ids = append(ids, uint32(i))
		}
		return ids
	}
	periodic := func(n, period int) []uint32 {
		ids := make([]uint32, n)
		for i := range ids {
			ids[i] = uint32(i % period)
		}
		return ids
	}
	for _, c := range []struct {
		name string
		a, b []uint32
	}{
		{"100k lines rewritten", count(0, 100_000), count(100_000, 200_000)},
		{"100k lines shuffled", count(0, 100_000), shuffled(count(0, 100_000))},
		{"100k lines reversed", count(0, 100_000), func() []uint32 { x := count(0, 100_000); slices.Reverse(x); return x }()},
		{"20k lines of two words", random(20_000, 2), random(20_000, 2)},
		{"40k lines of fifty words", random(40_000, 50), random(40_000, 50)},
		{"two periods", periodic(100_000, 7), periodic(100_000, 11)},
		{"one period, shifted and torn", periodic(100_000, 2), append(periodic(50_001, 2), periodic(60_000, 2)...)},
		{"one word against two", periodic(100_000, 1), random(100_000, 2)},
	} {
		t.Run(c.name, func(t *testing.T) {
			edits := linediff.DiffIDs(c.a, c.b)
			checkScript(t, c.a, c.b, edits)
			t.Logf("%d edits", len(edits))
		})
	}
}

func TestIsText(t *testing.T) {
	for _, c := range []struct {
		name string
		b    []byte
		want bool
	}{
		{"empty", nil, true},
		{"latin-1", []byte("caf\xe9\r\n"), true},
		{"NUL early", []byte("a\x00b"), false},
		{"NUL after 8 KiB", append(bytes.Repeat([]byte("x"), 8<<10), 0), true},
		{"at the size limit", bytes.Repeat([]byte("x"), linediff.MaxBytes), true},
		{"over the size limit", bytes.Repeat([]byte("x"), linediff.MaxBytes+1), false},
		{"too many lines", bytes.Repeat([]byte("\n"), linediff.MaxLines), false},
	} {
		if got := linediff.IsText(c.b); got != c.want {
			t.Errorf("%s: got %v", c.name, got)
		}
	}
}

func TestSplitJoins(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := []byte(rapid.StringMatching(`[ab\r\n]{0,20}`).Draw(t, "b"))
		lines := linediff.Split(b)
		if got := bytes.Join(lines, nil); !bytes.Equal(got, b) {
			t.Fatalf("%q joined is %q", lines, got)
		}
		for i, l := range lines {
			if n := bytes.IndexByte(l, '\n'); n != len(l)-1 && (i < len(lines)-1 || n >= 0) {
				t.Fatalf("line %d is %q", i, l)
			}
		}
	})
}

// gitDiff is what git prints between its own header and the hunks' end.
func gitDiff(t *testing.T, dir string, a, b []byte, context int) []byte {
	t.Helper()
	for name, data := range map[string][]byte{"a": a, "b": b} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("git", "diff", "--no-index", "--no-indent-heuristic", "--no-color", "--no-ext-diff",
		fmt.Sprintf("-U%d", context), "a", "b")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
	out, err := cmd.Output()
	if code := cmd.ProcessState.ExitCode(); code != 0 && code != 1 {
		t.Fatalf("git diff: %v", err)
	}
	if at := bytes.Index(out, []byte("--- ")); at >= 0 {
		return out[at:]
	}
	return nil
}

func TestUnifiedAsGitPrintsIt(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Fatalf("the oracle is missing: %v", err)
	}
	dir := t.TempDir()
	for n := range 150 {
		r := rand.New(rand.NewPCG(uint64(n), 1))
		words := []int{3, 12, 1000}[n%3]
		line := func() string {
			return []string{"", "\t", "func ", "  "}[r.IntN(4)] + fmt.Sprintf("w%d\n", r.IntN(words))
		}
		var a, b []string
		for range r.IntN(80) {
			a = append(a, line())
		}
		for _, l := range a {
			switch r.IntN(12) {
			case 0:
			case 1:
				b = append(b, line())
			case 2:
				b = append(b, l, line())
			default:
				b = append(b, l)
			}
		}
		old, now := []byte(strings.Join(a, "")), []byte(strings.Join(b, ""))
		if r.IntN(3) == 0 {
			old = bytes.TrimSuffix(old, []byte("\n"))
		}
		if r.IntN(3) == 0 {
			now = bytes.TrimSuffix(now, []byte("\n"))
		}
		context := r.IntN(4)
		got, want := linediff.Unified("a/a", "b/b", old, now, context), gitDiff(t, dir, old, now, context)
		if !bytes.Equal(got, want) {
			t.Fatalf("case %d, context %d\ngot\n%s\nwant\n%s", n, context, got, want)
		}
	}
}

func TestUnifiedNames(t *testing.T) {
	for _, c := range []struct{ name, want string }{
		{"b/x", "+++ b/x\n"},
		{"/dev/null", "+++ /dev/null\n"},
		{"b/with space", "+++ b/with space\t\n"},
		{"b/grün", "+++ b/grün\n"},
		{"b/tab\tquote\"\n", "+++ \"b/tab\\tquote\\\"\\n\"\n"},
		{"b/bad\xff\x01", "+++ \"b/bad\\377\\001\"\n"},
	} {
		out := linediff.Unified("a/x", c.name, nil, []byte("x\n"), 3)
		want := "--- a/x\n" + c.want + "@@ -0,0 +1 @@\n+x\n"
		if string(out) != want {
			t.Errorf("%q: got %q, want %q", c.name, out, want)
		}
	}
	if out := linediff.Unified("a", "b", []byte("x\x00"), []byte("y"), 3); string(out) != "Binary files a and b differ\n" {
		t.Errorf("binary: %q", out)
	}
}

func FuzzDiff(f *testing.F) {
	f.Add([]byte("a\nb\nc\n"), []byte("b\nc\nd"))
	f.Add([]byte("\n\n\n\nx\n\n\n"), []byte("\nx\n\n\n\n\nx"))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		ids := linediff.Intern(linediff.Cut(a), linediff.Cut(b))
		checkScript(t, ids[0], ids[1], linediff.DiffIDs(ids[0], ids[1]))
		linediff.Unified("a", "b", a, b, 3)
	})
}
