package run

import (
	"os"
	"os/exec"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseStatus(t *testing.T) {
	for _, test := range []struct {
		text string
		want Stat
		ok   bool
	}{
		{"Name:\tsh\nState:\tS (sleeping)\nTgid:\t5\nPPid:\t7\nThreads:\t3\n", Stat{Parent: 7}, true},
		{"Name:\tPPid:\\nPPid: 9\nState:\tZ (zombie)\nPPid:\t7\n", Stat{Parent: 7}, true},
		{"Name:\tsh\nPPid:\t0", Stat{}, true},
		{"Name:\tsh\nState:\tR\n", Stat{}, false},
		{"PPid:\t-1\n", Stat{}, false},
		{"PPid:\t\n", Stat{}, false},
		{"", Stat{}, false},
	} {
		got, ok := parseStatus([]byte(test.text))
		if ok != test.ok || ok && got != test.want {
			t.Errorf("%q: %+v, %v", test.text, got, ok)
		}
	}
}

func FuzzParseStatus(f *testing.F) {
	f.Add([]byte("Name:\tsh\nState:\tS (sleeping)\nTgid:\t5\nPPid:\t7\nThreads:\t3\n"))
	f.Fuzz(func(t *testing.T, text []byte) { parseStatus(text) })
}

func TestReadStatOfARealProcess(t *testing.T) {
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(proc)
	child := exec.Command("/bin/cat")
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	st, err := ReadStat(proc, uint32(child.Process.Pid))
	if err != nil || st.Parent != uint32(os.Getpid()) || st.Ident == 0 {
		t.Errorf("%+v, %v", st, err)
	}
	if ident, err := Ident(proc, uint32(child.Process.Pid)); err != nil || ident != st.Ident {
		t.Errorf("identity %d, %d before, %v", ident, st.Ident, err)
	}
	in.Close()
	if err := child.Wait(); err != nil {
		t.Fatal(err)
	}
	if st, err := ReadStat(proc, uint32(child.Process.Pid)); err == nil && st.Parent == uint32(os.Getpid()) {
		t.Errorf("a process that is gone has a state: %+v", st)
	}
}

func TestDescendants(t *testing.T) {
	l := listing{all: map[process]Stat{}}
	for pid, parent := range map[uint32]uint32{2: 1, 3: 2, 4: 3, 5: 1, 6: 5, 7: 4} {
		l.all[process{pid, 1}] = Stat{Parent: parent}
	}
	found := l.descendants(func(p process, _ Stat) bool { return p.pid == 2 })
	var pids []uint32
	for _, p := range found {
		pids = append(pids, p.pid)
	}
	slices.Sort(pids)
	if !slices.Equal(pids, []uint32{3, 4, 7}) {
		t.Errorf("beneath 2: %v", pids)
	}
}

// machine runs a seccomp program on one system call.
func machine(p []unix.SockFilter, arch, nr uint32, args ...uint64) uint32 {
	load := func(offset uint32) uint32 {
		switch {
		case offset == dataNr:
			return nr
		case offset == dataArch:
			return arch
		}
		if i := int(offset-dataArg0) / 8; i < len(args) {
			return uint32(args[i])
		}
		return 0
	}
	var acc uint32
	for pc := 0; ; pc++ {
		in := p[pc]
		switch in.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			acc = load(in.K)
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			taken := acc == in.K
			if in.Code&0xf0 == unix.BPF_JGE {
				taken = acc >= in.K
			}
			if taken {
				pc += int(in.Jt)
			} else {
				pc += int(in.Jf)
			}
		case unix.BPF_RET | unix.BPF_K:
			return in.K
		}
	}
}

func TestFilter(t *testing.T) {
	refuse := func(e unix.Errno) uint32 { return unix.SECCOMP_RET_ERRNO | uint32(e) }
	p := filter()
	for _, test := range []struct {
		name string
		arch uint32
		nr   uint32
		args []uint64
		want uint32
	}{
		{"read", auditArch(), unix.SYS_READ, nil, unix.SECCOMP_RET_ALLOW},
		{"clone", auditArch(), unix.SYS_CLONE, nil, unix.SECCOMP_RET_ALLOW},
		{"ptrace", auditArch(), unix.SYS_PTRACE, nil, unix.SECCOMP_RET_ALLOW},
		{"bpf", auditArch(), unix.SYS_BPF, nil, refuse(unix.EPERM)},
		{"open by handle", auditArch(), unix.SYS_OPEN_BY_HANDLE_AT, nil, refuse(unix.EPERM)},
		{"io_uring", auditArch(), unix.SYS_IO_URING_SETUP, nil, refuse(unix.ENOSYS)},
		{"inet", auditArch(), unix.SYS_SOCKET, []uint64{unix.AF_INET}, unix.SECCOMP_RET_ALLOW},
		{"unix", auditArch(), unix.SYS_SOCKET, []uint64{unix.AF_UNIX}, unix.SECCOMP_RET_ALLOW},
		{"vsock", auditArch(), unix.SYS_SOCKET, []uint64{unix.AF_VSOCK}, refuse(unix.EAFNOSUPPORT)},
		{"vsock, high bits", auditArch(), unix.SYS_SOCKET, []uint64{1<<40 | unix.AF_VSOCK}, refuse(unix.EAFNOSUPPORT)},
		{"alg", auditArch(), unix.SYS_SOCKET, []uint64{unix.AF_ALG}, refuse(unix.EAFNOSUPPORT)},
		{"window size", auditArch(), unix.SYS_IOCTL, []uint64{0, unix.TIOCGWINSZ}, unix.SECCOMP_RET_ALLOW},
		{"type ahead", auditArch(), unix.SYS_IOCTL, []uint64{0, unix.TIOCSTI}, refuse(unix.EPERM)},
		{"type ahead, high bits", auditArch(), unix.SYS_IOCTL, []uint64{0, 1<<40 | unix.TIOCSTI}, refuse(unix.EPERM)},
		{"console", auditArch(), unix.SYS_IOCTL, []uint64{0, unix.TIOCLINUX}, refuse(unix.EPERM)},
		{"other architecture", unix.AUDIT_ARCH_I386, 3, nil, refuse(unix.ENOSYS)},
	} {
		if got := machine(p, test.arch, test.nr, test.args...); got != test.want {
			t.Errorf("%s: %#x, want %#x", test.name, got, test.want)
		}
	}
}
