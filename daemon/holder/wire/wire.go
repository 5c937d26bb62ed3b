// Package wire is the protocol between the daemon, a session's holder and the
// holder's stubs: one packet a message on a SEQPACKET unix socket, descriptors
// beside it. Neither end trusts the other: every size is bounded, every byte
// is checked, and a packet that does not parse ends the connection.
//
// A packet is little endian:
//
//	0  u8   version (1)
//	1  u8   kind
//	2  u16  zero
//	4  u64  sequence number: chosen by whoever asks, echoed in the answer
//	12 ...  body, by kind
//
// A string is a u32 length and its bytes; a list is a u32 count and its items.
package wire

import "errors"

// Version is the protocol version that both ends must speak.
const Version = 1

// Bounds that both ends hold to.
const (
	MaxPacket  = 64 << 10 // bytes of one packet
	MaxFDs     = 128      // descriptors beside one packet
	MaxPath    = 4095     // bytes of one path
	MaxID      = 64       // bytes of a command or session id
	MaxBinds   = MaxFDs - 2
	MaxCommand = 8 << 20 // bytes of an encoded Command
	MaxArgs    = 1 << 18 // strings in argv, and in env
	MaxLimits  = 16
	MaxStages  = 32
	MaxText    = 1024
)

// What Parse and ParseCommand answer.
var (
	ErrVersion = errors.New("wire: the other end speaks another protocol version")
	ErrFormat  = errors.New("wire: malformed packet")
)

// Kind tells the bodies apart.
type Kind uint8

// The kinds. The numbers are part of the protocol.
const (
	KindSetup   Kind = 1
	KindExec    Kind = 2
	KindKill    Kind = 3
	KindAck     Kind = 4
	KindSync    Kind = 5
	KindResync  Kind = 6
	KindMapped  Kind = 7
	KindMounted Kind = 32
	KindReady   Kind = 33
	KindFailed  Kind = 34
	KindStarted Kind = 35
	KindExited  Kind = 36
	KindGone    Kind = 37
	KindReply   Kind = 38
)

// Body is the content of a packet: one of the structs of this package.
type Body interface {
	kind() Kind
	encode(*encoder)
}

// Packet is one message.
type Packet struct {
	Seq  uint64
	Body Body
}

// Setup is the daemon's first packet. Descriptors beside it: the /dev/fuse
// node when FuseNode is set, then one detached mount per bind that has one.
type Setup struct {
	Session   string
	Workspace string
	Home      string
	Scratch   uint64 // bytes
	NewNet    bool   // the network namespace is the session's own
	NoView    bool
	FuseNode  bool
	MultiID   bool // ids other than 0 exist inside
	Binds     []Bind
}

// Bind is one host path to show read-only at the same place.
type Bind struct {
	Path  string
	Mount bool   // a detached mount of it is among the descriptors
	Link  string // not a mount but a symbolic link with this target
}

// Exec starts a command. Descriptors beside it: the encoded Command in a
// memfd, then stdin, stdout, stderr; the command gets pipes in place of regular
// files. An ID that is known already is answered
// with what is known and not started again.
type Exec struct{ ID string }

// Kill signals every process of a command.
type Kill struct {
	ID     string
	Signal uint8
}

// Ack lets the holder forget an exited command.
type Ack struct{ ID string }

// Sync asks for a syncfs(2) on the view.
type Sync struct{}

// Resync asks for everything the holder remembers, again, then a Reply. The
// descriptor of the holder's procfs comes with the Reply.
type Resync struct{}

// Mapped tells a holder that was started without an id map that it has one now.
type Mapped struct{}

// Mounted says that the view is mounted. Descriptors beside it: the inner
// procfs, then the mounted /dev/fuse unless Setup.NoView.
type Mounted struct{}

// Ready says that the root tree is complete.
type Ready struct{ Stages []Stage }

// Stage is one timed step of the start.
type Stage struct {
	Name  string
	Nanos uint64
}

// Failed says which step of the start, or of a request, went wrong.
type Failed struct {
	Step  string
	Errno uint16
	Text  string // what it was done to
}

// Started says that a command runs. Stub is the inner pid of its stub, Pid its
// own, 0 while it is still on its way (on Resync only). The holder answers Exec
// with it; the stub tells the holder with it.
type Started struct {
	ID        string
	Stub, Pid uint32
}

// Exited says how a command ended. It is repeated on Resync until Ack.
type Exited struct {
	ID         string
	Status     uint32 // as wait4(2) gives it
	UserMicros uint64
	SysMicros  uint64
	MaxRSS     uint64 // KiB
	Lost       bool   // the stub died and took the status with it
	// Bytes of each output that its file lacks, and the first failure of a
	// stream's file.
	StdoutDropped, StderrDropped uint64
	StreamErrno                  uint16
}

// Gone says that nothing of a command lives any more, stub included. Without an
// Exited before it, the command never ran.
type Gone struct{ ID string }

// Reply answers Kill, Sync and Resync; Errno 0 is success.
type Reply struct{ Errno uint16 }

func (Setup) kind() Kind   { return KindSetup }
func (Exec) kind() Kind    { return KindExec }
func (Kill) kind() Kind    { return KindKill }
func (Ack) kind() Kind     { return KindAck }
func (Sync) kind() Kind    { return KindSync }
func (Resync) kind() Kind  { return KindResync }
func (Mapped) kind() Kind  { return KindMapped }
func (Mounted) kind() Kind { return KindMounted }
func (Ready) kind() Kind   { return KindReady }
func (Failed) kind() Kind  { return KindFailed }
func (Started) kind() Kind { return KindStarted }
func (Exited) kind() Kind  { return KindExited }
func (Gone) kind() Kind    { return KindGone }
func (Reply) kind() Kind   { return KindReply }

func (b Setup) encode(e *encoder) {
	e.str(b.Session)
	e.str(b.Workspace)
	e.str(b.Home)
	e.u64(b.Scratch)
	for _, flag := range []bool{b.NewNet, b.NoView, b.FuseNode, b.MultiID} {
		e.bool(flag)
	}
	e.u32(uint32(len(b.Binds)))
	for _, bind := range b.Binds {
		e.str(bind.Path)
		e.bool(bind.Mount)
		e.str(bind.Link)
	}
}

func decodeSetup(d *decoder) Setup {
	b := Setup{
		Session: d.id(), Workspace: d.str(MaxPath), Home: d.str(MaxPath),
		Scratch: d.u64(),
		NewNet:  d.bool(), NoView: d.bool(), FuseNode: d.bool(), MultiID: d.bool(),
	}
	for range d.count(MaxBinds, 9) {
		b.Binds = append(b.Binds, Bind{Path: d.str(MaxPath), Mount: d.bool(), Link: d.str(MaxPath)})
	}
	return b
}

func (b Exec) encode(e *encoder)  { e.str(b.ID) }
func (b Ack) encode(e *encoder)   { e.str(b.ID) }
func (b Gone) encode(e *encoder)  { e.str(b.ID) }
func (Sync) encode(*encoder)      {}
func (Resync) encode(*encoder)    {}
func (Mapped) encode(*encoder)    {}
func (Mounted) encode(*encoder)   {}
func (b Reply) encode(e *encoder) { e.u16(b.Errno) }

func (b Kill) encode(e *encoder) {
	e.str(b.ID)
	e.u8(b.Signal)
}

func (b Ready) encode(e *encoder) {
	e.u32(uint32(len(b.Stages)))
	for _, s := range b.Stages {
		e.str(s.Name)
		e.u64(s.Nanos)
	}
}

func decodeReady(d *decoder) Ready {
	var b Ready
	for range d.count(MaxStages, 12) {
		b.Stages = append(b.Stages, Stage{Name: d.str(MaxText), Nanos: d.u64()})
	}
	return b
}

func (b Failed) encode(e *encoder) {
	e.str(b.Step)
	e.u16(b.Errno)
	e.str(b.Text)
}

func (b Started) encode(e *encoder) {
	e.str(b.ID)
	e.u32(b.Stub)
	e.u32(b.Pid)
}

func (b Exited) encode(e *encoder) {
	e.str(b.ID)
	e.u32(b.Status)
	e.u64(b.UserMicros)
	e.u64(b.SysMicros)
	e.u64(b.MaxRSS)
	e.bool(b.Lost)
	e.u64(b.StdoutDropped)
	e.u64(b.StderrDropped)
	e.u16(b.StreamErrno)
}

// Append encodes p behind dst.
func Append(dst []byte, p Packet) []byte {
	e := encoder{dst}
	e.u8(Version)
	e.u8(uint8(p.Body.kind()))
	e.u16(0)
	e.u64(p.Seq)
	p.Body.encode(&e)
	return e.b
}

// Parse decodes one packet. Nothing in the result aliases b.
func Parse(b []byte) (Packet, error) {
	d := decoder{b: b}
	version, kind, zero := d.u8(), Kind(d.u8()), d.u16()
	switch {
	case d.bad || len(b) > MaxPacket:
		return Packet{}, ErrFormat
	case version != Version:
		return Packet{}, ErrVersion
	case zero != 0:
		return Packet{}, ErrFormat
	}
	p := Packet{Seq: d.u64()}
	switch kind {
	case KindSetup:
		p.Body = decodeSetup(&d)
	case KindExec:
		p.Body = Exec{ID: d.id()}
	case KindKill:
		p.Body = Kill{ID: d.id(), Signal: d.u8()}
	case KindAck:
		p.Body = Ack{ID: d.id()}
	case KindSync:
		p.Body = Sync{}
	case KindResync:
		p.Body = Resync{}
	case KindMapped:
		p.Body = Mapped{}
	case KindMounted:
		p.Body = Mounted{}
	case KindReady:
		p.Body = decodeReady(&d)
	case KindFailed:
		p.Body = Failed{Step: d.str(MaxText), Errno: d.u16(), Text: d.str(MaxText + MaxPath)}
	case KindStarted:
		p.Body = Started{ID: d.id(), Stub: d.u32(), Pid: d.u32()}
	case KindExited:
		p.Body = Exited{
			ID: d.id(), Status: d.u32(), UserMicros: d.u64(), SysMicros: d.u64(),
			MaxRSS: d.u64(), Lost: d.bool(),
			StdoutDropped: d.u64(), StderrDropped: d.u64(), StreamErrno: d.u16(),
		}
	case KindGone:
		p.Body = Gone{ID: d.id()}
	case KindReply:
		p.Body = Reply{Errno: d.u16()}
	default:
		return Packet{}, ErrFormat
	}
	if !d.done() {
		return Packet{}, ErrFormat
	}
	return p, nil
}

// ValidID reports whether id may name a command or a session.
func ValidID(id string) bool {
	if id == "" || len(id) > MaxID {
		return false
	}
	for i := range len(id) {
		switch c := id[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case c == '.', c == '_', c == ':', c == '-':
		default:
			return false
		}
	}
	return true
}
