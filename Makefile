# Two commands do everything on a fresh machine with Python 3.11+, make and git:
#   make train   sets up .venv, then trains the default model for three minutes (make train ARGS="--minutes 10")
#   make test    sets up .venv, then runs the whole test suite
PYTHON ?= python3
ARGS ?=

.PHONY: train test check prove docs

train:
	@$(PYTHON) tools/bootstrap.py
	@.venv/bin/lapclip train $(ARGS)

test:
	@$(PYTHON) tools/bootstrap.py dev
	@.venv/bin/python -m pytest -n 2 --dist worksteal -m "not prove" $(ARGS)

# Before each commit: style, types and the fast tests.
check:
	@$(PYTHON) tools/bootstrap.py dev
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow and not prove" $(ARGS)

# The long proofs: many kills, a fresh install.
prove:
	@$(PYTHON) tools/bootstrap.py dev
	@.venv/bin/python -m pytest -m prove $(ARGS)

# The reference pages, generated from the code, and the documentation site in site/; a broken link is an error.
docs:
	@$(PYTHON) tools/bootstrap.py dev
	@.venv/bin/python tools/reference.py
	@.venv/bin/zensical build --strict --clean
