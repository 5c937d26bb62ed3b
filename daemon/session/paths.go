package session

import (
	"maps"
	"slices"

	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/tree"
)

// pathSet collects paths without repeats.
type pathSet map[string]bool

func (s pathSet) add(p string) { s[p] = true }

func (s pathSet) sorted() []string { return slices.Sorted(maps.Keys(s)) }

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

func findInode(d *overlay.Delta, ino tree.Ino) (overlay.InodeChange, bool) {
	i, ok := slices.BinarySearchFunc(d.Inodes, ino, func(c overlay.InodeChange, ino tree.Ino) int {
		switch {
		case c.Ino < ino:
			return -1
		case c.Ino > ino:
			return 1
		}
		return 0
	})
	if !ok {
		return overlay.InodeChange{}, false
	}
	return d.Inodes[i], true
}
