package daemon_test

import (
	"strings"
	"testing"

	"ephemeral-sandbox/daemon/catalog"
)

// TestFilesSeenInside changes files by operations under a command that has
// everything in its caches: content, an absent name, a listing, an open file.
func TestFilesSeenInside(t *testing.T) {
	h := open(t, map[string]string{"f": "one\n", "d/a": "a\n", "linked": "l\n", "grow": "1\n"})
	ws := h.session()
	h.sh(ws, "mkfifo steps; ln linked linked2")
	run := h.background(ws, `exec 4<f 5<linked2
look() { cat f; ls d; [ -e d/new ] && echo there || echo absent; cat deep/er/x 2>/dev/null || echo no; cat linked2 grow; stat -c %s f; }
look; look >/dev/null; echo ready; while :; do read step <steps || continue; look; done; cat <&4; cat <&5`)
	run.says("one\na\nabsent\nno\nl\n1\n4\nready\n")
	if w := h.write(ws, "f", "two two\n"); w.Type != "update" || w.Commit != "" {
		t.Errorf("written: %+v", w)
	}
	if w := h.write(ws, "d/new", "n\n"); w.Type != "create" {
		t.Errorf("written: %+v", w)
	}
	h.write(ws, "deep/er/x", "deep\n")
	if e := h.edit(ws, "linked", "l", "L"); e.Replacements != 1 {
		t.Errorf("edited: %+v", e)
	}
	h.edit(ws, "grow", "1", "1\n2\n3")
	h.sh(ws, "echo go >steps")
	run.says("two two\na\nnew\nthere\ndeep\nL\n1\n2\n3\n8\n")
	h.write(ws, "f", "three\n")
	h.sh(ws, "echo go >steps")
	run.says("three\na\nnew\nthere\ndeep\nL\n1\n2\n3\n6\n")
	h.write(ws, "d/new", "")
	h.sh(ws, "[ -e d/new ] && [ ! -s d/new ] && [ linked -ef linked2 ] && [ $(stat -c %h linked) = 2 ]")
	h.destroy(ws)
}

// TestCommandsSeenByFiles reads by operations what commands write.
func TestCommandsSeenByFiles(t *testing.T) {
	h := open(t, map[string]string{"f": "one\n", "d/a": "a\n"})
	ws := h.session()
	h.wantContent(ws, "f", "one\n")
	fails(h, catalog.NotFound, catalog.FileRead, &catalog.FileReadRequest{WorkspaceSessionID: ws, Path: "d/new"})
	h.sh(ws, "mkfifo steps")
	run := h.background(ws, `exec 3>>f; echo two >&3; echo n >d/new; rm d/a; echo done; until read x <steps; do :; done; echo three >&3; echo done; until read x <steps; do :; done`)
	run.says("done\n")
	h.wantContent(ws, "f", "one\ntwo\n")
	h.wantContent(ws, "d/new", "n\n")
	h.wantContent("", "f", "one\n")
	if got := h.ls(ws, "d"); got != "new" {
		t.Errorf("d holds %s", got)
	}
	h.edit(ws, "d/new", "n", "edited")
	h.sh(ws, "echo x >steps")
	run.says("done\n")
	h.wantContent(ws, "f", "one\ntwo\nthree\n")
	h.wantOwners(ws, "f", original, by(ws), by(ws))
	if got := h.changes(ws); got != "removed:d/a added:d/new modified:f added:steps" {
		t.Errorf("the session differs in %s", got)
	}
	h.destroy(ws)
}

// TestAbsolutePaths takes paths as a program inside would write them.
func TestAbsolutePaths(t *testing.T) {
	h := open(t, map[string]string{"d/f": "x\n"})
	ws := h.session()
	h.write(ws, h.root+"/d/g", "g\n")
	if got := h.ls(ws, h.root+"/d"); got != "f g" {
		t.Errorf("d holds %s", got)
	}
	h.wantContent(ws, h.root+"/d/g", "g\n")
	for path, kind := range map[string]catalog.Kind{
		"/etc/passwd":            catalog.InvalidRequest,
		h.root + "x/f":           catalog.InvalidRequest,
		"../f":                   catalog.InvalidRequest,
		"d/../f":                 catalog.InvalidRequest,
		"none":                   catalog.NotFound,
		"d/f/x":                  catalog.InvalidRequest,
		"d":                      catalog.InvalidRequest,
		"":                       catalog.InvalidRequest,
		"link/f":                 catalog.InvalidRequest,
		strings.Repeat("n", 300): catalog.InvalidRequest,
	} {
		if path == "link/f" {
			h.sh(ws, "ln -s d link")
		}
		e := fails(h, kind, catalog.FileRead, &catalog.FileReadRequest{WorkspaceSessionID: ws, Path: catalog.Text(path)})
		if strings.Contains(e.Message, "\n") || path != "" && !strings.Contains(e.Message, path) {
			t.Errorf("%q is refused with %q", path, e.Message)
		}
	}
	for _, path := range []string{"", "d", "../x", "d/f/x", "link/f", strings.Repeat("n", 300), "/etc/x", "a//b/./c/.."} {
		fails(h, catalog.InvalidRequest, catalog.FileWrite, &catalog.FileWriteRequest{WorkspaceSessionID: ws, Path: catalog.Text(path), Content: text("x")})
	}
	if got := h.changes(ws); got != "added:d/g added:link" {
		t.Errorf("the session differs in %s", got)
	}
}

// TestSessionless publishes single operations, each as a commit of its own.
func TestSessionless(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n2\n3\n", "run": "#!/bin/sh\n"})
	h.sh(h.session(), "true")
	w, err := tryAs[catalog.FileWriteResult](h, "req-write", catalog.FileWrite, &catalog.FileWriteRequest{Path: "new/x", Content: text("a\nb\n"), Message: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if w.Type != "create" || w.Status != "committed" || w.Commit != "L000001" || w.Parent != "L000000" || w.Operation != "req-write" || w.BytesWritten != 4 {
		t.Errorf("written: %+v", w)
	}
	h.wantOwners("", "new/x", "operation:req-write", "operation:req-write")
	e, err := tryAs[catalog.FileEditResult](h, "req-edit", catalog.FileEdit, &catalog.FileEditRequest{Path: "new/x", Edits: []catalog.Edit{{OldString: "b", NewString: "B\nc"}, {OldString: "c", NewString: "C"}}})
	if err != nil {
		t.Fatal(err)
	}
	if e.EditsApplied != 2 || e.Replacements != 2 || e.Commit != "L000002" || e.Operation != "req-edit" {
		t.Errorf("edited: %+v", e)
	}
	h.wantContent("", "new/x", "a\nB\nC\n")
	h.wantOwners("", "new/x", "operation:req-write", "operation:req-edit", "operation:req-edit")
	r := must[catalog.FileBlameResult](h, catalog.FileBlame, &catalog.FileBlameRequest{Path: "new/x"}).Ranges
	if r[0].Commit != "L000001" || r[1].Commit != "L000002" || r[1].Operation != "req-edit" || r[1].Session != "" || r[1].Time == nil {
		t.Errorf("blame %+v", r)
	}
	layer := must[catalog.LayerStackResult](h, catalog.LayerStack, nil).Layers[1]
	if layer.RequestID != "req-write" || layer.Session != "" || layer.Message != "x" {
		t.Errorf("the layer is %+v", layer)
	}
	for name, edits := range map[string][]catalog.Edit{
		"absent":    {{OldString: "zzz", NewString: "y"}},
		"ambiguous": {{OldString: "\n", NewString: "y"}},
		"second":    {{OldString: "a", NewString: "y"}, {OldString: "a", NewString: "z"}},
	} {
		if e := fails(h, catalog.PreconditionFailed, catalog.FileEdit, &catalog.FileEditRequest{Path: "new/x", Edits: edits}); !strings.Contains(e.Message, "new/x") {
			t.Errorf("%s: %q", name, e.Message)
		}
	}
	if h.head() != "L000002" {
		t.Errorf("the head is %s", h.head())
	}
	all := must[catalog.FileEditResult](h, catalog.FileEdit, &catalog.FileEditRequest{Path: "new/x", Edits: []catalog.Edit{{OldString: "\n", NewString: ";", ReplaceAll: true}}})
	if all.Replacements != 3 || h.read("", "new/x") != "a;B;C;" {
		t.Errorf("edited: %+v, %q", all, h.read("", "new/x"))
	}
	snap := must[catalog.SnapshotResult](h, catalog.Snapshot, nil).Sandboxes[0]
	if snap.Leases != 1 {
		t.Errorf("%d leases are held for one session", snap.Leases)
	}
}

// TestSessionlessMerges writes against a head that moves at the same time.
func TestSessionlessMerges(t *testing.T) {
	h := open(t, map[string]string{"f": numbered(40)})
	done := make(chan error)
	const n = 8
	for i := range n {
		go func() {
			_, err := try[catalog.FileEditResult](h, catalog.FileEdit, &catalog.FileEditRequest{Path: "f", Edits: []catalog.Edit{{
				OldString: catalog.Text("line " + number(5*i+1) + "\n"), NewString: catalog.Text("by " + number(i) + "\n"),
			}}})
			done <- err
		}()
	}
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	got := h.read("", "f")
	for i := range n {
		if !strings.Contains(got, "by "+number(i)+"\n") {
			t.Errorf("edit %d is lost", i)
		}
	}
	if got := h.head(); got != "L000008" {
		t.Errorf("the head is %s", got)
	}
}

func TestReadWindows(t *testing.T) {
	h := open(t, map[string]string{"f": "a\nb\nc", "empty": "", "bin": "\xff\x00"})
	cases := []struct {
		req       catalog.FileReadRequest
		want      string
		lines     int64
		truncated bool
	}{
		{catalog.FileReadRequest{}, "a\nb\nc", 3, false},
		{catalog.FileReadRequest{StartLine: 2}, "b\nc", 2, false},
		{catalog.FileReadRequest{StartLine: 2, LineCount: 1}, "b\n", 1, true},
		{catalog.FileReadRequest{LineCount: 3}, "a\nb\nc", 3, false},
		{catalog.FileReadRequest{StartLine: 4}, "", 0, false},
		{catalog.FileReadRequest{MaxBytes: 3}, "a\nb", 2, true},
	}
	for _, c := range cases {
		c.req.Path = "f"
		got := must[catalog.FileReadResult](h, catalog.FileRead, &c.req)
		if string(got.Content) != c.want || got.LineCount != c.lines || got.Truncated != c.truncated || got.TotalLines != 3 || got.Size != 5 || got.Commit != "L000000" {
			t.Errorf("%+v: %+v", c.req, got)
		}
	}
	if got := must[catalog.FileReadResult](h, catalog.FileRead, &catalog.FileReadRequest{Path: "empty"}); got.TotalLines != 0 || got.Truncated || got.Content != "" {
		t.Errorf("the empty file: %+v", got)
	}
	if got := h.read("", "bin"); got != "\xff\x00" {
		t.Errorf("bin is %q", got)
	}
	// A window that repeats at the end of the file is still cut off.
	h.write("", "twice", "x\nx\n")
	if got := must[catalog.FileReadResult](h, catalog.FileRead, &catalog.FileReadRequest{Path: "twice", LineCount: 1}); !got.Truncated {
		t.Errorf("the first of two equal lines: %+v", got)
	}
}

func TestListPages(t *testing.T) {
	files := map[string]string{}
	for i := range 25 {
		files["d/f"+number(100+i)] = ""
	}
	h := open(t, files)
	ws := h.session()
	h.sh(ws, "echo x >d/f1135; rm d/f110; ln -s f100 d/link")
	for _, ws := range []string{"", ws} {
		want := strings.Fields(h.ls(ws, "d"))
		var got []string
		for after := ""; ; {
			page := must[catalog.FileListResult](h, catalog.FileList, &catalog.FileListRequest{WorkspaceSessionID: ws, Path: "d", After: catalog.Text(after), Limit: 7})
			for _, e := range page.Entries {
				got = append(got, string(e.Name))
			}
			if !page.Truncated {
				break
			}
			after = got[len(got)-1]
		}
		if strings.Join(got, " ") != strings.Join(want, " ") || len(got) < 25 {
			t.Errorf("pages give\n%q, want\n%q", got, want)
		}
	}
}

// TestDiff describes each kind of change.
func TestDiff(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n2\n3\n", "gone": "g\n", "old": "o\n", "mode": "m\n", "bin": "\x00", "d/x": "x\n"})
	ws := h.session()
	h.sh(ws, `sed -i s/2/two/ f; rm gone; mv old new; chmod 700 mode; printf '\0001' >bin; echo a >added; ln -s f sym; mv d e`)
	if got, want := h.changes(ws), "added:added modified:bin renamed:e<d modified:f removed:gone metadata:mode renamed:new<old added:sym"; got != want {
		t.Errorf("differs in\n%s, want\n%s", got, want)
	}
	res := must[catalog.DiffWorkspaceSessionResult](h, catalog.DiffWorkspaceSession, &catalog.DiffWorkspaceSessionRequest{WorkspaceSessionID: ws, Path: "f", Context: 1})
	if len(res.Changes) != 1 || res.Base != "L000000" {
		t.Fatalf("%+v", res)
	}
	c := res.Changes[0]
	if c.Diff != "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n" || c.LinesAdded != 1 || c.LinesGone != 1 || c.Binary {
		t.Errorf("%+v", c)
	}
	stat := must[catalog.DiffWorkspaceSessionResult](h, catalog.DiffWorkspaceSession, &catalog.DiffWorkspaceSessionRequest{WorkspaceSessionID: ws, Stat: true})
	for _, c := range stat.Changes {
		if c.Diff != "" || c.Path == "bin" && !c.Binary || c.Path == "f" && c.LinesAdded != 1 {
			t.Errorf("%+v", c)
		}
	}
	if h.head() != "L000000" {
		t.Error("a diff published")
	}
}

// TestEqualContent puts a file in the place of an equal one: nothing changed.
func TestEqualContent(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n", "d/g": "2\n"})
	if w := h.write("", "f", "1\n"); w.Status != "no_op" || w.Commit != "L000000" {
		t.Errorf("an operation: %+v", w)
	}
	ws := h.session()
	for name, cmd := range map[string]string{
		"rewritten in place": "echo 1 >f",
		"renamed over":       "cp -p f new && mv new f",
		"made anew":          "rm d/g && echo 2 >d/g",
		"undone":             "echo x >>f && echo 1 >f && touch x && rm x",
	} {
		h.sh(ws, cmd)
		if p := must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws}); p.Status != "no_op" {
			t.Errorf("%s: %+v", name, p)
		}
	}
	h.wantOwners("", "f", original)
}
