package daemon

import (
	"context"
	"fmt"
	"time"

	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/gateway"
	"ephemeral-sandbox/daemon/session"
	"ephemeral-sandbox/daemon/telemetry"
)

// call is one request on its way through a handler.
type call struct {
	gateway.Call
	sandbox *sandbox // nil where the operation takes none, or was given none
	trace   string
}

// op is the operation as a workspace records it.
func (c *call) op() session.Operation {
	return session.Operation{ID: c.RequestID, Kind: c.Op.Name, Trace: c.trace, Time: time.Now().UTC()}
}

// handle finds the sandbox a request names, and gives every error its kind.
func handle[Req, Res any](d *Daemon, fn func(*Daemon, context.Context, *call, *Req) (*Res, error)) gateway.Handler {
	return gateway.Handle(func(ctx context.Context, gc gateway.Call, req *Req) (*Res, error) {
		c := &call{Call: gc, trace: telemetry.TraceID(ctx), sandbox: &sandbox{}}
		if gc.SandboxID != "" {
			s, err := d.find(gc.SandboxID)
			if err != nil {
				return nil, err
			}
			c.sandbox = s
		}
		res, err := fn(d, ctx, c, req)
		if err != nil {
			return nil, c.sandbox.fault(err)
		}
		return res, nil
	})
}

func (d *Daemon) gatewayOptions(token gateway.TokenHash) gateway.Options {
	return gateway.Options{
		Handlers: map[string]gateway.Handler{
			catalog.CreateSandbox:  handle(d, (*Daemon).handleCreateSandbox),
			catalog.ListSandboxes:  handle(d, (*Daemon).handleListSandboxes),
			catalog.InspectSandbox: handle(d, (*Daemon).handleInspectSandbox),
			catalog.DestroySandbox: handle(d, (*Daemon).handleDestroySandbox),

			catalog.CreateWorkspaceSession:  handle(d, (*Daemon).handleCreateSession),
			catalog.ListWorkspaceSessions:   handle(d, (*Daemon).handleListSessions),
			catalog.ExecCommand:             handle(d, (*Daemon).handleExec),
			catalog.ReadCommandLines:        handle(d, (*Daemon).handleReadLines),
			catalog.FileRead:                handle(d, (*Daemon).handleFileRead),
			catalog.FileWrite:               handle(d, (*Daemon).handleFileWrite),
			catalog.FileEdit:                handle(d, (*Daemon).handleFileEdit),
			catalog.FileList:                handle(d, (*Daemon).handleFileList),
			catalog.FileBlame:               handle(d, (*Daemon).handleBlame),
			catalog.DiffWorkspaceSession:    handle(d, (*Daemon).handleDiff),
			catalog.PublishWorkspaceSession: handle(d, (*Daemon).handlePublish),
			catalog.RefreshWorkspaceSession: handle(d, (*Daemon).handleRefresh),
			catalog.DestroyWorkspaceSession: handle(d, (*Daemon).handleDestroySession),

			catalog.Snapshot:   handle(d, (*Daemon).handleSnapshot),
			catalog.Trace:      handle(d, (*Daemon).handleTrace),
			catalog.Events:     handle(d, (*Daemon).handleEvents),
			catalog.Activity:   handle(d, (*Daemon).handleActivity),
			catalog.LayerStack: handle(d, (*Daemon).handleLayerStack),
		},
		Grants:      []gateway.Grant{{Token: token, Authority: catalog.Manage}},
		MaxBody:     d.cfg.MaxRequestBytes,
		MaxRequests: d.cfg.MaxRequests,
		Grace:       time.Duration(d.cfg.ShutdownSeconds) * time.Second,
		Tracer:      tracer{d},
		Panicked: func(c gateway.Call, value any, stack []byte) {
			d.log.Error("a handler panicked", "operation", c.Op.Name, "request", c.RequestID, "panic", fmt.Sprint(value), "stack", string(stack))
		},
	}
}

// tracer opens the root span of each request, and tells its end as an event.
type tracer struct{ d *Daemon }

func (t tracer) StartRequest(ctx context.Context, c gateway.Call) (context.Context, func(error)) {
	t.d.requests.Add(1)
	ctx, sp := t.d.trace.Start(ctx, c.Op.Name,
		telemetry.String(telemetry.KeyRequest, c.RequestID),
		telemetry.String(telemetry.KeySandbox, c.SandboxID),
		telemetry.Bool(telemetry.KeyObserver, c.Op.Authority == catalog.Observe),
	)
	trace := telemetry.TraceID(ctx)
	return ctx, func(err error) {
		t.d.requests.Add(-1)
		sp.End(err)
		if c.Op.Authority == catalog.Observe {
			return
		}
		attrs := map[string]any{"outcome": "ok"}
		if err != nil {
			attrs["outcome"], attrs["error"] = string(catalog.AsError(err).Kind), err.Error()
		}
		t.d.trace.Emit(telemetry.Event{
			Name: c.Op.Name, Sandbox: c.SandboxID, Operation: c.RequestID, Trace: trace, Attrs: attrs,
		})
	}
}
