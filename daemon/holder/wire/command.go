package wire

// Command is what a stub needs to run a program. It travels in a memfd,
// because argv and env may be larger than a packet.
type Command struct {
	Argv, Env []string
	Dir       string
	Limits    []Limit
	Output    uint64 // bytes that each output file takes at most; 0 is no bound
}

// Limit is one resource limit, as prlimit(2) has it.
type Limit struct {
	Resource   uint32
	Soft, Hard uint64
}

// AppendCommand encodes c behind dst.
func AppendCommand(dst []byte, c Command) []byte {
	e := encoder{dst}
	e.u8(Version)
	e.strs(c.Argv)
	e.strs(c.Env)
	e.str(c.Dir)
	e.u32(uint32(len(c.Limits)))
	for _, l := range c.Limits {
		e.u32(l.Resource)
		e.u64(l.Soft)
		e.u64(l.Hard)
	}
	e.u64(c.Output)
	return e.b
}

// ParseCommand decodes a command. It refuses an empty argv, and strings that
// hold a NUL, which no exec could pass on.
func ParseCommand(b []byte) (Command, error) {
	if len(b) > MaxCommand {
		return Command{}, ErrFormat
	}
	d := decoder{b: b}
	if d.u8() != Version && !d.bad {
		return Command{}, ErrVersion
	}
	c := Command{Argv: d.strs(), Env: d.strs(), Dir: d.str(MaxPath)}
	for range d.count(MaxLimits, 20) {
		c.Limits = append(c.Limits, Limit{Resource: d.u32(), Soft: d.u64(), Hard: d.u64()})
	}
	c.Output = d.u64()
	if !d.done() || len(c.Argv) == 0 {
		return Command{}, ErrFormat
	}
	return c, nil
}
