package gateway_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/client"
	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/gateway"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// handlers answers every operation with its empty result.
func handlers() map[string]gateway.Handler {
	all := map[string]gateway.Handler{}
	for _, op := range catalog.Operations() {
		all[op.Name] = func(context.Context, gateway.Call) (any, error) { return op.NewResult(), nil }
	}
	return all
}

// door is a gateway over a temporary state directory.
type door struct {
	cfg   config.Config
	token string
	http  *http.Client
	end   func() error
}

func open(t *testing.T, o gateway.Options) *door {
	t.Helper()
	cfg := config.Default(t.TempDir())
	hash, err := gateway.EnsureToken(cfg.TokenFile())
	if err != nil {
		t.Fatal(err)
	}
	if o.Handlers == nil {
		o.Handlers = handlers()
	}
	if o.Grants == nil {
		o.Grants = []gateway.Grant{{Token: hash, Authority: catalog.Manage}}
	}
	g, err := gateway.New(o)
	if err != nil {
		t.Fatal(err)
	}
	l, err := gateway.Listen(t.Context(), cfg.Socket())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Serve(ctx, l) }()
	d := &door{cfg: cfg, end: sync.OnceValue(func() error { cancel(); return <-done })}
	token, err := os.ReadFile(cfg.TokenFile())
	if err != nil {
		t.Fatal(err)
	}
	d.token = strings.TrimSpace(string(token))
	d.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", cfg.Socket())
	}}}
	t.Cleanup(func() {
		d.http.CloseIdleConnections()
		if err := d.end(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// request sends a request with the token and returns status and body.
func (d *door) request(t *testing.T, method, path, body string, header ...string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://d"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+d.token)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := d.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

func errorOf(t *testing.T, body string) *catalog.Error {
	t.Helper()
	var e catalog.ErrorBody
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Error == nil {
		t.Fatalf("no error document: %q (%v)", body, err)
	}
	return e.Error
}

func TestNewWantsEveryHandler(t *testing.T) {
	h := handlers()
	delete(h, catalog.FileRead)
	h["file_erase"] = h[catalog.FileWrite]
	_, err := gateway.New(gateway.Options{Handlers: h})
	if err == nil || !strings.Contains(err.Error(), "file_read has no handler") || !strings.Contains(err.Error(), "file_erase belongs to no operation") {
		t.Errorf("got %v", err)
	}
}

func TestWhoMayCall(t *testing.T) {
	t.Run("token", func(t *testing.T) {
		d := open(t, gateway.Options{})
		for name, header := range map[string]string{
			"none":   "",
			"scheme": "Basic " + d.token,
			"empty":  "Bearer ",
			"wrong":  "Bearer " + strings.Repeat("0", 64),
			"cut":    "Bearer " + d.token[:63],
		} {
			for _, path := range []string{"/v1/catalog", "/v1/list_sandboxes"} {
				method := http.MethodGet
				if path == "/v1/list_sandboxes" {
					method = http.MethodPost
				}
				resp, body := d.request(t, method, path, "{}", "Authorization", header)
				e := errorOf(t, body)
				if resp.StatusCode != http.StatusUnauthorized || e.Kind != catalog.Unauthorized || !strings.Contains(e.Message, "--state-dir") || strings.Contains(body, d.token) {
					t.Errorf("%s token, %s: %s %s", name, path, resp.Status, body)
				}
			}
		}
		if resp, body := d.request(t, http.MethodPost, "/v1/list_sandboxes", ""); resp.StatusCode != http.StatusOK || body != `{"sandboxes":[]}`+"\n" {
			t.Errorf("right token: %s %s", resp.Status, body)
		}
	})

	for _, tt := range []struct {
		name string
		peer func(net.Conn) (gateway.Peer, error)
		ok   bool
		want string
	}{
		{"own user", func(net.Conn) (gateway.Peer, error) { return gateway.Peer{UID: uint32(os.Geteuid()), PID: 9}, nil }, true, ""},
		{"root", func(net.Conn) (gateway.Peer, error) { return gateway.Peer{UID: 0, PID: 9}, nil }, true, ""},
		{"another user", func(net.Conn) (gateway.Peer, error) { return gateway.Peer{UID: 4242, PID: 9}, nil }, false, "process 9 belongs to user 4242"},
		{"unknown", func(net.Conn) (gateway.Peer, error) { return gateway.Peer{}, errors.New("no credentials") }, false, "no credentials"},
	} {
		t.Run("peer/"+tt.name, func(t *testing.T) {
			d := open(t, gateway.Options{Peer: tt.peer})
			for _, path := range []string{"GET /v1/health", "GET /v1/catalog", "POST /v1/list_sandboxes"} {
				method, path, _ := strings.Cut(path, " ")
				resp, body := d.request(t, method, path, "")
				if tt.ok {
					if resp.StatusCode != http.StatusOK {
						t.Errorf("%s: %s %s", path, resp.Status, body)
					}
					continue
				}
				if e := errorOf(t, body); e.Kind != catalog.Unauthorized || !strings.Contains(e.Message, tt.want) {
					t.Errorf("%s: %s", path, body)
				}
			}
		})
	}
}

func TestGrantsBoundWhatATokenMayDo(t *testing.T) {
	var o gateway.Options
	for _, a := range []catalog.Authority{catalog.Observe, catalog.Work, catalog.Manage} {
		o.Grants = append(o.Grants, gateway.Grant{Token: gateway.HashToken(string(a)), Authority: a})
	}
	d := open(t, o)
	for _, tt := range []struct {
		token catalog.Authority
		op    string
		body  string
		ok    bool
	}{
		{catalog.Observe, catalog.ListSandboxes, ``, true},
		{catalog.Observe, catalog.FileRead, `{"sandbox_id":"s","path":"a"}`, false},
		{catalog.Work, catalog.FileRead, `{"sandbox_id":"s","path":"a"}`, true},
		{catalog.Work, catalog.CreateSandbox, `{"workspace_root":"/a"}`, false},
		{catalog.Manage, catalog.CreateSandbox, `{"workspace_root":"/a"}`, true},
		{catalog.Manage, catalog.Events, ``, true},
	} {
		resp, body := d.request(t, http.MethodPost, "/v1/"+tt.op, tt.body, "Authorization", "Bearer "+string(tt.token))
		if ok := resp.StatusCode == http.StatusOK; ok != tt.ok || !ok && errorOf(t, body).Kind != catalog.Unauthorized {
			t.Errorf("%s as %s: %s %s", tt.op, tt.token, resp.Status, body)
		}
	}
}

func TestBadRequests(t *testing.T) {
	h := handlers()
	h[catalog.FileRead] = func(context.Context, gateway.Call) (any, error) {
		return nil, catalog.Errorf(catalog.Corrupt, "layer L000003: checksum at offset 4096").With(map[string]any{"layer": "L000003", "offset": 4096})
	}
	h[catalog.FileWrite] = func(context.Context, gateway.Call) (any, error) { return nil, errors.New("something else") }
	d := open(t, gateway.Options{Handlers: h, MaxBody: 100})
	for _, tt := range []struct {
		method, path, body string
		header             []string
		status             int
		kind               catalog.Kind
		message            string
	}{
		{http.MethodPost, "/v1/nothing", "", nil, 400, catalog.InvalidRequest, `operation "nothing" does not exist: GET /v1/catalog lists those that do`},
		{http.MethodGet, "/v1/file_read", "", nil, 400, catalog.InvalidRequest, "GET /v1/file_read: no such thing here; use POST /v1/<operation>, GET /v1/catalog or GET /v1/health"},
		{http.MethodPost, "/", "", nil, 400, catalog.InvalidRequest, "POST /: no such thing here; use POST /v1/<operation>, GET /v1/catalog or GET /v1/health"},
		{http.MethodPost, "/v1/list_sandboxes", `{"all":true}`, nil, 400, catalog.InvalidRequest, `list_sandboxes does not know "all": it takes no arguments`},
		{http.MethodPost, "/v1/file_read", `{"sandbox_id":"s"}`, nil, 400, catalog.InvalidRequest, "path is missing or empty: it is required (file, relative to the workspace or absolute beneath it)"},
		{http.MethodPost, "/v1/file_read", strings.Repeat(" ", 101), nil, 507, catalog.ResourceExhausted, "the request is larger than 100 bytes, the most a request may have: send less at once, or raise max_request_bytes in config.json"},
		{http.MethodPost, "/v1/list_sandboxes", "", []string{"X-Request-Id", "a b"}, 400, catalog.InvalidRequest, `request id "a b": must have 1 to 128 characters out of letters, digits and . _ : -`},
		{http.MethodPost, "/v1/list_sandboxes", "", []string{"X-Request-Id", strings.Repeat("x", 129)}, 400, catalog.InvalidRequest, `request id "` + strings.Repeat("x", 129) + `": must have 1 to 128 characters out of letters, digits and . _ : -`},
		{http.MethodPost, "/v1/file_read", `{"sandbox_id":"s","path":"a"}`, nil, 500, catalog.Corrupt, "layer L000003: checksum at offset 4096"},
		{http.MethodPost, "/v1/file_write", `{"sandbox_id":"s","path":"a","content":""}`, nil, 500, catalog.Internal, "something else"},
	} {
		resp, body := d.request(t, tt.method, tt.path, tt.body, tt.header...)
		e := errorOf(t, body)
		if resp.StatusCode != tt.status || e.Kind != tt.kind || e.Message != tt.message {
			t.Errorf("%s %s %s: %s %s", tt.method, tt.path, tt.body, resp.Status, body)
		}
	}
	if _, body := d.request(t, http.MethodPost, "/v1/file_read", `{"sandbox_id":"s","path":"a"}`); !strings.Contains(body, `"details":{"layer":"L000003","offset":4096}`) {
		t.Errorf("details are lost: %s", body)
	}
}

func TestRequestIDs(t *testing.T) {
	seen := make(chan string, 1)
	h := handlers()
	h[catalog.ListSandboxes] = func(_ context.Context, c gateway.Call) (any, error) {
		seen <- c.RequestID
		return &catalog.ListSandboxesResult{}, nil
	}
	d := open(t, gateway.Options{Handlers: h})
	for _, id := range []string{"a", "Run:7_x.y-z", strings.Repeat("9", 128), ""} {
		var header []string
		if id != "" {
			header = []string{"X-Request-Id", id}
		}
		resp, _ := d.request(t, http.MethodPost, "/v1/list_sandboxes", "", header...)
		got := <-seen
		if id != "" && got != id || resp.Header.Get("X-Request-Id") != got || gateway.CheckRequestID(got) != nil {
			t.Errorf("sent %q, handler saw %q, answer says %q", id, got, resp.Header.Get("X-Request-Id"))
		}
	}
}

func TestStream(t *testing.T) {
	h := handlers()
	h[catalog.CreateSandbox] = gateway.Handle(func(_ context.Context, c gateway.Call, r *catalog.CreateSandboxRequest) (*catalog.CreateSandboxResult, error) {
		if r.WorkspaceRoot == "/missing" {
			return nil, catalog.Errorf(catalog.NotFound, "%s does not exist", r.WorkspaceRoot)
		}
		c.Progress(catalog.Progress{Stage: "import", Done: 1})
		c.Progress(catalog.Progress{Stage: "import", Done: 2})
		return &catalog.CreateSandboxResult{SandboxID: "s1"}, nil
	})
	d := open(t, gateway.Options{Handlers: h})
	resp, body := d.request(t, http.MethodPost, "/v1/create_sandbox", `{"workspace_root":"/a"}`, "Accept", gateway.StreamType)
	lines := strings.Split(strings.TrimSuffix(body, "\n"), "\n")
	if resp.Header.Get("Content-Type") != gateway.StreamType || len(lines) != 3 ||
		lines[0] != `{"progress":{"stage":"import","done":1}}` || !strings.HasPrefix(lines[2], `{"result":{"sandbox_id":"s1"`) {
		t.Errorf("%s %q", resp.Header.Get("Content-Type"), lines)
	}
	if _, body := d.request(t, http.MethodPost, "/v1/create_sandbox", `{"workspace_root":"/missing"}`, "Accept", gateway.StreamType); body != `{"error":{"kind":"not_found","message":"/missing does not exist","details":null}}`+"\n" {
		t.Errorf("got %s", body)
	}
	// Without the header the same operation answers with one document.
	if _, body := d.request(t, http.MethodPost, "/v1/create_sandbox", `{"workspace_root":"/a"}`); !strings.HasPrefix(body, `{"sandbox_id":"s1"`) {
		t.Errorf("got %s", body)
	}

	c := client.New(d.cfg.StateDir)
	defer c.Close()
	if shape, err := c.Catalog(t.Context()); err != nil || len(shape.Operations) != len(catalog.Operations()) {
		t.Errorf("catalogue: %d operations, %v", len(shape.Operations), err)
	}
	var reports []int64
	var res catalog.CreateSandboxResult
	if err := c.Call(t.Context(), client.Call{Op: catalog.CreateSandbox, Request: &catalog.CreateSandboxRequest{WorkspaceRoot: "/a"}}, &res, func(p catalog.Progress) { reports = append(reports, p.Done) }); err != nil {
		t.Fatal(err)
	}
	if res.SandboxID != "s1" || !slices.Equal(reports, []int64{1, 2}) {
		t.Errorf("result %+v, reports %v", res, reports)
	}
}

func TestASlowClientHoldsNothingUp(t *testing.T) {
	returned := make(chan struct{})
	h := handlers()
	h[catalog.ExecCommand] = func(_ context.Context, c gateway.Call) (any, error) {
		defer close(returned)
		piece := catalog.Text(strings.Repeat("x", 64<<10))
		for i := range 1000 { // far more than socket and queue hold
			c.Progress(catalog.Progress{Stage: "stdout", Offset: int64(i) * 64 << 10, Output: piece})
		}
		return &catalog.ExecCommandResult{Status: catalog.StatusExited}, nil
	}
	d := open(t, gateway.Options{Handlers: h})
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://d/v1/exec_command", strings.NewReader(`{"sandbox_id":"s","cmd":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+d.token)
	r.Header.Set("Accept", gateway.StreamType)
	resp, err := d.http.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	<-returned // nothing of the answer's body has been read yet
	s := bufio.NewReader(resp.Body)
	last := ""
	for {
		l, err := s.ReadString('\n')
		if err != nil {
			break
		}
		last = l
	}
	if !strings.HasPrefix(last, `{"result":`) {
		t.Errorf("the last line is %.100q", last)
	}
	if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
}

func TestAPanicIsAnInternalError(t *testing.T) {
	h := handlers()
	h[catalog.ListSandboxes] = func(context.Context, gateway.Call) (any, error) { panic("secret detail") }
	told := make(chan string, 1)
	d := open(t, gateway.Options{Handlers: h, Panicked: func(c gateway.Call, v any, stack []byte) {
		told <- fmt.Sprint(c.Op.Name, " ", c.RequestID, " ", v, " ", strings.Contains(string(stack), "TestAPanicIsAnInternalError"))
	}})
	_, body := d.request(t, http.MethodPost, "/v1/list_sandboxes", "", "X-Request-Id", "r1")
	if e := errorOf(t, body); e.Kind != catalog.Internal || e.Message != "a fault in list_sandboxes, request r1: the daemon's log has the details" {
		t.Errorf("got %s", body)
	}
	if got, want := <-told, "list_sandboxes r1 secret detail true"; got != want {
		t.Errorf("told %q, want %q", got, want)
	}
	if resp, _ := d.request(t, http.MethodGet, "/v1/health", ""); resp.StatusCode != http.StatusOK {
		t.Error("the gateway does not go on after a panic")
	}
}

type spans chan string

type spanKey struct{}

func (s spans) StartRequest(ctx context.Context, c gateway.Call) (context.Context, func(error)) {
	s <- "start " + c.Op.Name + " " + c.RequestID + " " + c.SandboxID
	return context.WithValue(ctx, spanKey{}, "span"), func(err error) { s <- fmt.Sprint("end ", err) }
}

func TestEveryRequestHasASpan(t *testing.T) {
	s := make(spans, 10)
	h := handlers()
	h[catalog.FileRead] = func(ctx context.Context, _ gateway.Call) (any, error) {
		s <- fmt.Sprint("in ", ctx.Value(spanKey{}))
		panic("x")
	}
	d := open(t, gateway.Options{Handlers: h, Tracer: s})
	d.request(t, http.MethodPost, "/v1/file_read", `{"sandbox_id":"b","path":"p"}`, "X-Request-Id", "r2")
	for _, want := range []string{"start file_read r2 b", "in span", "end a fault in file_read, request r2: the daemon's log has the details"} {
		if got := <-s; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestDisconnectEndsWhatIsNotDetached(t *testing.T) {
	for _, tt := range []struct {
		op, body string
		detached bool
	}{
		{catalog.ReadCommandLines, `{"sandbox_id":"s","command_id":"c"}`, false},
		{catalog.ExecCommand, `{"sandbox_id":"s","cmd":"x"}`, true},
	} {
		t.Run(tt.op, func(t *testing.T) {
			started, result := make(chan struct{}), make(chan error, 1)
			release := make(chan struct{})
			h := handlers()
			h[tt.op] = func(ctx context.Context, _ gateway.Call) (any, error) {
				close(started)
				select {
				case <-ctx.Done():
					result <- ctx.Err()
				case <-release:
					result <- ctx.Err()
				}
				return nil, ctx.Err()
			}
			d := open(t, gateway.Options{Handlers: h})
			c, err := net.Dial("unix", d.cfg.Socket())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := fmt.Fprintf(c, "POST /v1/%s HTTP/1.1\r\nHost: d\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", tt.op, d.token, len(tt.body), tt.body); err != nil {
				t.Fatal(err)
			}
			<-started
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			if tt.detached {
				// The request that follows on another connection shows that
				// the gateway has seen the first one go.
				d.request(t, http.MethodGet, "/v1/health", "")
				close(release)
				if err := <-result; err != nil {
					t.Errorf("the detached operation saw %v", err)
				}
				return
			}
			if err := <-result; !errors.Is(err, context.Canceled) {
				t.Errorf("the handler saw %v", err)
			}
		})
	}
}

func TestShutdown(t *testing.T) {
	started := make(chan string, 2)
	published := make(chan struct{})
	h := handlers()
	h[catalog.ExecCommand] = func(ctx context.Context, _ gateway.Call) (any, error) {
		started <- "exec"
		<-ctx.Done() // it only waits: cancelled at once
		return nil, ctx.Err()
	}
	h[catalog.PublishWorkspaceSession] = func(ctx context.Context, _ gateway.Call) (any, error) {
		started <- "publish"
		<-published // released when exec has been answered, within the grace time
		return &catalog.PublishWorkspaceSessionResult{Status: catalog.PublishCommitted}, ctx.Err()
	}
	d := open(t, gateway.Options{Handlers: h, Grace: time.Minute})
	c := client.New(d.cfg.StateDir)
	defer c.Close()
	execErr, publishErr := make(chan error, 1), make(chan error, 1)
	go func() {
		execErr <- c.Call(context.Background(), client.Call{Op: catalog.ExecCommand, SandboxID: "s", Request: &catalog.ExecCommandRequest{Cmd: "x"}}, nil, nil)
	}()
	go func() {
		publishErr <- c.Call(context.Background(), client.Call{Op: catalog.PublishWorkspaceSession, SandboxID: "s", Request: &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: "w"}}, nil, nil)
	}()
	<-started
	<-started
	ended := make(chan error, 1)
	go func() { ended <- d.end() }()
	if err := <-execErr; catalog.AsError(err).Kind != catalog.Unavailable || !strings.Contains(err.Error(), "shutting down") {
		t.Errorf("exec got %v", err)
	}
	close(published)
	if err := <-publishErr; err != nil {
		t.Errorf("publish got %v", err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(d.cfg.Socket()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket's name stays: %v", err)
	}
	err := c.Call(t.Context(), client.Call{Op: catalog.ListSandboxes}, nil, nil)
	if e := catalog.AsError(err); e.Kind != catalog.Unavailable || !strings.Contains(e.Message, "sandboxd start --state-dir "+d.cfg.StateDir) {
		t.Errorf("after the end: %v", err)
	}
}

func TestTooManyRequests(t *testing.T) {
	started, release := make(chan struct{}), make(chan struct{})
	h := handlers()
	h[catalog.ListSandboxes] = func(context.Context, gateway.Call) (any, error) {
		close(started)
		<-release
		return &catalog.ListSandboxesResult{}, nil
	}
	d := open(t, gateway.Options{Handlers: h, MaxRequests: 1})
	c := client.New(d.cfg.StateDir)
	defer c.Close()
	first := make(chan error, 1)
	go func() { first <- c.Call(context.Background(), client.Call{Op: catalog.ListSandboxes}, nil, nil) }()
	<-started
	if err := c.Call(t.Context(), client.Call{Op: catalog.Events}, nil, nil); catalog.AsError(err).Kind != catalog.Unavailable {
		t.Errorf("got %v", err)
	}
	close(release)
	if err := <-first; err != nil {
		t.Error(err)
	}
	if err := c.Call(t.Context(), client.Call{Op: catalog.Events}, nil, nil); err != nil {
		t.Error(err)
	}
}

func TestModes(t *testing.T) {
	d := open(t, gateway.Options{})
	for _, f := range []string{d.cfg.Socket(), d.cfg.TokenFile()} {
		st, err := os.Lstat(f)
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", f, st.Mode())
		}
	}
}

func TestEnsureToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	first, err := gateway.EnsureToken(file)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := gateway.EnsureToken(file); err != nil || again != first {
		t.Errorf("a good token is not kept: %v", err)
	}
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(good) != 65 || gateway.HashToken(string(good[:64])) != first {
		t.Errorf("token file has %q", good)
	}
	for name, spoil := range map[string]func() error{
		"readable by others": func() error { return os.Chmod(file, 0o644) },
		"cut":                func() error { return os.WriteFile(file, good[:10], 0o600) },
		"empty":              func() error { return os.WriteFile(file, nil, 0o600) },
		"a link": func() error {
			return errors.Join(os.Rename(file, file+".elsewhere"), os.Symlink(file+".elsewhere", file))
		},
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		before := first
		if first, err = gateway.EnsureToken(file); err != nil || first == before {
			t.Errorf("%s: the token is kept (%v)", name, err)
		}
		if st, err := os.Lstat(file); err != nil || st.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", name, st.Mode(), err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(file), ".token-*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestListenReplacesADeadSocketAndFitsLongPaths(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, config.SocketName)
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := errors.Join(l.Close(), os.Rename(l.Addr().String(), path)); err != nil {
		t.Fatal(err)
	}
	l, err = gateway.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	c := client.New(dir)
	g, err := gateway.New(gateway.Options{Handlers: handlers()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Serve(ctx, l) }()
	var health map[string]string
	if err := c.Health(t.Context(), &health); err != nil || health["status"] != "ok" {
		t.Errorf("got %v, %v", health, err)
	}
	c.Close()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 0 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}
