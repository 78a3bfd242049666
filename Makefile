# `make help` lists the targets. `make setup` creates .venv, and all targets run in it.

PYTHON ?= python3
BIN := .venv/bin
DEMO_DATA := data/demo
DEMO_RUN := checkpoints/demo
DEMO_PAGE := page

# uv installs in seconds but ignores the settings of pip. Read the registry and the folders of wheels from pip here.
# Compiling to bytecode takes 10 s once. It halves every start if Python cannot write bytecode (containers).
INDEX = $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2>/dev/null))
FIND_LINKS = $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
INSTALL = $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(if $(INDEX),--default-index $(INDEX)) \
    -c constraints.txt $(if $(FIND_LINKS),--find-links $(FIND_LINKS))

# Two workers for two cores: fast tests seldom wait, and a worker imports for 5 s. The tests of a module and their fixtures
# stay on one worker until another worker is idle. Rewritten asserts are stored for the next run, because rewriting takes
# 3 s per worker.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

# If the home folder is not writable, as in some containers, put the cache of uv into .venv.
ifneq ($(shell test -w "$(or $(XDG_CACHE_HOME),$(HOME))" || echo no),)
export UV_CACHE_DIR ?= $(CURDIR)/.venv/cache
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo page notebook test test-fast test-system check stress bench parity record matrix

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: .venv/installed ## create .venv with all packages, including those for development

# uv chooses the build of torch for the GPU, or the small CPU build. If pip has folders of wheels, or if uv cannot reach
# the registry of torch, the build comes from the default registry.
.venv/installed: requirements.txt constraints.txt pyproject.toml
	@echo "installing packages into .venv. This takes some minutes, most of them for torch."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	@if [ -n "$(FIND_LINKS)" ]; then $(INSTALL) -r requirements.txt --group dev; \
	else $(INSTALL) -r requirements.txt --group dev --torch-backend=auto || $(INSTALL) -r requirements.txt --group dev; fi
	@touch $@

demo: setup ## build 4x4 Sudoku, train on two processes, evaluate and solve, in 1 to 2 minutes; replaces checkpoints/demo
	rm -rf $(DEMO_RUN)
	$(BIN)/python -m dataset.build sudoku --output-dir $(DEMO_DATA) --box 2x2 --generate 4000 --num-test 1000 --num-aug 8
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 pretrain.py experiment=demo \
	    data_path=$(DEMO_DATA) checkpoint_path=$(DEMO_RUN)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 evaluate.py checkpoint=$(DEMO_RUN) \
	    output_dir=$(DEMO_RUN)/evaluation/demo save_outputs=[inputs,labels,preds] report=true
	$(BIN)/python solve.py checkpoint=$(DEMO_RUN) puzzle="1... ..2. .3.. ...4"
	@echo "report with learning curves and solved puzzles: file://$(CURDIR)/$(DEMO_RUN)/report.html"

page: setup ## write a web page with all models of weights/, and open it in the browser
	$(BIN)/python -m dataset.build arc --output-dir data/arc-mini --generate 40 --max-size 8 --dihedral
	OMP_NUM_THREADS=1 $(BIN)/python -m share page output=$(DEMO_PAGE)
	@if [ -t 1 ]; then $(BIN)/python -m share open $(DEMO_PAGE); fi

notebook: setup ## open docs/quickstart.ipynb in the browser; installs Jupyter
	$(INSTALL) --group notebook
	$(BIN)/jupyter notebook docs/quickstart.ipynb

test: setup ## all tests except test-system
	$(PYTEST) -n 3 --ignore tests/system -m "not long"  # many of the slow ones wait: for a timeout, a server, torchrun

test-fast: setup ## the fast tests, in about one minute
	$(PYTEST) --ignore tests/system -m "not slow"

test-system: setup .venv/system ## long tests, and tests that need a browser, root, Slurm, sshd or packages; skipped, with the reason, if missing
	$(PYTEST) --ignore tests/system -m long
	$(BIN)/python -m pytest tests/system  # without workers: emulated machines and clusters need both cores

# If a package cannot be installed, its tests skip.
.venv/system: .venv/installed
	$(INSTALL) --group system && touch $@ || true

check: setup ## format, lint, test-fast
	$(BIN)/ruff format .
	$(BIN)/ruff check .
	$(PYTEST) --ignore tests/system -m "not slow"

stress: setup ## kill ranks and damage files at random, for 80 minutes
	$(BIN)/python -m tests.stress.fuzz
	$(BIN)/python -m tests.stress.kills
	$(BIN)/python -m tests.stress.kills --minutes 60

parity: setup ## print the differences to the public implementations
	$(BIN)/python -m tests.golden

record: setup ## rerun a task of records/README.md: make record RUNG=demo (SEEDS, FIRST_SEED, DTYPE=float32, SOURCE, FOLDER to keep runs)
	$(BIN)/python -m records --rung $(or $(RUNG),demo) --seeds $(or $(SEEDS),3) \
	    --first-seed $(or $(FIRST_SEED),0) $(if $(DTYPE),--dtype $(DTYPE)) $(if $(FOLDER),--folder $(FOLDER)) \
	    $(if $(SOURCE),--source $(SOURCE))

matrix: setup ## run the tests with other versions of Python and torch, in new environments, for hours
	.ci/matrix

bench: setup ## all short benchmarks that need neither root nor a GPU, in ten minutes
	@status=0; for words in "start --rounds 2" "optimizers --threads 1 --rounds 10" "exchange --rounds 5" \
	    "scaling --rounds 5" "memory --rows 300000" "layout --processes 2" \
	    "checkpoint --rounds 2 --rows 300000" "dataset --rounds 2" "evaluation --rounds 2" "step --rounds 6"; do \
	    echo "python -m benchmarks.$$words"; timeout 600 $(BIN)/python -m benchmarks.$$words || status=1; done; exit $$status
