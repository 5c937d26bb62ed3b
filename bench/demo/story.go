package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"ephemeral-sandbox/bench/drive"
)

// story tells the demo on one rig.
type story struct {
	rig     *drive.Rig
	out     io.Writer
	step    int
	started bool

	sandbox string
	file    target
	work    work
	actors  [3]actor
}

// actor is one session and the part it plays.
type actor struct {
	name    string // A, B, C
	session string
	does    []string // what it did, as one would type it
	work    *drive.Exec
}

func (s *story) heading(text string) {
	s.step++
	fmt.Fprintf(s.out, "\n%d. %s\n%s\n", s.step, text, strings.Repeat("-", len(text)+3))
}

func (s *story) say(format string, args ...any) { fmt.Fprintf(s.out, format+"\n", args...) }

// quote prints text indented, as something a program said.
func (s *story) quote(text string) {
	for line := range strings.Lines(text) {
		fmt.Fprintf(s.out, "    | %s\n", strings.TrimRight(line, "\n"))
	}
}

func (s *story) tell(ctx context.Context, dir string) error {
	var err error
	if s.file, err = pickTarget(dir); err != nil {
		return err
	}
	s.work = pickWork(ctx, dir)
	original, err := os.ReadFile(filepath.Join(dir, s.file.path))
	if err != nil {
		return err
	}
	for _, chapter := range []func(context.Context, string) error{
		s.begin, s.open, s.act, s.isolation, s.publish, s.resolve, s.blame, s.activity,
	} {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := chapter(ctx, dir); err != nil {
			return err
		}
	}
	now, err := os.ReadFile(filepath.Join(dir, s.file.path))
	if err != nil {
		return err
	}
	if string(now) != string(original) {
		return fmt.Errorf("%s on the host has changed", s.file.path)
	}
	s.say("\n%s itself was only read: %s there is as it was.", dir, s.file.path)
	return nil
}

func (s *story) begin(ctx context.Context, dir string) error {
	s.heading("Start the daemon and make a sandbox from " + dir)
	s.say("Commands are shown as one would type them; they run with --json, so that their answers can be checked.")
	s.rig.Shown = s.out
	s.started = true // also when starting fails half-way: stop is harmless
	if err := s.rig.Start(ctx); err != nil {
		return err
	}
	began := time.Now()
	sb, err := s.rig.ImportSandbox(ctx, dir, s.importing())
	if err != nil {
		return err
	}
	s.sandbox = sb.ID
	s.say("Imported %d files, %s, as %s, stored in %s, in %.1f s.", sb.Files, size(sb.Bytes), sb.Commit, size(sb.StoredBytes), time.Since(began).Seconds())
	return nil
}

// importing returns what shows the progress of an import: one line for each
// step that is large enough to be news.
func (s *story) importing() func(files int64) {
	next := int64(1000)
	return func(files int64) {
		if files >= next {
			s.say("  ... %d files", files)
			next = files + max(1000, files/4)
		}
	}
}

// size writes a number of bytes for people.
func size(n int64) string {
	v, unit := float64(n), "B"
	for _, u := range []string{"KiB", "MiB", "GiB"} {
		if v >= 1024 {
			v, unit = v/1024, u
		}
	}
	if unit == "B" {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, unit)
}

// together runs fn for each actor at once.
func (s *story) together(fn func(a *actor) error) error {
	errs := make([]error, len(s.actors))
	var wg sync.WaitGroup
	for i := range s.actors {
		wg.Go(func() {
			if err := fn(&s.actors[i]); err != nil {
				errs[i] = fmt.Errorf("session %s: %w", s.actors[i].name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (s *story) open(ctx context.Context, _ string) error {
	s.heading("Open three sessions at once")
	for i := range s.actors {
		s.actors[i].name = string(rune('A' + i))
	}
	began := time.Now()
	quiet := *s.rig
	quiet.Shown = nil
	err := s.together(func(a *actor) error {
		session, err := quiet.CreateSession(ctx, s.sandbox)
		a.session = session.ID
		return err
	})
	if err != nil {
		return err
	}
	took := time.Since(began)
	s.say("$ %s   (three times)", drive.Shell(drive.Runtime, "--sandbox-id", s.sandbox, "create_workspace_session"))
	for _, a := range s.actors {
		s.say("Session %s is %s.", a.name, a.session)
	}
	s.say("All three stood after %d ms.", took.Milliseconds())
	return nil
}

// run is a command in a session that must succeed.
func (s *story) run(ctx context.Context, r drive.Rig, a *actor, command string, flags ...string) (drive.Exec, error) {
	e, err := r.Exec(ctx, s.sandbox, a.session, command, flags...)
	if err == nil && !e.OK() {
		err = fmt.Errorf("command %q: %s: %s", command, e.Status, strings.TrimSpace(e.Stderr))
	}
	return e, err
}

// note is the name of the file that an actor adds.
func (a *actor) note() string { return "notes-of-" + a.name + ".txt" }

func (s *story) act(ctx context.Context, _ string) error {
	s.heading("Work in all three, at the same time")
	quiet := *s.rig
	quiet.Shown = nil
	file := drive.Quote(s.file.path)
	early, late := s.file.early, s.file.late
	parts := map[string]func(a *actor) error{
		"A": func(a *actor) error {
			edit := fmt.Sprintf("sed -i '%ds/$/ (edited by A)/' %s", early+1, file)
			add := "echo 'written by A' > " + a.note()
			a.does = []string{edit, add}
			_, err := s.run(ctx, quiet, a, edit+" && "+add)
			return err
		},
		"B": func(a *actor) error {
			edit := drive.Edit{Old: s.file.lines[late], New: s.file.lines[late] + " (edited by B)"}
			a.does = []string{fmt.Sprintf("file_edit --path %s: append to line %d", file, late+1)}
			if err := quiet.EditFile(ctx, s.sandbox, a.session, s.file.path, edit); err != nil {
				return err
			}
			flags := []string{"--timeout-ms", "60000"}
			for _, kv := range s.work.env {
				flags = append(flags, "--env", kv)
			}
			a.does = append(a.does, s.work.command)
			e, err := quiet.Exec(ctx, s.sandbox, a.session, s.work.command, flags...)
			a.work = &e
			return err
		},
		"C": func(a *actor) error {
			edit := fmt.Sprintf("sed -i '%ds/$/ (edited by C)/' %s", early+1, file)
			add := "echo 'written by C' > " + a.note()
			a.does = []string{edit, add}
			_, err := s.run(ctx, quiet, a, edit+" && "+add)
			return err
		},
	}
	if err := s.together(func(a *actor) error { return parts[a.name](a) }); err != nil {
		return err
	}
	s.say("A, B and C edit %s; A and C the same line %d, B line %d.", s.file.path, early+1, late+1)
	for _, a := range s.actors {
		for _, d := range a.does {
			s.say("  in %s:  %s", a.name, d)
		}
	}
	s.tellWork(s.actors[1].work)
	return nil
}

// tellWork tells how the project's own command went. The project may well be
// broken; that is news, not a failure of ours.
func (s *story) tellWork(e *drive.Exec) {
	verdict := "succeeded"
	if !e.OK() {
		verdict = "did not succeed (" + e.Status
		if e.ExitCode != nil {
			verdict += fmt.Sprintf(", exit code %d", *e.ExitCode)
		}
		verdict += "); the demo goes on without it"
	}
	s.say("This is %s; %q in B took %.1f s and %s.", s.work.what, s.work.command, float64(e.DurationMS)/1000, verdict)
	said := strings.TrimSpace(e.Stdout + e.Stderr)
	lines := strings.Split(said, "\n")
	if said != "" {
		s.quote(strings.Join(lines[max(0, len(lines)-5):], "\n"))
	}
}

func (s *story) isolation(ctx context.Context, _ string) error {
	s.heading("None sees another's work")
	quiet := *s.rig
	quiet.Shown = nil
	look := fmt.Sprintf("sed -n -e %dp -e %dp %s; ls notes-of-* 2>/dev/null || true", s.file.early+1, s.file.late+1, drive.Quote(s.file.path))
	s.say("In each session: %s", look)
	for i := range s.actors {
		a := &s.actors[i]
		e, err := s.run(ctx, quiet, a, look)
		if err != nil {
			return err
		}
		s.say("  %s sees:", a.name)
		s.quote(e.Stdout)
		for _, other := range s.actors {
			sees := strings.Contains(e.Stdout, "edited by "+other.name) || strings.Contains(e.Stdout, other.note())
			if sees != (other.name == a.name) {
				return fmt.Errorf("session %s sees the work of %s: %v", a.name, other.name, sees)
			}
		}
	}
	head, err := quiet.Read(ctx, s.sandbox, "", s.file.path)
	if err != nil {
		return err
	}
	if strings.Contains(head.Content, "edited by") {
		return errors.New("the head shows work that nobody published")
	}
	s.say("The head has neither yet.")
	return nil
}

func (s *story) publish(ctx context.Context, _ string) error {
	s.heading("Publish all three")
	a, b, c := &s.actors[0], &s.actors[1], &s.actors[2]
	first, err := s.rig.Publish(ctx, s.sandbox, a.session, "--message", "work of A")
	if err != nil {
		return err
	}
	s.say("A: %s as %s on %s, nothing to merge.", first.Status, first.Commit, first.Parent)
	if first.Status != "committed" || len(first.Merged) != 0 {
		return fmt.Errorf("publication of A: %+v, want a clean commit", first)
	}
	second, err := s.rig.Publish(ctx, s.sandbox, b.session, "--message", "work of B")
	if err != nil {
		return err
	}
	s.say("B: %s as %s on %s, merged line by line: %s.", second.Status, second.Commit, second.Parent, strings.Join(second.Merged, ", "))
	if second.Parent != first.Commit || !slices.Contains(second.Merged, s.file.path) {
		return fmt.Errorf("publication of B: %+v, want a merge of %s", second, s.file.path)
	}
	_, err = s.rig.Publish(ctx, s.sandbox, c.session, "--message", "work of C")
	refused, ok := errors.AsType[*drive.Error](err)
	if !ok || refused.Kind != "conflict" {
		return fmt.Errorf("publication of C: %w, want a conflict", err)
	}
	s.say("C: refused, exit code %d: %s", refused.Exit, refused.Message)
	found := false
	for _, k := range refused.Conflicts() {
		found = found || k.Path == s.file.path
		s.say("    %s: %s conflict, changed at the head by %s", k.Path, k.Kind, k.HeadCommit)
		for _, h := range k.Hunks {
			s.say("      base lines %s, head %s, session %s", span(h.Base), span(h.Head), span(h.Session))
		}
		s.say("      remedy: %s", k.Remedy)
	}
	if refused.Exit != 3 || !found {
		return fmt.Errorf("refusal of C does not name %s, or its exit code %d is not 3", s.file.path, refused.Exit)
	}
	layers, err := s.rig.Layers(ctx, s.sandbox, false)
	if err != nil {
		return err
	}
	if _, err := s.rig.Read(ctx, s.sandbox, "", c.note()); layers.Head != second.Commit || !drive.IsKind(err, "not_found") {
		return fmt.Errorf("after the refusal the head is %s, and reading %s gives %w; want %s and not_found", layers.Head, c.note(), err, second.Commit)
	}
	s.say("The head is still %s: of C nothing is there, not even its new file, and C has lost nothing.", layers.Head)
	return nil
}

func span(s drive.Span) string { return fmt.Sprintf("%d+%d", s.Start, s.Count) }

// takeBoth keeps both sides of each conflict and drops the base between them.
const takeBoth = `/^<<<<<<</{c=1;next} c&&/^\|\|\|\|\|\|\|/{c=2;next} c&&/^=======/{c=3;next} c&&/^>>>>>>>/{c=0;next} c!=2`

func (s *story) resolve(ctx context.Context, _ string) error {
	s.heading("Refresh C onto the head, resolve, publish")
	c := &s.actors[2]
	moved, err := s.rig.Refresh(ctx, s.sandbox, c.session)
	if err != nil {
		return err
	}
	s.say("C now stands on %s; moved to the head's version: %s; to resolve: %s.", moved.Base, list(moved.Moved), list(paths(moved.Conflicts)))
	if !slices.Contains(paths(moved.Conflicts), s.file.path) {
		return fmt.Errorf("refresh lists %v, want %s among them", paths(moved.Conflicts), s.file.path)
	}
	file, err := s.rig.Read(ctx, s.sandbox, c.session, s.file.path)
	if err != nil {
		return err
	}
	marked := conflictPart(file.Content)
	s.quote(marked)
	if marked == "" {
		return fmt.Errorf("%s in C shows no conflict markers", s.file.path)
	}
	name := drive.Quote(s.file.path)
	fix := fmt.Sprintf(`awk '%s' %s > /tmp/resolved && cat /tmp/resolved > %s`, takeBoth, name, name)
	if _, err := s.run(ctx, *s.rig, c, fix); err != nil {
		return err
	}
	if err := s.waterfall(ctx); err != nil {
		return err
	}
	done, err := s.rig.Publish(ctx, s.sandbox, c.session, "--message", "work of C, resolved", "--close")
	if err != nil {
		return err
	}
	s.say("C: %s as %s on %s, and closed.", done.Status, done.Commit, done.Parent)
	if done.Status != "committed" {
		return fmt.Errorf("publication of C after resolving: %+v", done)
	}
	return nil
}

func paths(cs []drive.Conflict) []string {
	var out []string
	for _, c := range cs {
		out = append(out, c.Path)
	}
	return out
}

// list writes a few names and how many more there are.
func list(names []string) string {
	switch {
	case len(names) == 0:
		return "nothing"
	case len(names) <= 4:
		return strings.Join(names, ", ")
	default:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:4], ", "), len(names)-4)
	}
}

// conflictPart cuts the first conflict, with its markers, out of a text.
func conflictPart(text string) string {
	begin := strings.Index(text, "<<<<<<<")
	if begin < 0 {
		return ""
	}
	end := strings.Index(text[begin:], "\n>>>>>>>")
	if end < 0 {
		return ""
	}
	end += begin + 1
	if n := strings.IndexByte(text[end:], '\n'); n >= 0 {
		return text[begin : end+n+1]
	}
	return text[begin:]
}

const barWidth = 40

// waterfall shows the spans of the command that just ran.
func (s *story) waterfall(ctx context.Context) error {
	var t drive.Trace
	if err := s.rig.Call(ctx, &t, drive.Observe, "trace", "--sandbox-id", s.sandbox, "--trace-id", "last"); err != nil {
		return err
	}
	if len(t.Spans) == 0 || !strings.Contains(t.Name+t.Spans[0].Name, "exec") {
		return fmt.Errorf("the last trace is %q with %d spans, want the command's", t.Name, len(t.Spans))
	}
	s.say("What that command spent its time on (trace %s):", t.ID)
	s.say("%s", bars(t))
	return nil
}

// bars draws a trace, one span a line, on a common time axis.
func bars(t drive.Trace) string {
	total := max(t.DurationUS, 1)
	width := 0
	for _, sp := range t.Spans {
		total = max(total, sp.OffsetUS+sp.DurationUS)
		width = max(width, 2*sp.Depth+len(sp.Name))
	}
	var b strings.Builder
	for _, sp := range t.Spans {
		from := int(sp.OffsetUS * barWidth / total)
		to := int((sp.OffsetUS + sp.DurationUS) * barWidth / total)
		from = min(max(from, 0), barWidth-1)
		to = min(max(to, from+1), barWidth)
		fmt.Fprintf(&b, "    %-*s |%s%s%s| %9.2f ms\n", width, strings.Repeat("  ", sp.Depth)+sp.Name,
			strings.Repeat(" ", from), strings.Repeat("=", to-from), strings.Repeat(" ", barWidth-to), float64(sp.DurationUS)/1000)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func (s *story) blame(ctx context.Context, _ string) error {
	s.heading("Who wrote which line of " + s.file.path)
	blame, err := s.rig.Blame(ctx, s.sandbox, s.file.path)
	if err != nil {
		return err
	}
	head, err := s.rig.Read(ctx, s.sandbox, "", s.file.path)
	if err != nil {
		return err
	}
	owners := blame.Owners()
	text := strings.Split(strings.TrimSuffix(head.Content, "\n"), "\n")
	if len(owners) != len(text) {
		return fmt.Errorf("blame covers %d lines, the file has %d", len(owners), len(text))
	}
	for _, r := range blame.Ranges {
		who := r.Owner
		if r.Operation != "" {
			who += ", operation " + r.Operation + ", " + r.Commit
		}
		s.say("  lines %4d to %-4d  %s", r.Start, r.Start+r.Count-1, who)
		if r.Command != "" {
			s.say("                      by %s", firstLine(r.Command, 100))
		}
		if r.Owner != "original" {
			s.quote(strings.Join(text[r.Start-1:r.Start-1+r.Count], "\n"))
		}
	}
	for i, line := range text {
		want := "original"
		for _, a := range s.actors {
			if strings.HasSuffix(line, "(edited by "+a.name+")") {
				want = "workspace_session:" + a.session
			}
		}
		if owners[i] != want {
			return fmt.Errorf("line %d %q is blamed on %s, want %s", i+1, line, owners[i], want)
		}
	}
	for _, a := range s.actors {
		if !strings.Contains(head.Content, "(edited by "+a.name+")") {
			return fmt.Errorf("the edit of %s is not in the head", a.name)
		}
	}
	s.say("Every line of the three sessions is blamed on the right one, the rest on the import.")
	return nil
}

// firstLine cuts a text to its first line and to n bytes.
func firstLine(text string, n int) string {
	line, _, more := strings.Cut(text, "\n")
	if len(line) > n {
		line, more = line[:n], true
	}
	if more {
		line += " ..."
	}
	return line
}

func (s *story) activity(ctx context.Context, _ string) error {
	a := s.actors[0]
	s.heading("What session A did to files")
	var act drive.Activity
	err := s.rig.Call(ctx, &act, drive.Observe, "activity", "--sandbox-id", s.sandbox, "--workspace-session-id", a.session)
	if err != nil {
		return err
	}
	wrote := false
	rest := map[string]int{}
	shown := 0
	for _, e := range act.Entries {
		inside := e.Kind == "write" || e.Kind == "create" || e.Kind == "rename"
		wrote = wrote || inside && (e.Path == s.file.path || e.Path == a.note())
		if e.Kind == "lookup" || e.Kind == "absent" || e.Kind == "list" || shown >= 30 {
			rest[e.Kind]++
			continue
		}
		shown++
		s.say("  %-7s %-40s by %s", e.Kind, e.Path, firstLine(e.Command, 70))
	}
	for _, kind := range []string{"read", "write", "create", "rename", "remove", "attr", "link", "lookup", "absent", "list"} {
		if rest[kind] > 0 {
			s.say("  and %d more of kind %s", rest[kind], kind)
		}
	}
	for _, session := range act.Sessions {
		if session.ID == a.session {
			s.say("Recorded at level %q, %d gaps.", session.Level, session.Gaps)
		}
	}
	if !wrote {
		return fmt.Errorf("the record of session A holds no write of %s or %s", s.file.path, a.note())
	}
	return nil
}
