package run

import (
	"bytes"
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Stat is what attribution and killing need of a process or thread.
type Stat struct {
	Parent uint32
	Ident  uint64 // see Ident
}

// ReadStat reads a process's or thread's state from the procfs directory proc.
// It fails with unix.ENOENT or unix.ESRCH when there is none.
//
// It reads the file "status", and nothing else will do. An exec closes files,
// and so may wait for the session's view, while it holds the lock that "stat",
// "environ", "syscall" and many others of that process wait for. Who answers
// for the view, or has to kill in spite of it, must not wait for that lock.
func ReadStat(proc int, pid uint32) (Stat, error) {
	fd, err := unix.Openat(proc, statusOf(pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Stat{}, err
	}
	defer unix.Close(fd)
	var file unix.Stat_t
	if err := unix.Fstat(fd, &file); err != nil {
		return Stat{}, err
	}
	var buf [1024]byte // the parent comes early
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return Stat{}, err
	}
	st, ok := parseStatus(buf[:n])
	if !ok {
		return Stat{}, unix.ESRCH
	}
	st.Ident = file.Ino
	return st, nil
}

// Ident is a number that tells a process from a later one of the same pid. It
// is the inode of a file in procfs, which lives no longer than its process. It
// may change while the process lives, when the kernel has dropped that inode
// for want of memory. It fails as ReadStat does, and waits for nothing either.
func Ident(proc int, pid uint32) (uint64, error) {
	var file unix.Stat_t
	if err := unix.Fstatat(proc, statusOf(pid), &file, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return 0, err
	}
	return file.Ino, nil
}

func statusOf(pid uint32) string {
	var name [32]byte
	return string(append(strconv.AppendUint(name[:0], uint64(pid), 10), "/status"...))
}

// parseStatus reads the lines of /proc/PID/status. The first is a name that
// the process chose; the kernel escapes line ends in it.
func parseStatus(text []byte) (Stat, bool) {
	for line := range bytes.Lines(text) {
		if value, ok := bytes.CutPrefix(line, []byte("PPid:")); ok {
			good := true
			return Stat{Parent: uint32(number(bytes.TrimSpace(value), &good))}, good
		}
	}
	return Stat{}, false
}

func number(word []byte, good *bool) uint64 {
	if len(word) == 0 {
		*good = false
	}
	var n uint64
	for _, c := range word {
		if c < '0' || c > '9' {
			*good = false
			return 0
		}
		n = n*10 + uint64(c-'0')
	}
	return n
}

// process names one process for good: its pid may be used again later.
type process struct {
	pid   uint32
	ident uint64
}

// listing is what was in the session while it was made, zombies included. A
// listing takes time, so a process may have been missed, but not without a
// trace: its parent is in the listing, or had vanished before it was looked
// at, or pids had started over and the child got one that was passed already.
type listing struct {
	all      map[process]Stat
	vanished []uint32 // were there by name, and no more when looked at
	wrapped  bool     // pids started over
}

func processes() (listing, error) {
	before, err := lastPid()
	if err != nil {
		return listing{}, err
	}
	dir, err := os.Open("/proc")
	if err != nil {
		return listing{}, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return listing{}, err
	}
	l := listing{all: make(map[process]Stat, len(names))}
	for _, name := range names {
		pid, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			continue
		}
		st, err := ReadStat(int(dir.Fd()), uint32(pid))
		switch {
		case err == nil:
			l.all[process{uint32(pid), st.Ident}] = st
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESRCH):
			l.vanished = append(l.vanished, uint32(pid))
		default:
			return listing{}, err
		}
	}
	after, err := lastPid()
	l.wrapped = after < before
	return l, err
}

// lastPid is the pid that the session's pid namespace dealt last.
func lastPid() (uint64, error) {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	text = bytes.TrimSpace(text)
	good := true
	n := number(text[bytes.LastIndexByte(text, ' ')+1:], &good)
	if !good {
		return 0, unix.EINVAL
	}
	return n, nil
}

// descendants lists the processes beneath those that top picks, without them
// unless they are beneath another.
func (l listing) descendants(top func(process, Stat) bool) []process {
	children := make(map[uint32][]process, len(l.all))
	var queue, found []process
	for p, st := range l.all {
		children[st.Parent] = append(children[st.Parent], p)
		if top(p, st) {
			queue = append(queue, p)
		}
	}
	for len(queue) > 0 {
		p := queue[0]
		queue = queue[1:]
		for _, child := range children[p.pid] {
			queue = append(queue, child)
			found = append(found, child)
		}
	}
	return found
}

// killAll sends SIGKILL to everything that pick finds in a listing, and lists
// again until there is nothing new and nothing can have been missed: what has
// the signal pending, or was seen as a zombie, cannot fork any more. A zombie
// that is new may just have.
func killAll(pick func(listing) []process) error {
	signalled := make(map[process]bool)
	pids := make(map[uint32]bool)
	for {
		l, err := processes()
		if err != nil {
			return err
		}
		settled := !l.wrapped
		for _, p := range pick(l) {
			if !signalled[p] {
				signalled[p], pids[p.pid], settled = true, true, false
				unix.Kill(int(p.pid), unix.SIGKILL)
			}
		}
		for _, pid := range l.vanished {
			settled = settled && pids[pid]
		}
		if settled {
			return nil
		}
	}
}
