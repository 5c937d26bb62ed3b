package session

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"ephemeral-sandbox/attribution"
	"ephemeral-sandbox/fs/tree"
)

// Operation is one request made of a workspace: a command, a file edit, a
// publish. Its number is what the file system, the access record and the line
// owners carry; its ID is what people see.
type Operation struct {
	Number  tree.Op `json:"n"`
	ID      string  `json:"id"`
	Kind    string  `json:"kind"`              // operation name in the catalogue
	Command string  `json:"command,omitempty"` // for exec_command, what was run
	// CommandID is the name under which the holder knows the command.
	CommandID string    `json:"command_id,omitempty"`
	Trace     string    `json:"trace,omitempty"`
	Time      time.Time `json:"time"`
}

// opTable numbers the operations of one workspace, in a file of JSON lines that
// a crash can only cut at its end. Numbers start at 1; 0 means "not known".
type opTable struct {
	mu     sync.Mutex
	closed bool               // guarded by mu
	end    int64              // guarded by mu; where the last whole line ends
	file   *os.File           // guarded by mu
	list   []Operation        // guarded by mu; list[i].Number == i+1
	byID   map[string]tree.Op // guarded by mu
	byCmd  sync.Map           // command id -> tree.Op, read for every request of the kernel
}

func openOps(path string) (*opTable, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open operation table: %w", err)
	}
	t := &opTable{file: f, byID: map[string]tree.Op{}}
	if t.end, err = t.load(); err == nil {
		err = f.Truncate(t.end)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read operation table: %w", err), f.Close())
	}
	return t, nil
}

// load reads whole lines and returns where the last good one ends.
func (t *opTable) load() (int64, error) {
	r := bufio.NewReader(t.file)
	var end int64
	for {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return end, nil // a line without its newline was never finished
		}
		if err != nil {
			return end, err
		}
		var op Operation
		if json.Unmarshal(line, &op) != nil || int(op.Number) != len(t.list)+1 {
			return end, nil
		}
		t.list = append(t.list, op)
		t.indexLocked(op)
		end += int64(len(line))
	}
}

// add gives op the next number and makes the entry readable after a crash of
// the daemon. An ID that is already known keeps its number.
func (t *opTable) add(op Operation) (Operation, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, ok := t.byID[op.ID]; ok {
		if op.CommandID != "" {
			t.byCmd.Store(op.CommandID, n)
		}
		return t.list[n-1], nil
	}
	return t.appendLocked(op)
}

// reserve keeps every number up to last from being given again.
func (t *opTable) reserve(last tree.Op) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for tree.Op(len(t.list)) < last {
		if _, err := t.appendLocked(Operation{}); err != nil {
			return err
		}
	}
	return nil
}

func (t *opTable) appendLocked(op Operation) (Operation, error) {
	if t.closed {
		return op, ErrEnding
	}
	op.Number = tree.Op(len(t.list) + 1)
	line, err := json.Marshal(op)
	if err != nil {
		return op, fmt.Errorf("record operation %s: %w", op.ID, err)
	}
	line = append(line, '\n')
	// At a fixed place, so that what a full disk cut off is written over.
	if _, err := t.file.WriteAt(line, t.end); err != nil {
		return op, fmt.Errorf("record operation %s: %w", op.ID, err)
	}
	t.end += int64(len(line))
	t.list = append(t.list, op)
	t.indexLocked(op)
	return op, nil
}

func (t *opTable) get(n tree.Op) (Operation, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n == 0 || int(n) > len(t.list) || t.list[n-1].ID == "" {
		return Operation{}, false
	}
	return t.list[n-1], true
}

func (t *opTable) find(id string) (Operation, bool) {
	t.mu.Lock()
	n := t.byID[id]
	t.mu.Unlock()
	return t.get(n)
}

func (t *opTable) indexLocked(op Operation) {
	if op.ID == "" {
		return // reserved
	}
	t.byID[op.ID] = op.Number
	if op.CommandID != "" {
		t.byCmd.Store(op.CommandID, op.Number)
	}
}

// byCommand is the operation that runs the command, 0 when there is none.
func (t *opTable) byCommand(id string) tree.Op {
	n, ok := t.byCmd.Load(id)
	if !ok {
		return 0
	}
	return n.(tree.Op)
}

// bind remembers that a command belongs to an operation, after a restart.
func (t *opTable) bind(command, operation string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, ok := t.byID[operation]; ok {
		t.byCmd.Store(command, n)
	}
}

// close refuses further operations.
func (t *opTable) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	return t.file.Close()
}

// owner says who wrote a line: this workspace's session and operation, or for
// the hidden workspace of a sessionless file operation just the operation.
type owner struct {
	session string // empty for a sessionless operation
	ops     *opTable
}

func (o owner) origin(n tree.Op) attribution.Origin {
	op, known := o.ops.get(n)
	or := attribution.Origin{Kind: attribution.Session, Session: o.session}
	if o.session == "" {
		or.Kind = attribution.Operation
	}
	if known {
		or.Operation, or.Command, or.Time = op.ID, op.Command, op.Time
	}
	return or
}
