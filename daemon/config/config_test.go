package config_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/config"
)

func env(m map[string]string) func(string) string { return func(k string) string { return m[k] } }

func TestStateDir(t *testing.T) {
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		flag string
		env  map[string]string
		want string
	}{
		{"/a", map[string]string{"SANDBOX_STATE_DIR": "/b", "XDG_STATE_HOME": "/c", "HOME": "/d"}, "/a"},
		{"a", nil, filepath.Join(wd, "a")},
		{"", map[string]string{"SANDBOX_STATE_DIR": "/b", "XDG_STATE_HOME": "/c", "HOME": "/d"}, "/b"},
		{"", map[string]string{"XDG_STATE_HOME": "/c", "HOME": "/d"}, "/c/ephemeral-sandbox"},
		{"", map[string]string{"XDG_STATE_HOME": "relative", "HOME": "/d"}, "/d/.local/state/ephemeral-sandbox"},
	}
	for _, tt := range tests {
		if got, err := config.StateDir(tt.flag, env(tt.env)); err != nil || got != tt.want {
			t.Errorf("flag %q, env %v: got %q, %v; want %q", tt.flag, tt.env, got, err, tt.want)
		}
	}
	if _, err := config.StateDir("", env(nil)); err == nil || !strings.Contains(err.Error(), "--state-dir") {
		t.Errorf("with no environment: %v", err)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	c, err := config.Load(dir, env(map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}))
	if err != nil {
		t.Fatal(err)
	}
	if c.StateDir != dir || c.OTLPEndpoint != "http://h:4318" || c.CacheBytes != config.Default(dir).CacheBytes {
		t.Errorf("got %+v", c)
	}

	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(c.File(), []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"cache_bytes": 8388608, "otlp_endpoint": "http://file:1"}`)
	c, err = config.Load(dir, env(map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}))
	if err != nil {
		t.Fatal(err)
	}
	if c.CacheBytes != 8<<20 || c.OTLPEndpoint != "http://file:1" || c.MaxSessions != config.Default(dir).MaxSessions {
		t.Errorf("got %+v", c)
	}

	for text, want := range map[string]string{
		`{"cach": 1}`:        `unknown field "cach"`,
		`{} {}`:              "more after the JSON object",
		`{"state_dir":"/x"}`: `unknown field "state_dir"`,
		`{`:                  "unexpected EOF",
	} {
		write(text)
		if _, err := config.Load(dir, env(nil)); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), c.File()) {
			t.Errorf("%s: error %v, want the file's name and %q", text, err, want)
		}
	}
}

func TestValidateReportsEveryComplaint(t *testing.T) {
	c := config.Default("relative")
	c.CacheBytes, c.SessionInodes, c.HostPaths, c.OTLPEndpoint = 0, 0, []string{"x"}, "nonsense"
	err := c.Validate()
	if err == nil {
		t.Fatal("no complaint")
	}
	for _, want := range []string{"state directory", "cache_bytes", "session_inodes", "host_paths", "otlp_endpoint"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no complaint about %s in %q", want, err)
		}
	}
	if err := config.Default("/x").Validate(); err != nil {
		t.Errorf("defaults: %v", err)
	}
}

func TestLock(t *testing.T) {
	c := config.Default(t.TempDir())
	if _, held, err := c.Holders(); held || err != nil {
		t.Fatalf("before any lock: held %v, %v", held, err)
	}
	l, err := c.TakeLock(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if o, held, err := c.Holders(); !held || err != nil || o.PID != 0 {
		t.Errorf("unnamed: %+v %v %v", o, held, err)
	}
	want := config.Owners{PID: 4711, Child: 4712}
	if err := errors.Join(l.Name(config.Owners{PID: 99999, Child: 99998}), l.Name(want)); err != nil {
		t.Fatal(err)
	}
	if o, held, err := c.Holders(); !held || err != nil || o != want {
		t.Errorf("named: %+v %v %v", o, held, err)
	}
	_, err = c.TakeLock(t.Context(), time.Millisecond)
	if e, ok := errors.AsType[*config.InUseError](err); !ok || e.Owners != want || !strings.Contains(e.Error(), c.StateDir) || !strings.Contains(e.Error(), "4711") {
		t.Errorf("a second lock: %v", err)
	}

	// A waiter gets it when the last descriptor of the open file is closed.
	copied, err := unix.FcntlInt(l.File.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, held, err := c.Holders(); !held || err != nil {
		t.Errorf("with a duplicate open: held %v, %v", held, err)
	}
	got := make(chan error, 1)
	go func() {
		l, err := c.TakeLock(t.Context(), time.Minute)
		if err == nil {
			err = l.Close()
		}
		got <- err
	}()
	if err := unix.Close(copied); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Errorf("the waiter: %v", err)
	}
	if err := c.AwaitFree(t.Context(), time.Minute); err != nil {
		t.Errorf("when it is free: %v", err)
	}
}
