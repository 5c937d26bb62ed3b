package session

import (
	"context"
	"errors"
	"testing"
)

// TestWaitThenLook waits without a watch: output is seen at the command's end,
// and when the caller's patience ends.
func TestWaitThenLook(t *testing.T) {
	done, looks := make(chan struct{}), 0
	err := waitThenLook(context.Background(), done, func() error {
		if looks++; looks == 1 {
			close(done)
		}
		return nil
	})
	if err != nil || looks != 2 {
		t.Errorf("looked %d times: %v", looks, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	looks = 0
	err = waitThenLook(ctx, make(chan struct{}), func() error {
		looks++
		cancel()
		return nil
	})
	if !errors.Is(err, context.Canceled) || looks != 2 {
		t.Errorf("looked %d times: %v", looks, err)
	}
}
