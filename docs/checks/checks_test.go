package checks_test

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "ephemeral-sandbox"

// root is the checkout's top directory.
func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// files lists the checkout's files, relative to its root, without what is
// ignored or made by building.
func files(t *testing.T) []string {
	t.Helper()
	top := root(t)
	var out []string
	err := filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, p)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if slices.Contains([]string{".git", ".cache", "bin", "vendor"}, rel) {
				return filepath.SkipDir
			}
			return nil
		}
		if d.Type().IsRegular() && rel != "daemon/holder/embedded/sandbox-holder" {
			out = append(out, filepath.ToSlash(rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// The top level is fixed: a new folder there is a new room in the picture that
// everybody carries in their head.
func TestTopLevel(t *testing.T) {
	allowed := []string{
		"fs", "layerfmt", "daemon", "occ", "attribution", "cli", "bench", "docs",
		"go.mod", "go.sum", "Makefile", "README.md", "LICENSE", "bin", "vendor",
	}
	entries, err := os.ReadDir(root(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && !slices.Contains(allowed, e.Name()) {
			t.Errorf("%s: not one of the fixed names of the top level", e.Name())
		}
	}
}

// Every package says once what it is, in a comment that touches the package
// clause.
func TestEveryPackageHasOneComment(t *testing.T) {
	comments := map[string][]string{}
	packages := map[string]bool{}
	for _, f := range files(t) {
		if !strings.HasSuffix(f, ".go") || strings.HasSuffix(f, "_test.go") || strings.Contains(f, "/testdata/") {
			continue
		}
		src, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root(t), f), nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Errorf("%s: %v", f, err)
			continue
		}
		dir := path.Dir(f)
		packages[dir] = true
		if src.Doc != nil && hasText(src.Doc) {
			comments[dir] = append(comments[dir], path.Base(f))
			want := "Package " + src.Name.Name + " "
			if src.Name.Name == "main" {
				want = "Command " + path.Base(dir) + " "
			}
			if !strings.HasPrefix(src.Doc.Text(), want) {
				t.Errorf("%s: the package comment starts %.40q, want %q", f, src.Doc.Text(), want)
			}
		}
	}
	for dir := range packages {
		if n := comments[dir]; len(n) != 1 {
			t.Errorf("%s: %d package comments %v, want exactly one", dir, len(n), n)
		}
	}
}

// hasText reports whether a comment is more than directives such as
// //go:build, which gofmt keeps apart but a parser hands over as Doc.
func hasText(c *ast.CommentGroup) bool { return strings.TrimSpace(c.Text()) != "" }

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// A link in a document leads somewhere: to a file here, and to a heading that
// is in it. Links to other hosts are not followed.
func TestLinksResolve(t *testing.T) {
	all := files(t)
	for _, f := range all {
		if !strings.HasSuffix(f, ".md") || strings.Contains(f, "/testdata/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root(t), f))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllSubmatch(text, -1) {
			u, err := url.Parse(string(m[1]))
			if err != nil {
				t.Errorf("%s: link %s: %v", f, m[1], err)
				continue
			}
			if u.Host != "" {
				continue
			}
			target := f
			if u.Path != "" {
				target = path.Join(path.Dir(f), u.Path)
			}
			info, err := os.Stat(filepath.Join(root(t), target))
			if err != nil {
				t.Errorf("%s: link %s leads nowhere", f, m[1])
				continue
			}
			if u.Fragment != "" && !info.IsDir() && !slices.Contains(headings(t, target), u.Fragment) {
				t.Errorf("%s: link %s: no such heading in %s", f, m[1], target)
			}
		}
	}
}

var notInAnchor = regexp.MustCompile(`[^a-z0-9 _-]`)

// headings lists the anchors of a markdown file's headings.
func headings(t *testing.T, f string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), f))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(text)) {
		if h := strings.TrimLeft(line, "#"); h != line && strings.HasPrefix(h, " ") {
			anchor := notInAnchor.ReplaceAllString(strings.ToLower(strings.TrimSpace(h)), "")
			out = append(out, strings.ReplaceAll(anchor, " ", "-"))
		}
	}
	return out
}

type forbiddenWord struct {
	word   *regexp.Regexp
	reason string
}

// Words that must not be in any file of the checkout. Each is spelled in two
// parts, so that this file does not hold it.
var forbidden = []forbiddenWord{
	{regexp.MustCompile(`GOPROXY` + `=`), "where modules come from is the machine's business"},
	{regexp.MustCompile(`\btime\.Sl` + `eep\(`), "wait on the event instead"},
	{regexp.MustCompile(`\bos\.Is` + `(Not)?Exist\(`), "errors.Is sees through wrapping, this does not"},
	{regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`), "what is unfinished belongs into an issue"},
}

// place is the folder that the checkout lies in, as it would stand in a path;
// when that is a folder that every machine has, the checkout itself.
func place(t *testing.T) string {
	up := filepath.Dir(root(t))
	if slices.Contains([]string{"/", "/tmp", "/home", "/root", "/usr", "/opt", "/srv", "/var", "/mnt", "/build", "/src"}, up) {
		return root(t) + "/"
	}
	return up + "/"
}

func TestNoFileNamesAMachineOrAnUnfinishedThing(t *testing.T) {
	rules := forbidden
	rules = append(slices.Clone(rules), forbiddenWord{regexp.MustCompile(regexp.QuoteMeta(place(t))), "where this checkout lies"})
	for _, f := range files(t) {
		if f == "go.sum" || strings.Contains(f, "/testdata/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root(t), f))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.IndexByte(text, 0) >= 0 {
			continue // not text
		}
		for i, line := range bytes.Split(text, []byte("\n")) {
			for _, r := range rules {
				if r.word.Match(line) {
					t.Errorf("%s:%d: %s: %s", f, i+1, r.word.Find(line), r.reason)
				}
			}
		}
	}
}

// Every make target that README and CI name exists.
func TestNamedTargetsExist(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root(t), "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("(?m)(?:`|^)make ([a-z]+)")
	for _, f := range []string{"README.md", ".ci/run", "docs/README.md", "docs/architecture.md"} {
		text, err := os.ReadFile(filepath.Join(root(t), f))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, m := range named.FindAllSubmatch(text, -1) {
			if !regexp.MustCompile(`(?m)^` + string(m[1]) + `:`).Match(makefile) {
				t.Errorf("%s names the target %q, which the Makefile does not have", f, m[1])
			}
		}
	}
}

// .ci/run can be started.
func TestCIRunIsExecutable(t *testing.T) {
	info, err := os.Stat(filepath.Join(root(t), ".ci/run"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode()&0o111 == 0 {
		t.Error(".ci/run is not executable")
	}
	if out, err := exec.Command("bash", "-n", filepath.Join(root(t), ".ci/run")).CombinedOutput(); err != nil {
		t.Errorf(".ci/run: %v\n%s", err, out)
	}
}
