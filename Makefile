# What people and CI call. `make help` lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
THAW := $(TARGET)/release/thaw
# What `make static` builds for.
MUSL := x86_64-unknown-linux-musl
# What `make run` builds: small ones, one for each language.
EXAMPLES := hello-c hello-c-dynamic hello-python thumbnail-python \
	hello-node hello-java hello-go hello-ruby hello-php words-perl
# What `make examples` builds besides: frameworks and FunctionBench.
MORE_EXAMPLES := hello-nginx flask-python fastapi-python grpc-python express-node sinatra-ruby \
	spring-java javalin-java browser-node redis postgresql code-interpreter \
	$(patsubst examples/%/thaw.toml,%,$(wildcard examples/functionbench/*/thaw.toml))
# Measured by `make bench`.
BENCHED := hello-c hello-c-dynamic hello-python thumbnail-python

PREFIX ?= /usr/local
# Where the files of a package are put together; nothing otherwise.
DESTDIR ?=

.PHONY: help setup build static static-test install uninstall deb run test ci check all-tests unit e2e examples runtimes bench bench-check stress \
	fuzz miri conformance chaos \
	soak clean

help: ## Show what there is to make
	@echo "Thaw: sandboxes that start in well under a millisecond"
	@echo
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 19

setup: ## Install what is missing (Debian packages)
	@scripts/setup

build: setup ## Build target/release/thaw
	@scripts/say "Building thaw"
	$(CARGO) build --release --locked -p thaw-cli

static: ## Build one binary that needs no libraries of the host, with musl
	@scripts/setup static
	@scripts/say "Building thaw with musl"
	$(CARGO) build --release --locked -p thaw-cli --target $(MUSL)
	@echo "$(TARGET)/$(MUSL)/release/thaw"

static-test: static ## Run the end-to-end tests with that binary
	@scripts/say "Building and running the end-to-end tests"
	@THAW_BIN=$(abspath $(TARGET)/$(MUSL)/release/thaw) CARGO_INCREMENTAL=0 CARGO="$(CARGO)" scripts/run-tests e2e

install: build ## Install the binary, manual pages, completions and units (PREFIX=/usr/local)
	@scripts/say "Installing below $(DESTDIR)$(PREFIX)"
	@THAW=$(abspath $(THAW)) DESTDIR=$(DESTDIR) scripts/install-thaw $(abspath $(PREFIX))

uninstall: ## Remove what `make install` has installed (PREFIX=/usr/local)
	@scripts/say "Removing Thaw below $(DESTDIR)$(PREFIX)"
	@DESTDIR=$(DESTDIR) scripts/install-thaw $(abspath $(PREFIX)) --remove

deb: build ## Build a Debian package below target/debian
	@scripts/say "Building a Debian package"
	scripts/make-deb

run: build ## Build the examples, serve them, call each once, keep serving
	@THAW=$(abspath $(THAW)) scripts/run-examples $(EXAMPLES)

# Tests that cannot be made here add a line to this file.
export THAW_SKIPPED := $(abspath $(TARGET))/skipped-tests

test: forget-skipped check all-tests ## Run every test
	@scripts/say "$$(wc -l < $(THAW_SKIPPED)) tests were skipped"
	@cat $(THAW_SKIPPED)

.PHONY: forget-skipped
forget-skipped:
	@mkdir -p $(dir $(THAW_SKIPPED)) && : > $(THAW_SKIPPED)

ci: test ## Run every test, then those that need every runtime and tool
	@$(MAKE) runtimes RUNTIME_TESTS=--ignored

check: setup
	@scripts/say "Checking the style"
	$(CARGO) fmt --all --check
	@scripts/say "Linting"
	CARGO_INCREMENTAL=0 $(CARGO) clippy --locked --workspace --all-targets -- -D warnings

# Tests are built in the dev profile: cargo cannot use the release build's crates for them
# (tests unwind, the product aborts), and without optimization they take a third of the time.
# One command selects all of them, since another selection has other features of dependencies
# and compiles them again. The end-to-end tests run the release build.
all-tests: build
	@scripts/say "Building and running the tests"
	@THAW_BIN=$(abspath $(THAW)) CARGO_INCREMENTAL=0 CARGO="$(CARGO)" scripts/run-tests

unit: setup
	@scripts/say "Running the unit tests"
	$(CARGO) test --locked --workspace --exclude thaw-e2e

e2e: build
	@scripts/say "Running the end-to-end tests"
	THAW_BIN=$(abspath $(THAW)) $(CARGO) test --locked -p thaw-e2e --no-fail-fast

examples: build ## Build all examples, the large ones too (installs npm, maven, nginx, …)
	@scripts/setup runtimes
	@THAW=$(abspath $(THAW)) ONCE=1 scripts/run-examples $(EXAMPLES) $(MORE_EXAMPLES)

# `make ci` has run those that are not ignored.
RUNTIME_TESTS ?= --include-ignored
runtimes: build ## Test every runtime and tool that docs/runtimes.md lists
	@scripts/setup runtimes
	@scripts/say "Testing every runtime"
	@THAW_BIN=$(abspath $(THAW)) CARGO_INCREMENTAL=0 CARGO="$(CARGO)" scripts/run-tests \
		e2e/runtimes e2e/functions e2e/entry e2e/copies e2e/e2b -- $(RUNTIME_TESTS)

bench: build ## Measure boots of the examples, at scale and by technique
	@THAW=$(abspath $(THAW)) scripts/bench $(BENCHED)

bench-check: build ## Compare performance with bench/bounds.toml, on a machine that does nothing else
	@scripts/setup bench
	@THAW=$(abspath $(THAW)) scripts/bench-check

stress: build ## Run stress-ng's stressors in sandboxes (DURATION=20 seconds each)
	@scripts/setup stress
	@THAW=$(abspath $(THAW)) scripts/stress $(STRESSORS)

fuzz: build ## Fuzz the parsers and the kernel (SECONDS_EACH=60 for each of the targets)
	@THAW=$(abspath $(THAW)) scripts/fuzz all $(SECONDS_EACH)

miri: ## Run the tests of memory and codecs in Miri (takes a nightly toolchain)
	@CARGO_TARGET_DIR=$(abspath $(TARGET)) scripts/miri $(PART)

.PHONY: ltp
ltp: build ## Run the tests of the Linux Test Project in sandboxes
	@scripts/setup ltp
	@THAW=$(abspath $(THAW)) scripts/ltp $(SUITES)

conformance: build ## Run Go's and CPython's own tests, natively and in sandboxes
	@scripts/setup conformance
	@THAW=$(abspath $(THAW)) scripts/conformance $(SUITES)

chaos: build ## Kill the daemon's processes at random under load (KILLS=10000)
	@THAW_BIN=$(abspath $(THAW)) CARGO="$(CARGO)" scripts/chaos $(KILLS)

soak: build ## Serve at saturation and check that nothing grows (MINUTES=30)
	@THAW=$(abspath $(THAW)) scripts/soak $(MINUTES)

clean: ## Remove everything that was built
	$(CARGO) clean
	rm -rf .thaw examples/*/build examples/functionbench/*/build
