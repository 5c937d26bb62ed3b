package run

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// harden takes from the calling thread, and so from all that it forks, every
// way to privilege: the bounding set, set-id programs, and system calls that a
// command has no use for but an attacker has. The thread keeps the
// capabilities it has; an exec loses them.
func harden() error {
	for capability := range uintptr(64) {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, capability, 0, 0, 0)
		if err == unix.EINVAL {
			break // one past the kernel's last
		}
		if err != nil {
			return at("drop", "the capability bounding set", err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return at("clear", "ambient capabilities", err)
	}
	if err := clearInheritable(); err != nil {
		return at("clear", "inheritable capabilities", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return at("set", "no_new_privs", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return at("clear", "the dumpable flag", err)
	}
	return at("install", "the system call filter", installFilter())
}

func clearInheritable() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0
	return unix.Capset(&header, &data[0])
}

// auditArch is the architecture that the filter's numbers belong to.
func auditArch() uint32 {
	if runtime.GOARCH == "arm64" {
		return unix.AUDIT_ARCH_AARCH64
	}
	return unix.AUDIT_ARCH_X86_64
}

// refused are system calls of the kernel's less trodden parts.
var refused = [...]uint32{
	unix.SYS_USERFAULTFD, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN,
	unix.SYS_ADD_KEY, unix.SYS_KEYCTL, unix.SYS_REQUEST_KEY,
	unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE,
	unix.SYS_OPEN_BY_HANDLE_AT,
}

// absent are system calls that programs try and do without.
var absent = [...]uint32{unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER}

// refusedFamilies are socket families that reach past the network namespace.
var refusedFamilies = [...]uint32{unix.AF_VSOCK, unix.AF_ALG}

// refusedIoctls put input into a terminal that the caller only shares.
var refusedIoctls = [...]uint32{unix.TIOCSTI, unix.TIOCLINUX}

// Offsets in struct seccomp_data; arguments are 64 bits, little endian.
const (
	dataNr   = 0
	dataArch = 4
	dataArg0 = 16
	dataArg1 = 24
)

// x32Bit marks a system call of the x32 ABI, which shares its architecture
// with x86-64 and nothing else.
const x32Bit = 0x40000000

// filter is the seccomp program. Another architecture's calls do not exist in
// it: their numbers would slip through.
func filter() []unix.SockFilter {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	ret := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	fail := func(errno unix.Errno) unix.SockFilter {
		return ret(unix.SECCOMP_RET_ERRNO | uint32(errno))
	}
	// unless skips the next n instructions when the loaded value is not k.
	unless := func(k uint32, n uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jf: n}
	}
	p := []unix.SockFilter{
		load(dataArch),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: auditArch(), Jt: 1},
		fail(unix.ENOSYS),
		load(dataNr),
	}
	if runtime.GOARCH == "amd64" {
		p = append(p,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: x32Bit, Jf: 1},
			fail(unix.ENOSYS))
	}
	for _, nr := range refused {
		p = append(p, unless(nr, 1), fail(unix.EPERM))
	}
	for _, nr := range absent {
		p = append(p, unless(nr, 1), fail(unix.ENOSYS))
	}
	byArgument := func(nr, offset uint32, values []uint32, errno unix.Errno) {
		p = append(p, unless(nr, uint8(2+2*len(values))), load(offset))
		for _, v := range values {
			p = append(p, unless(v, 1), fail(errno))
		}
		p = append(p, ret(unix.SECCOMP_RET_ALLOW))
	}
	byArgument(unix.SYS_SOCKET, dataArg0, refusedFamilies[:], unix.EAFNOSUPPORT)
	byArgument(unix.SYS_IOCTL, dataArg1, refusedIoctls[:], unix.EPERM)
	return append(p, ret(unix.SECCOMP_RET_ALLOW))
}

func installFilter() error {
	p := filter()
	program := unix.SockFprog{Len: uint16(len(p)), Filter: &p[0]}
	err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
	runtime.KeepAlive(p)
	return err
}
