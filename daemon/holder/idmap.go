package holder

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The id maps, as IDs and State name them.
const (
	mapRange  = "range"  // a root daemon maps a block of 65536 ids
	mapSubuid = "subuid" // newuidmap maps the user and a block from /etc/subuid
	mapSingle = "single" // only the daemon's own id, as 0
)

// idCount is the number of ids inside, where there is more than one.
const idCount = 1 << 16

// overflowID is how the kernel shows an id that the map lacks.
const overflowID = 65534

// idmap is one way to give a session its ids.
type idmap struct {
	name string
	base uint32 // of the range
	sub  subids // for newuidmap
}

type subids struct {
	uid, gid      idBlock
	uidmap, gdmap string // the set-id programs
}

type idBlock struct{ start, count uint64 }

// idmaps lists what can be tried, the best first.
func idmaps(c Config) []idmap {
	single := idmap{name: mapSingle}
	if os.Geteuid() == 0 {
		return []idmap{{name: mapRange, base: c.IDBase}, single}
	}
	if sub, err := findSubids(); err == nil {
		return []idmap{{name: mapSubuid, sub: sub}, single}
	}
	return []idmap{single}
}

// attr fills in how the process is cloned. A map of the subuid kind is written
// afterwards, by write.
func (m idmap) attr(a *syscall.SysProcAttr) {
	switch m.name {
	case mapRange:
		a.UidMappings = []syscall.SysProcIDMap{{HostID: int(m.base), Size: idCount}}
		a.GidMappings = a.UidMappings
		a.GidMappingsEnableSetgroups = true
		a.Credential = &syscall.Credential{} // become the new root: exec gives only that one capabilities
	case mapSingle:
		a.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
}

// late reports whether the map is written once the process exists.
func (m idmap) late() bool { return m.name == mapSubuid }

// write gives the process pid its map.
func (m idmap) write(pid int) error {
	write := func(program string, own int, block idBlock) error {
		args := []string{
			strconv.Itoa(pid), "0", strconv.Itoa(own), "1",
			"1", strconv.FormatUint(block.start, 10), strconv.FormatUint(min(block.count, idCount-1), 10),
		}
		if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(out))
		}
		return nil
	}
	if err := write(m.sub.uidmap, os.Geteuid(), m.sub.uid); err != nil {
		return err
	}
	return write(m.sub.gdmap, os.Getegid(), m.sub.gid)
}

// show turns a stored id into one that exists inside.
func show(mapping string) func(uint32) uint32 {
	if mapping == mapSingle {
		return func(uint32) uint32 { return 0 }
	}
	return func(id uint32) uint32 {
		if id < idCount {
			return id
		}
		return overflowID
	}
}

// findSubids finds this user's subordinate ids and the programs that map them.
func findSubids() (subids, error) {
	var s subids
	var err error
	if s.uidmap, err = exec.LookPath("newuidmap"); err != nil {
		return s, err
	}
	if s.gdmap, err = exec.LookPath("newgidmap"); err != nil {
		return s, err
	}
	owners := []string{strconv.Itoa(os.Geteuid())}
	if u, err := user.LookupId(owners[0]); err == nil {
		owners = append(owners, u.Username)
	}
	if s.uid, err = readSubids("/etc/subuid", owners); err != nil {
		return s, err
	}
	s.gid, err = readSubids("/etc/subgid", owners)
	return s, err
}

func readSubids(path string, owners []string) (idBlock, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return idBlock{}, err
	}
	for _, owner := range owners {
		if block, ok := parseSubids(text, owner); ok {
			return block, nil
		}
	}
	return idBlock{}, fmt.Errorf("%s has no line for this user: %w", path, os.ErrNotExist)
}

// parseSubids finds the first "owner:start:count" line of owner.
func parseSubids(text []byte, owner string) (idBlock, bool) {
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		fields := strings.Split(strings.TrimSpace(lines.Text()), ":")
		if len(fields) != 3 || fields[0] != owner {
			continue
		}
		start, err1 := strconv.ParseUint(fields[1], 10, 32)
		count, err2 := strconv.ParseUint(fields[2], 10, 32)
		if errors.Join(err1, err2) == nil && count > 0 && start > 0 {
			return idBlock{start, count}, true
		}
	}
	return idBlock{}, false
}

// fuseNode makes a device node that ids of the range may open: the host's own
// is root's alone. The node is gone from every directory when this returns;
// only the O_PATH descriptor is left of it.
func fuseNode(runtimeDir string) (int, error) {
	dev := int(unix.Mkdev(10, 229)) // Linux's number for FUSE, in every kernel
	dir, err := anonymousDir()
	if err == nil {
		defer unix.Close(dir)
		fd, err := nodeIn(dir, dev)
		if err == nil {
			return fd, nil
		}
	}
	if runtimeDir == "" {
		return -1, fmt.Errorf("make a private /dev/fuse: %w", err)
	}
	dir, err = unix.Open(runtimeDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make a private /dev/fuse in %s: %w", runtimeDir, err)
	}
	defer unix.Close(dir)
	fd, err := nodeIn(dir, dev)
	if err != nil {
		return -1, fmt.Errorf("make a private /dev/fuse in %s: %w", runtimeDir, err)
	}
	return fd, nil
}

// anonymousDir is the root of a tmpfs that is mounted nowhere.
func anonymousDir() (int, error) {
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return -1, err
	}
	return unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
}

func nodeIn(dir, dev int) (int, error) {
	name := "fuse-" + rand.Text()
	if err := unix.Mknodat(dir, name, unix.S_IFCHR|0o600, dev); err != nil {
		return -1, err
	}
	defer unix.Unlinkat(dir, name, 0)
	if err := unix.Fchmodat(dir, name, 0o666, 0); err != nil { // past any umask
		return -1, err
	}
	return unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}
