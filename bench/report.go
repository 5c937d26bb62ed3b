package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// samples are the times of one measurement's rounds.
type samples []time.Duration

func (s *samples) add(d time.Duration) { *s = append(*s, d) }

func (s samples) last() time.Duration { return s[len(s)-1] }

// quantile is the value that the fraction q of the samples does not exceed.
func (s samples) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	i := int(q*float64(len(sorted))+0.5) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

// report is everything that one run measured.
type report struct {
	Began   time.Time         `json:"began"`
	Machine map[string]string `json:"machine"`
	Tree    string            `json:"tree"`
	Rows    []row             `json:"rows"`
	Notes   []string          `json:"notes"`
}

// row is one line of the table. Times are in nanoseconds.
type row struct {
	Name     string        `json:"name"`
	Ours     string        `json:"ours"`            // what was timed
	Other    string        `json:"other,omitempty"` // what stands beside it
	Rounds   int           `json:"rounds"`
	P50      time.Duration `json:"p50_ns"`
	P90      time.Duration `json:"p90_ns"`
	OtherP50 time.Duration `json:"other_p50_ns,omitempty"`
	OtherP90 time.Duration `json:"other_p90_ns,omitempty"`
	Limit    time.Duration `json:"limit_ns,omitempty"` // what the product promises for P50
}

func (r *report) add(line row, ours, other samples) {
	line.Rounds, line.P50, line.P90 = len(ours), ours.quantile(0.5), ours.quantile(0.9)
	line.OtherP50, line.OtherP90 = other.quantile(0.5), other.quantile(0.9)
	r.Rows = append(r.Rows, line)
}

func ms(d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", float64(d.Microseconds())/1000)
}

// table is the report for people.
func (r *report) table() string {
	var b strings.Builder
	for _, k := range []string{"cpu", "cores", "kernel", "go", "user", "version", "state_fs"} {
		fmt.Fprintf(&b, "%-9s %s\n", k, r.Machine[k])
	}
	fmt.Fprintf(&b, "\n%-56s %4s %9s %9s %9s %9s %9s\n", "milliseconds", "n", "p50", "p90", "limit", "beside", "ratio")
	for _, l := range r.Rows {
		ratio := "-"
		if l.OtherP50 > 0 {
			ratio = fmt.Sprintf("%.2f", float64(l.P50)/float64(l.OtherP50))
		}
		verdict := ""
		if l.Limit > 0 && l.P50 > l.Limit {
			verdict = "  over the limit"
		}
		fmt.Fprintf(&b, "%-56s %4d %9s %9s %9s %9s %9s%s\n", l.Name, l.Rounds, ms(l.P50), ms(l.P90), ms(l.Limit), ms(l.OtherP50), ratio, verdict)
	}
	b.WriteString("\nWhat is timed, and what stands beside it:\n")
	for _, l := range r.Rows {
		fmt.Fprintf(&b, "- %s: %s", strings.TrimSpace(l.Name), l.Ours)
		if l.Other != "" {
			fmt.Fprintf(&b, "; beside: %s", l.Other)
		}
		b.WriteByte('\n')
	}
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "- %s\n", n)
	}
	return b.String()
}

// machine describes where the figures come from.
func machine(ctx context.Context) map[string]string {
	m := map[string]string{
		"cpu":   cpuName(),
		"cores": fmt.Sprint(runtime.NumCPU()),
		"go":    runtime.Version(),
		"user":  fmt.Sprintf("uid %d", os.Getuid()),
	}
	for key, command := range map[string][]string{
		"kernel":   {"uname", "-sr"},
		"version":  {"git", "describe", "--always", "--dirty"},
		"state_fs": {"stat", "-f", "-c", "%T", os.TempDir()},
	} {
		m[key] = "unknown"
		if out, err := exec.CommandContext(ctx, command[0], command[1:]...).Output(); err == nil {
			m[key] = strings.TrimSpace(string(out))
		}
	}
	if info, ok := debug.ReadBuildInfo(); ok && m["version"] == "unknown" {
		m["version"] = info.Main.Version
	}
	return m
}

func cpuName() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if name, ok := strings.CutPrefix(lines.Text(), "model name"); ok {
			return strings.TrimLeft(name, " \t:")
		}
	}
	return "unknown"
}
