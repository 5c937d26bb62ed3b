package client_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve answers every request on dir's socket with h.
func serve(t *testing.T, dir string, h http.HandlerFunc) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(dir, "listening"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(l.Addr().String(), filepath.Join(dir, config.SocketName)); err != nil {
		t.Fatal(err)
	}
	var handlers sync.WaitGroup
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handlers.Add(1)
		defer handlers.Done()
		_, _ = io.Copy(io.Discard, r.Body)
		h(w, r)
	})}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() {
		_ = srv.Close()
		<-done
		handlers.Wait()
	})
}

func call(t *testing.T, dir string, progress func(catalog.Progress)) *catalog.Error {
	t.Helper()
	c := client.New(dir)
	defer c.Close()
	var res catalog.ListSandboxesResult
	err := c.Call(t.Context(), client.Call{Op: catalog.ListSandboxes, RequestID: "r1"}, &res, progress)
	if err == nil {
		return nil
	}
	e, ok := errors.AsType[*catalog.Error](err)
	if !ok {
		t.Fatalf("%T is no catalog error: %v", err, err)
	}
	return e
}

func TestNoDaemonSaysHowToStartOne(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "it's not there")
	dead := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dead, config.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{missing, t.TempDir(), dead} {
		e := call(t, dir, nil)
		if e == nil || e.Kind != catalog.Unavailable || !strings.Contains(e.Message, `start one with "sandboxd start --state-dir `+client.Quote(dir)+`"`) || strings.Contains(e.Message, "\n") {
			t.Errorf("%s: %v", dir, e)
		}
	}
}

func TestTokenIsSent(t *testing.T) {
	dir := t.TempDir()
	got := make(chan string, 1)
	serve(t, dir, func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header.Get("Authorization") + " " + r.Header.Get("X-Request-Id") + " " + r.URL.Path
		_, _ = io.WriteString(w, `{"sandboxes":[]}`)
	})
	if err := os.WriteFile(filepath.Join(dir, config.TokenName), []byte("abc\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if e := call(t, dir, nil); e != nil {
		t.Fatal(e)
	}
	if g, want := <-got, "Bearer abc r1 /v1/list_sandboxes"; g != want {
		t.Errorf("sent %q, want %q", g, want)
	}
}

func TestAnswersThatBreakOff(t *testing.T) {
	abort := func() { panic(http.ErrAbortHandler) }
	for _, tt := range []struct {
		name   string
		answer func(w http.ResponseWriter)
		kind   catalog.Kind
		want   string
	}{
		{"before the header", func(http.ResponseWriter) { abort() }, catalog.Unavailable, "outcome is unknown"},
		{"in a document", func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, `{"sand`)
		}, catalog.Unavailable, "outcome is unknown"},
		{"between lines", func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/x-ndjson")
			w.Header().Set("X-Request-Id", "r1")
			_, _ = io.WriteString(w, `{"progress":{}}`+"\n")
			_ = http.NewResponseController(w).Flush()
		}, catalog.Unavailable, "request id r1"},
		{"a line that is no JSON", func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/x-ndjson")
			_, _ = io.WriteString(w, "hello\n")
		}, catalog.Internal, "cannot be read"},
		{"an error of nobody", func(w http.ResponseWriter) { w.WriteHeader(http.StatusTeapot) }, catalog.Internal, "418"},
		{"a result of another shape", func(w http.ResponseWriter) { _, _ = io.WriteString(w, `{"sandboxes":7}`) }, catalog.Internal, "one version"},
		{"an error", func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"error":{"kind":"not_found","message":"m","details":null}}`)
		}, catalog.NotFound, "m"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			serve(t, dir, func(w http.ResponseWriter, _ *http.Request) { tt.answer(w) })
			if e := call(t, dir, func(catalog.Progress) {}); e == nil || e.Kind != tt.kind || !strings.Contains(e.Message, tt.want) {
				t.Errorf("got %+v, want %s with %q", e, tt.kind, tt.want)
			}
		})
	}
}

func TestGivingUp(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	serve(t, dir, func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	})
	c := client.New(dir)
	defer c.Close()
	err := c.Call(ctx, client.Call{Op: catalog.ListSandboxes}, nil, nil)
	if catalog.AsError(err).Kind != catalog.Unavailable || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestQuote(t *testing.T) {
	for in, want := range map[string]string{
		"/a/b-c.d": "/a/b-c.d", "": "''", "a b": "'a b'", "it's": `'it'\''s'`, "$(x)": "'$(x)'", "\xff": "'\xff'",
	} {
		if got := client.Quote(in); got != want {
			t.Errorf("Quote(%q) = %s, want %s", in, got, want)
		}
	}
}

// A daemon that holds its lock but has no socket yet is waited for, until it has
// one or is gone.
func TestADaemonThatIsBeingReplacedIsWaitedFor(t *testing.T) {
	for _, comes := range []bool{true, false} {
		dir := t.TempDir()
		lock, err := config.Default(dir).TakeLock(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan *catalog.Error, 1)
		go func() { got <- call(t, dir, nil) }()
		if comes {
			serve(t, dir, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"sandboxes":[]}`) })
			if e := <-got; e != nil {
				t.Errorf("a daemon that comes: %v", e)
			}
		}
		if err := lock.Close(); err != nil {
			t.Fatal(err)
		}
		if !comes {
			if e := <-got; e == nil || e.Kind != catalog.Unavailable || !strings.Contains(e.Message, "no daemon is running") {
				t.Errorf("a daemon that goes: %v", e)
			}
		}
	}
}
