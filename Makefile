# make demo | test | lint | bench | figures | asan | tsan: each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
CORE_SOURCES := $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.def')
STUBS := windlass/_core.pyi windlass/bench/_native.pyi
PACKAGES := $(shell find windlass -name __init__.py)
CXX_FILES := $(shell find csrc -name '*.cc' -o -name '*.h')
APPS := mf fm pagerank kmeans gbdt sparse_lr
RELEASE := build/release
JOBS ?= $(shell nproc)
TEST_JOBS ?= $(shell expr $(JOBS) \* 2)
UNITY ?= ON # OFF: file by file, for who changes the core again and again
unexport PYTHONDONTWRITEBYTECODE # a test run starts hundreds of processes, and each would compile what it imports

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-core test-python test-s3 test-engines test-ray test-kubernetes test-slurm apps apps-long lint format stubs reference bench figures asan tsan asan-short tsan-short core-tested check-core asan-short-built tsan-short-built installed clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 20

$(VENV)/tools: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) scikit-build-core nanobind cmake ninja numpy
	touch $@

$(VENV)/base: $(VENV)/tools
	$(PIP) torch==2.13.0
	$(PIP) msgspec aiohttp typer rich prometheus-client safetensors fsspec \
	  pytest pytest-timeout pytest-xdist hypothesis ml_dtypes scikit-learn scipy matplotlib numba ruff mypy clang-format
	touch $@

$(VENV)/built: $(VENV)/tools CMakeLists.txt $(CORE_SOURCES) $(PACKAGES) # an editable install knows packages by name
	$(PIP) --no-build-isolation --no-deps --config-settings=build-dir=$(RELEASE) \
	  --config-settings=cmake.define.WINDLASS_UNITY=$(strip $(UNITY)) --editable .
	touch $@

# pytest(OPTIONS): tests beside each other, more of them than cores since many wait; then those that must be alone.
define pytest
	$(BIN)/python -m pytest -q tests $(1) -m "not alone" --numprocesses $(TEST_JOBS) --dist loadgroup --durations 20
	$(BIN)/python -m pytest -q $(shell grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests) $(1) -m alone --durations 5
endef

# stubgen(STUB, FILE): writes what the stub of a native module should be.
stubgen = $(BIN)/python -m nanobind.stubgen -q -m $(subst /,.,$(basename $(1))) -o $(2)

setup: ## a virtual environment with windlass built in place
	@$(MAKE) --no-print-directory --jobs 2 installed

installed: $(VENV)/base $(VENV)/built # beside each other: the core is compiled while torch is unpacked
	@:

demo: setup ## train a network on MNIST with 2 servers and 2 workers, compare the policies, kill and resume
	$(BIN)/windlass run --progress --servers 2 --workers 2 apps/mnist/train.py
	$(BIN)/python apps/mnist/compare.py --ways bsp ssp:3 asp --samples 30000 --plot build/mnist.png
	$(BIN)/python apps/mnist/resume.py --samples 20000

test: test-core test-python ## all tests

test-python: setup ## those in Python
	$(call pytest,)

test-all: setup ## all tests, each in its long form and with all its cases; hours
	$(BIN)/cmake --build $(RELEASE) --target core_test --parallel $(JOBS)
	$(RELEASE)/core_test --accurate
	$(call pytest,--accurate)

# Apart from the others: what S3's clients are made of cannot be installed beside the versions in constraints.txt.
test-s3: setup ## checkpoints on S3, against moto's server
	test -e build/s3/moto || $(BIN)/pip install --quiet --disable-pip-version-check --target build/s3 s3fs moto flask flask-cors
	PYTHONPATH=build/s3 $(BIN)/python -m pytest -q tests/checkpoint/test_s3.py

apps: setup ## each app beside its reference in a short form, in one table
	$(BIN)/python apps/table.py

apps-long: setup ## the same on their own data, in long form; minutes, with downloads
	$(BIN)/python apps/table.py --long

test-engines: test-ray test-slurm test-kubernetes ## on all engines

# Apart from the others, for what Ray is made of. With LONG=1 in the long form.
test-ray: setup ## on Ray, with two nodes on this machine
	test -e build/ray/ray || $(PIP) --no-compile --target build/ray 'ray[default]'
	PYTHONPATH=build/ray $(BIN)/python -m pytest -q tests/engines/test_ray.py $(if $(LONG),--accurate)

# Apart from the others, too: nobody else needs these packages. With LONG=1 in the long form.
test-kubernetes: setup ## what `windlass kubernetes` prints, by Kubernetes' schemas and as processes; Dask
	test -e build/kubernetes/kubernetes_validate || $(BIN)/pip install --quiet --disable-pip-version-check --target build/kubernetes kubernetes-validate
	test -e build/dask/distributed || $(BIN)/pip install --quiet --disable-pip-version-check --target build/dask distributed
	PYTHONPATH=build/kubernetes:build/dask $(BIN)/python -m pytest -q tests/launch/test_kubernetes.py tests/engines/test_pods.py tests/engines/test_dask.py $(if $(LONG),--accurate)

# Slurm and Open MPI are no Python packages: Debian's are installed where they are missing, which takes root. With LONG=1
# in the long form.
SLURM_PACKAGES := slurm-wlm munge openmpi-bin
test-slurm: setup ## `windlass join` under Slurm and Open MPI on this host
	{ command -v slurmctld && command -v slurmd && command -v munged && command -v mpirun; } >/dev/null \
	  || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES); } >build/slurm.log 2>&1 \
	  || { tail build/slurm.log; echo "make test-slurm: cannot install Debian's packages $(SLURM_PACKAGES)"; exit 1; }
	ENGINES="slurm mpi" $(BIN)/python -m pytest -q tests/engines/test_slurm.py tests/engines/test_mpi.py \
	  --numprocesses 2 --dist loadfile $(if $(LONG),--accurate)

test-core: setup ## the native core's own tests
	@$(MAKE) --no-print-directory core-tested

core-tested:
	$(BIN)/cmake --build $(RELEASE) --target core_test --parallel $(JOBS)
	$(RELEASE)/core_test

# Tests wait much and compilers do not: all run beside each other.
check-core: setup ## the core's tests, also under sanitizers in their short forms
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target asan-short tsan-short core-tested

lint: setup ## ruff, mypy --strict, clang-format, stubs up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=apps $(BIN)/mypy $(wildcard apps/*.py) apps/softmax/train.py apps/softmax/compare.py
	$(foreach app,$(APPS),MYPYPATH=apps $(BIN)/mypy apps/$(app)/train.py &&) true
	MYPYPATH=apps:apps/small $(BIN)/mypy $(wildcard apps/small/*.py)
	MYPYPATH=apps:apps/mnist $(BIN)/mypy $(wildcard apps/mnist/*.py)
	MYPYPATH=apps:apps/dlrm $(BIN)/mypy $(wildcard apps/dlrm/*.py)
	$(BIN)/mypy docs/reference.py
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(foreach stub,$(STUBS),$(call stubgen,$(stub),build/$(notdir $(stub))) && diff -u $(stub) build/$(notdir $(stub)) &&) true

format: $(VENV)/base ## put every file into form
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CXX_FILES)

stubs: setup ## the stubs of the native modules, from the bindings
	$(foreach stub,$(STUBS),$(call stubgen,$(stub),$(stub)) &&) true

reference: setup ## docs/reference.md, from the docstrings
	$(BIN)/python docs/reference.py

bench: setup ## our figures beside limits and peers, into build/bench
	$(BIN)/windlass bench all --json build/bench

figures: setup ## the same into benchmarks/, and the tables of the README and the guides from it
	$(BIN)/windlass bench all --json benchmarks
	$(BIN)/python benchmarks/tables.py

# sanitized(FOLDER, SANITIZERS, OPTIONS): builds the core's tests with them.
define sanitized
	$(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=None \
	  -DWINDLASS_SANITIZE=$(2) $(3) >/dev/null
	$(BIN)/cmake --build build/$(1) --target core_test --parallel $(JOBS)
endef

asan: $(VENV)/tools ## the core's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call sanitized,asan,address$(comma)undefined)
	build/asan/core_test --accurate

tsan: $(VENV)/tools ## the core's tests under ThreadSanitizer
	$(call sanitized,tsan,thread)
	build/tsan/core_test --accurate

asan-short: asan-short-built
	build/asan-short/core_test
	@! WINDLASS_BREAK=bounds build/asan-short/core_test decoders_read_any_mutated_frame >/dev/null 2>&1 \
	  || { echo "S6 did not turn red: a decoder that reads beyond its end went unnoticed"; exit 1; }

tsan-short: tsan-short-built
	build/tsan-short/core_test

asan-short-built: $(VENV)/tools
	$(call sanitized,asan-short,address$(comma)undefined,-DWINDLASS_WIDE_ISAS=OFF)

tsan-short-built: $(VENV)/tools
	$(call sanitized,tsan-short,thread,-DWINDLASS_WIDE_ISAS=OFF -DWINDLASS_TESTS_WITHOUT="rule|query|wire|session|table")

comma := ,

clean: ## remove what was built
	rm -rf build $(VENV)
