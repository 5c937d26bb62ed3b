package attribution

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"ephemeral-sandbox/fs/tree"
)

// SectionName is the name of the layer section that Encode makes.
const SectionName = "attribution"

// ErrMalformed marks every error of Decode.
var ErrMalformed = errors.New("malformed attribution section")

// FileSpans is what a layer says of one file's lines.
type FileSpans struct {
	Lines     int // 1 when Wholesale
	Spans     Spans
	Wholesale bool
}

// The section, version 1. uv is an unsigned LEB128 number without padding, sv a
// zigzag one, str a uv length and that many bytes.
//
//	version u8 = 1
//	uv owners, then for each, in ascending order, none twice:
//	    kind u8, str session, str operation, str command,
//	    sv seconds since 1970, uv nanoseconds, uv commit
//	uv files, then for each, by ascending inode number:
//	    uv inode number minus the one before it
//	    flags u8 (1: wholesale)
//	    uv runs, then for each: uv lines (> 0), uv owner
//
// The owner table holds the owners that runs name, no others; neighbouring runs
// name different owners; a wholesale file has one run of one line. So a table
// has exactly one encoding, and Decode takes no other.
const (
	sectionVersion = 1
	flagWholesale  = 1

	// Bounds on what a section may claim.
	maxString = 64 << 10
	maxLines  = 1 << 40
)

// Encode makes the section for the files of a layer. Each file's spans must
// tile its lines; of a wholesale file only the first span counts. Equal input
// gives equal bytes. Strings beyond 64 KiB are cut.
func Encode(files map[tree.Ino]FileSpans) []byte {
	index := map[ownerKey]uint64{}
	runs := make(map[tree.Ino]Spans, len(files))
	for ino, f := range files {
		runs[ino] = f.runs()
		for _, r := range runs[ino] {
			index[keyOf(r.Origin)] = 0
		}
	}
	out := []byte{sectionVersion}
	out = binary.AppendUvarint(out, uint64(len(index)))
	for i, k := range slices.SortedFunc(maps.Keys(index), ownerKey.compare) {
		index[k] = uint64(i)
		out = k.append(out)
	}
	out = binary.AppendUvarint(out, uint64(len(files)))
	last := tree.Ino(0)
	for _, ino := range slices.Sorted(maps.Keys(files)) {
		out = binary.AppendUvarint(out, uint64(ino-last))
		last = ino
		if files[ino].Wholesale {
			out = append(out, flagWholesale)
		} else {
			out = append(out, 0)
		}
		out = binary.AppendUvarint(out, uint64(len(runs[ino])))
		for _, r := range runs[ino] {
			out = binary.AppendUvarint(out, uint64(r.Lines))
			out = binary.AppendUvarint(out, index[keyOf(r.Origin)])
		}
	}
	return out
}

// runs is the file's spans in the form in which they are encoded.
func (f FileSpans) runs() Spans {
	if f.Wholesale {
		var o Origin
		if len(f.Spans) > 0 {
			o = f.Spans[0].Origin
		}
		return Whole(1, keyOf(o).origin())
	}
	var out Spans
	for _, sp := range f.Spans {
		out = out.add(sp.Lines, keyOf(sp.Origin).origin())
	}
	return out
}

// ownerKey is an origin as it is encoded: comparable and ordered.
type ownerKey struct {
	kind                        Kind
	session, operation, command string
	sec                         int64
	nsec                        uint32
	commit                      uint64
}

func keyOf(o Origin) ownerKey {
	switch o.Kind {
	case Session, Operation:
		return ownerKey{
			kind: o.Kind, session: clip(o.Session), operation: clip(o.Operation), command: clip(o.Command),
			sec: o.Time.Unix(), nsec: uint32(o.Time.Nanosecond()), commit: o.Commit,
		}
	case Original:
		return ownerKey{kind: Original, sec: time.Time{}.Unix()}
	default:
		return ownerKey{kind: Unknown, sec: time.Time{}.Unix()}
	}
}

func clip(s string) string { return s[:min(len(s), maxString)] }

func (k ownerKey) origin() Origin {
	return Origin{
		Kind: k.kind, Session: k.session, Operation: k.operation, Command: k.command,
		Time: time.Unix(k.sec, int64(k.nsec)).UTC(), Commit: k.commit,
	}
}

func (k ownerKey) compare(l ownerKey) int {
	for _, c := range [...]int{
		int(k.kind) - int(l.kind),
		strings.Compare(k.session, l.session),
		strings.Compare(k.operation, l.operation),
		strings.Compare(k.command, l.command),
		cmp.Compare(k.sec, l.sec), cmp.Compare(k.nsec, l.nsec), cmp.Compare(k.commit, l.commit),
	} {
		if c != 0 {
			return c
		}
	}
	return 0
}

func (k ownerKey) append(out []byte) []byte {
	out = append(out, byte(k.kind))
	for _, s := range [...]string{k.session, k.operation, k.command} {
		out = append(binary.AppendUvarint(out, uint64(len(s))), s...)
	}
	out = binary.AppendVarint(out, k.sec)
	out = binary.AppendUvarint(out, uint64(k.nsec))
	return binary.AppendUvarint(out, k.commit)
}

// Table is a decoded section. It is immutable and safe for concurrent use.
type Table struct {
	owners []Origin
	files  []fileRuns
}

// fileRuns is a file's runs as they stand in the section, already checked.
type fileRuns struct {
	ino       tree.Ino
	lines     uint64
	runs      int
	data      []byte
	wholesale bool
}

// Decode reads a section. It accepts only what Encode makes; any other input
// gives an error that wraps ErrMalformed and names the offset. Memory is
// bounded by the section's length.
func Decode(section []byte) (*Table, error) {
	d := decoder{data: section}
	t := d.table()
	if d.err != nil {
		return nil, d.err
	}
	return t, nil
}

// File returns what the section says of ino.
func (t *Table) File(ino tree.Ino) (FileSpans, bool) {
	at, ok := slices.BinarySearchFunc(t.files, ino, func(f fileRuns, ino tree.Ino) int {
		return cmp.Compare(f.ino, ino)
	})
	if !ok {
		return FileSpans{}, false
	}
	return t.spans(t.files[at]), true
}

// Files calls fn for each file by ascending inode number until fn returns
// false.
func (t *Table) Files(fn func(tree.Ino, FileSpans) bool) {
	for _, f := range t.files {
		if !fn(f.ino, t.spans(f)) {
			return
		}
	}
}

// Len is the number of files.
func (t *Table) Len() int { return len(t.files) }

func (t *Table) spans(f fileRuns) FileSpans {
	out := FileSpans{Lines: int(f.lines), Wholesale: f.wholesale, Spans: make(Spans, 0, f.runs)}
	d := decoder{data: f.data}
	for range f.runs {
		lines, owner := d.uvarint(), d.uvarint()
		out.Spans = append(out.Spans, Span{int(lines), t.owners[owner]})
	}
	return out
}

// decoder reads from the front of data and remembers the first error; after
// one, it reads zeros.
type decoder struct {
	data []byte
	at   int
	err  error
}

func (d *decoder) fail(what string) {
	if d.err == nil {
		d.err = fmt.Errorf("%w at byte %d: %s", ErrMalformed, d.at, what)
	}
}

func (d *decoder) byte() byte {
	if d.err != nil || d.at == len(d.data) {
		d.fail("cut short")
		return 0
	}
	d.at++
	return d.data[d.at-1]
}

func (d *decoder) uvarint() uint64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.data[d.at:])
	switch {
	case n <= 0:
		d.fail("broken number")
		return 0
	case n > 1 && d.data[d.at+n-1] == 0:
		d.fail("padded number")
		return 0
	}
	d.at += n
	return v
}

// varint undoes the zigzag of binary.AppendVarint.
func (d *decoder) varint() int64 {
	u := d.uvarint()
	return int64(u>>1) ^ -int64(u&1)
}

// count reads how many things of at least size bytes follow.
func (d *decoder) count(size int, what string) int {
	n := d.uvarint()
	if n > uint64((len(d.data)-d.at)/size) {
		d.fail("more " + what + " than bytes")
		return 0
	}
	return int(n)
}

func (d *decoder) str() string {
	n := d.count(1, "characters")
	if n > maxString {
		d.fail("string too long")
		return ""
	}
	s := string(d.data[d.at : d.at+n])
	d.at += n
	return s
}

const (
	ownerMinSize = 7 // bytes of the shortest owner
	fileMinSize  = 3
	runMinSize   = 2
)

func (d *decoder) table() *Table {
	if v := d.byte(); v != sectionVersion {
		d.fail(fmt.Sprintf("version %d, this reader knows %d", v, sectionVersion))
	}
	t := &Table{owners: d.owners()}
	used := make([]bool, len(t.owners))
	n := d.count(fileMinSize, "files")
	t.files = make([]fileRuns, 0, n)
	last := tree.Ino(0)
	for range n {
		step := d.uvarint()
		if step == 0 || uint64(last)+step < step {
			d.fail("inode numbers do not ascend")
		}
		last += tree.Ino(step)
		t.files = append(t.files, d.file(last, used))
		if d.err != nil {
			return nil
		}
	}
	if d.at != len(d.data) {
		d.fail("bytes after the end")
	}
	if slices.Contains(used, false) {
		d.fail("an owner without lines")
	}
	return t
}

func (d *decoder) owners() []Origin {
	n := d.count(ownerMinSize, "owners")
	owners := make([]Origin, 0, n)
	var last ownerKey
	for i := range n {
		k := ownerKey{kind: Kind(d.byte()), session: d.str(), operation: d.str(), command: d.str(), sec: d.varint()}
		nsec := d.uvarint()
		k.nsec, k.commit = uint32(nsec), d.uvarint()
		switch {
		case d.err != nil:
			return nil
		case k.kind > Operation:
			d.fail("unknown kind of owner")
		case nsec >= uint64(time.Second):
			d.fail("nanoseconds out of range")
		case keyOf(k.origin()) != k:
			d.fail("owner not in its shortest form")
		case i > 0 && k.compare(last) <= 0:
			d.fail("owners do not ascend")
		}
		last = k
		owners = append(owners, k.origin())
	}
	return owners
}

func (d *decoder) file(ino tree.Ino, used []bool) fileRuns {
	flags := d.byte()
	f := fileRuns{ino: ino, wholesale: flags == flagWholesale, runs: d.count(runMinSize, "runs")}
	if flags > flagWholesale {
		d.fail("unknown flags")
	}
	start := d.at
	last := uint64(len(used))
	for range f.runs {
		lines, owner := d.uvarint(), d.uvarint()
		switch {
		case d.err != nil:
			return f
		case lines == 0 || lines > maxLines || f.lines+lines > maxLines:
			d.fail("run of no or too many lines")
			return f
		case owner >= uint64(len(used)) || owner == last:
			d.fail("run names no owner, or its neighbour's")
			return f
		}
		f.lines += lines
		used[owner] = true
		last = owner
	}
	if f.wholesale && (f.runs != 1 || f.lines != 1) {
		d.fail("wholesale file with more than one line")
	}
	f.data = d.data[start:d.at]
	return f
}
