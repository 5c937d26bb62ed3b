package run

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Stat is what attribution and killing need of a process or thread.
type Stat struct {
	State   byte // 'R', 'S', 'D', 'Z', ...
	Parent  uint32
	Threads uint32
	Started uint64 // clock ticks since boot; tells a reused pid from its predecessor
}

// Dead reports whether nothing of the process runs any more. A zombie leader
// may still have threads.
func (s Stat) Dead() bool {
	return s.State == 'X' || s.State == 'Z' && s.Threads <= 1
}

// ReadStat reads a process's or thread's state from the procfs directory proc.
// It fails with unix.ENOENT or unix.ESRCH when there is none. It never touches
// the session's view.
func ReadStat(proc int, pid uint32) (Stat, error) {
	var name [32]byte
	path := append(strconv.AppendUint(name[:0], uint64(pid), 10), "/stat"...)
	fd, err := unix.Openat(proc, string(path), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Stat{}, err
	}
	defer unix.Close(fd)
	var buf [1024]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return Stat{}, err
	}
	st, ok := parseStat(buf[:n])
	if !ok {
		return Stat{}, unix.ESRCH
	}
	return st, nil
}

// parseStat reads the line of /proc/PID/stat. The second field is a name that
// its process chose: it may hold anything, so counting starts at its last ')'.
func parseStat(line []byte) (Stat, bool) {
	end := bytes.LastIndexByte(line, ')')
	if end < 0 || len(line) < end+3 {
		return Stat{}, false
	}
	rest := line[end+2:]
	st := Stat{State: rest[0]}
	good := true
	for field := 3; len(rest) > 0 && field <= 22; field++ {
		word, tail, _ := bytes.Cut(rest, []byte{' '})
		rest = tail
		switch field {
		case 4:
			st.Parent = uint32(number(word, &good))
		case 20:
			st.Threads = uint32(number(word, &good))
		case 22:
			st.Started = number(word, &good)
			return st, good
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
	pid     uint32
	started uint64
}

// processes lists what lives in the session, with parents.
func processes() (map[process]Stat, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	all := make(map[process]Stat, len(names))
	for _, name := range names {
		pid, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			continue
		}
		if st, err := ReadStat(int(dir.Fd()), uint32(pid)); err == nil {
			all[process{uint32(pid), st.Started}] = st
		}
	}
	return all, nil
}

// descendants lists the live processes beneath those that top picks, without
// them unless they are beneath another.
func descendants(all map[process]Stat, top func(process, Stat) bool) []process {
	children := make(map[uint32][]process, len(all))
	var queue, found []process
	for p, st := range all {
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
			if !all[child].Dead() {
				found = append(found, child)
			}
		}
	}
	return found
}

// killAll sends SIGKILL to everything that list names, and lists again until
// a listing has nothing new: a process with the signal pending cannot fork, so
// then nothing can be missing.
func killAll(list func() ([]process, error)) error {
	signalled := make(map[process]bool)
	for {
		found, err := list()
		if err != nil {
			return err
		}
		fresh := false
		for _, p := range found {
			if !signalled[p] {
				signalled[p], fresh = true, true
				unix.Kill(int(p.pid), unix.SIGKILL)
			}
		}
		if !fresh {
			return nil
		}
	}
}
