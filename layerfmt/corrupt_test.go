package layerfmt

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"ephemeral-sandbox/fs/tree"
)

// smallPackOf makes a pack of few bytes that has every section, for tests that try
// each byte.
func smallPackOf(t failer) []byte {
	t.Helper()
	pack, _ := write(t, WriterOptions{}, func(w *Writer) {
		must(t, w.AddDirent(put(1, "a", 2, tree.File)))
		must(t, w.AddDirent(put(1, "b", 3, tree.File)))
		must(t, w.AddDirent(put(1, "s", 4, tree.Symlink)))
		must(t, w.AddDirent(put(1, "elsewhere", 900, tree.File)))
		must(t, w.AddDirent(hide(1, "w")))
		must(t, w.AddDirent(opaque(7)))
		n := attr(2, tree.File)
		n.Xattrs = []tree.Xattr{{Name: "user.k", Value: []byte("v")}}
		addFile(t, w, n, []byte("some text, some text, some text\n"))
		_, err := w.AddFile(file(3, 400), bytes.NewReader(noise(3, 400)), []tree.Range{{Start: 5, End: 20}, {Start: 390, End: 400}})
		must(t, err)
		link := attr(4, tree.Symlink)
		link.Link = strings.Repeat("to/", 30)
		must(t, w.AddInode(link))
		far := file(5, 10)
		far.Alloc = 10
		must(t, w.AddForeign(far, PackID{1}, 0))
		must(t, w.SetSection("attribution", bytes.Repeat([]byte("abc"), 30)))
	})
	return pack
}

// readAll opens a pack and reads all of it; a panic is the test's.
func readAll(pack []byte) (*Reader, string, error) {
	r, err := Open(bytes.NewReader(pack), int64(len(pack)), ReaderOptions{Name: "test", MaxLogicalBytes: 1 << 24})
	if err != nil {
		return nil, "", err
	}
	text, err := dump(r)
	return r, text, err
}

// TestEveryFlip changes every byte of a pack in several ways. A reader must
// answer as before or say that the pack is corrupt, and Verify must notice.
func TestEveryFlip(t *testing.T) {
	pack := smallPackOf(t)
	_, want, err := readAll(pack)
	must(t, err)
	for i := range pack {
		for _, mask := range []byte{0x01, 0x80, 0xff} {
			bad := bytes.Clone(pack)
			bad[i] ^= mask
			r, got, err := readAll(bad)
			switch {
			case err != nil && !IsCorrupt(err):
				t.Fatalf("byte %d ^ %#x: %v is no CorruptError", i, mask, err)
			case err == nil && got != want:
				t.Fatalf("byte %d ^ %#x: the pack reads otherwise:\n%s", i, mask, got)
			case r != nil && !IsCorrupt(r.Verify(t.Context())):
				t.Fatalf("byte %d ^ %#x: Verify finds nothing", i, mask)
			}
			var c *CorruptError
			if errors.As(err, &c) && (c.Layer != "test" || c.Section == "" || c.Reason == "" || c.Offset < 0 || c.Offset > int64(len(pack))) {
				t.Fatalf("byte %d ^ %#x: %+v names no place", i, mask, c)
			}
		}
	}
}

// TestFlipsInLargePack does the same here and there in a pack that is not read
// whole and whose trees have inner pages.
func TestFlipsInLargePack(t *testing.T) {
	pack, _ := write(t, WriterOptions{Kind: Base}, func(w *Writer) {
		for i := range 1500 {
			ino := tree.Ino(i + 2)
			must(t, w.AddDirent(put(tree.Ino(1+i/100), fmt.Sprintf("a rather long name %d", i), ino, tree.File)))
			addFile(t, w, attr(ino, tree.File), noise(uint64(i), 100))
		}
	})
	_, want, err := readAll(pack)
	must(t, err)
	step := 5003
	if testing.Short() {
		step = 14_983
	}
	for i := 0; i < len(pack); i += step {
		bad := bytes.Clone(pack)
		bad[i] ^= 0x10
		r, got, err := readAll(bad)
		switch {
		case err != nil && !IsCorrupt(err):
			t.Fatalf("byte %d: %v is no CorruptError", i, err)
		case err == nil && got != want:
			t.Fatalf("byte %d: the pack reads otherwise", i)
		case r != nil && !IsCorrupt(r.Verify(t.Context())):
			t.Fatalf("byte %d: Verify finds nothing", i)
		}
	}
}

func TestEveryTruncation(t *testing.T) {
	pack := smallPackOf(t)
	for n := range pack {
		if _, _, err := readAll(pack[:n]); !IsCorrupt(err) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
		if _, _, err := readAll(pack[n+1:]); !IsCorrupt(err) {
			t.Fatalf("from byte %d: %v", n+1, err)
		}
	}
	if _, _, err := readAll(append(bytes.Clone(pack), 0)); !IsCorrupt(err) {
		t.Fatalf("with a byte more: %v", err)
	}
	// The size is a claim of the caller's: the file may have shrunk since.
	for n := range pack {
		_, err := Open(bytes.NewReader(pack[:n]), int64(len(pack)), ReaderOptions{})
		if !IsCorrupt(err) {
			t.Fatalf("%d bytes behind a size of %d: %v", n, len(pack), err)
		}
	}
}

// TestLiars are packs whose checksums are right and whose words are not.
// Whatever opens must not be trusted further than the lie reaches.
func TestLiars(t *testing.T) {
	frame := func(f *forgery, edit func(rec []byte)) {
		s := f.section(tagFrames)
		edit(s.bytes[4:])
		binary.LittleEndian.PutUint32(s.bytes, checksum(tagFrames, 0, s.bytes[4:]))
	}
	inode := func(t failer, f *forgery, edit func(n *inodeCell)) {
		s := f.section(tagInodes)
		cells := s.tree(t)
		for i := range cells {
			ino, _ := splitInodeKey(cells[i].key)
			n, ok := parseInode(ino, cells[i].val)
			if !ok {
				t.Fatal("a cell of a sound pack does not parse")
			}
			edit(&n)
			cells[i].val = encodeInode(&n)
		}
		s.setTree(cells)
	}
	dirent := func(t failer, f *forgery, name, to string, edit func(val []byte) []byte) {
		s := f.section(tagDirents)
		cells := s.tree(t)
		for i := range cells {
			if string(cells[i].key[8:]) == name {
				cells[i].key = append(cells[i].key[:8], to...)
				cells[i].val = edit(cells[i].val)
			}
		}
		slices.SortFunc(cells, func(a, b forgedCell) int { return bytes.Compare(a.key, b.key) })
		s.setTree(cells)
	}
	same := func(v []byte) []byte { return v }
	heap := func(f *forgery, size int, record []byte) {
		// Every record of the right size is replaced; its place stays.
		s := f.section(tagHeap)
		copy(s.bytes[heapHeadLen:], record)
		binary.LittleEndian.PutUint32(s.bytes, checksum(tagHeap, 0, s.bytes[heapHeadLen:heapHeadLen+size]))
	}

	tests := []struct {
		name   string
		forge  func(t failer, f *forgery)
		opens  bool // Open cannot know; Verify must
		reason string
	}{
		{"frame longer than it is", func(_ failer, f *forgery) {
			frame(f, func(r []byte) { binary.LittleEndian.PutUint32(r[12:], 33) })
		}, true, "frame 0"},
		{"frame shorter than it is", func(_ failer, f *forgery) {
			frame(f, func(r []byte) { binary.LittleEndian.PutUint32(r[12:], 31) })
		}, true, "frame 0"},
		{"huge frame", func(_ failer, f *forgery) {
			frame(f, func(r []byte) { binary.LittleEndian.PutUint32(r[12:], 1<<31) })
		}, true, "length is out of bounds"},
		{"huge stored frame", func(_ failer, f *forgery) {
			frame(f, func(r []byte) { binary.LittleEndian.PutUint32(r[8:], 1<<31) })
		}, true, "stored length is out of bounds"},
		{"frame outside", func(_ failer, f *forgery) {
			frame(f, func(r []byte) { binary.LittleEndian.PutUint64(r, 1<<40) })
		}, true, "outside the data"},
		{"frame gap", func(_ failer, f *forgery) {
			frame(f, func(r []byte) { binary.LittleEndian.PutUint64(r, headerLen+1) })
		}, true, "frames are not contiguous"},
		{"wrong hash", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 2 {
					n.Hash[0] ^= 1
				}
			})
		}, true, "hash of inode 2 differs"},
		{"file in a frame that is not there", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 2 {
					n.loc.frame = 99
				}
			})
		}, true, "there is no frame 99"},
		{"file past its frame", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 2 {
					n.loc.off = 5
				}
			})
		}, true, "inode 2 needs"},
		{"file larger than all frames", func(t failer, f *forgery) {
			f.info.LogicalBytes += 1<<40 - 32
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 2 {
					n.Size, n.Alloc = 1<<40, 1<<40
				}
			})
		}, false, "more than"},
		{"files that add up to more than the count", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 2 {
					n.Size, n.Alloc = tree.MaxFileSize, tree.MaxFileSize
				}
			})
		}, true, "counts differ"},
		{"dirent of another type", func(t failer, f *forgery) {
			dirent(t, f, "a", "a", func(v []byte) []byte { return append([]byte{uint8(tree.Dir)}, v[1:]...) })
		}, true, "a dir by its name"},
		{"dirent to no inode", func(t failer, f *forgery) {
			dirent(t, f, "a", "a", func([]byte) []byte { return []byte{uint8(tree.File), 0} })
		}, true, "dirent is malformed"},
		{"dirent with a second number", func(t failer, f *forgery) {
			dirent(t, f, "a", "a", func([]byte) []byte { return []byte{uint8(tree.File), 0x82, 0} })
		}, true, "dirent is malformed"},
		{"dirent to an inode that does not know", func(t failer, f *forgery) {
			dirent(t, f, "a", "a", func([]byte) []byte { return []byte{uint8(tree.File), 66} })
		}, true, "does not know its name"},
		{"name with a slash", func(t failer, f *forgery) { dirent(t, f, "a", "a/b", same) }, true, "dirent is malformed"},
		{"name of dots", func(t failer, f *forgery) { dirent(t, f, "a", "..", same) }, true, "dirent is malformed"},
		{"put without a name", func(t failer, f *forgery) { dirent(t, f, "a", "", same) }, true, "dirent is malformed"},
		{"name reference to another", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 2 {
					n.ref++
				}
			})
		}, true, "knows a later name"},
		{"name reference to nothing", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 900 {
					n.ref = 1 << 40
				}
			})
		}, true, "leads nowhere"},
		{"inode without its content bits", func(t failer, f *forgery) {
			s := f.section(tagInodes)
			cells := s.tree(t)
			cells[0].val[0] &^= inodeContent
			s.setTree(cells)
		}, true, "inode is malformed"},
		{"inode type zero with more", func(t failer, f *forgery) {
			s := f.section(tagInodes)
			cells := s.tree(t)
			cells[0].val[0] &^= inodeKindMask
			s.setTree(cells)
		}, true, "inode is malformed"},
		{"too many xattrs", func(_ failer, f *forgery) {
			heap(f, 10, []byte{0xff, 0x01})
		}, true, "xattrs are malformed"},
		{"heap record outside", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 2 {
					n.xattrs.off = math.MaxUint32
				}
			})
		}, true, "outside the section"},
		{"heap record of another length", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 2 {
					n.xattrs.len--
				}
			})
		}, true, "checksum differs"},
		{"foreign pack not listed", func(t failer, f *forgery) {
			inode(t, f, func(n *inodeCell) {
				if n.Ino == 5 {
					n.dep = 7
				}
			})
		}, true, "not in the list"},
		{"keys out of order", func(t failer, f *forgery) {
			s := f.section(tagInodes)
			cells := s.tree(t)
			cells[0], cells[1] = cells[1], cells[0]
			s.setTree(cells)
		}, true, "keys are not ascending"},
		{"page of the other tree", func(_ failer, f *forgery) {
			d, i := f.section(tagDirents), f.section(tagInodes)
			d.bytes, i.bytes = i.bytes, d.bytes
			d.raw, i.raw = i.raw, d.raw
		}, true, "page checksum differs"},
		{"count of whiteouts", func(_ failer, f *forgery) { f.info.Whiteouts++ }, true, "counts differ"},
		{"largest inode number", func(_ failer, f *forgery) { f.info.MaxIno++ }, true, "counts differ"},
		{"named section bomb", func(_ failer, f *forgery) {
			f.section("attribution").raw = maxNamedSection + 1
		}, false, "claims more bytes"},
		{"named section expanding too far", func(_ failer, f *forgery) {
			f.section("attribution").raw = 40 << 20
		}, false, "claims more bytes"},
		{"named section longer than it is", func(_ failer, f *forgery) { f.section("attribution").raw++ }, true, "came out"},
		{"named section shorter than it is", func(_ failer, f *forgery) { f.section("attribution").raw -= 60 }, true, "attribution"},
		{"too many foreign packs", func(_ failer, f *forgery) { f.section(tagDeps).count = 1 << 40 }, false, "does not fit its count"},
		{"too many frames", func(_ failer, f *forgery) { f.section(tagFrames).count = math.MaxUint64 / 2 }, false, "does not fit its count"},
		{"tree without leaves", func(_ failer, f *forgery) { f.section(tagInodes).count = 0 }, false, "number of leaves"},
		{"tree with too many leaves", func(_ failer, f *forgery) { f.section(tagInodes).count = 2 }, false, "number of leaves"},
		{"tree section too short", func(_ failer, f *forgery) { f.section(tagInodes).set([]byte{1}) }, false, "too short"},
		{"compressed tree", func(_ failer, f *forgery) { f.section(tagInodes).codec = codecZstd }, false, "must be stored raw"},
		{"two sections of a name", func(_ failer, f *forgery) { f.sections = append(f.sections, *f.section("attribution")) }, false, "not in order"},
		{"bytes nobody knows of", func(_ failer, f *forgery) { f.data = append(f.data, 0) }, true, "bytes after the last frame"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := dismantle(t, smallPackOf(t))
			tt.forge(t, f)
			r, _, err := readAll(f.pack())
			if r == nil == tt.opens {
				t.Fatalf("open: %v", err)
			}
			if !tt.opens {
				if !strings.Contains(fmt.Sprint(err), tt.reason) {
					t.Errorf("open: %v; want %q", err, tt.reason)
				}
				return
			}
			if err != nil && !IsCorrupt(err) && !errors.Is(err, errDisagrees) {
				t.Errorf("read: %v is no CorruptError", err)
			}
			if err := r.Verify(t.Context()); !IsCorrupt(err) || !strings.Contains(err.Error(), tt.reason) {
				t.Errorf("verify: %v; want %q", err, tt.reason)
			}
		})
	}
}

// encodeInode is the whole cell of an inode, as a writer would make it.
func encodeInode(n *inodeCell) []byte {
	out := []byte{0}
	if n.named {
		out[0] |= inodeNamed
		out = binary.AppendUvarint(out, n.ref)
	}
	if n.stub {
		return out
	}
	out, tag := n.appendBody(out)
	out[0] |= tag
	if n.Content == Here && n.Alloc > 0 {
		out = n.loc.appendPlace(out)
	}
	return out
}

// TestInnerPages tampers with the way to the leaves of a tree of three levels.
func TestInnerPages(t *testing.T) {
	name := func(i int) string { return fmt.Sprintf("%05d%s", i, strings.Repeat("x", 100)) }
	pack, _ := write(t, WriterOptions{}, func(w *Writer) {
		for i := range 30_000 {
			must(t, w.AddDirent(put(1, name(i), tree.Ino(i+2), tree.Fifo)))
		}
	})
	root := func(s *forgedSection) uint32 { return uint32((s.raw+pageSize-1)/pageSize) - 1 }
	// child is the value of the first cell of a page.
	child := func(s *forgedSection, no uint32) []byte {
		p, reason := parsePage(s.bytes[no*pageSize:min(uint64(no+1)*pageSize, s.raw)], s.name, no)
		if reason != "" {
			t.Fatal(reason)
		}
		_, val := p.cell(0)
		return val
	}
	tests := []struct {
		name   string
		forge  func(s *forgedSection)
		reason string
	}{
		{"root to itself", func(s *forgedSection) {
			no := root(s)
			binary.PutUvarint(child(s, no), uint64(no))
			s.sealPage(no)
		}, "child page is out of bounds"},
		{"root to a leaf", func(s *forgedSection) {
			no := root(s)
			copy(child(s, no), []byte{0x85, 1}) // leaf 133, in as many bytes as before
			s.sealPage(no)
		}, "wrong level"},
		{"first inner page to the second leaf", func(s *forgedSection) {
			no := uint32(s.count)
			child(s, no)[0] = 1
			s.sealPage(no)
		}, "leaves are not in order"},
		{"page of an impossible level", func(s *forgedSection) {
			no := root(s)
			s.bytes[no*pageSize+8] = 200
			s.sealPage(no)
		}, "wrong level"},
		{"leaf that says it is none", func(s *forgedSection) {
			s.bytes[8] = 1
			s.sealPage(0)
		}, "page"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := dismantle(t, pack)
			tt.forge(f.section(tagDirents))
			r := open(t, f.pack())
			if _, _, err := r.Lookup(1, name(1)); err != nil && !IsCorrupt(err) {
				t.Errorf("lookup: %v", err)
			}
			if err := r.Verify(t.Context()); !IsCorrupt(err) || !strings.Contains(err.Error(), tt.reason) {
				t.Errorf("verify: %v; want %q", err, tt.reason)
			}
		})
	}
}

func TestVersions(t *testing.T) {
	tests := []struct {
		name  string
		forge func(f *forgery)
		opens bool
	}{
		{"newer minor", func(f *forgery) { f.header[18] = 9 }, true},
		{"newer major", func(f *forgery) { f.header[16] = 2 }, false},
		{"unknown feature", func(f *forgery) { f.header[24] = 1 }, false},
		{"unknown harmless feature", func(f *forgery) { f.header[32] = 1 }, true},
		{"unknown kind", func(f *forgery) { f.header[20] = 77 }, false},
		{"unknown section", func(f *forgery) { f.section("NEWS").set([]byte("x")) }, true},
		{"unknown section in an unknown coding", func(f *forgery) {
			f.section("news").set([]byte("x"))
			f.section("news").codec = 9
		}, true},
		{"unknown critical section", func(f *forgery) {
			f.section("NEWS").set([]byte("x"))
			f.section("NEWS").flags = sectionCritical
		}, false},
		{"critical section of a caller", func(f *forgery) { f.section("attribution").flags = sectionCritical }, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := dismantle(t, smallPackOf(t))
			tt.forge(f)
			f.sealHeader()
			pack := f.pack()
			r, err := Open(bytes.NewReader(pack), int64(len(pack)), ReaderOptions{})
			if tt.opens {
				if err != nil {
					t.Fatalf("open: %v", err)
				}
				if err := r.Verify(t.Context()); err != nil && !errors.Is(err, ErrVersion) {
					t.Errorf("verify: %v", err)
				}
				return
			}
			if !errors.Is(err, ErrVersion) || IsCorrupt(err) {
				t.Errorf("open: %v; want ErrVersion", err)
			}
		})
	}
}

func TestLogicalLimit(t *testing.T) {
	pack, _ := write(t, WriterOptions{}, func(w *Writer) {
		_, err := w.AddFile(file(2, 1<<20), bytes.NewReader(nil), []tree.Range{})
		must(t, err)
	})
	if _, err := Open(bytes.NewReader(pack), int64(len(pack)), ReaderOptions{MaxLogicalBytes: 1 << 20}); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	if _, err := Open(bytes.NewReader(pack), int64(len(pack)), ReaderOptions{MaxLogicalBytes: 1<<20 - 1}); !errors.Is(err, tree.ErrTooBig) {
		t.Errorf("beyond the limit: %v", err)
	}
}

// brokenDisk fails reads that touch a range.
type brokenDisk struct {
	io.ReaderAt
	from, to int64
}

var errDisk = errors.New("input/output error")

func (d brokenDisk) ReadAt(p []byte, off int64) (int, error) {
	if off < d.to && off+int64(len(p)) > d.from {
		return 0, errDisk
	}
	return d.ReaderAt.ReadAt(p, off)
}

// TestDiskErrors: what the disk answers is passed on, and is not corruption.
func TestDiskErrors(t *testing.T) {
	pack := everythingPack(t, WriterOptions{Kind: Base})
	for off := int64(0); off < int64(len(pack)); off += 101 {
		disk := brokenDisk{bytes.NewReader(pack), off, off + 1}
		r, err := Open(disk, int64(len(pack)), ReaderOptions{})
		if err == nil {
			err = r.Verify(t.Context())
		}
		if !errors.Is(err, errDisk) {
			t.Fatalf("offset %d: %v", off, err)
		}
	}
}

func TestVerifyStopsWhenTold(t *testing.T) {
	r := open(t, everythingPack(t, WriterOptions{}))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if err := r.Verify(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("verify: %v", err)
	}
}

// TestVerifyDoesNotTrustTheCache: what was read well once may have rotted.
func TestVerifyDoesNotTrustTheCache(t *testing.T) {
	pack := smallPackOf(t)
	r := open(t, pack)
	_, err := dump(r)
	must(t, err)
	pack[headerLen+3] ^= 1
	if err := r.Verify(t.Context()); !IsCorrupt(err) {
		t.Errorf("verify: %v", err)
	}
}

// TestOtherLayersStayUsable: damage in one pack is nobody else's, though they
// share a cache.
func TestOtherLayersStayUsable(t *testing.T) {
	pack := smallPackOf(t)
	bad := bytes.Clone(pack)
	bad[headerLen+3] ^= 1
	cache := NewFrameCache(1 << 20)
	var got []error
	for _, p := range [][]byte{bad, pack, bad} {
		r, err := Open(bytes.NewReader(p), int64(len(p)), ReaderOptions{Cache: cache})
		must(t, err)
		_, err = dump(r)
		got = append(got, err)
	}
	if !IsCorrupt(got[0]) || got[1] != nil || !IsCorrupt(got[2]) {
		t.Errorf("damaged, sound, damaged: %v", got)
	}
}
