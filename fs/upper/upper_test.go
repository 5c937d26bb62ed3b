package upper

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"ephemeral-sandbox/fs/tree"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// TestExtents compares the range map with one source a byte.
func TestExtents(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 64
		var e Extents
		var bytes [size]Source
		at := rapid.IntRange(0, size)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			a, b := at.Draw(t, "start"), at.Draw(t, "end")
			set := func(src Source) {
				for i := a; i < b; i++ {
					bytes[i] = src
				}
			}
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				e.Set(uint64(a), uint64(b), false)
				set(Private)
			case 1:
				e.Set(uint64(a), uint64(b), true)
				set(Zeros)
			case 2:
				e.Clear(uint64(a), uint64(b))
				set(Beneath)
			case 3:
				e.Cut(uint64(a))
				b = size
				set(Beneath)
			}
			checkExtents(t, &e, bytes[:])
		}
	})
}

func checkExtents(t *rapid.T, e *Extents, bytes []Source) {
	private := uint64(0)
	for i, want := range bytes {
		end := uint64(i)
		for end < uint64(len(bytes)) && bytes[end] == want {
			end++
		}
		src, stop := e.Piece(uint64(i))
		if src != want || stop != end && !(end == uint64(len(bytes)) && stop == ^uint64(0)) {
			t.Fatalf("piece at %d is %v to %d, want %v to %d", i, src, stop, want, end)
		}
		if want == Private {
			private++
		}
	}
	if e.Private() != private || e.PrivateIn(0, uint64(len(bytes))) != private {
		t.Fatalf("private bytes: %d and %d, want %d", e.Private(), e.PrivateIn(0, uint64(len(bytes))), private)
	}
	last := Segment{End: 1 << 60}
	e.Each(func(s Segment) bool {
		if last.End != 1<<60 && (s.Start < last.End || s.Start == last.End && s.Zero == last.Zero) || s.Start >= s.End {
			t.Fatalf("segment %+v follows %+v", s, last)
		}
		last = s
		return true
	})
}

var (
	genIno  = rapid.Custom(func(t *rapid.T) tree.Ino { return tree.Ino(rapid.Uint64Range(1, 6).Draw(t, "ino")) })
	genText = rapid.StringMatching(`[^/\x00.]{1,20}`)
)

func genTime(t *rapid.T) tree.Time {
	return tree.Time{Sec: rapid.Int64().Draw(t, "sec"), Nsec: rapid.Uint32Range(0, 999_999_999).Draw(t, "nsec")}
}

func genInode(t *rapid.T) *Inode {
	n := &Inode{
		New: rapid.Bool().Draw(t, "new"), Data: rapid.Bool().Draw(t, "data"),
		Written: rapid.Bool().Draw(t, "written"), Linkable: rapid.Bool().Draw(t, "linkable"),
		LastOp: tree.Op(rapid.Uint32().Draw(t, "op")),
	}
	n.Ino = genIno.Draw(t, "ino")
	n.Kind = tree.Kind(rapid.IntRange(1, 7).Draw(t, "kind"))
	n.Mode = rapid.Uint32Range(0, 0o7777).Draw(t, "mode")
	n.UID, n.GID, n.Nlink = rapid.Uint32().Draw(t, "uid"), rapid.Uint32().Draw(t, "gid"), rapid.Uint32().Draw(t, "nlink")
	n.Size, n.Alloc = rapid.Uint64Range(0, tree.MaxFileSize).Draw(t, "size"), rapid.Uint64().Draw(t, "alloc")
	n.Mtime, n.Ctime = genTime(t), genTime(t)
	n.Link = rapid.StringN(0, 50, 100).Draw(t, "link")
	for range rapid.IntRange(0, 2).Draw(t, "xattrs") {
		n.Xattrs = append(n.Xattrs, tree.Xattr{Name: rapid.StringN(1, 10, 40).Draw(t, "xattr"), Value: rapid.SliceOf(rapid.Byte()).Draw(t, "value")})
	}
	if rapid.Bool().Draw(t, "hash") {
		n.Hash[3] = 9
	}
	if n.Data {
		n.Gen, n.Shown = rapid.Uint32().Draw(t, "gen"), rapid.Uint64Range(0, 100).Draw(t, "shown")
	}
	if rapid.Bool().Draw(t, "lineage") {
		n.Lineage, n.Prior = genIno.Draw(t, "lineage"), genIno.Draw(t, "prior")
	}
	return n
}

func genRange(t *rapid.T, c *Change) {
	c.Ino = genIno.Draw(t, "ino")
	c.Start = rapid.Uint64Range(0, 100).Draw(t, "start")
	c.End = c.Start + rapid.Uint64Range(1, 100).Draw(t, "length")
}

func genDirent(t *rapid.T) Dirent {
	return Dirent{Dirent: tree.Dirent{Dir: genIno.Draw(t, "dir"), Name: genText.Draw(t, "name")}}
}

func genChange(t *rapid.T) (c Change) {
	c.Type = ChangeType(rapid.IntRange(1, 12).Draw(t, "type"))
	switch c.Type {
	case PutDirent:
		c.Dirent = genDirent(t)
		c.Dirent.Removed = genIno.Draw(t, "removed")
		if rapid.Bool().Draw(t, "live") {
			c.Dirent.Ino, c.Dirent.Kind = genIno.Draw(t, "ino"), tree.File
		}
	case DropDirent:
		c.Dirent = genDirent(t)
	case PutInode:
		c.Inode = genInode(t)
	case Write:
		genRange(t, &c)
		c.Size, c.Alloc, c.Mode, c.Time = c.End, 7, 0o644, genTime(t)
	case Zero, Forget, Own:
		genRange(t, &c)
	case Cut:
		c.Ino, c.Start = genIno.Draw(t, "ino"), rapid.Uint64Range(0, 100).Draw(t, "start")
	case DropInode:
		c.Ino = genIno.Draw(t, "ino")
	case Base:
		c.Start = rapid.Uint64().Draw(t, "commit")
	case Remember:
		c.Start, c.Ino = rapid.Uint64().Draw(t, "request"), genIno.Draw(t, "ino")
	}
	return c
}

func genFrame(t *rapid.T) Frame {
	return Frame{
		Op: tree.Op(rapid.Uint32().Draw(t, "op")), Request: rapid.Uint64Range(0, 3).Draw(t, "request"), Result: genIno.Draw(t, "result"),
		Changes: rapid.SliceOfN(rapid.Custom(genChange), 1, 5).Draw(t, "changes"),
	}
}

func TestFrameRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := genFrame(t)
		got, err := decodeFrame(appendFrame(nil, want))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(Inode{}, Extents{})); diff != "" {
			t.Fatalf("frame differs (-want +got):\n%s", diff)
		}
	})
}

// render says all of an upper's tables.
func render(u *Upper) string {
	var b strings.Builder
	fmt.Fprintf(&b, "base %d, %d bytes, %d made, op %d, requests %v %v\n", u.base, u.bytes, u.made, u.maxOp, u.order, u.requests)
	u.inodes.Ascend(func(n *Inode) bool {
		m := *n
		m.extents = nil
		fmt.Fprintf(&b, "%+v:", m)
		n.Extents().Each(func(s Segment) bool { fmt.Fprintf(&b, " %+v", s); return true })
		b.WriteByte('\n')
		return true
	})
	u.dirents.Ascend(func(d *Dirent) bool { fmt.Fprintf(&b, "%+v\n", *d); return true })
	u.names.Ascend(func(d tree.Dirent) bool { fmt.Fprintf(&b, "%+v\n", d); return true })
	return b.String()
}

// fits tells whether the tables of u can follow f.
func fits(u *Upper, f Frame) bool {
	s := u.Scratch()
	for i := range f.Changes {
		switch c := f.Changes[i]; c.Type {
		case Write, Cut, Zero, Forget, Own:
			if n := s.Inode(c.Ino); n == nil || !n.Data {
				return false
			}
		default:
			if err := s.Try(f.Changes[i : i+1]); err != nil {
				return false
			}
		}
	}
	return true
}

func mustOpen(t testing.TB, dir string, o Options) *Upper {
	t.Helper()
	u, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = u.Close() })
	return u
}

// fill commits n frames and gives the tables after each, with the size of the
// journal then.
func fill(t testing.TB, u *Upper, seed, n int) (sizes []int64, states []string) {
	note := func() {
		sizes, states = append(sizes, u.journal.size), append(states, render(u))
	}
	note()
	gen := rapid.Custom(genFrame)
	for i := 0; len(states) <= n; i++ {
		f := gen.Example(seed + i)
		if !fits(u, f) {
			continue
		}
		if err := u.Commit(f); err != nil {
			t.Fatal(err)
		}
		note()
	}
	return sizes, states
}

// TestTornAnywhere cuts a journal after every byte: what is left is the state
// after the last whole frame, and nothing is opened when the checkpoint at its
// start is not whole.
func TestTornAnywhere(t *testing.T) {
	dir := t.TempDir()
	u := mustOpen(t, dir, Options{Base: 3})
	sizes, states := fill(t, u, 1, 25)
	whole, err := os.ReadFile(filepath.Join(dir, journalName))
	if err != nil {
		t.Fatal(err)
	}
	torn := t.TempDir()
	name := filepath.Join(torn, journalName)
	for cut := range len(whole) + 1 {
		if err := os.WriteFile(name, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		u, err := Open(torn, Options{Base: 3})
		if int64(cut) < sizes[0] {
			var corrupt *CorruptError
			if !errors.As(err, &corrupt) {
				t.Fatalf("cut at %d, inside the checkpoint: %v", cut, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		i, _ := slices.BinarySearch(sizes, int64(cut)+1)
		if got := render(u); got != states[i-1] {
			t.Fatalf("cut at %d, after frame %d:\n%s", cut, i-1, cmp.Diff(states[i-1], got))
		}
		if err := u.Commit(Frame{Changes: []Change{{Type: Base, Start: 9}}}); err != nil {
			t.Fatal(err)
		}
		if err := u.Close(); err != nil {
			t.Fatal(err)
		}
		if base, ok, err := PeekBase(torn); base != 9 || !ok || err != nil {
			t.Fatalf("after cut at %d and another frame: %d, %v, %v", cut, base, ok, err)
		}
	}
}

// TestDamage flips every bit of all frames but the last: each is found, and
// none is taken for a torn end.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	u := mustOpen(t, dir, Options{})
	sizes, _ := fill(t, u, 50, 6)
	name := filepath.Join(dir, journalName)
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for at := range int(sizes[len(sizes)-2]) {
		b := slices.Clone(whole)
		b[at] ^= 1 << (at % 8)
		_, err := replay(name, b, func(Frame) error { return nil })
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) || corrupt.Path != name || corrupt.Offset > int64(at) {
			t.Fatalf("bit flipped at %d: %v", at, err)
		}
	}
}

// TestZeroTail covers a length that the disk has and bytes that it lost.
func TestZeroTail(t *testing.T) {
	dir := t.TempDir()
	u := mustOpen(t, dir, Options{})
	_, states := fill(t, u, 9, 4)
	if err := u.Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, journalName)
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, append(whole, make([]byte, 5000)...), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := render(mustOpen(t, dir, Options{})); got != states[len(states)-1] {
		t.Fatal(cmp.Diff(states[len(states)-1], got))
	}
}

// TestCompaction rewrites the journal again and again: tables stay, and it does
// not grow without end.
func TestCompaction(t *testing.T) {
	dir := t.TempDir()
	u := mustOpen(t, dir, Options{CompactMin: 2000})
	_, states := fill(t, u, 1000, 300)
	if u.journal.size > max(2000, 4*u.floor)+4096 {
		t.Fatalf("journal of %d bytes over a checkpoint of %d", u.journal.size, u.floor)
	}
	if err := u.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := u.Close(); err != nil {
		t.Fatal(err)
	}
	if got := render(mustOpen(t, dir, Options{})); got != states[len(states)-1] {
		t.Fatal(cmp.Diff(states[len(states)-1], got))
	}
	if _, err := os.Stat(filepath.Join(dir, freshName)); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("unfinished checkpoint is left: %v", err)
	}
}

// faultFile fails as told, after writing part of what it was given.
type faultFile struct {
	logFile
	write, truncate, sync error
}

func (f *faultFile) WriteAt(p []byte, off int64) (int, error) {
	if f.write == nil {
		return f.logFile.WriteAt(p, off)
	}
	n, err := f.logFile.WriteAt(p[:len(p)/2], off)
	return n, errors.Join(err, f.write)
}

func (f *faultFile) Truncate(size int64) error {
	if f.truncate != nil {
		return f.truncate
	}
	return f.logFile.Truncate(size)
}

func (f *faultFile) Datasync() error {
	if f.sync != nil {
		return f.sync
	}
	return f.logFile.Datasync()
}

// TestFaults fails a write, the repair of a write, and a sync. What did not
// succeed is not there, before and after reopening, and what comes after an
// unknown outcome is refused.
func TestFaults(t *testing.T) {
	base := func(n uint64) Frame { return Frame{Changes: []Change{{Type: Base, Start: n}}} }
	for _, tt := range []struct {
		name  string
		fault faultFile
		stuck bool
	}{
		{"full disk", faultFile{write: syscall.ENOSPC}, false},
		{"full disk and no repair", faultFile{write: syscall.ENOSPC, truncate: syscall.EIO}, true},
		{"sync", faultFile{sync: syscall.EIO}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			u := mustOpen(t, dir, Options{Base: 1})
			if err := u.Commit(base(2)); err != nil {
				t.Fatal(err)
			}
			good := u.journal.file
			tt.fault.logFile = good
			u.journal.file = &tt.fault
			want := uint64(2)
			if tt.fault.sync != nil {
				if err := u.Sync(); !errors.Is(err, tt.fault.sync) {
					t.Fatalf("sync: %v", err)
				}
			} else if err := u.Commit(base(3)); !errors.Is(err, syscall.ENOSPC) {
				t.Fatalf("commit: %v", err)
			}
			u.journal.file = good
			if err := u.Commit(base(4)); (err != nil) != tt.stuck {
				t.Fatalf("commit after the fault: %v", err)
			} else if err == nil {
				want = 4
			}
			if u.Base() != want {
				t.Fatalf("base is %d, want %d", u.Base(), want)
			}
			_ = u.Close()
			if got := mustOpen(t, dir, Options{}).Base(); got != want {
				t.Fatalf("base is %d after reopening, want %d", got, want)
			}
		})
	}
}

// TestSweep removes data files that no record owns and keeps the others.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	u := mustOpen(t, dir, Options{})
	n := &Inode{Data: true, Gen: 2}
	n.Ino, n.Kind = 77, tree.File
	if err := u.Commit(Frame{Changes: []Change{{Type: PutInode, Inode: n}}}); err != nil {
		t.Fatal(err)
	}
	for _, gen := range []uint32{1, 2} {
		f, err := u.OpenData(77, gen, true)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(u.SyncNames(), u.Close()); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, dir, Options{})
	left, err := filepath.Glob(filepath.Join(dir, dataName, "*"))
	if err != nil || len(left) != 1 || filepath.Base(left[0]) != "4d.2" {
		t.Fatalf("data files left: %v, %v", left, err)
	}
}

// FuzzFrame decodes any bytes: an error, or a frame that encodes to what
// decodes to the same.
func FuzzFrame(f *testing.F) {
	gen := rapid.Custom(genFrame)
	for i := range 20 {
		f.Add(appendFrame(nil, gen.Example(i)))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		frame, err := decodeFrame(b)
		if err != nil {
			return
		}
		again, err := decodeFrame(appendFrame(nil, frame))
		if err != nil {
			t.Fatalf("encoded again: %v", err)
		}
		if !bytes.Equal(appendFrame(nil, frame), appendFrame(nil, again)) {
			t.Fatal("two encodings of one frame differ")
		}
	})
}

// FuzzJournal replays any bytes after a sound header: never a panic, and what
// is called sound replays to the same again.
func FuzzJournal(f *testing.F) {
	s := newSeal(1)
	frames := func(n int) (b []byte) {
		gen := rapid.Custom(genFrame)
		for i := range n {
			one := appendFrame(make([]byte, frameHead), gen.Example(i))
			s.close(one)
			b = append(b, one...)
		}
		return b
	}
	for n := range 4 {
		f.Add(frames(n), uint16(0), byte(0))
		f.Add(frames(n), uint16(n*30), byte(1))
	}
	f.Fuzz(func(t *testing.T, b []byte, at uint16, flip byte) {
		b = append(appendHeader(nil, 1, headerSize), b...)
		if i := headerSize + int(at); i < len(b) {
			b[i] ^= flip
		}
		st := newState()
		p, err := replay("fuzz", b, st.apply)
		if err != nil {
			return
		}
		again := newState()
		q, err := replay("fuzz", b[:p.end], again.apply)
		if err != nil || q.end != p.end || render(&Upper{state: st}) != render(&Upper{state: again}) {
			t.Fatalf("sound part of %d bytes replays otherwise: %d, %v", p.end, q.end, err)
		}
	})
}
