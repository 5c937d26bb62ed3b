package command

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"ephemeral-sandbox/daemon/catalog"
)

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func renderSnapshot(w *strings.Builder, r *catalog.SnapshotResult) {
	d := r.Daemon
	fmt.Fprintf(w, "sandboxd %s, pid %d, since %s, state directory %s\n", d.Version, d.PID, clock(d.StartedAt), printable(d.StateDir))
	fmt.Fprintf(w, "memory %s (heap %s), cache %s, traces %s, %d goroutines, %d open files, %s in flight",
		bytesText(d.RSSBytes), bytesText(d.HeapBytes), bytesText(d.CacheBytes), bytesText(d.TraceBytes), d.Goroutines, d.OpenFiles, count(int64(d.RequestsNow), "request"))
	if d.Restarts > 0 {
		fmt.Fprintf(w, ", replaced %s", count(int64(d.Restarts), "time"))
	}
	w.WriteByte('\n')
	for _, b := range r.Sandboxes {
		fmt.Fprintf(w, "\n%s %s at %s: %s, %s, %s, %s\n", b.SandboxID, b.State, b.Head, printable(b.WorkspaceRoot),
			count(int64(b.Layers), "layer"), bytesText(b.StoredBytes), count(int64(b.Leases), "lease"))
		if b.Problem != "" {
			fmt.Fprintf(w, "%s\n", b.Problem)
		}
		if len(b.OpenSessions) > 0 {
			renderSessions(w, b.OpenSessions)
		}
	}
}

// barWidth is the width in characters of a trace's whole duration.
const barWidth = 40

func renderTrace(w *strings.Builder, r *catalog.TraceResult) {
	fmt.Fprintf(w, "%s %s at %s, %s\n", r.TraceID, r.Name, clock(r.Start), microseconds(r.DurationUS))
	name := 0
	for _, s := range r.Spans {
		name = max(name, 2*s.Depth+len([]rune(s.Name)))
	}
	name = min(name, 48)
	for _, s := range r.Spans {
		took := microseconds(s.DurationUS)
		if s.Open {
			took = "open"
		}
		fmt.Fprintf(w, "%-*s %9s |%s|", name, clip(strings.Repeat("  ", s.Depth)+s.Name, name), took, bar(s, r.DurationUS))
		for _, k := range sortedKeys(s.Attrs) {
			fmt.Fprintf(w, " %s=%s", k, clip(printable(catalog.Text(fmt.Sprint(s.Attrs[k]))), 60))
		}
		if s.Error != "" {
			fmt.Fprintf(w, " error=%s", printable(catalog.Text(s.Error)))
		}
		w.WriteByte('\n')
		for _, e := range s.Events {
			fmt.Fprintf(w, "%*s  + %s %s\n", 2*s.Depth, "", microseconds(e.OffsetUS), e.Name)
		}
	}
}

// bar draws a span's place in its trace; each span has at least one mark.
func bar(s catalog.Span, total int64) string {
	total = max(total, 1)
	from := min(max(s.OffsetUS, 0)*barWidth/total, barWidth-1)
	to := min(max((s.OffsetUS+s.DurationUS)*barWidth/total, from+1), barWidth)
	if s.Open {
		to = barWidth
	}
	return strings.Repeat(" ", int(from)) + strings.Repeat("=", int(to-from)) + strings.Repeat(" ", int(barWidth-to))
}

func renderEvents(w *strings.Builder, r *catalog.EventsResult) {
	if r.Lost > 0 {
		fmt.Fprintf(w, "%s are gone to the size bound\n", count(r.Lost, "older event"))
	}
	for _, e := range r.Events {
		fmt.Fprintf(w, "%s %s", e.Time.Local().Format("2006-01-02 15:04:05.000"), e.Name)
		for _, f := range []struct{ key, value string }{
			{"sandbox", e.SandboxID}, {"session", e.WorkspaceSessionID}, {"operation", e.Operation},
		} {
			if f.value != "" {
				fmt.Fprintf(w, " %s=%s", f.key, f.value)
			}
		}
		for _, k := range sortedKeys(e.Attrs) {
			fmt.Fprintf(w, " %s=%s", k, clip(printable(catalog.Text(fmt.Sprint(e.Attrs[k]))), 80))
		}
		w.WriteByte('\n')
	}
}

func renderActivity(w *strings.Builder, r *catalog.ActivityResult) {
	for _, s := range r.Sessions {
		state := "ended"
		if s.Open {
			state = "open"
		}
		fmt.Fprintf(w, "session %s (%s), trace level %s", s.WorkspaceSessionID, state, s.TraceLevel)
		if !s.CountsComplete {
			w.WriteString(": every path is here, but counts leave out what the kernel's cache answered")
		}
		if s.Gaps > 0 {
			fmt.Fprintf(w, "; %s could not be recorded", count(int64(s.Gaps), "access"))
		}
		w.WriteByte('\n')
	}
	entries := slices.Clone(r.Entries)
	slices.SortStableFunc(entries, func(a, b catalog.Access) int {
		return cmp.Or(
			cmp.Compare(a.WorkspaceSessionID, b.WorkspaceSessionID),
			cmp.Compare(a.Path, b.Path),
			a.First.Compare(b.First),
		)
	})
	table(w, "ACCESS\tCOUNT\tLAST\tSESSION\tOPERATION\tPATH\tCOMMAND", func(row func(...any)) {
		for _, e := range entries {
			row(e.Kind, e.Count, clock(e.Last), dash(e.WorkspaceSessionID), dash(e.Operation), printable(e.Path), dash(clip(printable(e.Command), 40)))
		}
	})
	if r.Truncated {
		w.WriteString("there is more: raise --limit, or choose by --path, --kind or --operation\n")
	}
}

func renderLayers(w *strings.Builder, r *catalog.LayerStackResult) {
	table(w, "COMMIT\tSTORED\tCONTENT\tBY\tTIME\tLEASED BY\tMESSAGE", func(row func(...any)) {
		for _, l := range r.Layers {
			row(l.Commit.Commit, bytesText(l.StoredBytes), bytesText(l.LogicalBytes), dash(strings.TrimPrefix(author(l.Session, l.Operation), "by ")),
				clock(l.Time), dash(strings.Join(l.LeasedBy, " ")), dash(printable(catalog.Text(l.Message))))
		}
	})
	fmt.Fprintf(w, "head %s, %s, %s stored for %s, %s\n", r.Head, count(int64(len(r.Layers)), "layer"), bytesText(r.StoredBytes), bytesText(r.LogicalBytes), count(int64(r.Leases), "lease"))
	if v := r.Verify; v != nil {
		renderVerify(w, v)
	}
}

func renderVerify(w *strings.Builder, v *catalog.VerifyState) {
	if v.OK {
		fmt.Fprintf(w, "verified: %s, %s, %s, no problem\n", count(int64(v.Commits), "commit"), count(int64(v.Layers), "layer"), bytesText(v.Bytes))
		return
	}
	fmt.Fprintf(w, "verified: %s\n", count(int64(len(v.Problems)), "problem"))
	for _, p := range v.Problems {
		fmt.Fprintf(w, "  %s\n", printable(catalog.Text(p)))
	}
}
