package catalog

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Kind classifies an error for programs.
type Kind string

// The kinds of error. Each states when it is given.
const (
	InvalidRequest     Kind = "invalid_request"     // the request itself is wrong; repeating it is useless
	NotFound           Kind = "not_found"           // a sandbox, session, command, path or commit that is not there
	Conflicted         Kind = "conflict"            // the head contradicts the change; details.conflicts lists where
	PreconditionFailed Kind = "precondition_failed" // right request, wrong state: a moved head, a busy session, a switched-off kernel feature
	Unauthorized       Kind = "unauthorized"        // missing or wrong token, or another user's process
	ResourceExhausted  Kind = "resource_exhausted"  // disk full, a quota, a request that is too large
	Unavailable        Kind = "unavailable"         // no daemon, or one that is starting or ending
	Corrupt            Kind = "corrupt"             // stored bytes fail their checksum; names layer and offset
	Internal           Kind = "internal"            // a fault of ours
)

// Kinds returns every kind in the order documents show them.
func Kinds() []Kind {
	return []Kind{
		InvalidRequest, NotFound, Conflicted, PreconditionFailed, Unauthorized,
		ResourceExhausted, Unavailable, Corrupt, Internal,
	}
}

// Exit codes of the command-line tools. exec_command passes on the code of its
// command instead (128 + signal), and ExitConflict when the command succeeded
// but its publication was refused.
const (
	ExitOK       = 0
	ExitFailed   = 1
	ExitUsage    = 2
	ExitConflict = 3
)

// Error is what an operation gives instead of a result. Message is one line
// that names the input, the rule and the remedy.
type Error struct {
	Kind    Kind   `json:"kind"`
	Message string `json:"message"`
	Details any    `json:"details"` // an object or nil; json.RawMessage after decoding

	cause error
}

// Errorf makes an Error; a %w operand stays reachable by errors.Is and As.
func Errorf(kind Kind, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, Message: err.Error(), cause: errors.Unwrap(err)}
}

// ConflictError makes the error of a refused publication.
func ConflictError(message string, d ConflictDetails) *Error {
	return &Error{Kind: Conflicted, Message: message, Details: d}
}

// With returns e with details set.
func (e *Error) With(details any) *Error {
	e.Details = details
	return e
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the operand that Errorf wrapped, if any.
func (e *Error) Unwrap() error { return e.cause }

// ExitCode is the exit code of a tool that ends with e.
func (e *Error) ExitCode() int {
	if e.Kind == Conflicted {
		return ExitConflict
	}
	return ExitFailed
}

// UnmarshalJSON keeps details undecoded, as json.RawMessage.
func (e *Error) UnmarshalJSON(b []byte) error {
	var raw struct {
		Kind    Kind            `json:"kind"`
		Message string          `json:"message"`
		Details json.RawMessage `json:"details"`
	}
	if err := json.Unmarshal(b, &raw); err != nil {
		return err
	}
	*e = Error{Kind: raw.Kind, Message: raw.Message}
	if len(raw.Details) > 0 && string(raw.Details) != "null" {
		e.Details = raw.Details
	}
	return nil
}

// Conflicts returns the conflicts in the details, on either side of the wire.
func (e *Error) Conflicts() []Conflict {
	switch d := e.Details.(type) {
	case ConflictDetails:
		return d.Conflicts
	case json.RawMessage:
		var c ConflictDetails
		if json.Unmarshal(d, &c) == nil {
			return c.Conflicts
		}
	}
	return nil
}

// AsError returns the Error in err's chain, or err as an internal one.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return &Error{Kind: Internal, Message: err.Error(), cause: err}
}

// ErrorBody is the JSON document that carries an error.
type ErrorBody struct {
	Error *Error `json:"error"`
}
