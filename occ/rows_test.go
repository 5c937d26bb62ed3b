package occ_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ"
	"ephemeral-sandbox/occ/merge"
)

// row is a case of the truth table: what head and session do to one base, and
// what comes of it.
type row struct {
	name          string
	base          func(w *world)
	head, session func(w *world)
	// want holds paths of the merged tree and parts of what they show; "" means
	// absent. It is not asked when there are conflicts.
	want map[string]string
	// conflicts as "kind path", sorted by path.
	conflicts []string
	merged    []string
	converged []string
	timeOnly  int
	// refreshed is want for the session after a refresh.
	refreshed map[string]string
}

func standard(w *world) {
	w.create("a", "1\n2\n3\n4\n5\n")
	w.create("bin", "x\x00y")
	w.mkdir("d")
	w.create("d/f", "f\n")
	w.mkdir("d/e")
	w.create("d/e/g", "g\n")
	w.symlink("l", "a")
	w.create("h1", "one\ntwo\nthree\n")
	w.link("h1", "h2")
	w.mkdir("m")
	w.mkdir("n")
	w.setxattr("a", "user.k", "v")
	w.setxattr("a", "user.z", "z")
}

func nothing(*world) {}

var rows = []row{
	{
		name: "1 not in the delta", session: nothing,
		head: func(w *world) { w.write("a", "X\n"); w.remove("bin"); w.rename("d", "m/d") },
		want: map[string]string{"a": "X", "bin": "", "m/d/f": "f"},
	},
	{
		name: "2 only the session changed", head: nothing,
		session: func(w *world) {
			w.write("a", "X\n")
			w.remove("bin")
			w.create("new", "n")
			w.mkdir("nd")
			w.create("nd/x", "x")
		},
		want: map[string]string{"a": "X", "bin": "", "new": "n", "nd/x": "x"},
	},
	{
		name: "3 converged in place, also binaries",
		head: func(w *world) {
			w.write("bin", "\x00new")
			w.write("a", "same\n")
			w.remove("l")
			w.symlink("l", "q")
		},
		session: func(w *world) {
			w.write("bin", "\x00new")
			w.write("a", "same\n")
			w.remove("l")
			w.symlink("l", "q")
		},
		want:      map[string]string{"bin": "new", "a": "same", "l": "q"},
		converged: []string{"a", "bin", "l"},
	},
	{
		name:    "3 both deleted",
		head:    func(w *world) { w.remove("a"); w.remove("d") },
		session: func(w *world) { w.remove("a"); w.remove("d") },
		want:    map[string]string{"a": "", "d": ""}, converged: []string{"a", "d"},
	},
	{
		name:    "3 both created the same",
		head:    func(w *world) { w.create("new", "x\x00"); w.symlink("nl", "t") },
		session: func(w *world) { w.create("new", "x\x00"); w.symlink("nl", "t") },
		want:    map[string]string{"new": "x", "nl": "t"}, converged: []string{"new", "nl"},
	},
	{
		name: "3 both saved the same", head: func(w *world) { w.save("bin", "\x00n") }, session: func(w *world) { w.save("bin", "\x00n") },
		want: map[string]string{"bin": "n"}, converged: []string{"bin"},
	},
	{
		name: "4 text merges", head: func(w *world) { w.write("a", "H\n2\n3\n4\n5\n") }, session: func(w *world) { w.write("a", "1\n2\n3\n4\nS\n") },
		want: map[string]string{"a": `"H\n2\n3\n4\nS\n"`}, merged: []string{"a"},
		refreshed: map[string]string{"a": `"H\n2\n3\n4\nS\n"`},
	},
	{
		name: "4 text conflicts", head: func(w *world) { w.write("a", "1\nH\n3\n4\n5\n") }, session: func(w *world) { w.write("a", "1\nS\n3\n4\n5\n") },
		conflicts: []string{"content a"},
		refreshed: map[string]string{"a": `"1\n<<<<<<< sess\nS\n||||||| base\n2\n=======\nH\n>>>>>>> head\n3\n4\n5\n"`},
	},
	{
		name: "4 either side saves by rename", head: func(w *world) { w.save("a", "H\n2\n3\n4\n5\n") }, session: func(w *world) { w.write("a", "1\n2\n3\n4\nS\n") },
		want: map[string]string{"a": `"H\n2\n3\n4\nS\n"`}, merged: []string{"a"},
	},
	{
		name: "4 the session saves by rename", head: func(w *world) { w.write("a", "H\n2\n3\n4\n5\n") }, session: func(w *world) { w.save("a", "1\n2\n3\n4\nS\n") },
		want: map[string]string{"a": `"H\n2\n3\n4\nS\n"`, "a.tmp": ""}, merged: []string{"a"},
	},
	{
		name: "4 both save by rename", head: func(w *world) { w.save("a", "H\n2\n3\n4\n5\n") }, session: func(w *world) { w.save("a", "1\n2\n3\n4\nS\n") },
		want: map[string]string{"a": `"H\n2\n3\n4\nS\n"`}, merged: []string{"a"},
		refreshed: map[string]string{"a": `"H\n2\n3\n4\nS\n"`},
	},
	{
		name: "4 saved with a backup kept", head: func(w *world) { w.write("a", "H\n2\n3\n4\n5\n") },
		session: func(w *world) { w.rename("a", "a.bak"); w.create("a", "1\n2\n3\n4\nS\n") },
		want:    map[string]string{"a": `"H\n2\n3\n4\nS\n"`, "a.bak": `"H\n2\n3\n4\n5\n"`}, merged: []string{"a"},
	},
	{
		name: "4 delete and create again", head: func(w *world) { w.write("a", "H\n2\n3\n4\n5\n") },
		session: func(w *world) { w.remove("a"); w.create("a", "1\n2\n3\n4\nS\n") },
		want:    map[string]string{"a": `"H\n2\n3\n4\nS\n"`}, merged: []string{"a"},
	},
	{
		name: "5 content here, bits there", head: func(w *world) { w.write("bin", "\x00H"); w.chmod("a", 0o755) },
		session: func(w *world) { w.chmod("bin", 0o600); w.write("a", "S\n") },
		want:    map[string]string{"bin": `600 "\x00H"`, "a": `755 "S\n"`},
	},
	{
		name: "6 bits one by one, attributes key by key",
		head: func(w *world) { w.chmod("a", 0o755); w.setxattr("a", "user.k", "H"); w.setxattr("a", "user.n", "n") },
		session: func(w *world) {
			w.chmod("a", 0o600)
			w.setxattr("a", "user.z", "")
			w.setxattr("a", "user.n", "n")
		},
		want: map[string]string{"a": "711"},
	},
	{
		name: "6 one attribute, two values", head: func(w *world) { w.setxattr("a", "user.k", "H") }, session: func(w *world) { w.setxattr("a", "user.k", "S") },
		conflicts: []string{"xattr a"},
	},
	{
		name: "6 two owners", head: func(w *world) { w.change("a", func(n *node) { n.UID = 5 }) }, session: func(w *world) { w.change("a", func(n *node) { n.UID, n.GID = 6, 7 }) },
		conflicts: []string{"owner a"},
	},
	{
		name: "7 binary", head: func(w *world) { w.write("bin", "\x00H") }, session: func(w *world) { w.write("bin", "\x00S") },
		conflicts: []string{"binary bin"},
		refreshed: map[string]string{"bin": `"\x00S"`, "bin.head-L000001": `"\x00H"`},
	},
	{
		name: "7 binary saved by rename", head: func(w *world) { w.save("bin", "\x00H") }, session: func(w *world) { w.write("bin", "\x00S") },
		conflicts: []string{"binary bin"},
		refreshed: map[string]string{"bin": `"\x00S"`, "bin.head-L000001": `"\x00H"`},
	},
	{
		name: "8 the head deleted", head: func(w *world) { w.remove("a") }, session: func(w *world) { w.write("a", "S\n") },
		conflicts: []string{"modify/delete a"}, refreshed: map[string]string{"a": "S", "a.head-L000001": ""},
	},
	{
		name: "8 the head deleted, the session saved", head: func(w *world) { w.remove("a") }, session: func(w *world) { w.save("a", "S\n") },
		conflicts: []string{"modify/delete a"}, refreshed: map[string]string{"a": "S"},
	},
	{
		name: "8 the head deleted, the session moved", head: func(w *world) { w.remove("a"); w.remove("d") },
		session:   func(w *world) { w.rename("a", "b"); w.rename("d", "m/d"); w.write("m/d/f", "S") },
		conflicts: []string{"modify/delete b", "modify/delete m/d", "parent-gone m/d"},
		refreshed: map[string]string{"b": `1\n2`, "m/d/f": `"S"`, "m/d/e/g": "g", "a": "", "d": ""},
	},
	{
		name: "9 the session deleted", head: func(w *world) { w.write("a", "H\n") }, session: func(w *world) { w.remove("a") },
		conflicts: []string{"delete/modify a"}, refreshed: map[string]string{"a": "", "a.head-L000001": "H"},
	},
	{
		name: "9 the session deleted, the head saved", head: func(w *world) { w.save("a", "H\n") }, session: func(w *world) { w.remove("a") },
		conflicts: []string{"delete/modify a"}, refreshed: map[string]string{"a": "", "a.head-L000001": "H"},
	},
	{
		name: "9 the session deleted, the head moved", head: func(w *world) { w.rename("a", "b") }, session: func(w *world) { w.remove("a") },
		conflicts: []string{"delete/modify b"},
	},
	{
		name: "9 times do not count", head: func(w *world) { w.touch("a") }, session: func(w *world) { w.remove("a") },
		want: map[string]string{"a": ""},
	},
	{
		name: "10 both added", head: func(w *world) { w.create("new", "H\n"); w.create("nb", "\x00H") }, session: func(w *world) { w.create("new", "S\n"); w.create("nb", "\x00S") },
		conflicts: []string{"add/add nb", "add/add new"},
		refreshed: map[string]string{"new": `"<<<<<<< sess\nS\n||||||| base\n=======\nH\n>>>>>>> head\n"`, "nb": `"\x00S"`, "nb.head-L000001": `"\x00H"`},
	},
	{
		name: "10 both added, two types", head: func(w *world) { w.mkdir("new"); w.create("new/x", "x") }, session: func(w *world) { w.create("new", "S\n") },
		conflicts: []string{"add/add new"}, refreshed: map[string]string{"new": "S", "new.head-L000001/x": "x"},
	},
	{
		name: "10 moved onto what the head added", head: func(w *world) { w.create("new", "H\n") }, session: func(w *world) { w.rename("a", "new") },
		conflicts: []string{"add/add new"}, refreshed: map[string]string{"a": ""},
	},
	{
		name: "11 kinds", head: func(w *world) { w.remove("a"); w.symlink("a", "bin") }, session: func(w *world) { w.write("a", "S\n") },
		conflicts: []string{"kind a"}, refreshed: map[string]string{"a": "S", "a.head-L000001": "symlink"},
	},
	{
		name: "12 symlinks", head: func(w *world) { w.remove("l"); w.symlink("l", "H") }, session: func(w *world) { w.remove("l"); w.symlink("l", "S") },
		conflicts: []string{"symlink l"}, refreshed: map[string]string{"l": "S", "l.head-L000001": "H"},
	},
	{
		name: "13 both made a directory", head: func(w *world) { w.mkdir("nd"); w.create("nd/h", "h"); w.mkdir("nd/x"); w.create("nd/x/1", "1") },
		session: func(w *world) { w.mkdir("nd"); w.create("nd/s", "s"); w.mkdir("nd/x"); w.create("nd/x/2", "2") },
		want:    map[string]string{"nd/h": "h", "nd/s": "s", "nd/x/1": "1", "nd/x/2": "2"},
	},
	{
		name: "13 directories' own attributes", head: func(w *world) { w.chmod("d", 0o700); w.create("d/h", "h") }, session: func(w *world) { w.setxattr("d", "user.s", "s"); w.create("d/s", "s") },
		want: map[string]string{"d": "700 \"\" [{user.s", "d/h": "h", "d/s": "s"},
	},
	{
		name: "13 the head made the directory anew", head: func(w *world) { w.remove("d"); w.mkdir("d"); w.create("d/f", "f\n"); w.create("d/h", "h") },
		session: func(w *world) { w.write("d/f", "S\n"); w.create("d/s", "s") },
		want:    map[string]string{"d/f": "S", "d/h": "h", "d/s": "s"},
	},
	{
		name: "13 both made it anew", head: func(w *world) { w.remove("d"); w.mkdir("d"); w.create("d/f", "f\n"); w.create("d/h", "h") },
		session: func(w *world) { w.remove("d"); w.mkdir("d"); w.create("d/s", "s") },
		want:    map[string]string{"d/f": "", "d/h": "h", "d/s": "s", "d/e": ""}, converged: []string{"d/e"},
	},
	{
		name: "14 the head removed the directory", head: func(w *world) { w.remove("d") },
		session: func(w *world) {
			w.create("d/new", "n")
			w.write("d/e/g", "S")
			w.mkdir("d/nd")
			w.create("d/nd/x", "x")
		},
		conflicts: []string{"parent-gone d"},
		refreshed: map[string]string{"d/new": "n", "d/e/g": "S", "d/nd/x": "x", "d/f": ""},
	},
	{
		name: "14 the head made it a file", head: func(w *world) { w.remove("d"); w.create("d", "file") },
		session: func(w *world) { w.create("d/new", "n") }, conflicts: []string{"parent-gone d"},
		refreshed: map[string]string{"d/new": "n", "d.head-L000001": "file"},
	},
	{
		name: "15 the session removed the directory",
		head: func(w *world) {
			w.write("d/f", "H")
			w.create("d/e/new", "n")
			w.mkdir("d/nd")
			w.create("d/nd/x", "x")
		},
		session:   func(w *world) { w.remove("d") },
		conflicts: []string{"delete/modify d/e/new", "delete/modify d/f", "delete/modify d/nd", "delete/modify d/nd/x"},
		refreshed: map[string]string{"d": "", "d.head-L000001/f": "H", "d.head-L000001/nd/x": "x"},
	},
	{
		name: "15 the session replaced the directory", head: func(w *world) { w.write("d/f", "H"); w.create("d/new", "n") },
		session:   func(w *world) { w.remove("d"); w.mkdir("d"); w.create("d/f", "f\n"); w.mkdir("d/e") },
		conflicts: []string{"delete/modify d/new"},
		refreshed: map[string]string{"d/f": "H", "d.head-L000001/new": "n"},
	},
	{
		name: "15 the session made it a file", head: func(w *world) { w.write("d/e/g", "H") },
		session: func(w *world) { w.remove("d"); w.create("d", "file") }, conflicts: []string{"delete/modify d/e/g"},
		refreshed: map[string]string{"d": "file", "d.head-L000001/e/g": "H"},
	},
	{
		name: "15 what was moved out first is not lost", head: func(w *world) { w.write("d/f", "H") },
		session: func(w *world) { w.rename("d/f", "f"); w.remove("d") },
		want:    map[string]string{"f": "H", "d": ""},
	},
	{
		name: "15 nothing of it changed", head: func(w *world) { w.touch("d/f") }, session: func(w *world) { w.remove("d") },
		want: map[string]string{"d": ""},
	},
	{
		name: "16 the session renamed", head: func(w *world) { w.write("a", "H\n2\n3\n4\n5\n"); w.write("d/f", "H"); w.create("d/new", "n") },
		session: func(w *world) { w.rename("a", "m/b"); w.write("m/b", "1\n2\n3\n4\nS\n"); w.rename("d", "m/d") },
		want:    map[string]string{"m/b": `"H\n2\n3\n4\nS\n"`, "a": "", "m/d/f": "H", "m/d/new": "n"}, merged: []string{"m/b"},
	},
	{
		name: "16 the session renamed, the head saved", head: func(w *world) { w.save("a", "H\n2\n3\n4\n5\n") },
		session: func(w *world) { w.rename("a", "b"); w.write("b", "1\n2\n3\n4\nS\n") },
		want:    map[string]string{"b": `"H\n2\n3\n4\nS\n"`, "a": ""}, merged: []string{"b"},
	},
	{
		name: "17 the head renamed", head: func(w *world) { w.rename("a", "m/b"); w.rename("d", "m/d") },
		session: func(w *world) { w.write("a", "1\n2\n3\n4\nS\n"); w.create("d/new", "n") },
		want:    map[string]string{"m/b": "S", "a": "", "m/d/new": "n"},
	},
	{
		name: "17 the head renamed, the session saved", head: func(w *world) { w.rename("a", "b"); w.write("b", "H\n2\n3\n4\n5\n") },
		session: func(w *world) { w.save("a", "1\n2\n3\n4\nS\n") },
		want:    map[string]string{"b": `"H\n2\n3\n4\nS\n"`, "a": ""}, merged: []string{"a"},
	},
	{
		name: "18 two new names", head: func(w *world) { w.rename("a", "b"); w.rename("d", "m/d") }, session: func(w *world) { w.rename("a", "c"); w.rename("d", "n/d") },
		conflicts: []string{"rename/rename c", "rename/rename n/d"},
		refreshed: map[string]string{"c": "1", "b": "", "n/d/f": "f", "m/d": ""},
	},
	{
		name: "18 the same new name", head: func(w *world) { w.rename("a", "b") }, session: func(w *world) { w.rename("a", "b"); w.write("b", "S") },
		want: map[string]string{"b": "S", "a": ""}, converged: []string{"a", "b"},
	},
	{
		name: "19 renamed over", head: func(w *world) { w.chmod("a", 0o755) }, session: func(w *world) { w.rename("h1", "a") },
		want: map[string]string{"a": "755", "h1": "", "h2": "three"},
	},
	{
		name: "19 renamed over what the head changed", head: func(w *world) { w.write("a", "H\n") }, session: func(w *world) { w.rename("bin", "a") },
		conflicts: []string{"binary a"},
	},
	{
		name: "20 hard links", head: func(w *world) { w.write("h1", "H\ntwo\nthree\n") }, session: func(w *world) { w.write("h2", "one\ntwo\nS\n") },
		want: map[string]string{"h1": `"H\ntwo\nS\n"`, "h2": `"H\ntwo\nS\n"`}, merged: []string{"h1"},
	},
	{
		name: "20 links come and go", head: func(w *world) { w.link("h1", "h3") }, session: func(w *world) { w.remove("h1"); w.link("h2", "h4") },
		want: map[string]string{"h1": "", "h2": "one", "h3": "one", "h4": "one"},
	},
	{
		name: "directories moved into each other", head: func(w *world) { w.rename("m", "n/m") }, session: func(w *world) { w.rename("n", "m/n") },
		conflicts: []string{"cycle m/n"}, refreshed: map[string]string{"m/n": "dir", "n": ""},
	},
	{
		name: "times alone are counted", head: nothing, session: func(w *world) { w.touch("a"); w.touch("d") },
		want: map[string]string{"a": "1"}, timeOnly: 2,
	},
	{
		name: "all conflicts at once", head: func(w *world) { w.write("a", "H\n"); w.remove("h1"); w.remove("h2"); w.write("bin", "\x00H") },
		session:   func(w *world) { w.write("a", "S\n"); w.write("h1", "S"); w.write("bin", "\x00S") },
		conflicts: []string{"binary bin", "content a", "modify/delete h1"},
	},
}

func TestTruthTable(t *testing.T) {
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			base := newWorld()
			standard(base)
			if r.base != nil {
				r.base(base)
			}
			head, session := base.clone(), base.clone()
			r.head(head)
			head.mark(base)
			r.session(session)
			v, err := occ.Validate(base, base.number, head, session, session.delta(base), occ.Options{})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, c := range v.Conflicts {
				got = append(got, c.Kind+" "+c.Path)
				checkConflict(t, c)
			}
			slices.Sort(got)
			want := slices.Sorted(slices.Values(r.conflicts))
			if !slices.Equal(got, want) {
				t.Fatalf("conflicts %q, want %q\nbase\n%shead\n%ssession\n%s", got, want, base, head, session)
			}
			if len(want) == 0 {
				out := head.sealed(t, v, session)
				expect(t, "merged", out, r.want)
				for _, list := range [][2][]string{{v.Merged, r.merged}, {v.Converged, r.converged}} {
					if !slices.Equal(list[0], list[1]) {
						t.Errorf("listed %q, want %q", list[0], list[1])
					}
				}
				if v.TimeOnly != r.timeOnly {
					t.Errorf("%d inodes changed in time only, want %d", v.TimeOnly, r.timeOnly)
				}
			}
			checkRefresh(t, base, head, session, v, r.refreshed)
		})
	}
}

func expect(t testing.TB, what string, w *world, want map[string]string) {
	t.Helper()
	paths := w.paths()
	for path, part := range want {
		if got, ok := paths[path]; ok != (part != "") || !strings.Contains(got, part) {
			t.Errorf("%s: %s is %q, want %q in it\n%s", what, path, got, part, w)
		}
	}
}

func checkConflict(t testing.TB, c occ.Conflict) {
	t.Helper()
	if c.Remedy == "" || c.Path == "" || c.HeadCommit == 0 {
		t.Errorf("conflict without remedy, path or commit: %+v", c)
	}
	if (c.Base == nil) != (c.BaseIno == 0) || (c.Session == nil) != (c.SessionIno == 0) {
		t.Errorf("%s: versions and inodes disagree: %+v", c.Path, c)
	}
	if (c.Kind == occ.ConflictContent) && len(c.Hunks) == 0 {
		t.Errorf("%s: no hunks", c.Path)
	}
}

// checkRefresh: the refreshed session is a sound tree that publishes without
// conflict, and shows what a clean publication would have shown.
func checkRefresh(t testing.TB, base, head, session *world, v *occ.Verdict, want map[string]string) *world {
	t.Helper()
	labels := occ.Labels{Base: "base", Head: "head", Session: "sess"}
	plan, err := occ.Refresh(base, base.number, head, session, session.delta(base), labels, session.newIno, occ.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(plan.Conflicts) != len(v.Conflicts) {
		t.Fatalf("refresh has %d conflicts, publish %d", len(plan.Conflicts), len(v.Conflicts))
	}
	after := session.refreshed(t, plan, base, head)
	expect(t, "refreshed", after, want)
	if len(v.Conflicts) == 0 {
		if got, want := after.paths(), head.sealed(t, v, session).paths(); !maps.Equal(got, want) {
			t.Fatalf("refreshed\n%swould have published\n%s", after, head.sealed(t, v, session))
		}
	}
	again, err := occ.Validate(head, head.number, head, after, after.delta(head), occ.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(again.Conflicts) != 0 {
		t.Fatalf("conflicts after a refresh: %+v", again.Conflicts)
	}
	if got := head.sealed(t, again, after); !maps.Equal(got.paths(), after.paths()) {
		t.Fatalf("published after the refresh\n%sthe session shows\n%s", got, after)
	}
	return after
}

func TestConflictIsComplete(t *testing.T) {
	base := newWorld()
	standard(base)
	head, session := base.clone(), base.clone()
	head.write("h1", "one\nH\nthree\n")
	head.remove("d")
	head.mark(base)
	session.write("h2", "one\nS\nthree\n")
	session.create("d/new", "n")
	session.write("d/e/g", "S")
	v, err := occ.Validate(base, 0, head, session, session.delta(base), occ.Options{})
	if err != nil || len(v.Conflicts) != 2 {
		t.Fatalf("%v, %+v", err, v)
	}
	gone, text := v.Conflicts[0], v.Conflicts[1]
	if !slices.Equal(gone.Lost, []string{"d/e/g", "d/new"}) || gone.Head != nil || gone.Session.Kind != tree.Dir {
		t.Errorf("parent-gone: %+v", gone)
	}
	if text.Path != "h1" || !slices.Equal(text.AlsoNames, []string{"h2"}) {
		t.Errorf("names %q %q", text.Path, text.AlsoNames)
	}
	if text.Base.Hash == text.Head.Hash || text.Head.Hash == text.Session.Hash || text.Session.Size != 12 {
		t.Errorf("versions %+v %+v %+v", text.Base, text.Head, text.Session)
	}
	if len(text.Hunks) != 1 || text.Hunks[0].Session.Start != 1 {
		t.Errorf("hunks %+v", text.Hunks)
	}
}

func TestPolicyMerges(t *testing.T) {
	base := newWorld()
	standard(base)
	head, session := base.clone(), base.clone()
	head.write("bin", "\x00H")
	head.write("a", "H\n")
	head.mark(base)
	session.write("bin", "\x00S")
	session.write("a", "S\n")
	o := occ.Options{Policy: func(path string) occ.Merger {
		if path != "bin" {
			return nil
		}
		return func(base, head, session []byte) ([]byte, []merge.Piece, bool) {
			return fmt.Appendf(nil, "%s+%s", head, session), nil, true
		}
	}}
	v, err := occ.Validate(base, 0, head, session, session.delta(base), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(v.Conflicts) != 1 || v.Conflicts[0].Path != "a" || !slices.Equal(v.Merged, []string{"bin"}) {
		t.Errorf("conflicts %+v, merged %q", v.Conflicts, v.Merged)
	}
	for _, p := range v.Inodes {
		if p.Path == "bin" && string(p.Merged) != "\x00H+\x00S" {
			t.Errorf("merged %q", p.Merged)
		}
	}
}

func TestTimes(t *testing.T) {
	base := newWorld()
	standard(base)
	head, session := base.clone(), base.clone()
	head.write("a", "H\n2\n3\n4\n5\n")
	session.write("a", "1\n2\n3\n4\nS\n")
	session.create("d/s", "s")
	head.create("d/h", "h")
	head.mark(base)
	v, err := occ.Validate(base, 0, head, session, session.delta(base), occ.Options{})
	if err != nil {
		t.Fatal(err)
	}
	out := head.sealed(t, v, session)
	at := func(w *world, path string) tree.Time { d, _ := w.find(path); return w.inodes[d.Ino].Mtime }
	if m := at(out, "a"); !at(head, "a").Before(m) || !at(session, "a").Before(m) {
		t.Errorf("merged content is not newer than both sides")
	}
	if at(out, "d") != at(head, "d") {
		t.Errorf("the directory's time is %v, the later side's %v", at(out, "d"), at(head, "d"))
	}
	v, err = occ.Validate(base, 0, head, session, session.delta(base), occ.Options{Now: tree.Time{Sec: 1 << 40}})
	if err != nil {
		t.Fatal(err)
	}
	if m := at(head.sealed(t, v, session), "a"); m.Sec != 1<<40 {
		t.Errorf("merged at %v", m)
	}
}

type brokenView struct {
	*world
	err error
}

func (b brokenView) Hash(tree.Ino) (tree.Hash, error) { return tree.Hash{}, b.err }

func TestErrorsOfViews(t *testing.T) {
	base := newWorld()
	standard(base)
	head, session := base.clone(), base.clone()
	head.write("bin", "\x00H")
	head.mark(base)
	session.write("bin", "\x00S")
	broken := fmt.Errorf("disk: %w", tree.ErrStale)
	_, err := occ.Validate(base, 0, head, brokenView{session, broken}, session.delta(base), occ.Options{})
	if err == nil || !strings.Contains(err.Error(), broken.Error()) {
		t.Errorf("got %v", err)
	}
	_, err = occ.Refresh(base, 0, head, session, session.delta(base), occ.Labels{}, func() (tree.Ino, error) { return 0, tree.ErrQuota }, occ.Options{})
	if err == nil || !strings.Contains(err.Error(), tree.ErrQuota.Error()) {
		t.Errorf("got %v", err)
	}
}
