package catalog

import (
	"encoding/json"
	"fmt"
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
		d := json.NewDecoder(strings.NewReader(value))
		d.DisallowUnknownFields()
		if err := d.Decode(f.Addr().Interface()); err != nil {
			return Errorf(InvalidRequest, "%s: must be JSON: %w", p.Name, err)
		}
		if d.More() {
			return Errorf(InvalidRequest, "%s: must be one JSON value; there is more after it", p.Name)
		}
	}
	return nil
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
