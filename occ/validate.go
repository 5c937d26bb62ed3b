package occ

import (
	"errors"
)

// Validate judges delta d, taken from a session that leased base (commit
// baseCommit), against head. Conflicts are an answer, not an error; an error
// comes from a view.
func Validate(base View, baseCommit uint64, head HeadView, session View, d Delta, o Options) (*Verdict, error) {
	return nil, errors.ErrUnsupported
}
