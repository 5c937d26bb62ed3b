package layerfmt

import (
	"errors"
	"fmt"
)

// ErrVersion is answered for a sound pack that this reader is too old for.
var ErrVersion = errors.New("pack needs a newer reader")

// CorruptError says that a pack's bytes are not what was written. What they
// would have described is never served.
type CorruptError struct {
	Layer   string // ReaderOptions.Name, or the start of the pack id
	Section string // "header", "toc", "trailer", "data", or a section's name
	Offset  int64  // bytes from the start of the pack
	Reason  string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("layer %s is corrupt: section %s at offset %d: %s", e.Layer, e.Section, e.Offset, e.Reason)
}

// IsCorrupt reports whether err is or wraps a CorruptError.
func IsCorrupt(err error) bool {
	var c *CorruptError
	return errors.As(err, &c)
}
