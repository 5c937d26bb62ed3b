package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestQuantile(t *testing.T) {
	s := samples{5, 1, 4, 2, 3}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 3, 0.9: 5, 1: 5} {
		if got := s.quantile(q); got != want {
			t.Errorf("quantile %v = %d, want %d", q, got, want)
		}
	}
	if (samples{}).quantile(0.5) != 0 {
		t.Error("no samples, but a median")
	}
}

func TestTable(t *testing.T) {
	r := report{Machine: map[string]string{"kernel": "Linux 6"}}
	r.add(row{Name: "slow", Ours: "a", Other: "b", Limit: time.Millisecond}, samples{2 * time.Millisecond}, samples{4 * time.Millisecond})
	r.add(row{Name: "alone", Ours: "c"}, samples{time.Millisecond}, nil)
	got := r.table()
	for _, want := range []string{"Linux 6", "over the limit", "0.50", "- slow: a; beside: b\n", "- alone: c\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("table lacks %q:\n%s", want, got)
		}
	}
	if strings.Count(got, "over the limit") != 1 {
		t.Errorf("one row is over its limit:\n%s", got)
	}
}

func TestCopyDurably(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "to")
	if err := os.MkdirAll(filepath.Join(from, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from, "d", "f"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := copyDurably(from, to); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(to, "d", "f")); err != nil || string(got) != "x" {
		t.Errorf("%q, %v", got, err)
	}
}

// Where the kernel lets us, the compared work really happens: the command sees
// the tree, its changes reach the layer, and the tree stays as it was.
func TestOverlay(t *testing.T) {
	lower, temp := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(lower, "f"), []byte("old\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	o, err := newOverlay(temp, lower)
	if err != nil {
		t.Fatal(err)
	}
	if o == nil {
		t.Log("this user cannot mount overlayfs here: the benchmark leaves its column empty")
		return
	}
	if took, err := o.firstByte(t.Context(), "cat f"); err != nil || took <= 0 {
		t.Errorf("first byte after %v, %v", took, err)
	}
	if _, err := o.firstByte(t.Context(), "cat missing"); err == nil {
		t.Error("a command that prints nothing has a first byte")
	}
	to := filepath.Join(temp, "layer")
	took, err := o.publish(t.Context(), "echo new >> f && test \"$(cat f)\" = \"old\nnew\"", to)
	if err != nil || took <= 0 {
		t.Errorf("publication after %v, %v", took, err)
	}
	if text, err := os.ReadFile(filepath.Join(lower, "f")); err != nil || string(text) != "old\n" {
		t.Errorf("the tree has changed: %q, %v", text, err)
	}
}
