package checks_test

import (
	"bufio"
	"bytes"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// room is a rule for one package, or with /... for it and all beneath it: what
// of ours its non-test code may import directly, and why no more. The longest
// pattern that fits a package is its rule. A package without a rule fails the
// test: a new room gets its place in the picture when it is made.
type room struct {
	pattern string
	may     []string // patterns; "..." alone is all
	why     string
}

var rooms = []room{
	{"fs", nil, "a corridor: it holds no code"},
	{"fs/tree", nil, "the words are a leaf, so that everyone can speak them"},
	{"layerfmt", []string{"fs/tree"}, "a format knows the words of a tree and nothing that uses it"},
	{"layerfmt/...", []string{"fs/tree", "layerfmt/..."}, "a format knows the words of a tree and nothing that uses it"},
	{"fs/hostfs", nil, "the seam to the disk is a leaf"},
	{"fs/hostfs/memfs", []string{"fs/hostfs"}, "a disk in memory stands in for the seam"},
	{"fs/hostfs/faultfs", []string{"fs/hostfs"}, "a failing disk wraps the seam"},
	{"fs/stack", []string{"layerfmt", "fs/tree"}, "merging layers needs their reader and the words"},
	{"fs/upper", []string{"fs/tree"}, "private changes do not know what they lie over"},
	{"fs/overlay", []string{"fs/upper", "fs/tree"}, "it says itself what it wants of a lower tree"},
	{"fs/access", []string{"fs/tree"}, "a record of accesses needs the words only"},
	{"fs/fusefs", []string{"fs/overlay", "fs/access", "fs/tree"}, "it translates for the kernel and decides nothing"},
	{"fs/fstest", nil, "the conformance suite sees directories, as any program does"},
	{"occ", []string{"fs/tree", "occ/merge", "occ/linediff"}, "values in, values out"},
	{"occ/merge", []string{"occ/linediff"}, "a merge of texts knows no trees"},
	{"occ/linediff", nil, "the line diff is a leaf, shared by merge and blame"},
	{"attribution", []string{"fs/tree", "occ/linediff"}, "blame and the gate do not know each other"},
	{"daemon/catalog", nil, "one leaf from which every surface derives"},
	{"daemon/config", nil, "settings do not know who reads them"},
	{"daemon/telemetry", nil, "everyone may report; it knows nobody"},
	{"daemon/importer", []string{"layerfmt", "fs/tree"}, "it reads directories into a layer"},
	{"daemon/store", []string{"layerfmt", "fs/stack", "fs/tree", "fs/hostfs"}, "commits and layers; no sessions, no gate"},
	{"daemon/store/storetest", []string{"daemon/store", "layerfmt", "fs/stack", "fs/tree", "fs/hostfs/..."}, "the store's contract, for each of its implementations"},
	{"daemon/session", []string{"fs/overlay", "fs/upper", "fs/stack", "fs/access", "fs/tree", "layerfmt", "occ", "occ/...", "attribution", "daemon/holder", "daemon/telemetry"}, "it is handed a mounter and a head; it knows neither the kernel's door nor the store"},
	{"daemon/holder", []string{"daemon/holder/..."}, "processes and namespaces; what they run is not its business"},
	{"daemon/holder/...", []string{"daemon/holder/..."}, "the holder's binary is small: 500 of them run at once"},
	{"daemon/fdstore", nil, "it keeps descriptors and knows nothing of what they are"},
	{"daemon/gateway", []string{"daemon/catalog", "daemon/telemetry"}, "a door: it carries operations, it does not do them"},
	{"daemon/client", []string{"daemon/catalog", "daemon/config"}, "a dialer: it finds the socket and carries operations"},
	{"daemon", []string{"fs/...", "layerfmt", "daemon/...", "occ", "occ/...", "attribution"}, "the only place where rooms are joined"},
	{"cli/command", []string{"daemon/client", "daemon/catalog", "daemon/config", "daemon/fdstore", "layerfmt"}, "a command speaks to the daemon; sandboxd's is also its parent, and looks at layer files offline"},
	{"cli/sandboxd", []string{"cli/command", "daemon", "daemon/catalog", "daemon/config", "daemon/holder"}, "it alone links the daemon, and becomes a holder"},
	{"cli/...", []string{"cli/command", "daemon/catalog"}, "a main is a few lines: which surface it is"},
	{"bench/...", []string{"bench/..."}, "it drives the built programs, as a user would"},
	{"docs/...", nil, "checks look at sources, they do not link them"},
}

// Rules over everything that a package links, near and far.
var reach = []struct {
	from   string
	except []string
	to     string
	why    string
}{
	{"...", []string{"fs/fusefs", "daemon", "cli/..."}, "github.com/hanwen/go-fuse/v2/...", "only fs/fusefs speaks the kernel's protocol; daemon and cli link it through that room"},
	{"fs/...", nil, module + "/daemon/...", "a file system knows no policy"},
	{"layerfmt/...", nil, module + "/daemon/...", "a format knows no policy"},
	{"occ/...", nil, module + "/daemon/...", "the gate's rules are values in, values out"},
	{"attribution/...", nil, module + "/daemon/...", "blame is values in, values out"},
	{"occ/...", nil, module + "/attribution/...", "the gate decides, blame remembers; the daemon joins them"},
	{"attribution/...", nil, module + "/occ/merge/...", "blame takes plain spans, so that it outlives the merge"},
	{"...", []string{"cli/..."}, module + "/cli/...", "nothing builds on the command line"},
	{"...", []string{"bench/..."}, module + "/bench/...", "nothing builds on measurements"},
	{"...", []string{"fs/fstest", "daemon/store/storetest"}, module + "/fs/fstest/...", "test suites stay out of the product"},
	{"...", []string{"daemon/store/storetest"}, module + "/daemon/store/storetest/...", "test suites stay out of the product"},
	{"...", []string{"fs/hostfs/memfs", "daemon/store/storetest"}, module + "/fs/hostfs/memfs/...", "the product writes to a real disk"},
	{"...", []string{"fs/hostfs/faultfs", "daemon/store/storetest"}, module + "/fs/hostfs/faultfs/...", "the product's disk fails by itself"},
	{"cli/command", nil, "net/http/httptest", "test servers stay out of the product"},
	{"fs/...", nil, "net/http", "a file system opens no sockets"},
	{"layerfmt/...", nil, "net", "a format opens no sockets"},
	{"daemon/catalog", nil, "net", "a list of operations opens no sockets"},
}

// matches reports whether the pattern is the package, or ends in /... and
// stands above it or is it.
func matches(pattern, pkg string) bool {
	if pattern == "..." || pattern == pkg {
		return true
	}
	top, ok := strings.CutSuffix(pattern, "/...")
	return ok && (pkg == top || strings.HasPrefix(pkg, top+"/"))
}

func matchesAny(patterns []string, pkg string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, pkg) })
}

// goList runs go list and returns for every package of the module what the
// template gives, split at blanks. The keys are relative to the module.
func goList(t *testing.T, template string) map[string][]string {
	t.Helper()
	cmd := exec.Command("go", "list", "-f", "{{.ImportPath}} "+template, "./...")
	cmd.Dir = root(t)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	lists := map[string][]string{}
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		lists[ours(words[0])] = words[1:]
	}
	if len(lists) == 0 {
		t.Fatal("go list found no packages")
	}
	return lists
}

// ours is a package's place within the module, or its path when it is
// another's.
func ours(pkg string) string { return strings.TrimPrefix(pkg, module+"/") }

func TestImportsFollowTheArrows(t *testing.T) {
	for pkg, imports := range goList(t, `{{join .Imports " "}}`) {
		var rule *room
		for i := range rooms {
			if matches(rooms[i].pattern, pkg) && (rule == nil || len(rooms[i].pattern) > len(rule.pattern)) {
				rule = &rooms[i]
			}
		}
		if rule == nil {
			t.Errorf("%s has no rule: give it its place in the picture", pkg)
			continue
		}
		for _, imp := range imports {
			if strings.HasPrefix(imp, module+"/") && !matchesAny(rule.may, ours(imp)) {
				t.Errorf("%s imports %s: %s", pkg, ours(imp), rule.why)
			}
		}
	}
}

func TestNothingReachesWhatItMustNot(t *testing.T) {
	for pkg, deps := range goList(t, `{{join .Deps " "}}`) {
		for _, r := range reach {
			if !matches(r.from, pkg) || matchesAny(r.except, pkg) {
				continue
			}
			for _, d := range deps {
				if matches(r.to, d) {
					t.Errorf("%s links %s: %s", pkg, d, r.why)
				}
			}
		}
	}
}

// go-fuse's types must not spread through interfaces: whoever names them
// imports them directly.
func TestOnlyFusefsImportsGoFuse(t *testing.T) {
	for pkg, imports := range goList(t, `{{join .Imports " "}}`) {
		for _, imp := range imports {
			if pkg != "fs/fusefs" && matches("github.com/hanwen/go-fuse/v2/...", imp) {
				t.Errorf("%s imports %s: only fs/fusefs speaks the kernel's protocol", pkg, imp)
			}
		}
	}
}

// The holder runs hundreds of times at once and inside every session: each
// package it links costs memory there and is attack surface.
func TestTheHolderIsSmall(t *testing.T) {
	const holder = "daemon/holder/sandbox-holder"
	lists := goList(t, `{{if .Deps}}{{join .Deps " "}}{{end}}`)
	deps, ok := lists[holder]
	if !ok {
		t.Fatalf("no package %s", holder)
	}
	for _, d := range deps {
		if strings.Contains(strings.Split(d, "/")[0], ".") && !matches("golang.org/x/sys/...", d) {
			t.Errorf("the holder links %s: only x/sys besides the standard library", d)
		}
		if strings.HasPrefix(d, module+"/") && !matches("daemon/holder/...", ours(d)) {
			t.Errorf("the holder links %s: only its own protocol", d)
		}
		if matches("net", d) || matches("net/http", d) || matches("os/exec", d) {
			t.Errorf("the holder links %s, which it has no use for", d)
		}
	}
}
