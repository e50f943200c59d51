# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := locks/engine-cpu.txt
STAMP := $(VENV)/.installed

.PHONY: demo test test-clients mini-swe-agent smollm2 lint docs install clean

demo: $(STAMP)
	$(BIN)/agentguard demo

# What starts no engine goes first, on two cores; then, alone on the machine, what does.
test: $(STAMP)
	$(BIN)/python -m pytest -m "not engine" --numprocesses 2 --dist loadfile
	$(BIN)/python -m pytest -m engine

# Claude Code, Codex, opencode, qwen-code (npm) and mini-swe-agent, into the user's cache, and the tests that run them.
test-clients: $(STAMP)
	$(BIN)/python -m tests.proxy.clients --npm
	$(BIN)/python -m tests.proxy.smollm2
	$(BIN)/python -m pytest -m clients

mini-swe-agent: $(STAMP)
	$(BIN)/python -m tests.proxy.clients

# The model that real agents talk to in the tests: the SmolLM2 target, 260 MB in the user's cache.
smollm2: $(STAMP)
	$(BIN)/python -m tests.proxy.smollm2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive agentguard engine_plugins
	$(BIN)/python -m agentguard.supply check

# The documentation as a site in build/site; a link that leads nowhere is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

install: $(STAMP)

# The stamp is written last: an interrupted or failed set-up is done again, a finished one is not.
$(STAMP): $(LOCK) locks/engine-cpu.hashes.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "agentguard needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) locks/hashed.py > $(VENV)/hashed.txt
	$(PYTHON) locks/hashed.py --rest > $(VENV)/rest.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $(VENV)/hashed.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $(VENV)/rest.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/agentguard doctor --generate
	@touch $@

clean:
	rm -rf $(VENV)
