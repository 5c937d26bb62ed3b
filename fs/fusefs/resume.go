package fusefs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// initState is what was agreed with the kernel when the connection began.
//
//	magic       4 bytes "ESFI"
//	version     1 byte
//	level       1 byte
//	maxWrite    4 bytes, little endian as all below
//	connection  4 bytes
//	in, out     2 bytes of length and the message, for the INIT request and its answer
//	crc32c      4 bytes, of everything above
type initState struct {
	level      TraceLevel
	maxWrite   uint32
	connection uint32 // tells this connection's requests from an earlier one's in the journal
	in, out    []byte
}

const (
	stateMagic   = "ESFI"
	stateVersion = 1
	maxInit      = 4096

	connectionBits = 20
)

// Sizes and numbers of the FUSE protocol.
const (
	inHeaderSize  = 40
	outHeaderSize = 16
	opInit        = 26

	notifyResend   = 7
	notifyIncEpoch = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (s *initState) encode() []byte {
	b := []byte(stateMagic)
	b = append(b, stateVersion, byte(s.level))
	b = binary.LittleEndian.AppendUint32(b, s.maxWrite)
	b = binary.LittleEndian.AppendUint32(b, s.connection)
	for _, m := range [][]byte{s.in, s.out} {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(m)))
		b = append(b, m...)
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

var errState = errors.New("INIT state is damaged")

func decodeState(b []byte) (initState, error) {
	const fixed = len(stateMagic) + 2 + 4 + 4
	if len(b) < fixed+2+2+4 || string(b[:len(stateMagic)]) != stateMagic {
		return initState{}, fmt.Errorf("%w: no magic", errState)
	}
	body := b[:len(b)-4]
	if crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(b[len(body):]) {
		return initState{}, fmt.Errorf("%w: checksum", errState)
	}
	if v := b[len(stateMagic)]; v != stateVersion {
		return initState{}, fmt.Errorf("INIT state has version %d, this program knows %d", v, stateVersion)
	}
	s := initState{
		level:      TraceLevel(b[5]),
		maxWrite:   binary.LittleEndian.Uint32(b[6:]),
		connection: binary.LittleEndian.Uint32(b[10:]),
	}
	rest := body[fixed:]
	for _, m := range []*[]byte{&s.in, &s.out} {
		if len(rest) < 2 {
			return initState{}, fmt.Errorf("%w: cut short", errState)
		}
		n := int(binary.LittleEndian.Uint16(rest))
		if len(rest) < 2+n || n > maxInit {
			return initState{}, fmt.Errorf("%w: message of %d bytes", errState, n)
		}
		*m, rest = bytes.Clone(rest[2:2+n]), rest[2+n:]
	}
	switch {
	case len(rest) > 0:
		return initState{}, fmt.Errorf("%w: %d bytes left over", errState, len(rest))
	case int(s.level) >= len(levelNames), s.maxWrite < minMaxWrite, s.maxWrite > maxMaxWrite, s.connection>>connectionBits != 0:
		return initState{}, fmt.Errorf("%w: out of range", errState)
	case !isInit(s.in) || len(s.out) < outHeaderSize:
		return initState{}, fmt.Errorf("%w: no INIT in it", errState)
	}
	return s, nil
}

// isInit reports whether b is an INIT request of a version that has flags.
func isInit(b []byte) bool {
	return len(b) >= inHeaderSize+16 && binary.LittleEndian.Uint32(b[4:]) == opInit &&
		int(binary.LittleEndian.Uint32(b)) == len(b)
}

// hasResend reports whether the kernel offered to send requests again.
func (s *initState) hasResend() bool {
	const flags2 = inHeaderSize + 16
	if len(s.in) < flags2+4 {
		return false
	}
	return uint64(binary.LittleEndian.Uint32(s.in[flags2:]))<<32&fuse.CAP_HAS_RESEND != 0
}

// negotiate has go-fuse answer INIT over a socket pair, and then puts the
// connection in the socket's place. For a new connection the request comes from
// the kernel and the answer goes back to it. For a resumed one both happened
// long ago: the request is the remembered one, and the answer, which the kernel
// goes by still, must come out the same.
func negotiate(st *initState, raw fuse.RawFileSystem, opts *fuse.MountOptions, fd int) (*fuse.Server, error) {
	// go-fuse reads with a thread of its own and cannot do with EAGAIN.
	if err := unix.SetNonblock(fd, false); err != nil {
		return nil, fmt.Errorf("fuse descriptor %d: %w", fd, err)
	}
	fresh := st.in == nil
	if fresh {
		in, err := readInit(fd)
		if err != nil {
			return nil, err
		}
		st.in = in
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket pair for INIT: %w", err)
	}
	ours := pair[0]
	defer unix.Close(ours)
	theirs, err := dupAbove(pair[1])
	unix.Close(pair[1])
	if err != nil {
		return nil, err
	}
	if _, err := unix.Write(ours, st.in); err != nil {
		unix.Close(theirs)
		return nil, fmt.Errorf("hand INIT to go-fuse: %w", err)
	}
	server, err := fuse.NewServer(raw, fmt.Sprintf("/dev/fd/%d", theirs), opts)
	if err != nil {
		return nil, fmt.Errorf("answer INIT: %w", err)
	}
	// From here on go-fuse owns theirs, by number.
	out := make([]byte, maxInit)
	n, err := unix.Read(ours, out)
	if err != nil {
		return nil, fmt.Errorf("take INIT's answer: %w", err)
	}
	out = out[:n]
	if fresh {
		st.out = out
		if _, err := unix.Write(fd, out); err != nil {
			return nil, fmt.Errorf("answer INIT: %w", err)
		}
	} else if !bytes.Equal(out, st.out) {
		return nil, errors.New("this program would agree on other things with the kernel than the one that made the connection")
	}
	if err := unix.Dup3(fd, theirs, unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("put the connection in place: %w", err)
	}
	return server, nil
}

// readInit takes the first request off a new connection.
func readInit(fd int) ([]byte, error) {
	buf := make([]byte, 128<<10)
	for {
		n, err := unix.Read(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EPERM):
			return nil, errors.New("read INIT: the descriptor is not mounted")
		case err != nil:
			return nil, fmt.Errorf("read INIT: %w", err)
		case !isInit(buf[:n]):
			return nil, errors.New("read INIT: the connection has begun already; resume it with its INIT state")
		}
		return bytes.Clone(buf[:n]), nil
	}
}

// takeOver tells the kernel that a new server is there: names are to be looked
// up once more, because the old one may have died between a change and its
// invalidation, and what the old one had read and not answered is sent again.
func takeOver(fd int, st *initState) error {
	// Kernels before 6.16 do not know this one and keep their entries.
	if err := notify(fd, notifyIncEpoch); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("start a new epoch: %w", err)
	}
	if !st.hasResend() {
		return nil
	}
	if err := notify(fd, notifyResend); err != nil {
		return fmt.Errorf("ask for unanswered requests: %w", err)
	}
	return nil
}

// notify sends a notification without a payload.
func notify(fd int, code uint32) error {
	b := binary.LittleEndian.AppendUint32(nil, outHeaderSize)
	b = binary.LittleEndian.AppendUint32(b, code)
	b = binary.LittleEndian.AppendUint64(b, 0)
	_, err := unix.Write(fd, b)
	return err
}
