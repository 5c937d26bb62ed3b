// Package faultfs wraps a hostfs.FS so that a chosen step fails. It exists for
// tests: a loop that fails step 0, 1, 2 and so on until a run succeeds has
// walked every error path there is.
//
// A step is one call that reaches the disk, reads included. A failing write
// leaves half of its bytes behind; every other failing call does nothing. Close
// never fails and is no step: an error path has to be able to tidy up.
package faultfs

import (
	"fmt"
	"io"
	"io/fs"
	"sync"

	"ephemeral-sandbox/fs/hostfs"
)

// FS counts and names the steps made through it.
type FS struct {
	inner hostfs.FS
	plan  Plan

	mu    sync.Mutex
	steps []string // guarded by mu
	fired bool     // guarded by mu
}

var _ hostfs.FS = (*FS)(nil)

// Plan says which step fails.
type Plan struct {
	Nth   int   // the first failing step, from 0; negative: none
	Count int   // how many steps fail from there on; 0 = one, negative = all
	Err   error // what they fail with
}

// New wraps inner.
func New(inner hostfs.FS, plan Plan) *FS { return &FS{inner: inner, plan: plan} }

// Steps returns what was done, in order, failed steps included: "write log",
// "sync log", "sync-dir packs".
func (f *FS) Steps() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.steps...)
}

// Fired reports whether a step has failed by plan.
func (f *FS) Fired() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fired
}

func (f *FS) step(op, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.steps)
	f.steps = append(f.steps, op+" "+name)
	last := f.plan.Nth + max(f.plan.Count, 1)
	if f.plan.Nth < 0 || n < f.plan.Nth || f.plan.Count >= 0 && n >= last {
		return nil
	}
	f.fired = true
	return &fs.PathError{Op: op, Path: name, Err: f.plan.Err}
}

// Mkdir implements hostfs.FS.
func (f *FS) Mkdir(name string) error {
	if err := f.step("mkdir", name); err != nil {
		return err
	}
	return f.inner.Mkdir(name)
}

// Open implements hostfs.FS.
func (f *FS) Open(name string) (hostfs.File, error) { return f.file("open", name, f.inner.Open) }

// OpenWrite implements hostfs.FS.
func (f *FS) OpenWrite(name string) (hostfs.File, error) {
	return f.file("open-write", name, f.inner.OpenWrite)
}

// Create implements hostfs.FS.
func (f *FS) Create(name string) (hostfs.File, error) {
	return f.file("create", name, f.inner.Create)
}

func (f *FS) file(op, name string, open func(string) (hostfs.File, error)) (hostfs.File, error) {
	if err := f.step(op, name); err != nil {
		return nil, err
	}
	inner, err := open(name)
	if err != nil {
		return nil, err
	}
	return &file{File: inner, fs: f, name: name}, nil
}

// Temp implements hostfs.FS.
func (f *FS) Temp(dir string) (hostfs.Temp, error) {
	if err := f.step("temp", dir); err != nil {
		return nil, err
	}
	inner, err := f.inner.Temp(dir)
	if err != nil {
		return nil, err
	}
	return &temp{file: file{File: inner, fs: f, name: dir + "/(unnamed)"}, inner: inner}, nil
}

// Rename implements hostfs.FS.
func (f *FS) Rename(from, to string) error {
	if err := f.step("rename", fmt.Sprintf("%s %s", from, to)); err != nil {
		return err
	}
	return f.inner.Rename(from, to)
}

// Remove implements hostfs.FS.
func (f *FS) Remove(name string) error {
	if err := f.step("remove", name); err != nil {
		return err
	}
	return f.inner.Remove(name)
}

// List implements hostfs.FS.
func (f *FS) List(dir string) ([]string, error) {
	if err := f.step("list", dir); err != nil {
		return nil, err
	}
	return f.inner.List(dir)
}

// SyncDir implements hostfs.FS.
func (f *FS) SyncDir(dir string) error {
	if err := f.step("sync-dir", dir); err != nil {
		return err
	}
	return f.inner.SyncDir(dir)
}

// Lock implements hostfs.FS.
func (f *FS) Lock() (io.Closer, error) {
	if err := f.step("lock", "."); err != nil {
		return nil, err
	}
	return f.inner.Lock()
}

// Close implements hostfs.FS.
func (f *FS) Close() error { return f.inner.Close() }

type file struct {
	hostfs.File
	fs   *FS
	name string
}

// ReadAt implements io.ReaderAt.
func (f *file) ReadAt(p []byte, off int64) (int, error) {
	if err := f.fs.step("read", f.name); err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

// WriteAt implements io.WriterAt.
func (f *file) WriteAt(p []byte, off int64) (int, error) {
	if err := f.fs.step("write", f.name); err != nil {
		n, writeErr := f.File.WriteAt(p[:len(p)/2], off)
		if writeErr != nil {
			return n, writeErr
		}
		return n, err
	}
	return f.File.WriteAt(p, off)
}

// Size implements hostfs.File.
func (f *file) Size() (int64, error) {
	if err := f.fs.step("size", f.name); err != nil {
		return 0, err
	}
	return f.File.Size()
}

// Sync implements hostfs.File.
func (f *file) Sync() error {
	if err := f.fs.step("sync", f.name); err != nil {
		return err
	}
	return f.File.Sync()
}

type temp struct {
	file
	inner hostfs.Temp
}

// Link implements hostfs.Temp.
func (t *temp) Link(name string) error {
	if err := t.fs.step("link", name); err != nil {
		return err
	}
	if err := t.inner.Link(name); err != nil {
		return err
	}
	t.name = name
	return nil
}
