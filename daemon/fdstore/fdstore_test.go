package fdstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// childMode tells the test binary to be a child of TestParent* instead.
const childMode = "FDSTORE_TEST_CHILD"

func TestMain(m *testing.M) {
	if mode := os.Getenv(childMode); mode != "" {
		if err := child(mode); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// child counts its starts in a file that lives only in the store: the first
// child makes it, each one appends a byte and dies as mode says, and the one
// that finds three bytes writes what it found and ends well.
func child(mode string) error {
	f, err := FromEnv()
	if err != nil {
		return err
	}
	c, items, err := Connect(f)
	if err != nil {
		return err
	}
	if mode == "die" {
		return kill()
	}
	if len(items) == 0 {
		fd, err := unix.MemfdCreate("counter", unix.MFD_CLOEXEC)
		if err != nil {
			return err
		}
		items = []Item{{Key: "counter", Meta: []byte("made by the first"), Files: []*os.File{os.NewFile(uintptr(fd), "counter")}}}
		for i := range 100 {
			if err := c.Put(fmt.Sprintf("filler/%d", i), nil, items[0].Files[0]); err != nil {
				return err
			}
		}
		if err := c.Put("counter", items[0].Meta, items[0].Files[0]); err != nil {
			return err
		}
		for i := range 100 {
			if err := c.Drop(fmt.Sprintf("filler/%d", i)); err != nil {
				return err
			}
		}
	}
	if len(items) != 1 {
		return fmt.Errorf("%d items", len(items))
	}
	counter := items[0].Files[0]
	n, err := counter.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if n == 3 {
		fmt.Printf("%s: %s", items[0].Key, items[0].Meta)
		return c.Close()
	}
	if _, err := counter.Write([]byte{'x'}); err != nil {
		return err
	}
	switch mode {
	case "kill":
		return kill()
	case "panic":
		panic("as the test wants")
	case "wait":
		<-c.Gone()
		return nil
	}
	return nil
}

func kill() error { return syscall.Kill(os.Getpid(), syscall.SIGKILL) }

func parent(mode string, out io.Writer) Parent {
	return Parent{
		Command: func() *exec.Cmd {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), childMode+"="+mode)
			cmd.Stdout = out
			return cmd
		},
		Backoff: func(int) time.Duration { return 0 },
	}
}

func TestDescriptorsOutliveTheirUser(t *testing.T) {
	for _, mode := range []string{"kill", "panic"} {
		t.Run(mode, func(t *testing.T) {
			var out bytes.Buffer
			p := parent(mode, &out)
			starts, deaths := 0, 0
			p.Started = func(int) error { starts++; return nil }
			p.Died = func(_ int, state *os.ProcessState) { deaths++ }
			code, err := p.Run(t.Context(), nil)
			if err != nil || code != 0 {
				t.Fatalf("code %d, error %v", code, err)
			}
			if starts != 4 || deaths != 3 {
				t.Errorf("%d starts and %d deaths, want 4 and 3", starts, deaths)
			}
			if got, want := out.String(), "counter: made by the first"; got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

func TestParentGivesUp(t *testing.T) {
	starts := 0
	p := parent("die", io.Discard)
	p.Started = func(int) error { starts++; return nil }
	code, err := p.Run(t.Context(), nil)
	if code != 1 || err == nil || !strings.Contains(err.Error(), "gave up") || starts != maxDeaths {
		t.Errorf("code %d, error %v, %d starts", code, err, starts)
	}
}

func TestParentPassesTheEndOn(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p := parent("wait", io.Discard)
	p.Started = func(int) error { cancel(); return nil }
	code, err := p.Run(ctx, nil)
	if want := 128 + int(syscall.SIGTERM); code != want || err != nil {
		t.Errorf("code %d, error %v, want %d", code, err, want)
	}
}

func TestParentReportsAChildThatCannotStart(t *testing.T) {
	p := Parent{Command: func() *exec.Cmd { return exec.Command("/nonexistent/sandboxd") }}
	if code, err := p.Run(t.Context(), nil); code != 1 || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("code %d, error %v", code, err)
	}
	p = parent("wait", io.Discard)
	stop := errors.New("cannot write the lock file")
	p.Started = func(int) error { return stop }
	if code, err := p.Run(t.Context(), nil); code != 1 || !errors.Is(err, stop) {
		t.Errorf("code %d, error %v", code, err)
	}
}

// connect joins a new client to s and returns what it was handed.
func connect(t *testing.T, s *Store) (*Client, []Item, <-chan error) {
	t.Helper()
	p, c, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(p) }()
	client, items, err := Connect(c)
	if err != nil {
		t.Fatal(err)
	}
	return client, items, done
}

func TestHandoverKeepsOrderMetaAndIdentity(t *testing.T) {
	s := NewStore()
	client, items, done := connect(t, s)
	if len(items) != 0 {
		t.Fatalf("a new store has %d items", len(items))
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	big := bytes.Repeat([]byte{0xff}, MaxMeta)
	for _, err := range []error{
		client.Put("b", big, r, w),
		client.Put("a", nil),
		client.Put("c", []byte("old"), r),
		client.Put("c", []byte("new"), w),
		client.Drop("a"),
		client.Drop("never put"),
		client.Close(),
		<-done,
		r.Close(), w.Close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}

	client, items, done = connect(t, s)
	if len(items) != 2 || items[0].Key != "b" || items[1].Key != "c" {
		t.Fatalf("items %v, store has %v", items, s.Keys())
	}
	if !bytes.Equal(items[0].Meta, big) || string(items[1].Meta) != "new" {
		t.Error("meta is not what was put")
	}
	if _, err := items[1].Files[0].WriteString("through the store"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 17)
	if _, err := io.ReadFull(items[0].Files[0], buf); err != nil || string(buf) != "through the store" {
		t.Errorf("read %q, %v", buf, err)
	}
	for _, i := range items {
		if err := i.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(client.Close(), <-done, s.Close()); err != nil {
		t.Error(err)
	}
}

func TestClientLearnsThatItsParentIsGone(t *testing.T) {
	p, c, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	if err := send(p, msgEnd, entry{}); err != nil {
		t.Fatal(err)
	}
	client, _, err := Connect(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	<-client.Gone()
	if err := client.Put("a", nil); err == nil {
		t.Error("a put without a parent succeeds")
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
}

func TestBoundsAreRefusedBeforeSending(t *testing.T) {
	s := NewStore()
	client, _, done := connect(t, s)
	for _, err := range []error{
		client.Put("", nil),
		client.Put(strings.Repeat("k", MaxKey+1), nil),
		client.Put("k", make([]byte, MaxMeta+1)),
		client.Put("k", nil, slices.Repeat([]*os.File{os.Stdin}, MaxFiles+1)...),
		client.Drop(""),
	} {
		if err == nil {
			t.Error("out of bounds, but no error")
		}
	}
	if err := errors.Join(client.Put("k", nil), client.Close(), <-done, s.Close()); err != nil {
		t.Error(err)
	}
}

func TestServeRefusesWhatIsNotTheProtocol(t *testing.T) {
	for name, b := range map[string][]byte{
		"short":      {'P'},
		"no key":     {'P', 0, 0},
		"key length": {'P', 0, 9, 'k'},
		"kind":       {'?', 0, 1, 'k'},
		"drop meta":  {'D', 0, 1, 'k', 'm'},
		"end":        {'E', 0, 0},
		"long meta":  append([]byte{'P', 0, 1, 'k'}, make([]byte, MaxMeta+1)...),
		"too long":   append([]byte{'P', 0, 1, 'k'}, make([]byte, MaxMeta+MaxKey+1)...),
	} {
		t.Run(name, func(t *testing.T) {
			p, f, err := Pair()
			if err != nil {
				t.Fatal(err)
			}
			s := NewStore()
			done := make(chan error, 1)
			go func() { done <- s.Serve(p) }()
			c, err := net.FileConn(f)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write(b); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err == nil {
				t.Error("no error")
			}
			if err := errors.Join(c.Close(), f.Close(), s.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestStoreAgainstAModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := NewStore()
		model := map[string]string{}
		for range rapid.IntRange(1, 3).Draw(rt, "children") {
			client, items, done := connect(t, s)
			got := map[string]string{}
			for _, i := range items {
				got[i.Key] = string(i.Meta)
			}
			if fmt.Sprint(got) != fmt.Sprint(model) {
				rt.Fatalf("handed over %v, want %v", got, model)
			}
			for range rapid.IntRange(0, 20).Draw(rt, "steps") {
				key := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "key")
				if rapid.Bool().Draw(rt, "put") {
					meta := rapid.String().Draw(rt, "meta")
					model[key] = meta
					if err := client.Put(key, []byte(meta)); err != nil {
						rt.Fatal(err)
					}
					continue
				}
				delete(model, key)
				if err := client.Drop(key); err != nil {
					rt.Fatal(err)
				}
			}
			if err := errors.Join(client.Close(), <-done); err != nil {
				rt.Fatal(err)
			}
		}
	})
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte{'P', 0, 1, 'k', 'm'})
	f.Add([]byte{'D', 0, 1, 'k'})
	f.Add([]byte{'E', 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		kind, key, meta, err := decode(b)
		if err != nil {
			return
		}
		again, err := encode(kind, key, meta)
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%q decodes to %q %q %q, which encodes to %q (%v)", b, kind, key, meta, again, err)
		}
	})
}
