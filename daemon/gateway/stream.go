package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"

	"ephemeral-sandbox/daemon/catalog"
)

// StreamType is the media type that asks for a stream of JSON lines.
const StreamType = "application/x-ndjson"

// queuedLines is how many reports may wait for a slow client. Those beyond are
// left out, so that no operation waits for its audience.
const queuedLines = 64

// answer writes what a request is answered with, as one document or as lines.
type answer struct {
	w       http.ResponseWriter
	rc      *http.ResponseController
	streams bool
	wg      sync.WaitGroup // the writer of reports

	mu    sync.Mutex
	queue chan catalog.Progress // guarded by mu as to being closed; nil when closed or never opened
}

func newAnswer(w http.ResponseWriter, r *http.Request) *answer {
	return &answer{w: w, rc: http.NewResponseController(w), streams: acceptsStream(r)}
}

// open starts the writer of reports and returns the function that feeds it.
func (a *answer) open() func(catalog.Progress) {
	queue := make(chan catalog.Progress, queuedLines)
	a.queue = queue
	a.wg.Go(func() { a.write(queue) })
	return a.report
}

func (a *answer) report(p catalog.Progress) {
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case a.queue <- p: // never ready once the queue is nil
	default:
	}
}

func (a *answer) write(queue <-chan catalog.Progress) {
	broken := false
	for p := range queue {
		if !broken {
			broken = a.line(line{Progress: &p}) != nil
		}
	}
}

// close lets the reports out that wait, and takes no more.
func (a *answer) close() {
	a.mu.Lock()
	if a.queue != nil {
		close(a.queue)
		a.queue = nil
	}
	a.mu.Unlock()
	a.wg.Wait()
}

type line struct {
	Progress *catalog.Progress `json:"progress,omitempty"`
	Result   any               `json:"result,omitempty"`
	Error    *catalog.Error    `json:"error,omitempty"`
}

func (a *answer) line(l line) error {
	b, err := encode(l)
	if err != nil {
		if b, err = encode(line{Error: catalog.AsError(err)}); err != nil {
			return err
		}
	}
	a.w.Header().Set("Content-Type", StreamType)
	if _, err := a.w.Write(b); err != nil {
		return err
	}
	return a.rc.Flush()
}

// encode writes v as one line.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // no browser reads this, people do
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("encode the answer: %w", err)
	}
	return b.Bytes(), nil
}

func (a *answer) fail(err error) {
	a.close()
	if !a.streams {
		writeError(a.w, err)
		return
	}
	_ = a.line(line{Error: catalog.AsError(err)}) // a client that is gone misses nothing
}

func (a *answer) finish(res any) {
	a.close()
	if !a.streams {
		writeJSON(a.w, http.StatusOK, res)
		return
	}
	_ = a.line(line{Result: res}) // a client that is gone misses nothing
}
