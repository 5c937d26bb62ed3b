// Package checks holds the repository to its own rules: which package may
// import which, one comment a package, links that lead somewhere, no path of
// any one machine. It has tests only; "make lint" and "make test" run them.
package checks
