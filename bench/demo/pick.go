package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"ephemeral-sandbox/bench/drive"
)

// copyCheckout copies the files that git tracks in from, or all but what
// building made when git has nothing to say, and returns to.
func copyCheckout(ctx context.Context, from, to string) (string, error) {
	var names []string
	cmd := exec.CommandContext(ctx, "git", "ls-files", "-z")
	cmd.Dir = from
	if out, err := cmd.Output(); err == nil && len(out) > 0 {
		names = strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
	} else {
		err := walkText(from, 1<<20, func(rel string, _ fs.FileInfo) bool {
			names = append(names, rel)
			return true
		})
		if err != nil {
			return "", err
		}
	}
	for _, name := range names {
		if err := copyFile(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			return "", fmt.Errorf("copy checkout: %w", err)
		}
	}
	return to, nil
}

func copyFile(from, to string) error {
	info, err := os.Lstat(from)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
		return nil // tracked and deleted, or a link
	}
	if err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, info.Mode().Perm())
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		return errors.Join(err, out.Close())
	}
	return out.Close()
}

// walkText visits up to limit regular files of dir, hidden folders and what
// building made left out, until fn returns false.
func walkText(dir string, limit int, fn func(rel string, info fs.FileInfo) bool) error {
	n := 0
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // unreadable: the import will say so
		}
		name := d.Name()
		if d.IsDir() {
			if p != dir && (strings.HasPrefix(name, ".") || slices.Contains([]string{"bin", "vendor", "node_modules", "target", "testdata"}, name)) {
				return filepath.SkipDir
			}
			return nil
		}
		info, err := d.Info()
		if err != nil || !d.Type().IsRegular() {
			return nil
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		n++
		if n > limit || !fn(filepath.ToSlash(rel), info) {
			return filepath.SkipAll
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("look through %s: %w", dir, err)
	}
	return nil
}

// target is the file that all three sessions edit, and where.
type target struct {
	path  string
	lines []string // without line ends
	early int      // index of the line that sessions A and C both change
	late  int      // index of the line that session B changes
}

// pickTarget finds a text file with two lines that an edit can name: README
// files first, then other prose, then anything.
func pickTarget(dir string) (target, error) {
	type candidate struct {
		rel  string
		rank int
	}
	var all []candidate
	err := walkText(dir, 20000, func(rel string, info fs.FileInfo) bool {
		if info.Size() < 100 || info.Size() > 256<<10 {
			return true
		}
		base, ext := strings.ToLower(path.Base(rel)), strings.ToLower(path.Ext(rel))
		rank := 3
		switch {
		case strings.HasPrefix(base, "readme"):
			rank = 0
		case ext == ".md" || ext == ".txt" || ext == ".rst":
			rank = 1
		case slices.Contains([]string{".c", ".h", ".py", ".sh", ".yml", ".yaml", ".js", ".ts", ".rs", ".go"}, ext):
			rank = 2
		}
		all = append(all, candidate{rel, rank*100 + strings.Count(rel, "/")})
		return true
	})
	if err != nil {
		return target{}, err
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return a.rank - b.rank })
	for _, c := range all {
		text, err := os.ReadFile(filepath.Join(dir, c.rel))
		if err != nil {
			continue
		}
		if t, ok := targetIn(c.rel, text); ok {
			return t, nil
		}
	}
	return target{}, fmt.Errorf("%s holds no text file with enough lines to edit", dir)
}

// targetIn looks for two lines far apart, each of which occurs once.
func targetIn(rel string, text []byte) (target, bool) {
	if !utf8.Valid(text) || bytes.ContainsAny(text, "\x00\r") || bytes.Contains(text, []byte("<<<<<<<")) || bytes.Contains(text, []byte(">>>>>>>")) {
		return target{}, false
	}
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	usable := func(i int) bool {
		return len(strings.TrimSpace(lines[i])) >= 8 && len(lines[i]) < 200 && bytes.Count(text, []byte(lines[i])) == 1
	}
	for early := range lines {
		if !usable(early) {
			continue
		}
		for late := len(lines) - 1; late >= early+6; late-- {
			if usable(late) {
				return target{rel, lines, early, late}, true
			}
		}
		break
	}
	return target{}, false
}

// work is a build or test command of the repository's kind.
type work struct {
	what    string
	command string
	env     []string
}

// pickWork looks at what kind of project dir is. A project whose own build
// fails inside is reported, not a failure of the demo.
func pickWork(ctx context.Context, dir string) work {
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	}
	found := func(program string) bool {
		_, err := exec.LookPath(program)
		return err == nil
	}
	switch {
	case has("go.mod") && found("go"):
		if pkg := plainPackage(dir); pkg != "" {
			w := work{what: "a Go module", command: "go build " + drive.Quote(pkg)}
			if goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output(); err == nil {
				w.env = append(w.env, "PATH="+filepath.Join(strings.TrimSpace(string(goroot)), "bin")+":/usr/local/bin:/usr/bin:/bin")
			}
			w.env = append(w.env, "GOTOOLCHAIN=local", "GOFLAGS=-buildvcs=false")
			return w
		}
	case has("Cargo.toml") && found("cargo"):
		return work{what: "a Rust crate", command: "cargo check --offline"}
	case has("package.json") && found("npm"):
		return work{what: "a Node package", command: "npm run build --if-present --offline"}
	case has("pyproject.toml") || has("setup.py") || has("requirements.txt"):
		if found("python3") {
			return work{what: "a Python project", command: "python3 -m compileall -q ."}
		}
	case has("CMakeLists.txt") && found("cmake"):
		return work{what: "a CMake project", command: "cmake -S . -B /tmp/build && cmake --build /tmp/build"}
	case has("Makefile") && found("make"):
		return work{what: "a project with a Makefile", command: "make"}
	}
	return work{what: "a plain directory", command: "find . -type f -print0 | xargs -0 cksum | wc -l"}
}

// plainPackage returns the package of a Go module, as "./dir", whose imports,
// its own and those of the module's packages that it uses, all lie in the
// module or the standard library, and which costs the least though not
// next to nothing; empty when there is none. Such a package builds where no module can
// be downloaded.
func plainPackage(dir string) string {
	module := ""
	if text, err := os.ReadFile(filepath.Join(dir, "go.mod")); err == nil {
		for line := range strings.Lines(string(text)) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "module "); ok {
				module = strings.Trim(strings.TrimSpace(name), `"`)
			}
		}
	}
	if module == "" {
		return ""
	}
	imports := map[string]map[string]bool{} // by folder relative to dir
	err := walkText(dir, 20000, func(rel string, _ fs.FileInfo) bool {
		if !strings.HasSuffix(rel, ".go") || strings.HasSuffix(rel, "_test.go") {
			return true
		}
		src, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, rel), nil, parser.ImportsOnly)
		if err != nil {
			return true
		}
		folder := path.Dir(rel)
		if imports[folder] == nil {
			imports[folder] = map[string]bool{}
		}
		for _, i := range src.Imports {
			if name, err := strconv.Unquote(i.Path.Value); err == nil {
				imports[folder][name] = true
			}
		}
		return true
	})
	if err != nil {
		return ""
	}
	best, least := "", 0
	for folder := range imports {
		if n := weight(module, folder, imports, map[string]bool{}); n >= leastWeight && (best == "" || n < least || n == least && folder < best) {
			best, least = folder, n
		}
	}
	if best == "" {
		return ""
	}
	return "./" + best
}

// leastWeight leaves out packages that hold next to nothing: documentation, or
// declarations only.
const leastWeight = 3

// light are packages of the standard library that compile in no time; most
// others drag in os and reflect.
var light = []string{
	"bytes", "cmp", "errors", "hash", "hash/crc32", "hash/fnv", "io", "iter", "maps", "math", "math/bits", "slices",
	"sort", "strconv", "strings", "unicode", "unicode/utf8",
}

// weight estimates what building a folder's package costs: the packages that it
// uses within the module, and those of the standard library that it imports; 0
// when it needs another module, cgo or a folder that is not there.
func weight(module, folder string, imports map[string]map[string]bool, seen map[string]bool) int {
	if seen[folder] {
		return 1
	}
	seen[folder] = true
	n := 1
	for name := range imports[folder] {
		inside, ok := strings.CutPrefix(name, module+"/")
		switch {
		case ok && imports[inside] == nil:
			return 0
		case ok:
			w := weight(module, inside, imports, seen)
			if w == 0 {
				return 0
			}
			n += w
		case name == "C" || name == "unsafe" || name == "embed" || strings.Contains(strings.Split(name, "/")[0], "."):
			return 0
		case slices.Contains(light, name):
			n++
		default:
			n += 20
		}
	}
	return n
}
