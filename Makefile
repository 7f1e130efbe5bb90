# Every target does its own set-up on a fresh Debian 12 or newer: packages are installed when they
# are missing, cargo fetches the pinned toolchain.
.DEFAULT_GOAL := help
.PHONY: help setup build test check fmt clippy doc pure links docs deny tests s3 long demo bench soak soak-vm walk fuzz install uninstall clean
SHELL := /bin/bash

STRATEGY ?= auto
MINUTES ?= 10
MDBOOK := 0.5.4
# One of so many pairs of faults in `make long`; 1 runs all of them.
PAIRS ?= 20
PREFIX ?= /usr/local
DESTDIR ?=
# The release binary; demo and bench use it.
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
DRAY := $(abspath $(TARGET_DIR))/release/dray
export STRATEGY MINUTES DRAY

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "  variables: STRATEGY=auto|pre-copy|post-copy|hybrid (demo), MINUTES=10 (soak, soak-vm, walk, fuzz), PREFIX, DESTDIR (install)"

setup: ## install the Debian packages that are missing
	@ci/setup.sh

build: setup ## the dray command, optimised
	cargo build --release --locked -p dray-cli --features s3

test: setup ## every check and every test; the last line counts them
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory tests

check: fmt clippy doc pure links deny ## everything of `make test` but the tests

fmt: ## formatting, as a check
	cargo fmt --all --check

clippy: ## lints, no warning allowed
	cargo clippy --workspace --all-targets --locked -- -D warnings

doc: ## the crates' documentation, no warning allowed
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --workspace --no-deps --locked --document-private-items --quiet

docs: ## the documentation as a site with search, in target/site
	@[ "$$(target/tools/bin/mdbook --version 2>/dev/null)" = "mdbook v$(MDBOOK)" ] || cargo install mdbook --version $(MDBOOK) --locked --no-default-features --features search --root target/tools
	target/tools/bin/mdbook build

links: ## links and file names in the documents
	@ci/links.py

pure: ## crate boundaries: the pure crates stay pure, dependencies point one way, no circle of modules
	@ci/pure.sh
	@ci/circles.py

deny: ## licences, banned crates and sources of all dependencies
	@ci/deny.sh

tests: ## the tests alone
	@ci/test.sh

s3: setup ## backups in an object store: lints, and tests against a server that it installs
	cargo clippy -p dray-backup -p dray-provider -p dray-agent -p dray-cli --all-targets --locked --features dray-cli/s3 -- -D warnings
	cargo test -p dray-backup --locked --features s3 --test s3
	DRAY_S3_SERVER=$$(ci/s3.sh) cargo test -p dray-cli --locked --features s3 --test disks buckets::

long: setup ## what make test has no time for: more virtual machines, more seeds, more power cuts, a walk
	cargo test --workspace --locked --test vm -- --ignored
	DRAY_WRONG=1 cargo test --locked -p dray-qemu --no-fail-fast --test qemu unsure -- --nocapture
	DRAY_KILL_ROUNDS=1 cargo test --workspace --locked --test disks any_agent_may_die
	DRAY_RESTARTS=100 cargo test --workspace --locked --test vm restarts -- --include-ignored --nocapture
	DRAY_SIM_COUNT=20000 cargo test --workspace --locked --test seeds many_seeds
	DRAY_SIM_COUNT=60 cargo test --workspace --locked --test seeds a_crash
	DRAY_POWER_COUNT=200 cargo test --workspace --locked --test power -- --nocapture
	DRAY_PAIRS=$(PAIRS) cargo test --release -p dray-migrate --locked --lib two_faults -- --nocapture
	@$(MAKE) --no-print-directory build
	PATH="$(dir $(DRAY)):$$PATH" ci/tutorial.py
	MINUTES=10 ci/walk.sh

demo: build ## move a running guest live between two hosts on this machine
	@demo/run.sh

bench: build ## dray against QEMU's own mirror, and the NBD server against others
	@bench/run.sh

soak: setup ## random migrations in the simulator for MINUTES
	@ci/soak.sh

soak-vm: setup ## a real guest moves to and fro for MINUTES while everything round it fails (root)
	@ci/soak-vm.sh

walk: setup ## VMs and images are moved, backed up, resized, started again at random for MINUTES
	@ci/walk.sh

fuzz: setup ## fuzz every parser of bytes from outside, MINUTES in all
	@ci/fuzz.sh

install: build ## binary, systemd unit, shell completions; an example configuration
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' ci/install.sh

uninstall: ## remove what install has put there; configuration, state and images stay
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' ci/uninstall.sh

clean: ## remove what was built
	cargo clean
