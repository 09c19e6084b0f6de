# Each target runs the setup that it needs. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Settings, for the command line or the environment: make setup PYTHON=python3.12
PYTHON ?= python3
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
MUTATE_ARGS ?=
IMAGE_BUILD ?= docker build -t

TORCH := torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PARTS := $(wildcard holdfast supervisor sidecar nodeagent trainer)
# The unit tests run in two processes with half of the tests each. In a single parallel run, every worker would collect all
# tests. The torch tests are separate, because importing torch takes longer than a thousand other tests.
KERNEL := tests/unit/nodeagent/kernel
UNIT := tests/unit/holdfast tests/unit/nodeagent --ignore=$(KERNEL)
OTHER_UNIT := $(filter-out $(UNIT) %/__init__.py %/__pycache__,$(wildcard tests/unit/*)) $(KERNEL)
# The other tests run in three processes that take about the same time. They mostly wait, so two processes would leave
# half a core idle.
BROKEN_RUNS := tests/local/recovery tests/local/detection tests/local/own_parts tests/local/supervisors
SCRIPTS := tests/local/loops tests/healthy tests/crash
OTHER_RUNS := $(filter-out $(BROKEN_RUNS) $(SCRIPTS),$(patsubst %/__init__.py,%,$(wildcard tests/local/*/__init__.py))) \
    tests/simulation
# The cluster tests of the Kubernetes API mostly wait, and do not need Holdfast to be installed.
CLUSTER_API := tests/cluster/api
CLUSTER_NODES := tests/cluster/nodes
# If PYTEST_ARGS selects tests, one of the two runs may have none of them; pytest then exits with code 5.
NONE_CHOSEN = $(if $(PYTEST_ARGS),|| test $$? -eq 5)
TYPED := $(PARTS) $(wildcard bench tests) hatch_build.py

say = printf '==> %s\n'

# The environment records the tree in which it was made, because it stops working if the
# tree is moved or its Python is removed.
MADE := $(VENV)/.made-in
STAMP := $(VENV)/.ready
ifneq ($(shell $(BIN)/python -c '' 2>/dev/null && cat $(MADE) 2>/dev/null),$(CURDIR))
$(MADE): again
endif

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Settings: PYTHON=python3.12  TORCH_PIP_ARGS="--index-url ..."  PYTEST_ARGS="-k hang"  DEMO_ARGS  BENCH_ARGS'

.PHONY: setup
setup: $(STAMP) ## create .venv with everything in it

# Finds a Python that the project supports: the one in PYTHON if it is set, otherwise the newest one installed.
define find_python
	for candidate in $(PYTHON) $(if $(filter file default,$(origin PYTHON)),python3.13 python3.12 python3.11 python3.10); do \
	    if "$$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	done; \
	if [ -z "$${python:-}" ]; then \
	    echo "setup: $(PYTHON) is not Python 3.10 to 3.13; specify one: make setup PYTHON=python3.12" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "setup: $$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	    exit 1; \
	fi
endef

$(MADE):
	@if [ -L $(VENV) ]; then \
	    echo "setup: $(VENV) is a symbolic link; remove it, because the setup would empty another tree's environment" >&2; exit 1; \
	fi
	@$(find_python); \
	$(say) "$(VENV): $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)
	@printf '%s' '$(CURDIR)' > $@

# Without an NVIDIA device, the CPU build is tried first, because it saves gigabytes. If the index lacks
# the CPU build, the plain release is installed.
$(STAMP): $(MADE) pyproject.toml hatch_build.py
	@pip="$(BIN)/python -m pip --disable-pip-version-check --no-input install -qq --root-user-action=ignore"; \
	builds="$(TORCH)"; \
	if [ ! -e /dev/nvidiactl ] && [ -z "$(TORCH_PIP_ARGS)" ]; then builds="$(TORCH)+cpu $(TORCH)"; fi; \
	for build in $$builds; do \
	    $(say) "$$build (the first time, this downloads 0.2 GB for a CPU build, 3 GB with CUDA)"; \
	    if [ "$$build" = "$${builds##* }" ]; then $$pip $(TORCH_PIP_ARGS) "$$build"; break; fi; \
	    if $$pip "$$build" 2>/dev/null; then break; fi; \
	    $(say) "the package index has no CPU build"; \
	done; \
	$(say) "holdfast, its dependencies and its tools"; \
	$$pip --editable '.[torch,vision,cluster,objects,dev]'
	@# Collecting the unit tests compiles them, as pip compiles packages; running `any_text` builds Hypothesis's tables.
	@$(BIN)/python -m pytest -qq tests/unit -k any_text >/dev/null || true
	@touch $@
	@$(say) "ready: $(BIN)/holdfast"

.PHONY: again
again:

# Runs pytest on each of $(1), $(2) and $(3) (which may be empty) concurrently, with the options $(4). Prints the
# output of the first while it runs, and then that of the others.
define at_once
logs=$$(mktemp -d); others=(); \
trap 'kill "$${others[@]}"; rm -rf "$$logs"; exit 130' INT TERM; \
run() { $(BIN)/python -m pytest "$$@" $(4) $(PYTEST_ARGS) $(NONE_CHOSEN); }; \
run $(2) >"$$logs/2" 2>&1 & others+=($$!); \
$(if $(strip $(3)),run $(3) >"$$logs/3" 2>&1 & others+=($$!);) \
status=0; run $(1) || status=$$?; \
for other in "$${others[@]}"; do wait "$$other" || status=$$?; done; \
cat "$$logs"/*; rm -rf "$$logs"; exit $$status
endef

# pytest caches rewritten tests only if Python writes bytecode; rewriting them on each run takes seconds.
setup test unit check cluster: export PYTHONDONTWRITEBYTECODE :=

.PHONY: test
test: setup ## run all tests; cluster tests only if KUBECONFIG names a cluster (PYTEST_ARGS="-k hang -x")
	@$(say) "unit tests and torch tests, in two processes"
	@$(call at_once,$(UNIT) tests/torch tests/docs tests/gpu,$(OTHER_UNIT),,--hypothesis-profile=thorough)
	@$(say) "crashes of writers, simulated runs, local tests, in three processes"
	@$(call at_once,$(BROKEN_RUNS),$(SCRIPTS),$(OTHER_RUNS),--hypothesis-profile=thorough)
	@if [ -z "$${KUBECONFIG:-}" ]; then $(say) "skipped: tests/cluster, because KUBECONFIG does not name a cluster"; \
	elif ! kubectl get --raw=/readyz --request-timeout=10s >/dev/null 2>&1; then \
	    $(say) "skipped: tests/cluster, because the cluster in $$KUBECONFIG does not respond"; \
	else $(MAKE) --no-print-directory cluster; fi

.PHONY: moto
moto: setup ## run the object storage tests, including those on moto's S3 server (downloads 30 MB the first time)
	@[ -x $(VENV)/moto/bin/moto_server ] || { $(BIN)/python -m venv $(VENV)/moto \
	    && $(VENV)/moto/bin/python -m pip install -qq --root-user-action=ignore '.[moto]'; }
	@$(BIN)/python -m pytest tests/unit/sidecar/storage $(PYTEST_ARGS)

.PHONY: extras
extras: setup ## run the unmodified training loops of transformers and Lightning under holdfast
	@$(say) "transformers and Lightning (the first time, this downloads 0.1 GB)"
	@$(BIN)/python -m pip --disable-pip-version-check --no-input install -qq --root-user-action=ignore --editable '.[extras]'
	@$(BIN)/python -m pytest tests/extras $(PYTEST_ARGS)

.PHONY: unit
unit: setup ## run the unit tests, in two processes
	@$(say) "unit tests"
	@$(call at_once,$(UNIT),$(OTHER_UNIT))

.PHONY: lint
lint: setup ## check format, style, types, layers and alert rules
	@$(say) "ruff"
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m ruff check .
	@$(say) "mypy --strict"
	@$(BIN)/python -m mypy --strict $(TYPED)
	@$(say) "import-linter"
	@$(BIN)/lint-imports
	@rules="$(filter-out %_test.yaml,$(wildcard manifests/*rules*.yaml))"; \
	if command -v promtool >/dev/null; then \
	    $(say) "promtool"; \
	    promtool check rules $$rules; \
	    promtool test rules $(wildcard manifests/*rules*_test.yaml); \
	else \
	    $(say) "skipped: the tests of the alert rules, because promtool is not installed (Debian package: prometheus)"; \
	fi

.PHONY: check
check: lint unit ## run the linters, the unit tests, and the torch and docs tests
	@$(say) "torch and docs tests"
	@$(BIN)/python -m pytest tests/torch tests/docs $(PYTEST_ARGS) $(NONE_CHOSEN)

.PHONY: gpu
gpu: setup ## run the tests that need an NVIDIA GPU; they are skipped without one
	@$(BIN)/python -m pytest tests/gpu -rs $(PYTEST_ARGS)

.PHONY: mutate
mutate: setup ## mutate the pure modules and report the mutations that no test detects; takes hours without MUTATE_ARGS="--sample 500"
	@[ -x $(BIN)/mutmut ] || $(BIN)/python -m pip --disable-pip-version-check --no-input install -qq \
	    --root-user-action=ignore -e '.[mutate]'
	@$(BIN)/python -m bench mutation $(MUTATE_ARGS)

.PHONY: format
format: setup ## format the code with ruff
	@$(BIN)/python -m ruff format .
	@$(BIN)/python -m ruff check --fix .

.PHONY: demo
demo: setup ## train a small GPT and break it nine times
	@$(BIN)/holdfast demo $(DEMO_ARGS)

.PHONY: demo-quick
demo-quick: setup ## run a demo that takes a minute or less: three faults, equal weights
	@$(BIN)/holdfast demo --quick $(DEMO_ARGS)

.PHONY: demo-cluster
demo-cluster: setup ## run the demo on the Kubernetes cluster in KUBECONFIG: six faults; with IMAGE_BUILD, build the images first
	@$(if $(filter-out file default,$(origin IMAGE_BUILD)),$(MAKE) --no-print-directory images)
	@$(BIN)/holdfast demo --cluster $(DEMO_ARGS)

.PHONY: bench
bench: setup ## measure recovery and compare it with torchrun (BENCH_ARGS)
	@$(BIN)/python -m bench recovery $(BENCH_ARGS)

.PHONY: picture
picture: setup ## draw docs/recovery.svg from a run under holdfast and a run under torchrun
	@$(BIN)/python -m bench picture $(BENCH_ARGS)

.PHONY: images
images: ## build the images holdfast:dev and holdfast-trainer:dev (IMAGE_BUILD="docker build -t")
	@$(IMAGE_BUILD) holdfast:dev -f images/Dockerfile .
	@$(IMAGE_BUILD) holdfast-trainer:dev -f images/Dockerfile.trainer .

.PHONY: cluster
cluster: setup ## run the tests that need a Kubernetes cluster: KUBECONFIG, HOLDFAST_IMAGE_BUILD
	@$(say) "tests on the cluster of $${KUBECONFIG:-(KUBECONFIG is not set)}, in two processes"
	@$(call at_once,tests/cluster --ignore=$(CLUSTER_API) --ignore=$(CLUSTER_NODES),$(CLUSTER_API),,-rs)

.PHONY: cluster-nodes
cluster-nodes: setup ## run the cluster tests that kill, cut off and drain nodes; too long for CI: HOLDFAST_NODE_KILL, ...
	@$(BIN)/python -m pytest $(CLUSTER_NODES) -rs $(PYTEST_ARGS)

.PHONY: chaos
chaos: setup ## inject all kinds of faults at random on the cluster in KUBECONFIG for an hour (CHAOS_ARGS="--minutes 5 --seed 3")
	@$(BIN)/python -m bench chaos $(CHAOS_ARGS)

.PHONY: wheel
wheel: setup ## build the source distribution, and from it the wheel, into dist/
	@$(BIN)/python -m build --no-isolation --outdir dist .

.PHONY: clean
clean: ## remove builds and caches
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean ## remove builds, caches and .venv
	@rm -rf $(VENV) .editable
