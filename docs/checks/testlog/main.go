// Command testlog reads the output of "go test -json" and prints what a person
// wants of it: one line a package, the whole output of whatever failed, every
// skipped test with its reason, and a last line of totals. It exits with 1 when
// anything failed, or when no test ran.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// event is one line of go test -json, as cmd/test2json describes it.
type event struct {
	Action, Package, Test, Output, ImportPath string
}

func main() {
	ok, err := run(os.Stdin, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run copies what matters from in to out and reports whether all went well.
func run(in io.Reader, out io.Writer) (bool, error) {
	type key struct{ pkg, test string }
	output := map[key][]string{} // of tests and packages that have not ended
	var skips []string
	passed, failed := 0, 0
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			break
		}
		if err != nil && err != io.EOF {
			return false, fmt.Errorf("read test events: %w", err)
		}
		var e event
		if json.Unmarshal(line, &e) != nil {
			fmt.Fprintf(out, "%s", line) // a line that go itself printed
			continue
		}
		k := key{e.Package, e.Test}
		switch e.Action {
		case "output":
			output[k] = append(output[k], e.Output)
		case "build-output":
			fmt.Fprint(out, e.Output)
		case "build-fail":
			failed++
		case "pass", "skip", "fail":
			text := output[k]
			delete(output, k)
			switch {
			case e.Action == "fail":
				failed++
				fmt.Fprint(out, strings.Join(text, ""))
			case e.Test == "":
				fmt.Fprint(out, packageLines(text))
			case e.Action == "skip":
				skips = append(skips, e.Package+" "+e.Test+": "+reason(text))
			default:
				passed++
			}
		}
	}
	for _, s := range skips {
		fmt.Fprintln(out, "skipped:", s)
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed, len(skips))
	return failed == 0 && passed > 0, nil
}

// packageLines keeps go test's summary of a package that went well.
func packageLines(text []string) string {
	var keep []string
	for _, l := range text {
		if strings.HasPrefix(l, "ok ") || strings.HasPrefix(l, "?  ") {
			keep = append(keep, l)
		}
	}
	return strings.Join(keep, "")
}

// reason is what a skipped test said, on one line.
func reason(text []string) string {
	var said []string
	for _, l := range text {
		l = strings.TrimSpace(l)
		if l != "" && !strings.HasPrefix(l, "=== ") && !strings.HasPrefix(l, "--- ") {
			said = append(said, l)
		}
	}
	return strings.Join(said, " ")
}
