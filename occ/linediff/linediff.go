// Package linediff finds what changed between two texts, line by line. It is a
// leaf: the merge, the attribution of lines and the printed diffs all stand on
// its edit scripts, so that they agree with each other.
//
// The script is the one that git's default algorithm finds wherever texts do
// not repeat themselves much. Time and memory are bounded for any input: where
// the shortest script would cost too much, a longer one is given.
package linediff
