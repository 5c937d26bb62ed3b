package run

import (
	"math"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/wire"
)

// stubMain runs one command and stays until all of it has ended. As subreaper
// it is the ancestor of everything the command ever starts, set-sid daemons
// included, which is what tells whose process is whose. It is the only one to
// touch the view on the command's behalf, so it alone hangs if that hangs. It
// has no more rights than the command, but the files of its streams.
func stubMain(id string) {
	unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	unix.CloseRange(fdControl, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	conn, err := wire.NewConn(fdControl, stubPacket)
	if err != nil {
		return
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		conn.Send(wire.Packet{Body: failed(at("become subreaper for", id, err))})
		os.Exit(0)
	}
	unix.Umask(0o022)
	command, err := readCommand(fdSpec)
	if err != nil {
		conn.Send(wire.Packet{Body: failed(at("read the request of", id, err))})
		os.Exit(0)
	}
	unix.Close(fdSpec)
	streams, err := newPump([3]int{fdStdin, fdStdout, fdStderr}, command.Output)
	if err != nil {
		conn.Send(wire.Packet{Body: failed(at("make the streams of", id, err))})
		os.Exit(0)
	}
	pid, err := start(command, streams.theirs)
	if err != nil {
		conn.Send(wire.Packet{Body: failed(err)})
		os.Exit(0)
	}
	streams.started()
	go streams.run()
	conn.Send(wire.Packet{Body: wire.Started{ID: id, Stub: uint32(os.Getpid()), Pid: uint32(pid)}})
	for {
		var status unix.WaitStatus
		var usage unix.Rusage
		done, err := unix.Wait4(-1, &status, 0, &usage)
		switch {
		case err == unix.EINTR:
		case err != nil: // ECHILD: no child, so no descendant
			streams.settle()
			os.Exit(0)
		case done == pid && (status.Exited() || status.Signaled()):
			pid = -1
			// Whoever hears of the exit finds all that the command has printed.
			dropped, failure := streams.settle()
			conn.Send(wire.Packet{Body: wire.Exited{
				ID: id, Status: uint32(status),
				UserMicros: micros(usage.Utime), SysMicros: micros(usage.Stime),
				MaxRSS:        uint64(usage.Maxrss),
				StdoutDropped: dropped[0], StderrDropped: dropped[1], StreamErrno: uint16(failure),
			}})
		}
	}
}

func micros(t unix.Timeval) uint64 { return uint64(t.Sec)*1e6 + uint64(t.Usec) }

func readCommand(fd int) (wire.Command, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return wire.Command{}, err
	}
	if st.Size > wire.MaxCommand {
		return wire.Command{}, unix.E2BIG
	}
	spec := make([]byte, st.Size)
	for read := 0; read < len(spec); {
		n, err := unix.Pread(fd, spec[read:], int64(read))
		if err == unix.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = unix.EIO
		}
		if err != nil {
			return wire.Command{}, err
		}
		read += n
	}
	return wire.ParseCommand(spec)
}

// start forks and executes the command. With limits, the child stops at its
// exec and goes on once they are set: a limit on processes or memory set
// before would be the stub's own, and the Go runtime does not survive one.
func start(c wire.Command, streams [3]int) (pid int, err error) {
	path, err := resolve(c)
	if err != nil {
		return 0, err
	}
	attr := &syscall.ProcAttr{
		Dir: c.Dir, Env: c.Env,
		Files: []uintptr{uintptr(streams[0]), uintptr(streams[1]), uintptr(streams[2])},
		Sys:   &syscall.SysProcAttr{Setsid: true, Ptrace: len(c.Limits) > 0},
	}
	pid, err = syscall.ForkExec(path, c.Argv, attr)
	if err == unix.ENOEXEC { // a script without a first line, as execvp has it
		argv := append([]string{"sh", path}, c.Argv[1:]...)
		pid, err = syscall.ForkExec("/bin/sh", argv, attr)
	}
	if err != nil {
		return 0, blame(c, path, err)
	}
	if len(c.Limits) > 0 {
		if err := limit(pid, c.Limits); err != nil {
			unix.Kill(pid, unix.SIGKILL)
			return 0, err
		}
	}
	return pid, nil
}

// limit sets the limits of a child that stops at its exec, and lets it go.
func limit(pid int, limits []wire.Limit) error {
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &status, unix.WALL, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return at("wait for the exec of", "the command", err)
		}
		break
	}
	if !status.Stopped() {
		return at("execute", "the command: it was killed", unix.ECHILD)
	}
	for _, l := range limits {
		r := unix.Rlimit{Cur: l.Soft, Max: l.Hard}
		if err := unix.Prlimit(pid, int(l.Resource), &r, nil); err != nil {
			return at("limit a resource of", "the command", err)
		}
	}
	return at("let go of", "the command", unix.PtraceDetach(pid))
}

// resolve finds the program as execvp(3) would, in the command's own PATH.
func resolve(c wire.Command) (string, error) {
	name := c.Argv[0]
	if strings.IndexByte(name, '/') >= 0 {
		return name, nil
	}
	const step = "find the program"
	if name == "" {
		return "", at(step, `""`, unix.ENOENT)
	}
	search := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, kv := range c.Env {
		if value, ok := strings.CutPrefix(kv, "PATH="); ok {
			search = value
		}
	}
	var denied error = unix.ENOENT
	for dir := range strings.SplitSeq(search, ":") {
		switch {
		case dir == "":
			dir = c.Dir
		case dir[0] != '/':
			dir = c.Dir + "/" + dir
		}
		path := dir + "/" + name
		var st unix.Stat_t
		if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		if unix.Access(path, unix.X_OK) != nil {
			denied = unix.EACCES
			continue
		}
		return path, nil
	}
	return "", at(step, name, denied)
}

// blame says which of the two lookups of a failed start it was.
func blame(c wire.Command, path string, err error) error {
	if dir := unix.Access(c.Dir, unix.X_OK); dir != nil {
		return at("enter the directory", c.Dir, err)
	}
	return at("execute", path, err)
}
