package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"ephemeral-sandbox/bench/drive"

	"golang.org/x/sys/unix"
)

// slots is how many lines each of the published files has; iteration i of the
// loop sets line i mod slots in all of them.
const slots = 20

var published = [...]string{"f0.txt", "f1.txt", "d/f2.txt"}

// history is what the head must show: which iteration set each line last, and
// which session published it.
type history struct {
	head  int
	iter  [slots]int
	owner [slots]string
}

func newHistory() history {
	h := history{}
	for k := range h.owner {
		h.owner[k] = "original"
	}
	return h
}

func (h *history) commit(iteration int, session string) {
	h.head++
	h.iter[iteration%slots] = iteration
	h.owner[iteration%slots] = "workspace_session:" + session
}

func (h *history) content() string {
	var b strings.Builder
	for k, i := range h.iter {
		fmt.Fprintf(&b, "slot %d: %d\n", k, i)
	}
	return b.String()
}

// attempt is a publication whose outcome is not known: the daemon was killed
// before it answered.
type attempt struct {
	iteration int
	session   string
}

// crashLoop publishes in a loop and kills the daemon at random moments of it.
// After each restart the head is the old or the new one, every byte verifies,
// content and blame are those of the publications that made the head.
func crashLoop(ctx context.Context, r *run, kills int, seed uint64) error {
	r.say("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	h := newHistory()
	files := map[string]string{}
	for _, f := range published {
		files[f] = h.content()
	}
	dir, err := r.writeFiles("workspace", files)
	if err != nil {
		return err
	}
	sb, err := r.CreateSandbox(ctx, dir)
	if err != nil {
		return err
	}
	loop := &publishLoop{run: r, sandbox: sb.ID, history: &h, pace: 100 * time.Millisecond, failures: map[string]int{}}
	inFlight, landed := 0, 0
	for kill := range kills {
		unknown, err := loop.untilKilled(ctx, rnd)
		if err != nil {
			return fmt.Errorf("kill %d: %w", kill, err)
		}
		if err := r.restart(ctx); err != nil {
			return fmt.Errorf("restart after kill %d: %w", kill, err)
		}
		head, err := r.verify(ctx, sb.ID)
		if err != nil {
			return fmt.Errorf("after kill %d: %w", kill, err)
		}
		if unknown != nil {
			inFlight++
		}
		switch {
		case head == h.head:
		case unknown != nil && head == h.head+1:
			h.commit(unknown.iteration, unknown.session)
			landed++
		default:
			return fmt.Errorf("after kill %d the head is %d; acknowledged %d, in flight %+v", kill, head, h.head, unknown)
		}
		if err := h.check(ctx, r, sb.ID); err != nil {
			return fmt.Errorf("after kill %d: %w", kill, err)
		}
		// The session may or may not have outlived the daemon; either way it can
		// be ended.
		if err := r.DestroySession(ctx, sb.ID, loop.session); err != nil && !drive.IsKind(err, "not_found") {
			return fmt.Errorf("end the session after kill %d: %w", kill, err)
		}
		if (kill+1)%20 == 0 {
			r.say("%d kills, head L%06d, %d hit a publication, %d of those had landed", kill+1, h.head, inFlight, landed)
		}
	}
	r.say("what clients were told by a daemon that was killed: %v", loop.failures)
	return nil
}

// publishLoop edits and publishes from one session.
type publishLoop struct {
	*run
	sandbox   string
	history   *history
	session   string // of the last kill
	iteration int
	pace      time.Duration // what one round takes, smoothed
	failures  map[string]int
}

// untilKilled opens a session and runs rounds until the daemon, which it kills
// at a random moment, is gone. It returns the publication that was in flight.
func (l *publishLoop) untilKilled(ctx context.Context, rnd *rand.Rand) (*attempt, error) {
	var snap drive.Snapshot
	if err := l.Call(ctx, &snap, drive.Observe, "snapshot"); err != nil {
		return nil, err
	}
	fd, err := unix.PidfdOpen(snap.Daemon.PID, 0)
	if err != nil {
		return nil, fmt.Errorf("daemon %d: %w", snap.Daemon.PID, err)
	}
	defer unix.Close(fd)
	session, err := l.CreateSession(ctx, l.sandbox)
	if err != nil {
		return nil, err
	}
	l.session = session.ID
	k := &killer{fd: fd, done: make(chan error, 1)}
	time.AfterFunc(time.Duration(rnd.Int64N(int64(3*l.pace))), k.kill)
	for {
		began := time.Now()
		l.iteration++
		unknown, opErr := l.round(ctx, session.ID)
		if opErr == nil && !k.struck.Load() {
			l.pace = (7*l.pace + time.Since(began)) / 8
			continue
		}
		if opErr != nil && l.failures != nil {
			l.failures[failure(opErr)]++
		}
		return unknown, k.explain(opErr)
	}
}

// failure is what a client was told when its daemon was killed, in a few words.
func failure(err error) string {
	if e, ok := errors.AsType[*drive.Error](err); ok {
		return e.Kind
	}
	return "a command that ended otherwise"
}

// killer kills one process at its moment.
type killer struct {
	fd     int // pidfd
	struck atomic.Bool
	done   chan error
}

func (k *killer) kill() {
	k.struck.Store(true)
	k.done <- unix.PidfdSendSignal(k.fd, unix.SIGKILL, nil, 0)
}

// explain turns the failure of a round into nil when it came after the kill,
// and waits until the process is gone.
func (k *killer) explain(opErr error) error {
	if !k.struck.Load() {
		return fmt.Errorf("a round failed before the kill: %w", opErr)
	}
	if err := <-k.done; err != nil {
		return fmt.Errorf("kill the daemon: %w", err)
	}
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(k.fd), Events: unix.POLLIN}}, 10000)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for the killed daemon: %w", err)
		case n == 0:
			return errors.New("the daemon outlived SIGKILL by 10 s")
		default:
			return nil
		}
	}
}

// round edits one line in all files and publishes. An error after the edit
// comes with the attempt that may or may not have landed.
func (l *publishLoop) round(ctx context.Context, session string) (*attempt, error) {
	k := l.iteration % slots
	edit := fmt.Sprintf("sed -i 's/^slot %d: .*/slot %d: %d/' %s", k, k, l.iteration, strings.Join(published[:], " "))
	if _, err := l.command(ctx, l.sandbox, session, edit); err != nil {
		return nil, err
	}
	p, err := l.Publish(ctx, l.sandbox, session)
	if err != nil {
		return &attempt{l.iteration, session}, err
	}
	if p.Status != "committed" {
		return nil, fmt.Errorf("publication %d: %+v", l.iteration, p)
	}
	l.history.commit(l.iteration, session)
	if n, err := drive.CommitNumber(p.Commit); err != nil || n != l.history.head {
		return nil, fmt.Errorf("publication %d is commit %s, want number %d", l.iteration, p.Commit, l.history.head)
	}
	return nil, nil
}

// restart brings the daemon back, by itself or because something else already
// has, and returns when it answers.
func (r *run) restart(ctx context.Context) error {
	err := r.Start(ctx)
	var snap drive.Snapshot
	if callErr := r.Call(ctx, &snap, drive.Observe, "snapshot"); callErr != nil {
		return errors.Join(err, callErr)
	}
	return nil
}

// check compares content and blame of every file at the head with the history.
func (h *history) check(ctx context.Context, r *run, sandbox string) error {
	return each(len(published), len(published), func(i int) error {
		f, err := r.Read(ctx, sandbox, "", published[i])
		if err != nil {
			return err
		}
		if f.Content != h.content() {
			return fmt.Errorf("%s at the head is\n%swant\n%s", published[i], f.Content, h.content())
		}
		b, err := r.Blame(ctx, sandbox, published[i])
		if err != nil {
			return err
		}
		owners := b.Owners()
		if len(owners) != slots {
			return fmt.Errorf("%s: blame covers %d lines, want %d", published[i], len(owners), slots)
		}
		for k, owner := range owners {
			if owner != h.owner[k] {
				return fmt.Errorf("%s line %d is blamed on %s, want %s", published[i], k+1, owner, h.owner[k])
			}
		}
		return nil
	})
}
