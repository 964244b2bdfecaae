# Two commands set everything up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
BENCH_VENV := .venv-bench
PAPER_VENV := .venv-paper
PEERS := grpcio ray
TORCH ?= torch==2.13.0
# Versions, such as "2.13.0 2.14.0"; by default the torch of .venv.
WHEEL_TORCH ?=
# The oldest UCX that is promised: the core runs with the UCX that it was compiled with or a later one.
WHEEL_UCX ?= libucx-cu12==1.18.0
# Compilers of torch's headers take over a GB each.
export MAX_JOBS ?= 2

CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h')
# C++ that is not part of the extension.
CTESTS := $(shell find tests -name '*.cpp' -o -name '*.h')
FUZZ_SECONDS ?= 600
# Of a machine with a GPU: its Python, which has torch, and a folder of wheels for what it lacks.
GPU_PYTHON ?= python3
WHEELS ?= wheels

# What an extra of pyproject.toml names, into an environment. Not `pip install -e ".[test]"`: that
# compiles everything once more.
define install_extra_into
$(BIN)/python -c "import tomllib; \
  print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(2)']))" \
  > $(1)/$(2).txt
$(1)/bin/python -m pip install -q -r $(1)/$(2).txt
endef

define install_extra
$(call install_extra_into,$(VENV),$(1))
endef

# An environment beside $(VENV) that finds what is installed there, by a .pth file.
define new_venv
$(BIN)/python -m venv $(1)
$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
  > "$$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
endef

.PHONY: demo tutorials test test-all test-fast bench bench-all paper chaos soak fuzz sanitize build wheel wheel-test compat lint format clean docs docs-links \
  test-gpu bench-gpu

demo: $(STAMPS)/demo $(STAMPS)/build
	$(BIN)/python tutorials/demo.py

# Executes the notebooks and keeps their outputs. Some only: make tutorials TUTORIALS="01 03".
tutorials: $(STAMPS)/tutorials $(STAMPS)/build
	$(BIN)/python tutorials/execute.py $(TUTORIALS)

test: $(STAMPS)/test $(STAMPS)/build
	$(BIN)/python -m tests.run

# Also what takes long and rarely tells anything, a minute of chaos for one.
test-all: $(STAMPS)/test $(STAMPS)/build
	$(BIN)/python -m tests.run --all

# This back end beside TENSORPIPE, in turns; see benchmarks/.
bench: $(STAMPS)/bench $(STAMPS)/build
	$(BIN)/python -m benchmarks --out benchmarks.jsonl

# Also beside gRPC and Ray, and what takes long; then docs/benchmarks.md is written from it.
bench-all: $(BENCH_VENV)/.stamp $(STAMPS)/build
	$(BENCH_VENV)/bin/python -m benchmarks --all --out benchmarks.jsonl
	$(BENCH_VENV)/bin/python -m benchmarks report benchmarks.jsonl

# The applications of the paper "PyTorch RPC" beside TENSORPIPE and gRPC; then docs/evaluation.md is
# written from it. Some only: make paper PAPER="a3c --small".
paper: $(PAPER_VENV)/.stamp
	$(PAPER_VENV)/bin/python -m benchmarks.applications --out evaluation.jsonl $(PAPER); status=$$?; \
	  $(PAPER_VENV)/bin/python -m benchmarks.applications report evaluation.jsonl && exit $$status

# Without upstream's suites: for while one works.
test-fast: $(STAMPS)/test $(STAMPS)/build
	$(BIN)/python -m pytest tests/unit tests/fuzz tests/rules tests/process -m "not slow and not rare and not notebook" -n 4 -q

# What needs a GPU, by the Python that has torch with CUDA: nothing is fetched. The exit status is
# 77 (make's: 2) where there is no GPU.
test-gpu:
	$(GPU_PYTHON) -m tests.support.gpu --wheels $(WHEELS) test -m tests.gpu

# Tensors on a GPU beside TENSORPIPE with device maps. Some only: make bench-gpu BENCH="--cases gpu-4m".
bench-gpu:
	$(GPU_PYTHON) -m tests.support.gpu --wheels $(WHEELS) bench -m benchmarks cuda --out benchmarks-gpu.jsonl $(BENCH)

# Workers are killed, stopped, delayed, restarted and cut off under load, for 10 minutes. To do one again:
# make chaos CHAOS="--seconds 60 --seed 1".
chaos: $(STAMPS)/test $(STAMPS)/build
	$(BIN)/python -m tests.chaos $(CHAOS)

# Mixed calls for 10 minutes, after which no worker may hold more than after the first.
soak: $(STAMPS)/test $(STAMPS)/build
	$(BIN)/python -m tests.soak $(SOAK)

# Whatever reads bytes of a peer, under clang's libFuzzer; FUZZ_SECONDS for all targets together.
fuzz: $(STAMPS)/venv
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

# ThreadSanitizer and AddressSanitizer; builds an extension of its own, in build/asan.
# One half of it: make sanitize SANITIZE="--only programs".
sanitize: $(STAMPS)/test $(STAMPS)/build
	$(BIN)/python -m tests.sanitize $(SANITIZE)

# The manual, into build/docs/html. Needs no network; a warning, a broken link within it too, is an error.
docs: $(STAMPS)/docs $(STAMPS)/build
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/docs/trees . build/docs/html
	@echo "open build/docs/html/index.html"

# Asks the network for every link that leads out of the manual.
docs-links: $(STAMPS)/docs $(STAMPS)/build
	$(BIN)/python -m sphinx -q -b linkcheck -c docs -d build/docs/trees . build/docs/links

build: $(STAMPS)/build

# A source distribution and a wheel, into dist/.
wheel: $(STAMPS)/venv
	$(BIN)/python -m tests.release.wheel --torch "$(WHEEL_TORCH)" --ucx "$(WHEEL_UCX)"

# The wheel of dist/ in a fresh environment: the README's example, `info`, some of the tests.
wheel-test: $(STAMPS)/venv
	$(BIN)/python -m tests.release.try_wheel --torch "$(TORCH)"

# This project with another torch, in build/compat/: make compat TORCH=torch==2.15.0. Less than all of it:
# make compat TORCH=torch==2.15.0 COMPAT="--parts upstream".
compat: $(STAMPS)/venv
	$(BIN)/python -m tests.release.compat --torch "$(TORCH)" $(COMPAT)

lint: $(STAMPS)/test $(STAMPS)/build
	$(BIN)/python -m pytest tests/rules -q

format: $(STAMPS)/test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CSRC) $(CTESTS)

clean:
	rm -rf build dist $(VENV) $(BENCH_VENV) $(PAPER_VENV) .venv-wheel-* torch_rpc_ext/*.so torch_rpc_ext/*.so.0 torch_rpc_ext/_build_info.py *.egg-info

$(STAMPS)/requirements.txt: pyproject.toml
	mkdir -p $(STAMPS)
	$(PYTHON) -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb')); \
	  print('\n'.join(project['build-system']['requires'] + project['project']['dependencies']))" > $@

$(STAMPS)/venv: $(STAMPS)/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -r $<
	touch $@

$(STAMPS)/build: $(STAMPS)/venv setup.py pyproject.toml $(CSRC)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	$(BIN)/python -m compileall -q torch_rpc_ext
	touch $@

$(STAMPS)/test: $(STAMPS)/build
	$(call install_extra,test)
	touch $@

$(STAMPS)/bench: $(STAMPS)/build
	$(call install_extra,bench)
	touch $@

# The peers' dependencies stay out of $(VENV).
$(BENCH_VENV)/.stamp: $(STAMPS)/bench
	$(call new_venv,$(BENCH_VENV))
	$(BENCH_VENV)/bin/python -m pip install -q $(PEERS)
	touch $@

# So do those of the paper's applications.
$(PAPER_VENV)/.stamp: $(STAMPS)/build pyproject.toml
	$(call new_venv,$(PAPER_VENV))
	$(call install_extra_into,$(PAPER_VENV),paper)
	touch $@

$(STAMPS)/docs: $(STAMPS)/build
	$(call install_extra,docs)
	touch $@

$(STAMPS)/demo: $(STAMPS)/build
	$(call install_extra,demo)
	touch $@

$(STAMPS)/tutorials: $(STAMPS)/build
	$(call install_extra,tutorials)
	touch $@
