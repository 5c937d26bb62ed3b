package store

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"ephemeral-sandbox/fs/hostfs/faultfs"
	"ephemeral-sandbox/fs/hostfs/memfs"
	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

var text = rapid.Custom(func(t *rapid.T) string {
	return string(rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(t, "bytes"))
})

var recordGen = rapid.Custom(func(t *rapid.T) record {
	r := record{
		Commit: Commit{
			Number:       rapid.Uint64().Draw(t, "number"),
			StoredBytes:  rapid.Int64Range(0, 1<<40).Draw(t, "stored"),
			LogicalBytes: rapid.Int64Range(0, 1<<40).Draw(t, "logical"),
			CommitMeta: CommitMeta{
				Session: text.Draw(t, "session"), Operation: text.Draw(t, "operation"),
				RequestID: text.Draw(t, "request"), Message: text.Draw(t, "message"),
				Merged: rapid.SliceOfN(text, 0, 3).Draw(t, "merged"),
				Counts: rapid.MapOfN(text, rapid.Int64(), 0, 3).Draw(t, "counts"),
			},
		},
		maxIno: tree.Ino(rapid.Uint64().Draw(t, "max ino")),
	}
	if rapid.Bool().Draw(t, "has a time") {
		r.Time = time.Unix(rapid.Int64Range(-1<<40, 1<<40).Draw(t, "seconds"), rapid.Int64Range(0, 1e9-1).Draw(t, "ns")).UTC()
	}
	copy(r.Parent[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "parent"))
	copy(r.Pack[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "pack id"))
	if rapid.Bool().Draw(t, "inline") {
		r.Inline = true
		r.pack = rapid.SliceOfN(rapid.Byte(), 1, 600).Draw(t, "pack")
		r.StoredBytes = int64(len(r.pack))
	}
	return r
})

func TestRecordComesBackAsItWas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := recordGen.Draw(t, "record")
		b, err := r.encode()
		if err != nil {
			t.Fatal(err)
		}
		if r.Digest != sha256.Sum256(b) {
			t.Fatal("the digest is not that of the bytes")
		}
		got, err := decodeRecord(b)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(r, got, cmp.AllowUnexported(record{}), cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("record (-want +got):\n%s", diff)
		}
		// No other bytes are the same record: every flip is found.
		i := rapid.IntRange(0, len(b)-1).Draw(t, "byte")
		b[i] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		if _, err := decodeRecord(b); err == nil {
			t.Fatalf("a flipped bit in byte %d of %d goes unnoticed", i, len(b))
		}
	})
}

func TestRecordSkipsFieldsItDoesNotKnow(t *testing.T) {
	r := record{}
	fields := append(r.encodeFields(), 100, 3, 'n', 'e', 'w')
	var got record
	if err := got.decodeFields(fields); err != nil {
		t.Errorf("decode with an unknown field: %v", err)
	}
}

func TestCommitNames(t *testing.T) {
	for n, want := range map[uint64]string{0: "L000000", 24: "L000024", 999999: "L999999", 1234567: "L1234567"} {
		if got := CommitName(n); got != want {
			t.Errorf("CommitName(%d) = %q, want %q", n, got, want)
		}
		if got, err := ParseCommit(want); got != n || err != nil {
			t.Errorf("ParseCommit(%q) = %d, %v; want %d", want, got, err, n)
		}
	}
	for _, s := range []string{"", "L", "24", "l000024", "L24", "L0000024", "L00002x", "L-00024", "L000024 ", "L99999999999999999999"} {
		if n, err := ParseCommit(s); err == nil {
			t.Errorf("ParseCommit(%q) = %d, want an error", s, n)
		}
	}
}

func FuzzDecodeRecord(f *testing.F) {
	for _, r := range []record{
		{},
		{Commit: Commit{Number: 3, CommitMeta: CommitMeta{Session: "s", Merged: []string{"a", "b"}, Counts: map[string]int64{"n": -1}, Time: time.Unix(5, 6)}}},
		{Commit: Commit{Number: 1, Inline: true, StoredBytes: 4}, pack: []byte("pack")},
	} {
		b, err := r.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			return
		}
		again, err := r.encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := decodeRecord(again)
		if err != nil {
			t.Fatal(err)
		}
		back.Digest = r.Digest
		if diff := cmp.Diff(r, back, cmp.AllowUnexported(record{}), cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("decoded, encoded and decoded again (-first +second):\n%s", diff)
		}
	})
}

// FuzzDecodeFields goes past the checksums, which a fuzzer cannot make.
func FuzzDecodeFields(f *testing.F) {
	r := record{Commit: Commit{CommitMeta: CommitMeta{Session: "s", Merged: []string{"a"}, Counts: map[string]int64{"n": 1}, Time: time.Unix(5, 6)}}}
	f.Add(r.encodeFields())
	f.Fuzz(func(t *testing.T, b []byte) {
		var r record
		if err := r.decodeFields(b); err != nil {
			return
		}
		var back record
		if err := back.decodeFields(r.encodeFields()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(r, back, cmp.AllowUnexported(record{}), cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("fields (-first +second):\n%s", diff)
		}
	})
}

// logOf returns a log file's bytes with n records, and where each starts.
func logOf(tb testing.TB, n int) (content []byte, starts []int) {
	tb.Helper()
	disk := memfs.New()
	var parent [32]byte
	var l *fileLog
	end := 0
	for i := range n {
		r := record{Commit: Commit{Number: uint64(i), Parent: parent, CommitMeta: CommitMeta{Message: string(bytes.Repeat([]byte{'m'}, 200*i))}}}
		b, err := r.encode()
		if err != nil {
			tb.Fatal(err)
		}
		if i == 0 {
			l, err = createLog(disk, b)
		} else {
			_, err = l.Append(uint64(i), b)
		}
		if err != nil {
			tb.Fatal(err)
		}
		parent = r.Digest
		starts = append(starts, end)
		end += len(b)
	}
	return readFile(tb, disk, end), append(starts, end)
}

func readFile(tb testing.TB, disk *memfs.FS, n int) []byte {
	tb.Helper()
	f, err := disk.Open(logName)
	if err != nil {
		tb.Fatal(err)
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, 0); err != nil {
		tb.Fatal(err)
	}
	return b
}

// replayBytes opens a log with this content, as long as it is, and returns the
// messages of its records.
func replayBytes(tb testing.TB, content []byte, zeros int) (records, cut int, err error) {
	tb.Helper()
	disk := memfs.New()
	f, err := disk.Create(logName)
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := f.WriteAt(append(bytes.Clone(content), make([]byte, zeros)...), 0); err != nil {
		tb.Fatal(err)
	}
	l, torn, err := openLog(disk, func(uint64, []byte) error {
		records++
		return nil
	})
	if err != nil {
		return records, 0, err
	}
	// What was opened once opens again, with nothing left to cut.
	if err := l.Close(); err != nil {
		tb.Fatal(err)
	}
	again := 0
	_, left, err := openLog(disk, func(uint64, []byte) error {
		again++
		return nil
	})
	if err != nil || left != 0 || again != records {
		tb.Fatalf("opened a second time: %d records, %d bytes torn, %v; the first time %d records", again, left, err, records)
	}
	return records, int(torn), nil
}

func TestTornRecordIsCut(t *testing.T) {
	whole, starts := logOf(t, 6)
	last := starts[5]
	for first := last; first < len(whole); first += sector - first%sector {
		for end := first + sector - first%sector; ; end += sector {
			// The sectors of [first, end) were not written.
			b := bytes.Clone(whole)
			clear(b[first:min(end, len(b))])
			n, cut, err := replayBytes(t, b, 4096)
			if err != nil || n != 5 {
				t.Fatalf("record without bytes %d to %d of %d: %d records, %v; want 5", first-last, end-last, len(whole)-last, n, err)
			}
			if lost := len(bytes.TrimRight(b[last:], "\x00")); cut != lost {
				t.Fatalf("cut %d bytes, want %d", cut, lost)
			}
			if end >= len(b) {
				break
			}
		}
	}
}

func TestRecordCutShortIsCut(t *testing.T) {
	whole, starts := logOf(t, 6)
	for end := starts[5] + 8; end < len(whole); end += 8 {
		b := bytes.Clone(whole)
		clear(b[end:])
		if n, _, err := replayBytes(t, b, 4096); err != nil || n != 5 {
			t.Fatalf("record cut short at %d of %d: %d records, %v; want 5", end-starts[5], len(whole)-starts[5], n, err)
		}
	}
}

// TestCrashWhileTheLogGrows loses power after each step of an append that makes
// the file longer.
func TestCrashWhileTheLogGrows(t *testing.T) {
	var parent [32]byte
	next := func(number uint64) []byte {
		r := record{Commit: Commit{Number: number, Parent: parent, CommitMeta: CommitMeta{Message: strings.Repeat("m", 30_000)}}}
		b, err := r.encode()
		if err != nil {
			t.Fatal(err)
		}
		parent = r.Digest
		return b
	}
	start := memfs.New()
	if _, err := createLog(start, next(0)); err != nil {
		t.Fatal(err)
	}
	if err := start.SyncDir("."); err != nil {
		t.Fatal(err)
	}
	var b []byte
	for number := uint64(1); ; number++ {
		l, _, err := openLog(start, func(uint64, []byte) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		before := parent
		b = next(number)
		if l.end+int64(len(b)) > l.size {
			parent = before
			break
		}
		if _, err := l.Append(number, b); err != nil {
			t.Fatal(err)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	grown := false
	for i := 0; ; i++ {
		mem := start.CrashClone(nil)
		disk := faultfs.New(mem, faultfs.Plan{Nth: i, Count: -1, Err: errors.New("dead")})
		l, _, err := openLog(disk, func(uint64, []byte) error { return nil })
		if err == nil {
			before := l.size
			_, err = l.Append(l.next, b)
			grown = grown || err == nil && l.size > before
		}
		// Each change alone, and mixtures.
		changes := 0
		mem.CrashClone(func() bool {
			changes++
			return false
		})
		for j := range changes + 20 {
			percent, at := rng.IntN(101), 0
			left := mem.CrashClone(func() bool {
				at++
				return at == j+1 || j >= changes && rng.IntN(100) < percent
			})
			if _, _, err := openLog(left, func(uint64, []byte) error { return nil }); err != nil {
				t.Fatalf("step %d: %v; steps %q", i, err, disk.Steps())
			}
		}
		if !disk.Fired() {
			break
		}
	}
	if !grown {
		t.Error("the log did not grow")
	}
}

func TestDamageIsRefused(t *testing.T) {
	whole, starts := logOf(t, 6)
	for i := range whole {
		b := bytes.Clone(whole)
		b[i] ^= 0x10
		n, _, err := replayBytes(t, b, 4096)
		if !layerfmt.IsCorrupt(err) {
			t.Fatalf("flipped bit in byte %d: %d records, %v; want a corrupt log", i, n, err)
		}
	}
	for i := range starts[:5] {
		b := bytes.Clone(whole)
		clear(b[starts[i] : starts[i]+64])
		if n, _, err := replayBytes(t, b, 0); !layerfmt.IsCorrupt(err) {
			t.Fatalf("record %d without a header: %d records, %v; want a corrupt log", i, n, err)
		}
		// A record gone, the others moved up.
		b = append(bytes.Clone(whole[:starts[i]]), whole[starts[i+1]:]...)
		if n, _, err := replayBytes(t, b, 0); !layerfmt.IsCorrupt(err) {
			t.Fatalf("record %d missing: %d records, %v; want a corrupt log", i, n, err)
		}
	}
	if n, _, err := replayBytes(t, whole[:starts[5]+100], 0); !layerfmt.IsCorrupt(err) {
		t.Errorf("log that ends in a record: %d records, %v; want a corrupt log", n, err)
	}
	for _, b := range [][]byte{nil, make([]byte, minGrowth)} {
		if n, _, err := replayBytes(t, b, 0); !layerfmt.IsCorrupt(err) {
			t.Errorf("log of %d zeros: %d records, %v; want a corrupt log", len(b), n, err)
		}
	}
}

// FuzzReplayLog changes a log at will: what comes out is a beginning of it, or
// an error.
func FuzzReplayLog(f *testing.F) {
	whole, starts := logOf(f, 5)
	f.Add(uint16(0), []byte{1}, uint16(0))
	f.Add(uint16(starts[2]), make([]byte, 64), uint16(0))
	f.Add(uint16(starts[4]), []byte("ESCR"), uint16(10))
	f.Fuzz(func(t *testing.T, off uint16, change []byte, cut uint16) {
		b := bytes.Clone(whole)
		b = b[:max(0, len(b)-int(cut))]
		if int(off) < len(b) {
			copy(b[off:], change)
		}
		disk := memfs.New()
		file, err := disk.Create(logName)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.WriteAt(b, 0); err != nil {
			t.Fatal(err)
		}
		end := 0
		_, _, err = openLog(disk, func(number uint64, r []byte) error {
			if int(number) >= len(starts)-1 || !bytes.Equal(r, whole[starts[number]:starts[number+1]]) {
				t.Fatalf("record %d is not one that was written", number)
			}
			end = starts[number+1]
			return nil
		})
		if err == nil && !bytes.Equal(readFile(t, disk, end), whole[:end]) {
			t.Fatal("opening changed a sound record")
		}
	})
}
