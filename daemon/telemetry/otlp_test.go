package telemetry

import (
	"compress/gzip"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// collectorServer decodes what arrives at /v1/traces.
type collectorServer struct {
	mu       sync.Mutex
	requests []*collector.ExportTraceServiceRequest
	headers  []http.Header
	status   int
}

func (c *collectorServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = z
	}
	data, err := io.ReadAll(body)
	var req collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(data, &req)
	}
	if err != nil || r.URL.Path != "/v1/traces" {
		http.Error(w, "not an OTLP trace request", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests = append(c.requests, &req)
	c.headers = append(c.headers, r.Header)
	w.WriteHeader(c.status)
}

func TestSpansLeaveByOTLP(t *testing.T) {
	col := &collectorServer{status: http.StatusOK}
	srv := httptest.NewServer(col)
	defer srv.Close()
	c := newClock()
	s, err := Open(t.TempDir(), Options{
		Clock: c.Now, FlushEvery: never,
		Export: Export{Endpoint: srv.URL, Headers: map[string]string{"X-Token": "t"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, root := s.Start(context.Background(), "publish", String(KeySandbox, "sb"), Int("files", 3))
	c.pass(time.Millisecond)
	stage, child := s.Start(ctx, "seal")
	child.Event("synced")
	c.pass(2 * time.Millisecond)
	child.End(errors.New("disk full"))
	root.End(nil)
	const remote = "0af7651916cd43dd8448eb211c80319c"
	_, joined := s.Start(WithTraceparent(context.Background(), "00-"+remote+"-b7ad6b7169203331-01"), "joined")
	joined.End(nil)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	type span struct {
		Trace, ID, Parent, Name, Error string
		Start, End                     uint64
		Attrs, Events                  int
	}
	var got []span
	service := ""
	for _, req := range col.requests {
		for _, rs := range req.ResourceSpans {
			for _, kv := range rs.Resource.Attributes {
				if kv.Key == "service.name" {
					service = kv.Value.GetStringValue()
				}
			}
			for _, ss := range rs.ScopeSpans {
				for _, sp := range ss.Spans {
					got = append(got, span{
						hex.EncodeToString(sp.TraceId), hex.EncodeToString(sp.SpanId), hex.EncodeToString(sp.ParentSpanId), sp.Name,
						sp.Status.GetMessage(), sp.StartTimeUnixNano, sp.EndTimeUnixNano, len(sp.Attributes), len(sp.Events),
					})
				}
			}
		}
	}
	if len(got) != 3 {
		t.Fatalf("collector got %d spans, want 3: %+v", len(got), got)
	}
	base := uint64(time.Unix(1_700_000_000, 0).UnixNano())
	ms := uint64(time.Millisecond)
	if d := cmp.Diff([]span{
		{TraceID(ctx), SpanID(stage), SpanID(ctx), "seal", "disk full", base + ms, base + 3*ms, 0, 1},
		{TraceID(ctx), SpanID(ctx), "", "publish", "", base, base + 3*ms, 2, 0},
		{remote, got[2].ID, "b7ad6b7169203331", "joined", "", base + 3*ms, base + 3*ms, 0, 0},
	}, got); d != "" {
		t.Errorf("exported spans (-want +got):\n%s", d)
	}
	if service != "sandboxd" || col.headers[0].Get("X-Token") != "t" {
		t.Errorf("service %q, token %q", service, col.headers[0].Get("X-Token"))
	}
}

func TestARefusingCollectorIsCountedAndHarmless(t *testing.T) {
	col := &collectorServer{status: http.StatusBadRequest}
	srv := httptest.NewServer(col)
	defer srv.Close()
	s, err := Open(t.TempDir(), Options{FlushEvery: never, Export: Export{Endpoint: srv.URL + "/v1/traces"}})
	if err != nil {
		t.Fatal(err)
	}
	_, sp := s.Start(context.Background(), "op")
	sp.End(nil)
	if err := s.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if got := s.Stats().Unexported; got != 1 {
		t.Errorf("%d spans counted as not exported, want 1", got)
	}
	if _, err := s.Trace("last", ""); err != nil {
		t.Errorf("the span is on disk all the same: %v", err)
	}
}
