package command

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"ephemeral-sandbox/daemon/catalog"
)

// show writes a result for people.
func (s *surface) show(res any) error {
	var b strings.Builder
	switch r := res.(type) {
	case *catalog.FileReadResult:
		return s.showContent(r)
	case *catalog.ReadCommandLinesResult:
		_, err := io.WriteString(s.app.Stdout, string(r.Output))
		return err
	default:
		if err := render(&b, res); err != nil {
			return err
		}
	}
	_, err := io.WriteString(s.app.Stdout, b.String())
	return err
}

// showContent writes a file as it is, and says on stderr where it was cut.
func (s *surface) showContent(r *catalog.FileReadResult) error {
	if _, err := io.WriteString(s.app.Stdout, string(r.Content)); err != nil {
		return err
	}
	if !r.Truncated {
		return nil
	}
	_, err := fmt.Fprintf(s.app.Stderr, "%s: %d of %d bytes: go on with --start-line %d\n", s.app.Name, len(r.Content), r.Size, r.StartLine+r.LineCount)
	return err
}

// render writes the text form of a result to a builder, whose writes do not
// fail.
func render(w *strings.Builder, res any) error {
	switch r := res.(type) {
	case *catalog.CreateSandboxResult:
		fmt.Fprintf(w, "%s at %s: %s, %s (%s stored) from %s in %s\n", r.SandboxID, r.Commit, count(r.Files, "file"), bytesText(r.Bytes), bytesText(r.StoredBytes), printable(r.WorkspaceRoot), milliseconds(r.DurationMS))
	case *catalog.ListSandboxesResult:
		renderSandboxes(w, r.Sandboxes)
	case *catalog.InspectSandboxResult:
		renderSandbox(w, r)
	case *catalog.DestroySandboxResult:
		fmt.Fprintf(w, "%s destroyed: %s ended, %s freed\n", r.SandboxID, count(int64(r.SessionsEnded), "session"), bytesText(r.FreedBytes))
	case *catalog.CreateWorkspaceSessionResult:
		fmt.Fprintf(w, "%s on %s at %s (network %s, trace level %s, ids %s) in %s\n", r.WorkspaceSessionID, r.Base, printable(r.Workspace), r.Network, r.TraceLevel, r.IDMapping, milliseconds(r.DurationMS))
	case *catalog.ListWorkspaceSessionsResult:
		renderSessions(w, r.Sessions)
	case *catalog.FileWriteResult:
		fmt.Fprintf(w, "%s %s: %s%s\n", pastTense(r.Type), printable(r.Path), bytesText(r.BytesWritten), publication(r.Status, r.Commit, r.WorkspaceSessionID))
		renderPaths(w, "merged", r.Merged)
	case *catalog.FileEditResult:
		fmt.Fprintf(w, "edited %s: %s%s\n", printable(r.Path), count(int64(r.Replacements), "replacement"), publication(r.Status, r.Commit, r.WorkspaceSessionID))
		renderPaths(w, "merged", r.Merged)
	case *catalog.FileListResult:
		renderEntries(w, r)
	case *catalog.FileBlameResult:
		renderBlame(w, r)
	case *catalog.DiffWorkspaceSessionResult:
		renderDiff(w, r)
	case *catalog.PublishWorkspaceSessionResult:
		renderPublish(w, r)
	case *catalog.RefreshWorkspaceSessionResult:
		renderRefresh(w, r)
	case *catalog.DestroyWorkspaceSessionResult:
		fmt.Fprintf(w, "%s destroyed: %s ended, %s dropped, %s freed\n", r.WorkspaceSessionID, count(int64(r.ProcessesEnded), "process"), count(r.Unpublished, "unpublished change"), bytesText(r.FreedBytes))
	case *catalog.SnapshotResult:
		renderSnapshot(w, r)
	case *catalog.TraceResult:
		renderTrace(w, r)
	case *catalog.EventsResult:
		renderEvents(w, r)
	case *catalog.ActivityResult:
		renderActivity(w, r)
	case *catalog.LayerStackResult:
		renderLayers(w, r)
	default:
		return fmt.Errorf("no text form of %T", res)
	}
	return nil
}

// table writes aligned columns; each row is cells joined by tabs.
func table(w *strings.Builder, header string, rows func(row func(cells ...any))) {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, header)
	rows(func(cells ...any) {
		for i, c := range cells {
			if i > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, c)
		}
		fmt.Fprintln(t)
	})
	_ = t.Flush() // a builder's writes do not fail
}

func renderSandboxes(w *strings.Builder, list []catalog.Sandbox) {
	if len(list) == 0 {
		fmt.Fprintln(w, "no sandboxes")
		return
	}
	table(w, "SANDBOX\tHEAD\tSTATE\tFILES\tSTORED\tSESSIONS\tCREATED\tWORKSPACE", func(row func(...any)) {
		for _, b := range list {
			row(b.SandboxID, b.Head, b.State, b.Files, bytesText(b.StoredBytes), b.Sessions, clock(b.CreatedAt), printable(b.WorkspaceRoot))
		}
	})
	for _, b := range list {
		if b.Problem != "" {
			fmt.Fprintf(w, "%s is %s: %s\n", b.SandboxID, b.State, b.Problem)
		}
	}
}

func renderSandbox(w *strings.Builder, r *catalog.InspectSandboxResult) {
	table(w, "sandbox\t"+r.SandboxID, func(row func(...any)) {
		row("workspace", printable(r.WorkspaceRoot))
		row("state", r.State)
		if r.Problem != "" {
			row("problem", r.Problem)
		}
		row("created", clock(r.CreatedAt))
		row("imported", count(r.Files, "file")+", "+bytesText(r.Bytes))
		row("layers", fmt.Sprintf("%d, %s", r.Layers, bytesText(r.StoredBytes)))
		head := r.Head
		if c := r.HeadCommit; c != nil {
			head += " " + author(c.Session, c.Operation) + " " + clock(c.Time)
			if c.Message != "" {
				head += " " + printable(catalog.Text(c.Message))
			}
		}
		row("head", head)
		row("sessions", r.Sessions)
	})
	if len(r.OpenSessions) > 0 {
		fmt.Fprintln(w)
		renderSessions(w, r.OpenSessions)
	}
}

func renderSessions(w *strings.Builder, list []catalog.Session) {
	if len(list) == 0 {
		fmt.Fprintln(w, "no sessions")
		return
	}
	table(w, "SESSION\tBASE\tSTATE\tCHANGES\tPRIVATE\tNETWORK\tTRACE\tCREATED", func(row func(...any)) {
		for _, s := range list {
			row(s.WorkspaceSessionID, s.Base, s.State, s.Changes, bytesText(s.UpperBytes), s.Network, s.TraceLevel, clock(s.CreatedAt))
		}
	})
	commands := 0
	for _, s := range list {
		commands += len(s.Commands)
		if s.Problem != "" {
			fmt.Fprintf(w, "%s is %s: %s\n", s.WorkspaceSessionID, s.State, s.Problem)
		}
	}
	if commands == 0 {
		return
	}
	fmt.Fprintln(w)
	table(w, "COMMAND\tSESSION\tSTATUS\tEXIT\tTOOK\tLINE", func(row func(...any)) {
		for _, s := range list {
			for _, c := range s.Commands {
				exit := "-"
				if c.ExitCode != nil {
					exit = strconv.Itoa(*c.ExitCode)
				}
				row(c.CommandID, s.WorkspaceSessionID, c.Status, exit, milliseconds(c.DurationMS), printable(c.Command))
			}
		}
	})
}

func renderEntries(w *strings.Builder, r *catalog.FileListResult) {
	table(w, "MODE\tSIZE\tMODIFIED\tNAME", func(row func(...any)) {
		for _, e := range r.Entries {
			name := printable(e.Name)
			switch e.Kind {
			case "dir":
				name += "/"
			case "symlink":
				name += " -> " + printable(e.Target)
			case "file":
			default:
				name += " (" + e.Kind + ")"
			}
			row(e.Mode, e.Size, clock(e.Mtime), name)
		}
	})
	if r.Truncated && len(r.Entries) > 0 {
		fmt.Fprintf(w, "there is more: go on with --after %s\n", printable(r.Entries[len(r.Entries)-1].Name))
	}
}

func renderBlame(w *strings.Builder, r *catalog.FileBlameResult) {
	table(w, "LINES\tCOMMIT\tOWNER\tTIME\tOPERATION\tCOMMAND", func(row func(...any)) {
		for _, b := range r.Ranges {
			lines := strconv.FormatInt(b.StartLine, 10)
			if b.LineCount != 1 {
				lines += "-" + strconv.FormatInt(b.StartLine+b.LineCount-1, 10)
			}
			when := "-"
			if b.Time != nil {
				when = clock(*b.Time)
			}
			row(lines, dash(b.Commit), b.Owner, when, dash(b.Operation), dash(clip(printable(b.Command), 60)))
		}
	})
}

func renderDiff(w *strings.Builder, r *catalog.DiffWorkspaceSessionResult) {
	if len(r.Changes) == 0 {
		fmt.Fprintf(w, "no changes against %s\n", r.Base)
		return
	}
	for _, c := range r.Changes {
		path := printable(c.Path)
		if c.From != "" {
			path = printable(c.From) + " -> " + path
		}
		fmt.Fprintf(w, "%s %s (%s", c.Change, path, c.Kind)
		if c.Old != nil && c.New != nil && c.Old.Mode != c.New.Mode {
			fmt.Fprintf(w, ", mode %s -> %s", c.Old.Mode, c.New.Mode)
		}
		switch {
		case c.Binary:
			fmt.Fprintf(w, ", binary, %d -> %d bytes", size(c.Old), size(c.New))
		case c.LinesAdded+c.LinesGone > 0:
			fmt.Fprintf(w, ", +%d -%d", c.LinesAdded, c.LinesGone)
		}
		w.WriteString(")\n")
		w.WriteString(string(c.Diff))
		if c.Diff != "" && !strings.HasSuffix(string(c.Diff), "\n") {
			w.WriteByte('\n')
		}
	}
}

func size(v *catalog.Version) int64 {
	if v == nil {
		return 0
	}
	return v.Size
}

func renderPublish(w *strings.Builder, r *catalog.PublishWorkspaceSessionResult) {
	if r.Status == catalog.PublishNoOp {
		fmt.Fprintf(w, "nothing to publish: the head stays %s\n", r.Commit)
	} else {
		fmt.Fprintf(w, "published %s on %s in %s%s\n", r.Commit, r.Parent, milliseconds(r.DurationMS), counts(r.Counts))
	}
	renderPaths(w, "merged", r.Merged)
	if r.Closed {
		fmt.Fprintf(w, "session %s ended\n", r.WorkspaceSessionID)
	}
}

func renderRefresh(w *strings.Builder, r *catalog.RefreshWorkspaceSessionResult) {
	if r.Base == r.PreviousBase {
		fmt.Fprintf(w, "already on the head, %s\n", r.Base)
	} else {
		fmt.Fprintf(w, "moved from %s to %s: %s of the head, %d merged, %s\n", r.PreviousBase, r.Base, count(int64(len(r.Moved)), "change"), len(r.Merged), count(int64(len(r.Conflicts)), "conflict"))
	}
	renderPaths(w, "merged", r.Merged)
	renderConflicts(w, r.Conflicts)
}

// renderConflicts writes a line for each conflict and one for its remedy.
func renderConflicts(w *strings.Builder, list []catalog.Conflict) {
	for _, c := range list {
		fmt.Fprintf(w, "  %s: %s", printable(c.Path), c.Kind)
		for _, n := range c.AlsoNames {
			fmt.Fprintf(w, ", also named %s", printable(n))
		}
		if c.HeadCommit != "" {
			fmt.Fprintf(w, "; changed at the head by %s", c.HeadCommit)
			if c.HeadOrigin != nil && c.HeadOrigin.Owner != "" {
				fmt.Fprintf(w, " (%s)", c.HeadOrigin.Owner)
			}
		}
		for i, h := range c.Hunks {
			if i == 3 {
				fmt.Fprintf(w, ", %d more", len(c.Hunks)-i)
				break
			}
			sep := ","
			if i == 0 {
				sep = "; lines"
			}
			fmt.Fprintf(w, "%s %s here, %s at the head", sep, lines(h.Session), lines(h.Head))
		}
		w.WriteByte('\n')
		if c.Remedy != "" {
			fmt.Fprintf(w, "    %s\n", printable(catalog.Text(c.Remedy)))
		}
	}
}

func lines(s catalog.LineSpan) string {
	switch s.Count {
	case 0:
		return "none"
	case 1:
		return strconv.FormatInt(s.Start, 10)
	}
	return fmt.Sprintf("%d-%d", s.Start, s.Start+s.Count-1)
}

func renderPaths(w *strings.Builder, what string, paths []catalog.Text) {
	for _, p := range paths {
		fmt.Fprintf(w, "  %s %s\n", what, printable(p))
	}
}

func publication(status, commit, session string) string {
	switch {
	case session != "":
		return " in " + session
	case status == catalog.PublishNoOp:
		return ", nothing new: the head stays " + commit
	}
	return ", published " + commit
}

func pastTense(typ string) string {
	if typ == "create" {
		return "created"
	}
	return "wrote"
}

// counts writes the counters that are not zero, by name.
func counts(m map[string]int64) string {
	var parts []string
	for _, k := range sortedKeys(m) {
		if m[k] != 0 {
			parts = append(parts, fmt.Sprintf("%d %s", m[k], strings.ReplaceAll(k, "_", " ")))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return ": " + strings.Join(parts, ", ")
}

func author(session, operation string) string {
	switch {
	case session != "":
		return "by session " + session
	case operation != "":
		return "by operation " + operation
	}
	return ""
}

// printable makes bytes of a stranger fit for a terminal: as they are when all
// of them can be shown, else quoted.
func printable(t catalog.Text) string {
	s := string(t)
	if utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	return strconv.Quote(s)
}

func clip(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-3]) + "..."
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func count(n int64, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "s"):
		return fmt.Sprintf("%d %ses", n, what)
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func bytesText(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/unit, 0
	for v >= unit && i < 4 {
		v, i = v/unit, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[i])
}

func milliseconds(n int64) string {
	if n >= 10_000 {
		return fmt.Sprintf("%.1f s", float64(n)/1000)
	}
	return fmt.Sprintf("%d ms", n)
}

func microseconds(n int64) string {
	switch {
	case n >= 10_000_000:
		return fmt.Sprintf("%.1f s", float64(n)/1e6)
	case n >= 1000:
		return fmt.Sprintf("%.1f ms", float64(n)/1e3)
	}
	return fmt.Sprintf("%d us", n)
}

// clock shows an instant in the reader's own time zone.
func clock(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05") }
