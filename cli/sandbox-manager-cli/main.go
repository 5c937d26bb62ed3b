// Command sandbox-manager-cli is the manager surface of the operation
// catalogue on the command line.
package main

import (
	"context"
	"os"

	"ephemeral-sandbox/cli/command"
	"ephemeral-sandbox/daemon/catalog"
)

func main() {
	os.Exit(command.Main(func(ctx context.Context, app command.App) int {
		return command.Surface(ctx, app, catalog.Manager)
	}))
}
