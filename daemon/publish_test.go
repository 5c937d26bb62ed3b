package daemon_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"ephemeral-sandbox/daemon/catalog"
)

func detailsOf(t *testing.T, e *catalog.Error) catalog.ConflictDetails {
	t.Helper()
	raw, ok := e.Details.(json.RawMessage)
	if !ok {
		t.Fatalf("the details of %v are a %T", e, e.Details)
	}
	var d catalog.ConflictDetails
	if err := json.Unmarshal(raw, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// describe lists a tree as a program in a session sees it: kind, permissions,
// links, link target and content of everything.
const describe = `find . -mindepth 1 -printf '%P %y %m %n %s %l\n' | sort; find . -type f -exec sha256sum {} + | sort -k2`

// TestPublishEveryKind changes everything that a shell can change and compares
// what the author saw with what a new session sees.
func TestPublishEveryKind(t *testing.T) {
	h := open(t, map[string]string{
		"edited": "a\nb\n", "replaced": "old\n", "gone": "x", "mode": "m", "linked": "l",
		"tree/a": "a", "tree/deep/b": "b", "moved/a": "ma", "moved/sub/b": "mb", "kind": "file", "grown": "1234567890", "cut": "1234567890",
	})
	ws := h.session()
	steps := []struct{ name, cmd string }{
		{"create", "echo new >created"},
		{"edit in place", "printf B | dd of=edited bs=1 seek=2 conv=notrunc 2>/dev/null"},
		{"rename over", "echo new >.replaced.tmp && mv .replaced.tmp replaced"},
		{"mkdir", "mkdir -p made/by/hand && echo x >made/by/hand/f && mkdir empty"},
		{"rmdir -r", "rm -r tree"},
		{"rename dir", "mv moved elsewhere && echo more >>elsewhere/a"},
		{"recreate", "mkdir moved && echo other >moved/c"},
		{"hard link", "ln linked linked2"},
		{"symlink", "ln -s ../outside sym && ln -s edited sym2"},
		{"chmod", "chmod 0751 mode"},
		{"fifo", "mkfifo pipe && chmod 600 pipe"},
		{"sparse", "truncate -s 10M sparse && printf end | dd of=sparse bs=1 seek=5000000 conv=notrunc 2>/dev/null"},
		{"empty", ": >void"},
		{"delete", "rm gone"},
		{"change of kind", "rm kind && mkdir kind && : >kind/inner"},
		{"append", "printf more >>grown"},
		{"truncate", "truncate -s 3 cut"},
		{"odd names", `: >"$(printf 'n\377ew\nline')" && : >"-dash" && : >' blank '`},
	}
	for _, s := range steps {
		h.sh(ws, s.cmd)
	}
	want := h.sh(ws, describe)
	p := h.publish(ws)
	if p.Commit != "L000001" || p.Parent != "L000000" || len(p.Merged) > 0 {
		t.Errorf("published %+v", p)
	}
	if got := h.changes(ws); got != "" {
		t.Errorf("after its publication the session differs in %s", got)
	}
	other := h.session()
	for _, s := range []string{ws, other} {
		if got := h.sh(s, describe); got != want {
			t.Errorf("session %s sees\n%s\nwant\n%s", s, got, want)
		}
	}
	if got := h.sh(other, "[ linked -ef linked2 ] && echo x >linked && cat linked2"); got != "x\n" {
		t.Errorf("a change through one link shows %q at the other", got)
	}
	if got := strings.Fields(h.sh(other, "stat -c '%b %s' sparse")); got[1] != "10485760" || len(got[0]) > 4 {
		t.Errorf("the sparse file has %v blocks and size", got)
	}
	p = must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
	if p.Status != "no_op" || p.Commit != "L000001" || p.Parent != "L000001" {
		t.Errorf("published again: %+v", p)
	}
	h.verifies()
}

// TestPublishTwice publishes what was changed after a publication, by the same
// and by new names.
func TestPublishTwice(t *testing.T) {
	h := open(t, map[string]string{"a": "1\n", "d/x": "x\n"})
	ws := h.session()
	h.sh(ws, "echo 2 >>a; mkdir e; echo y >e/y")
	h.publish(ws)
	h.sh(ws, "echo 3 >>a; mv e/y d/y; rmdir e; rm d/x")
	if p := h.publish(ws); p.Commit != "L000002" {
		t.Errorf("published %+v", p)
	}
	h.wantContent("", "a", "1\n2\n3\n")
	if got := h.ls("", ""); got != "a d" {
		t.Errorf("the head holds %s", got)
	}
	if got := h.ls("", "d"); got != "y" {
		t.Errorf("d holds %s", got)
	}
	old := must[catalog.FileReadResult](h, catalog.FileRead, &catalog.FileReadRequest{Path: "a", Commit: "L000001"})
	if old.Content != "1\n2\n" {
		t.Errorf("at the first commit: %q", old.Content)
	}
}

func TestMergeOneFile(t *testing.T) {
	h := open(t, map[string]string{"f": numbered(9)})
	one, two := h.session(), h.session()
	h.sh(one, `sed -i '2s/.*/by one/' f`)
	h.sh(two, `sed -i '8s/.*/by two/; $a more by two' f`)
	h.publish(one)
	p := h.publish(two)
	if !slices.Equal(p.Merged, texts("f")) || p.Commit != "L000002" || p.Parent != "L000001" {
		t.Errorf("published %+v", p)
	}
	want := "line 1\nby one\nline 3\nline 4\nline 5\nline 6\nline 7\nby two\nline 9\nmore by two\n"
	h.wantContent("", "f", want)
	if got := h.sh(two, "cat f"); got != want {
		t.Errorf("the session sees %q", got)
	}
	o := original
	owners := []string{o, by(one), o, o, o, o, o, by(two), o, by(two)}
	h.wantOwners("", "f", owners...)
	h.wantOwners(two, "f", owners...)
	h.wantContent(one, "f", strings.Replace(numbered(9), "line 2", "by one", 1))
	// A third on top of the merge keeps both.
	h.refresh(one)
	h.sh(one, `sed -i '1s/.*/first/' f`)
	h.publish(one)
	h.wantOwners("", "f", append([]string{by(one)}, owners[1:]...)...)
	h.verifies()
}

// TestMergeManySessions lets sessions change one file each at a line of its
// own, and files of their own, at once.
func TestMergeManySessions(t *testing.T) {
	const n = 8
	h := open(t, map[string]string{"shared": numbered(4 * n)})
	var list []string
	for range n {
		list = append(list, h.session())
	}
	done := make(chan error, n)
	for i, ws := range list {
		go func() {
			cmd := catalog.Text("sed -i '" + number(4*i+2) + "s/.*/by " + ws + "/' shared && echo " + ws + " >own" + number(i))
			_, err := try[any](h, catalog.ExecCommand, &catalog.ExecCommandRequest{WorkspaceSessionID: ws, Cmd: cmd})
			if err == nil {
				_, err = try[any](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
			}
			done <- err
		}()
	}
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	want := strings.Split(numbered(4*n), "\n")
	owners := slices.Repeat([]string{original}, 4*n)
	for i, ws := range list {
		want[4*i+1], owners[4*i+1] = "by "+ws, by(ws)
		h.wantContent("", "own"+number(i), ws+"\n")
	}
	h.wantContent("", "shared", strings.Join(want, "\n"))
	h.wantOwners("", "shared", owners...)
	if got := h.head(); got != "L00000"+number(n) {
		t.Errorf("the head is %s", got)
	}
	h.verifies()
}

func number(n int) string { b, _ := json.Marshal(n); return string(b) }

// TestConflict publishes against a head that contradicts in every way, and
// finds everything as it was.
func TestConflict(t *testing.T) {
	h := open(t, map[string]string{
		"text": "1\n2\n3\n", "bin": "\x00old", "edit-rm": "x\n", "rm-edit": "y\n", "kind": "k\n", "d/a": "a\n", "fine": "1\n2\n3\n4\n5\n",
	})
	one, two := h.session(), h.session()
	h.sh(one, `sed -i '2s/.*/head/' text; printf '\0head' >bin; echo head >edit-rm; rm rm-edit; echo head >added; rm kind; mkdir kind; ln -s head sym; rm -r d; sed -i '1s/.*/head/' fine`)
	h.publish(one)
	h.sh(two, `sed -i '2s/.*/session/' text; printf '\0session' >bin; rm edit-rm; echo session >rm-edit; echo session >added; echo session >kind; ln -s session sym; echo session >d/b; sed -i '5s/.*/session/' fine; echo own >own`)
	before, changes := h.sh(two, describe), h.changes(two)
	d := h.refused(two)
	if d.WorkspaceSessionID != two || d.Base != "L000000" || d.Head != "L000001" {
		t.Errorf("refused with %+v", d)
	}
	want := map[string]string{
		"text": "content", "bin": "binary", "edit-rm": "delete/modify", "rm-edit": "modify/delete", "added": "add/add", "kind": "kind", "d": "parent-gone",
	}
	seen := map[string]catalog.Conflict{}
	for _, c := range d.Conflicts {
		seen[string(c.Path)] = c
		if want[string(c.Path)] != "" && c.Kind != want[string(c.Path)] {
			t.Errorf("%s conflicts as %s, want %s", c.Path, c.Kind, want[string(c.Path)])
		}
		if c.Remedy == "" || c.HeadCommit != "L000001" || c.HeadOrigin == nil || c.HeadOrigin.Owner != by(one) {
			t.Errorf("%s conflicts with %+v, %+v", c.Path, c, c.HeadOrigin)
		}
	}
	for path := range want {
		if _, ok := seen[path]; !ok {
			t.Errorf("%s is not listed", path)
		}
	}
	if _, ok := seen["sym"]; !ok {
		t.Error("sym is not listed")
	}
	for _, path := range []string{"fine", "own"} {
		if _, ok := seen[path]; ok {
			t.Errorf("%s is listed", path)
		}
	}
	c := seen["text"]
	if c.Base == nil || c.Head == nil || c.Session == nil || c.Base.Hash == c.Head.Hash || c.Head.Hash == c.Session.Hash || c.Base.Hash == c.Session.Hash {
		t.Errorf("text has versions %+v, %+v, %+v", c.Base, c.Head, c.Session)
	}
	if len(c.Hunks) != 1 || c.Hunks[0].Head != (catalog.LineSpan{Start: 2, Count: 1}) {
		t.Errorf("text has hunks %+v", c.Hunks)
	}
	if c := seen["edit-rm"]; c.Session != nil || c.Head == nil || c.Base == nil {
		t.Errorf("edit-rm has versions %+v, %+v, %+v", c.Base, c.Head, c.Session)
	}
	if c := seen["rm-edit"]; c.Session == nil || c.Head != nil || c.Base == nil {
		t.Errorf("rm-edit has versions %+v, %+v, %+v", c.Base, c.Head, c.Session)
	}
	if c := seen["added"]; c.Session == nil || c.Head == nil || c.Base != nil {
		t.Errorf("added has versions %+v, %+v, %+v", c.Base, c.Head, c.Session)
	}
	if got := h.head(); got != "L000001" {
		t.Errorf("the head is %s", got)
	}
	if got := h.sh(two, describe); got != before {
		t.Errorf("the session sees\n%s\nwant\n%s", got, before)
	}
	if got := h.changes(two); got != changes {
		t.Errorf("the session differs in %s, want %s", got, changes)
	}
	// It is refused again in the same words, and lives on.
	if again := h.refused(two); len(again.Conflicts) != len(d.Conflicts) {
		t.Errorf("refused with %d conflicts, then with %d", len(d.Conflicts), len(again.Conflicts))
	}
	h.sh(two, "echo on >>own")
}

func TestExpectHead(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n"})
	one, two := h.session(), h.session()
	h.sh(one, "echo x >a")
	h.publish(one)
	h.sh(two, "echo x >b")
	req := &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: two, ExpectHead: "L000000"}
	e := fails(h, catalog.PreconditionFailed, catalog.PublishWorkspaceSession, req)
	if !strings.Contains(e.Message, "L000001") {
		t.Errorf("refused with %q", e.Message)
	}
	if h.head() != "L000001" || h.changes(two) != "added:b" {
		t.Errorf("the head is %s, the session differs in %s", h.head(), h.changes(two))
	}
	fails(h, catalog.InvalidRequest, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: two, ExpectHead: "24"})
	req.ExpectHead = "L000001"
	if p := must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, req); p.Commit != "L000002" {
		t.Errorf("published %+v", p)
	}
}

func TestPublishClose(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n"})
	one, two := h.session(), h.session()
	h.sh(one, "echo 2 >>f")
	h.sh(two, "echo 3 >>f")
	p := must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: one, Close: true, Message: "two"})
	if !p.Closed || p.Commit != "L000001" {
		t.Errorf("published %+v", p)
	}
	fails(h, catalog.NotFound, catalog.ExecCommand, &catalog.ExecCommandRequest{WorkspaceSessionID: one, Cmd: "true"})
	if got := must[catalog.LayerStackResult](h, catalog.LayerStack, nil).Layers[0]; got.Message != "two" || got.Session != one {
		t.Errorf("the layer is %+v", got)
	}
	// A refused one stays open, whatever was asked for.
	fails(h, catalog.Conflicted, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: two, Close: true})
	h.sh(two, "cat f")
}

// TestTimeOnly touches a file: that stays private, and nothing is published.
func TestTimeOnly(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n", "g": "1\n"})
	ws := h.session()
	h.sh(ws, "touch -d @1000000000 f")
	p := must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
	if p.Status != "no_op" || p.Commit != "L000000" || p.Counts["time_only"] != 1 {
		t.Errorf("published %+v", p)
	}
	h.sh(ws, "echo 2 >>g")
	if p := h.publish(ws); p.Counts["time_only"] != 1 || p.Counts["modified"] != 1 {
		t.Errorf("published %+v", p)
	}
	if got := h.sh(ws, "stat -c %Y f"); got != "1000000000\n" {
		t.Errorf("the session's own time is %s", got)
	}
	if got := h.sh(h.session(), "stat -c %Y f"); got == "1000000000\n" {
		t.Error("the time was published")
	}
	other := h.session()
	h.sh(other, "echo other >>f")
	h.publish(other)
	if r := h.refresh(ws); len(r.Conflicts) > 0 || h.read(ws, "f") != "1\nother\n" {
		t.Errorf("refreshed to %+v, f is %q", r, h.read(ws, "f"))
	}
}

// TestConverged changes the same on both sides.
func TestConverged(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n", "bin": "\x001", "gone": "x"})
	one, two := h.session(), h.session()
	for _, ws := range []string{one, two} {
		h.sh(ws, `echo 2 >f; printf '\0002' >bin; rm gone; echo n >new`)
	}
	h.publish(one)
	p := must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: two})
	if p.Status != "no_op" || p.Commit != "L000001" {
		t.Errorf("published %+v", p)
	}
	h.wantOwners("", "f", by(one))
	h.wantOwners(two, "f", by(one))
	if got := h.changes(two); got != "" {
		t.Errorf("the session differs in %s", got)
	}
}
