package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// writers is the shell script of the database check: two processes insert into
// one write-ahead-logged database at the same time.
const writers = `set -e
rm -rf .db && mkdir .db && cd .db
[ "$(sqlite3 t.db 'PRAGMA journal_mode=WAL; CREATE TABLE t(w INTEGER, i INTEGER);')" = wal ]
writer() {
	{ echo '.timeout 60000'; for i in $(seq 1 200); do echo "INSERT INTO t VALUES($1, $i);"; done; } | sqlite3 -bail t.db
}
writer 1 & one=$!
writer 2 & two=$!
wait $one
wait $two
sqlite3 t.db 'PRAGMA integrity_check; SELECT count(*), count(DISTINCT w) FROM t;'
cd .. && rm -r .db`

// repository is the shell script of the git check.
const repository = `set -e
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.com GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.com
git init -q .
git add -A -f
git commit -q -m everything
[ -z "$(git status --porcelain)" ]
git fsck --full --strict 2>&1
[ "$(git ls-files | wc -l)" = "$(find . -path ./.git -prune -o ! -type d -print | wc -l)" ]
echo whole`

// toolchain builds and vets Go's own source in a session over it, keeps it in a
// git repository made there, and runs a database with two writers.
func toolchain(ctx context.Context, r *run) error {
	out, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("find GOROOT: %w", err)
	}
	goroot, err := filepath.EvalSymlinks(strings.TrimSpace(string(out)))
	if err != nil {
		return err
	}
	sb, err := r.CreateSandbox(ctx, filepath.Join(goroot, "src"))
	if err != nil {
		return err
	}
	r.say("%s: %d files", sb.Root, sb.Files)
	session, err := r.CreateSession(ctx, sb.ID)
	if err != nil {
		return err
	}
	var errs []error
	for _, step := range []struct{ name, command, want string }{
		{"go build ./cmd/gofmt", "go build -o /tmp/gofmt ./cmd/gofmt && /tmp/gofmt -l fmt && echo built", "built"},
		{"go build into the view", "go build ./cmd/gofmt && ./gofmt -l fmt && rm gofmt && echo built", "built"},
		{"go vet ./fmt", "go vet ./fmt && echo vetted", "vetted"},
		{"git init, add, commit, status, fsck", repository, "whole"},
		{"sqlite3 WAL with two writers", writers, "ok\n400|2"},
	} {
		began := time.Now()
		out, err := r.command(ctx, sb.ID, session.ID, step.command,
			"--env", "PATH="+filepath.Join(goroot, "bin")+":/usr/local/bin:/usr/bin:/bin",
			"--env", "GOTOOLCHAIN=local", "--timeout-ms", "600000")
		if err == nil && !strings.HasSuffix(strings.TrimSpace(out), step.want) {
			err = fmt.Errorf("printed %q, want %q at its end", tail(out), step.want)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", step.name, err))
			continue
		}
		r.say("%s: ok in %.1f s", step.name, time.Since(began).Seconds())
	}
	return errors.Join(errs...)
}
