# Everything a person or CI does here is a target of this file; "make help"
# lists them. Nothing outside the checkout is changed: tools and intermediate
# files go to .cache, programs to bin.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS   += --no-builtin-rules

GO       ?= go
CACHE    := $(CURDIR)/.cache
TOOLS    := $(CACHE)/tools
PROGRAMS := sandboxd sandbox-manager-cli sandbox-runtime-cli sandbox-observability-cli
HOLDER   := daemon/holder/embedded/sandbox-holder

# Tools of "make lint", built into .cache/tools and never into go.mod.
GOFUMPT     := mvdan.cc/gofumpt@v0.12.0
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
DEADCODE    := golang.org/x/tools/cmd/deadcode@v0.52.0

# Packages whose tests mount the view. They run a second time on one scheduler
# thread, where some deadlocks show that two threads hide.
FUSETESTS := ./fs/fusefs/... ./daemon/holder/... ./daemon/session/... ./daemon

# The race detector needs a C compiler; without one the tests still run.
RACE := $(shell command -v $${CC:-gcc} >/dev/null 2>&1 && echo -race)

# How long each fuzz target runs: a duration, or a count such as 1000x.
FUZZTIME ?= 60s

# What "make demo" works on. Empty: a copy of this checkout.
DIR ?=

.DEFAULT_GOAL := build
.PHONY: build holder test gotest fusetest fuzz lint bench demo acceptance clean help tools

# The holder's program is embedded in whatever starts holders, so it comes before
# build and tests alike: an old one would speak another protocol.
holder:
	@CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags='-s -w' -o $(HOLDER) ./daemon/holder/sandbox-holder

## build: make bin/sandboxd and the three command-line tools
build: holder
	@mkdir -p bin
	@# A checkout that git refuses to describe (another owner's) still builds.
	@vcs=false; if git status --porcelain >/dev/null 2>&1; then vcs=auto; fi; \
	$(GO) build -trimpath -buildvcs=$$vcs -o bin/ $(PROGRAMS:%=./cli/%)
	@ls -l $(PROGRAMS:%=bin/%) | awk '{print $$NF ": " $$5 " bytes"}'

## test: run all tests with the race detector, the FUSE tests also on one thread, each fuzz target for seconds
test: gotest fusetest
	@$(MAKE) --no-print-directory fuzz FUZZTIME=2s

gotest: holder
	@[ -n "$(RACE)" ] || echo "no C compiler found: the race detector is off"
	$(GO) test $(RACE) -shuffle=on -timeout=10m -json ./... | $(GO) run ./docs/checks/testlog $(TESTLOGFLAGS)

fusetest: holder
	GOMAXPROCS=1 $(GO) test -count=1 -shuffle=on -timeout=10m -json $(FUSETESTS) | $(GO) run ./docs/checks/testlog $(TESTLOGFLAGS)

## fuzz: run every fuzz target for FUZZTIME (default 60s)
# The fuzzer may report its own time limit, reached between two inputs, as a
# failure; only a failing input, which it writes down, is one.
fuzz:
	@out=$$(mktemp); trap 'rm -f $$out' EXIT; targets=0; \
	while read -r file target; do \
		echo "fuzz $$(dirname $$file) $$target"; targets=$$((targets + 1)); \
		if $(GO) test -run='^$$' -fuzz="^$$target$$" -fuzztime=$(FUZZTIME) $$(dirname $$file) >$$out 2>&1; then \
			tail -n 1 $$out; \
		elif grep -q 'context deadline exceeded' $$out && ! grep -q 'Failing input written' $$out; then \
			echo "stopped at its time limit"; \
		else \
			cat $$out; exit 1; \
		fi; \
	done < <(grep -rHoE --include='*_test.go' --exclude-dir=.cache '^func Fuzz[A-Za-z0-9_]*' . | sed 's/:func / /'); \
	echo "$$targets fuzz targets ran"; [ $$targets -gt 0 ]

## lint: formatting, module files, vet, staticcheck, dead code, and the repository's own rules
lint: tools
	@files=$$(git ls-files -co --exclude-standard '*.go' | xargs $(TOOLS)/gofumpt -l); \
	if [ -n "$$files" ]; then echo "gofumpt would change:" $$files; exit 1; fi
	$(GO) mod tidy -diff
	$(GO) vet ./...
	$(TOOLS)/staticcheck ./...
	@dead=$$($(TOOLS)/deadcode -test ./...); if [ -n "$$dead" ]; then echo "$$dead"; exit 1; fi
	$(GO) test -count=1 ./docs/checks

tools: $(TOOLS)/gofumpt $(TOOLS)/staticcheck $(TOOLS)/deadcode

# A tool is built again when its pinned version changes.
$(TOOLS)/gofumpt: Makefile
	GOFLAGS= GOBIN=$(TOOLS) $(GO) install $(GOFUMPT)
	@touch $@
$(TOOLS)/staticcheck: Makefile
	GOFLAGS= GOBIN=$(TOOLS) $(GO) install $(STATICCHECK)
	@touch $@
$(TOOLS)/deadcode: Makefile
	GOFLAGS= GOBIN=$(TOOLS) $(GO) install $(DEADCODE)
	@touch $@

## bench: measure import, session start and publish beside kernel overlayfs; table, and JSON in .cache/bench.json
bench: build
	@$(GO) build -trimpath -o $(CACHE)/bench ./bench
	@$(CACHE)/bench --bin bin --json $(CACHE)/bench.json $(BENCHFLAGS)

## demo: three sessions on one repository, end to end; DIR=/path/to/repository, default a copy of this one
demo: build
	@$(GO) build -trimpath -o $(CACHE)/demo ./bench/demo
	@exec $(CACHE)/demo --bin bin $(if $(DIR),--dir $(DIR))

## acceptance: 64 sessions at once, 200 kills of the daemon, toolchains in a session
acceptance: build
	@$(GO) build -trimpath -o $(CACHE)/acceptance ./bench/acceptance
	@exec $(CACHE)/acceptance --bin bin $(ACCEPTANCEFLAGS)

## clean: remove what the other targets made
clean:
	rm -rf bin $(CACHE) $(HOLDER)

## help: list the targets
help:
	@sed -n 's/^## \([a-z]*\): /\1|/p' Makefile | awk -F'|' '{printf "  make %-11s %s\n", $$1, $$2}'
