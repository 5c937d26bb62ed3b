package holder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/run"
	"ephemeral-sandbox/daemon/holder/wire"
)

// controlLimit bounds a packet from a holder.
const controlLimit = 16 << 10

// Start makes a session's namespaces and mounts its view. FuseFD is valid when
// it returns, and requests may be queueing on it; the root tree is being
// finished meanwhile, see Ready. Of the ways to map ids it takes the best that
// works here. A failure names the step, and the host's switch where one is to
// blame.
func Start(ctx context.Context, c Config) (*Holder, error) {
	c = c.withDefaults()
	if err := c.validate(); err != nil {
		return nil, err
	}
	binds, err := c.binds()
	if err != nil {
		return nil, err
	}
	if c.Binary == nil {
		if c.Binary, err = OpenBinary(); err != nil {
			return nil, err
		}
		defer c.Binary.Close()
	}
	for _, m := range idmaps(c) {
		var h *Holder
		if h, err = launch(ctx, c, m, binds); err == nil {
			return h, nil
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, fmt.Errorf("start the holder of session %s: %w", c.Session, explain(err))
}

// launch starts a holder under one id map and brings it to the point where the
// view is mounted.
func launch(ctx context.Context, c Config, m idmap, binds []wire.Bind) (*Holder, error) {
	began := time.Now()
	setup := wire.Setup{
		Session: c.Session, Workspace: c.Workspace, Home: c.Home,
		Scratch: c.ScratchBytes,
		NewNet:  c.Network == "none", NoView: c.NoView, MultiID: m.name != mapSingle,
	}
	fds, err := hostFDs(c, m, binds, &setup)
	defer wire.CloseAll(fds)
	if err != nil {
		return nil, err
	}
	taken := time.Now()

	ctl, theirs, err := wire.Pair()
	if err != nil {
		return nil, fmt.Errorf("make the control socket: %w", err)
	}
	pid, pfd, err := fork(c, m, theirs)
	unix.Close(theirs)
	if err != nil {
		unix.Close(ctl)
		return nil, err
	}
	conn, err := wire.NewConn(ctl, controlLimit)
	if err != nil {
		unix.Close(ctl)
		pfd.end()
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { pfd.signal(unix.SIGKILL) })
	started, err := startTime(pid)
	h := newHolder(conn, ctl, pfd, State{
		Pid: pid, Started: started, Mapping: m.name,
		Workspace: c.Workspace, Home: c.Home, Processes: c.MaxProcesses,
	})
	forked := time.Now()
	if err == nil {
		err = h.handshake(m, setup, fds)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		conn.Close()
		pfd.end()
		h.closeFuse()
		h.closeProc()
		return nil, err
	}
	h.stages = []Stage{
		{"host", taken.Sub(began)}, {"fork", forked.Sub(taken)}, {"mounted", time.Since(forked)},
	}
	h.run()
	return h, nil
}

// hostFDs opens what the daemon has to open on the holder's behalf, because
// ids of a range reach nothing of root's: the fuse node, and host paths. The
// descriptors are the caller's even on failure.
func hostFDs(c Config, m idmap, binds []wire.Bind, setup *wire.Setup) (fds []int, err error) {
	if m.name != mapRange {
		setup.Binds = binds
		return nil, nil
	}
	if !c.NoView {
		node, err := fuseNode(c.RuntimeDir)
		if err != nil {
			return nil, err
		}
		fds = append(fds, node)
		setup.FuseNode = true
	}
	for _, b := range binds {
		if b.Link == "" {
			tree, err := run.TakeTree(b.Path)
			if err != nil {
				return fds, &StepError{"bind", b.Path, err}
			}
			fds = append(fds, tree)
			b.Mount = true
		}
		setup.Binds = append(setup.Binds, b)
	}
	return fds, nil
}

// fork clones the holder's process into its namespaces.
func fork(c Config, m idmap, control int) (int, *pidfd, error) {
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, nil, fmt.Errorf("open %s: %w", os.DevNull, err)
	}
	defer unix.Close(null)
	fd := -1
	sys := &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC |
			unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		Setsid: true,
		PidFD:  &fd,
	}
	if c.Network == "none" {
		sys.Cloneflags |= unix.CLONE_NEWNET
	}
	m.attr(sys)
	mode := run.ModeInit
	if m.late() {
		mode = run.ModeRemap
	}
	// The environment is empty: session code may see what pid 1 was given.
	pid, err := syscall.ForkExec(c.Binary.path, []string{run.Name, mode}, &syscall.ProcAttr{
		Dir: "/", Env: []string{}, Sys: sys,
		Files: []uintptr{uintptr(null), uintptr(null), 2, uintptr(control)},
	})
	if err != nil {
		return 0, nil, &StepError{"create", "namespaces with a " + m.name + " id map", err}
	}
	if fd < 0 {
		if fd, err = unix.PidfdOpen(pid, 0); err != nil {
			unix.Kill(pid, unix.SIGKILL)
			unix.Wait4(pid, nil, 0, nil)
			return 0, nil, fmt.Errorf("open a pidfd: %w", err)
		}
	}
	pfd, err := newPidfd(fd, pid)
	if err != nil {
		unix.Kill(pid, unix.SIGKILL)
		unix.Wait4(pid, nil, 0, nil)
		return 0, nil, err
	}
	return pid, pfd, nil
}

// handshake sends the configuration and receives the view's descriptor.
func (h *Holder) handshake(m idmap, setup wire.Setup, fds []int) error {
	if m.late() {
		if err := m.write(h.Pid()); err != nil {
			return err
		}
		if err := h.conn.Send(wire.Packet{Body: wire.Mapped{}}); err != nil {
			return fmt.Errorf("tell the holder that its ids are mapped: %w", err)
		}
	}
	if err := h.conn.Send(wire.Packet{Body: setup}, fds...); err != nil {
		return fmt.Errorf("send the holder its configuration: %w", err)
	}
	p, got, err := h.conn.Receive()
	if err != nil {
		return fmt.Errorf("wait for the view to be mounted: %w", err)
	}
	switch b := p.Body.(type) {
	case wire.Failed:
		wire.CloseAll(got)
		return stepError(b)
	case wire.Mounted:
		want := 2
		if setup.NoView {
			want = 1
		}
		if len(got) != want {
			wire.CloseAll(got)
			return fmt.Errorf("wait for the view to be mounted: %w", wire.ErrFormat)
		}
		h.proc = got[0]
		if !setup.NoView {
			h.fuse = got[1]
		}
		return nil
	}
	wire.CloseAll(got)
	return fmt.Errorf("wait for the view to be mounted: %w", wire.ErrFormat)
}

// Adopt takes back a holder that another daemon started: control and fuse are
// descriptors that the fd store kept, fuse -1 without a view. Both become the
// Holder's when Adopt succeeds. Exits that happened meanwhile are known when
// it returns, and so are running commands.
func Adopt(ctx context.Context, control, fuse int, s State) (*Holder, error) {
	fd, err := unix.PidfdOpen(s.Pid, 0)
	if err != nil {
		return nil, fmt.Errorf("adopt holder %d: %w: %w", s.Pid, ErrEnded, err)
	}
	pfd, err := newPidfd(fd, s.Pid)
	if err != nil {
		return nil, fmt.Errorf("adopt holder %d: %w", s.Pid, err)
	}
	// Only now, with the pid held, does its start time prove anything.
	if started, err := startTime(s.Pid); err != nil || started != s.Started {
		pfd.close()
		return nil, fmt.Errorf("adopt holder %d: %w", s.Pid, ErrEnded)
	}
	own, err := unix.FcntlInt(uintptr(control), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		pfd.close()
		return nil, fmt.Errorf("adopt holder %d: %w", s.Pid, err)
	}
	conn, err := wire.NewConn(own, controlLimit)
	if err != nil {
		unix.Close(own)
		pfd.close()
		return nil, fmt.Errorf("adopt holder %d: %w", s.Pid, err)
	}
	h := newHolder(conn, own, pfd, s)
	h.adopting = true
	close(h.ready)
	h.run()
	a, err := h.request(ctx, wire.Resync{})
	if err == nil && len(a.fds) != 1 {
		wire.CloseAll(a.fds)
		err = wire.ErrFormat
	}
	if err != nil {
		h.Detach()
		return nil, fmt.Errorf("adopt holder %d: %w", s.Pid, err)
	}
	h.mu.Lock()
	h.adopting = false
	h.fuse = fuse
	h.mu.Unlock()
	h.procMu.Lock()
	h.proc = a.fds[0]
	h.procMu.Unlock()
	unix.Close(control)
	return h, nil
}

// startTime reads a holder's start time, which tells it from any later process
// of the same pid.
func startTime(pid int) (uint64, error) {
	name := "/proc/" + strconv.Itoa(pid) + "/stat"
	line, err := os.ReadFile(name)
	if err != nil {
		return 0, err
	}
	started, err := parseStartTime(line)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return started, nil
}

// parseStartTime finds the 22nd field of a stat line. The second is a name that
// may hold anything, so counting starts at its last ')'.
func parseStartTime(line []byte) (uint64, error) {
	fields := bytes.Fields(line[bytes.LastIndexByte(line, ')')+1:])
	if len(fields) < 20 {
		return 0, fmt.Errorf("a line of %d fields: %w", len(fields), unix.EINVAL)
	}
	return strconv.ParseUint(string(fields[19]), 10, 64)
}

// pidfd waits for and signals one process, whoever its parent is.
type pidfd struct {
	file *os.File
	raw  syscall.RawConn
	pid  int

	once sync.Once
}

// newPidfd takes over fd. It closes it on failure.
func newPidfd(fd, pid int) (*pidfd, error) {
	if err := unix.SetNonblock(fd, true); err != nil { // so that waiting costs no thread
		unix.Close(fd)
		return nil, fmt.Errorf("use a pidfd: %w", err)
	}
	file := os.NewFile(uintptr(fd), "pidfd "+strconv.Itoa(pid))
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("use a pidfd: %w", err)
	}
	return &pidfd{file: file, raw: raw, pid: pid}, nil
}

// wait returns when the process has ended and is reaped, if it is ours to
// reap. pid 1 of a namespace ends after everything else in there. It is false
// when p was closed instead.
func (p *pidfd) wait() bool {
	err := p.raw.Read(func(fd uintptr) bool {
		ready, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return ready > 0 || err != nil && err != unix.EINTR
	})
	if err != nil {
		return false
	}
	p.once.Do(func() {
		for {
			_, err := unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
			if !errors.Is(err, unix.EINTR) {
				return // reaped, or a child of the daemon before us
			}
		}
	})
	return true
}

// signal fails with ESRCH when the process is gone.
func (p *pidfd) signal(sig unix.Signal) error {
	var sent error
	err := p.raw.Control(func(fd uintptr) { sent = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	if err != nil {
		return unix.ESRCH // closed, so it was reaped
	}
	return sent
}

// end kills the process and sees it gone.
func (p *pidfd) end() {
	p.signal(unix.SIGKILL)
	p.wait()
	p.close()
}

// close ends a wait too.
func (p *pidfd) close() { p.file.Close() }
