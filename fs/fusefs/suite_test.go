package fusefs

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"

	"ephemeral-sandbox/fs/fstest"
)

// notPosix are cases of go-fuse's suite that a plain directory fails too.
var notPosix = map[string]string{
	"FcntlFlockLocksFile": "it wants a process's own lock to keep itself out",
	"OpenSymlinkRace":     "it wants an open that a rename races with to never follow the link that was put there",
}

// posix runs all of go-fuse's suite in fresh directories beneath dir.
func posix(t *testing.T, dir string) {
	for _, name := range slices.Sorted(maps.Keys(posixtest.All)) {
		if notPosix[name] != "" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			sub := filepath.Join(dir, name)
			if err := os.Mkdir(sub, 0o755); err != nil {
				t.Fatal(err)
			}
			posixtest.All[name](t, sub)
			if err := os.RemoveAll(sub); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestPosix(t *testing.T) {
	t.Run("plain", func(t *testing.T) { posix(t, t.TempDir()) })
	for _, l := range []TraceLevel{TraceOpen, TraceIO, TraceSet} {
		t.Run(l.String(), func(t *testing.T) { posix(t, serveRemote(t, l).dir) })
	}
	t.Run("one-processor", func(t *testing.T) { posix(t, serveRemote(t, TraceOpen, "GOMAXPROCS=1").dir) })
}

func TestConformance(t *testing.T) {
	for _, l := range []TraceLevel{TraceOpen, TraceIO, TraceSet} {
		t.Run(l.String(), func(t *testing.T) { fstest.RunAll(t, serveRemote(t, l).dir) })
	}
	t.Run("one-processor", func(t *testing.T) { fstest.RunAll(t, serveRemote(t, TraceOpen, "GOMAXPROCS=1").dir) })
	// The same in a directory that a layer brought along.
	t.Run("lower", func(t *testing.T) { fstest.RunAll(t, filepath.Join(serveRemote(t, TraceOpen).dir, "lower", "empty")) })
}
