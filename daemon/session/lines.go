package session

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"ephemeral-sandbox/attribution"
	"ephemeral-sandbox/fs/overlay"
	"ephemeral-sandbox/fs/stack"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// fileOwners is who owns each line of one version of a file, with the hashes of
// those lines, which is what the next version is compared by.
type fileOwners struct {
	lines attribution.Lines
	spans attribution.FileSpans
}

// advance is the state after operation o has turned the file into content:
// lines that stayed keep their owner.
func (f fileOwners) advance(content io.Reader, o attribution.Origin) (fileOwners, error) {
	lines, text, err := attribution.HashLines(content)
	if err != nil {
		return fileOwners{}, err
	}
	if !text {
		return fileOwners{spans: attribution.FileSpans{Lines: 1, Wholesale: true, Spans: attribution.Whole(1, o)}}, nil
	}
	spans := attribution.Carry(f.lines, f.spans.Spans, lines, o)
	return fileOwners{lines: lines, spans: attribution.FileSpans{Lines: len(lines), Spans: spans}}, nil
}

// ownersOf joins a text with spans that tile it.
func ownersOf(content io.Reader, spans attribution.Spans) (fileOwners, error) {
	lines, text, err := attribution.HashLines(content)
	if err != nil {
		return fileOwners{}, err
	}
	if !text {
		return fileOwners{}, errors.New("merged content is not text")
	}
	return fileOwners{lines: lines, spans: attribution.FileSpans{Lines: len(lines), Spans: spans}}, nil
}

// ownerTables keeps the decoded owner sections of the layers that were asked for
// last: publishing many files of one commit decodes it once.
type ownerTables struct {
	mu     sync.Mutex
	tables map[*layerfmt.Reader]*attribution.Table // guarded by mu; nil: the layer has no section
}

const maxOwnerTables = 8

func newOwnerTables() *ownerTables {
	return &ownerTables{tables: map[*layerfmt.Reader]*attribution.Table{}}
}

// table is a layer's owner section, nil when it has none.
func (t *ownerTables) table(layer *layerfmt.Reader) (*attribution.Table, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known, ok := t.tables[layer]; ok {
		return known, nil
	}
	section, ok, err := layer.Section(attribution.SectionName)
	if err != nil {
		return nil, err
	}
	var table *attribution.Table
	if ok {
		if table, err = attribution.Decode(section); err != nil {
			return nil, err
		}
	}
	if len(t.tables) == maxOwnerTables {
		clear(t.tables)
	}
	t.tables[layer] = table
	return table, nil
}

// layerOwners answers from the layers: the owners of ino's lines at the commit
// that s shows. Content that came with the import is original; a layer that
// says nothing of a file it holds leaves its lines unknown.
func (t *ownerTables) layerOwners(s *stack.Stack, ino tree.Ino) (fileOwners, error) {
	commit, layer, err := s.Holder(ino)
	if err != nil {
		return fileOwners{}, err
	}
	f, err := s.Open(ino)
	if err != nil {
		return fileOwners{}, err
	}
	if commit == 0 {
		return fileOwners{}.advance(content(f), attribution.Origin{Kind: attribution.Original})
	}
	unknown := attribution.Origin{Kind: attribution.Unknown}
	table, err := t.table(layer)
	if err != nil {
		return fileOwners{}, fmt.Errorf("commit %d: %w", commit, err)
	}
	if table == nil {
		return fileOwners{}.advance(content(f), unknown)
	}
	spans, ok := table.File(ino)
	if !ok {
		return fileOwners{}.advance(content(f), unknown)
	}
	spans.Spans = spans.Spans.In(commit)
	if spans.Wholesale {
		return fileOwners{spans: spans}, nil
	}
	return ownersOf(content(f), spans.Spans)
}

// settle is the overlay's hook: another operation is about to change ino, so
// what by left in it is charged to by now. An error must not stop the write
// that waits for us; the lines are then owned by nobody known.
func (w *Workspace) settle(ino tree.Ino, by tree.Op, f overlay.File) {
	now, err := w.ownersNow(ino, by, f)
	if err != nil {
		now, err = fileOwners{}.advance(content(f), attribution.Origin{Kind: attribution.Unknown})
		if err != nil {
			return
		}
	}
	// An owner file that cannot be written (a full disk) leaves the state in
	// memory, which is right until the daemon ends.
	_ = w.lines.put(ino, now)
}

// ownersNow is who owns the lines of f, the current content of ino, which
// operation by changed last.
func (w *Workspace) ownersNow(ino tree.Ino, by tree.Op, f overlay.File) (fileOwners, error) {
	before, err := w.ownersBefore(ino)
	if err != nil {
		return fileOwners{}, err
	}
	return before.advance(content(f), w.who.origin(by))
}

// ownersBefore is the last settled state of ino: what was settled in this
// workspace, or what its base says, or the same of the file it took the place
// of.
func (w *Workspace) ownersBefore(ino tree.Ino) (fileOwners, error) {
	if f, ok, err := w.lines.get(ino); err != nil || ok {
		return f, err
	}
	base := w.base().Stack()
	f, err := w.tables.layerOwners(base, ino)
	if !errors.Is(err, tree.ErrNotExist) {
		return f, err
	}
	prior, oldest := w.fs.Lineage(ino)
	if prior != 0 {
		if f, ok, err := w.lines.get(prior); err != nil || ok {
			return f, err
		}
	}
	for _, from := range []tree.Ino{prior, oldest} {
		if from == 0 {
			continue
		}
		if n, err := base.Inode(from); err != nil || n.Kind != tree.File {
			continue
		}
		return w.tables.layerOwners(base, from)
	}
	return fileOwners{}, nil
}

// lineOwners keeps the settled owners of the files that a workspace changed.
// They are files of their own beside the journal, so that a daemon which
// restarts goes on where the last one was. Each belongs to the commit that the
// workspace stood on when it was written and counts only while it still does:
// what a crash leaves from before a publication or refresh, or from one that
// did not come about, is ignored and swept.
type lineOwners struct {
	dir string

	mu    sync.Mutex
	base  uint64                  // guarded by mu; the commit that the workspace stands on
	files map[tree.Ino]fileOwners // guarded by mu; those read or written so far
}

func openLines(dir string, base uint64) (*lineOwners, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("line owners: %w", err)
	}
	l := &lineOwners{dir: dir, base: base, files: map[tree.Ino]fileOwners{}}
	return l, l.sweepLocked()
}

func (l *lineOwners) get(ino tree.Ino) (fileOwners, bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f, ok := l.files[ino]; ok {
		return f, true, nil
	}
	raw, err := os.ReadFile(l.path(l.base, ino))
	if errors.Is(err, fs.ErrNotExist) {
		return fileOwners{}, false, nil
	}
	if err != nil {
		return fileOwners{}, false, fmt.Errorf("read line owners of inode %d: %w", ino, err)
	}
	f, ok := decodeOwners(ino, raw)
	if ok {
		l.files[ino] = f
	}
	return f, ok, nil
}

func (l *lineOwners) put(ino tree.Ino, f fileOwners) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.files[ino] = f
	return l.write(l.base, ino, f)
}

func (l *lineOwners) write(base uint64, ino tree.Ino, f fileOwners) error {
	name := l.path(base, ino)
	if err := os.WriteFile(name+".new", encodeOwners(ino, f), 0o600); err != nil {
		return fmt.Errorf("keep line owners of inode %d: %w", ino, err)
	}
	if err := os.Rename(name+".new", name); err != nil {
		return fmt.Errorf("keep line owners of inode %d: %w", ino, err)
	}
	return nil
}

// prepare writes what will be settled once the workspace stands on base: all
// that is settled now but for the inodes that leave, and what the move itself
// settles.
func (l *lineOwners) prepare(base uint64, leaving []tree.Ino, settled map[tree.Ino]fileOwners) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.sweepLocked(); err != nil { // what an earlier try prepared
		return err
	}
	names, err := l.listLocked()
	if err != nil {
		return err
	}
	gone := map[tree.Ino]bool{}
	for _, ino := range leaving {
		gone[ino] = true
	}
	for _, n := range names {
		if _, again := settled[n.ino]; again || gone[n.ino] {
			continue
		}
		if err := os.Link(l.path(n.base, n.ino), l.path(base, n.ino)); err != nil {
			return fmt.Errorf("keep line owners of inode %d: %w", n.ino, err)
		}
	}
	for ino, f := range settled {
		if err := l.write(base, ino, f); err != nil {
			return err
		}
	}
	return nil
}

// move makes what was prepared for base, or nothing, the settled state. Old
// files that cannot be removed are swept at the next opening.
func (l *lineOwners) move(base uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.base = base
	clear(l.files)
	_ = l.sweepLocked()
}

func (l *lineOwners) sweepLocked() error {
	names, err := l.listLocked()
	if err != nil {
		return err
	}
	for _, n := range names {
		if n.base == l.base && n.ino != 0 {
			continue
		}
		if err := os.Remove(filepath.Join(l.dir, n.name)); err != nil {
			return fmt.Errorf("sweep line owners: %w", err)
		}
	}
	return nil
}

// ownerFile is the name of an owner file; ino is 0 for rubbish.
type ownerFile struct {
	name string
	base uint64
	ino  tree.Ino
}

func (l *lineOwners) listLocked() ([]ownerFile, error) {
	entries, err := os.ReadDir(l.dir)
	if err != nil {
		return nil, fmt.Errorf("list line owners: %w", err)
	}
	list := make([]ownerFile, 0, len(entries))
	for _, e := range entries {
		n := ownerFile{name: e.Name()}
		if _, err := fmt.Sscanf(n.name, "%x-%x", &n.base, &n.ino); err != nil || n.name != filepath.Base(l.path(n.base, n.ino)) {
			n.base, n.ino = 0, 0
		}
		list = append(list, n)
	}
	return list, nil
}

func (l *lineOwners) path(base uint64, ino tree.Ino) string {
	return filepath.Join(l.dir, fmt.Sprintf("%x-%x", base, uint64(ino)))
}

// An owner file is: u32 crc32c of the rest, u32 number of line hashes, the
// hashes, and an attribution table of one inode; little endian.
func encodeOwners(ino tree.Ino, f fileOwners) []byte {
	b := make([]byte, 8, 8+8*len(f.lines))
	binary.LittleEndian.PutUint32(b[4:], uint32(len(f.lines)))
	for _, h := range f.lines {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	b = append(b, attribution.Encode(map[tree.Ino]attribution.FileSpans{ino: f.spans})...)
	binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// decodeOwners refuses what a power loss has torn; the file's lines are then
// charged as if nothing had been settled.
func decodeOwners(ino tree.Ino, b []byte) (fileOwners, bool) {
	if len(b) < 8 || crc32.Checksum(b[4:], crc32.MakeTable(crc32.Castagnoli)) != binary.LittleEndian.Uint32(b) {
		return fileOwners{}, false
	}
	n := int(binary.LittleEndian.Uint32(b[4:]))
	b = b[8:]
	if n > len(b)/8 {
		return fileOwners{}, false
	}
	var f fileOwners
	f.lines = make(attribution.Lines, n)
	for i := range f.lines {
		f.lines[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	table, err := attribution.Decode(b[8*n:])
	if err != nil {
		return fileOwners{}, false
	}
	var ok bool
	f.spans, ok = table.File(ino)
	return f, ok
}
