package command_test

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"ephemeral-sandbox/cli/command"
	"ephemeral-sandbox/daemon/catalog"
	"ephemeral-sandbox/daemon/config"
)

//go:generate go test -run TestOperationsDocument -update

const (
	operationsDoc = "../../docs/operations.md"
	catalogDir    = "../../daemon/catalog"
)

// TestOperationsDocument holds docs/operations.md to the catalogue.
func TestOperationsDocument(t *testing.T) {
	notes, err := readNotes(catalogDir)
	if err != nil {
		t.Fatal(err)
	}
	settings, err := readNotes("../../daemon/config")
	if err != nil {
		t.Fatal(err)
	}
	d := &document{notes: notes, settings: settings, shown: map[reflect.Type]bool{}}
	want := d.write()
	for _, missing := range d.silent {
		t.Errorf("%s has no comment that says what it is", missing)
	}
	if *update {
		if err := os.WriteFile(operationsDoc, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(operationsDoc)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what the catalogue says: run go generate ./cli/command", operationsDoc)
	}
}

// notes maps Type and Type.Field to the words of their comments.
type notes map[string]string

func readNotes(dir string) (notes, error) {
	n := notes{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(node ast.Node) bool {
			decl, ok := node.(*ast.GenDecl)
			if !ok || decl.Tok != token.TYPE {
				return true
			}
			for _, spec := range decl.Specs {
				if ts, ok := spec.(*ast.TypeSpec); ok {
					n.add(ts, decl.Doc)
				}
			}
			return true
		})
		return nil
	})
	return n, err
}

func (n notes) add(ts *ast.TypeSpec, doc *ast.CommentGroup) {
	words := func(groups ...*ast.CommentGroup) string {
		var all []string
		for _, g := range groups {
			all = append(all, strings.Fields(g.Text())...)
		}
		return strings.Join(all, " ")
	}
	n[ts.Name.Name] = words(doc)
	st, ok := ts.Type.(*ast.StructType)
	if !ok {
		return
	}
	for _, f := range st.Fields.List {
		for _, name := range f.Names {
			n[ts.Name.Name+"."+name.Name] = words(f.Doc, f.Comment)
		}
	}
}

// document writes the reference of all operations.
type document struct {
	b        bytes.Buffer
	notes    notes
	settings notes
	shown    map[reflect.Type]bool
	queue    []reflect.Type
	silent   []string // types without a comment
}

func (d *document) printf(format string, args ...any) { fmt.Fprintf(&d.b, format, args...) }

func (d *document) write() []byte {
	d.b.WriteString(docHead)
	for _, k := range catalog.Kinds() {
		d.printf("| `%s` | %s |\n", k, kindMeaning[k])
	}
	for _, s := range []catalog.Surface{catalog.Manager, catalog.Runtime, catalog.Observability} {
		d.printf("\n## %s\n", command.ToolName(s))
		for _, op := range catalog.Operations() {
			if op.Surface == s {
				d.operation(op)
			}
		}
	}
	d.daemon()
	d.printf("\n## Shapes\n\nObjects that results are made of.\n")
	d.shape(reflect.TypeFor[catalog.ConflictDetails]())
	d.shape(reflect.TypeFor[catalog.Progress]())
	for len(d.queue) > 0 {
		slices.SortFunc(d.queue, func(a, b reflect.Type) int { return cmp.Compare(a.Name(), b.Name()) })
		t := d.queue[0]
		d.queue = d.queue[1:]
		d.shape(t)
	}
	return d.b.Bytes()
}

// daemon writes what the daemon's own tool offers.
func (d *document) daemon() {
	d.b.WriteString(daemonHead)
	c := reflect.ValueOf(config.Default(""))
	for i := range c.NumField() {
		f := c.Type().Field(i)
		name := f.Tag.Get("json")
		if name == "-" {
			continue
		}
		value := ""
		if !c.Field(i).IsZero() {
			value = fmt.Sprintf("`%v`", c.Field(i).Interface())
		}
		note := d.settings["Config."+f.Name]
		if note == "" {
			d.silent = append(d.silent, "Config."+f.Name)
		}
		d.printf("| `%s` | %s | %s |\n", name, value, cell(note))
	}
}

func (d *document) operation(op catalog.Operation) {
	d.printf("\n### %s\n\n", op.Name)
	d.printf("%s%s.", strings.ToUpper(op.Summary[:1]), op.Summary[1:])
	if op.About != "" {
		d.printf(" %s", op.About)
	}
	d.printf("\n\n")
	if len(op.Aliases) > 0 {
		d.printf("Short form: `%s`. ", strings.Join(op.Aliases, "`, `"))
	}
	d.printf("Authority: %s. Sandbox id: %s.", op.Authority, op.Sandbox)
	if op.Progress {
		d.printf(" Reports progress.")
	}
	if op.Detached {
		d.printf(" Goes on when the client disconnects.")
	}
	d.printf("\n")
	if params := op.Params(); len(params) > 0 {
		d.printf("\n| argument | flag | type | default | meaning |\n|---|---|---|---|---|\n")
		for _, p := range params {
			d.param(p)
		}
	}
	d.fields("result", reflect.TypeOf(op.Result))
	errs := append([]catalog.Kind{}, op.Errors...)
	errs = append(errs, catalog.Unauthorized, catalog.Unavailable, catalog.Internal)
	d.printf("\nErrors: ")
	for i, k := range errs {
		if i > 0 {
			d.printf(", ")
		}
		d.printf("`%s`", k)
	}
	d.printf(".\n")
}

func (d *document) param(p catalog.Param) {
	flag := "`--" + p.Flag() + "`"
	switch p.Positional {
	case "":
	case "rest":
		flag = "after `--`"
	default:
		flag += ", or without"
	}
	value := ""
	switch {
	case p.Required:
		value = "required"
	case p.Default != "":
		value = "`" + p.Default + "`"
	}
	help := p.Help
	if len(p.Enum) > 0 {
		help += " (`" + strings.Join(p.Enum, "`, `") + "`)"
	}
	switch {
	case p.Min != nil && p.Max != nil:
		help += fmt.Sprintf(" (%d to %d)", *p.Min, *p.Max)
	case p.Min != nil && *p.Min > 0:
		help += fmt.Sprintf(" (at least %d)", *p.Min)
	}
	d.printf("| `%s` | %s | %s | %s | %s |\n", p.Name, flag, p.Type, value, cell(help))
}

func (d *document) shape(t reflect.Type) {
	if d.shown[t] {
		return
	}
	d.shown[t] = true
	d.printf("\n### %s\n", t.Name())
	if note := d.notes[t.Name()]; note != "" {
		d.printf("\n%s\n", note)
	} else {
		d.silent = append(d.silent, t.Name())
	}
	d.fields("field", t)
}

func (d *document) fields(head string, t reflect.Type) {
	d.printf("\n| %s | type | meaning |\n|---|---|---|\n", head)
	d.rows(t)
}

func (d *document) rows(t reflect.Type) {
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() {
			continue
		}
		if f.Anonymous {
			d.rows(f.Type)
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		d.printf("| `%s` | %s | %s |\n", name, d.typeName(f.Type), cell(d.notes[t.Name()+"."+f.Name]))
	}
}

func (d *document) typeName(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[catalog.Text]():
		return "text"
	case t == reflect.TypeFor[time.Time]():
		return "time"
	case t == reflect.TypeFor[catalog.Error]():
		return "error"
	case t.Kind() == reflect.Pointer:
		return d.typeName(t.Elem()) + " or null"
	case t.Kind() == reflect.Slice:
		return "list of " + d.typeName(t.Elem())
	case t.Kind() == reflect.Map:
		return "object of " + d.typeName(t.Elem())
	case t.Kind() == reflect.Struct:
		d.queue = append(d.queue, t)
		return fmt.Sprintf("[%s](#%s)", t.Name(), strings.ToLower(t.Name()))
	case t.Kind() == reflect.Interface:
		return "any"
	case t.Kind() == reflect.Bool:
		return "bool"
	case t.Kind() == reflect.String:
		return "string"
	}
	return "int"
}

func cell(s string) string { return strings.ReplaceAll(s, "|", "\\|") }

var kindMeaning = map[catalog.Kind]string{
	catalog.InvalidRequest:     "the request itself is wrong; repeating it is useless",
	catalog.NotFound:           "a sandbox, session, command, path or commit that is not there",
	catalog.Conflicted:         "the head contradicts the change; `details.conflicts` lists every path, see [ConflictDetails](#conflictdetails)",
	catalog.PreconditionFailed: "a right request in the wrong state: a moved head, a busy session, a kernel feature that is off",
	catalog.Unauthorized:       "no token, a wrong one, or another user's process",
	catalog.ResourceExhausted:  "disk full, a quota reached, a request that is too large",
	catalog.Unavailable:        "no daemon, or one that is starting or ending",
	catalog.Corrupt:            "stored bytes fail their checksum; `details` name layer, section and offset",
	catalog.Internal:           "a fault of the daemon's own",
}

const daemonHead = `
## sandboxd

| command | what it does |
|---|---|
| ` + "`sandboxd serve`" + ` | runs the daemon in the foreground until SIGINT or SIGTERM; a second daemon on the same state directory is refused |
| ` + "`sandboxd start`" + ` | runs it in the background, with its output in sandboxd.log of the state directory, and returns when it answers |
| ` + "`sandboxd stop`" + ` | ends it with its sessions, and returns when all its processes have gone |
| ` + "`sandboxd status`" + ` | says whether it runs and answers; exit code 1 when not |
| ` + "`sandboxd doctor`" + ` | says what keeps sessions from running on this machine, and the remedy |
| ` + "`sandboxd check`" + ` | verifies every byte of every sandbox's layers |
| ` + "`sandboxd layer dump FILE [--verify]`" + ` | prints what a layer file holds, without a daemon |

Each takes ` + "`--state-dir`" + ` and ` + "`--json`" + `. The file config.json in the state directory may set:

| setting | default | meaning |
|---|---|---|
`

const docHead = `# Operations

Written by ` + "`go generate ./cli/command`" + ` from daemon/catalog; edit the catalogue, not this page.

Every operation can be had in two ways that take the same arguments and give the same results.

**On the command line**, as a subcommand of its surface's tool. ` + "`--json`" + ` gives one JSON document on
standard output, and for an error one on standard error; without it the output is for people.

| flag of every tool | meaning |
|---|---|
| ` + "`--state-dir DIR`" + ` | state directory of the daemon; else ` + "`$SANDBOX_STATE_DIR`" + `, else ` + "`$XDG_STATE_HOME/ephemeral-sandbox`" + `, else ` + "`~/.local/state/ephemeral-sandbox`" + ` |
| ` + "`--json`" + ` | one JSON document |
| ` + "`--auto-start`" + ` | start a daemon when none is running |
| ` + "`--request-id ID`" + ` | id of the operation in traces, blame and commits: 1 to 128 letters, digits and ` + "`. _ : -`" + ` |
| ` + "`--progress`" + ` | report progress on standard error though it is no terminal |
| ` + "`--sandbox-id ID`" + ` | the sandbox, where an operation needs one |

| exit code | meaning |
|---|---|
| 0 | ok |
| 1 | failed |
| 2 | wrong usage |
| 3 | conflict: nothing was published |

` + "`exec_command`" + ` ends with its command's own code instead, or 128 + the number of the signal that ended it; with
3 when the command succeeded but its publication was refused.

**Over HTTP**, on the unix socket ` + "`gateway.sock`" + ` in the state directory: ` + "`POST /v1/<operation>`" + ` with a JSON object of
arguments (` + "`sandbox_id`" + ` among them), ` + "`Authorization: Bearer <content of the file token>`" + ` and, if wanted,
` + "`X-Request-Id`" + `. The answer is the result, or an error document. With ` + "`Accept: application/x-ndjson`" + ` it is lines:
` + "`{\"progress\":...}`" + ` for each report (see [Progress](#progress)) and at last ` + "`{\"result\":...}` or `{\"error\":...}`" + `.
` + "`GET /v1/catalog`" + ` describes all of this for programs, with JSON schemas; ` + "`GET /v1/health`" + ` needs no token.

A *text* is a string of any bytes: a JSON string when it is valid UTF-8, else ` + "`{\"base64\":\"...\"}`" + `. A *time* is
RFC 3339 in UTC. Unknown arguments are refused.

## Errors

` + "`{\"error\":{\"kind\":...,\"message\":...,\"details\":...}}`" + `: the message is one line that names the input, the rule and
the remedy; details are an object or null.

| kind | when |
|---|---|
`
