package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"
	"time"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/layerfmt"
)

// CommitMeta is what a commit says about itself.
type CommitMeta struct {
	Session   string           // id of the session that published it, "" for none
	Operation string           // id of the operation that published it
	RequestID string           // the client's name for the request, "" for none
	Message   string           // free text
	Time      time.Time        // when the gate accepted it, kept in UTC
	Merged    []string         // paths whose text was merged with the head's
	Counts    map[string]int64 // whatever the gate counts
}

// Commit is one accepted layer.
type Commit struct {
	Number       uint64
	Parent       [32]byte // digest of commit Number-1, zero for commit 0
	Digest       [32]byte // SHA-256 of this commit's record
	Pack         layerfmt.PackID
	Inline       bool  // the pack lies in the record itself
	StoredBytes  int64 // length of the pack
	LogicalBytes int64 // sizes of the files whose bytes are in the pack
	CommitMeta
}

// CommitName is the name a commit is shown under, "L000024".
func CommitName(n uint64) string { return fmt.Sprintf("L%06d", n) }

// ParseCommit reads the form that CommitName writes, tree.ErrInvalid otherwise.
func ParseCommit(s string) (uint64, error) {
	digits, ok := strings.CutPrefix(s, "L")
	n, err := strconv.ParseUint(digits, 10, 64)
	if !ok || err != nil || CommitName(n) != s {
		return 0, fmt.Errorf("commit %q: want the form L000024: %w", s, tree.ErrInvalid)
	}
	return n, nil
}

// A record is the unit of the commit log. Integers are little endian.
//
//	 0  u32  magic "ESCR"
//	 4  u32  length of the record, a multiple of 8
//	 8  u64  commit number
//	16  32   digest of the record before it, zero for number 0
//	48  u16  version, 1
//	50  u16  flags: 1 = the pack follows the fields
//	52  u32  length of the fields
//	56  u32  length of the pack
//	60  u32  crc32c of bytes 0 to 60
//	64       fields: each a uvarint tag, a uvarint length and that many bytes
//	         the pack
//	         zeros up to the last 4 bytes
//	-4  u32  crc32c of everything before it
//
// Readers skip fields whose tag they do not know.
const (
	recordMagic   = 0x52435345
	recordVersion = 1
	recordHeader  = 64
	recordAlign   = 8
	recordMax     = 256 << 20
	flagInline    = 1
)

// Tags of a record's fields. Merged and count may be repeated.
const (
	tagPack = iota + 1
	tagStored
	tagLogical
	tagMaxIno
	tagSession
	tagOperation
	tagRequest
	tagMessage
	tagSeconds
	tagNanoseconds
	tagMerged
	tagCount
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// record is a decoded record. Commit.Digest is that of the bytes it came from.
type record struct {
	Commit
	maxIno tree.Ino // highest inode number named in the pack
	pack   []byte   // the pack of an inline commit
}

// encode returns the record's bytes and sets its digest. Equal records give
// equal bytes.
func (r *record) encode() ([]byte, error) {
	fields := r.encodeFields()
	length := recordHeader + len(fields) + len(r.pack) + 4
	length = (length + recordAlign - 1) / recordAlign * recordAlign
	if length > recordMax {
		return nil, fmt.Errorf("commit record of %d bytes, at most %d: %w", length, recordMax, tree.ErrTooBig)
	}
	b := make([]byte, length)
	h := header{
		length: length, number: r.Number, parent: r.Parent,
		inline: r.Inline, fields: len(fields), pack: len(r.pack),
	}
	h.encode(b)
	copy(b[recordHeader:], fields)
	copy(b[recordHeader+len(fields):], r.pack)
	binary.LittleEndian.PutUint32(b[length-4:], crc32.Checksum(b[:length-4], crcTable))
	r.Digest = sha256.Sum256(b)
	return b, nil
}

func (r *record) encodeFields() []byte {
	var b []byte
	put := func(tag uint64, value []byte) {
		b = binary.AppendUvarint(b, tag)
		b = binary.AppendUvarint(b, uint64(len(value)))
		b = append(b, value...)
	}
	text := func(tag uint64, value string) {
		if value != "" {
			put(tag, []byte(value))
		}
	}
	put(tagPack, r.Pack[:])
	put(tagStored, binary.AppendUvarint(nil, uint64(r.StoredBytes)))
	put(tagLogical, binary.AppendUvarint(nil, uint64(r.LogicalBytes)))
	put(tagMaxIno, binary.AppendUvarint(nil, uint64(r.maxIno)))
	text(tagSession, r.Session)
	text(tagOperation, r.Operation)
	text(tagRequest, r.RequestID)
	text(tagMessage, r.Message)
	if !r.Time.IsZero() {
		put(tagSeconds, binary.AppendVarint(nil, r.Time.Unix()))
		put(tagNanoseconds, binary.AppendUvarint(nil, uint64(r.Time.Nanosecond())))
	}
	for _, path := range r.Merged {
		put(tagMerged, []byte(path))
	}
	names := make([]string, 0, len(r.Counts))
	for name := range r.Counts {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		put(tagCount, append(binary.AppendVarint(nil, r.Counts[name]), name...))
	}
	return b
}

// header is the fixed start of a record.
type header struct {
	length int
	number uint64
	parent [32]byte
	inline bool
	fields int
	pack   int
}

func (h header) encode(b []byte) {
	le := binary.LittleEndian
	le.PutUint32(b, recordMagic)
	le.PutUint32(b[4:], uint32(h.length))
	le.PutUint64(b[8:], h.number)
	copy(b[16:], h.parent[:])
	le.PutUint16(b[48:], recordVersion)
	if h.inline {
		le.PutUint16(b[50:], flagInline)
	}
	le.PutUint32(b[52:], uint32(h.fields))
	le.PutUint32(b[56:], uint32(h.pack))
	le.PutUint32(b[60:], crc32.Checksum(b[:60], crcTable))
}

// What a record is refused for.
var (
	errNoRecord     = errors.New("no record header")
	errHeaderSum    = errors.New("header checksum does not match")
	errHeaderLength = errors.New("lengths in the header do not add up")
	errRecordSum    = errors.New("checksum does not match")
)

// decodeHeader reads the first recordHeader bytes of b.
func decodeHeader(b []byte) (header, error) {
	le := binary.LittleEndian
	if len(b) < recordHeader || le.Uint32(b) != recordMagic {
		return header{}, errNoRecord
	}
	if le.Uint32(b[60:]) != crc32.Checksum(b[:60], crcTable) {
		return header{}, errHeaderSum
	}
	if v := le.Uint16(b[48:]); v != recordVersion {
		return header{}, fmt.Errorf("record version %d, this program reads %d", v, recordVersion)
	}
	length, fields, pack := le.Uint32(b[4:]), le.Uint32(b[52:]), le.Uint32(b[56:])
	used := uint64(recordHeader) + uint64(fields) + uint64(pack) + 4
	if length > recordMax || length%recordAlign != 0 || used > uint64(length) || used+recordAlign <= uint64(length) {
		return header{}, errHeaderLength
	}
	flags := le.Uint16(b[50:])
	if flags&^flagInline != 0 {
		return header{}, fmt.Errorf("unknown record flags %#x", flags)
	}
	h := header{
		length: int(length), number: le.Uint64(b[8:]), inline: flags == flagInline,
		fields: int(fields), pack: int(pack),
	}
	if !h.inline && h.pack != 0 {
		return header{}, errHeaderLength
	}
	copy(h.parent[:], b[16:48])
	return h, nil
}

// decodeRecord reads one whole record. The pack aliases b.
func decodeRecord(b []byte) (record, error) {
	h, err := decodeHeader(b)
	if err != nil {
		return record{}, err
	}
	if h.length != len(b) {
		return record{}, errHeaderLength
	}
	if binary.LittleEndian.Uint32(b[len(b)-4:]) != crc32.Checksum(b[:len(b)-4], crcTable) {
		return record{}, errRecordSum
	}
	r := record{}
	r.Number, r.Parent, r.Inline = h.number, h.parent, h.inline
	r.Digest = sha256.Sum256(b)
	if err := r.decodeFields(b[recordHeader : recordHeader+h.fields]); err != nil {
		return record{}, err
	}
	if r.Inline {
		r.pack = b[recordHeader+h.fields : recordHeader+h.fields+h.pack]
		if int64(len(r.pack)) != r.StoredBytes {
			return record{}, fmt.Errorf("pack of %d bytes in the record, %d by its fields", len(r.pack), r.StoredBytes)
		}
	}
	padding := b[recordHeader+h.fields+h.pack : len(b)-4]
	if !allZero(padding) {
		return record{}, errors.New("padding is not zero")
	}
	return r, nil
}

func (r *record) decodeFields(b []byte) error {
	var seconds int64
	var nanoseconds uint64
	for len(b) > 0 {
		tag, value, rest, err := cutField(b)
		if err != nil {
			return err
		}
		b = rest
		switch tag {
		case tagPack:
			if len(value) != len(r.Pack) {
				return fmt.Errorf("pack id of %d bytes", len(value))
			}
			copy(r.Pack[:], value)
		case tagStored:
			r.StoredBytes, err = sizeField(value)
		case tagLogical:
			r.LogicalBytes, err = sizeField(value)
		case tagMaxIno:
			var ino uint64
			ino, err = uintField(value)
			r.maxIno = tree.Ino(ino)
		case tagSession:
			r.Session = string(value)
		case tagOperation:
			r.Operation = string(value)
		case tagRequest:
			r.RequestID = string(value)
		case tagMessage:
			r.Message = string(value)
		case tagSeconds:
			n := 0
			if seconds, n = binary.Varint(value); n != len(value) || n == 0 {
				err = errors.New("malformed time")
			}
		case tagNanoseconds:
			if nanoseconds, err = uintField(value); err == nil && nanoseconds >= 1e9 {
				err = errors.New("malformed time")
			}
			r.Time = time.Unix(seconds, int64(nanoseconds)).UTC()
		case tagMerged:
			r.Merged = append(r.Merged, string(value))
		case tagCount:
			count, n := binary.Varint(value)
			if n <= 0 {
				return errors.New("malformed count")
			}
			if r.Counts == nil {
				r.Counts = make(map[string]int64)
			}
			r.Counts[string(value[n:])] = count
		}
		if err != nil {
			return fmt.Errorf("field %d: %w", tag, err)
		}
	}
	return nil
}

func cutField(b []byte) (tag uint64, value, rest []byte, err error) {
	tag, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, nil, errors.New("malformed field tag")
	}
	b = b[n:]
	size, n := binary.Uvarint(b)
	if n <= 0 || size > uint64(len(b)-n) {
		return 0, nil, nil, fmt.Errorf("field %d: malformed length", tag)
	}
	b = b[n:]
	return tag, b[:size], b[size:], nil
}

func uintField(value []byte) (uint64, error) {
	v, n := binary.Uvarint(value)
	if n <= 0 || n != len(value) {
		return 0, errors.New("malformed number")
	}
	return v, nil
}

func sizeField(value []byte) (int64, error) {
	v, err := uintField(value)
	if err == nil && v > 1<<62 {
		err = errors.New("number out of range")
	}
	return int64(v), err
}

func allZero(b []byte) bool {
	return len(bytes.TrimLeft(b, "\x00")) == 0
}
