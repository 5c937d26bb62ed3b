package hostfs

import (
	"errors"
	"io/fs"
	"testing"
)

// TestNamedTemp takes the way for hosts that know no unnamed files.
func TestNamedTemp(t *testing.T) {
	d, err := OpenDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Mkdir("tmp"); err != nil {
		t.Fatal(err)
	}
	list := func(dir string) []string {
		t.Helper()
		names, err := d.List(dir)
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	kept, err := d.namedTemp("tmp")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(list("tmp")); n != 1 {
		t.Fatalf("%d names in tmp, want 1", n)
	}
	if _, err := kept.WriteAt([]byte("text"), 0); err != nil {
		t.Fatal(err)
	}
	if err := kept.Link("kept"); err != nil {
		t.Fatal(err)
	}
	if err := kept.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := d.namedTemp("tmp")
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Link("kept"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("link to a taken name: %v, want %v", err, fs.ErrExist)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if names := list("tmp"); len(names) != 0 {
		t.Errorf("left in tmp: %q", names)
	}
	f, err := d.Open("kept")
	if err != nil {
		t.Fatal(err)
	}
	if size, err := f.Size(); size != 4 || err != nil {
		t.Errorf("the linked file is %d bytes long, %v", size, err)
	}
}
