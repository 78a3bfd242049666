# `make help` lists the targets. Everything happens in .venv, made by `make setup`.

PYTHON ?= python3
BIN := .venv/bin
DEMO_DATA := data/demo
DEMO_RUN := checkpoints/demo
DEMO_PAGE := page

# uv installs in seconds, but ignores pip's settings, so that the registry and the folders of wheels are read from
# pip here. Compiling to bytecode takes 10 s once, and halves every start where Python may not write bytecode
# (containers).
INDEX = $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2>/dev/null))
FIND_LINKS = $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
INSTALL = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(if $(INDEX),--default-index $(INDEX)) \
    -c constraints.txt $(if $(FIND_LINKS),--find-links $(FIND_LINKS))

# Three workers for two cores: while one waits, as for programs that it has started, the others compute. A module's tests,
# and what they share, stay with one of them until another has nothing to do. Rewritten asserts are kept for the next run:
# to rewrite them takes each worker 3 s.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

# Where the home folder cannot be written, as in some containers, uv's cache is beside what it installs.
ifneq ($(shell test -w "$(or $(XDG_CACHE_HOME),$(HOME))" || echo no),)
export UV_CACHE_DIR ?= $(CURDIR)/.venv/cache
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo page test test-fast test-system check stress bench parity record matrix

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: .venv/installed ## make .venv with everything, development included

# uv chooses torch's build for the GPU at hand, or the small CPU build. Where pip has folders of wheels, or uv cannot
# reach torch's own registry, the build is the default registry's.
.venv/installed: requirements.txt constraints.txt pyproject.toml
	@echo "installing everything into .venv: some minutes, most of them for torch"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	@if [ -n "$(FIND_LINKS)" ]; then $(INSTALL) -r requirements.txt --group dev; \
	else $(INSTALL) -r requirements.txt --group dev --torch-backend=auto || $(INSTALL) -r requirements.txt --group dev; fi
	@touch $@

demo: setup ## learn 4x4 Sudoku on two processes, from nothing to answers, in a minute or two; replaces checkpoints/demo
	rm -rf $(DEMO_RUN)
	$(BIN)/python -m dataset.build sudoku --output-dir $(DEMO_DATA) --box 2x2 --generate 4000 --num-test 1000 --num-aug 8
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 pretrain.py experiment=demo \
	    data_path=$(DEMO_DATA) checkpoint_path=$(DEMO_RUN)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 evaluate.py checkpoint=$(DEMO_RUN) \
	    output_dir=$(DEMO_RUN)/evaluation/demo save_outputs=[inputs,labels,preds] report=true
	$(BIN)/python solve.py checkpoint=$(DEMO_RUN) puzzle="1... ..2. .3.. ...4"
	@echo "how the model learned, and how it thinks: file://$(CURDIR)/$(DEMO_RUN)/report.html"

page: setup ## all models of weights/ on a page that runs them in a browser
	$(BIN)/python -m dataset.build arc --output-dir data/arc-mini --generate 40 --max-size 8 --dihedral
	OMP_NUM_THREADS=1 $(BIN)/python -m share page output=$(DEMO_PAGE)

test: setup ## all tests but test-system
	$(PYTEST) -n 4 --ignore tests/system  # many of the slow ones wait: for a timeout, a server, torchrun

test-fast: setup ## the tests that take tenths of a second each, in about one minute
	$(PYTEST) --ignore tests/system -m "not slow"

test-system: setup .venv/system ## the long tests, and those that need a browser, root, Slurm, sshd or packages; they skip, with the reason, without
	$(BIN)/python -m pytest tests/system  # one after the other: emulated machines and clusters need both cores

# What cannot be installed here is named, and its tests skip.
.venv/system: .venv/installed
	$(INSTALL) --group system && touch $@ || true

check: setup ## format, lint, test-fast
	$(BIN)/ruff format .
	$(BIN)/ruff check .
	$(PYTEST) --ignore tests/system -m "not slow"

stress: setup ## kills of ranks, for an hour, and damaged files: 80 minutes
	$(BIN)/python -m tests.stress.fuzz
	$(BIN)/python -m tests.stress.kills
	$(BIN)/python -m tests.stress.kills --minutes 60

parity: setup ## how far our numbers are from those of the public implementations
	$(BIN)/python -m tests.golden

record: setup ## run a rung of records/README.md again: make record RUNG=demo (SEEDS, FIRST_SEED, DTYPE=float32, FOLDER to keep the runs)
	$(BIN)/python -m records --rung $(or $(RUNG),demo) --seeds $(or $(SEEDS),3) \
	    --first-seed $(or $(FIRST_SEED),0) $(if $(DTYPE),--dtype $(DTYPE)) $(if $(FOLDER),--folder $(FOLDER)) \
	    $(if $(SOURCE),--source $(SOURCE))

matrix: setup ## the tests with other versions of Python and torch, each in a new environment: hours
	.ci/matrix

bench: setup ## every benchmark that needs neither hours nor root nor a GPU, in ten minutes
	@status=0; for words in "start --rounds 2" "optimizers --threads 1 --rounds 10" "parallel --rounds 5 --rows 300000" \
	    "checkpoint --rounds 2 --rows 300000" "dataset --rounds 2" "evaluation --rounds 2" "step --rounds 6"; do \
	    echo "python -m benchmarks.$$words"; timeout 600 $(BIN)/python -m benchmarks.$$words || status=1; done; exit $$status
