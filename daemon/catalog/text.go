package catalog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"
)

// Text is a string of any bytes: a path, a command line, a command's output.
// On the wire valid UTF-8 is a plain JSON string and anything else is
// {"base64":"..."}, so that no byte is lost and the common case stays readable.
type Text string

type rawText struct {
	Base64 []byte `json:"base64"`
}

// MarshalJSON writes the plain form where the bytes allow it.
func (t Text) MarshalJSON() ([]byte, error) {
	if !utf8.ValidString(string(t)) {
		return json.Marshal(rawText{Base64: []byte(t)})
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // an encoder around this one escapes where it wants to
	err := e.Encode(string(t))
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// UnmarshalJSON reads either form.
func (t *Text) UnmarshalJSON(b []byte) error {
	b = bytes.TrimSpace(b)
	if len(b) == 0 || bytes.Equal(b, []byte("null")) {
		return nil
	}
	switch b[0] {
	case '"':
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*t = Text(s)
		return nil
	case '{':
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		var r struct {
			Base64 *[]byte `json:"base64"`
		}
		if err := d.Decode(&r); err != nil {
			return fmt.Errorf("text object: %w", err)
		}
		if r.Base64 == nil {
			return errors.New(`text object: "base64" is missing`)
		}
		*t = Text(*r.Base64)
		return nil
	}
	return errors.New(`text must be a JSON string or {"base64":"..."}`)
}
