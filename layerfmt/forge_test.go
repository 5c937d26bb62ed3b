package layerfmt

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"

	"ephemeral-sandbox/fs/tree"
)

// failer is what the helpers want of a *testing.T or a *rapid.T.
type failer interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// A forgery is a pack taken apart, so that a test can change what it wants and
// put it together again with every checksum right.
type forgery struct {
	header   [headerLen]byte
	data     []byte // the frames
	sections []forgedSection
	info     Info
}

type forgedSection struct {
	section
	bytes []byte
}

// dismantle takes a sound pack apart.
func dismantle(t failer, pack []byte) *forgery {
	t.Helper()
	r := open(t, pack)
	f := &forgery{header: r.header, data: bytes.Clone(pack[headerLen:r.data]), info: r.toc.info}
	for _, s := range r.toc.sections {
		f.sections = append(f.sections, forgedSection{s, bytes.Clone(pack[s.off : s.off+s.stored])})
	}
	return f
}

// section returns a section to be changed; it is added when it is missing.
func (f *forgery) section(name string) *forgedSection {
	for i := range f.sections {
		if f.sections[i].name == name {
			return &f.sections[i]
		}
	}
	f.sections = append(f.sections, forgedSection{section: section{name: name}})
	return &f.sections[len(f.sections)-1]
}

// set replaces the bytes of a section that is stored raw.
func (s *forgedSection) set(b []byte) {
	s.bytes, s.raw = b, uint64(len(b))
}

// sealPage gives a page of a tree section its checksum.
func (s *forgedSection) sealPage(no uint32) {
	p := s.bytes
	if s.count > 1 {
		p = p[no*pageSize:]
	}
	used := binary.LittleEndian.Uint16(p[4:])
	binary.LittleEndian.PutUint32(p, checksum(s.name, no, p[4:used]))
}

// setTree replaces a tree with one of the given cells.
func (s *forgedSection) setTree(cells []forgedCell) {
	built := buildTree(s.name, len(cells), func(i int, key, val []byte) ([]byte, []byte) {
		return append(key, cells[i].key...), append(val, cells[i].val...)
	})
	s.set(built.data)
	s.count = uint64(built.leaves)
	s.flags = sectionCritical
}

type forgedCell struct{ key, val []byte }

// tree decodes the cells of a tree.
func (s *forgedSection) tree(t failer) []forgedCell {
	t.Helper()
	var cells []forgedCell
	for no := range uint32(s.count) {
		idx := index{section: s.section}
		idx.off = 0
		off, n := idx.pageAt(no)
		p, reason := parsePage(s.bytes[off:off+n], s.name, no)
		if reason != "" {
			t.Fatalf("page %d of %s: %s", no, s.name, reason)
		}
		for i := range p.n {
			_, val := p.cell(i)
			cells = append(cells, forgedCell{p.appendKey(nil, i), bytes.Clone(val)})
		}
	}
	return cells
}

// pack puts the forgery together.
func (f *forgery) pack() []byte {
	out := append(slices.Clone(f.header[:]), f.data...)
	t := toc{info: f.info}
	for i := range f.sections {
		s := &f.sections[i]
		out = appendSkippable(out, skippableSection, len(s.bytes))
		s.off, s.stored, s.hash = uint64(len(out)), uint64(len(s.bytes)), sha256.Sum256(s.bytes)
		out = append(out, s.bytes...)
		t.sections = append(t.sections, s.section)
	}
	slices.SortFunc(t.sections, func(a, b section) int { return cmp.Compare(a.name, b.name) })
	return sealTOC(out, f.header, t.appendTo(nil))
}

// sealTOC ends a pack with a table of contents and its trailer.
func sealTOC(out []byte, header [headerLen]byte, table []byte) []byte {
	out = appendSkippable(out, skippableTOC, len(table)+trailerLen)
	end := trailer{tocOff: uint64(len(out)), tocLen: uint32(len(table)), id: packID(header[:], table)}
	out = append(out, table...)
	tail := end.bytes()
	return append(out, tail[:]...)
}

// sealHeader gives a header its checksum.
func (f *forgery) sealHeader() {
	binary.LittleEndian.PutUint32(f.header[60:], crcOf(f.header[:60]))
}

func open(t failer, pack []byte) *Reader {
	t.Helper()
	r, err := Open(bytes.NewReader(pack), int64(len(pack)), ReaderOptions{Name: "test"})
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return r
}

// write makes a pack with the given options by calling build.
func write(t failer, o WriterOptions, build func(w *Writer)) ([]byte, Info) {
	t.Helper()
	var out bytes.Buffer
	w := NewWriter(&out, o)
	defer w.Abort()
	build(w)
	info, err := w.Finish()
	if err != nil {
		t.Fatalf("finish: %v", err)
	}
	return out.Bytes(), info
}

func must(t failer, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// put is a dirent that names an inode.
func put(dir tree.Ino, name string, ino tree.Ino, kind tree.Kind) Dirent {
	return Dirent{Dirent: tree.Dirent{Dir: dir, Name: name, Ino: ino, Kind: kind}}
}

func hide(dir tree.Ino, name string) Dirent {
	return Dirent{Op: Whiteout, Dirent: tree.Dirent{Dir: dir, Name: name}}
}

func opaque(dir tree.Ino) Dirent {
	return Dirent{Op: Opaque, Dirent: tree.Dirent{Dir: dir}}
}

// attr is an inode with plain attributes.
func attr(ino tree.Ino, kind tree.Kind) tree.Inode {
	return tree.Inode{Attr: tree.Attr{
		Ino: ino, Kind: kind, Mode: 0o644, Nlink: 1,
		Mtime: tree.Time{Sec: 1_700_000_000, Nsec: 123_456_789},
		Ctime: tree.Time{Sec: 1_700_000_001, Nsec: 5},
	}}
}

// file is a regular file's inode of n bytes.
func file(ino tree.Ino, n int) tree.Inode {
	a := attr(ino, tree.File)
	a.Size = uint64(n)
	return a
}

// addFile adds a dense file.
func addFile(t failer, w *Writer, n tree.Inode, content []byte) tree.Hash {
	t.Helper()
	n.Size = uint64(len(content))
	h, err := w.AddFile(n, bytes.NewReader(content), nil)
	must(t, err)
	if h != sha256.Sum256(content) {
		t.Fatalf("hash of inode %d is not that of its content", n.Ino)
	}
	return h
}

// noise is n bytes that do not compress, the same for the same seed.
func noise(seed uint64, n int) []byte {
	b := make([]byte, 0, n+8)
	for x := seed*2 + 1; len(b) < n; {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b = binary.LittleEndian.AppendUint64(b, x*0x2545f4914f6cdd1d)
	}
	return b[:n]
}

// errDisagrees is dump's answer when two methods of a Reader tell different
// stories, as those of a pack with right checksums and wrong words may.
var errDisagrees = errors.New("the reader contradicts itself")

func disagree(err error, format string, args ...any) error {
	if err == nil {
		err = errDisagrees
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

// dump writes all that a pack says as text, going through every method of
// Reader. What the text does not show, a reader cannot see.
func dump(r *Reader) (string, error) {
	var b strings.Builder
	info := r.Info()
	fmt.Fprintf(&b, "pack %s kind %d dirents %d whiteouts %d opaques %d inodes %d logical %d stored %d maxino %d\n",
		r.ID(), info.Kind, info.Dirents, info.Whiteouts, info.Opaques, info.Inodes, info.LogicalBytes, info.StoredBytes, info.MaxIno)
	var dirents []Dirent
	if err := r.AllDirents(func(d Dirent) bool { dirents = append(dirents, d); return true }); err != nil {
		return "", err
	}
	named := map[tree.Ino]bool{}
	for _, d := range dirents {
		fmt.Fprintf(&b, "dirent %d %q %s %d %s\n", d.Dir, d.Name, d.Op, d.Ino, d.Kind)
		if d.Op == Opaque {
			is, err := r.IsOpaque(d.Dir)
			if err != nil || !is {
				return "", disagree(err, "opaque directory %d: %v", d.Dir, is)
			}
			continue
		}
		got, found, err := r.Lookup(d.Dir, d.Name)
		if err != nil || !found || got != d {
			return "", disagree(err, "lookup of %+v: %+v, %v", d, got, found)
		}
		if d.Op == Put && !named[d.Ino] {
			named[d.Ino] = true
			got, found, err := r.Parent(d.Ino)
			if err != nil || !found || got != d.Dirent {
				return "", disagree(err, "parent of %d: %+v, %v", d.Ino, got, found)
			}
		}
	}
	var inodes []Inode
	if err := r.AllInodes(func(n Inode) bool { inodes = append(inodes, n); return true }); err != nil {
		return "", err
	}
	for _, n := range inodes {
		if _, found, err := r.Inode(n.Ino); err != nil || !found {
			return "", disagree(err, "inode %d: %v", n.Ino, found)
		}
		if err := dumpInode(&b, r, n); err != nil {
			return "", err
		}
	}
	for _, name := range r.Sections() {
		data, found, err := r.Section(name)
		if err != nil || !found {
			return "", disagree(err, "section %s: %v", name, found)
		}
		fmt.Fprintf(&b, "section %s %d %x\n", name, len(data), sha256.Sum256(data))
	}
	return b.String(), nil
}

func dumpInode(b *strings.Builder, r *Reader, n Inode) error {
	fmt.Fprintf(b, "inode %d %s mode %o uid %d gid %d nlink %d size %d alloc %d rdev %d mtime %d.%09d ctime %d.%09d\n",
		n.Ino, n.Kind, n.Mode, n.UID, n.GID, n.Nlink, n.Size, n.Alloc, n.Rdev, n.Mtime.Sec, n.Mtime.Nsec, n.Ctime.Sec, n.Ctime.Nsec)
	if n.Link != "" {
		fmt.Fprintf(b, "  link %q\n", n.Link)
	}
	for _, x := range n.Xattrs {
		fmt.Fprintf(b, "  xattr %q %d %x\n", x.Name, len(x.Value), sha256.Sum256(x.Value))
	}
	if n.Kind != tree.File {
		return nil
	}
	fmt.Fprintf(b, "  content %s hash %x\n", n.Content, n.Hash)
	if n.Content == Foreign {
		fmt.Fprintf(b, "  in %s from %d\n", n.Pack, n.FromIno)
		return nil
	}
	f, err := r.File(n)
	if err != nil {
		return err
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(f, 0, int64(f.Size()))); err != nil {
		return err
	}
	fmt.Fprintf(b, "  bytes %x\n", sum.Sum(nil))
	for off := uint64(0); ; {
		data, more := f.Data(off)
		if !more {
			break
		}
		fmt.Fprintf(b, "  data %d %d\n", data.Start, data.End)
		off = data.End
	}
	return nil
}

func hashOf(b []byte) tree.Hash { return sha256.Sum256(b) }

func crcOf(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }
