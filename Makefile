# make demo     train a small language model on real text, with everything set up from nothing
# make test     C++ and Python tests, likewise
# make test-gpu      the GPU suite and its results page, docs/results/<gpu>-cuda.md; needs a GPU, nvcc and a torch with
#                    CUDA; also the Python tests by backend, where GPU_PYTHON has apache-tvm-ffi and pytest
# make sanitize-gpu  a subset of it under compute-sanitizer's four tools; on Hopper with a second library, for racecheck
# make exchange-gpu  every stage exchanged with flash-linear-attention's, where GPU_PYTHON has that
# make emulated      the GPU kernels for a CPU, build/libemulated.so, which --emulated of the scripts in tests/gpu takes;
#                    needs CUDA's headers, neither nvcc nor a GPU
# make bench    the CPU benchmark page, docs/results/cpu.md
# make lint     formatting, clang-tidy, ruff, mypy          make format   rewrite files as the formatters want them
# make clean    remove what was built; .venv stays (make distclean removes it too)
#
# Needs g++, make and Python 3.10 or newer with venv; everything else comes from PyPI into .venv. Settings:
# PYTHON (interpreter to start from), VENV, BUILD (folders), JOBS, CULA_CUDA (AUTO: GPU code where nvcc is found, or OFF),
# CMAKE_ARGS, DEMO_ARGS, PYTEST_ARGS, GPU_PYTHON (interpreter with torch for the GPU suite), GPU_ARGS.

PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CULA_CUDA ?= AUTO
CMAKE_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
GPU_PYTHON ?= $(bin)/python
GPU_ARGS ?=

bin := $(abspath $(VENV))/bin
export PATH := $(bin):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CULA_CUDA  # read by the wheel's build too

# What the installed package is made of.
sources := $(shell find cmake csrc cula tools/build_backend.py -type f -not -name '*.pyc' -not -name '*.so' 2>/dev/null)
cpp_files = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | grep -v '^third_party/')

.PHONY: demo test build test-cpp test-python test-gpu sanitize-gpu exchange-gpu emulated bench
.PHONY: gpu-general gpu-hopper gpu-stages gpu-python gpu-cp gpu-nccl
.PHONY: lint format clean distclean
.DELETE_ON_ERROR:

demo: $(VENV)/.package
	$(bin)/python examples/train_text.py --output-dir out $(DEMO_ARGS)

test: test-cpp test-python

# ---- set-up --------------------------------------------------------------------------------------------------------
# pip older than 25.1 knows no dependency groups, so it is brought up to date first.
$(VENV)/.tools: pyproject.toml
	$(PYTHON) tools/check_prerequisites.py
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet 'pip>=25.1'
	$(bin)/python -m pip install --quiet --group build --group test
	touch $@

$(VENV)/.lint: $(VENV)/.tools
	$(bin)/python -m pip install --quiet --group lint
	touch $@

# The package is built in the same folder as the C++ tests, so that each file is compiled once.
$(VENV)/.package: $(VENV)/.tools CMakeLists.txt $(sources)
	$(bin)/python -m pip install --quiet --no-build-isolation -Cbuild-dir=$(BUILD) .
	touch $@

# ---- build and test ------------------------------------------------------------------------------------------------
# The folder comes behind.
configure = $(bin)/cmake -S . -G Ninja -DCULA_BUILD_TESTS=ON -DCULA_CUDA=$(CULA_CUDA) \
  -DPython3_EXECUTABLE=$(bin)/python -DCMAKE_BUILD_TYPE=Release $(CMAKE_ARGS) -B

build: $(VENV)/.tools
	$(configure) $(BUILD)
	$(bin)/cmake --build $(BUILD)

test-cpp: build
	$(bin)/ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

test-python: $(VENV)/.package
	$(bin)/pytest $(PYTEST_ARGS)

gpu_library = $(BUILD)/libcula_gdn_test.so
is_hopper = nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -q '^9\.0'
# The package in this folder with the library that was built here.
gpu_package = PYTHONPATH=$(CURDIR) CULA_GDN_LIBRARY=$(abspath $(BUILD))/libcula_gdn_ffi.so

$(gpu_library): build
	$(bin)/cmake --build $(BUILD) --target cula_gdn_test

# Checks side by side, since none fills a GPU; then, alone, what is timed.
test-gpu: $(gpu_library)
	$(MAKE) --keep-going --output-sync=target -j $(addprefix gpu-,general hopper stages python cp nccl)
	$(GPU_PYTHON) tests/gpu/run_cuda.py --library $(gpu_library) --isolated --no-checks --checks 'all passed' \
	  --results docs/results --commit $(shell git rev-parse --short HEAD)

gpu-general:
	$(GPU_PYTHON) tests/gpu/run_cuda.py --library $(gpu_library) --isolated --no-timing $(GPU_ARGS)
gpu-hopper:
	! $(is_hopper) || $(GPU_PYTHON) tests/gpu/run_sm90.py --library $(gpu_library) --no-timing
gpu-stages:
	! $(is_hopper) || $(GPU_PYTHON) tests/gpu/run_stages.py --library $(gpu_library) --no-timing
gpu-python:
	! $(GPU_PYTHON) -c 'import tvm_ffi, pytest' || $(gpu_package) $(GPU_PYTHON) -m pytest $(gpu_workers) $(gpu_tests) \
	  --backends cuda$$($(is_hopper) && echo ,sm90)
gpu-cp:
	! $(GPU_PYTHON) -c 'import tvm_ffi' || $(gpu_package) $(GPU_PYTHON) tests/gpu/run_cp.py --library $(gpu_library) \
	  --no-timing
gpu-nccl:
	! $(GPU_PYTHON) -c 'import torch, tvm_ffi; exit(torch.cuda.device_count() < 2)' || \
	  $(gpu_package) $(GPU_PYTHON) tests/gpu/run_nccl.py --ranks 2 --no-timing

# One process at a time would take longer than all other suites.
gpu_workers = $$(! $(GPU_PYTHON) -c 'import xdist' 2>/dev/null || printf '%s' '-n 5')
# Those that run by backend.
gpu_tests = $(wildcard tests/python/test_cases_*.py) $(addprefix tests/python/test_,stages.py operator.py autograd.py \
  recurrent.py pools.py fla_tables.py compile.py gpu.py)

# Kernels of every kind on small shapes: the tools run them up to hundreds of times slower, so only the library's own
# kernels are looked at, but for initcheck, which must see who wrote memory. Every tensor is an allocation of its own,
# or accesses behind its end, and reads of what an earlier tensor left there, would go unseen.
sanitizer = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9
sanitized = --sanitizer $(GPU_ARGS)
racecheck_library = $(BUILD)-racecheck/libcula_gdn_test.so

# initcheck does not see what the copy engine stores, so it is not for sm90. racecheck does not follow every way in which
# the kernels hand over, and reports what is none; which those are, the probe shows. It gets a library of its own, whose
# sm90 kernels hand over as it can follow (CULA_RACECHECK); of those it still reports nine pairs, in two checks
# (docs/results/h200-forward.md), so that this target does not pass yet.
sanitize-gpu: $(gpu_library)
	! $(is_hopper) || $(bin)/cmake --build $(BUILD) --target racecheck_probe
	! $(is_hopper) || { $(configure) $(BUILD)-racecheck -DCULA_RACECHECK=ON -DCULA_CUDA_ARCHS=90a && \
	  $(bin)/cmake --build $(BUILD)-racecheck --target cula_gdn_test; }
	failed=; ! $(is_hopper) || $(GPU_PYTHON) tests/gpu/run_racecheck_probe.py --probe $(BUILD)/racecheck_probe || \
	  failed="$$failed racecheck_probe"; \
	for suite in run_cuda $$($(is_hopper) && echo run_sm90 run_stages); do \
	  for tool in memcheck racecheck synccheck; do \
	    case $$suite/$$tool in \
	      run_sm90/racecheck | run_stages/racecheck) library=$(racecheck_library) ;; \
	      *) library=$(gpu_library) ;; \
	    esac; \
	    $(sanitizer) --tool $$tool --kernel-regex kns=cula $(GPU_PYTHON) tests/gpu/$$suite.py --library $$library \
	      $(sanitized) || failed="$$failed $$suite/$$tool"; \
	  done; \
	done; \
	$(sanitizer) --tool initcheck $(GPU_PYTHON) tests/gpu/run_cuda.py --library $(gpu_library) $(sanitized) \
	  --as-it-comes || failed="$$failed run_cuda/initcheck"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

exchange-gpu: build
	$(gpu_package) $(GPU_PYTHON) tests/gpu/fla_exchange.py $(GPU_ARGS)
	! $(is_hopper) || $(gpu_package) $(GPU_PYTHON) tests/gpu/fla_exchange.py --backend sm90 $(GPU_ARGS)
	$(gpu_package) $(GPU_PYTHON) tests/gpu/fla_group.py

# Only what it is made of is built, so that no nvcc is needed.
emulated: $(VENV)/.tools
	$(configure) $(BUILD)
	$(bin)/cmake --build $(BUILD) --target cula_gdn_emulated

bench: $(VENV)/.package
	$(bin)/python benchmarks/bench_cpu.py --json out/bench_cpu.json --page docs/results/cpu.md \
	  --figure docs/images/cpu.svg

# ---- checks --------------------------------------------------------------------------------------------------------
lint: $(VENV)/.lint build
	$(bin)/clang-format --dry-run --Werror $(cpp_files)
	$(bin)/ruff check . && $(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/python tools/run_clang_tidy.py --build $(BUILD) --jobs $(JOBS)

format: $(VENV)/.lint
	$(bin)/clang-format -i $(cpp_files)
	$(bin)/ruff check --fix . && $(bin)/ruff format .

clean:
	rm -rf $(BUILD) $(BUILD)-racecheck out
	rm -f $(VENV)/.package

distclean: clean
	rm -rf $(VENV)
