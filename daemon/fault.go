package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/holder"
	"ephemeral-sandbox/daemon/importer"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/daemon/store"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/fs/upper"
	"ephemeral-sandbox/layerfmt"
	"ephemeral-sandbox/occ"
	"ephemeral-sandbox/occ/merge"
)

// fault gives an error the kind that programs tell it by, and the details that
// go with the kind.
func (s *sandbox) fault(err error) error {
	if err == nil {
		return nil
	}
	e := catalog.AsError(s.classify(err))
	// Errors that were joined stand on lines of their own; a message is one line.
	e.Message = strings.ReplaceAll(e.Message, "\n", "; ")
	return e
}

func (s *sandbox) classify(err error) error {
	if known, ok := errors.AsType[*catalog.Error](err); ok {
		return known
	}
	if c, ok := errors.AsType[*session.ConflictError](err); ok {
		return catalog.ConflictError(c.Error(), s.conflictDetails(c))
	}
	if c, ok := errors.AsType[*layerfmt.CorruptError](err); ok {
		return catalog.Errorf(catalog.Corrupt, "%w: restore that layer file from a copy; what lies in other layers can still be read", err).With(map[string]any{
			"layer": c.Layer, "section": c.Section, "offset": c.Offset, "reason": c.Reason,
		})
	}
	if u, ok := errors.AsType[*importer.UnreadableError](err); ok {
		return catalog.Errorf(catalog.PreconditionFailed, "%w: give the daemon's user permission to read them, or import another directory", u)
	}
	if c, ok := errors.AsType[*importer.ChangedError](err); ok {
		return catalog.Errorf(catalog.PreconditionFailed, "%w: let it come to rest and import it again", err).With(map[string]any{"paths": texts(c.Paths)})
	}
	if m, ok := errors.AsType[*session.HeadMovedError](err); ok {
		return catalog.Errorf(catalog.PreconditionFailed, "the head is %s, not %s as expected: refresh and look again, or publish without expect_head", store.CommitName(m.Head), store.CommitName(m.Expected)).With(map[string]any{"head": store.CommitName(m.Head)})
	}
	if c, ok := errors.AsType[*upper.CorruptError](err); ok {
		return catalog.Errorf(catalog.Corrupt, "%w: destroy the session, or restore that file from a copy", err).With(map[string]any{
			"file": c.Path, "offset": c.Offset, "reason": c.Reason,
		})
	}
	if c, ok := errors.AsType[*session.CommandError](err); ok {
		return catalog.Errorf(catalog.InvalidRequest, "%w", c)
	}
	if _, ok := errors.AsType[*holder.StepError](err); ok {
		return catalog.Errorf(catalog.PreconditionFailed, "%w", err)
	}
	kind := kindOf(err)
	if errors.Is(err, syscall.ENOSPC) && s.d != nil {
		return catalog.Errorf(kind, "%w: nothing was lost; free space on the disk of %s and repeat", err, s.d.cfg.StateDir)
	}
	return catalog.Errorf(kind, "%w", err)
}

// kindOf tells the kinds of errors that carry nothing but themselves.
func kindOf(err error) catalog.Kind {
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch {
	case is(syscall.ENOSPC, syscall.EDQUOT, syscall.EMFILE, syscall.ENFILE, tree.ErrNoSpace, tree.ErrQuota, tree.ErrTooBig, session.ErrTooManyCommands):
		return catalog.ResourceExhausted
	case is(store.ErrBroken, store.ErrClosed, session.ErrEnding, os.ErrClosed, holder.ErrEnded, holder.ErrStuck, holder.ErrNoCommand):
		return catalog.PreconditionFailed
	case is(tree.ErrNotExist, tree.ErrStale):
		return catalog.NotFound
	case is(tree.ErrInvalid, tree.ErrNotDir, tree.ErrIsDir, tree.ErrExist, tree.ErrNameTooLong, tree.ErrPerm):
		return catalog.InvalidRequest
	case is(context.Canceled, context.DeadlineExceeded):
		return catalog.Unavailable
	case is(fs.ErrPermission, syscall.EPERM, syscall.EACCES):
		return catalog.PreconditionFailed
	}
	return catalog.Internal
}

func (s *sandbox) conflictDetails(c *session.ConflictError) catalog.ConflictDetails {
	return catalog.ConflictDetails{
		Base: store.CommitName(c.Base), Head: store.CommitName(c.Head), Conflicts: s.conflicts(c.Conflicts),
	}
}

func (s *sandbox) conflicts(list []occ.Conflict) []catalog.Conflict {
	out := make([]catalog.Conflict, 0, len(list))
	for _, c := range list {
		o := catalog.Conflict{
			Path: catalog.Text(c.Path), AlsoNames: texts(c.AlsoNames), Kind: c.Kind,
			Base: versionOf(c.Base), Head: versionOf(c.Head), Session: versionOf(c.Session),
			HeadCommit: store.CommitName(c.HeadCommit), HeadOrigin: s.originOf(c.HeadCommit), Remedy: c.Remedy,
			Hunks: make([]catalog.Hunk, 0, len(c.Hunks)),
		}
		for _, h := range c.Hunks {
			o.Hunks = append(o.Hunks, catalog.Hunk{Base: lineSpan(h.Base), Head: lineSpan(h.Head), Session: lineSpan(h.Session)})
		}
		if len(c.Lost) > 0 {
			o.Remedy += " (" + strings.Join(c.Lost, ", ") + ")"
		}
		out = append(out, o)
	}
	return out
}

func (s *sandbox) originOf(commit uint64) *catalog.Origin {
	c, err := s.store.Commit(commit)
	if err != nil {
		return nil
	}
	o := &catalog.Origin{Session: c.Session, Operation: c.Operation, Time: stamp(c.Time), Owner: "original"}
	switch {
	case c.Session != "":
		o.Owner = "workspace_session:" + c.Session
	case commit > 0:
		o.Owner = "operation:" + c.Operation
	}
	return o
}

func lineSpan(s merge.Span) catalog.LineSpan {
	return catalog.LineSpan{Start: int64(s.Start) + 1, Count: int64(s.Count)}
}

func versionOf(v *occ.Version) *catalog.Version {
	if v == nil {
		return nil
	}
	return &catalog.Version{Kind: v.Kind.String(), Hash: hashText(v.Kind, v.Hash), Size: int64(v.Size), Mode: octal(v.Mode), Target: catalog.Text(v.Link)}
}

func hashText(k tree.Kind, h tree.Hash) string {
	if k != tree.File || h == (tree.Hash{}) {
		return ""
	}
	return fmt.Sprintf("%x", h[:])
}

func octal(mode uint32) string { return fmt.Sprintf("%04o", mode) }

func texts(list []string) []catalog.Text {
	out := make([]catalog.Text, len(list))
	for i, s := range list {
		out[i] = catalog.Text(s)
	}
	return out
}

func stamp(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
