// Package gateway is the daemon's door: HTTP and JSON on a unix socket. It
// knows the catalogue and nothing of what stands behind the handlers it is
// given.
//
//	POST /v1/<operation>   a JSON object of arguments; the result, or {"error":...}
//	GET  /v1/catalog       the catalogue
//	GET  /v1/health        whether the daemon answers; needs no token
//
// A caller must be a process of the daemon's own user or of root, and bear the
// token of the state directory. X-Request-Id names the operation; without one
// the gateway makes one up, and the answer repeats it. With
// "Accept: application/x-ndjson" the answer is a line {"progress":...} for each
// report of the operation and a last line {"result":...} or {"error":...}.
//
// Each request runs its handler on its own goroutine, net/http's; Serve returns
// when all have ended.
package gateway

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"ephemeral-sandbox/daemon/catalog"
)

// Call is one request on its way to a handler.
type Call struct {
	Op        catalog.Operation
	RequestID string // the operation's id; never empty
	SandboxID string // empty where the operation takes none, or was given none
	Request   any    // pointer to the operation's request struct, valid, with defaults
	// Progress sends a report to the client when it wants reports. It never
	// blocks: what a slow client cannot take is left out. It may be called from
	// several goroutines; after the handler has returned it does nothing.
	Progress func(catalog.Progress)
	Streams  bool // the client wants reports: without it Progress does nothing
}

// Handler does the work of one operation and returns a pointer to its result
// struct, or an error; one that is no *catalog.Error counts as internal. The
// context ends when the client is gone, unless the operation is detached, and
// when the daemon shuts down.
type Handler func(ctx context.Context, call Call) (any, error)

// Handle makes a Handler of a function with the operation's own types.
func Handle[Req, Res any](fn func(context.Context, Call, *Req) (*Res, error)) Handler {
	return func(ctx context.Context, call Call) (any, error) {
		req, ok := call.Request.(*Req)
		if !ok {
			return nil, fmt.Errorf("handler of %s takes %T, not %T", call.Op.Name, (*Req)(nil), call.Request)
		}
		res, err := fn(ctx, call, req)
		if err != nil {
			return nil, err
		}
		return res, nil
	}
}

// Tracer opens the span of a request. The function it returns closes the span
// with the request's outcome.
type Tracer interface {
	StartRequest(ctx context.Context, call Call) (context.Context, func(err error))
}

// Grant is what the bearer of a token may do.
type Grant struct {
	Token     TokenHash
	Authority catalog.Authority
}

// Options say what a gateway serves and to whom.
type Options struct {
	Handlers    map[string]Handler // one for each operation of the catalogue
	Grants      []Grant
	MaxBody     int64                                    // bytes of one request; 0 is 64 MiB
	MaxRequests int                                      // in flight at once; 0 is 1024
	Grace       time.Duration                            // for requests in flight at shutdown; 0 is none
	Tracer      Tracer                                   // may be nil
	Health      func() any                               // body of /v1/health; nil answers {"status":"ok"}
	Panicked    func(call Call, value any, stack []byte) // told of a handler's panic; may be nil
	Peer        func(net.Conn) (Peer, error)             // who is at the other end; nil asks the kernel
}

// Gateway serves operations.
type Gateway struct {
	o        Options
	ops      map[string]catalog.Operation
	inFlight chan struct{}

	mu       sync.Mutex
	ended    bool           // guarded by mu; no handler starts any more
	handlers sync.WaitGroup // added to under mu
}

// New checks that there is a handler for each operation, and none besides.
func New(o Options) (*Gateway, error) {
	if o.MaxBody == 0 {
		o.MaxBody = 64 << 20
	}
	if o.MaxRequests == 0 {
		o.MaxRequests = 1024
	}
	if o.Peer == nil {
		o.Peer = kernelPeer
	}
	g := &Gateway{o: o, ops: map[string]catalog.Operation{}, inFlight: make(chan struct{}, o.MaxRequests)}
	var all []error
	for _, op := range catalog.Operations() {
		g.ops[op.Name] = op
		if o.Handlers[op.Name] == nil {
			all = append(all, fmt.Errorf("operation %s has no handler", op.Name))
		}
	}
	for name := range o.Handlers {
		if _, ok := g.ops[name]; !ok {
			all = append(all, fmt.Errorf("handler %s belongs to no operation", name))
		}
	}
	return g, errors.Join(all...)
}

// unwindTime is how long cancelled handlers may take before their connections
// are cut; they are waited for after that, too.
const unwindTime = 10 * time.Second

type peerKey struct{}

// errEnding is why requests end when the daemon does.
var errEnding = catalog.Errorf(catalog.Unavailable, "the daemon is shutting down: start it again and repeat the request with the same request id")

// Serve answers requests on l until ctx ends. It then refuses new ones, cancels
// those that only wait, gives the others the grace time before it cancels them
// too, and returns when every handler has returned. It closes l. It is called
// once.
func (g *Gateway) Serve(ctx context.Context, l net.Listener) error {
	// Handlers outlive ctx by the grace time, so theirs are made apart from it.
	now, endNow := context.WithCancelCause(context.WithoutCancel(ctx))
	late, endLate := context.WithCancelCause(context.WithoutCancel(ctx))
	defer endNow(errEnding)
	defer endLate(errEnding)
	srv := &http.Server{
		Handler:           g.handler(now, late),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, peerKey{}, g.admit(c))
		},
	}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(l) }() // ends with Shutdown or a broken listener
	select {
	case err := <-ended:
		return fmt.Errorf("gateway: %w", err)
	case <-ctx.Done():
	}
	endNow(errEnding)
	grace, stop := context.WithTimeout(context.WithoutCancel(ctx), g.o.Grace)
	defer stop()
	err := srv.Shutdown(grace)
	if errors.Is(err, context.DeadlineExceeded) {
		endLate(errEnding)
		last, stop := context.WithTimeout(context.WithoutCancel(ctx), unwindTime)
		defer stop()
		err = srv.Shutdown(last)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = srv.Close() // a client that does not read its answer
	}
	<-ended
	g.mu.Lock()
	g.ended = true
	g.mu.Unlock()
	g.handlers.Wait()
	if err != nil {
		return fmt.Errorf("gateway: shut down: %w", err)
	}
	return nil
}

func (g *Gateway) handler(now, late context.Context) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/health", func(w http.ResponseWriter, r *http.Request) {
		if err := g.peerError(r); err != nil {
			writeError(w, err)
			return
		}
		writeJSON(w, http.StatusOK, g.health())
	})
	mux.HandleFunc("GET /v1/catalog", func(w http.ResponseWriter, r *http.Request) {
		if _, err := g.authority(r); err != nil {
			writeError(w, err)
			return
		}
		writeJSON(w, http.StatusOK, catalog.Describe())
	})
	mux.HandleFunc("POST /v1/{operation}", func(w http.ResponseWriter, r *http.Request) {
		g.serveOperation(w, r, now, late)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, catalog.Errorf(catalog.InvalidRequest,
			"%s %s: no such thing here; use POST /v1/<operation>, GET /v1/catalog or GET /v1/health", r.Method, r.URL.Path))
	})
	return mux
}

func (g *Gateway) health() any {
	if g.o.Health == nil {
		return map[string]string{"status": "ok"}
	}
	return g.o.Health()
}

func (g *Gateway) serveOperation(w http.ResponseWriter, r *http.Request, now, late context.Context) {
	if !g.enter() {
		writeError(w, errEnding)
		return
	}
	defer g.handlers.Done()
	call, err := g.accept(w, r)
	if call.RequestID != "" {
		w.Header().Set(requestIDHeader, call.RequestID)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	select {
	case g.inFlight <- struct{}{}:
		defer func() { <-g.inFlight }()
	default:
		writeError(w, catalog.Errorf(catalog.Unavailable, "%d requests are in flight, the most there may be: try again when some have ended", g.o.MaxRequests))
		return
	}

	ctx, end := g.lifetime(r, call.Op, now, late)
	defer end()
	out := newAnswer(w, r)
	call.Progress = func(catalog.Progress) {}
	if out.streams && call.Op.Progress {
		call.Progress, call.Streams = out.open(), true
	}
	res, err := g.run(ctx, call)
	if err != nil {
		if why, ok := errors.AsType[*catalog.Error](context.Cause(ctx)); ok && errors.Is(err, context.Canceled) {
			err = why
		}
		out.fail(err)
		return
	}
	out.finish(res)
}

func (g *Gateway) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.ended {
		g.handlers.Add(1)
	}
	return !g.ended
}

// lifetime is the context of a request's handler.
func (g *Gateway) lifetime(r *http.Request, op catalog.Operation, now, late context.Context) (context.Context, func()) {
	parent := r.Context()
	if op.Detached {
		parent = context.WithoutCancel(parent)
	}
	ctx, cancel := context.WithCancelCause(parent)
	daemon := late
	if op.Waits {
		daemon = now
	}
	stop := context.AfterFunc(daemon, func() { cancel(context.Cause(daemon)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// run calls the handler within its span and turns a panic into an error.
func (g *Gateway) run(ctx context.Context, call Call) (res any, err error) {
	if g.o.Tracer != nil {
		var end func(error)
		ctx, end = g.o.Tracer.StartRequest(ctx, call)
		defer func() { end(err) }()
	}
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if g.o.Panicked != nil {
			g.o.Panicked(call, v, debug.Stack())
		}
		res, err = nil, catalog.Errorf(catalog.Internal, "a fault in %s, request %s: the daemon's log has the details", call.Op.Name, call.RequestID)
	}()
	res, err = g.o.Handlers[call.Op.Name](ctx, call)
	if err == nil {
		catalog.FillEmpty(res)
	}
	return res, err
}

// accept checks who asks and reads what is asked.
func (g *Gateway) accept(w http.ResponseWriter, r *http.Request) (Call, error) {
	authority, err := g.authority(r)
	if err != nil {
		return Call{}, err
	}
	id := r.Header.Get(requestIDHeader)
	if id == "" {
		id = NewRequestID()
	} else if err := CheckRequestID(id); err != nil {
		return Call{}, err
	}
	call := Call{RequestID: id}
	name := r.PathValue("operation")
	op, ok := g.ops[name]
	if !ok {
		return call, catalog.Errorf(catalog.InvalidRequest, "operation %q does not exist: GET /v1/catalog lists those that do", name)
	}
	call.Op = op
	if !includes(authority, op.Authority) {
		return call, catalog.Errorf(catalog.Unauthorized, "%s needs the authority %s, and this token bears %s only: use a token with more", name, op.Authority, authority)
	}
	body, err := g.readBody(w, r)
	if err != nil {
		return call, err
	}
	call.Request, call.SandboxID, err = op.DecodeRequest(body)
	return call, err
}

// bodyTime bounds the arrival of a request's body.
const bodyTime = 2 * time.Minute

func (g *Gateway) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	rc := http.NewResponseController(w)
	if err := rc.SetReadDeadline(time.Now().Add(bodyTime)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return nil, fmt.Errorf("set deadline of a request: %w", err)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, g.o.MaxBody))
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, catalog.Errorf(catalog.ResourceExhausted, "the request is larger than %d bytes, the most a request may have: send less at once, or raise max_request_bytes in config.json", g.o.MaxBody).
			With(map[string]int64{"limit": g.o.MaxBody})
	}
	if err != nil {
		return nil, catalog.Errorf(catalog.InvalidRequest, "the request's body broke off: %w", err)
	}
	if err := rc.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return nil, fmt.Errorf("clear deadline of a request: %w", err)
	}
	return body, nil
}

const requestIDHeader = "X-Request-Id"

// maxRequestID bounds a request id's length.
const maxRequestID = 128

// CheckRequestID says what is wrong with a request id, with kind
// InvalidRequest.
func CheckRequestID(id string) error {
	if len(id) >= 1 && len(id) <= maxRequestID && strings.IndexFunc(id, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._:-", r))
	}) < 0 {
		return nil
	}
	return catalog.Errorf(catalog.InvalidRequest, "request id %.140q: must have 1 to %d characters out of letters, digits and . _ : -", id, maxRequestID)
}

// NewRequestID makes up a request id.
func NewRequestID() string { return strings.ToLower(rand.Text()) }

func includes(have, want catalog.Authority) bool {
	order := []catalog.Authority{catalog.Observe, catalog.Work, catalog.Manage}
	return slices.Index(order, have) >= slices.Index(order, want)
}

func acceptsStream(r *http.Request) bool {
	for _, v := range r.Header.Values("Accept") {
		if strings.Contains(v, StreamType) {
			return true
		}
	}
	return false
}

// httpStatus is the HTTP status that goes with an error kind, for clients that
// look at nothing else.
func httpStatus(k catalog.Kind) int {
	switch k {
	case catalog.InvalidRequest:
		return http.StatusBadRequest
	case catalog.NotFound:
		return http.StatusNotFound
	case catalog.Conflicted:
		return http.StatusConflict
	case catalog.PreconditionFailed:
		return http.StatusPreconditionFailed
	case catalog.Unauthorized:
		return http.StatusUnauthorized
	case catalog.ResourceExhausted:
		return http.StatusInsufficientStorage
	case catalog.Unavailable:
		return http.StatusServiceUnavailable
	case catalog.Corrupt, catalog.Internal:
		return http.StatusInternalServerError
	}
	return http.StatusInternalServerError
}

func writeError(w http.ResponseWriter, err error) {
	e := catalog.AsError(err)
	writeJSON(w, httpStatus(e.Kind), catalog.ErrorBody{Error: e})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := encode(v)
	if err != nil {
		status = http.StatusInternalServerError
		b, _ = encode(catalog.ErrorBody{Error: catalog.AsError(err)}) // nothing in it can fail
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b) // a client that is gone misses nothing
}
