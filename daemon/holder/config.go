package holder

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ephemeral-sandbox/daemon/holder/wire"
)

// Config says how a session's holder is to be made.
type Config struct {
	Session   string // names the session in the mount's source; 1 to 64 of [A-Za-z0-9._:-]
	Workspace string // absolute path at which the view appears inside
	Network   string // "none": loopback only; "shared": the host's network
	// HostPaths are shown read-only at their own places, beside the
	// directories of programs that every session sees.
	HostPaths []string
	// RuntimeDir is a private directory on a file system that allows device
	// nodes. It is used only by a root daemon, and only where the kernel
	// cannot make an anonymous one.
	RuntimeDir   string
	Home         string // HOME inside; chosen outside the workspace when empty
	ScratchBytes uint64 // bound of /tmp, HOME, /run, /var and /dev/shm together; 2 GiB when 0
	// MaxProcesses bounds the processes and threads of the session, counted in
	// its own user namespace; 4096 when 0. The kernel does not hold a root
	// daemon's single map to it.
	MaxProcesses uint32
	IDBase       uint32  // first host id of the 65536 that a root daemon maps; 0x70000000 when 0
	Binary       *Binary // shared by all holders of a daemon; opened for this one when nil
	// NoView mounts an empty tmpfs at Workspace in place of the view. It is
	// meant for diagnosis and tests: FuseFD is then -1.
	NoView bool
}

const (
	defaultScratch   = 2 << 30
	defaultProcesses = 4096
	// defaultIDBase lies past what systemd hands out to containers, and below
	// 2^31, where programs begin to misread ids.
	defaultIDBase = 0x70000000
)

// programDirs are the host's top-level directories that programs live in. Not
// among them: /run and /var, where sockets of the host's services are.
var programDirs = [...]string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu",
}

// ownDirs are the session's own; no host path may cover one of them.
var ownDirs = [...]string{"/proc", "/sys", "/dev", "/tmp", "/run", "/var", "/root"}

// homes are tried in this order for one that the view does not cover.
var homes = [...]string{"/home/agent", "/root", "/var/home"}

// withDefaults fills in what is left empty.
func (c Config) withDefaults() Config {
	if c.Network == "" {
		c.Network = "none"
	}
	if c.ScratchBytes == 0 {
		c.ScratchBytes = defaultScratch
	}
	if c.MaxProcesses == 0 {
		c.MaxProcesses = defaultProcesses
	}
	if c.IDBase == 0 {
		c.IDBase = defaultIDBase
	}
	for _, home := range homes {
		if c.Home == "" && !within(home, c.Workspace) {
			c.Home = home
		}
	}
	return c
}

// validate lists all that is wrong with c.
func (c Config) validate() error {
	var wrong []error
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	if !wire.ValidID(c.Session) {
		complain("session %q: use 1 to %d letters, digits or . _ : -", c.Session, wire.MaxID)
	}
	for _, p := range append([]string{c.Workspace, c.Home}, c.HostPaths...) {
		switch {
		case !filepath.IsAbs(p) || filepath.Clean(p) != p || strings.ContainsRune(p, 0):
			complain("path %q: give a clean absolute path", p)
		case len(p) > wire.MaxPath:
			complain("path of %d bytes: the limit is %d", len(p), wire.MaxPath)
		case p == "/" || within(p, "/proc") || within(p, "/sys") || within(p, "/dev"):
			complain("path %q: a session has its own", p)
		}
	}
	if within(c.Home, c.Workspace) {
		complain("home %q: it lies in the workspace, whose view would cover it", c.Home)
	}
	for _, p := range c.HostPaths {
		if within(p, c.Workspace) {
			complain("host path %q: it lies in the workspace, whose view would cover it", p)
		}
		if within(c.Home, p) || slices.Contains(ownDirs[:], p) {
			complain("host path %q: a session has its own", p)
		}
	}
	if c.Network != "none" && c.Network != "shared" {
		complain("network %q: use none or shared", c.Network)
	}
	return errors.Join(wrong...)
}

// binds lists what the session sees of the host, parents before children.
func (c Config) binds() ([]wire.Bind, error) {
	var list []wire.Bind
	for _, dir := range programDirs {
		st, err := os.Lstat(dir)
		if err != nil || c.Workspace == dir {
			continue // not on this host, or the view stands in its place
		}
		b := wire.Bind{Path: dir}
		if st.Mode()&os.ModeSymlink != 0 {
			if b.Link, err = os.Readlink(dir); err != nil {
				return nil, fmt.Errorf("read the link %s: %w", dir, err)
			}
		}
		list = append(list, b)
	}
	for _, p := range slices.Sorted(slices.Values(c.HostPaths)) {
		if _, err := os.Stat(p); err != nil {
			return nil, fmt.Errorf("host path %q: %w", p, err)
		}
		covered := slices.ContainsFunc(list, func(b wire.Bind) bool {
			return b.Link == "" && within(p, b.Path)
		})
		if !covered {
			list = append(list, wire.Bind{Path: p})
		}
	}
	if len(list) > wire.MaxBinds {
		return nil, fmt.Errorf("%d host paths: the limit is %d", len(list), wire.MaxBinds)
	}
	return list, nil
}

// within reports whether path is dir or lies beneath it. Both are clean.
func within(path, dir string) bool {
	rest, ok := strings.CutPrefix(path, dir)
	return ok && (rest == "" || rest[0] == '/' || dir == "/")
}
