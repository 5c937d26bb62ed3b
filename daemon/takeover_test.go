package daemon_test

import "os"

const childVar = "DAEMON_TEST_STATE"

func childMain(string) { os.Exit(1) }
