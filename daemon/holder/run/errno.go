package run

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"ephemeral-sandbox/daemon/holder/wire"
)

// errnoOf finds the errno in err; EIO where there is none, 0 for nil.
func errnoOf(err error) uint16 {
	if err == nil {
		return 0
	}
	var errno unix.Errno
	if errors.As(err, &errno) && errno != 0 {
		return uint16(errno)
	}
	return uint16(unix.EIO)
}

// clock times the stages of a start.
type clock struct {
	last time.Time
	list []wire.Stage
}

func (c *clock) start() { c.last = time.Now() }

func (c *clock) stage(name string) {
	now := time.Now()
	c.list = append(c.list, wire.Stage{Name: name, Nanos: uint64(now.Sub(c.last))})
	c.last = now
}
