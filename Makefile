# fastrl: `make train` and `make test` set everything up in .venv and run. ARGS="..." passes flags on.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: help train test bench lint sanitize clean
.DELETE_ON_ERROR:

help:
	@echo "make train     train PPO on Pong; flags: make train ARGS=\"--env-id Breakout-v5 --total-timesteps 100000\""
	@echo "make test      run the tests; one of them: make test ARGS=\"tests/test_returns.py\"; learning runs: ARGS=\"-m slow\""
	@echo "make bench     run the benchmarks"
	@echo "make lint      check the Python style"
	@echo "make sanitize  run the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make clean     remove .venv and build leftovers; runs/ is kept"
	@echo "PYTHON=python3.12 chooses the interpreter (3.11 to 3.13)."

# Children write to the terminal and get Ctrl-C themselves; `exec` leaves no shell in between to die first.
train: .venv/installed
	@exec $(BIN)/python -m fastrl.ppo $(ARGS)

test: .venv/installed-test
	@exec $(BIN)/python -m pytest -m "not slow" $(ARGS)

bench: .venv/installed-bench
	@exec $(BIN)/python -m pytest bench --benchmark-only $(ARGS)

lint: .venv/installed-test
	@exec $(BIN)/ruff check . $(ARGS)

sanitize: .venv/installed-test
	@exec $(BIN)/python -m pytest tests/test_sanitizers.py $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .benchmarks .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An editable install: edits of Python files take effect at once, edits of these files reinstall.
SOURCES := pyproject.toml constraints.txt $(wildcard csrc/*)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit( \
	  "fastrl needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Choose another: make $(MAKECMDGOALS) PYTHON=python3.12" \
	  % sys.version_info[:2])'
	@echo "Creating .venv with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python $(SOURCES)
	@echo "Installing fastrl and its dependencies into .venv (the first time takes a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-test: .venv/bin/python $(SOURCES)
	@echo "Installing fastrl, its dependencies and the test tools into .venv (the first time takes a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch .venv/installed $@

.venv/installed-bench: .venv/bin/python $(SOURCES)
	@echo "Installing fastrl, its dependencies and the libraries it is measured against into .venv (a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,bench]"
	@touch .venv/installed .venv/installed-test $@
