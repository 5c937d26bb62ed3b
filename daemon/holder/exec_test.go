package holder

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// execer opens a file that its exec will close, and executes another program.
func execer(path string) {
	if _, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		panic(err)
	}
	panic(unix.Exec("/bin/true", []string{"true"}, nil))
}

// The FUSE requests that a view with one empty file has to answer.
const (
	opLookup  = 1
	opForget  = 2
	opGetattr = 3
	opOpen    = 14
	opRelease = 18
	opFlush   = 25
	opForgets = 42
)

// oneFile serves a view that holds one file "f", and calls flushed, before it
// answers, with the inner pid of who closes that. It ends with the connection.
func oneFile(fd int, flushed func(pid uint32)) {
	attr := func(node uint64) []byte {
		b := make([]byte, 88)
		mode, links := uint32(unix.S_IFDIR|0o755), uint32(2)
		if node == 2 {
			mode, links = unix.S_IFREG|0o644, 1
		}
		binary.LittleEndian.PutUint64(b[0:], node)
		binary.LittleEndian.PutUint32(b[60:], mode)
		binary.LittleEndian.PutUint32(b[64:], links)
		return b
	}
	buf := make([]byte, 1<<17)
	for {
		n, err := unix.Read(fd, buf)
		if err == unix.EINTR || err == unix.EAGAIN || err == unix.ENOENT {
			continue
		}
		if err != nil || n < 40 {
			return
		}
		op, unique := binary.LittleEndian.Uint32(buf[4:]), binary.LittleEndian.Uint64(buf[8:])
		node, pid := binary.LittleEndian.Uint64(buf[16:]), binary.LittleEndian.Uint32(buf[32:])
		var body []byte
		errno := int32(0)
		switch op {
		case opForget, opForgets:
			continue
		case opLookup:
			body = append(make([]byte, 40), attr(2)...)
			binary.LittleEndian.PutUint64(body, 2)
		case opGetattr:
			body = append(make([]byte, 16), attr(node)...)
		case opOpen:
			body = make([]byte, 16)
		case opFlush:
			flushed(pid)
		case opRelease:
		default:
			errno = -int32(unix.ENOSYS)
		}
		reply := make([]byte, 16, 16+len(body))
		binary.LittleEndian.PutUint32(reply[0:], uint32(16+len(body)))
		binary.LittleEndian.PutUint32(reply[4:], uint32(errno))
		binary.LittleEndian.PutUint64(reply[8:], unique)
		unix.Write(fd, append(reply, body...))
	}
}

// A close in the middle of an exec is the trap: it waits for the view with a
// lock held, so nothing that answers it may wait for that lock.
func TestOwnersAreFoundDuringAnExec(t *testing.T) {
	dir := t.TempDir()
	copyFile(t, "/proc/self/exe", filepath.Join(dir, execerName))
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h, err := Start(patience(t), Config{Session: "view", Workspace: "/tmp/ws", HostPaths: []string{dir}})
	if err != nil {
		t.Fatal(err)
	}
	view, err := unix.FcntlInt(uintptr(h.FuseFD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		<-served
		unix.Close(view)
	})
	if err := h.Ready(patience(t)); err != nil {
		t.Fatal(err)
	}
	type found struct {
		id  string
		ok  bool
		err error
	}
	asked := make(chan found, 16)
	ask := func(pid uint32) (f found) {
		for i := range h.owners.slots {
			h.owners.slots[i].Store(nil)
		}
		f.id, f.ok = h.CommandOf(pid)
		f.err = h.Kill("exec", unix.SIGTERM)
		return f
	}
	answerInit(t, view)
	go func() {
		defer close(served)
		oneFile(view, func(pid uint32) { asked <- ask(pid) })
	}()
	c := Command{ID: "exec", Dir: "/", Env: []string{"PATH=" + dir}, Argv: []string{execerName, "/tmp/ws/f"}}
	if _, err := h.Exec(c); err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-asked:
		if !f.ok || f.id != "exec" || f.err != nil {
			t.Errorf("owner %q, %v; kill: %v", f.id, f.ok, f.err)
		}
	case <-time.After(deadline):
		t.Fatal("the owner is looked for until the request is answered: deadlock")
	}
	if err := h.WaitTree(patience(t), "exec"); err != nil {
		t.Error(err)
	}
}
