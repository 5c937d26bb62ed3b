package tree_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"ephemeral-sandbox/fs/tree"
)

// islands is a file of which only the named places may be read.
type islands struct {
	t     testing.TB
	bytes map[uint64]string // by offset
}

func (f islands) ReadAt(p []byte, off int64) (int, error) {
	for at, s := range f.bytes {
		if end := at + uint64(len(s)); uint64(off) >= at && uint64(off)+uint64(len(p)) <= end {
			return copy(p, s[uint64(off)-at:]), nil
		}
	}
	f.t.Errorf("%d bytes are read at %d: that is a hole", len(p), off)
	return 0, io.EOF
}

// TestHashVectors holds the definition fast. The hashes were computed by another
// program.
func TestHashVectors(t *testing.T) {
	const tera = 1 << 40
	for _, tc := range []struct {
		name string
		size uint64
		data []tree.Range
		at   map[uint64]string
		want string
	}{
		{"empty", 0, nil, nil, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
		{"empty without data", 0, []tree.Range{}, nil, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
		{"dense", 6, nil, map[uint64]string{0: "hello\n"}, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"},
		{
			"dense by pieces", 6,
			[]tree.Range{{Start: 0, End: 2}, {Start: 2, End: 2}, {Start: 2, End: 9}},
			map[uint64]string{0: "hello\n"},
			"5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
		},
		{"all hole", 100_000, []tree.Range{}, nil, "5cd3075006fcdfc3d1cd5202b7e5b66bcfb9cf639771d6cd41926a444abdf412"},
		{
			"hole at the end", 8,
			[]tree.Range{{Start: 0, End: 5}},
			map[uint64]string{0: "01234"},
			"73d860290e54dacf98a69e4ae13c091c982ffbb13113b994962e3b85d84deb10",
		},
		{
			"hole at the start, cut off", 10,
			[]tree.Range{{Start: 8, End: 99}, {Start: 99, End: 100}},
			map[uint64]string{8: "89"},
			"58837e5daa9bae310a0bfcd3c4b9eaac52254109684b0141fd959bbc53b2c87f",
		},
		{
			"two ranges", 10,
			[]tree.Range{{Start: 1, End: 1}, {Start: 2, End: 3}, {Start: 3, End: 4}, {Start: 6, End: 8}},
			map[uint64]string{2: "23", 6: "67"},
			"3f774105e6054ea3c47876798cb5d30f93834e3762a1c651b5e706454904d25e",
		},
		{
			"a terabyte", tera,
			[]tree.Range{{Start: 4096, End: 4099}, {Start: tera - 3, End: tera}},
			map[uint64]string{4096: "one", tera - 3: "two"},
			"29a82d4eca0393d20cee34ff5a083bf3c91da2096dc7387f19ce0dc24c7f96d0",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tree.HashContent(t.Context(), islands{t, tc.at}, tc.size, tc.data)
			if err != nil || hex.EncodeToString(got[:]) != tc.want {
				t.Errorf("hash %x, %v; want %s", got, err, tc.want)
			}
		})
	}
}

// reference is the definition once more, byte by byte: what a file holds, and
// which of it is data.
func reference(content []byte, isData []bool) tree.Hash {
	if !slices.Contains(isData, false) {
		return sha256.Sum256(content)
	}
	in := binary.LittleEndian.AppendUint64([]byte("sparse-content\n"), uint64(len(content)))
	for i := 0; i < len(content); i++ {
		if !isData[i] {
			continue
		}
		end := i
		for end < len(content) && isData[end] {
			end++
		}
		in = binary.LittleEndian.AppendUint64(in, uint64(i))
		in = binary.LittleEndian.AppendUint64(in, uint64(end))
		in = append(in, content[i:end]...)
		i = end
	}
	return sha256.Sum256(in)
}

func TestHashIsAsDefined(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{0, 1, 50, 1000, 300_000}).Draw(t, "size")
		content := bytes.Repeat([]byte("content "), size/8+1)[:size]
		var data []tree.Range
		isData := make([]bool, size)
		if rapid.Bool().Draw(t, "holes") {
			cuts := rapid.SliceOfN(rapid.IntRange(0, size+10), 0, 12).Draw(t, "cuts")
			slices.Sort(cuts)
			data = []tree.Range{}
			for ; len(cuts) > 1; cuts = cuts[rapid.IntRange(1, 2).Draw(t, "next"):] {
				data = append(data, tree.Range{Start: uint64(cuts[0]), End: uint64(cuts[1])})
			}
		}
		for i := range isData {
			isData[i] = data == nil || slices.ContainsFunc(data, func(r tree.Range) bool {
				return r.Start <= uint64(i) && uint64(i) < r.End
			})
		}
		want := reference(content, isData)
		got, err := tree.HashContent(t.Context(), bytes.NewReader(content), uint64(size), data)
		if err != nil || got != want {
			t.Fatalf("hash of %d bytes with data in %v: %x, %v; want %x", size, data, got, err, want)
		}

		// The same in pieces of any length.
		h, err := tree.NewContentHasher(uint64(size), data)
		if err != nil {
			t.Fatal(err)
		}
		var stream []byte
		for i, is := range isData {
			if is {
				stream = append(stream, content[i])
			}
		}
		for len(stream) > 0 {
			if _, err := h.Sum(); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("a hash with %d bytes missing: %v", len(stream), err)
			}
			n := rapid.IntRange(0, len(stream)).Draw(t, "piece")
			if len(stream) > 2000 {
				n = max(n, len(stream)/2)
			}
			if got, err := h.Write(stream[:n]); got != n || err != nil {
				t.Fatalf("write %d bytes: %d, %v", n, got, err)
			}
			stream = stream[n:]
		}
		if got, err := h.Sum(); err != nil || got != want {
			t.Fatalf("hash in pieces: %x, %v; want %x", got, err, want)
		}
		if n, err := h.Write([]byte("x")); n != 0 || !errors.Is(err, tree.ErrInvalid) {
			t.Fatalf("a byte too many: %d, %v", n, err)
		}
	})
}

func TestHashContentFails(t *testing.T) {
	ctx := t.Context()
	for _, data := range [][]tree.Range{
		{{Start: 5, End: 4}},
		{{Start: 5, End: 7}, {Start: 6, End: 8}},
		{{Start: 5, End: 6}, {Start: 1, End: 2}},
		{{Start: 50, End: 60}, {Start: 1, End: 2}}, // also beyond the end
	} {
		if _, err := tree.HashContent(ctx, islands{t, nil}, 10, data); !errors.Is(err, tree.ErrInvalid) {
			t.Errorf("data in %v: %v", data, err)
		}
	}
	if _, err := tree.HashContent(ctx, islands{t, nil}, tree.MaxFileSize+1, []tree.Range{}); !errors.Is(err, tree.ErrTooBig) {
		t.Errorf("a file too large: %v", err)
	}
	if _, err := tree.HashContent(ctx, bytes.NewReader([]byte("short")), 6, nil); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a file shorter than it says: %v", err)
	}
}

// endless is all data, and cancels after some reads.
type endless struct {
	left   int
	cancel func()
}

func (e *endless) ReadAt(p []byte, _ int64) (int, error) {
	if e.left--; e.left == 0 {
		e.cancel()
	}
	return len(p), nil
}

func TestHashContentIsCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := &endless{3, cancel}
	if _, err := tree.HashContent(ctx, r, 1<<40, nil); !errors.Is(err, context.Canceled) || r.left != 0 {
		t.Errorf("%v, %d reads left", err, r.left)
	}
	if _, err := tree.HashContent(ctx, islands{t, nil}, 1<<40, []tree.Range{}); !errors.Is(err, context.Canceled) {
		t.Errorf("of a hole: %v", err)
	}
}

func TestTooManyRanges(t *testing.T) {
	var data []tree.Range
	for i := range uint64(tree.MaxRanges + 10) {
		data = append(data, tree.Range{Start: i * 10, End: i*10 + 1})
	}
	end := data[len(data)-1].End
	data = append(data, tree.Range{Start: 1 << 30, End: 1<<30 + 1})
	given := slices.Clone(data)
	got, n, err := tree.DataRanges(data, math.MaxUint64)
	if err != nil || n != end+1 || !slices.Equal(got, []tree.Range{{End: end}, {Start: 1 << 30, End: 1<<30 + 1}}) {
		t.Errorf("%d ranges with %d bytes, %v", len(got), n, err)
	}
	if !slices.Equal(data, given) {
		t.Error("the list of the caller has changed")
	}
	again, n2, err := tree.DataRanges(got, math.MaxUint64)
	if err != nil || n2 != n || !slices.Equal(again, got) {
		t.Errorf("the normal form has another one: %v, %d, %v", again, n2, err)
	}
}
