package run

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// rig is a pump with the command's ends of its streams.
type rig struct {
	*pump
	in   *os.File
	outs [2]*os.File
	done chan struct{} // closed when the pump has ended
}

func (r *rig) start() {
	go func() {
		defer close(r.done)
		r.run()
	}()
}

func (r *rig) end() {
	r.in.Close()
	for _, out := range r.outs {
		out.Close()
	}
	<-r.done
}

type fataler interface{ Fatal(...any) }

func newRig(t fataler, input string, outputs [2]string, limit uint64) *rig {
	open := func(name string, flags int) int {
		fd, err := unix.Open(name, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	p, err := newPump([3]int{
		open(input, unix.O_RDONLY),
		open(outputs[0], unix.O_WRONLY|unix.O_APPEND), open(outputs[1], unix.O_WRONLY|unix.O_APPEND),
	}, limit)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{pump: p, done: make(chan struct{})}
	r.in = os.NewFile(uintptr(p.theirs[0]), "in")
	for i := range r.outs {
		r.outs[i] = os.NewFile(uintptr(p.theirs[1+i]), "out")
	}
	return r
}

// files makes an input and two empty outputs.
func files(t fataler, dir string, input []byte) (in string, outs [2]string) {
	in, outs = filepath.Join(dir, "in"), [2]string{filepath.Join(dir, "out"), filepath.Join(dir, "err")}
	for name, data := range map[string][]byte{in: input, outs[0]: nil, outs[1]: nil} {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return in, outs
}

// Whatever is written in whatever pieces, each file is the beginning of its
// stream, up to the limit, at every settle; and the rest is counted.
func TestFilesAreTheBeginningsOfTheStreams(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.OneOf(rapid.Just(uint64(0)), rapid.Uint64Range(1, 300000), rapid.Just(uint64(math.MaxUint64))).Draw(t, "limit")
		packets := rapid.Bool().Draw(t, "packets")
		in, outs := files(t, dir, nil)
		r := newRig(t, in, outs, limit)
		running := rapid.Bool().Draw(t, "running")
		if running {
			r.start()
		}
		var want [2][]byte
		check := func() {
			dropped, err := r.settle()
			if err != 0 {
				t.Fatal(err)
			}
			for i := range want {
				kept := uint64(len(want[i]))
				if limit > 0 {
					kept = min(kept, limit)
				}
				got, err := os.ReadFile(outs[i])
				if err != nil || !bytes.Equal(got, want[i][:kept]) || dropped[i] != uint64(len(want[i]))-kept {
					t.Fatalf("stream %d: of %d bytes %d are kept, %d dropped, limit %d, %v", i, len(want[i]), len(got), dropped[i], limit, err)
				}
			}
		}
		for range rapid.IntRange(0, 10).Draw(t, "writes") {
			i := rapid.IntRange(0, 1).Draw(t, "stream")
			flags := 0
			if packets {
				flags = unix.O_DIRECT
			}
			if _, err := unix.FcntlInt(r.outs[i].Fd(), unix.F_SETFL, flags); err != nil {
				t.Fatal(err)
			}
			piece := bytes.Repeat([]byte{byte(len(want[i])), 0, 0xff}, rapid.IntRange(0, 20000).Draw(t, "thirds"))
			if len(piece) > 0 {
				if _, err := r.outs[i].Write(piece); err != nil {
					t.Fatal(err)
				}
			}
			want[i] = append(want[i], piece...)
			check()
		}
		if !running {
			r.start()
		}
		r.end()
		for i := range want {
			if info, err := os.Stat(outs[i]); err != nil || info.Size() > int64(len(want[i])) {
				t.Fatal(info, err)
			}
		}
	})
}

func TestSettleDoesNotWaitForWriters(t *testing.T) {
	in, outs := files(t, t.TempDir(), nil)
	r := newRig(t, in, outs, 1000)
	r.start()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for page := make([]byte, 4096); ; {
			select {
			case <-stop:
				return
			default:
				r.outs[0].Write(page)
			}
		}
	}()
	for dropped := uint64(0); dropped < 10<<20; {
		now, err := r.settle()
		if err != 0 || now[0] < dropped || now[1] != 0 {
			t.Fatal(now, err)
		}
		dropped = now[0]
	}
	close(stop)
	<-stopped
	r.end()
	if info, err := os.Stat(outs[0]); err != nil || info.Size() != 1000 {
		t.Error(info, err)
	}
}

func TestInputIsFed(t *testing.T) {
	for _, size := range []int{0, 1, chunk - 1, chunk, chunk + 1, 1 << 20} {
		text := strings.Repeat("\x00\xfftext", size/6+1)[:size]
		in, outs := files(t, t.TempDir(), []byte(text))
		r := newRig(t, in, outs, 0)
		r.start()
		var got bytes.Buffer
		if _, err := got.ReadFrom(r.in); err != nil || got.String() != text {
			t.Errorf("of %d bytes came %d, or others: %v", size, got.Len(), err)
		}
		r.end()
		// Nobody reads: the pump ends when the last reader does.
		in, outs = files(t, t.TempDir(), []byte(text))
		r = newRig(t, in, outs, 0)
		r.start()
		r.end()
	}
}

// A disk may fill up, or fail; here the file is one that cannot grow.
func TestFailingFiles(t *testing.T) {
	fd, err := unix.MemfdCreate("full", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW); err != nil {
		t.Fatal(err)
	}
	in, outs := files(t, t.TempDir(), nil)
	other, err := unix.Open(outs[1], unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	unreadable, err := unix.Open(in, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPump([3]int{unreadable, fd, other}, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{pump: p, done: make(chan struct{})}
	r.in = os.NewFile(uintptr(p.theirs[0]), "in")
	r.outs = [2]*os.File{os.NewFile(uintptr(p.theirs[1]), "out"), os.NewFile(uintptr(p.theirs[2]), "err")}
	for _, out := range r.outs {
		if _, err := out.WriteString("text"); err != nil {
			t.Fatal(err)
		}
	}
	if dropped, err := r.settle(); dropped != [2]uint64{4, 0} || err != unix.EPERM {
		t.Error(dropped, err)
	}
	r.start()
	if n, err := r.in.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Error("an input that fails does not end:", n, err)
	}
	for range 1000 {
		if _, err := r.outs[0].Write(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	if dropped, err := r.settle(); dropped != [2]uint64{1000004, 0} || err != unix.EPERM {
		t.Error(dropped, err)
	}
	r.end()
	if text, err := os.ReadFile(outs[1]); err != nil || string(text) != "text" {
		t.Errorf("the other stream: %q, %v", text, err)
	}
}

func TestOtherThanFilesAreTheCommands(t *testing.T) {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPump([3]int{null, null, null}, 1)
	if err != nil || p.theirs != [3]int{null, null, null} {
		t.Fatal(p.theirs, err)
	}
	p.run()
	if dropped, err := p.settle(); dropped != [2]uint64{} || err != 0 {
		t.Error(dropped, err)
	}
	unix.Close(null)
}
