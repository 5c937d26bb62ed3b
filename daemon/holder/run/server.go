package run

import (
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/wire"
)

// maxCommands bounds what the holder remembers: running commands, and ended
// ones that the daemon has not acknowledged.
const maxCommands = 1 << 16

// maxForgotten is how many acknowledged ids are remembered, so that a request
// that is repeated late does not run a command twice.
const maxForgotten = 4096

// stubPacket bounds a packet from a stub.
const stubPacket = 1024

// server is the holder once its root stands: it forks stubs, reaps, kills and
// reports. What a stub or the daemon says is checked before it is believed.
type server struct {
	conn  *wire.Conn
	setup wire.Setup
	null  int
	proc  int

	mu        sync.Mutex
	reaped    *sync.Cond          // on mu; some child has been reaped
	commands  map[string]*command // guarded by mu
	stubs     map[int]*command    // guarded by mu; by inner pid of the stub, until reaped
	forgotten map[string]bool     // guarded by mu
	order     []string            // guarded by mu; forgotten ids, oldest first

	sync chan uint64 // sequence numbers of Sync requests
}

// command is one command's record. All but reaped is guarded by server.mu.
type command struct {
	id      string
	stub    int
	pid     uint32 // 0 until it runs
	waiting []uint64
	failure *wire.Failed // why it never ran
	exit    *wire.Exited
	acked   bool
	gone    bool
	told    bool // an adopting daemon heard of it before it ran

	clean  bool          // the stub ended as it should
	reaped chan struct{} // closed when the stub has been
}

func newServer(conn *wire.Conn, setup wire.Setup) (*server, error) {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, at("open", "/dev/null", err)
	}
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, at("open", "/proc", err)
	}
	s := &server{
		conn: conn, setup: setup, null: null, proc: proc,
		commands:  make(map[string]*command),
		stubs:     make(map[int]*command),
		forgotten: make(map[string]bool),
		sync:      make(chan uint64, 16),
	}
	s.reaped = sync.NewCond(&s.mu)
	return s, nil
}

// serve answers the daemon until its end of the socket is gone, and then ends
// the process: the kernel takes everything in the pid namespace along. It must
// run on the hardened thread, because it forks.
func (s *server) serve() {
	go s.reap()
	go s.syncLoop()
	for {
		packet, fds, err := s.conn.Receive()
		if err != nil {
			os.Exit(0)
		}
		switch b := packet.Body.(type) {
		case wire.Exec:
			s.exec(packet.Seq, b.ID, fds)
		case wire.Kill:
			go s.kill(packet.Seq, b)
		case wire.Ack:
			s.ack(b.ID)
		case wire.Sync:
			select {
			case s.sync <- packet.Seq:
			default:
				s.reply(packet.Seq, unix.EBUSY)
			}
		case wire.Resync:
			s.resync(packet.Seq)
		default:
			os.Exit(1)
		}
		wire.CloseAll(fds)
	}
}

func (s *server) send(seq uint64, b wire.Body, fds ...int) {
	// A failure means that the daemon's end is gone; serve sees that too.
	s.conn.Send(wire.Packet{Seq: seq, Body: b}, fds...)
}

func (s *server) reply(seq uint64, err error) {
	s.send(seq, wire.Reply{Errno: errnoOf(err)})
}

// exec starts a command, unless its id is known: then it answers with what has
// become of it.
func (s *server) exec(seq uint64, id string, fds []int) {
	s.mu.Lock()
	known, again := s.commands[id]
	switch {
	case again && known.pid == 0:
		known.waiting = append(known.waiting, seq)
		s.mu.Unlock()
		return
	case again:
		answer := known.answer()
		s.mu.Unlock()
		s.send(seq, answer)
		return
	case s.forgotten[id]:
		s.mu.Unlock()
		s.send(seq, wire.Failed{Step: "start once more", Errno: uint16(unix.EALREADY), Text: id})
		return
	case len(s.commands) >= maxCommands:
		s.mu.Unlock()
		s.send(seq, wire.Failed{Step: "remember another", Errno: uint16(unix.EAGAIN), Text: id})
		return
	}
	c, status, err := s.forkLocked(id, fds)
	if err != nil {
		s.mu.Unlock()
		s.send(seq, failed(err))
		return
	}
	c.waiting = append(c.waiting, seq)
	s.mu.Unlock()
	go s.watch(c, status)
}

// forkLocked starts a stub. It holds the lock from the fork until the stub is
// in the table, so that the reaper and the sweep never see one that is not.
func (s *server) forkLocked(id string, fds []int) (*command, *wire.Conn, error) {
	if len(fds) != 4 {
		return nil, nil, at("take the descriptors of", id, unix.EINVAL)
	}
	ours, theirs, err := wire.Pair()
	if err != nil {
		return nil, nil, at("make a socket for", id, err)
	}
	defer unix.Close(theirs)
	status, err := wire.NewConn(ours, stubPacket)
	if err != nil {
		unix.Close(ours)
		return nil, nil, at("make a socket for", id, err)
	}
	files := []uintptr{uintptr(s.null), uintptr(s.null), uintptr(s.null), uintptr(theirs)}
	for _, fd := range fds {
		files = append(files, uintptr(fd))
	}
	stub, err := syscall.ForkExec(self, []string{Name, ModeStub, id}, &syscall.ProcAttr{
		Dir: "/", Env: []string{}, Files: files,
	})
	if err != nil {
		status.Close()
		return nil, nil, at("fork a stub for", id, err)
	}
	c := &command{id: id, stub: stub, reaped: make(chan struct{})}
	s.commands[id] = c
	s.stubs[stub] = c
	return c, status, nil
}

// watch follows one stub to its end.
func (s *server) watch(c *command, status *wire.Conn) {
	for {
		packet, fds, err := status.Receive()
		wire.CloseAll(fds)
		if err != nil {
			break
		}
		s.heard(c, packet.Body)
	}
	status.Close()
	<-c.reaped
	s.finish(c)
}

// heard takes in one report of a stub.
func (s *server) heard(c *command, body wire.Body) {
	s.mu.Lock()
	var tell wire.Body
	switch b := body.(type) {
	case wire.Started:
		if c.pid == 0 && c.failure == nil && b.Pid != 0 {
			c.pid = b.Pid
		}
	case wire.Failed:
		if c.pid == 0 && c.failure == nil {
			c.failure = &b
			s.dropLocked(c)
		}
	case wire.Exited:
		if c.pid != 0 && c.exit == nil {
			b.ID, b.Lost = c.id, false
			c.exit = &b
			tell = b
		}
	}
	waiting, answer := c.takeWaiting()
	s.mu.Unlock()
	for _, seq := range waiting {
		s.send(seq, answer)
	}
	if tell != nil {
		s.send(0, tell)
	}
}

// answer is what an Exec of the command is answered with, once that is known.
func (c *command) answer() wire.Body {
	if c.failure != nil {
		return *c.failure
	}
	return wire.Started{ID: c.id, Stub: uint32(c.stub), Pid: c.pid}
}

// takeWaiting takes the requests that can be answered now. The caller holds
// server.mu.
func (c *command) takeWaiting() ([]uint64, wire.Body) {
	if c.pid == 0 && c.failure == nil {
		return nil, nil
	}
	waiting := c.waiting
	c.waiting = nil
	return waiting, c.answer()
}

// finish closes the books of a command whose stub is reaped. A stub that was
// killed from inside has lost its command's processes to pid 1; they end here,
// because nobody could say any more whose they are.
func (s *server) finish(c *command) {
	s.mu.Lock()
	clean := c.clean
	s.mu.Unlock()
	if !clean {
		killAll(s.orphans)
	}

	s.mu.Lock()
	ran := c.pid != 0
	if !ran && c.failure == nil {
		c.failure = &wire.Failed{Step: "start", Errno: uint16(unix.ECHILD), Text: "the command: its stub was killed"}
		s.dropLocked(c)
	}
	var lost wire.Body
	if ran && c.exit == nil {
		c.exit = &wire.Exited{ID: c.id, Status: uint32(unix.SIGKILL), Lost: true}
		lost = *c.exit
	}
	told := c.told
	waiting, answer := c.takeWaiting()
	s.mu.Unlock()
	for _, seq := range waiting {
		s.send(seq, answer)
	}
	if lost != nil {
		s.send(0, lost)
	}
	if !ran {
		if told {
			s.send(0, wire.Gone{ID: c.id})
		}
		return
	}

	if !clean {
		s.awaitOrphans()
	}
	s.mu.Lock()
	c.gone = true
	if c.acked {
		s.forgetLocked(c)
	}
	s.mu.Unlock()
	s.send(0, wire.Gone{ID: c.id})
}

// orphans picks what is beneath pid 1 but beneath no stub.
func (s *server) orphans(l listing) []process {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := l.descendants(s.orphanLocked)
	for p, st := range l.all {
		if s.orphanLocked(p, st) {
			found = append(found, p)
		}
	}
	return found
}

func (s *server) orphanLocked(p process, st Stat) bool {
	return st.Parent == 1 && s.stubs[int(p.pid)] == nil
}

// awaitOrphans waits until killed orphans are reaped.
func (s *server) awaitOrphans() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		l, err := processes()
		if err != nil {
			return
		}
		left := false
		for p, st := range l.all {
			left = left || s.orphanLocked(p, st)
		}
		if !left {
			return
		}
		s.reaped.Wait()
	}
}

func (s *server) ack(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.commands[id]
	if c == nil || c.exit == nil {
		return
	}
	c.acked = true
	if c.gone {
		s.forgetLocked(c)
	}
}

// dropLocked forgets a command that never ran: its id may be tried again.
func (s *server) dropLocked(c *command) {
	if s.commands[c.id] == c {
		delete(s.commands, c.id)
	}
}

// forgetLocked forgets a command that has run, but for its id.
func (s *server) forgetLocked(c *command) {
	delete(s.commands, c.id)
	if len(s.order) >= maxForgotten {
		delete(s.forgotten, s.order[0])
		s.order = s.order[1:]
	}
	s.forgotten[c.id] = true
	s.order = append(s.order, c.id)
}

// kill signals all of a command but its stub, which has to see the end of it.
func (s *server) kill(seq uint64, k wire.Kill) {
	s.mu.Lock()
	c := s.commands[k.ID]
	s.mu.Unlock()
	if c == nil {
		s.reply(seq, unix.ESRCH)
		return
	}
	pick := func(l listing) []process {
		select {
		case <-c.reaped:
			return nil // all of it has ended
		default:
			return l.descendants(func(p process, _ Stat) bool { return int(p.pid) == c.stub })
		}
	}
	sig := unix.Signal(k.Signal)
	var err error
	if sig == unix.SIGKILL {
		err = killAll(pick)
	} else {
		var l listing
		l, err = processes()
		for _, p := range pick(l) {
			unix.Kill(int(p.pid), sig)
		}
	}
	s.reply(seq, err)
}

// reap waits for children: stubs, and orphans of stubs that were killed.
func (s *server) reap() {
	dead := make(chan os.Signal, 1)
	signal.Notify(dead, unix.SIGCHLD)
	for {
		for s.reapOne() {
		}
		<-dead
	}
}

// reapOne reaps one child and reports whether there may be more. Wait and table
// are one step under the lock: a pid that is still in the table is not yet
// free for another process. A stub that its command has stopped goes on.
func (s *server) reapOne() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var status unix.WaitStatus
	pid, err := unix.Wait4(-1, &status, unix.WNOHANG|unix.WUNTRACED, nil)
	if err == unix.EINTR {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	c := s.stubs[pid]
	if status.Stopped() {
		if c != nil {
			unix.Kill(pid, unix.SIGCONT)
		}
		return true
	}
	if c != nil {
		delete(s.stubs, pid)
		c.clean = status.Exited() && status.ExitStatus() == 0
		close(c.reaped)
	}
	s.reaped.Broadcast()
	return true
}

// resync tells a new daemon everything that is not forgotten.
func (s *server) resync(seq uint64) {
	s.mu.Lock()
	var tell []wire.Body
	for _, c := range s.commands {
		c.told = c.pid == 0 // if it fails yet, Gone will say so
		tell = append(tell, c.answer())
		if c.exit != nil {
			tell = append(tell, *c.exit)
		}
		if c.gone {
			tell = append(tell, wire.Gone{ID: c.id})
		}
	}
	s.mu.Unlock()
	for _, b := range tell {
		s.send(0, b)
	}
	s.send(seq, wire.Reply{}, s.proc)
}

// syncLoop flushes the view, one request at a time: each may wait for the
// daemon's file system, and only this goroutine may.
func (s *server) syncLoop() {
	for seq := range s.sync {
		s.reply(seq, s.syncView())
	}
}

func (s *server) syncView() error {
	fd, err := unix.Open(s.setup.Workspace, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Syncfs(fd)
}
