package daemon_test

import (
	"slices"
	"strings"
	"testing"

	"ephemeral-sandbox/daemon/catalog"
)

func TestRefresh(t *testing.T) {
	h := open(t, map[string]string{
		"moved": "m\n", "merged": numbered(9), "clash": "1\n2\n3\n", "bin": "\x00old", "gone": "g\n", "d/a": "a\n", "same": "s\n", "theirs": "t\n",
	})
	one, two := h.session(), h.session()
	h.sh(one, `echo new >moved; sed -i '2s/.*/head/' merged; sed -i '2s/.*/head/' clash; printf '\0head' >bin; rm gone; echo n >d/new; echo x >theirs; chmod 700 same; mv d e`)
	h.publish(one)
	// Everything is in the kernel's cache when the head moves.
	h.sh(two, `cat moved merged clash bin gone d/a same theirs >/dev/null; ls . d >/dev/null; [ ! -e e ]; sed -i '8s/.*/session/' merged; sed -i '2s/.*/session/' clash; printf '\0session' >bin; echo own >own`)
	r := h.refresh(two)
	if r.Base != "L000001" || r.PreviousBase != "L000000" {
		t.Errorf("refreshed from %s to %s", r.PreviousBase, r.Base)
	}
	if !slices.Equal(r.Merged, texts("merged")) {
		t.Errorf("merged %q", r.Merged)
	}
	for _, p := range texts("moved", "gone", "theirs", "d", "e") {
		if !slices.Contains(r.Moved, p) {
			t.Errorf("%s is not among what moved: %q", p, r.Moved)
		}
	}
	for _, p := range texts("own", "clash", "bin", "merged") {
		if slices.Contains(r.Moved, p) {
			t.Errorf("%s is among what moved: %q", p, r.Moved)
		}
	}
	kinds := map[string]string{}
	for _, c := range r.Conflicts {
		kinds[string(c.Path)] = c.Kind
	}
	if len(kinds) != 2 || kinds["clash"] != "content" || kinds["bin"] != "binary" {
		t.Errorf("conflicts %+v", kinds)
	}
	if got := h.sh(two, `cat moved theirs; ls; ls e; stat -c %a same`); got != "new\nx\nbin\nbin.head-L000001\nclash\ne\nmerged\nmoved\nown\nsame\ntheirs\na\nnew\n700\n" {
		t.Errorf("the session sees %q", got)
	}
	h.wantContent(two, "merged", strings.NewReplacer("line 2", "head", "line 8", "session").Replace(numbered(9)))
	if got, head := h.read(two, "bin"), h.read(two, "bin.head-L000001"); got != "\x00session" || head != "\x00head" {
		t.Errorf("bin is %q, beside it is %q", got, head)
	}
	marked := h.sh(two, "cat clash")
	want := "1\n<<<<<<< head L000001\nhead\n||||||| base L000000\n2\n=======\nsession\n>>>>>>> session " + two + "\n3\n"
	alt := "1\n<<<<<<< session " + two + "\nsession\n||||||| base L000000\n2\n=======\nhead\n>>>>>>> head L000001\n3\n"
	if marked != want && marked != alt {
		t.Errorf("clash reads\n%s", marked)
	}
	for _, o := range h.owners(two, "merged") {
		if o != original && o != by(one) && o != by(two) {
			t.Errorf("merged has an owner %s", o)
		}
	}
	// A second refresh has nothing to do.
	if again := h.refresh(two); len(again.Moved)+len(again.Merged)+len(again.Conflicts) > 0 || again.Base != "L000001" || again.PreviousBase != "L000001" {
		t.Errorf("refreshed again: %+v", again)
	}
	h.sh(two, `printf '1\nboth\n3\n' >clash; rm bin.head-L000001`)
	p := h.publish(two)
	if p.Parent != "L000001" || len(p.Merged) > 0 {
		t.Errorf("published %+v", p)
	}
	if got := h.ls("", ""); got != "bin clash e merged moved own same theirs" {
		t.Errorf("the head holds %s", got)
	}
	h.wantContent("", "bin", "\x00session")
	h.wantOwners("", "clash", original, by(two), original)
	h.wantOwners("", "merged", original, by(one), original, original, original, original, original, by(two), original)
	h.wantOwners("", "moved", by(one))
	h.verifies()
}

// TestRefreshNothingPrivate moves a session that has changed nothing.
func TestRefreshNothingPrivate(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n", "d/x": "x\n"})
	one, two := h.session(), h.session()
	h.sh(two, "cat f d/x; ls d; [ ! -e d/y ]")
	for i := range 3 {
		h.sh(one, "echo "+number(i)+" >>f; echo y >d/y; rm -f d/x")
		h.publish(one)
		h.refresh(two)
		if got, want := h.sh(two, describe), h.sh(one, describe); got != want {
			t.Fatalf("the session sees\n%s\nwant\n%s", got, want)
		}
	}
	if got := h.changes(two); got != "" {
		t.Errorf("the session differs in %s", got)
	}
}

// TestRefreshKeepsDirectories refreshes under a working directory and under
// names that were made private.
func TestRefreshKeepsDirectories(t *testing.T) {
	h := open(t, map[string]string{"d/a": "1\n", "d/sub/b": "1\n"})
	one, two := h.session(), h.session()
	run := h.background(two, `cd d/sub && echo in >private`)
	run.ends()
	h.sh(one, "echo h >d/sub/head")
	h.publish(one)
	h.refresh(two)
	if got := h.sh(two, "cd d/sub && ls && cat private head"); got != "b\nhead\nprivate\nin\nh\n" {
		t.Errorf("the session sees %q", got)
	}
}

// TestRenamesFollowed changes in one session what another renames.
func TestRenamesFollowed(t *testing.T) {
	h := open(t, map[string]string{"a": numbered(5), "b": numbered(5), "d/f": numbered(5)})
	one, two := h.session(), h.session()
	h.sh(one, `sed -i '1s/.*/head/' a; mv b b2; mv d e`)
	h.publish(one)
	h.sh(two, `mv a a2; printf two >>b; sed -i '5s/.*/session/' d/f`)
	h.publish(two)
	if got := h.ls("", "") + "/" + h.ls("", "e"); got != "a2 b2 e/f" {
		t.Errorf("the head holds %s", got)
	}
	h.wantContent("", "a2", strings.Replace(numbered(5), "line 1", "head", 1))
	h.wantContent("", "b2", numbered(5)+"two")
	h.wantContent("", "e/f", strings.Replace(numbered(5), "line 5", "session", 1))
	h.wantOwners("", "a2", by(one), original, original, original, original)
	h.wantOwners("", "b2", original, original, original, original, original, by(two))
	if got, want := h.sh(two, describe), h.sh(h.session(), describe); got != want {
		t.Errorf("the session sees\n%s\nwant\n%s", got, want)
	}
}

// TestOpenFiles publishes and refreshes while a command writes and reads: its
// descriptors go on working, and nothing that it writes is lost.
func TestOpenFiles(t *testing.T) {
	h := open(t, map[string]string{"log": "0\n", "read": "first\nsecond\n", "gone": "kept\n"})
	one, two := h.session(), h.session()
	// The command takes its steps from a fifo in the session.
	h.sh(two, "mkfifo steps")
	run := h.background(two, `exec 3>>log 4<read 5<gone 6>fresh; read a <&4; echo 1 >&3; echo f1 >&6; echo "$a"
while :; do read step <steps || continue; echo "$step" >&3; echo "f$step" >&6; echo "did $step"; [ "$step" != end ] || break; done
cat <&4; cat <&5`)
	run.says("first\n")
	step := func(s string) {
		t.Helper()
		h.sh(two, "echo "+s+" >steps")
		run.says("did " + s + "\n")
	}
	p := h.publish(two)
	h.wantContent("", "log", "0\n1\n")
	h.wantContent("", "fresh", "f1\n")
	step("2")
	h.wantContent(two, "log", "0\n1\n2\n")
	if got := h.sh(two, "cat log fresh"); got != "0\n1\n2\nf1\nf2\n" {
		t.Errorf("another command reads %q", got)
	}
	h.sh(one, "echo changed >new; mv new read; rm gone; echo h >other")
	h.publish(one)
	if r := h.refresh(two); len(r.Conflicts) > 0 {
		t.Errorf("refreshed: %+v", r)
	}
	step("3")
	q := h.publish(two)
	if p.Commit != "L000001" || q.Commit != "L000003" {
		t.Errorf("published %s and %s", p.Commit, q.Commit)
	}
	h.wantContent("", "log", "0\n1\n2\n3\n")
	h.wantContent("", "fresh", "f1\nf2\nf3\n")
	if got := h.sh(two, "cat read; ls"); got != "changed\nfresh\nlog\nother\nread\nsteps\n" {
		t.Errorf("the session sees %q", got)
	}
	h.sh(two, "echo end >steps")
	run.says("did end\nsecond\nkept\n")
	if res := run.ends(); *res.ExitCode != 0 {
		t.Errorf("the command ended with %d", *res.ExitCode)
	}
	h.publish(two)
	h.wantContent("", "log", "0\n1\n2\n3\nend\n")
	h.wantContent("", "fresh", "f1\nf2\nf3\nfend\n")
	h.verifies()
}

// TestPublishUnderWriter publishes again and again while a command appends: what
// is published are prefixes, and in the end it is everything.
func TestPublishUnderWriter(t *testing.T) {
	h := open(t, map[string]string{"log": ""})
	ws := h.session()
	run := h.background(ws, "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done >>log; echo done")
	full := func() string {
		var b strings.Builder
		for i := range 3000 {
			b.WriteString(number(i) + "\n")
		}
		return b.String()
	}()
	for range 10 {
		must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
		if got := h.read("", "log"); !strings.HasPrefix(full, got) {
			t.Fatalf("%d bytes were published that were not written", len(got))
		}
	}
	run.says("done\n")
	run.ends()
	must[catalog.PublishWorkspaceSessionResult](h, catalog.PublishWorkspaceSession, &catalog.PublishWorkspaceSessionRequest{WorkspaceSessionID: ws})
	h.wantContent("", "log", full)
	h.wantContent(ws, "log", full)
	if got := h.owners("", "log"); slices.ContainsFunc(got, func(o string) bool { return o != by(ws) }) || len(got) != 3000 {
		t.Errorf("%d lines with owners %q", len(got), slices.Compact(got))
	}
}

// TestRefreshUnderWriter moves a session while its command appends to a file
// that the head changes too.
func TestRefreshUnderWriter(t *testing.T) {
	h := open(t, map[string]string{"log": "top\n2\n3\n4\n5\n"})
	one, two := h.session(), h.session()
	h.sh(two, "mkfifo steps; exec 3>>log; echo a >&3")
	run := h.background(two, `exec 3>>log; echo ready; while :; do read step <steps || continue; echo "$step" >&3; echo "did $step"; done`)
	run.says("ready\n")
	h.sh(one, "sed -i 1s/top/head/ log")
	h.publish(one)
	if r := h.refresh(two); !slices.Equal(r.Merged, texts("log")) {
		t.Errorf("refreshed: %+v", r)
	}
	h.wantContent(two, "log", "head\n2\n3\n4\n5\na\n")
	if got := h.sh(two, "cat log; echo b >>log; cat log"); got != "head\n2\n3\n4\n5\na\nhead\n2\n3\n4\n5\na\nb\n" {
		t.Errorf("the session reads %q", got)
	}
	h.destroy(two)
}
