# Everything that can be done with this tree; `make help` lists it. Each target sets up what it
# needs first, in stages that leave a stamp when they are done.
#
#   PYTHON=python3   the Python that the virtual environment is made with, 3.9 or newer
#   VENV=.venv       where it is made
#   PYTHON_OLDER=... that of `make test-older`, 3.9 to 3.11; PYTHON if not given
#   VENV_OLDER=.venv-older    where its environment is made
#   VENV_TRITON=.venv-triton  where that of `make triton` is made
#   VENV_RAY=.venv-ray  where `make clients-ray` puts Ray, beside what is in VENV
#   SETUP=0          set nothing up: run PYTHON as it is, with what it has
#   DEVICE=cuda      for `make bench` where there is a GPU, with SETUP=0
#   ARGS=...         passed on to pytest, the demo or the benchmark; `make test` and `make triton` run
#                    what it chooses: "-k ddp", or tests/parallel/test_ddp.py, which is quicker
#   EPOCHS=20        of each run of the demo in `make images`
#   COMPAT_SOURCE=...   a git checkout of Horovod's, for `make compat`; kept, so once is enough
PYTHON ?= python3
VENV ?= .venv
PYTHON_OLDER ?= $(PYTHON)
VENV_OLDER ?= .venv-older
VENV_TRITON ?= .venv-triton
VENV_RAY ?= .venv-ray
SETUP ?= 1
DEVICE ?= cpu
ARGS ?=
export COMPAT_SOURCE ?=

ifeq ($(SETUP),0)
python := $(PYTHON)
path := $$PATH
else
python := $(VENV)/bin/python
path := $(abspath $(VENV))/bin:$$PATH
torch := $(VENV)/.stamp-torch
tools := $(VENV)/.stamp-tools
frameworks := $(VENV)/.stamp-frameworks
horovod := $(VENV)/.stamp-horovod
site := $(VENV)/.stamp-docs
clients := $(VENV)/.stamp-clients
compat := $(VENV)/.stamp-compat
kernels := $(VENV_TRITON)/.stamp
ray := $(VENV_RAY)/.stamp
endif
triton := $(if $(kernels),$(VENV_TRITON)/bin/python,$(PYTHON))

# `horovodrun` and what it starts come from the same environment.
run = PATH="$(path)" $(python)
pages = $(addprefix docs/tutorial/,first-run.md hosts.md choosing.md mixed-precision.md \
	checkpoints.md watching.md) docs/extending.md
# Python compiles what it imports, on every core; pip would compile 18,000 files one by one.
pip = $(VENV)/bin/python -m pip --disable-pip-version-check install -qq --progress-bar off \
	--no-compile --constraint docker/constraints.txt

# TensorFlow's start-up lines would flood the output; Open MPI refuses root and more ranks than
# cores, and both are usual in a container; two ranks of one thread each fill two cores, more
# threads than cores only wait for each other.
export TF_CPP_MIN_LOG_LEVEL ?= 3
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export OMP_NUM_THREADS ?= 1
# Containers set it to stay small; here each of some hundred processes would compile this package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup check test sweep clients-ray test-older triton traffic asan compat demo bench papers gpu bench-loopback \
	bench-steps hosts hosts-possible worth worth-gpu soak chaos images test-image image-gpu \
	clean-images fuzz wheels torch-alone docs tutorial clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

setup: $(horovod) ## virtual environment, frameworks, Horovod, this package

check: $(tools) ## lint, format, types, rules of imports and names; under a minute, no framework needed
	@$(run) -m ruff check .
	@$(run) -m ruff format --check .
	@$(run) -m mypy
	@$(run) -m pytest -q tests/single/test_imports.py tests/single/test_names.py

# Of ARGS, paths are for the stage that has them, and all else is for pytest in each stage.
paths := $(filter tests/% hvd_gradcomp/%,$(ARGS))
options = $(filter-out $(paths),$(ARGS))
# $(call of,FOLDERS): what a stage of these folders runs; nothing where ARGS names others.
of = $(if $(paths),$(filter $(addsuffix %,$(1)),$(paths)),$(1))
# $(call stage,FOLDERS,PYTEST): pytest exits with 5 where it has no test. Where ARGS chooses, a stage
# may have none, but not each of them: `test` looks for that.
stage = $(if $(call of,$(1)),{ $(2) $(call of,$(1)) $(options); $(ended); },:)
ended = code=$$?; if [ $$code = 0 ]; then mkdir -p $(dir $(tested)) && touch $(tested); \
	$(if $(strip $(ARGS)),elif [ $$code != 5 ]; then,else) exit $$code; fi
tested := build/tested
# Some tests take less time than a second worker, which collects all of them once more.
few := $(filter -k%,$(ARGS))$(findstring .py,$(ARGS))

test: $(site) $(clients) ## all tests: in one process, then with several ranks; ARGS="-k ddp" for some
	@rm -f $(tested)
ifeq ($(few),)
	@$(MAKE) --no-print-directory single
	@$(MAKE) --no-print-directory -j 2 ranks beside
else
	@$(MAKE) --no-print-directory -j 3 -O single ranks beside
endif
	@[ -e $(tested) ] || { echo "test: no stage has a test by ARGS=$(subst ",,$(ARGS))" >&2; exit 5; }

# Ranks wait for each other, and with them a core: what waits for nobody takes it then, and prints
# in one piece.
.PHONY: single ranks beside
single:
	@$(call stage,hvd_gradcomp tests/single,$(run) -m pytest -n $(if $(few),0,auto) --doctest-modules)
ranks:
	@$(call stage,tests/parallel,$(run) -m pytest -n 2 --dist worksteal -m "not sweep")
beside:
	@$(if $(call of,tests/triton),nice $(MAKE) --no-print-directory -O triton,:)

sweep: $(site) $(clients) ## tests of ranks on more ranks, backends and steps than `make test`; half an hour
	@$(run) -m pytest -m sweep tests/parallel $(ARGS)

# Most of its time Ray starts processes: too long, and too large, for `make test`.
clients-ray: $(clients) $(ray) ## the page on Ray Train and its recipe, on a local cluster of two workers; minutes
	@PYTHONPATH="$(abspath $(VENV_RAY))" $(run) -m pytest -k "ray_train or following and ray" \
		tests/parallel/test_clients.py tests/parallel/test_docs.py $(ARGS)

# Each in a process of its own: what the interpreter has loaded cannot be compiled.
triton: $(kernels) ## the kernels for GPUs, without one: interpreted against the plain ops, and compiled
	@if $(triton) -c 'import sys; from importlib.util import find_spec as f; sys.exit(not f("triton"))'; \
	then $(call stage,tests/triton,TRITON_INTERPRET=1 $(triton) -m pytest -q -n $(if $(few),0,auto)) && \
		$(call stage,tests/triton/test_compiled.py,$(triton) -m pytest -q); \
	else echo "triton: skipped: $(PYTHON) has no Triton"; fi

# What XLA makes of a step is looked at, not run: it need not be fast.
traffic: $(kernels) $(frameworks) ## bytes and launches of a step on a GPU, counted without one, into docs/measured
	@$(triton) -m pytest -q tests/triton/test_compiled.py --compiled docs/measured/kernels.json
	@$(triton) -m benchmarks.traffic --folder docs/measured
	@XLA_FLAGS=--xla_backend_optimization_level=0 $(run) -m benchmarks.traffic_tensorflow \
		--folder docs/measured

# torch 2.0 has to be loaded before TensorFlow, or it aborts: hence -p.
test-older: $(VENV_OLDER)/.stamp ## what one process can test, on PyTorch 2.0 and TensorFlow 2.13
	@$(VENV_OLDER)/bin/python -m pytest -p torch --doctest-modules \
		--doctest-ignore-import-errors hvd_gradcomp tests/single $(ARGS)

asan: $(frameworks) ## what is written in C under AddressSanitizer, with damaged input; minutes
	@tests/asan.sh $(python) $(ARGS)

fuzz: $(frameworks) ## payloads that a sender has made up, by libFuzzer under AddressSanitizer; needs clang; ARGS=-max_total_time=600
	@tests/fuzz.sh $(python) $(ARGS)

compat: $(compat) ## Horovod's own tests and examples, stock beside ours; COMPAT_SOURCE=its checkout
	@$(run) -m tests.compat $(ARGS)

# The first table needs neither TensorFlow nor Horovod: they are installed after it.
demo: $(torch) ## train on digits with and without compression: a table in two minutes, then one over Horovod; ARGS=--no-horovod stops between
	@$(run) -m examples.demo --no-horovod $(ARGS)
ifeq ($(filter --no-horovod,$(ARGS)),)
	@[ -z "$(horovod)" ] || [ -e "$(horovod)" ] || echo "now Horovod: building it takes about 8 minutes, once;" \
		"\`make demo ARGS=--no-horovod\` stops here"
	@$(if $(horovod),$(MAKE) --no-print-directory $(horovod))
	@$(run) -m examples.demo --no-ddp $(ARGS)
endif

# On a GPU PyTorch's codecs alone, with the PyTorch that is installed; SETUP=0 DEVICE=cuda.
bench: $(if $(filter cuda,$(DEVICE)),,$(horovod)) ## method x framework x density: copies, ms, first step; 35 minutes, or ARGS=--quick
	@[ "$(DEVICE)" = cpu ] || [ "$(SETUP)" = 0 ] || { echo "bench: uses what is installed: make bench DEVICE=cuda SETUP=0 PYTHON=..." >&2; exit 2; }
	@$(run) -m benchmarks.curve --device $(DEVICE) $(ARGS)
	@$(run) -m benchmarks.learned --device $(DEVICE)

# SETUP=0 with the PyTorch and the Horovod that were built for the GPU; none is downloaded or built.
gpu: ## what only a GPU can show, in eight minutes: the same bits, FSDP2, NCCL, local steps, launches; ARGS="--minutes 4"
	@[ "$(SETUP)" = 0 ] || { echo "gpu: uses what is installed: make gpu SETUP=0 PYTHON=..." >&2; exit 2; }
	@if $(run) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(run) -m benchmarks.gpu $(ARGS); \
	else echo "gpu: skipped, nothing was run: PyTorch sees no CUDA device here"; fi

papers: $(horovod) ## the papers' claims, trained on Debian's data; hours, or ARGS=--list, "--parts NAME"
	@$(run) -m benchmarks.papers $(ARGS)

bench-loopback: $(horovod) ## whole exchanges of two ranks, beside dense allreduce and plain top-k
	@PATH="$(path)" horovodrun --gloo -np 2 $(python) -m benchmarks.loopback $(ARGS)

bench-steps: $(horovod) ## whole steps of two ranks, backward to the end of step; ARGS=--clip clips
	@PATH="$(path)" horovodrun --gloo -np 2 $(python) -m benchmarks.steps $(ARGS)

# Whether it can run here is said before an environment is set up for it.
hosts: hosts-possible $(horovod) ## 2 and 4 hosts over ssh, links of 1 Gb/s and 100 Mb/s; needs root
	@$(run) -m benchmarks.hosts $(ARGS)

worth: $(horovod) ## trainings by recipes that people use, and the time to a loss over slow links; hours
	@$(run) -m benchmarks.worth $(ARGS)

worth-gpu: ## the same for a GPT of 124 million parameters, four replicas on one GPU, in nine minutes
	@[ "$(SETUP)" = 0 ] || { echo "worth-gpu: uses what is installed: make worth-gpu SETUP=0 PYTHON=..." >&2; exit 2; }
	@$(run) -m benchmarks.worth --lockstep --recipe gpt-124 --hosts 4 --minutes 9 --parts tune \
		--methods dense eighth-5 local-int8 qsgd nesterov-int8 --json docs/measured/worth.json $(ARGS)

hosts-possible:
ifneq ($(SETUP),0)
	@[ "$$(id -u)" -ne 0 ] || docker/install-system.sh --hosts $(PYTHON)
endif
	@$(PYTHON) -m benchmarks.rig

soak: $(horovod) ## 20,000 steps on two ranks: memory, handles, equal replicas; half an hour and more
	@PATH="$(path)" horovodrun --gloo -np 2 $(python) -m benchmarks.soak $(ARGS)

chaos: $(horovod) ## attacks on files, payloads, numbers and ranks: what came of each; a quarter of an hour
	@$(run) -m tests.chaos $(ARGS)

images: ## the CPU image from a clean base, and the demo on it across two containers over ssh
	@docker/images.sh build
	@docker/images.sh demo $(EPOCHS)

test-image: ## tests with ranks in the image of `make images`, on gloo
	@docker/images.sh test $(ARGS)

image-gpu: ## the image for GPUs, Horovod with CUDA from PyPI's packages; no GPU is needed to build it
	@docker/images.sh gpu

clean-images: ## remove images, containers and what they were made from
	@docker/images.sh clean

wheels: $(tools) ## wheels with the C library inside, x86-64 and 64-bit Arm, into dist/; two minutes
	@docker/wheels.sh $(if $(filter 0,$(SETUP)),$(PYTHON),$(abspath $(python)))

torch-alone: wheels ## the wheel in a fresh environment with PyTorch alone, and two ranks, timed; two minutes
	@docker/torch-alone.sh $(PYTHON)

docs: $(site) ## the site, in docs/_build/html; a warning is an error
	@$(run) -m sphinx -b html -W --keep-going -q $(ARGS) docs docs/_build/html
	@echo "docs: docs/_build/html/index.html"

# What the pages say is run by bash alone: a bare container has no Python to read them with.
tutorial: ## follow the tutorial literally in a fresh container; as root, a quarter of an hour
	@mkdir -p results
	@docker/fresh.sh bash -c "$$($(PYTHON) -m docs.follow --setup --script $(pages))" \
		</dev/null | tee results/tutorial.log
	@$(PYTHON) -m docs.follow --setup --check results/tutorial.log $(pages)

clean: ## remove the virtual environment, caches and build products
	rm -rf $(VENV) $(VENV_OLDER) $(VENV_TRITON) $(VENV_RAY) build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache docs/_build docs/generated
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stage that fails leaves no stamp and is repeated; --clear takes away half an environment.
$(VENV)/.stamp-venv:
	@docker/install-system.sh --python-only $(PYTHON)
	@echo "python: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# By itself what `make demo` begins with, of the same versions as the other frameworks.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv docker/frameworks.txt setup.py pyproject.toml docker/constraints.txt $(wildcard hvd_gradcomp/ops/c/*.[ch])
	@docker/install-system.sh --compiler $(PYTHON)
	@echo "torch: PyTorch, scikit-learn and this package with its C library (a minute or two)"
	@grep -E '^(torch|numpy|setuptools|wheel)' docker/frameworks.txt >$(VENV)/torch.txt
	@$(pip) --requirement $(VENV)/torch.txt scikit-learn
	@$(pip) --no-build-isolation --editable .
	@touch $@

$(VENV)/.stamp-tools: $(VENV)/.stamp-venv setup.py pyproject.toml docker/constraints.txt $(wildcard hvd_gradcomp/ops/c/*.[ch])
	@echo "tools: linter, type checker, test runner and this package (half a minute)"
	@$(pip) "setuptools<81" wheel
	@$(pip) --no-build-isolation --editable ".[test]"
	@touch $@

$(VENV)/.stamp-frameworks: $(VENV)/.stamp-tools $(VENV)/.stamp-torch docker/frameworks.txt
	@echo "frameworks: TensorFlow, Keras and what the examples use (minutes)"
	@$(pip) --requirement docker/frameworks.txt
	@$(pip) --no-build-isolation --editable ".[examples,tensorboard]"
	@touch $@

$(VENV)/.stamp-horovod: $(VENV)/.stamp-frameworks hvd_gradcomp/cli/build-horovod.sh \
		$(wildcard hvd_gradcomp/ops/c/*)
	@docker/install-system.sh $(PYTHON)
	@echo "horovod: from the cache, or built (about 8 minutes on two cores)"
	@PATH="$(path)" PIP_CONSTRAINT=docker/constraints.txt hvd_gradcomp/cli/build-horovod.sh $(VENV)/bin/python
	@# Once more: now there are a compiler and TensorFlow, whose operations take a minute.
	@$(pip) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-horovod pyproject.toml docker/constraints.txt
	@echo "docs: Sphinx and what it needs (half a minute)"
	@$(pip) --no-build-isolation --editable ".[docs,examples]"
	@touch $@

# They name PyTorch as something to install, and another one than is here would be.
$(VENV)/.stamp-clients: $(VENV)/.stamp-docs docker/clients.txt
	@echo "clients: the Trainer, Accelerate, Lightning, timm and others (downloads 35 MB, takes 250 MB)"
	@$(pip) --no-deps --requirement docker/clients.txt
	@touch $@

# Not into the environment, where all else would have to agree with it.
$(VENV_RAY)/.stamp: $(VENV)/.stamp-clients docker/ray.txt
	@echo "ray: Ray and what Ray Train imports, in $(VENV_RAY) (downloads 144 MB, takes 420 MB)"
	@rm -rf $(VENV_RAY)
	@$(pip) --no-deps --target $(VENV_RAY) --requirement docker/ray.txt
	@touch $@

$(VENV)/.stamp-compat: $(VENV)/.stamp-horovod pyproject.toml docker/constraints.txt
	@echo "compat: what Horovod's tests import (seconds)"
	@$(pip) --no-build-isolation --editable ".[compat]"
	@touch $@

$(VENV_TRITON)/.stamp: docker/triton.txt docker/frameworks.txt docker/constraints.txt
	@docker/install-system.sh --python-only $(PYTHON)
	@echo "triton: PyTorch and Triton in $(VENV_TRITON) (2 GB on disk)"
	@$(PYTHON) -m venv --clear $(VENV_TRITON)
	@grep -E '^(torch|numpy|setuptools)' docker/frameworks.txt >$(VENV_TRITON)/frameworks.txt
	@$(VENV_TRITON)/bin/python -m pip --disable-pip-version-check install -qq --no-compile --progress-bar off \
		--constraint docker/constraints.txt -r $(VENV_TRITON)/frameworks.txt -r docker/triton.txt
	@touch $@

$(VENV_OLDER)/.stamp: docker/older.txt docker/torch-without-cuda.sh setup.py pyproject.toml $(wildcard hvd_gradcomp/ops/c/*.[ch])
	@docker/install-system.sh --python-only $(PYTHON_OLDER)
	@echo "older: PyTorch 2.0 and TensorFlow 2.13 in $(VENV_OLDER) (downloads 900 MB, takes 3 GB)"
	@$(PYTHON_OLDER) -m venv --clear $(VENV_OLDER)
	@$(VENV_OLDER)/bin/python -m pip install -qq --progress-bar off --upgrade -r docker/older.txt
	@docker/torch-without-cuda.sh $(VENV_OLDER)/bin/python 2.0.0
	@$(VENV_OLDER)/bin/python -m pip install -qq --no-build-isolation --no-deps --editable .
	@touch $@
