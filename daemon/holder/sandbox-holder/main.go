// Command sandbox-holder is the process that owns one session's namespaces,
// and the stub above each command in it. Only sandboxd starts it.
package main

import (
	"os"

	"ephemeral-sandbox/daemon/holder/run"
)

func main() {
	run.Main()
	os.Stderr.WriteString("sandbox-holder: started by hand; sandboxd starts it where a session needs it\n")
	os.Exit(2)
}
