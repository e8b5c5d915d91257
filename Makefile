# Everything sets itself up: the two commands of the README are `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint setup setup-test system-packages clean

demo: setup
	$(BIN)/trainarchive demo --home trainarchive-demo

test: system-packages setup-test lint
	$(BIN)/pytest -n 2 --dist loadgroup

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if command -v shellcheck >/dev/null; then shellcheck slurm/*.d/*.sh .ci/run; else echo "shellcheck is not there: hooks not linted"; fi

setup: $(VENV)/.installed
setup-test: $(VENV)/.installed-test

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@ $(VENV)/.installed

# What the tests use of the system: a redis-server of its own kind beside the embedded one, zstd's command, shellcheck.
system-packages:
	@missing=; \
	for pair in redis-server:redis-server zstd:zstd shellcheck:shellcheck; do \
	  command -v $${pair%%:*} >/dev/null || missing="$$missing $${pair##*:}"; \
	done; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing:$$missing"; \
	    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y $$missing >/dev/null; \
	  else echo "please install:$$missing (as root: apt-get install$$missing)"; exit 1; fi; \
	fi

clean:
	rm -rf $(VENV) trainarchive-demo
