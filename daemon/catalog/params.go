package catalog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// ParamType is how an argument's value is written on a command line.
type ParamType string

// The types of arguments.
const (
	StringParam ParamType = "string"
	TextParam   ParamType = "text" // any bytes; see Text
	IntParam    ParamType = "int"
	BoolParam   ParamType = "bool"
	ListParam   ParamType = "list of text"
	JSONParam   ParamType = "json"
)

// Param is one argument of an operation, derived from a field of its request.
type Param struct {
	Name       string    `json:"name"`
	Type       ParamType `json:"type"`
	Help       string    `json:"help"`
	Default    string    `json:"default,omitempty"`
	Required   bool      `json:"required,omitempty"`
	Enum       []string  `json:"enum,omitempty"`
	Min        *int64    `json:"min,omitempty"`
	Max        *int64    `json:"max,omitempty"`
	Arg        string    `json:"-"` // word for the value
	Positional string    `json:"-"` // "", "1", "2", "rest"
	HostPath   bool      `json:"-"`
	Stdin      bool      `json:"-"`

	index []int
}

// Flag is the argument's name on a command line.
func (p Param) Flag() string { return strings.ReplaceAll(p.Name, "_", "-") }

// Params lists the arguments of o in declaration order, without the sandbox id.
func (o Operation) Params() []Param { return paramsOf(reflect.TypeOf(o.Request)) }

func paramsOf(t reflect.Type) []Param {
	params := make([]Param, 0, t.NumField())
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		p := Param{
			Name:       name,
			Type:       paramType(f.Type),
			Help:       f.Tag.Get("help"),
			Default:    f.Tag.Get("default"),
			Required:   f.Tag.Get("required") == "true",
			Arg:        f.Tag.Get("arg"),
			Positional: f.Tag.Get("positional"),
			HostPath:   f.Tag.Get("host") == "path",
			Stdin:      f.Tag.Get("stdin") == "-",
			Min:        tagInt(f.Tag.Get("min")),
			Max:        tagInt(f.Tag.Get("max")),
			index:      f.Index,
		}
		if e := f.Tag.Get("enum"); e != "" {
			p.Enum = strings.Split(e, ",")
			p.Arg = strings.Join(p.Enum, "|")
		}
		params = append(params, p)
	}
	return params
}

func paramType(t reflect.Type) ParamType {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t == reflect.TypeFor[Text]():
		return TextParam
	case t == reflect.TypeFor[[]Text]():
		return ListParam
	case t.Kind() == reflect.String:
		return StringParam
	case t.Kind() == reflect.Int64:
		return IntParam
	case t.Kind() == reflect.Bool:
		return BoolParam
	default:
		return JSONParam
	}
}

func tagInt(s string) *int64 {
	if s == "" {
		return nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		panic(fmt.Sprintf("catalog: bound %q is no number", s))
	}
	return &n
}

// Set parses value as the argument p and stores it in the request that req
// points to. A list grows by one element with each call. The error is
// InvalidRequest and names the argument.
func (p Param) Set(req any, value string) error {
	f := reflect.ValueOf(req).Elem().FieldByIndex(p.index)
	if f.Kind() == reflect.Pointer {
		f.Set(reflect.New(f.Type().Elem()))
		f = f.Elem()
	}
	switch p.Type {
	case StringParam, TextParam:
		f.SetString(value)
	case IntParam:
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return Errorf(InvalidRequest, "%s %q: must be a whole number", p.Name, value)
		}
		f.SetInt(n)
	case BoolParam:
		b, err := strconv.ParseBool(value)
		if err != nil {
			return Errorf(InvalidRequest, "%s %q: must be true or false", p.Name, value)
		}
		f.SetBool(b)
	case ListParam:
		f.Set(reflect.Append(f, reflect.ValueOf(Text(value))))
	default:
		return p.setJSON(f, []byte(value))
	}
	return nil
}

// setJSON stores a JSON value in the field f of the request.
func (p Param) setJSON(f reflect.Value, raw []byte) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(f.Addr().Interface()); err != nil {
		return Errorf(InvalidRequest, "%s: must be JSON of type %s: %w", p.Name, p.Type, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Errorf(InvalidRequest, "%s: must be one JSON value; there is more after it", p.Name)
	}
	return nil
}

// sandboxField is the name under which a request's body carries the sandbox id.
const sandboxField = "sandbox_id"

// DecodeRequest reads the JSON object of arguments of o, with the sandbox id
// among them, fills in defaults and validates. An empty body is an object
// without members, and a null member is an absent one. The error is of kind
// InvalidRequest; unknown members are refused by name, all of them.
func (o Operation) DecodeRequest(body []byte) (req any, sandboxID string, err error) {
	var members map[string]json.RawMessage
	if len(bytes.TrimSpace(body)) > 0 {
		if err := json.Unmarshal(body, &members); err != nil {
			return nil, "", Errorf(InvalidRequest, "arguments of %s: must be one JSON object: %w", o.Name, err)
		}
	}
	if raw, ok := members[sandboxField]; ok && o.Sandbox != NoSandbox {
		if err := json.Unmarshal(raw, &sandboxID); err != nil {
			return nil, "", Errorf(InvalidRequest, "sandbox_id: must be a JSON string: %w", err)
		}
		delete(members, sandboxField)
	}
	req = o.NewRequest()
	v := reflect.ValueOf(req).Elem()
	known := make([]string, 0, v.NumField()+1)
	for _, p := range o.Params() {
		known = append(known, p.Name)
		raw, ok := members[p.Name]
		delete(members, p.Name)
		if !ok || bytes.Equal(raw, []byte("null")) {
			continue
		}
		f := v.FieldByIndex(p.index)
		f.SetZero() // a default must not show through a partial value
		if err := p.setJSON(f, raw); err != nil {
			return nil, "", err
		}
	}
	if len(members) > 0 {
		return nil, "", o.unknown(slices.Sorted(maps.Keys(members)), known)
	}
	if o.Sandbox == RequiredSandbox && sandboxID == "" {
		return nil, "", Errorf(InvalidRequest, "sandbox_id is missing: %s works on one sandbox, and list_sandboxes shows the ids", o.Name)
	}
	if err := Validate(req); err != nil {
		return nil, "", err
	}
	return req, sandboxID, nil
}

func (o Operation) unknown(names, known []string) error {
	if o.Sandbox != NoSandbox {
		known = append(known, sandboxField)
	}
	rule := "it takes no arguments"
	if len(known) > 0 {
		rule = "it takes " + strings.Join(known, ", ")
	}
	for i := range names {
		names[i] = strconv.Quote(names[i])
	}
	return Errorf(InvalidRequest, "%s does not know %s: %s", o.Name, strings.Join(names, ", "), rule)
}

// EncodeRequest writes the JSON object that DecodeRequest reads.
func (o Operation) EncodeRequest(req any, sandboxID string) ([]byte, error) {
	b, err := json.Marshal(req)
	if err != nil {
		return nil, fmt.Errorf("encode arguments of %s: %w", o.Name, err)
	}
	if sandboxID == "" || o.Sandbox == NoSandbox {
		return b, nil
	}
	id, err := json.Marshal(sandboxID)
	if err != nil {
		return nil, fmt.Errorf("encode sandbox id: %w", err)
	}
	head := append([]byte(`{"`+sandboxField+`":`), id...)
	if !bytes.Equal(b, []byte("{}")) {
		head = append(head, ',')
	}
	return append(head, b[1:]...), nil
}

func applyDefaults(v reflect.Value) {
	for _, p := range paramsOf(v.Type()) {
		if p.Default == "" {
			continue
		}
		if err := p.Set(v.Addr().Interface(), p.Default); err != nil {
			panic(fmt.Sprintf("catalog: default of %s: %v", p.Name, err))
		}
	}
}

// Validate checks the request that req points to against its tags and its own
// rules. The error is of kind InvalidRequest and names the argument, the rule
// and the remedy.
func Validate(req any) error {
	v := reflect.ValueOf(req).Elem()
	for _, p := range paramsOf(v.Type()) {
		if err := p.check(v.FieldByIndex(p.index)); err != nil {
			return err
		}
	}
	if own, ok := req.(interface{ Validate() error }); ok {
		return own.Validate()
	}
	return nil
}

func (p Param) check(f reflect.Value) error {
	if f.Kind() == reflect.Pointer {
		if f.IsNil() {
			if p.Required {
				return Errorf(InvalidRequest, "%s is missing: it is required (%s)", p.Name, p.Help)
			}
			return nil
		}
		f = f.Elem() // given, perhaps empty: that is a value
	} else if p.Required && (f.IsZero() || f.Kind() == reflect.Slice && f.Len() == 0) {
		return Errorf(InvalidRequest, "%s is missing or empty: it is required (%s)", p.Name, p.Help)
	}
	if p.Type == IntParam {
		n := f.Int()
		if p.Min != nil && n < *p.Min {
			return Errorf(InvalidRequest, "%s %d: must be at least %d", p.Name, n, *p.Min)
		}
		if p.Max != nil && n > *p.Max {
			return Errorf(InvalidRequest, "%s %d: must be at most %d", p.Name, n, *p.Max)
		}
	}
	if len(p.Enum) > 0 && (f.String() != "" || p.Default != "") && !slices.Contains(p.Enum, f.String()) {
		return Errorf(InvalidRequest, "%s %q: must be one of %s", p.Name, f.String(), strings.Join(p.Enum, ", "))
	}
	if p.Default != "" && f.Kind() == reflect.String && f.String() == "" {
		return Errorf(InvalidRequest, "%s is empty: leave it out for its default, %s", p.Name, p.Default)
	}
	return nil
}

// FillEmpty replaces every nil slice and map beneath the result that res points
// to by an empty one, so that a list is never null on the wire. Pointers that
// are nil stay so.
func FillEmpty(res any) { fillEmpty(reflect.ValueOf(res)) }

func fillEmpty(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			fillEmpty(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fillEmpty(v.Field(i))
			}
		}
	case reflect.Slice:
		if v.IsNil() && v.CanSet() {
			v.Set(reflect.MakeSlice(v.Type(), 0, 0))
		}
		switch v.Type().Elem().Kind() {
		case reflect.Struct, reflect.Pointer, reflect.Slice:
			for i := range v.Len() {
				fillEmpty(v.Index(i))
			}
		}
	case reflect.Map:
		if v.IsNil() && v.CanSet() {
			v.Set(reflect.MakeMap(v.Type()))
		}
	}
}
