package fstest

import "testing"

// TestPlainDirectory is the control: the suite asks for nothing that the host's
// own file system does not do.
func TestPlainDirectory(t *testing.T) { RunAll(t, t.TempDir()) }
