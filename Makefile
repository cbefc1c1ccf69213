# Every target sets up what it needs. VENV=path puts the environment elsewhere; nothing is installed outside it.
VENV ?= .venv
# The environment of the oldest supported stack (Python 3.10, torch 2.7, megatron-core 0.12.1). That of Python 3.11 and
# megatron-core 0.16.1 is beside it, with -3.11 in its name.
VENV_COMPAT ?= $(VENV)-compat
# What compiles kernels for Ascend: its Triton excludes the other one.
VENV_ASCEND ?= $(VENV)-ascend
PYTHON_OF_VENV = "$(VENV)/bin/python"
# More Megatron flags for `make demo`.
DEMO_FLAGS ?=
# Options of `make bench`: --quick, --output DIR.
BENCH_FLAGS ?=

.PHONY: help setup demo test test-full test-compat test-kernels test-native test-aarch64 sanitize bench lint clean

help:
	@echo "make demo         train a small GPT over two supernodes, with and without hp_plugin, and compare"
	@echo "make test         the test suite"
	@echo "make test-full    the test suite with its large matrices and faults"
	@echo "make test-compat  the core's tests on Python 3.10 with the oldest torch and Megatron, and on Python 3.11"
	@echo "make test-kernels device kernels without a device: interpreter, cubins for CUDA, HIVM for Ascend"
	@echo "make test-native  the C++ tests of the native library, once per instruction set"
	@echo "make test-aarch64 the same, cross-built for 64-bit Arm and run in emulation (INSTALL=1 installs Debian's tools)"
	@echo "make sanitize     the same under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer"
	@echo "make bench        every benchmark, as root; results in bench/results/ (BENCH_FLAGS=--quick for a short run)"
	@echo "make lint         format, lint, types, import contracts"
	@echo "make setup        only the environment (VENV=path, default .venv; PYTHON=path forces the interpreter)"
	@echo "make clean        remove what tools have built and cached; environments stay"

setup:
	@tools/bootstrap.sh setup reference "$(VENV)"

demo: setup
	$(PYTHON_OF_VENV) examples/main_job.py $(DEMO_FLAGS)

test: setup
	$(PYTHON_OF_VENV) -m pytest tests -m "not full"

test-full: setup
	$(PYTHON_OF_VENV) -m pytest tests

# Benchmarks and example jobs are for the reference environment: their peers and loops came with later releases.
REFERENCE_ONLY = tests/bench tests/examples

# The wheels of these releases hold megatron.core only: what needs the training loop takes a checkout (docs/megatron.md).
TESTS_OF_MEGATRON_CORE = tests/megatron/releases/test_targets.py tests/megatron/fsdp/test_data_parallel.py tests/megatron/fsdp/test_optimizer.py \
	tests/megatron/checkpoints/test_slices.py

test-compat:
	@tools/bootstrap.sh setup compat "$(VENV_COMPAT)"
	"$(VENV_COMPAT)/bin/python" -m pytest tests --ignore=tests/megatron $(REFERENCE_ONLY:%=--ignore=%) -m "not full"
	"$(VENV_COMPAT)/bin/python" -m pytest $(TESTS_OF_MEGATRON_CORE) -m "not full"
	@tools/bootstrap.sh setup compat-3.11 "$(VENV_COMPAT)-3.11"
	"$(VENV_COMPAT)-3.11/bin/python" -m pytest $(TESTS_OF_MEGATRON_CORE) -m "not full"

# Device kernels without a device. The environment for Ascend has 220 MB; where there are no wheels for it, it is left out.
test-kernels: setup
	TRITON_INTERPRET=1 $(PYTHON_OF_VENV) -m pytest tests/kernels/interpreted
	$(PYTHON_OF_VENV) -m pytest tests/tools/test_device_check.py
	$(PYTHON_OF_VENV) tools/compile_kernels.py cuda
	@tools/bootstrap.sh setup ascend "$(VENV_ASCEND)"; status=$$?; \
	if [ $$status -eq 0 ]; then exec "$(VENV_ASCEND)/bin/python" tools/compile_kernels.py ascend; \
	elif [ $$status -eq 3 ]; then echo "test-kernels: compilation for Ascend was skipped, see above"; \
	else exit $$status; fi

# These need a C++ compiler alone, and so no environment.
test-native:
	@tools/native.sh test

test-aarch64:
	@tools/native.sh aarch64

sanitize:
	@tools/native.sh sanitize

bench: setup
	$(PYTHON_OF_VENV) -m bench all $(BENCH_FLAGS)

lint: setup
	$(PYTHON_OF_VENV) -m ruff format --check --output-format concise .
	$(PYTHON_OF_VENV) -m ruff check --output-format concise .
	$(PYTHON_OF_VENV) -m mypy
	"$(VENV)/bin/lint-imports" --no-logo

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
