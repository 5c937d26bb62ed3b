// Command testlog reads the output of "go test -json" and prints what a person
// wants of it: one line a package, the whole output of whatever failed, the
// skipped tests by reason, and a last line of totals. It exits with 1 when
// anything failed, when no test ran, or when a test skipped for a reason that
// the flag -refuse-skips matches.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
)

// event is one line of go test -json, as cmd/test2json describes it.
type event struct {
	Action, Package, Test, Output, ImportPath string
}

func main() {
	refuse := flag.String("refuse-skips", "", "regular expression of skip reasons that count as failures")
	flag.Parse()
	refused, err := regexp.Compile(*refuse)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
		os.Exit(2)
	}
	if *refuse == "" {
		refused = nil
	}
	ok, err := run(os.Stdin, os.Stdout, refused)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// run copies what matters from in to out and reports whether all went well.
// refused, when not nil, matches the reasons for which no test may skip.
func run(in io.Reader, out io.Writer, refused *regexp.Regexp) (bool, error) {
	type key struct{ pkg, test string }
	output := map[key][]string{}   // of tests and packages that have not ended
	skips := map[string][]string{} // tests by reason
	passed, failed, skipped := 0, 0, 0
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
				skipped++
				why := reason(text)
				skips[why] = append(skips[why], e.Package+" "+e.Test)
			default:
				passed++
			}
		}
	}
	ok := failed == 0 && passed > 0
	for _, why := range slices.Sorted(maps.Keys(skips)) {
		tests, more := skips[why], ""
		if len(tests) > 3 {
			tests, more = tests[:3], fmt.Sprintf(" and %d more", len(tests)-3)
		}
		verdict := "skipped"
		if refused != nil && refused.MatchString(why) {
			verdict, ok = "must not skip", false
		}
		fmt.Fprintf(out, "%s: %s: %s%s\n", verdict, why, strings.Join(tests, ", "), more)
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	return ok, nil
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

var place = regexp.MustCompile(`^[a-zA-Z0-9_]+\.go:[0-9]+: `)

// reason is what a skipped test said, on one line, without where it said so.
func reason(text []string) string {
	var said []string
	for _, l := range text {
		l = place.ReplaceAllString(strings.TrimSpace(l), "")
		if l != "" && !strings.HasPrefix(l, "=== ") && !strings.HasPrefix(l, "--- ") {
			said = append(said, l)
		}
	}
	return strings.Join(said, " ")
}
