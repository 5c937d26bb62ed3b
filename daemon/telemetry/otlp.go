package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Export says where finished spans go besides the disk.
type Export struct {
	// Endpoint is the base URL of a collector that takes OTLP over HTTP, as in
	// OTEL_EXPORTER_OTLP_ENDPOINT: http://127.0.0.1:4318. Empty: no export.
	// "/v1/traces" is appended unless the URL ends with it.
	Endpoint string
	// Headers go with every request, for a collector that asks for a token.
	Headers map[string]string
	// Service is the service.name of the resource; empty means sandboxd.
	Service string
	// Timeout bounds one request and, at Close, the last send. 0 means 5 s.
	Timeout time.Duration
}

// exporter replays finished spans through the OpenTelemetry SDK, which batches
// them, sends them and drops them when the collector does not keep up. A nil
// exporter sends nothing.
type exporter struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	timeout  time.Duration
	failed   *atomic.Uint64 // spans in requests that failed
}

func newExporter(o Export) (*exporter, error) {
	if o.Endpoint == "" {
		return nil, nil
	}
	u, err := url.Parse(o.Endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("endpoint %q is not an http or https URL with a host", o.Endpoint)
	}
	if !strings.HasSuffix(u.Path, "/v1/traces") {
		u = u.JoinPath("v1/traces")
	}
	if o.Service == "" {
		o.Service = "sandboxd"
	}
	if o.Timeout <= 0 {
		o.Timeout = 5 * time.Second
	}
	opts := []otlptracehttp.Option{
		otlptracehttp.WithEndpointURL(u.String()),
		otlptracehttp.WithTimeout(o.Timeout),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{
			Enabled: true, InitialInterval: time.Second, MaxInterval: 5 * time.Second, MaxElapsedTime: 15 * time.Second,
		}),
	}
	if len(o.Headers) > 0 {
		opts = append(opts, otlptracehttp.WithHeaders(o.Headers))
	}
	// New starts no connection: an absent collector does not delay Open.
	client, err := otlptracehttp.New(context.Background(), opts...)
	if err != nil {
		return nil, fmt.Errorf("make OTLP exporter for %s: %w", u.Redacted(), err)
	}
	failed := new(atomic.Uint64)
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(countFailures{client, failed}),
		sdktrace.WithSampler(sdktrace.AlwaysSample()),
		sdktrace.WithIDGenerator(givenIDs{}),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", o.Service))),
	)
	return &exporter{
		provider: provider,
		tracer:   provider.Tracer("ephemeral-sandbox/daemon/telemetry"),
		timeout:  o.Timeout,
		failed:   failed,
	}, nil
}

// countFailures counts the spans of requests that failed for good and keeps the
// error from the SDK's process-wide handler, which would print it: the count is
// in Stats.
type countFailures struct {
	sdktrace.SpanExporter
	failed *atomic.Uint64
}

func (c countFailures) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	if err := c.SpanExporter.ExportSpans(ctx, spans); err != nil {
		c.failed.Add(uint64(len(spans)))
	}
	return nil
}

// givenIDs lets a replayed span keep the ids that it was recorded with.
type givenIDs struct{}

type replayKey struct{}

func (givenIDs) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	sc, _ := ctx.Value(replayKey{}).(trace.SpanContext)
	return sc.TraceID(), sc.SpanID()
}

func (givenIDs) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	sc, _ := ctx.Value(replayKey{}).(trace.SpanContext)
	return sc.SpanID()
}

// send replays one finished span. The SDK's batcher takes it without I/O.
func (e *exporter) send(r *record) {
	if e == nil {
		return
	}
	sc, err := spanContext(r.Trace, r.Span)
	if err != nil {
		e.failed.Add(1)
		return
	}
	ctx := context.WithValue(context.Background(), replayKey{}, sc)
	if parent, err := spanContext(r.Trace, r.Parent); err == nil {
		ctx = trace.ContextWithSpanContext(ctx, parent)
	} else {
		// A span from another process's trace without a parent here would get
		// a trace of its own; a root has exactly the id it was given.
		ctx = trace.ContextWithSpanContext(ctx, trace.SpanContext{})
	}
	start := time.Unix(0, r.Time)
	_, sp := e.tracer.Start(ctx, r.Name, trace.WithTimestamp(start), trace.WithAttributes(keyValues(r.Attrs)...))
	for _, ev := range r.Events {
		sp.AddEvent(ev.Name, trace.WithTimestamp(start.Add(time.Duration(ev.Offset))), trace.WithAttributes(keyValues(ev.Attrs)...))
	}
	if r.Failed {
		sp.SetStatus(codes.Error, r.Error)
	}
	sp.End(trace.WithTimestamp(start.Add(time.Duration(r.Dur))))
}

func spanContext(traceID, spanID string) (trace.SpanContext, error) {
	t, err := trace.TraceIDFromHex(traceID)
	if err != nil {
		return trace.SpanContext{}, fmt.Errorf("trace id: %w", err)
	}
	s, err := trace.SpanIDFromHex(spanID)
	if err != nil {
		return trace.SpanContext{}, fmt.Errorf("span id: %w", err)
	}
	return trace.NewSpanContext(trace.SpanContextConfig{TraceID: t, SpanID: s, TraceFlags: trace.FlagsSampled}), nil
}

func keyValues(m map[string]any) []attribute.KeyValue {
	out := make([]attribute.KeyValue, 0, len(m))
	for k, v := range m {
		switch v := v.(type) {
		case string:
			out = append(out, attribute.String(k, v))
		case bool:
			out = append(out, attribute.Bool(k, v))
		case int64:
			out = append(out, attribute.Int64(k, v))
		case float64:
			out = append(out, attribute.Float64(k, v))
		}
	}
	return out
}

func (e *exporter) close() error {
	if e == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), e.timeout)
	defer cancel()
	if err := e.provider.Shutdown(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("stop OTLP exporter: %w", err)
	}
	return nil
}
