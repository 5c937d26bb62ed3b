package run

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/wire"
)

// staging is where the new root is put together. Any directory that every host
// has would do: nothing is looked up through it once trees have been taken.
const staging = "/tmp"

// scratchDirs are the writable directories beside HOME. They all lie in one
// tmpfs, so that one bound holds for them together.
var scratchDirs = [...]struct {
	path string
	mode uint32
}{
	{"tmp", 0o1777}, {"run", 0o755}, {"var", 0o755}, {"root", 0o700}, {"dev/shm", 0o1777},
}

var devices = [...]string{"null", "zero", "full", "random", "urandom", "tty"}

var deviceLinks = [...]struct{ name, target string }{
	{"dev/ptmx", "pts/ptmx"},
	{"dev/fd", "/proc/self/fd"},
	{"dev/stdin", "/proc/self/fd/0"},
	{"dev/stdout", "/proc/self/fd/1"},
	{"dev/stderr", "/proc/self/fd/2"},
}

// build makes the session's root tree and view, sends Mounted as soon as the
// view is there, and hardens the calling thread. The new root is a tmpfs with
// the wanted host directories bound into it, so that there is nothing beneath
// the private mounts to be uncovered.
func build(conn *wire.Conn, setup wire.Setup, fds []int, stages *clock) error {
	// 1. Cut the host's mount propagation both ways.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return at("make mounts private", "/", err)
	}
	if err := unix.Sethostname([]byte("sandbox")); err != nil {
		return at("set the host name", "sandbox", err)
	}

	// 2. Take everything that comes from the host, before covering any of it.
	host, err := takeHost(setup, fds)
	if err != nil {
		return err
	}
	defer host.close()
	stages.stage("take")

	// 3. Put the root together.
	options := "mode=0755,nr_inodes=1048576,size=" + strconv.FormatUint(setup.Scratch, 10)
	if err := unix.Mount("sandbox-root", staging, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return at("mount the root tmpfs", staging, err)
	}
	if err := unix.Chdir(staging); err != nil {
		return at("enter", staging, err)
	}
	if err := assemble(setup, host); err != nil {
		return err
	}
	stages.stage("assemble")

	// 4. Proc and sysfs, while the host's are still in sight: the kernel wants
	// to see that a new instance shows nothing which the old ones hid.
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("proc", "proc", "proc", quiet, ""); err != nil {
		return at("mount", "proc", err)
	}
	mountSys(setup.NewNet)

	// 5. Change roots and let go of the host's.
	if err := unix.PivotRoot(".", "."); err != nil {
		return at("change the root to", staging, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return at("detach", "the host's root", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return at("enter", "/", err)
	}
	stages.stage("pivot")

	// 6. The view, by its path inside; links in it are the new root's.
	if err := mountView(setup, host.fuse); err != nil {
		return err
	}
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return at("open", "/proc", err)
	}
	defer unix.Close(proc)
	send := []int{proc}
	if !setup.NoView {
		send = append(send, host.fuse)
	}
	if err := conn.Send(wire.Packet{Body: wire.Mounted{}}, send...); err != nil {
		return at("send", "the view's descriptor", err)
	}
	stages.stage("view")

	// 7. What needs capabilities for the last time.
	if setup.NewNet {
		if err := loopbackUp(); err != nil {
			return at("bring up", "lo", err)
		}
	}
	if err := os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0); err != nil {
		return at("switch off nested user namespaces in", "/proc/sys/user/max_user_namespaces", err)
	}
	if err := maskProc(); err != nil {
		return err
	}
	if err := setReadOnly(unix.AT_FDCWD, "/", 0); err != nil {
		return at("make read-only", "/", err)
	}
	if err := harden(); err != nil {
		return err
	}
	stages.stage("harden")
	return nil
}

// hostParts are descriptors of what the session is given of the host.
type hostParts struct {
	fuse    int   // an opened /dev/fuse; -1 without a view
	trees   []int // a detached mount per bind; -1 for a link or what is absent
	devices [len(devices)]int
}

func (h *hostParts) close() {
	for _, fd := range append(append([]int{h.fuse}, h.trees...), h.devices[:]...) {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

func takeHost(setup wire.Setup, fds []int) (*hostParts, error) {
	h := &hostParts{fuse: -1}
	for i := range h.devices {
		h.devices[i] = -1
	}
	next := func() int {
		if len(fds) == 0 {
			return -1
		}
		fd := fds[0]
		fds = fds[1:]
		return fd
	}
	defer func() { wire.CloseAll(fds) }()
	if !setup.NoView {
		// The file must be opened in the user namespace that mounts it, so
		// even a node that the daemon made is opened here, through its link.
		node := "/dev/fuse"
		if setup.FuseNode {
			fd := next()
			defer unix.Close(fd)
			node = "/proc/self/fd/" + strconv.Itoa(fd)
		}
		fuse, err := unix.Open(node, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, at("open", "/dev/fuse", err)
		}
		h.fuse = fuse
	}
	for _, b := range setup.Binds {
		tree := -1
		var err error
		switch {
		case b.Link != "":
		case b.Mount:
			tree = next()
		default:
			tree, err = TakeTree(b.Path)
		}
		if err != nil {
			h.close()
			return nil, at("bind", b.Path, err)
		}
		h.trees = append(h.trees, tree)
	}
	for i, name := range devices {
		tree, err := unix.OpenTree(unix.AT_FDCWD, "/dev/"+name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			h.close()
			return nil, at("bind", "/dev/"+name, err)
		}
		h.devices[i] = tree
	}
	return h, nil
}

// TakeTree clones the mounts at and beneath path into a detached, private and
// read-only tree.
func TakeTree(path string) (fd int, err error) {
	tree, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return -1, err
	}
	attr := unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV,
		Propagation: unix.MS_PRIVATE,
	}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		unix.Close(tree)
		return -1, err
	}
	return tree, nil
}

// assemble fills the new root, which is the working directory.
func assemble(setup wire.Setup, host *hostParts) error {
	for _, dir := range [...]string{"proc", "sys", "dev", "dev/pts"} {
		if err := unix.Mkdir(dir, 0o755); err != nil {
			return at("make", dir, err)
		}
	}
	for _, d := range scratchDirs {
		if err := makeScratch(d.path, d.mode); err != nil {
			return err
		}
	}
	if err := makeScratch(inRoot(setup.Home), 0o755); err != nil {
		return err
	}
	for _, dir := range [...]string{"var/tmp", "run/lock"} {
		if err := unix.Mkdir(dir, 0o1777); err != nil {
			return at("make", dir, err)
		}
	}
	for i, b := range setup.Binds {
		if err := placeBind(b, host.trees[i]); err != nil {
			return at("bind", b.Path, err)
		}
	}
	for i, name := range devices {
		target := "dev/" + name
		if err := makeFile(target); err != nil {
			return at("make", target, err)
		}
		if err := moveTo(host.devices[i], target); err != nil {
			return at("bind", target, err)
		}
	}
	ptsOptions := "newinstance,ptmxmode=0666,mode=620"
	if setup.MultiID {
		ptsOptions += ",gid=5"
	}
	if err := unix.Mount("devpts", "dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, ptsOptions); err != nil {
		return at("mount", "dev/pts", err)
	}
	for _, link := range deviceLinks {
		if err := unix.Symlink(link.target, link.name); err != nil {
			return at("link", link.name, err)
		}
	}
	return placeResolver()
}

// makeScratch makes a directory that stays writable when the root no longer is.
func makeScratch(rel string, mode uint32) error {
	if err := mkdirAll(rel); err != nil {
		return at("make", rel, err)
	}
	if err := unix.Chmod(rel, mode); err != nil {
		return at("make", rel, err)
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, rel, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return at("bind", rel, err)
	}
	defer unix.Close(tree)
	return at("bind", rel, moveTo(tree, rel))
}

func placeBind(b wire.Bind, tree int) error {
	target := inRoot(b.Path)
	if b.Link != "" {
		return unix.Symlink(b.Link, target)
	}
	var st unix.Stat_t
	if err := unix.Fstat(tree, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := mkdirAll(target); err != nil {
			return err
		}
	} else {
		if slash := strings.LastIndexByte(target, '/'); slash > 0 {
			if err := mkdirAll(target[:slash]); err != nil {
				return err
			}
		}
		if err := makeFile(target); err != nil {
			return err
		}
	}
	return moveTo(tree, target)
}

// placeResolver keeps name resolution working where /etc/resolv.conf points
// into the host's /run, which the session does not see.
func placeResolver() error {
	link, err := os.Readlink("/etc/resolv.conf")
	if err != nil {
		return nil // a plain file, or none: it is in /etc as it stands
	}
	if strings.HasPrefix(link, "../") {
		link = link[2:]
	}
	if !strings.HasPrefix(link, "/run/") {
		return nil
	}
	text, err := os.ReadFile("/etc/resolv.conf")
	if err != nil || len(text) > 64<<10 {
		return nil // the host resolves nothing either
	}
	rel := inRoot(link)
	if err := mkdirAll(rel[:strings.LastIndexByte(rel, '/')]); err != nil {
		return at("make", rel, err)
	}
	return at("write", rel, os.WriteFile(rel, text, 0o644))
}

// mountSys mounts a sysfs of the session's own network namespace, or shows the
// host's processors where it shares the network. Programs do without either.
func mountSys(newNet bool) {
	if newNet {
		unix.Mount("sysfs", "sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_RDONLY, "")
		return
	}
	const cpus = "devices/system/cpu"
	tree, err := TakeTree("/sys/" + cpus)
	if err != nil {
		return
	}
	defer unix.Close(tree)
	if mkdirAll("sys/"+cpus) == nil {
		moveTo(tree, "sys/"+cpus)
	}
}

func mountView(setup wire.Setup, fuse int) error {
	// A workspace beneath a bound directory is there already.
	if err := mkdirAll(setup.Workspace); err != nil {
		return at("make", setup.Workspace, err)
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV
	if setup.NoView {
		options := "mode=0755,size=" + strconv.FormatUint(setup.Scratch, 10)
		return at("mount a tmpfs at", setup.Workspace, unix.Mount("sandbox-no-view", setup.Workspace, "tmpfs", flags, options))
	}
	options := "rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,fd=" + strconv.Itoa(fuse)
	err := unix.Mount("sandbox:"+setup.Session, setup.Workspace, "fuse.sandbox", flags, options)
	return at("mount the view at", setup.Workspace, err)
}

// maskProc closes what a proc instance shows of the whole host. Writing there
// takes the host's root, which a session's may be where ids map one to one.
func maskProc() error {
	for _, path := range [...]string{"/proc/sys", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sysrq-trigger"} {
		tree, err := TakeTree(path)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return at("mask", path, err)
		}
		err = moveTo(tree, path)
		unix.Close(tree)
		if err != nil {
			return at("mask", path, err)
		}
	}
	for _, path := range [...]string{"/proc/kcore", "/proc/keys", "/proc/kmsg", "/proc/timer_list", "/proc/latency_stats"} {
		err := unix.Mount("/dev/null", path, "", unix.MS_BIND, "")
		if err != nil && err != unix.ENOENT {
			return at("mask", path, err)
		}
	}
	return nil
}

func setReadOnly(dir int, path string, flags uint) error {
	return unix.MountSetattr(dir, path, flags, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
}

func moveTo(tree int, target string) error {
	return unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// mkdirAll makes path and its missing parents. It does not ask first, so a
// read-only directory that is already there is no error.
func mkdirAll(path string) error {
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != '/' {
			continue
		}
		err := unix.Mkdir(path[:i], 0o755)
		if err == nil || err == unix.EEXIST {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(path[:i], &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return err
		}
	}
	return nil
}

func makeFile(path string) error {
	fd, err := unix.Open(path, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o444)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// inRoot is an absolute path as seen from the root's directory.
func inRoot(path string) string { return strings.TrimPrefix(path, "/") }

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}
