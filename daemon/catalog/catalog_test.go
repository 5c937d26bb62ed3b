package catalog_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"ephemeral-sandbox/daemon/catalog"
)

var snake = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

func TestEveryOperationIsWhole(t *testing.T) {
	type key struct {
		s catalog.Surface
		n string
	}
	seen := map[key]string{}
	for _, o := range catalog.Operations() {
		for _, n := range append([]string{o.Name}, o.Aliases...) {
			k := key{o.Surface, n}
			if other, dup := seen[k]; dup {
				t.Errorf("%s: the name %q of surface %s is also %s's", o.Name, n, o.Surface, other)
			}
			seen[k] = o.Name
			if !snake.MatchString(n) {
				t.Errorf("%s: name %q", o.Name, n)
			}
		}
		if o.Summary == "" || o.Authority == "" || o.Request == nil || o.Result == nil {
			t.Errorf("%s: summary, authority, request or result is missing", o.Name)
		}
		for _, k := range o.Errors {
			if !slices.Contains(catalog.Kinds(), k) {
				t.Errorf("%s: unknown error kind %q", o.Name, k)
			}
		}
		checkParams(t, o)
		checkResult(t, o.Name, reflect.TypeOf(o.Result), map[reflect.Type]bool{})
	}
}

func checkParams(t *testing.T, o catalog.Operation) {
	t.Helper()
	for _, p := range o.Params() {
		if !snake.MatchString(p.Name) || p.Help == "" {
			t.Errorf("%s: argument %q has a bad name or no help", o.Name, p.Name)
		}
		if p.Type != catalog.BoolParam && p.Arg == "" {
			t.Errorf("%s: argument %s has no word for its value", o.Name, p.Name)
		}
		if p.Name == "sandbox_id" || p.Name == "request_id" {
			t.Errorf("%s: %s is carried by the call, not by the request", o.Name, p.Name)
		}
	}
	o.NewRequest() // panics on a default that does not parse
	for i, p := range o.Params() {
		// Zero is a value of its own where it is allowed and not the default,
		// so it must not be left out on its way.
		f := reflect.TypeOf(o.Request).Field(i)
		zero := p.Type == catalog.IntParam && p.Default != "" && p.Default != "0" && (p.Min == nil || *p.Min <= 0)
		if zero && strings.HasSuffix(f.Tag.Get("json"), ",omitempty") {
			t.Errorf("%s: argument %s loses the value 0", o.Name, p.Name)
		}
	}
}

func checkResult(t *testing.T, where string, typ reflect.Type, seen map[reflect.Type]bool) {
	t.Helper()
	for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
		typ = typ.Elem()
	}
	if typ.Kind() != reflect.Struct || typ.PkgPath() != reflect.TypeFor[catalog.Operation]().PkgPath() || seen[typ] || typ == reflect.TypeFor[catalog.Error]() {
		return
	}
	seen[typ] = true
	for i := range typ.NumField() {
		f := typ.Field(i)
		if tag := f.Tag.Get("json"); !f.Anonymous && !regexp.MustCompile(`^[a-z][a-z0-9_]*(,omitempty)?$`).MatchString(tag) {
			t.Errorf("%s: field %s.%s has the JSON tag %q", where, typ.Name(), f.Name, tag)
		}
		checkResult(t, where, f.Type, seen)
	}
}

// The field names that outside checks rely on.
func TestResultFieldsOfTheContract(t *testing.T) {
	want := map[string][]string{
		catalog.CreateSandbox:           {"sandbox_id", "commit", "workspace_root", "files", "bytes", "stored_bytes"},
		catalog.CreateWorkspaceSession:  {"workspace_session_id", "base"},
		catalog.ExecCommand:             {"status", "exit_code", "signal", "command_id", "workspace_session_id", "stdout", "stderr", "stdout_bytes", "stderr_bytes", "truncated", "duration_ms", "publish"},
		catalog.PublishWorkspaceSession: {"status", "commit", "parent", "merged", "counts"},
		catalog.RefreshWorkspaceSession: {"base", "moved", "merged", "conflicts"},
		catalog.FileBlame:               {"path", "commit", "ranges"},
	}
	for name, fields := range want {
		o, ok := catalog.Find(name)
		if !ok {
			t.Fatalf("no operation %s", name)
		}
		res := o.NewResult()
		catalog.FillEmpty(res)
		b, err := json.Marshal(res)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		for _, f := range fields {
			if _, ok := m[f]; !ok {
				t.Errorf("%s: result has no field %q: %s", name, f, b)
			}
		}
	}
}

func TestDecodeRequest(t *testing.T) {
	ptr := func(n int64) *int64 { return &n }
	text := func(s string) *catalog.Text { x := catalog.Text(s); return &x }
	tests := []struct {
		op, body string
		want     any
		sandbox  string
		err      string
	}{
		{op: catalog.ListSandboxes, want: &catalog.ListSandboxesRequest{}},
		{op: catalog.ListSandboxes, body: `{}`, want: &catalog.ListSandboxesRequest{}},
		{op: catalog.ListSandboxes, body: `{"b":1,"a":2}`, err: `list_sandboxes does not know "a", "b": it takes no arguments`},
		{op: catalog.ListSandboxes, body: `[]`, err: "arguments of list_sandboxes: must be one JSON object: json: cannot unmarshal array into Go value of type map[string]json.RawMessage"},
		{
			op: catalog.ExecCommand, body: `{"sandbox_id":"s1","cmd":"true","yield_time_ms":0,"timeout_ms":null}`, sandbox: "s1",
			want: &catalog.ExecCommandRequest{Cmd: "true", YieldTimeMS: ptr(0), MaxOutputBytes: 1 << 20, Network: "none"},
		},
		{
			op: catalog.ExecCommand, body: `{"sandbox_id":"s1","argv":["a",{"base64":"/w=="}],"env":["A=1"],"stdin":""}`, sandbox: "s1",
			want: &catalog.ExecCommandRequest{Argv: []catalog.Text{"a", "\xff"}, Env: []catalog.Text{"A=1"}, Stdin: text(""), MaxOutputBytes: 1 << 20, Network: "none"},
		},
		{op: catalog.ExecCommand, body: `{"cmd":"true"}`, err: "sandbox_id is missing: exec_command works on one sandbox, and list_sandboxes shows the ids"},
		{op: catalog.ExecCommand, body: `{"sandbox_id":"s"}`, err: `no command: give one shell string as cmd, or program and arguments as argv (after "--" on a command line)`},
		{op: catalog.ExecCommand, body: `{"sandbox_id":"s","cmd":"a","argv":["b"]}`, err: "cmd and argv are both given: use one of them"},
		{op: catalog.ExecCommand, body: `{"sandbox_id":"s","cmd":"a","env":["=x"]}`, err: `env "=x": must have the form NAME=VALUE`},
		{op: catalog.ExecCommand, body: `{"sandbox_id":"s","cmd":"a","timeout_ms":-1}`, err: "timeout_ms -1: must be at least 0"},
		{op: catalog.ExecCommand, body: `{"sandbox_id":"s","cmd":"a\u0000"}`, err: `command "a\x00" has a NUL byte at offset 1: remove it`},
		{op: catalog.ExecCommand, body: `{"sandbox_id":"s","cmd":"a","timeout_ms":"5"}`, err: "timeout_ms: must be JSON of type int: json: cannot unmarshal string into Go value of type int64"},
		{op: catalog.CreateWorkspaceSession, body: `{"sandbox_id":"s"}`, sandbox: "s", want: &catalog.CreateWorkspaceSessionRequest{Network: "none", TraceLevel: "open"}},
		{op: catalog.CreateWorkspaceSession, body: `{"sandbox_id":"s","network":"bridge"}`, err: `network "bridge": must be one of none, shared`},
		{op: catalog.Trace, body: `{"trace_id":""}`, err: "trace_id is empty: leave it out for its default, last"},
		{
			op: catalog.DiffWorkspaceSession, body: `{"sandbox_id":"s","workspace_session_id":"w","context":0}`, sandbox: "s",
			want: &catalog.DiffWorkspaceSessionRequest{WorkspaceSessionID: "w"},
		},
		{op: catalog.CreateWorkspaceSession, body: `{"sandbox_id":"s","network":""}`, err: `network "": must be one of none, shared`},
		{op: catalog.FileWrite, body: `{"sandbox_id":"s","path":"a"}`, err: "content is missing: it is required (the new content, or - for the caller's standard input)"},
		{op: catalog.FileWrite, body: `{"sandbox_id":"s","path":"a","content":""}`, sandbox: "s", want: &catalog.FileWriteRequest{Path: "a", Content: text("")}},
		{op: catalog.FileEdit, body: `{"sandbox_id":"s","path":"a","edits":[]}`, err: `edits is missing or empty: it is required (list of {"old_string","new_string","replace_all"}, or - for standard input)`},
		{op: catalog.FileEdit, body: `{"sandbox_id":"s","path":"a","edits":[{"old_string":"","new_string":"x"}]}`, err: "edits[0]: old_string is empty: it must be text that occurs in the file"},
		{op: catalog.FileEdit, body: `{"sandbox_id":"s","path":"a","edits":[{"old":"a"}]}`, err: `edits: must be JSON of type json: json: unknown field "old"`},
		{op: catalog.FileRead, body: `{"sandbox_id":"s","path":"a","commit":"L000001","workspace_session_id":"w"}`, err: "workspace_session_id and commit are both given: use one of them"},
		{op: catalog.FileRead, body: `{"sandbox_id":"s","path":{"base64":"!"}}`, err: "path: must be JSON of type text: text object: illegal base64 data at input byte 0"},
		{op: catalog.FileRead, body: `{"sandbox_id":7,"path":"a"}`, err: "sandbox_id: must be a JSON string: json: cannot unmarshal number into Go value of type string"},
	}
	for _, tt := range tests {
		o, ok := catalog.Find(tt.op)
		if !ok {
			t.Fatalf("no operation %s", tt.op)
		}
		req, sandbox, err := o.DecodeRequest([]byte(tt.body))
		if tt.err != "" {
			if err == nil || err.Error() != tt.err {
				t.Errorf("%s %s: error %v, want %s", tt.op, tt.body, err, tt.err)
			} else if catalog.AsError(err).Kind != catalog.InvalidRequest {
				t.Errorf("%s %s: kind %s", tt.op, tt.body, catalog.AsError(err).Kind)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s %s: %v", tt.op, tt.body, err)
			continue
		}
		if !reflect.DeepEqual(req, tt.want) || sandbox != tt.sandbox {
			t.Errorf("%s %s: got %+v sandbox %q, want %+v sandbox %q", tt.op, tt.body, req, sandbox, tt.want, tt.sandbox)
		}
		again, err := o.EncodeRequest(req, sandbox)
		if err != nil {
			t.Fatal(err)
		}
		if back, id, err := o.DecodeRequest(again); err != nil || id != sandbox || !reflect.DeepEqual(back, req) {
			t.Errorf("%s: %s does not come back: %+v %q %v", tt.op, again, back, id, err)
		}
	}
}

func FuzzDecodeRequest(f *testing.F) {
	for i, o := range catalog.Operations() {
		b, err := o.EncodeRequest(o.NewRequest(), "s")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(i, b)
	}
	f.Add(6, []byte(`{"sandbox_id":"s","argv":[{"base64":"/w=="}]}`))
	f.Fuzz(func(t *testing.T, i int, body []byte) {
		ops := catalog.Operations()
		o := ops[uint(i)%uint(len(ops))]
		req, id, err := o.DecodeRequest(body)
		if err != nil {
			if k := catalog.AsError(err).Kind; k != catalog.InvalidRequest {
				t.Fatalf("kind %s: %v", k, err)
			}
			return
		}
		again, err := o.EncodeRequest(req, id)
		if err != nil {
			t.Fatal(err)
		}
		back, id2, err := o.DecodeRequest(again)
		if err != nil || id2 != id {
			t.Fatalf("%s gives %s, which does not decode: %v", body, again, err)
		}
		third, err := o.EncodeRequest(back, id2)
		if err != nil || string(third) != string(again) {
			t.Fatalf("%s and %s differ: %v", again, third, err)
		}
	})
}

func TestTextKeepsEveryByte(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := catalog.Text(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
		b, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		if plain := b[0] == '"'; plain != utf8.ValidString(string(in)) {
			t.Fatalf("%q is written as %s", in, b)
		}
		var out catalog.Text
		if err := json.Unmarshal(b, &out); err != nil || out != in {
			t.Fatalf("%q comes back as %q: %v", in, out, err)
		}
	})
}

func TestErrorsOverTheWire(t *testing.T) {
	e := catalog.ConflictError("a.txt: conflict", catalog.ConflictDetails{
		Base: "L000001", Head: "L000002",
		Conflicts: []catalog.Conflict{{Path: "a\xff", Kind: "content", Head: &catalog.Version{Kind: "file", Size: 3}}},
	})
	b, err := json.Marshal(catalog.ErrorBody{Error: e})
	if err != nil {
		t.Fatal(err)
	}
	var body catalog.ErrorBody
	if err := json.Unmarshal(b, &body); err != nil {
		t.Fatal(err)
	}
	if body.Error.Kind != catalog.Conflicted || body.Error.Message != e.Message || body.Error.ExitCode() != catalog.ExitConflict {
		t.Errorf("got %+v from %s", body.Error, b)
	}
	if c := body.Error.Conflicts(); len(c) != 1 || c[0].Path != "a\xff" || c[0].Head == nil || c[0].Base != nil {
		t.Errorf("conflicts %+v from %s", c, b)
	}
	if !reflect.DeepEqual(e.Conflicts()[0].Path, body.Error.Conflicts()[0].Path) {
		t.Error("conflicts differ across the wire")
	}

	wrapped := fmt.Errorf("publish: %w", catalog.Errorf(catalog.NotFound, "no session %q: %w", "x", fs.ErrNotExist))
	if got := catalog.AsError(wrapped); got.Kind != catalog.NotFound || !errors.Is(wrapped, fs.ErrNotExist) {
		t.Errorf("got %+v", got)
	}
	if got := catalog.AsError(errors.New("x")); got.Kind != catalog.Internal || got.ExitCode() != catalog.ExitFailed {
		t.Errorf("got %+v", got)
	}
}

func TestDescriptionIsJSON(t *testing.T) {
	b, err := json.Marshal(catalog.Describe())
	if err != nil {
		t.Fatal(err)
	}
	var d catalog.Description
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	if len(d.Operations) != len(catalog.Operations()) {
		t.Errorf("%d operations described, %d exist", len(d.Operations), len(catalog.Operations()))
	}
	for _, o := range d.Operations {
		if _, ok := o.Request.Properties["sandbox_id"]; ok != (o.SandboxID != "none") {
			t.Errorf("%s: sandbox_id in the request schema: %v, need %s", o.Name, ok, o.SandboxID)
		}
		for _, a := range o.Arguments {
			if _, ok := o.Request.Properties[a.Name]; !ok {
				t.Errorf("%s: no schema of argument %s", o.Name, a.Name)
			}
		}
	}
}
