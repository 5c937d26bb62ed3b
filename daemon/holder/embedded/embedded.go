// Package embedded carries the static holder binary inside the daemon, when
// the build put one here.
package embedded

import (
	"embed"
	"io/fs"
)

//go:embed sandbox-holder*
var files embed.FS

// Open opens the holder binary. It fails with fs.ErrNotExist in a build that
// embedded none.
func Open() (fs.File, error) { return files.Open("sandbox-holder") }
