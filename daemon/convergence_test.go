package daemon_test

import "testing"

// TestConvergedFileStaysOpen publishes a file that the head made alike while a
// command holds it open: the name leads to the head's file from then on, and the
// command's descriptor goes on working.
func TestConvergedFileStaysOpen(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n"})
	one, two := h.session(), h.session()
	h.sh(two, "mkfifo steps")
	h.publish(two)
	run := h.background(two, `exec 3>log; echo start >&3; echo x >own; echo ready; read step <steps; echo more >&3 && echo wrote; cd made && read step <../steps && pwd >/dev/null && echo there`)
	run.says("ready\n")
	h.sh(one, "echo start >log")
	h.publish(one)
	h.publish(two)
	h.wantContent(two, "log", "start\n")
	h.sh(two, "mkdir made; echo go >steps")
	run.says("wrote\n")
	h.sh(two, "echo go >steps")
	run.says("there\n")
	if res := run.ends(); *res.ExitCode != 0 {
		t.Errorf("the command ended with %d", *res.ExitCode)
	}
	h.verifies()
}

// TestTouchKeepsNobodysBits touches a file in one session while another changes
// its mode: what the first publishes next must not bring the old mode back.
func TestTouchKeepsNobodysBits(t *testing.T) {
	h := open(t, map[string]string{"f": "1\n", "g": "1\n"})
	one, two := h.session(), h.session()
	h.sh(one, "touch f; echo 2 >>g")
	h.sh(two, "chmod 0700 f")
	h.publish(two)
	h.publish(one)
	if got := h.sh(one, "stat -c %a f"); got != "700\n" {
		t.Errorf("the session sees mode %s", got)
	}
	h.sh(one, "echo 3 >>g")
	h.publish(one)
	if got := h.sh(h.session(), "stat -c %a f"); got != "700\n" {
		t.Errorf("the head has mode %s", got)
	}
}
