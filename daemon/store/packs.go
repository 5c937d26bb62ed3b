package store

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"sync"

	"ephemeral-sandbox/fs/hostfs"
	"ephemeral-sandbox/layerfmt"
)

const packSuffix = ".lay"

// packs is the directory of pack files. A file is named by what is in it, so
// that it is written once and never changed.
type packs struct {
	disk hostfs.FS

	mu    sync.Mutex
	refs  map[layerfmt.PackID]int  // guarded by mu; commits and sealed layers that need a file
	files map[hostfs.File]struct{} // guarded by mu; open pack files
	named map[string]bool          // guarded by mu; directories whose own name is durable
}

func newPacks(disk hostfs.FS) *packs {
	return &packs{
		disk:  disk,
		refs:  make(map[layerfmt.PackID]int),
		files: make(map[hostfs.File]struct{}),
		named: make(map[string]bool),
	}
}

func packName(id layerfmt.PackID) string {
	s := id.String()
	return path.Join(packsDir, s[:2], s+packSuffix)
}

// open opens the pack of a commit and counts it as needed.
func (p *packs) open(id layerfmt.PackID, size int64) (hostfs.File, error) {
	name := packName(id)
	corrupt := func(reason string) error {
		return &layerfmt.CorruptError{Layer: name, Section: "file", Reason: reason}
	}
	f, err := p.disk.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, corrupt("the file is missing")
	}
	if err != nil {
		return nil, err
	}
	got, err := f.Size()
	if err == nil && got != size {
		err = corrupt(fmt.Sprintf("the file is %d bytes long, the log says %d", got, size))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refs[id]++
	p.files[f] = struct{}{}
	return f, nil
}

// put gives a written and synced file its name, durably, and opens it for
// reading. The file counts as needed from the moment it has the name.
func (p *packs) put(t hostfs.Temp, info layerfmt.Info) (hostfs.File, error) {
	name := packName(info.ID)
	dir := path.Dir(name)
	if err := p.disk.Mkdir(dir); err != nil {
		return nil, err
	}
	p.mu.Lock()
	err := t.Link(name)
	taken := errors.Is(err, fs.ErrExist)
	if err == nil || taken {
		p.refs[info.ID]++
	}
	named := p.named[dir]
	p.mu.Unlock()
	if err != nil && !taken {
		return nil, err
	}
	f, err := p.settle(name, dir, named, taken, info)
	if err != nil {
		return nil, errors.Join(err, p.drop(info.ID, nil))
	}
	return f, nil
}

// settle makes a linked pack's name durable and opens it.
func (p *packs) settle(name, dir string, named, taken bool, info layerfmt.Info) (hostfs.File, error) {
	if err := p.disk.SyncDir(dir); err != nil {
		return nil, err
	}
	if !named {
		if err := p.disk.SyncDir(packsDir); err != nil {
			return nil, err
		}
		p.mu.Lock()
		p.named[dir] = true
		p.mu.Unlock()
	}
	f, err := p.disk.Open(name)
	if err != nil {
		return nil, err
	}
	if taken {
		if err := checkTaken(f, name, info); err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.files[f] = struct{}{}
	return f, nil
}

// checkTaken looks at a file that was there before under the name of a pack
// just written. It was synced then, but may have been damaged since.
func checkTaken(f hostfs.File, name string, info layerfmt.Info) error {
	size, err := f.Size()
	if err != nil {
		return err
	}
	r, err := layerfmt.Open(f, size, layerfmt.ReaderOptions{Name: name})
	if err != nil {
		return err
	}
	if r.ID() != info.ID {
		return &layerfmt.CorruptError{Layer: name, Section: "trailer", Reason: "the file holds another pack, " + r.ID().String()}
	}
	return r.Verify(context.Background())
}

// drop ends one need of a pack and, with the last, removes its file. f, when
// not nil, is the open file to close.
func (p *packs) drop(id layerfmt.PackID, f hostfs.File) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var err error
	if f != nil {
		delete(p.files, f)
		err = f.Close()
	}
	if p.refs[id]--; p.refs[id] > 0 {
		return err
	}
	delete(p.refs, id)
	return errors.Join(err, p.disk.Remove(packName(id)))
}

// closeFiles closes all open pack files. They were only read, so that nothing
// can be lost by it.
func (p *packs) closeFiles() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for f := range p.files {
		_ = f.Close()
	}
	clear(p.files)
}

// sweep removes the files that nothing needs.
func (p *packs) sweep() (Swept, error) {
	var swept Swept
	dirs, err := p.disk.List(packsDir)
	if err != nil {
		return swept, err
	}
	for _, dir := range dirs {
		names, err := p.disk.List(path.Join(packsDir, dir))
		if err != nil {
			return swept, err
		}
		for _, name := range names {
			id, err := layerfmt.ParsePackID(strings.TrimSuffix(name, packSuffix))
			if err != nil || path.Join(packsDir, dir, name) != packName(id) {
				continue
			}
			if err := p.sweepOne(id, &swept); err != nil {
				return swept, err
			}
		}
	}
	return swept, nil
}

func (p *packs) sweepOne(id layerfmt.PackID, swept *Swept) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refs[id] > 0 {
		return nil
	}
	f, err := p.disk.Open(packName(id))
	if err != nil {
		return err
	}
	size, err := f.Size()
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := p.disk.Remove(packName(id)); err != nil {
		return err
	}
	swept.Packs++
	swept.Bytes += size
	return nil
}

// Swept is what a Sweep has removed.
type Swept struct {
	Packs int
	Bytes int64
}

// Sweep removes pack files that neither a commit nor a sealed layer needs: what
// a crash between Seal and Advance leaves.
func (s *Store) Sweep() (Swept, error) {
	if err := s.refusal(); err != nil {
		return Swept{}, err
	}
	return s.packs.sweep()
}

// Sealed is a layer that is written, synced and named, and not yet part of
// history.
type Sealed struct {
	store  *Store
	info   layerfmt.Info
	source io.ReaderAt // the pack; nil once discarded
	inline []byte      // the pack, when it is to lie in its record
	file   hostfs.File // the pack, otherwise
	owned  bool        // by the store, after a win
}

// Info sums the layer's pack up.
func (l *Sealed) Info() layerfmt.Info { return l.info }

// Inline reports whether the pack will lie in the commit's record.
func (l *Sealed) Inline() bool { return l.file == nil }

// Seal writes a new layer with build, without any lock, and makes it durable. A
// layer small enough to lie in the commit's record is only kept in memory. The
// Sealed is used by one goroutine at a time.
func (s *Store) Seal(build func(w *layerfmt.Writer) error) (*Sealed, error) {
	if err := s.refusal(); err != nil {
		return nil, err
	}
	l, err := s.seal(layerfmt.Delta, s.opts.inlineMax(), build)
	if err != nil {
		return nil, fmt.Errorf("seal a layer: %w", err)
	}
	return l, nil
}

func (s *Store) seal(kind layerfmt.PackKind, inlineMax int, build func(w *layerfmt.Writer) error) (*Sealed, error) {
	out := &spill{disk: s.disk, limit: inlineMax}
	l := &Sealed{store: s}
	w := layerfmt.NewWriter(out, layerfmt.WriterOptions{Kind: kind, Workers: s.opts.Workers})
	defer w.Abort()
	err := build(w)
	if err == nil {
		l.info, err = w.Finish()
	}
	if err != nil {
		return nil, errors.Join(err, out.close())
	}
	if out.temp == nil {
		l.inline = out.buf.Bytes()
		l.source = newInline(l.inline)
		return l, nil
	}
	// 1. bytes, 2. name, 3. directory: a crash leaves an orphan for Sweep, or
	// nothing.
	if err := out.sync(); err != nil {
		return nil, errors.Join(err, out.close())
	}
	f, err := s.packs.put(out.temp, l.info)
	if err != nil {
		return nil, errors.Join(err, out.close())
	}
	l.file, l.source = f, f
	if err := out.close(); err != nil {
		return nil, errors.Join(err, l.Discard())
	}
	return l, nil
}

func newInline(pack []byte) io.ReaderAt { return bytes.NewReader(pack) }

// Discard gives the layer up and removes its file. After a win, or a second
// time, it does nothing. What it cannot remove is left to Sweep.
func (l *Sealed) Discard() error {
	if l.owned || l.source == nil {
		return nil
	}
	l.source = nil
	if l.file == nil {
		return nil
	}
	return l.store.packs.drop(l.info.ID, l.file)
}

// adopt hands the layer over to the store.
func (l *Sealed) adopt() { l.owned = true }

// record is the commit record that makes the layer part of history.
func (l *Sealed) record(number uint64, parent [32]byte, m CommitMeta) record {
	return record{
		Commit: Commit{
			Number: number, Parent: parent,
			Pack: l.info.ID, Inline: l.Inline(),
			StoredBytes: l.info.StoredBytes, LogicalBytes: l.info.LogicalBytes,
			CommitMeta: m,
		},
		maxIno: l.info.MaxIno,
		pack:   l.inline,
	}
}

// spill keeps what is written in memory up to a limit and in a file beyond.
type spill struct {
	disk  hostfs.FS
	limit int
	buf   bytes.Buffer
	temp  hostfs.Temp
	out   *bufio.Writer
}

const spillBuffer = 256 << 10

// Write implements io.Writer.
func (s *spill) Write(p []byte) (int, error) {
	if s.temp == nil && s.buf.Len()+len(p) <= s.limit {
		return s.buf.Write(p)
	}
	if s.temp == nil {
		temp, err := s.disk.Temp(tmpDir)
		if err != nil {
			return 0, err
		}
		s.temp = temp
		s.out = bufio.NewWriterSize(io.NewOffsetWriter(temp, 0), spillBuffer)
		if _, err := s.buf.WriteTo(s.out); err != nil {
			return 0, err
		}
	}
	return s.out.Write(p)
}

// sync makes the file durable.
func (s *spill) sync() error {
	if err := s.out.Flush(); err != nil {
		return err
	}
	return s.temp.Sync()
}

func (s *spill) close() error {
	if s.temp == nil {
		return nil
	}
	return s.temp.Close()
}
