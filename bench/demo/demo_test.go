package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ephemeral-sandbox/bench/drive"
)

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	p := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// prose is n different lines.
func prose(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString("this is line number " + strings.Repeat("i", i+1) + ".\n")
	}
	return b.String()
}

func TestPickTarget(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "README.md", "too short\n"+strings.Repeat("-", 100)+"\n")
	write(t, dir, "a/readme.bin", "binary\x00"+prose(20))
	write(t, dir, "main.go", prose(20))
	if got, err := pickTarget(dir); err != nil || got.path != "main.go" {
		t.Errorf("picked %+v, %v; want main.go", got, err)
	}
	write(t, dir, "docs/guide.md", "\n"+strings.Repeat("the same line\n", 9)+prose(20))
	got, err := pickTarget(dir)
	if err != nil || got.path != "docs/guide.md" {
		t.Fatalf("picked %+v, %v; want docs/guide.md", got, err)
	}
	if early := got.lines[got.early]; !strings.HasPrefix(early, "this is") {
		t.Errorf("early line %q occurs more than once", early)
	}
	if got.late-got.early < 6 {
		t.Errorf("lines %d and %d are too close to merge", got.early, got.late)
	}
	if _, err := pickTarget(t.TempDir()); err == nil {
		t.Error("an empty directory has a target")
	}
}

func TestPickWork(t *testing.T) {
	dir := t.TempDir()
	if w := pickWork(t.Context(), dir); !strings.HasPrefix(w.command, "find ") {
		t.Errorf("plain directory: %+v", w)
	}
	write(t, dir, "go.mod", "module example.com/m\n\ngo 1.26\n")
	write(t, dir, "needs/x.go", "package needs\n\nimport _ \"example.com/other\"\n")
	write(t, dir, "indirect/x.go", "package indirect\n\nimport _ \"example.com/m/needs\"\n")
	write(t, dir, "heavy/x.go", "package heavy\n\nimport (\n\t_ \"fmt\"\n\t_ \"io\"\n\t_ \"os\"\n)\n")
	write(t, dir, "light/x.go", "package light\n\nimport (\n\t_ \"errors\"\n\t_ \"strings\"\n)\n")
	write(t, dir, "empty/doc.go", "package empty\n")
	write(t, dir, "over/x.go", "package over\n\nimport _ \"example.com/m/light\"\n")
	if w := pickWork(t.Context(), dir); w.command != "go build ./light" {
		t.Errorf("Go module: %+v, want go build ./light", w)
	}
}

func TestCopyCheckout(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "copy")
	write(t, from, "a/b.txt", "x")
	write(t, from, ".git/config", "x")
	write(t, from, "bin/program", "x")
	if _, err := copyCheckout(t.Context(), from, to); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(to)
	if err != nil || len(entries) != 1 || entries[0].Name() != "a" {
		t.Errorf("copied %v, %v; want only a", entries, err)
	}
}

func TestConflictPart(t *testing.T) {
	text := "a\n<<<<<<< s\nb\n||||||| base\nc\n=======\nd\n>>>>>>> head\ne\n"
	if got, want := conflictPart(text), "<<<<<<< s\nb\n||||||| base\nc\n=======\nd\n>>>>>>> head\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for _, none := range []string{"", "a\nb\n", "<<<<<<< open\n"} {
		if got := conflictPart(none); got != "" {
			t.Errorf("%q: found %q", none, got)
		}
	}
}

func TestBars(t *testing.T) {
	got := bars(drive.Trace{DurationUS: 4000, Spans: []drive.TraceSpan{
		{Name: "exec", DurationUS: 4000},
		{Name: "run", Depth: 1, OffsetUS: 1000, DurationUS: 2000},
		{Name: "end", Depth: 1, OffsetUS: 4000},
	}})
	want := `    exec  |========================================|      4.00 ms
      run |          ====================          |      2.00 ms
      end |                                       =|      0.00 ms`
	if got != want {
		t.Errorf("\n%s\nwant\n%s", got, want)
	}
}

func TestSmallWriters(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 2048: "2.0 KiB", 3 << 20: "3.0 MiB", 5 << 30: "5.0 GiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %s, want %s", n, got, want)
		}
	}
	if got := list([]string{"a", "b", "c", "d", "e", "f"}); got != "a, b, c, d and 2 more" {
		t.Error(got)
	}
	if got := firstLine("ab\ncd", 9); got != "ab ..." {
		t.Error(got)
	}
}
