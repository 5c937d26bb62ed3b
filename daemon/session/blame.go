package session

import (
	"ephemeral-sandbox/attribution"
	"ephemeral-sandbox/fs/tree"
)

// Blame tiles a file of the workspace with the owners of its lines, published
// or not.
func (w *Workspace) Blame(p string) ([]attribution.Range, error) {
	n, err := Walk(w.Tree(0, Unrecorded{}), p)
	if err != nil {
		return nil, err
	}
	if n.Kind != tree.File {
		return nil, notRegular(p, n)
	}
	delta, err := w.fs.Delta()
	if err != nil {
		return nil, err
	}
	c, changed := findInode(delta, n.Ino)
	if !changed || !c.Data {
		return blameLayers(w.tables, w.base(), n.Ino)
	}
	data, err := w.fs.Data(n.Ino)
	if err != nil {
		return nil, err
	}
	f, err := w.ownersNow(n.Ino, c.LastOp, data)
	if err != nil {
		return nil, err
	}
	return f.ranges(), nil
}

// BlameAt tiles a file of a commit with the owners of its lines.
func BlameAt(l Lease, p string) ([]attribution.Range, error) {
	n, err := Walk(AtCommit(l), p)
	if err != nil {
		return nil, err
	}
	if n.Kind != tree.File {
		return nil, notRegular(p, n)
	}
	return blameLayers(newOwnerTables(), l, n.Ino)
}

func blameLayers(t *ownerTables, l Lease, ino tree.Ino) ([]attribution.Range, error) {
	f, err := t.layerOwners(l.Stack(), ino)
	if err != nil {
		return nil, err
	}
	return f.ranges(), nil
}

func (f fileOwners) ranges() []attribution.Range { return attribution.Ranges(f.spans.Spans) }
