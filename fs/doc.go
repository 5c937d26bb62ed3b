// Package fs is a corridor, not a room: it holds no code. The rooms are
// fs/tree (the words), fs/stack (the merged read-only view of the layers),
// fs/upper (one session's private changes), fs/overlay (the two joined),
// fs/access (what was read and written), fs/fusefs (the kernel's door),
// fs/hostfs (the seam to the disk for commits) and fs/fstest (a conformance
// suite).
package fs
