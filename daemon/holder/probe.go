package holder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Problem is one reason why holders cannot run here.
type Problem struct {
	What   string // the switch or file, and what is wrong with it
	Remedy string // what to do about it
}

func (p Problem) String() string { return p.What + ": " + p.Remedy }

// probeTime bounds how long Probe tries.
const probeTime = 20 * time.Second

// Probe lists what keeps holders from running here; it is empty when all is
// well. It looks at the host's switches, and then makes a holder with a view
// that nobody serves.
func Probe() []Problem {
	if problems := switches(); len(problems) > 0 {
		return problems
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTime)
	defer cancel()
	h, err := Start(ctx, Config{Session: "probe", Workspace: "/workspace"})
	if err == nil {
		err = errors.Join(h.Ready(ctx), h.Close())
	}
	if err != nil {
		return []Problem{{err.Error(), "holders need Linux 5.12 or newer with user namespaces and FUSE; in a container, an unmasked /proc and a seccomp profile that allows mount and unshare"}}
	}
	return nil
}

// explain adds to a failed start the host's switch that is to blame for it.
func explain(err error) error {
	if err == nil {
		return nil
	}
	for _, p := range switches() {
		return fmt.Errorf("%w (%s)", err, p)
	}
	return err
}

// switches looks at the files and settings that a distribution or an
// administrator may have set against us. Each costs a file read.
func switches() []Problem {
	var problems []Problem
	switch err := openFuse(); {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		problems = append(problems, Problem{"/dev/fuse: " + errnoText(err), "load the module with 'modprobe fuse'; in a container, add '--device /dev/fuse'"})
	case err != nil:
		problems = append(problems, Problem{"/dev/fuse: " + errnoText(err), "let this user open it, as root: 'chmod 0666 /dev/fuse'"})
	}
	for _, s := range []struct {
		file, bad, name, remedy string
		rootToo                 bool
	}{
		{"/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces is 0", "'sysctl -w user.max_user_namespaces=16384'", true},
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone is 0", "'sysctl -w kernel.unprivileged_userns_clone=1'", false},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns is 1", "'sysctl -w kernel.apparmor_restrict_unprivileged_userns=0', or an AppArmor profile for sandboxd that says 'userns,'", false},
	} {
		if !s.rootToo && os.Geteuid() == 0 {
			continue
		}
		if value, err := os.ReadFile(s.file); err == nil && string(bytes.TrimSpace(value)) == s.bad {
			problems = append(problems, Problem{s.name, "allow user namespaces, as root: " + s.remedy})
		}
	}
	return problems
}

func openFuse() error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func errnoText(err error) string {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}
