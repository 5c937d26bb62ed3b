// Package hostfs is the narrow seam between the paths that commit something
// and the disk. It holds only what a commit needs: create, write, sync, link,
// rename, list, lock. File content served to a session never passes through it.
//
// All names are slash-separated, relative to the directory the FS was opened
// on, and cannot lead out of it. memfs keeps such a directory in memory and can
// show what a power loss would leave of it; faultfs makes a chosen step fail.
package hostfs

import (
	"errors"
	"io"
)

// ErrLocked is returned by Lock when another process, or another FS on the same
// directory, holds the lock.
var ErrLocked = errors.New("the directory is in use by another process")

// FS is one directory on some disk. Failures carry the errno they came with;
// a missing name answers fs.ErrNotExist and a taken one fs.ErrExist to
// errors.Is. An FS is safe for concurrent use.
type FS interface {
	// Mkdir makes one directory, readable by its owner only. A directory that is
	// already there is no error.
	Mkdir(name string) error
	// Open opens an existing file for reading.
	Open(name string) (File, error)
	// OpenWrite opens an existing file for reading and writing.
	OpenWrite(name string) (File, error)
	// Create makes a new file, readable by its owner only, and opens it for
	// reading and writing.
	Create(name string) (File, error)
	// Temp opens a new file without a name on the file system that holds dir.
	// Where the host cannot do that, the file has a name in dir until Link or
	// Close; a crash may then leave it behind.
	Temp(dir string) (Temp, error)
	// Rename moves a file, replacing what the new name stood for.
	Rename(from, to string) error
	// Remove removes a file or an empty directory.
	Remove(name string) error
	// List returns the names in a directory, sorted.
	List(dir string) ([]string, error)
	// SyncDir makes the names of a directory durable: every name made in it,
	// moved into or out of it, or removed from it by an earlier call.
	SyncDir(dir string) error
	// Lock takes the exclusive lock on the directory, without waiting. It is
	// held until the returned Closer is closed or the process ends.
	Lock() (io.Closer, error)
	// Close releases the directory. Open files stay usable.
	Close() error
}

// File is an open file of an FS.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	// Size is the current length in bytes.
	Size() (int64, error)
	// Sync makes the bytes and the length durable. After an error nothing is
	// known about what was written since the last success, and a second call
	// may report success without having written it.
	Sync() error
}

// Temp is a file that has no name yet. Close without Link discards it.
type Temp interface {
	File
	// Link gives the file its name, which is durable after a SyncDir of its
	// directory. It never replaces: fs.ErrExist when the name is taken.
	Link(name string) error
}
