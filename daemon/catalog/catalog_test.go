package catalog_test

import (
	"encoding/json"
	"reflect"
	"regexp"
	"slices"
	"testing"

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
