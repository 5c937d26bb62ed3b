package main

import (
	"regexp"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	for _, c := range []struct {
		name, in, want string
		ok             bool
	}{
		{
			name: "all well, one skip",
			in: `{"Action":"start","Package":"p"}
{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    chatter\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestB","Output":"=== RUN   TestB\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"    b_test.go:3: no such kernel\n"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Output":"PASS\n"}
{"Action":"output","Package":"p","Output":"ok  \tp\t0.1s\n"}
{"Action":"pass","Package":"p"}
{"Action":"output","Package":"q","Output":"?   \tq\t[no test files]\n"}
{"Action":"skip","Package":"q"}
`,
			want: "ok  \tp\t0.1s\n?   \tq\t[no test files]\nskipped: no such kernel: p TestB\n1 passed, 0 failed, 1 skipped\n",
			ok:   true,
		},
		{
			name: "a failed test shows all it said",
			in: `{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestC","Output":"    c_test.go:9: got 1\n"}
{"Action":"output","Package":"p","Test":"TestC","Output":"--- FAIL: TestC\n"}
{"Action":"fail","Package":"p","Test":"TestC"}
{"Action":"output","Package":"p","Output":"FAIL\tp\t0.1s\n"}
{"Action":"fail","Package":"p"}
`,
			want: "    c_test.go:9: got 1\n--- FAIL: TestC\nFAIL\tp\t0.1s\n1 passed, 2 failed, 0 skipped\n",
		},
		{
			name: "what does not compile",
			in: `{"ImportPath":"p","Action":"build-output","Output":"x.go:1: oops\n"}
{"ImportPath":"p","Action":"build-fail"}
`,
			want: "x.go:1: oops\n0 passed, 1 failed, 0 skipped\n",
		},
		{name: "lines that are not events", in: "go: no such module\n", want: "go: no such module\n0 passed, 0 failed, 0 skipped\n"},
		{name: "nothing ran", want: "0 passed, 0 failed, 0 skipped\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			ok, err := run(strings.NewReader(c.in), &out, nil)
			if err != nil || ok != c.ok || out.String() != c.want {
				t.Errorf("ok %v, %v\n%swant ok %v\n%s", ok, err, out.String(), c.ok, c.want)
			}
		})
	}
}

func TestSkipsAreGroupedAndCanBeRefused(t *testing.T) {
	in := `{"Action":"pass","Package":"p","Test":"TestA"}` + "\n"
	for _, name := range []string{"T1", "T2", "T3", "T4", "T5"} {
		in += `{"Action":"output","Package":"p","Test":"` + name + `","Output":"    b_test.go:3: no device\n"}` + "\n" +
			`{"Action":"skip","Package":"p","Test":"` + name + `"}` + "\n"
	}
	for pattern, want := range map[string]string{
		"other":  "skipped: no device: p T1, p T2, p T3 and 2 more\n1 passed, 0 failed, 5 skipped\n",
		"no dev": "must not skip: no device: p T1, p T2, p T3 and 2 more\n1 passed, 0 failed, 5 skipped\n",
	} {
		var out strings.Builder
		ok, err := run(strings.NewReader(in), &out, regexp.MustCompile(pattern))
		if err != nil || ok != (pattern == "other") || out.String() != want {
			t.Errorf("%s: ok %v, %v\n%s", pattern, ok, err, out.String())
		}
	}
}
