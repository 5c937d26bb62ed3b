package wire

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Conn sends and receives packets on one end of a SEQPACKET socket. Any number
// of goroutines may send; one may receive.
type Conn struct {
	file *os.File
	raw  syscall.RawConn

	mu  sync.Mutex
	out []byte // guarded by mu

	limit   int
	in, oob []byte // the receiver's
}

// Pair makes a connected socket pair. Both ends are close-on-exec.
func Pair() (a, b int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, err
	}
	return fds[0], fds[1], nil
}

// NewConn takes over fd and makes it non-blocking, which every duplicate of
// that end sees. Packets of more than limit bytes are refused on receipt.
func NewConn(fd, limit int) (*Conn, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "control")
	if file == nil {
		return nil, unix.EBADF
	}
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &Conn{file: file, raw: raw, limit: limit}, nil
}

// Close ends the connection; a receive that waits returns an error.
func (c *Conn) Close() error { return c.file.Close() }

// Send sends one packet with the descriptors fds beside it. It waits while the
// other end's buffer is full.
func (c *Conn) Send(p Packet, fds ...int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out = Append(c.out[:0], p)
	if len(c.out) > MaxPacket || len(fds) > MaxFDs {
		return ErrFormat
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	var sent error
	err := c.raw.Write(func(fd uintptr) bool {
		for {
			sent = unix.Sendmsg(int(fd), c.out, rights, nil, unix.MSG_NOSIGNAL)
			if sent != unix.EINTR {
				return sent != unix.EAGAIN
			}
		}
	})
	if err != nil {
		return err
	}
	return sent
}

// Receive waits for one packet and the descriptors beside it, which become the
// caller's and are close-on-exec. It fails with io.EOF when the other end is
// closed, with ErrFormat or ErrVersion when the packet is not one of ours.
func (c *Conn) Receive() (Packet, []int, error) {
	if c.in == nil {
		c.in = make([]byte, c.limit)
		c.oob = make([]byte, unix.CmsgSpace(4*MaxFDs))
	}
	var n, oobn, flags int
	var got error
	err := c.raw.Read(func(fd uintptr) bool {
		for {
			n, oobn, flags, _, got = unix.Recvmsg(int(fd), c.in, c.oob, unix.MSG_CMSG_CLOEXEC)
			if got != unix.EINTR {
				return got != unix.EAGAIN
			}
		}
	})
	if err == nil {
		err = got
	}
	if err != nil {
		if errors.Is(err, unix.ECONNRESET) {
			err = io.EOF
		}
		return Packet{}, nil, err
	}
	fds, err := rights(c.oob[:oobn])
	if n == 0 && err == nil && len(fds) == 0 {
		return Packet{}, nil, io.EOF // no packet of ours is empty
	}
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = ErrFormat
	}
	var p Packet
	if err == nil {
		p, err = Parse(c.in[:n])
	}
	if err != nil {
		CloseAll(fds)
		return Packet{}, nil, err
	}
	return p, fds, nil
}

// rights takes the descriptors out of control messages. What it returns is to
// be closed even when it fails.
func rights(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, ErrFormat
	}
	var fds []int
	for i := range messages {
		list, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return fds, ErrFormat
		}
		fds = append(fds, list...)
	}
	return fds, nil
}

// CloseAll closes descriptors that came beside a packet.
func CloseAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
