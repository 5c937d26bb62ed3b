package command

import (
	"fmt"
	"io"

	"ephemeral-sandbox/daemon/catalog"
)

// meter shows progress on stderr: on a terminal one line that is overwritten,
// elsewhere, when asked, a line for each report.
type meter struct {
	w     io.Writer
	on    bool
	json  bool
	lines bool
	shown bool
}

func (s *surface) meter() *meter {
	return &meter{
		w: s.app.Stderr, json: s.json,
		on:    s.progress || s.app.Terminal && !s.json,
		lines: s.json || !s.app.Terminal,
	}
}

// report shows p. A line that cannot be written is not worth failing for.
func (m *meter) report(p catalog.Progress) {
	switch {
	case !m.on:
	case m.json:
		_ = writeJSON(m.w, struct {
			Progress catalog.Progress `json:"progress"`
		}{p})
	case m.lines:
		_, _ = fmt.Fprintln(m.w, progressText(p))
	default:
		m.shown = true
		_, _ = fmt.Fprintf(m.w, "\r\x1b[K%.100s", progressText(p))
	}
}

// clear takes the line away.
func (m *meter) clear() {
	if m.shown {
		m.shown = false
		_, _ = io.WriteString(m.w, "\r\x1b[K")
	}
}

func progressText(p catalog.Progress) string {
	text := p.Stage
	amount := func(n int64) string {
		if p.Unit == "bytes" {
			return bytesText(n)
		}
		return fmt.Sprint(n)
	}
	switch {
	case p.Total > 0:
		text += fmt.Sprintf(" %s of %s", amount(p.Done), amount(p.Total))
	case p.Done > 0:
		text += " " + amount(p.Done)
	}
	if p.Unit != "" && p.Unit != "bytes" {
		text += " " + p.Unit
	}
	if p.Message != "" {
		if text != "" {
			text += ": "
		}
		text += printable(catalog.Text(p.Message))
	}
	return text
}
