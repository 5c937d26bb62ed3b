// Package fstest is a conformance suite over a directory: what POSIX and Linux
// promise of a writable file system, beyond what go-fuse's posixtest looks at.
// It runs on a plain directory as the control and on a mounted view, and knows
// neither. What a case fails on and the control does not is the view's fault.
//
// Cases use system calls directly, at the calling thread, and map memory; the
// file system must not be served by the process that runs them.
package fstest

import (
	"os"
	"path/filepath"
	"testing"
)

// Case is one promise, or a few that belong together.
type Case struct {
	Name string
	Run  func(t *testing.T, dir string) // dir is empty and the case's own
}

// Cases returns the suite.
func Cases() []Case {
	return []Case{
		{"AppendTwoWriters", appendTwoWriters},
		{"Chmod", chmod},
		{"ChownKillsSetID", chownKillsSetID},
		{"CopyFileRange", copyFileRange},
		{"CreateFlags", createFlags},
		{"DeepPath", deepPath},
		{"DirectoryErrors", directoryErrors},
		{"DirectoryLinks", directoryLinks},
		{"DotDotAfterMove", dotDotAfterMove},
		{"Exec", execFile},
		{"FallocateModes", fallocateModes},
		{"Fsync", fsync},
		{"HardLinks", hardLinks},
		{"LargeDirectory", largeDirectory},
		{"ListWhileDeleting", listWhileDeleting},
		{"ListingFollowsChanges", listingFollowsChanges},
		{"LocksBetweenDescriptors", locks},
		{"MmapPrivate", mmapPrivate},
		{"MmapShared", mmapShared},
		{"Names", names},
		{"NamedPipe", namedPipe},
		{"RemovedWorkingDirectory", removedDirectory},
		{"RenameErrors", renameErrors},
		{"RenameExchange", renameExchange},
		{"RenameKeepsInode", renameKeepsInode},
		{"RenameNoReplace", renameNoReplace},
		{"RenameSameInode", renameSameInode},
		{"RenameStorm", renameStorm},
		{"SetGIDDirectory", setGIDDirectory},
		{"SparseFile", sparseFile},
		{"StatFS", statFS},
		{"Symlinks", symlinks},
		{"Times", times},
		{"TmpfileLinked", tmpfileLinked},
		{"TruncateZeros", truncateZeros},
		{"Umask", umask},
		{"UnixSocket", unixSocket},
		{"UnlinkedOpenFile", unlinkedOpenFile},
		{"WriteBeyondEnd", writeBeyondEnd},
		{"Xattrs", xattrs},
	}
}

// RunAll runs every case as a subtest, each in a fresh directory beneath dir
// that is removed afterwards.
func RunAll(t *testing.T, dir string) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) {
			sub := filepath.Join(dir, c.Name)
			must(t, os.Mkdir(sub, 0o755))
			defer func() { must(t, os.RemoveAll(sub)) }()
			c.Run(t, sub)
		})
	}
}
