package fusefs

import (
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// dying is a view whose server is killed in one of its methods, before or after
// the method has done its work: the request was taken and is never answered.
type dying struct {
	*view
	in    string
	after bool
}

func (d *dying) run(method string, do func() fuse.Status) fuse.Status {
	if d.in != method {
		return do()
	}
	if d.after {
		do()
	}
	unix.Kill(unix.Getpid(), unix.SIGKILL)
	select {}
}

func (d *dying) Mkdir(c <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	return d.run("Mkdir", func() fuse.Status { return d.view.Mkdir(c, in, name, out) })
}
