package main

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"
)

// ownFiles is how many files each session has to itself; half of them exist
// before, half are new.
const ownFiles = 10

// manySessions opens n sessions over one sandbox, all at once. Each edits files
// of its own and one line of a file that all share; all publish. Nothing may be
// lost, and every line must be blamed on the session that wrote it.
func manySessions(ctx context.Context, r *run, n int) error {
	base := map[string]string{}
	var shared strings.Builder
	for i := range n {
		// A session's line has a neighbour on each side: edits that touch are
		// one region and would conflict, as they do in git.
		fmt.Fprintf(&shared, "before %d\nline of %d\nafter %d\n", i, i, i)
		for k := range ownFiles / 2 {
			base[ownFile(i, k)] = fmt.Sprintf("file %d of %d\n", k, i)
		}
	}
	base["shared.txt"] = shared.String()
	dir, err := r.writeFiles("workspace", base)
	if err != nil {
		return err
	}
	sb, err := r.CreateSandbox(ctx, dir)
	if err != nil {
		return err
	}

	began := time.Now()
	session := make([]string, n)
	err = each(n, 8, func(i int) error {
		s, err := r.CreateSession(ctx, sb.ID)
		session[i] = s.ID
		return err
	})
	if err != nil {
		return fmt.Errorf("open sessions: %w", err)
	}
	r.say("%d sessions open at once after %.1f s", n, time.Since(began).Seconds())

	want := maps.Clone(base)
	delete(want, "shared.txt")
	for i := range n {
		for k := range ownFiles {
			want[ownFile(i, k)] = base[ownFile(i, k)] + edit(i)
		}
	}
	began = time.Now()
	err = each(n, 8, func(i int) error {
		var script strings.Builder
		script.WriteString("set -e\n")
		for k := range ownFiles {
			fmt.Fprintf(&script, "echo '%s' >> %s\n", strings.TrimSuffix(edit(i), "\n"), ownFile(i, k))
		}
		fmt.Fprintf(&script, "sed -i 's/^line of %d$/& %s/' shared.txt\n", i, strings.TrimSuffix(edit(i), "\n"))
		_, err := r.command(ctx, sb.ID, session[i], script.String())
		return err
	})
	if err != nil {
		return fmt.Errorf("edit: %w", err)
	}
	r.say("all edited after %.1f s", time.Since(began).Seconds())

	began = time.Now()
	merged := make([]bool, n)
	err = each(n, 16, func(i int) error {
		p, err := r.Publish(ctx, sb.ID, session[i])
		if err == nil && p.Status != "committed" {
			err = fmt.Errorf("publication: %+v", p)
		}
		merged[i] = len(p.Merged) > 0
		return err
	})
	if err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	merges := 0
	for _, m := range merged {
		if m {
			merges++
		}
	}
	head, err := r.verify(ctx, sb.ID)
	if err != nil {
		return err
	}
	r.say("all published after %.1f s: %d layers, %d of them merges", time.Since(began).Seconds(), head, merges)
	if head > n {
		return fmt.Errorf("%d layers for %d publications", head, n)
	}
	if err := checkShared(ctx, r, sb.ID, session); err != nil {
		return err
	}
	return checkOwn(ctx, r, sb.ID, session, want)
}

func ownFile(session, k int) string {
	kind := "old"
	if k >= ownFiles/2 {
		kind = "new"
	}
	return fmt.Sprintf("own/%d/%s-%d.txt", session, kind, k)
}

func edit(session int) string { return fmt.Sprintf("edited by number %d\n", session) }

func checkShared(ctx context.Context, r *run, sandbox string, session []string) error {
	head, err := r.Read(ctx, sandbox, "", "shared.txt")
	if err != nil {
		return err
	}
	blame, err := r.Blame(ctx, sandbox, "shared.txt")
	if err != nil {
		return err
	}
	owners := blame.Owners()
	lines := strings.Split(strings.TrimSuffix(head.Content, "\n"), "\n")
	if len(lines) != 3*len(session) || len(owners) != len(lines) {
		return fmt.Errorf("shared.txt has %d lines and blame covers %d, want %d", len(lines), len(owners), 3*len(session))
	}
	for i, id := range session {
		want := fmt.Sprintf("line of %d %s", i, strings.TrimSuffix(edit(i), "\n"))
		if lines[3*i+1] != want || owners[3*i+1] != "workspace_session:"+id {
			return fmt.Errorf("line %d is %q by %s, want %q by session %s", 3*i+2, lines[3*i+1], owners[3*i+1], want, id)
		}
		if owners[3*i] != "original" || owners[3*i+2] != "original" {
			return fmt.Errorf("the lines around line %d are blamed on %s and %s, want original", 3*i+2, owners[3*i], owners[3*i+2])
		}
	}
	r.say("shared.txt: every line is there and blamed on the right session")
	return nil
}

func checkOwn(ctx context.Context, r *run, sandbox string, session []string, want map[string]string) error {
	reader, err := r.CreateSession(ctx, sandbox)
	if err != nil {
		return err
	}
	out, err := r.command(ctx, sandbox, reader.ID, "grep -r '' own", "--max-output-bytes", "16000000")
	if err != nil {
		return err
	}
	got := map[string]string{}
	for line := range strings.Lines(out) {
		name, text, _ := strings.Cut(line, ":")
		got[name] += text
	}
	for name, text := range want {
		if got[name] != text {
			return fmt.Errorf("%s holds %q, want %q", name, got[name], text)
		}
	}
	if len(got) != len(want) {
		return fmt.Errorf("%d own files at the head, want %d", len(got), len(want))
	}
	err = each(len(session), 8, func(i int) error {
		for k, first := range map[int]string{0: "original", ownFiles - 1: "workspace_session:" + session[i]} {
			b, err := r.Blame(ctx, sandbox, ownFile(i, k))
			if err != nil {
				return err
			}
			owners := b.Owners()
			if len(owners) == 0 || owners[0] != first || owners[len(owners)-1] != "workspace_session:"+session[i] {
				return fmt.Errorf("%s is blamed on %v", ownFile(i, k), owners)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.say("%d own files: all there, blamed on their sessions", len(want))
	return nil
}
