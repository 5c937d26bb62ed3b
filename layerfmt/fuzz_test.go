package layerfmt

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"testing"

	"ephemeral-sandbox/fs/tree"
)

func appendUV(v uint64) []byte { return binary.AppendUvarint(nil, v) }

// FuzzOpen mutates whole packs. With seal, every checksum and hash that can be
// found is made right again, so that what the fuzzer changed is looked at.
func FuzzOpen(f *testing.F) {
	for _, pack := range [][]byte{smallPackOf(f), everythingPack(f, WriterOptions{Kind: Base}), everythingPack(f, WriterOptions{})} {
		f.Add(pack, false)
		f.Add(pack, true)
	}
	f.Fuzz(func(t *testing.T, pack []byte, seal bool) {
		pack = bytes.Clone(pack)
		if seal {
			resealPack(pack)
		}
		r, text, err := readAll(pack)
		if err != nil || r.Verify(t.Context()) != nil {
			return
		}
		// What passes Verify says the same the second time.
		if _, again, err := readAll(pack); err != nil || again != text {
			t.Fatalf("the second reading differs: %v", err)
		}
	})
}

// resealPack gives a changed pack right checksums, as far as its parts can
// still be found.
func resealPack(pack []byte) {
	n := len(pack)
	if n < headerLen+skippableLen+trailerLen {
		return
	}
	tail := pack[n-trailerLen:]
	tocLen := int(binary.LittleEndian.Uint32(tail[8:]))
	if tocLen < 0 || tocLen > n-headerLen-skippableLen-trailerLen {
		return
	}
	binary.LittleEndian.PutUint32(pack[60:], crcOf(pack[:60]))
	at := n - trailerLen - tocLen
	table := pack[at : n-trailerLen]
	appendSkippable(pack[at-skippableLen:at-skippableLen], skippableTOC, tocLen+trailerLen)
	if toc, reason, err := parseTOC(table, uint64(at-skippableLen)); reason == "" && err == nil {
		for i := range toc.sections {
			s := &toc.sections[i]
			appendSkippable(pack[s.off-skippableLen:s.off-skippableLen], skippableSection, int(s.stored))
			resealSection(pack, s)
			s.hash = sha256.Sum256(pack[s.off : s.off+s.stored])
		}
		copy(table, toc.appendTo(nil))
	}
	end := trailer{tocOff: uint64(at), tocLen: uint32(tocLen), id: packID(pack[:headerLen], table)}
	b := end.bytes()
	copy(tail, b[:])
}

func resealSection(pack []byte, s *section) {
	le := binary.LittleEndian
	switch s.name {
	case tagDirents, tagInodes:
		t := index{section: *s}
		for no := range uint32(s.pages()) {
			off, n := t.pageAt(no)
			p := pack[off : off+n]
			if len(p) < pageHeadLen {
				continue
			}
			if used := int(le.Uint16(p[4:])); used >= pageHeadLen && used <= len(p) {
				le.PutUint32(p, checksum(s.name, no, p[4:used]))
			}
		}
	case tagFrames:
		for at := uint64(0); at < s.raw; at += framePieceLen {
			piece := pack[s.off+at : s.off+min(at+framePieceLen, s.raw)]
			no := uint32(at / framePieceLen)
			for i := range (len(piece) - 4) / frameRecordLen {
				f := frameAt(piece, i)
				if f.off < uint64(len(pack)) && uint64(f.stored) <= uint64(len(pack))-f.off {
					crc := frameCRC(pack[f.off:f.off+uint64(f.stored)], no*framesPerPiece+uint32(i))
					le.PutUint32(piece[4+i*frameRecordLen+16:], crc)
				}
			}
			le.PutUint32(piece, checksum(s.name, no, piece[4:]))
		}
	}
}

func FuzzTOC(f *testing.F) {
	r := open(f, smallPackOf(f))
	f.Add(r.toc.appendTo(nil), r.trailer.tocOff)
	f.Fuzz(func(t *testing.T, b []byte, end uint64) {
		table, reason, err := parseTOC(b, end)
		if reason != "" || err != nil {
			return
		}
		if got := table.appendTo(nil); !bytes.Equal(got, b) {
			t.Fatalf("two spellings of one table:\n%x\n%x", b, got)
		}
	})
}

func FuzzPage(f *testing.F) {
	var b pageBuilder
	b.limit = pageSize
	for _, k := range []string{"aa", "ab", "abc", "b"} {
		b.add([]byte(k), []byte("v"))
	}
	f.Add(b.flush(nil, tagDirents, 3), "abb")
	b.level = 1
	b.add([]byte("k"), []byte{1})
	f.Add(b.flush(nil, tagDirents, 3), "k")
	f.Fuzz(func(t *testing.T, data []byte, key string) {
		// The checksum is not for the fuzzer to guess.
		if len(data) >= pageHeadLen {
			if used := int(binary.LittleEndian.Uint16(data[4:])); used >= pageHeadLen && used <= len(data) {
				binary.LittleEndian.PutUint32(data, checksum(tagDirents, 3, data[4:used]))
			}
		}
		p, reason := parsePage(data, tagDirents, 3)
		if reason != "" {
			return
		}
		keys := make([][]byte, p.n)
		for i := range p.n {
			keys[i] = p.appendKey(nil, i)
			if at, found := p.find(keys[i]); !found || at != i {
				t.Fatalf("key %d is found at %d, %v", i, at, found)
			}
		}
		want, there := slices.BinarySearchFunc(keys, []byte(key), bytes.Compare)
		if at, found := p.find([]byte(key)); at != want || found != there {
			t.Fatalf("key %q is found at %d, %v; want %d, %v", key, at, found, want, there)
		}
		if p.level > 0 {
			if child := p.child([]byte(key)); child >= 3 {
				t.Fatalf("child %d of page 3", child)
			}
		}
	})
}

func FuzzDirentCell(f *testing.F) {
	for _, d := range []Dirent{put(1, "a", 2, tree.File), hide(1, "b"), opaque(3), put(1, "c", 1<<60, tree.Socket)} {
		f.Add(direntKey(nil, d.Dir, d.Name), appendDirent(nil, d))
	}
	f.Fuzz(func(t *testing.T, key, val []byte) {
		dir, name, ok := splitDirentKey(key)
		if !ok {
			return
		}
		d, ok := parseDirent(dir, name == "", val)
		if !ok {
			return
		}
		d.Name = name
		if !bytes.Equal(direntKey(nil, d.Dir, d.Name), key) || !bytes.Equal(appendDirent(nil, d), val) {
			t.Fatalf("two spellings of %+v", d)
		}
		w := NewWriter(discard{}, WriterOptions{})
		defer w.Abort()
		if err := w.AddDirent(d); err != nil {
			t.Fatalf("read but not to be written: %v", err)
		}
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

func FuzzInodeCell(f *testing.F) {
	for _, pack := range [][]byte{everythingPack(f, WriterOptions{}), everythingPack(f, WriterOptions{Kind: Base})} {
		for _, c := range dismantle(f, pack).section(tagInodes).tree(f) {
			f.Add(c.key, c.val)
		}
	}
	f.Fuzz(func(t *testing.T, key, val []byte) {
		ino, ok := splitInodeKey(key)
		if !ok {
			return
		}
		n, ok := parseInode(ino, val)
		if !ok {
			return
		}
		if got := encodeInode(&n); !bytes.Equal(got, val) {
			t.Fatalf("two spellings of %+v:\n%x\n%x", n, val, got)
		}
		if n.stub {
			return
		}
		if n.link.len > 0 {
			n.Link = string(bytes.Repeat([]byte("l"), int(n.link.len)))
		}
		if err := checkInode(&n.Inode.Inode); err != nil {
			t.Fatalf("read but not to be written: %v", err)
		}
	})
}

func FuzzXattrs(f *testing.F) {
	b, err := appendXattrs(nil, []tree.Xattr{{Name: "user.a", Value: []byte("1")}, {Name: "user.b"}})
	must(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		set, ok := parseXattrs(b)
		if !ok {
			return
		}
		if got, err := appendXattrs(nil, set); err != nil || !bytes.Equal(got, b) {
			t.Fatalf("two spellings of %+v: %v", set, err)
		}
	})
}

func FuzzRanges(f *testing.F) {
	f.Add(appendRanges(nil, []tree.Range{{Start: 0, End: 4}, {Start: 9, End: 10}}), uint64(20), uint64(5))
	f.Add(appendRanges(nil, nil), uint64(20), uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, size, alloc uint64) {
		data, ok := parseRanges(b, size, alloc)
		if !ok {
			return
		}
		if got := appendRanges(nil, data); !bytes.Equal(got, b) {
			t.Fatalf("two spellings of %+v", data)
		}
		normal, sum, err := tree.DataRanges(data, size)
		if err != nil || sum != alloc || !slices.Equal(normal, data) {
			t.Fatalf("%+v is not in normal form: %+v, %d, %v", data, normal, sum, err)
		}
	})
}

func FuzzFrameTable(f *testing.F) {
	f.Add(buildFrames([]frameRecord{{off: 64, stored: 20, raw: 30, crc: 1}, {off: 84, stored: 1, raw: 1}}), uint64(100))
	f.Fuzz(func(t *testing.T, b []byte, end uint64) {
		if len(b) >= 4 {
			binary.LittleEndian.PutUint32(b, checksum(tagFrames, 0, b[4:]))
		}
		if checkFrames(b, 0, end) != "" {
			return
		}
		for i := range (len(b) - 4) / frameRecordLen {
			if r := frameAt(b, i); r.off+uint64(r.stored) > end || r.raw > chunkSize {
				t.Fatalf("record %d: %+v", i, r)
			}
		}
	})
}

// FuzzFrame decodes frames that lie about their size.
func FuzzFrame(f *testing.F) {
	r := open(f, smallPackOf(f))
	pack := smallPackOf(f)
	rec, err := r.frameRecord(0)
	must(f, err)
	f.Add(pack[rec.off:rec.off+uint64(rec.stored)], uint32(rec.raw))
	cache := NewFrameCache(0)
	f.Fuzz(func(t *testing.T, stored []byte, raw uint32) {
		raw %= chunkSize + 1
		out, err := cache.decode(stored, int(raw))
		if err == nil && len(out) != int(raw) {
			t.Fatalf("%d bytes, not %d", len(out), raw)
		}
		if cap(out) > chunkSize+decodeSlack {
			t.Fatalf("%d bytes were allocated", cap(out))
		}
	})
}
