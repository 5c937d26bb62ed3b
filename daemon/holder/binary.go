package holder

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/embedded"
	"ephemeral-sandbox/daemon/holder/run"
)

// Binary is the executable that holders run from. Sharing one lets all holders
// of a daemon share its text in memory.
type Binary struct {
	fd   int // a sealed memfd; -1 for this program itself
	path string
}

// self is this program, for builds that embed no holder.
const self = "/proc/self/exe"

// binaryFloor is the lowest number for the binary's descriptor: out of the way
// of those that a holder is started with.
const binaryFloor = 16

// OpenBinary puts the embedded holder into a sealed memory file, so that
// nothing in a session can write to what the daemon runs. Where none is
// embedded, or the kernel refuses to execute memory files, holders run from
// this program itself.
func OpenBinary() (*Binary, error) {
	src, err := embedded.Open()
	if errors.Is(err, fs.ErrNotExist) {
		return &Binary{fd: -1, path: self}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the embedded holder: %w", err)
	}
	defer src.Close()
	return newBinary(src)
}

func newBinary(src io.Reader) (*Binary, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	low, err := unix.MemfdCreate(run.Name, flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		low, err = unix.MemfdCreate(run.Name, flags)
	}
	if err != nil { // vm.memfd_noexec forbids it
		return &Binary{fd: -1, path: self}, nil
	}
	file := os.NewFile(uintptr(low), run.Name)
	defer file.Close()
	if _, err := io.Copy(file, src); err != nil {
		return nil, fmt.Errorf("copy the holder into memory: %w", err)
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("seal the holder: %w", err)
	}
	// A descriptor that writes would make every exec fail with ETXTBSY.
	ro, err := unix.Open("/proc/self/fd/"+strconv.Itoa(low), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the holder for reading: %w", err)
	}
	defer unix.Close(ro)
	fd, err := unix.FcntlInt(uintptr(ro), unix.F_DUPFD_CLOEXEC, binaryFloor)
	if err != nil {
		return nil, fmt.Errorf("open the holder for reading: %w", err)
	}
	return &Binary{fd: fd, path: "/proc/self/fd/" + strconv.Itoa(fd)}, nil
}

// Close releases the binary. Holders that run from it go on.
func (b *Binary) Close() error {
	if b.fd < 0 {
		return nil
	}
	fd := b.fd
	b.fd = -1
	return unix.Close(fd)
}

// MaybeRun turns this process into a holder or a stub when it was started as
// one, and then does not return. A program that starts holders calls it first
// thing in main.
func MaybeRun() { run.Main() }
