package occ_test

import (
	"fmt"
	"strings"
	"testing"

	"ephemeral-sandbox/fs/tree"
	"ephemeral-sandbox/occ"
)

// climbView counts how often it is asked for what a view may climb for.
type climbView struct {
	*world
	climbs int
}

func (v *climbView) Names(ino tree.Ino) ([]tree.Dirent, error) {
	v.climbs++
	return v.world.Names(ino)
}

func (v *climbView) Path(ino tree.Ino) (string, error) {
	v.climbs++
	return v.world.Path(ino)
}

// TestDeepTree judges a deep new tree: its paths are right, and the view is not
// asked to climb for each of them.
func TestDeepTree(t *testing.T) {
	const depth = 60
	base := newWorld()
	standard(base)
	head, session := base.clone(), base.clone()
	head.write("d/e/g", "head\n")
	head.mark(base)
	dir := "d/e"
	for i := range depth {
		dir += fmt.Sprintf("/%d", i)
		session.mkdir(dir)
		session.create(dir+"/f", dir+"\n")
	}
	view := &climbView{world: session}
	delta := session.delta(base)
	v, err := occ.Validate(base, 0, head, view, delta, occ.Options{})
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	for _, p := range v.Inodes {
		want, err := session.Path(p.SessionIno)
		if err != nil || p.Path != want {
			t.Errorf("path of inode %d is %q, want %q: %v", p.Ino, p.Path, want, err)
		}
		if strings.HasSuffix(p.Path, "/f") {
			files++
		}
	}
	if files < depth {
		t.Errorf("%d files are planned of %d", files, depth)
	}
	if most := len(delta.Inodes) + 20; view.climbs > most {
		t.Errorf("%d climbs for %d changes", view.climbs, len(delta.Inodes))
	}
}
