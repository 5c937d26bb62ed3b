package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"ephemeral-sandbox/bench/drive"
)

// changedFiles is how many files a measured publication holds.
const changedFiles = 10

// bench is one run with its rig and what it measured so far.
type bench struct {
	rig     *drive.Rig
	temp    string
	dir     string
	sandbox string
	overlay *overlay // nil where the kernel does not let us
	report  report
}

// importTree imports the tree; beside it, cp copies the tree: what a tool
// without an import would do to have a base that nobody changes. (Overlayfs
// itself takes the live tree as it is and has nothing to compare.)
func (b *bench) importTree(ctx context.Context, n int) error {
	ours, other := row{
		Name:  "import " + b.dir,
		Ours:  "create_sandbox, command line to result",
		Other: "cp -a of the tree, and sync of its file system",
		Limit: 10 * time.Second,
	}, samples{}
	var mine samples
	for range n {
		began := time.Now()
		sb, err := b.rig.CreateSandbox(ctx, b.dir)
		if err != nil {
			return err
		}
		mine.add(time.Since(began))
		b.sandbox = sb.ID
		what := fmt.Sprintf("the tree: %d files, %d bytes, stored in %d bytes", sb.Files, sb.Bytes, sb.StoredBytes)
		if !slices.Contains(b.report.Notes, what) {
			b.report.Notes = append(b.report.Notes, what)
		}
		to := filepath.Join(b.temp, "copy")
		began = time.Now()
		if out, err := exec.CommandContext(ctx, "sh", "-c", `cp -a "$1" "$2" && sync -f "$2"`, "sh", b.dir, to).CombinedOutput(); err != nil {
			return fmt.Errorf("cp: %w: %s", err, out)
		}
		other.add(time.Since(began))
		if err := os.RemoveAll(to); err != nil {
			return err
		}
	}
	b.report.add(ours, mine, other)
	return nil
}

// start opens a session and runs a command in it until its first byte arrives,
// as two command lines. Beside it: an overlayfs mount over the same tree in a
// mount namespace of its own, and the same command in it.
func (b *bench) start(ctx context.Context, n int) error {
	both := row{
		Name:  "session create to first byte of its first command",
		Ours:  "create_workspace_session, then exec_command cat of a small file, two command lines",
		Other: "unshare, mount overlayfs, the same command, one shell",
		Limit: 150 * time.Millisecond,
	}
	first, err := smallFile(b.dir)
	if err != nil {
		return err
	}
	command := "cat " + drive.Quote(first)
	var mine, create, bare, other samples
	for range n {
		began := time.Now()
		s, err := b.rig.CreateSession(ctx, b.sandbox)
		if err != nil {
			return err
		}
		create.add(time.Since(began))
		took, err := b.rig.FirstByte(ctx, drive.Runtime, "--sandbox-id", b.sandbox, "exec_command", "--workspace-session-id", s.ID, command)
		if err != nil {
			return err
		}
		mine.add(create.last() + took)
		if err := b.rig.DestroySession(ctx, b.sandbox, s.ID); err != nil {
			return err
		}
		took, err = b.rig.FirstByte(ctx, drive.Runtime, "--help")
		if err != nil {
			return err
		}
		bare.add(took)
		if b.overlay != nil {
			took, err := b.overlay.firstByte(ctx, command)
			if err != nil {
				return err
			}
			other.add(took)
		}
	}
	b.report.add(both, mine, other)
	b.report.add(row{Name: "  of it: create_workspace_session", Ours: "one command line"}, create, nil)
	b.report.add(row{Name: "  for scale: a command line that only prints its help", Ours: "sandbox-runtime-cli --help"}, bare, nil)
	return nil
}

// smallFile is the name of a regular file at the top of the tree.
func smallFile(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && e.Type().IsRegular() && info.Size() > 0 && info.Size() < 64<<10 {
			return e.Name(), nil
		}
	}
	return "", fmt.Errorf("%s has no small file at its top", dir)
}

// publish changes ten files in a session and publishes it. Beside it: the same
// ten files changed on an overlayfs mount, then copied from its upper directory
// to a new directory with an fsync each, one of the directory, and a rename:
// the least that makes a directory layer durable.
func (b *bench) publish(ctx context.Context, n int) error {
	names, err := b.editable()
	if err != nil {
		return err
	}
	s, err := b.rig.CreateSession(ctx, b.sandbox)
	if err != nil {
		return err
	}
	var mine, inside, other samples
	for i := range n {
		script := change(names, i)
		e, err := b.rig.Exec(ctx, b.sandbox, s.ID, script)
		if err != nil {
			return err
		}
		if !e.OK() {
			return fmt.Errorf("change files: %s: %s", e.Status, e.Stderr)
		}
		var p struct {
			drive.Publish
			DurationMS int64 `json:"duration_ms"`
		}
		began := time.Now()
		err = b.rig.Call(ctx, &p, drive.Runtime, "--sandbox-id", b.sandbox, "publish_workspace_session", "--workspace-session-id", s.ID)
		if err != nil {
			return err
		}
		if p.Status != "committed" {
			return fmt.Errorf("publication %d: %+v", i, p)
		}
		mine.add(time.Since(began))
		inside.add(time.Duration(p.DurationMS) * time.Millisecond)
		if b.overlay != nil {
			took, err := b.overlay.publish(ctx, script, filepath.Join(b.temp, fmt.Sprint("layer", i)))
			if err != nil {
				return err
			}
			other.add(took)
		}
	}
	if err := b.rig.DestroySession(ctx, b.sandbox, s.ID); err != nil {
		return err
	}
	b.report.add(row{
		Name:  fmt.Sprintf("publish %d changed files", changedFiles),
		Ours:  "publish_workspace_session, command line to result, durable",
		Other: "copy of the upper directory's files, fsync each, fsync directory, rename",
		Limit: 50 * time.Millisecond,
	}, mine, other)
	b.report.add(row{Name: "  of it: in the daemon", Ours: "duration_ms of the result, whole milliseconds"}, inside, nil)
	return nil
}

// editable picks the text files that the publications change.
func (b *bench) editable() ([]string, error) {
	var names []string
	err := filepath.WalkDir(b.dir, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil || !d.Type().IsRegular() || info.Size() == 0 || info.Size() > 64<<10 {
			return err
		}
		rel, err := filepath.Rel(b.dir, p)
		if err != nil {
			return err
		}
		names = append(names, rel)
		if len(names) == changedFiles {
			return filepath.SkipAll
		}
		return nil
	})
	if err == nil && len(names) < changedFiles {
		err = fmt.Errorf("%s has fewer than %d small files", b.dir, changedFiles)
	}
	return names, err
}

// change is a script that appends a line to each file.
func change(names []string, round int) string {
	var s strings.Builder
	for _, name := range names {
		fmt.Fprintf(&s, "echo 'round %d' >> %s\n", round, drive.Quote(name))
	}
	return s.String()
}
