package layerfmt

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"ephemeral-sandbox/fs/tree"
)

// modelFile is a file of the model: its whole content and its data ranges.
type modelFile struct {
	content []byte
	data    []tree.Range // nil: dense
	foreign PackID
	from    tree.Ino
}

// model is what a pack should hold.
type model struct {
	dirents  []Dirent
	inodes   []tree.Inode
	files    map[tree.Ino]modelFile
	sections map[string][]byte
}

var drawName = rapid.OneOf(
	rapid.StringMatching(`[a-z]{1,3}`),
	rapid.SampledFrom([]string{".wh.x", ".wh..wh..opq", "manifest.json", "\xff\xfe", "a\\b", " ", "\n", strings.Repeat("n", 255), "Ünï", "...", "-"}),
	rapid.Map(rapid.SliceOfN(rapid.ByteRange(1, 255), 1, 20), func(b []byte) string {
		return strings.ReplaceAll(string(b), "/", "_")
	}),
).Filter(func(s string) bool { return tree.CheckName(s) == nil })

var drawIno = rapid.Custom(func(t *rapid.T) tree.Ino {
	if rapid.IntRange(0, 9).Draw(t, "huge") == 0 {
		return tree.Ino(rapid.Uint64Min(1).Draw(t, "ino"))
	}
	return tree.Ino(rapid.Uint64Range(1, 60).Draw(t, "ino"))
})

var drawTime = rapid.Custom(func(t *rapid.T) tree.Time {
	return tree.Time{
		Sec:  rapid.SampledFrom([]int64{0, 1_700_000_000, -1, math.MaxInt64, math.MinInt64}).Draw(t, "sec"),
		Nsec: rapid.Uint32Range(0, maxNsec).Draw(t, "nsec"),
	}
})

func drawXattrs(t *rapid.T) []tree.Xattr {
	if rapid.IntRange(0, 3).Draw(t, "xattrs") != 0 {
		return nil
	}
	set := rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) tree.Xattr {
		return tree.Xattr{
			Name:  "user." + rapid.StringMatching(`[a-z\xff]{1,4}`).Draw(t, "name"),
			Value: rapid.SliceOfN(rapid.Byte(), 1, 80).Draw(t, "value"),
		}
	}), 1, 4, func(x tree.Xattr) string { return x.Name }).Draw(t, "set")
	slices.SortFunc(set, func(a, b tree.Xattr) int { return cmp.Compare(a.Name, b.Name) })
	return set
}

func drawInode(t *rapid.T, ino tree.Ino) tree.Inode {
	n := tree.Inode{Attr: tree.Attr{
		Ino:   ino,
		Kind:  tree.Kind(rapid.IntRange(1, 7).Draw(t, "kind")),
		Mode:  rapid.Uint32Range(0, maxMode).Draw(t, "mode"),
		UID:   rapid.SampledFrom([]uint32{0, 1000, math.MaxUint32}).Draw(t, "uid"),
		GID:   rapid.SampledFrom([]uint32{0, 1000, math.MaxUint32}).Draw(t, "gid"),
		Nlink: rapid.Uint32().Draw(t, "nlink"),
		Mtime: drawTime.Draw(t, "mtime"),
	}}
	n.Ctime = n.Mtime
	if rapid.Bool().Draw(t, "changed") {
		n.Ctime = drawTime.Draw(t, "ctime")
	}
	n.Xattrs = drawXattrs(t)
	switch n.Kind {
	case tree.File:
	case tree.Symlink:
		n.Link = strings.Repeat("l", rapid.SampledFrom([]int{1, 20, 64, 65, 4095}).Draw(t, "target")) + ""
		n.Size = uint64(len(n.Link))
	case tree.Char, tree.Block:
		n.Rdev = rapid.Uint32().Draw(t, "rdev")
	default:
		n.Size = rapid.Uint64().Draw(t, "size")
	}
	return n
}

// drawFile gives a file a size, ranges of data, and content.
func drawFile(t *rapid.T) modelFile {
	size := rapid.SampledFrom([]int{0, 1, 100, 4096, clusterFile, clusterFile + 1, chunkSize, chunkSize + 1, 3*chunkSize + 7}).Draw(t, "size")
	content := noise(rapid.Uint64Range(0, 5).Draw(t, "seed"), size)
	f := modelFile{content: content}
	if size == 0 || rapid.IntRange(0, 2).Draw(t, "sparse") != 0 {
		return f
	}
	cuts := rapid.SliceOfN(rapid.IntRange(0, size), 0, 8).Draw(t, "cuts")
	slices.Sort(cuts)
	f.content = make([]byte, size)
	f.data = []tree.Range{}
	for i := 0; i+1 < len(cuts); i += 2 {
		f.data = append(f.data, tree.Range{Start: uint64(cuts[i]), End: uint64(cuts[i+1])})
		copy(f.content[cuts[i]:cuts[i+1]], content[cuts[i]:])
	}
	return f
}

func drawModel(t *rapid.T) *model {
	m := &model{files: map[tree.Ino]modelFile{}, sections: map[string][]byte{}}
	kinds := map[tree.Ino]tree.Kind{}
	for _, ino := range rapid.SliceOfNDistinct(drawIno, 0, 25, rapid.ID).Draw(t, "inos") {
		n := drawInode(t, ino)
		kinds[ino] = n.Kind
		if n.Kind == tree.File {
			f := drawFile(t)
			if len(f.content) > 0 && rapid.IntRange(0, 4).Draw(t, "foreign") == 0 {
				f = modelFile{content: f.content, from: tree.Ino(rapid.Uint64Range(0, 3).Draw(t, "from"))}
				f.foreign[0] = rapid.Byte().Draw(t, "pack")
				n.Hash, n.Alloc = tree.Hash{1, 2, 3}, uint64(len(f.content))/2
				if f.from == ino {
					f.from = 0
				}
			}
			n.Size = uint64(len(f.content))
			m.files[ino] = f
		}
		m.inodes = append(m.inodes, n)
	}
	type key struct {
		dir  tree.Ino
		name string
	}
	keys := rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) key {
		return key{drawIno.Draw(t, "dir"), drawName.Draw(t, "name")}
	}), 0, 40, rapid.ID).Draw(t, "keys")
	for _, k := range keys {
		if rapid.IntRange(0, 4).Draw(t, "hide") == 0 {
			m.dirents = append(m.dirents, hide(k.dir, k.name))
			continue
		}
		// A few inodes for many names: hard links. Some have no record here.
		ino := drawIno.Draw(t, "ino")
		kind := kinds[ino]
		if kind == 0 {
			kind = tree.File
		}
		m.dirents = append(m.dirents, put(k.dir, k.name, ino, kind))
	}
	for _, dir := range rapid.SliceOfNDistinct(drawIno, 0, 3, rapid.ID).Draw(t, "opaque") {
		m.dirents = append(m.dirents, opaque(dir))
	}
	for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"attribution", "a", "x-1.y_z"}), 0, 3, rapid.ID).Draw(t, "sections") {
		m.sections[name] = bytes.Repeat([]byte(name), rapid.SampledFrom([]int{0, 1, 100, 50_000}).Draw(t, "length"))
	}
	return m
}

// write puts the model into a pack, in the order that it has.
func (m *model) write(t failer, w *Writer) {
	t.Helper()
	for _, d := range m.dirents {
		must(t, w.AddDirent(d))
	}
	for _, n := range m.inodes {
		f, isFile := m.files[n.Ino]
		switch {
		case !isFile:
			must(t, w.AddInode(n))
		case f.foreign != PackID{}:
			must(t, w.AddForeign(n, f.foreign, f.from))
		default:
			_, err := w.AddFile(n, bytes.NewReader(f.content), f.data)
			must(t, err)
		}
	}
	for _, name := range sortedKeys(m.sections) {
		must(t, w.SetSection(name, m.sections[name]))
	}
}

func compareKeys(a, b Dirent) int {
	return cmp.Or(cmp.Compare(a.Dir, b.Dir), cmp.Compare(a.Name, b.Name))
}

// check holds a reader against the model.
func (m *model) check(t *rapid.T, r *Reader) {
	slices.SortFunc(m.dirents, compareKeys)
	var got []Dirent
	must(t, r.AllDirents(func(d Dirent) bool { got = append(got, d); return true }))
	if !slices.Equal(got, m.dirents) {
		t.Fatalf("dirents:\n got %+v\nwant %+v", got, m.dirents)
	}
	first := map[tree.Ino]tree.Dirent{}
	for _, d := range m.dirents {
		if d.Op == Put {
			if _, known := first[d.Ino]; !known {
				first[d.Ino] = d.Dirent
			}
		}
	}
	for ino, want := range first {
		if p, found, err := r.Parent(ino); err != nil || !found || p != want {
			t.Fatalf("parent of %d: got %+v, %v, %v; want %+v", ino, p, found, err, want)
		}
	}
	m.checkLookups(t, r)
	m.checkInodes(t, r)
	for name, want := range m.sections {
		if got, found, err := r.Section(name); err != nil || !found || !bytes.Equal(got, want) {
			t.Fatalf("section %s: %d bytes, %v, %v", name, len(got), found, err)
		}
	}
	if got := r.Sections(); !slices.Equal(got, sortedKeys(m.sections)) {
		t.Fatalf("sections: got %q", got)
	}
}

func (m *model) checkLookups(t *rapid.T, r *Reader) {
	known := map[Dirent]Dirent{}
	key := func(dir tree.Ino, name string) Dirent { return put(dir, name, 0, 0) }
	dirs := map[tree.Ino][]Dirent{}
	for _, d := range m.dirents {
		if d.Op == Opaque {
			if is, err := r.IsOpaque(d.Dir); err != nil || !is {
				t.Fatalf("directory %d: opaque %v, %v", d.Dir, is, err)
			}
			continue
		}
		known[key(d.Dir, d.Name)] = d
		dirs[d.Dir] = append(dirs[d.Dir], d)
	}
	probe := func(dir tree.Ino, name string) {
		want, there := known[key(dir, name)]
		got, found, err := r.Lookup(dir, name)
		if err != nil || found != there || got != want {
			t.Fatalf("lookup %d %q: got %+v, %v, %v; want %+v, %v", dir, name, got, found, err, want, there)
		}
	}
	for _, d := range m.dirents {
		for _, dir := range []tree.Ino{d.Dir - 1, d.Dir, d.Dir + 1} {
			for _, name := range []string{d.Name, d.Name + "\x01", d.Name + "\xff", strings.TrimSuffix(d.Name, d.Name[max(0, len(d.Name)-1):]), ""} {
				probe(dir, name)
			}
		}
	}
	for dir, all := range dirs {
		from := rapid.SampledFrom([]string{"", all[0].Name, all[len(all)-1].Name, "m", "\xff", strings.Repeat("\xff", 300)}).Draw(t, "from")
		limit := rapid.IntRange(1, 50).Draw(t, "limit")
		var got, want []Dirent
		must(t, r.Dirents(dir, from, func(d Dirent) bool {
			got = append(got, d)
			return len(got) < limit
		}))
		for _, d := range all {
			if d.Name >= from && len(want) < limit {
				want = append(want, d)
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("directory %d from %q:\n got %+v\nwant %+v", dir, from, got, want)
		}
	}
}

func (m *model) checkInodes(t *rapid.T, r *Reader) {
	slices.SortFunc(m.inodes, func(a, b tree.Inode) int { return cmp.Compare(a.Ino, b.Ino) })
	i := 0
	must(t, r.AllInodes(func(n Inode) bool {
		if i == len(m.inodes) || n.Ino != m.inodes[i].Ino {
			t.Fatalf("inode %d comes at place %d", n.Ino, i)
		}
		i++
		return true
	}))
	if i != len(m.inodes) {
		t.Fatalf("%d inodes of %d", i, len(m.inodes))
	}
	for _, want := range m.inodes {
		got, found, err := r.Inode(want.Ino)
		if err != nil || !found {
			t.Fatalf("inode %d: %v, %v", want.Ino, found, err)
		}
		f, isFile := m.files[want.Ino]
		switch {
		case !isFile:
			want.Alloc = got.Alloc
			if got.Content != None {
				t.Fatalf("inode %d: content %s of a %s", want.Ino, got.Content, want.Kind)
			}
		case f.foreign != PackID{}:
			if got.Content != Foreign || got.Pack != f.foreign || got.FromIno != f.from {
				t.Fatalf("inode %d: %s in %s from %d", want.Ino, got.Content, got.Pack, got.FromIno)
			}
			if _, err := r.File(got); err == nil {
				t.Fatalf("inode %d: opened here, though it is elsewhere", want.Ino)
			}
		default:
			want.Hash, want.Alloc = f.hash(), f.alloc()
			checkContent(t, r, got, f)
		}
		if !equalInode(got.Inode, want) {
			t.Fatalf("inode %d:\n got %+v\nwant %+v", want.Ino, got.Inode, want)
		}
	}
}

func equalInode(a, b tree.Inode) bool {
	same := slices.EqualFunc(a.Xattrs, b.Xattrs, func(x, y tree.Xattr) bool {
		return x.Name == y.Name && bytes.Equal(x.Value, y.Value)
	})
	return same && a.Attr == b.Attr && a.Link == b.Link && a.Hash == b.Hash
}

func (f modelFile) alloc() (sum uint64) {
	if f.data == nil {
		return uint64(len(f.content))
	}
	for _, r := range f.data {
		sum += r.End - r.Start
	}
	return sum
}

// hash is the content hash, worked out from the definition.
func (f modelFile) hash() tree.Hash {
	if f.alloc() == uint64(len(f.content)) {
		return hashOf(f.content)
	}
	in := binary.LittleEndian.AppendUint64([]byte("sparse-content\n"), uint64(len(f.content)))
	for i := uint64(0); i < uint64(len(f.content)); {
		end := i
		for end < uint64(len(f.content)) && f.hasData(end) {
			end++
		}
		if end > i {
			in = binary.LittleEndian.AppendUint64(in, i)
			in = binary.LittleEndian.AppendUint64(in, end)
			in = append(in, f.content[i:end]...)
		}
		i = end + 1
	}
	return hashOf(in)
}

// hasData reports whether byte i lies in a data range.
func (f modelFile) hasData(i uint64) bool {
	return f.data == nil || slices.ContainsFunc(f.data, func(r tree.Range) bool { return r.Start <= i && i < r.End })
}

func checkContent(t *rapid.T, r *Reader, n Inode, f modelFile) {
	c, err := r.File(n)
	must(t, err)
	size := len(f.content)
	if c.Size() != uint64(size) {
		t.Fatalf("inode %d: size %d, want %d", n.Ino, c.Size(), size)
	}
	for range 4 {
		off := rapid.IntRange(0, size+2).Draw(t, "off")
		p := make([]byte, rapid.IntRange(0, size+2).Draw(t, "len"))
		got, err := c.ReadAt(p, int64(off))
		want := 0
		if off < size {
			want = min(len(p), size-off)
		}
		if got != want || got < len(p) && !errors.Is(err, io.EOF) || got == len(p) && err != nil && !errors.Is(err, io.EOF) {
			t.Fatalf("inode %d: read %d at %d: %d, %v; want %d", n.Ino, len(p), off, got, err, want)
		}
		if got > 0 && !bytes.Equal(p[:got], f.content[off:off+got]) {
			t.Fatalf("inode %d: wrong bytes at %d", n.Ino, off)
		}
	}
	end := uint64(0)
	for off := uint64(0); off <= uint64(size); {
		data, more := c.Data(off)
		if !more {
			if end < uint64(size) && f.hasData(uint64(size)-1) {
				t.Fatalf("inode %d: data after %d are not told of", n.Ino, off)
			}
			break
		}
		if data.Start < off || data.End <= data.Start || !f.hasData(data.Start) || !f.hasData(data.End-1) {
			t.Fatalf("inode %d: data at %d: %+v", n.Ino, off, data)
		}
		if data.Start > off && f.hasData(off) {
			t.Fatalf("inode %d: data at %d are not told of", n.Ino, off)
		}
		off, end = data.End, data.End
	}
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawModel(t)
		kind := rapid.SampledFrom([]PackKind{Base, Delta}).Draw(t, "kind")
		var out bytes.Buffer
		w := NewWriter(&out, WriterOptions{Kind: kind, Workers: rapid.IntRange(1, 3).Draw(t, "workers")})
		defer w.Abort()
		m.write(t, w)
		info, err := w.Finish()
		must(t, err)
		size := rapid.SampledFrom([]int64{0, 1 << 10, 1 << 20}).Draw(t, "cache")
		r, err := Open(bytes.NewReader(out.Bytes()), int64(out.Len()), ReaderOptions{Cache: NewFrameCache(size)})
		must(t, err)
		if r.Info() != info {
			t.Fatalf("info: writer says %+v, reader %+v", info, r.Info())
		}
		must(t, r.Verify(t.Context()))
		m.check(t, r)
	})
}

// TestManyEntries crosses the borders between one page and many, and between
// two levels and three.
func TestManyEntries(t *testing.T) {
	for _, n := range []int{1, 2, 400, 900, 1500, 30_000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			name := func(i int) string {
				return fmt.Sprintf("%s-%d-%s", strings.Repeat("x", i%40), i, strings.Repeat("y", 60))
			}
			pack, info := write(t, WriterOptions{}, func(w *Writer) {
				for i := range n {
					ino := tree.Ino(1000 + i)
					must(t, w.AddDirent(put(tree.Ino(1+i/300), name(i), ino, tree.Fifo)))
					must(t, w.AddInode(attr(ino, tree.Fifo)))
				}
			})
			if info.Dirents != n || info.Inodes != n || info.MaxIno != tree.Ino(1000+n-1) {
				t.Fatalf("info %+v", info)
			}
			r := open(t, pack)
			must(t, r.Verify(t.Context()))
			for i := range n {
				d, found, err := r.Lookup(tree.Ino(1+i/300), name(i))
				if err != nil || !found || d.Ino != tree.Ino(1000+i) {
					t.Fatalf("name %d: %+v, %v, %v", i, d, found, err)
				}
				if _, found, err := r.Lookup(tree.Ino(1+i/300), name(i)+"!"); err != nil || found {
					t.Fatalf("name %d with more: %v, %v", i, found, err)
				}
				if p, found, err := r.Parent(d.Ino); err != nil || !found || p != d.Dirent {
					t.Fatalf("parent of %d: %+v, %v, %v", d.Ino, p, found, err)
				}
			}
			for dir := range tree.Ino(1 + (n-1)/300) {
				k := 0
				must(t, r.Dirents(dir+1, "", func(d Dirent) bool { k++; return d.Dir == dir+1 }))
				if want := min(300, n-int(dir)*300); k != want {
					t.Fatalf("directory %d has %d names, want %d", dir+1, k, want)
				}
			}
		})
	}
}
