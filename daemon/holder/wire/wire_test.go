package wire

import (
	"bytes"
	"errors"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func bodies() *rapid.Generator[Body] {
	id := rapid.StringMatching(`[A-Za-z0-9._:-]{1,64}`)
	text := rapid.StringMatching(`[^\x00]{0,40}`)
	return rapid.Custom(func(t *rapid.T) Body {
		u32 := func() uint32 { return rapid.Uint32().Draw(t, "u32") }
		u64 := func() uint64 { return rapid.Uint64().Draw(t, "u64") }
		flag := func() bool { return rapid.Bool().Draw(t, "flag") }
		str := func() string { return text.Draw(t, "text") }
		name := id.Draw(t, "id")
		switch rapid.IntRange(0, 13).Draw(t, "kind") {
		case 0:
			b := Setup{
				Session: name, Workspace: str(), Home: str(), Scratch: u64(),
				NewNet: flag(), NoView: flag(), FuseNode: flag(), MultiID: flag(),
			}
			for range rapid.IntRange(0, 5).Draw(t, "binds") {
				b.Binds = append(b.Binds, Bind{Path: str(), Mount: flag(), Link: str()})
			}
			return b
		case 1:
			return Exec{ID: name}
		case 2:
			return Kill{ID: name, Signal: rapid.Uint8().Draw(t, "signal")}
		case 3:
			return Ack{ID: name}
		case 4:
			return Sync{}
		case 5:
			return Resync{}
		case 6:
			return Mapped{}
		case 7:
			return Mounted{}
		case 8:
			var b Ready
			for range rapid.IntRange(0, 5).Draw(t, "stages") {
				b.Stages = append(b.Stages, Stage{Name: str(), Nanos: u64()})
			}
			return b
		case 9:
			return Failed{Step: str(), Errno: rapid.Uint16().Draw(t, "errno"), Text: str()}
		case 10:
			return Started{ID: name, Stub: u32(), Pid: u32()}
		case 11:
			return Exited{
				ID: name, Status: u32(), UserMicros: u64(), SysMicros: u64(), MaxRSS: u64(), Lost: flag(),
				StdoutDropped: u64(), StderrDropped: u64(), StreamErrno: rapid.Uint16().Draw(t, "errno"),
			}
		case 12:
			return Gone{ID: name}
		default:
			return Reply{Errno: rapid.Uint16().Draw(t, "errno")}
		}
	})
}

func TestPacketsComeBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := Packet{Seq: rapid.Uint64().Draw(t, "seq"), Body: bodies().Draw(t, "body")}
		b := Append([]byte("before"), p)[len("before"):]
		got, err := Parse(b)
		if err != nil || !reflect.DeepEqual(got, p) {
			t.Fatalf("%#v came back as %#v, %v", p, got, err)
		}
		for n := range b {
			if _, err := Parse(b[:n]); err == nil {
				t.Fatalf("%#v: %d of %d bytes were enough", p, n, len(b))
			}
		}
		if _, err := Parse(append(b, 0)); err == nil {
			t.Fatal("a byte too many went unseen")
		}
	})
}

func commands() *rapid.Generator[Command] {
	text := rapid.StringMatching(`[^\x00]{0,40}`)
	return rapid.Custom(func(t *rapid.T) Command {
		c := Command{
			Argv:   rapid.SliceOfN(text, 1, 5).Draw(t, "argv"),
			Dir:    text.Draw(t, "dir"),
			Output: rapid.Uint64().Draw(t, "output"),
		}
		if env := rapid.SliceOfN(text, 0, 5).Draw(t, "env"); len(env) > 0 {
			c.Env = env
		}
		for range rapid.IntRange(0, MaxLimits).Draw(t, "limits") {
			c.Limits = append(c.Limits, Limit{
				Resource: rapid.Uint32().Draw(t, "resource"),
				Soft:     rapid.Uint64().Draw(t, "soft"), Hard: rapid.Uint64().Draw(t, "hard"),
			})
		}
		return c
	})
}

func TestCommandsComeBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := commands().Draw(t, "command")
		b := AppendCommand(nil, c)
		got, err := ParseCommand(b)
		if err != nil || !reflect.DeepEqual(got, c) {
			t.Fatalf("%#v came back as %#v, %v", c, got, err)
		}
		for n := range b {
			if _, err := ParseCommand(b[:n]); err == nil {
				t.Fatalf("%#v: %d of %d bytes were enough", c, n, len(b))
			}
		}
	})
}

func TestRefusals(t *testing.T) {
	good := Append(nil, Packet{Body: Exec{ID: "one"}})
	with := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] = v
		return b
	}
	for name, test := range map[string]struct {
		packet []byte
		want   error
	}{
		"empty":         {nil, ErrFormat},
		"other version": {with(0, 2), ErrVersion},
		"unknown kind":  {with(1, 99), ErrFormat},
		"not zero":      {with(2, 1), ErrFormat},
		"long string":   {with(15, 255), ErrFormat},
		"bad id":        {with(16, '/'), ErrFormat},
		"NUL":           {with(16, 0), ErrFormat},
		"too large":     {make([]byte, MaxPacket+1), ErrFormat},
	} {
		if _, err := Parse(test.packet); !errors.Is(err, test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, c := range map[string]Command{
		"no argv":    {Dir: "/"},
		"NUL in arg": {Argv: []string{"a\x00"}},
		"NUL in dir": {Argv: []string{"a"}, Dir: "\x00"},
		"long dir":   {Argv: []string{"a"}, Dir: strings.Repeat("d", MaxPath+1)},
		"limits":     {Argv: []string{"a"}, Limits: make([]Limit, MaxLimits+1)},
		"arguments":  {Argv: make([]string, MaxArgs+1)},
		"size":       {Argv: []string{strings.Repeat("x", MaxCommand)}},
	} {
		if _, err := ParseCommand(AppendCommand(nil, c)); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, id := range []string{"", "a b", "a/b", "é", strings.Repeat("x", MaxID+1)} {
		if ValidID(id) {
			t.Errorf("id %q is valid", id)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, b := range []Body{
		Setup{Session: "s", Binds: []Bind{{Path: "/usr"}}},
		Kill{ID: "a"},
		Ready{Stages: []Stage{{"x", 1}}},
		Failed{Step: "a", Text: "b"},
		Exited{ID: "a"},
		Reply{},
	} {
		f.Add(Append(nil, Packet{Seq: 7, Body: b}))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Parse(b)
		if err != nil {
			return
		}
		if !bytes.Equal(Append(nil, p), b) {
			t.Fatalf("%x parses as %#v, which is encoded otherwise", b, p)
		}
	})
}

func FuzzParseCommand(f *testing.F) {
	f.Add(AppendCommand(nil, Command{Argv: []string{"a", "b"}, Env: []string{"C=d"}, Dir: "/", Limits: []Limit{{1, 2, 3}}, Output: 4}))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseCommand(b)
		if err != nil {
			return
		}
		if !bytes.Equal(AppendCommand(nil, c), b) {
			t.Fatalf("%x parses as %#v, which is encoded otherwise", b, c)
		}
	})
}

func connected(t *testing.T, limit int) (*Conn, *Conn) {
	t.Helper()
	a, b, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*Conn
	for i, fd := range []int{a, b} {
		c, err := NewConn(fd, limit)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		conns[i] = c
	}
	return conns[0], conns[1]
}

func TestConnCarriesDescriptors(t *testing.T) {
	a, b := connected(t, MaxPacket)
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	sent := Packet{Seq: 5, Body: Exec{ID: "x"}}
	if err := a.Send(sent, int(out.Fd()), int(out.Fd())); err != nil {
		t.Fatal(err)
	}
	out.Close()
	got, fds, err := b.Receive()
	if err != nil || len(fds) != 2 || !reflect.DeepEqual(got, sent) {
		t.Fatal(got, fds, err)
	}
	if flags, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("a received descriptor outlives an exec: %x, %v", flags, err)
	}
	CloseAll(fds)
	if _, err := in.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("a descriptor stayed open: %v", err)
	}
	a.Close()
	if _, _, err := b.Receive(); err != io.EOF {
		t.Errorf("after close: %v", err)
	}
	if err := b.Send(sent); err == nil {
		t.Error("sent to nobody")
	}
}

func TestConnRefusesWhatIsNotOurs(t *testing.T) {
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	for name, packet := range map[string][]byte{
		"rubbish":  []byte("\x01rubbish"),
		"too long": Append(nil, Packet{Body: Failed{Text: strings.Repeat("x", 200)}}),
	} {
		fd, other, err := Pair()
		if err != nil {
			t.Fatal(err)
		}
		c, err := NewConn(other, 100)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Sendmsg(fd, packet, unix.UnixRights(int(out.Fd())), nil, 0); err != nil {
			t.Fatal(err)
		}
		if _, fds, err := c.Receive(); !errors.Is(err, ErrFormat) || fds != nil {
			t.Errorf("%s: %v, %v", name, fds, err)
		}
		c.Close()
		unix.Close(fd)
	}
	out.Close()
	if _, err := in.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("a descriptor beside a bad packet stayed open: %v", err)
	}
	a, _ := connected(t, MaxPacket)
	if err := a.Send(Packet{Body: Failed{Text: strings.Repeat("x", MaxPacket)}}); !errors.Is(err, ErrFormat) {
		t.Errorf("a packet beyond the bound: %v", err)
	}
}
