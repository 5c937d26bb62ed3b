package drive

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Family makes this process the one that every orphan among its descendants
// falls to, however it detached itself. So it can say whether anything that was
// started, at any remove, still runs. There is one Family a process.
type Family struct {
	signals chan os.Signal
	wg      sync.WaitGroup

	mu    sync.Mutex
	known map[int]bool // guarded by mu; children that someone waits for
}

// NewFamily starts watching.
func NewFamily() (*Family, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become subreaper: %w", err)
	}
	f := &Family{signals: make(chan os.Signal, 1), known: map[int]bool{}}
	signal.Notify(f.signals, unix.SIGCHLD)
	f.wg.Go(func() {
		for range f.signals {
			f.reap()
		}
	})
	return f, nil
}

// Close stops watching.
func (f *Family) Close() {
	signal.Stop(f.signals)
	close(f.signals)
	f.wg.Wait()
}

// run is cmd.Run, with the process known as one that is waited for.
func (f *Family) run(cmd *exec.Cmd) error {
	if err := f.start(cmd); err != nil {
		return err
	}
	return f.wait(cmd)
}

func (f *Family) start(cmd *exec.Cmd) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	f.known[cmd.Process.Pid] = true
	return nil
}

func (f *Family) wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	f.mu.Lock()
	delete(f.known, cmd.Process.Pid)
	f.mu.Unlock()
	return err
}

// reap collects adopted children that have ended, so that whoever looks for
// them by pid sees them gone.
func (f *Family) reap() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range processes() {
		if p.Parent == os.Getpid() && p.State == "Z" && !f.known[p.PID] {
			// Gone already, or collected now: both are what is wanted.
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
		}
	}
}

// Process is one running process.
type Process struct {
	PID, Parent int
	Name        string
	State       string // one letter, as in ps
}

func (p Process) String() string { return fmt.Sprintf("%d %s (%s)", p.PID, p.Name, p.State) }

// Alive lists the descendants of this process that run, oldest pid first.
func (f *Family) Alive() []Process {
	f.reap()
	all := processes()
	children := map[int][]Process{}
	for _, p := range all {
		children[p.Parent] = append(children[p.Parent], p)
	}
	var out []Process
	var walk func(pid int)
	walk = func(pid int) {
		for _, p := range children[pid] {
			if p.State != "Z" {
				out = append(out, p)
			}
			walk(p.PID)
		}
	}
	walk(os.Getpid())
	slices.SortFunc(out, func(a, b Process) int { return a.PID - b.PID })
	return out
}

// Remaining lists the descendants that still run after grace. A process that is
// on its way out, its locks and sockets closed already, is not one that was left
// behind.
func (f *Family) Remaining(grace time.Duration) []Process {
	deadline := time.Now().Add(grace)
	for {
		alive := f.Alive()
		left := time.Until(deadline)
		if len(alive) == 0 || left <= 0 {
			return alive
		}
		fd, err := unix.PidfdOpen(alive[0].PID, 0)
		if err != nil {
			continue // ended meanwhile
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds())+1)
		unix.Close(fd)
	}
}

// Kill kills every descendant and returns how many there were.
func (f *Family) Kill() int {
	n := 0
	for range 10 { // what is killed may have forked meanwhile
		alive := f.Alive()
		if len(alive) == 0 {
			return n
		}
		for _, p := range alive {
			fd, err := unix.PidfdOpen(p.PID, 0)
			if err != nil {
				continue // ended meanwhile
			}
			if unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) == nil {
				n++
				_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 5000)
			}
			unix.Close(fd)
		}
	}
	return n
}

// processes reads /proc. A process that ends meanwhile is left out. It reads
// status and not stat: the kernel gives stat only under a lock that a process
// stuck in a system call, anybody's, may hold for ever.
func processes() []Process {
	files, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		panic(err) // the pattern is a constant
	}
	var out []Process
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		if p, ok := parseStatus(string(text)); ok {
			out = append(out, p)
		}
	}
	return out
}

// parseStatus reads what is wanted of /proc/PID/status.
func parseStatus(text string) (p Process, ok bool) {
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		value = strings.TrimSpace(value)
		switch key {
		case "Name":
			p.Name = value
		case "State":
			p.State, _, _ = strings.Cut(value, " ")
		case "Pid":
			p.PID, _ = strconv.Atoi(value)
		case "PPid":
			p.Parent, _ = strconv.Atoi(value)
		}
	}
	return p, p.PID > 0 && p.State != ""
}

// FUSEMounts lists the FUSE mounts that this process can see, by mount id.
func FUSEMounts() (map[string]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	defer f.Close()
	out := map[string]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		sep := slices.Index(words, "-")
		if sep < 5 || sep+2 >= len(words) {
			continue
		}
		if kind := words[sep+1]; kind == "fuse" || strings.HasPrefix(kind, "fuse.") || kind == "fuseblk" {
			out[words[0]] = words[4] + " (" + words[sep+2] + ")"
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	return out, nil
}
