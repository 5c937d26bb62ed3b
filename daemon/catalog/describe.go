package catalog

import (
	"reflect"
	"strings"
	"time"
)

// Description is the whole catalogue as JSON: what a client that is not written
// in Go needs.
type Description struct {
	Version    int              `json:"version"` // of the wire protocol
	Kinds      []Kind           `json:"error_kinds"`
	Operations []OperationShape `json:"operations"`
}

// OperationShape is one operation in a Description.
type OperationShape struct {
	Name      string    `json:"name"`
	Aliases   []string  `json:"aliases"`
	Surface   Surface   `json:"surface"`
	Authority Authority `json:"authority"`
	Summary   string    `json:"summary"`
	About     string    `json:"about,omitempty"`
	SandboxID string    `json:"sandbox_id"` // none, optional, required
	Progress  bool      `json:"progress"`
	Detached  bool      `json:"detached"`
	Errors    []Kind    `json:"errors"`
	Arguments []Param   `json:"arguments"`
	Request   Schema    `json:"request_schema"`
	Result    Schema    `json:"result_schema"`
}

// Describe returns the catalogue's description.
func Describe() Description {
	d := Description{Version: 1, Kinds: Kinds()}
	for _, o := range Operations() {
		d.Operations = append(d.Operations, OperationShape{
			Name: o.Name, Aliases: o.Aliases, Surface: o.Surface, Authority: o.Authority,
			Summary: o.Summary, About: o.About, SandboxID: o.Sandbox.String(),
			Progress: o.Progress, Detached: o.Detached, Errors: o.Errors,
			Arguments: o.Params(), Request: o.requestSchema(), Result: schemaOf(reflect.TypeOf(o.Result)),
		})
	}
	FillEmpty(&d)
	return d
}

// Schema is a JSON Schema of the kind MCP clients and validators read.
type Schema struct {
	Type                 any               `json:"type,omitempty"` // a string, or a list when null is allowed too
	Format               string            `json:"format,omitempty"`
	Description          string            `json:"description,omitempty"`
	Enum                 []string          `json:"enum,omitempty"`
	Default              any               `json:"default,omitempty"`
	Minimum              *int64            `json:"minimum,omitempty"`
	Maximum              *int64            `json:"maximum,omitempty"`
	Items                *Schema           `json:"items,omitempty"`
	Properties           map[string]Schema `json:"properties,omitempty"`
	Required             []string          `json:"required,omitempty"`
	AdditionalProperties any               `json:"additionalProperties,omitempty"` // false, or a Schema
}

func (o Operation) requestSchema() Schema {
	s := schemaOf(reflect.TypeOf(o.Request))
	s.AdditionalProperties, s.Required = false, nil
	v := reflect.ValueOf(o.NewRequest()).Elem()
	for _, p := range o.Params() {
		f := s.Properties[p.Name]
		f.Description, f.Enum, f.Minimum, f.Maximum = p.Help, p.Enum, p.Min, p.Max
		if p.Default != "" {
			f.Default = v.FieldByIndex(p.index).Interface()
		}
		if p.Required {
			s.Required = append(s.Required, p.Name)
		}
		s.Properties[p.Name] = f
	}
	if o.Sandbox != NoSandbox {
		s.Properties[sandboxField] = Schema{Type: "string", Description: "sandbox to work on"}
	}
	if o.Sandbox == RequiredSandbox {
		s.Required = append(s.Required, sandboxField)
	}
	return s
}

func schemaOf(t reflect.Type) Schema {
	switch t {
	case reflect.TypeFor[time.Time]():
		return Schema{Type: "string", Format: "date-time"}
	case reflect.TypeFor[Text]():
		return Schema{Type: []string{"string", "object"}, Description: `{"base64":"..."} when it is not valid UTF-8`}
	}
	switch t.Kind() {
	case reflect.Pointer:
		s := schemaOf(t.Elem())
		switch typ := s.Type.(type) {
		case string:
			s.Type = []string{typ, "null"}
		case []string:
			s.Type = append(typ[:len(typ):len(typ)], "null")
		}
		return s
	case reflect.Slice:
		items := schemaOf(t.Elem())
		return Schema{Type: "array", Items: &items}
	case reflect.Map:
		return Schema{Type: "object", AdditionalProperties: schemaOf(t.Elem())}
	case reflect.Struct:
		return structSchema(t)
	case reflect.Bool:
		return Schema{Type: "boolean"}
	case reflect.Int, reflect.Int64, reflect.Uint64:
		return Schema{Type: "integer"}
	case reflect.String:
		return Schema{Type: "string"}
	default:
		return Schema{} // any value
	}
}

func structSchema(t reflect.Type) Schema {
	s := Schema{Type: "object", Properties: map[string]Schema{}}
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() {
			continue
		}
		if f.Anonymous {
			inner := structSchema(f.Type)
			for name, field := range inner.Properties {
				s.Properties[name] = field
			}
			s.Required = append(s.Required, inner.Required...)
			continue
		}
		name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
		s.Properties[name] = schemaOf(f.Type)
		if opts != "omitempty" {
			s.Required = append(s.Required, name)
		}
	}
	return s
}
