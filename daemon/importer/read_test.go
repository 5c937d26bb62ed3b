package importer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"ephemeral-sandbox/layerfmt"
)

// TestChangesBetweenTheTwoPasses changes things deep in the directory after the
// whole walk, and a large file while the writer reads it.
func TestChangesBetweenTheTwoPasses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(at func(string) string) error
		want   []string
	}{
		"small file":     {func(at func(string) string) error { return os.Truncate(at("d/e/small"), 1) }, []string{"d/e/small"}},
		"large file":     {func(at func(string) string) error { return os.Truncate(at("d/e/large"), 1) }, []string{"d/e/large"}},
		"new name":       {func(at func(string) string) error { return os.Mkdir(at("d/e/new"), 0o700) }, []string{"d/e"}},
		"directory gone": {func(at func(string) string) error { return os.RemoveAll(at("d/e")) }, []string{"d", "d/e"}},
		"directory swapped": {func(at func(string) string) error {
			return errors.Join(os.Rename(at("d/e"), at("d/f")), os.Mkdir(at("d/e"), 0o700))
		}, []string{"d", "d/e"}},
		"directory a link": {func(at func(string) string) error {
			return errors.Join(os.Rename(at("d/e"), at("d/f")), os.Symlink("f", at("d/e")))
		}, []string{"d", "d/e"}},
		"everywhere": {func(at func(string) string) error {
			return errors.Join(os.Truncate(at("d/e/large"), 1), os.Truncate(at("d/e/small"), 1), os.Truncate(at("last"), 1))
		}, []string{"d/e/large", "d/e/small", "last"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			at := func(name string) string { return filepath.Join(dir, name) }
			err := errors.Join(
				os.MkdirAll(at("d/e"), 0o700),
				os.WriteFile(at("d/e/small"), []byte("small"), 0o600),
				os.WriteFile(at("d/e/large"), make([]byte, smallFile+1), 0o600),
				os.WriteFile(at("last"), []byte("last"), 0o600),
			)
			if err != nil {
				t.Fatal(err)
			}
			err = twoPasses(t, dir, func() error { return tc.change(at) })
			var e *ChangedError
			if !errors.As(err, &e) || !slices.Equal(e.Paths, tc.want) {
				t.Errorf("import: %v, want %q changed", err, tc.want)
			}
		})
	}
}

func twoPasses(t *testing.T, dir string, between func() error) error {
	t.Helper()
	ctx := context.Background()
	top, err := openRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Workers: 2}
	m, f := &meter{}, &faults{}
	root, err := walk(ctx, top, o, m, f)
	if err := errors.Join(err, f.err()); err != nil {
		t.Fatal(err)
	}
	number(root)
	if err := between(); err != nil {
		t.Fatal(err)
	}
	w := layerfmt.NewWriter(io.Discard, layerfmt.WriterOptions{Kind: layerfmt.Base})
	defer w.Abort()
	return read(ctx, top, root, w, o, m, f)
}

func TestAFileThatChangesWhileItIsRead(t *testing.T) {
	for name, change := range map[string]func(name string) error{
		"shrinks":        func(name string) error { return os.Truncate(name, smallFile) },
		"grows":          func(name string) error { return os.Truncate(name, 4*smallFile) },
		"is overwritten": func(name string) error { return os.WriteFile(name, make([]byte, 2*smallFile), 0o600) },
		"mode":           func(name string) error { return os.Chmod(name, 0o400) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "large")
			if err := os.WriteFile(path, bytes.Repeat([]byte("x"), 2*smallFile), 0o600); err != nil {
				t.Fatal(err)
			}
			fd, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer fd.Close()
			meta, err := stat(int(fd.Fd()), "")
			if err != nil {
				t.Fatal(err)
			}
			if err := change(path); err != nil {
				t.Fatal(err)
			}
			f := &hostFile{fd: int(fd.Fd())}
			n := &node{name: "large", parent: &node{}, meta: meta, ino: 2, names: 1}
			if _, err := readWhole(*f, n, nil); !errors.Is(err, errChanged) {
				t.Errorf("read ahead: %v, want %v", err, errChanged)
			}

			r := &reader{faults: &faults{}}
			w := layerfmt.NewWriter(io.Discard, layerfmt.WriterOptions{Kind: layerfmt.Base})
			defer w.Abort()
			if err := r.writeItem(w, &item{node: n, file: f, ok: true}, &meter{}); err != nil {
				t.Errorf("the writer is blamed: %v", err)
			}
			var e *ChangedError
			if err := r.faults.err(); !errors.As(err, &e) || !slices.Equal(e.Paths, []string{"large"}) {
				t.Errorf("read by the writer: %v, want large changed", err)
			}
		})
	}
}

func TestMapACL(t *testing.T) {
	acl := func(uid, gid byte) []byte {
		return []byte{
			2, 0, 0, 0,
			1, 0, 6, 0, 0xff, 0xff, 0xff, 0xff, // the owner
			2, 0, 4, 0, uid, 0, 0, 0,
			4, 0, 4, 0, 0xff, 0xff, 0xff, 0xff, // the group
			8, 0, 4, 0, gid, 0, 0, 0,
			8, 0, 4, 0, 99, 0, 0, 0,
			32, 0, 4, 0, // cut short
		}
	}
	ids := idMap{uid: 10, gid: 20}
	for _, tc := range []struct{ in, want []byte }{
		{acl(10, 20), acl(0, 0)},
		{acl(20, 10), acl(20, 10)},
		{nil, nil},
		{[]byte{2, 0}, []byte{2, 0}},
	} {
		got := slices.Clone(tc.in)
		ids.mapACL(got)
		if !slices.Equal(got, tc.want) {
			t.Errorf("ACL %v becomes %v, want %v", tc.in, got, tc.want)
		}
	}
}
