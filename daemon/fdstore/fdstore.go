// Package fdstore keeps open file descriptors across the death of the process
// that uses them. A small parent holds duplicates of what its child, the
// daemon, has put there; when the child dies the parent starts another and
// hands everything over, so FUSE mounts and control sockets outlive a crash.
//
// The two ends are joined by a SOCK_SEQPACKET pair. One packet is one message:
//
//	byte 0      what it is: 'P' put, 'D' drop, 'I' item, 'E' end of handover
//	bytes 1-2   length of the key, big endian
//	key         1 to MaxKey bytes
//	meta        the rest, at most MaxMeta bytes, for put and item
//
// with the descriptors of a put or an item in its control message, at most
// MaxFiles. A new child first receives an item for each entry and then the end;
// from there on it sends puts and drops, and the parent sends nothing. A put
// replaces the entry of the same key. A message that was sent is not lost when
// the sender dies: it waits in the socket, and the parent reads to its end
// before it starts the next child.
//
// Keep has one goroutine per child; a Client may be used by many at once.
package fdstore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Bounds of a message.
const (
	MaxKey   = 255
	MaxMeta  = 64 << 10
	MaxFiles = 16
)

// maxEntries bounds what a runaway child can make its parent hold.
const maxEntries = 1 << 16

// EnvFD is the environment variable that tells a child the number of its end.
const EnvFD = "SANDBOXD_FDSTORE"

const (
	msgPut  = 'P'
	msgDrop = 'D'
	msgItem = 'I'
	msgEnd  = 'E'

	headerSize = 3
)

// Item is one entry: descriptors with the bytes that say what they are.
type Item struct {
	Key   string
	Meta  []byte
	Files []*os.File
}

// Close closes the item's descriptors.
func (i Item) Close() error {
	var all []error
	for _, f := range i.Files {
		all = append(all, f.Close())
	}
	return errors.Join(all...)
}

// Pair returns the two ends of a new store connection: the parent's, ready for
// Store.Serve, and the child's, to be inherited.
func Pair() (parent *net.UnixConn, child *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	child = os.NewFile(uintptr(fds[1]), "fdstore")
	parent, err = conn(os.NewFile(uintptr(fds[0]), "fdstore"))
	if err != nil {
		return nil, nil, errors.Join(err, child.Close())
	}
	return parent, child, nil
}

// conn turns f into a connection and closes f.
func conn(f *os.File) (*net.UnixConn, error) {
	c, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("descriptor store: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(errors.New("descriptor store: not a unix socket"), c.Close())
	}
	return u, nil
}

func encode(kind byte, key string, meta []byte) ([]byte, error) {
	switch {
	case kind != msgEnd && (key == "" || len(key) > MaxKey):
		return nil, fmt.Errorf("key of %d bytes: must have 1 to %d", len(key), MaxKey)
	case len(meta) > MaxMeta:
		return nil, fmt.Errorf("meta of %d bytes: must have at most %d", len(meta), MaxMeta)
	}
	b := make([]byte, 0, headerSize+len(key)+len(meta))
	b = append(b, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(key)))
	return append(append(b, key...), meta...), nil
}

func decode(b []byte) (kind byte, key string, meta []byte, err error) {
	if len(b) < headerSize {
		return 0, "", nil, fmt.Errorf("message of %d bytes: too short", len(b))
	}
	kind, n := b[0], int(binary.BigEndian.Uint16(b[1:]))
	rest := b[headerSize:]
	switch {
	case n > MaxKey || n > len(rest):
		return 0, "", nil, fmt.Errorf("message of %d bytes: key length %d is wrong", len(b), n)
	case len(rest)-n > MaxMeta:
		return 0, "", nil, fmt.Errorf("message of %d bytes: meta is over %d", len(b), MaxMeta)
	case kind == msgEnd && len(rest) > 0, kind == msgDrop && len(rest) > n:
		return 0, "", nil, fmt.Errorf("message %q: %d bytes too many", kind, len(rest)-n)
	case kind != msgEnd && n == 0:
		return 0, "", nil, fmt.Errorf("message %q: no key", kind)
	}
	return kind, string(rest[:n]), slices.Clone(rest[n:]), nil
}

// entry is an Item with bare descriptor numbers. The parent never wraps a
// stored descriptor in an os.File: a non-blocking one would then be watched by
// the runtime's poller, and wake the parent for every request the child serves.
type entry struct {
	key  string
	meta []byte
	fds  []int
}

func (e entry) close() error {
	var all []error
	for _, fd := range e.fds {
		all = append(all, unix.Close(fd))
	}
	return errors.Join(all...)
}

func (e entry) item() Item {
	i := Item{Key: e.key, Meta: e.meta}
	for _, fd := range e.fds {
		i.Files = append(i.Files, os.NewFile(uintptr(fd), e.key))
	}
	return i
}

func send(c *net.UnixConn, kind byte, e entry) error {
	b, err := encode(kind, e.key, e.meta)
	if err != nil {
		return err
	}
	if len(e.fds) > MaxFiles {
		return fmt.Errorf("%d descriptors: at most %d fit a message", len(e.fds), MaxFiles)
	}
	var oob []byte
	if len(e.fds) > 0 {
		oob = unix.UnixRights(e.fds...)
	}
	if _, _, err := c.WriteMsgUnix(b, oob, nil); err != nil {
		return err
	}
	return nil
}

// rawFD returns f's descriptor without os.File.Fd's change to blocking mode,
// which every duplicate would share.
func rawFD(f *os.File) (int, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd := -1
	if err := rc.Control(func(n uintptr) { fd = int(n) }); err != nil {
		return -1, err
	}
	return fd, nil
}

// receiver reads messages of one connection; not for concurrent use.
type receiver struct {
	c        *net.UnixConn
	buf, oob []byte
}

func newReceiver(c *net.UnixConn) *receiver {
	return &receiver{
		c:   c,
		buf: make([]byte, headerSize+MaxKey+MaxMeta+1),
		oob: make([]byte, unix.CmsgSpace(4*(MaxFiles+1))),
	}
}

// next returns io.EOF when the other end is closed. Descriptors that arrive
// with a malformed message are closed.
func (r *receiver) next() (kind byte, e entry, err error) {
	n, oobn, flags, _, err := r.c.ReadMsgUnix(r.buf, r.oob)
	if err != nil {
		return 0, entry{}, err
	}
	fds, err := descriptors(r.oob[:oobn])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("message is longer than the protocol allows")
	}
	if err == nil {
		kind, e.key, e.meta, err = decode(r.buf[:n])
	}
	if err == nil && len(fds) > 0 && kind != msgPut && kind != msgItem {
		err = fmt.Errorf("message %q carries descriptors", kind)
	}
	e.fds = fds
	if err != nil {
		return 0, entry{}, errors.Join(err, e.close())
	}
	return kind, e, nil
}

func descriptors(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parse control message: %w", err)
	}
	var all []int
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // credentials or the like: nothing to keep
		}
		all = append(all, fds...)
	}
	return all, nil
}

// Client is the daemon's end of a store.
type Client struct {
	c    *net.UnixConn
	gone chan struct{}
	wg   sync.WaitGroup

	mu sync.Mutex // one sender at a time
}

// Connect takes the child's end f, which it closes, and returns what an earlier
// child left in the store; the items are the caller's to close.
func Connect(f *os.File) (*Client, []Item, error) {
	c, err := conn(f)
	if err != nil {
		return nil, nil, err
	}
	var items []Item
	for r := newReceiver(c); ; {
		kind, e, err := r.next()
		if err == nil && kind == msgEnd {
			break
		}
		if err == nil && kind != msgItem {
			err = fmt.Errorf("unexpected message %q during handover", kind)
		}
		items = append(items, e.item())
		if err != nil {
			all := []error{fmt.Errorf("take over descriptors: %w", err)}
			for _, i := range items {
				all = append(all, i.Close())
			}
			return nil, nil, errors.Join(append(all, c.Close())...)
		}
	}
	cl := &Client{c: c, gone: make(chan struct{})}
	cl.wg.Go(cl.watch)
	return cl, items, nil
}

// watch ends when the parent is gone: it sends nothing after the handover.
func (c *Client) watch() {
	defer close(c.gone)
	for r := newReceiver(c.c); ; {
		_, e, err := r.next()
		if err != nil {
			return
		}
		_ = e.close() // out of protocol; nothing waits for it
	}
}

// Put stores duplicates of files under key, in place of what was there. When it
// returns nil the entry survives the caller.
func (c *Client) Put(key string, meta []byte, files ...*os.File) error {
	e := entry{key: key, meta: meta}
	for _, f := range files {
		fd, err := rawFD(f)
		if err != nil {
			return fmt.Errorf("store descriptors of %s: %w", key, err)
		}
		e.fds = append(e.fds, fd)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := send(c.c, msgPut, e); err != nil {
		return fmt.Errorf("store descriptors of %s: %w", key, err)
	}
	return nil
}

// Drop forgets key; a key that is not there is no error.
func (c *Client) Drop(key string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := send(c.c, msgDrop, entry{key: key}); err != nil {
		return fmt.Errorf("drop descriptors of %s: %w", key, err)
	}
	return nil
}

// Gone is closed when the parent has died or closed its end.
func (c *Client) Gone() <-chan struct{} { return c.gone }

// Close ends the connection and leaves the entries with the parent.
func (c *Client) Close() error {
	err := c.c.Close()
	c.wg.Wait()
	return err
}

// Store is the parent's set of entries.
type Store struct {
	mu    sync.Mutex
	items map[string]entry // guarded by mu
	order []string         // guarded by mu; keys in order of their first put
}

// NewStore returns an empty store.
func NewStore() *Store { return &Store{items: map[string]entry{}} }

// Serve hands every entry over to the child at the other end of c, then keeps
// what the child puts until the child's end is closed, and closes c. It returns
// nil then, and an error when the child breaks the protocol.
func (s *Store) Serve(c *net.UnixConn) (err error) {
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := s.handOver(c); err != nil {
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
			return nil // the child died before it took everything
		}
		return fmt.Errorf("hand descriptors over: %w", err)
	}
	for r := newReceiver(c); ; {
		kind, e, err := r.next()
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return nil
		}
		if err == nil {
			err = s.apply(kind, e)
		}
		if err != nil {
			return fmt.Errorf("descriptor store: %w", err)
		}
	}
}

func (s *Store) handOver(c *net.UnixConn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range s.order {
		if err := send(c, msgItem, s.items[key]); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return send(c, msgEnd, entry{})
}

func (s *Store) apply(kind byte, e entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, had := s.items[e.key]
	switch kind {
	case msgPut:
		if !had && len(s.items) >= maxEntries {
			return errors.Join(fmt.Errorf("more than %d entries", maxEntries), e.close())
		}
		s.items[e.key] = e
		if !had {
			s.order = append(s.order, e.key)
		}
	case msgDrop:
		delete(s.items, e.key)
		s.order = slices.DeleteFunc(s.order, func(k string) bool { return k == e.key })
	default:
		return errors.Join(fmt.Errorf("unexpected message %q", kind), e.close())
	}
	_ = old.close() // duplicates: an error of close(2) loses nothing
	return nil
}

// Keys returns the keys in order of their first put.
func (s *Store) Keys() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.order)
}

// Close closes every descriptor in the store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []error
	for _, e := range s.items {
		all = append(all, e.close())
	}
	s.items, s.order = map[string]entry{}, nil
	return errors.Join(all...)
}
