package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"ephemeral-sandbox/daemon/config"
	"ephemeral-sandbox/daemon/store"
)

// Checked is what a check of one sandbox found.
type Checked struct {
	SandboxID string
	Report    store.Report
}

// Check verifies every byte of every sandbox of a state directory that no
// daemon is using. It changes nothing but a torn tail of a commit log, which
// every opening cuts.
func Check(ctx context.Context, cfg config.Config) ([]Checked, error) {
	entries, err := os.ReadDir(cfg.Sandboxes())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	var list []Checked
	for _, e := range entries {
		c := Checked{SandboxID: e.Name()}
		if c.Report, err = checkStore(ctx, filepath.Join(cfg.Sandboxes(), e.Name(), "store")); err != nil {
			if ctx.Err() != nil {
				return list, ctx.Err()
			}
			c.Report.Problems = append(c.Report.Problems, err.Error())
		}
		list = append(list, c)
	}
	return list, nil
}

func checkStore(ctx context.Context, dir string) (rep store.Report, err error) {
	s, err := store.Open(dir, store.Options{Salvage: true})
	if err != nil {
		return rep, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if rep, err = s.Verify(ctx); err != nil {
		return rep, err
	}
	if damage := s.Damage(); damage != nil {
		rep.Problems = append(rep.Problems, damage.Error())
	}
	return rep, nil
}
