package main

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
)

func TestHistory(t *testing.T) {
	h := newHistory()
	h.commit(3, "s1")
	h.commit(3+slots, "s2")
	h.commit(4, "s3")
	lines := strings.Split(h.content(), "\n")
	if h.head != 3 || lines[3] != "slot 3: 23" || lines[4] != "slot 4: 4" || lines[5] != "slot 5: 0" {
		t.Errorf("head %d\n%s", h.head, h.content())
	}
	if h.owner[3] != "workspace_session:s2" || h.owner[4] != "workspace_session:s3" || h.owner[5] != "original" {
		t.Errorf("owners %v", h.owner)
	}
}

func TestEachRunsAllAndJoinsErrors(t *testing.T) {
	var ran atomic.Int32
	err := each(50, 4, func(i int) error {
		ran.Add(1)
		if i%5 == 0 {
			return errors.New("bad")
		}
		return nil
	})
	if ran.Load() != 50 || err == nil || !strings.Contains(err.Error(), "and 5 more") {
		t.Errorf("ran %d, %v", ran.Load(), err)
	}
}

func TestOwnFiles(t *testing.T) {
	if got := ownFile(7, 0) + " " + ownFile(7, ownFiles-1); got != "own/7/old-0.txt own/7/new-9.txt" {
		t.Error(got)
	}
}

func TestTail(t *testing.T) {
	if got := tail(" x\n"); got != "x" {
		t.Error(got)
	}
	if got := tail(strings.Repeat("y", 1000)); len(got) != 604 {
		t.Error(len(got))
	}
}
