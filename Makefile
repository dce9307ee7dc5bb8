# make demo: train a small GPT over four ranks on this machine and write its report
# make test: all quick tests, and of the slow ones another eighth each day (PART=0 to 7 chooses one); make test-fast: the
# quick ones; make test-thorough: everything, with every case of the products from which the others draw some
# make test-megatron: the engine megatron_core, and BERT, T5 and their samples beside megatron-core's own, which it installs
# make test-mutations: mistakes in the engine, the search and the judge that the tests are to catch
# make test-cuda: what ranks do on GPUs, on a machine without one; installs the CUDA build of torch, 3 GB to download
# make lint: style and types
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-fast test-thorough test-megatron test-mutations test-cuda lint browser slurm hosts shells corpora constraints clean

demo: .venv/train.installed
	$(BIN)/tdpp data prepare --source stdlib --output data/stdlib
	$(BIN)/tdpp launch experiment=demo
	@echo "The report of this run:"
	@$(BIN)/tdpp report

PART ?= $(shell expr $$(date +%j) % 8)
WHICH = $(if $(PART),--part=$(PART))
PARALLEL = $(BIN)/pytest $(THOROUGH) $(WHICH) --dist=worksteal --numprocesses

# $(call tested,NAME,ARGUMENTS): runs tests beside each other. Those that fail are run once more, one after another: on an
# overloaded machine a process that waits for another may give up, and CI must tell that from a fault. Both results are shown.
CACHE = build/pytest-cache-$(1)
define tested
{ rm -rf $(CACHE); $(PARALLEL)=$(2) -o cache_dir=$(CACHE); code=$$?; test $$code != 1 || { \
  echo "run once more, alone:" && $(BIN)/pytest $(THOROUGH) $(WHICH) --exitfirst -v --last-failed --last-failed-no-failures=none -o cache_dir=$(CACHE) \
  && echo "PASSED ALONE, failed beside others above: what do these tests race with?"; code=$$?; }; (exit $$code); }
endef

# These wait for jobs, hosts and time limits more than they compute, and so run beside all others: four at a time, each
# on its own cluster.
WAITING := tests/launch/node/elastic/test_runs.py tests/hosts tests/slurm tests/launch/judge/test_hung_rank.py \
  tests/benchmarks/test_rebalancing.py tests/launch/containers/test_docker.py tests/launch/control/test_cut_off.py
test: .venv/dev.installed browser slurm hosts shells corpora
	@mkdir -p build
	@echo "of the slow tests $(if $(PART),those of part $(PART); PART= runs all of them,all)"
	@echo "the tests that wait, on Slurm among others, write to build/waiting-tests.txt, and are shown when the others are done"
	@$(call tested,waiting,4 $(WAITING)) > build/waiting-tests.txt 2>&1 & waiting=$$!; \
	$(call tested,others,auto --maxprocesses=8 $(addprefix --ignore=,$(WAITING))); others=$$?; \
	wait $$waiting; waiting=$$?; cat build/waiting-tests.txt; exit $$((others | waiting))

test-thorough: THOROUGH = --thorough
test-thorough: PART =
test-thorough: test

# Without those marked `slow`: tests on Slurm, in a browser, and what repeats a quicker test under more conditions.
test-fast: .venv/dev.installed
	$(PARALLEL)=auto --maxprocesses=8 -m "not slow"

# Not a part of `make test`, which installs nothing that neither the project nor its other tests need. On Slurm it runs
# all tests that any engine is to pass: a part of so few may be none of them. They wait, and so run beside the others.
test-megatron: .venv/dev,megatron.installed slurm
	@mkdir -p build
	@$(BIN)/pytest --dist=worksteal --numprocesses=2 --engine=megatron_core -m any_engine tests/slurm \
	  > build/megatron-on-slurm.txt 2>&1 & waiting=$$!; trap 'kill $$waiting; exit 130' INT TERM; \
	$(PARALLEL)=auto --maxprocesses=4 --engine=megatron_core tests/megatron_ext/core \
	  tests/megatron_ext/tasks/language/test_megatron_core.py tests/megatron_ext/data/test_megatron_core.py \
	  tests/launch/control/test_megatron_lm_runs.py tests/megatron_ext/test_worker.py; code=$$?; \
	wait $$waiting || code=$$?; cat build/megatron-on-slurm.txt; exit $$code

# What the tests are worth: each mistake is made in a copy of the project, where its test must fail.
test-mutations: .venv/dev.installed
	$(BIN)/python -m tests.mutations.run

# Under a stand-in for CUDA (tests/support/cuda) the real CUDA build of torch runs without a GPU. It has a venv of its own,
# which is kept: 5 GB. CUDA_VENV=FOLDER keeps it elsewhere, for several clones.
CUDA_VENV ?= .venv-cuda
test-cuda: .venv/dev,megatron.installed $(CUDA_VENV)/cuda.installed
	@command -v g++ >/dev/null || $(call install,g++,the tests on GPUs)
	CUDA_VENV=$(CUDA_VENV) $(PARALLEL)=auto --maxprocesses=4 tests/cuda

$(CUDA_VENV)/cuda.installed: constraints.txt
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	sed -n '/^pip==/,/[^\\]$$/p' constraints.txt > $(CUDA_VENV)/pip.txt
	$(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install --require-hashes -r $(CUDA_VENV)/pip.txt \
	  && $(CUDA_VENV)/bin/python -m pip --disable-pip-version-check install -c constraints.txt --require-hashes \
	  numpy "$$(sed -nE 's/^(torch==[^ ]+) .*/\1/p' constraints.txt)" \
	  || { echo "make test-cuda: the CUDA build of torch (3 GB) could not be installed into $(CUDA_VENV), as above;" \
	  "CUDA_VENV=FOLDER takes a venv that has it" >&2; exit 1; }
	@$(CUDA_VENV)/bin/python -c 'import torch; assert torch.version.cuda' 2>/dev/null \
	  || { echo "make test-cuda: the torch in $(CUDA_VENV) is built without CUDA" >&2; exit 1; }
	touch $@

lint: .venv/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & rooms=$$!; $(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests; tests=$$?; \
	wait $$rooms && exit $$tests

# $(call install,PACKAGES,TESTS): as root, says which of Debian's packages it installs, and installs them. Otherwise they
# must be there already; the tests say what they skip.
install = { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
  && echo "installing Debian's packages $(1), for $(2)" >&2 \
  && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1); } \
  || echo "$(2) are skipped; to run them, install Debian's packages $(1)" >&2

# The pages are tested in a real browser.
browser:
	@command -v chromium >/dev/null || $(call install,chromium,the browser tests)

# Launching is tested on a real Slurm, which the tests start themselves.
slurm:
	@{ PATH="$$PATH:/usr/sbin:/sbin"; command -v sbatch && command -v slurmctld && command -v slurmd \
	  && command -v slurmdbd && command -v munged && command -v mariadbd && command -v ip; } >/dev/null \
	  || $(call install,slurm-wlm slurmdbd munge mariadb-server iproute2,the tests on Slurm)

# Tab is pressed in the shells that complete tdpp's words.
shells:
	@{ command -v bash && command -v zsh && command -v fish; } >/dev/null \
	  || $(call install,bash zsh fish,the tests of completion in those shells)

# And on hosts that ssh reaches. The package's own sshd is not started where it is installed for the tests.
hosts:
	@{ PATH="$$PATH:/usr/sbin:/sbin"; command -v sshd && command -v ssh && command -v ip; } >/dev/null \
	  || $(call install,openssh-server openssh-client iproute2,the tests on hosts)

# Making pairs of sentences is tested on Debian's packages, which are downloaded and not installed.
CORPORA := libreoffice-help-de libreoffice-help-en-us gcc-12-locales
CORPORA_IN ?= build/corpora
corpora:
	@mkdir -p $(CORPORA_IN); cd $(CORPORA_IN); \
	for name in $(CORPORA); do ls $${name}_*.deb >/dev/null 2>&1 || missing="$$missing $$name"; done; \
	test -z "$$missing" || { echo "downloading Debian's packages$$missing, for the tests of pairs" >&2 \
	  && { test "$$(id -u)" != 0 || apt-get update -qq; } && apt-get download -qq $$missing; } \
	  || echo "the tests of pairs on Debian's packages are skipped; to run them, put$$missing into $(CORPORA_IN)" >&2

# Only what constraints.txt lists is installed, also to build what has no wheel, and every file must have one of its
# hashes. pip comes first, as older versions do not take hashes from constraints.
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch, and nothing else, from that index.
TORCH_INDEX ?=
PIP = $(BIN)/python -m pip --disable-pip-version-check install
CHECKED = $(PIP) --build-constraint constraints.txt -c constraints.txt --require-hashes

# $(call needed,EXTRAS): prints the requirements of the project with these extras.
needed = $(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  extras = project["optional-dependencies"]; wanted = "$(1)".split(","); \
  print(*project["dependencies"], *(line for extra in wanted for line in extras[extra]), sep="\n")'

# Where pip is set up to find torch's CPU build, that one is taken: left alone, pip prefers a file whose hash it is told
# before it is downloaded, which a folder of files does not tell.
offered_cpu_torch = $(CHECKED) --quiet --no-deps "torch==$$(sed -nE 's/^torch==([^ ]+) .*/\1/p' constraints.txt)+cpu" 2>/dev/null \
  || echo "pip's index has no CPU build of torch"

.venv/%.installed: .venv/itself.installed
	$(if $(TORCH_INDEX),$(CHECKED) --no-deps --index-url $(TORCH_INDEX) torch,$(offered_cpu_torch))
	$(call needed,$*) > .venv/needed.txt
	$(CHECKED) -r .venv/needed.txt
	touch $@

# The checkout, of which the search's innermost loops are compiled: once, whatever extras it is used with.
.venv/itself.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	sed -n '/^pip==/,/[^\\]$$/p' constraints.txt > .venv/pip.txt
	$(PIP) --require-hashes -r .venv/pip.txt
	PYTHONWARNINGS=ignore $(PIP) --build-constraint constraints.txt --no-deps -e .
	touch $@

# Run after a change of the dependencies; UPGRADE=--upgrade moves all versions. torch's CPU builds have hashes of their own.
TORCH_CPU := https://download.pytorch.org/whl/cpu
constraints: .venv/dev.installed
	mkdir -p build
	$(CHECKED) uv
	printf '%s\n' pip setuptools cython uv | $(BIN)/uv pip compile pyproject.toml - --all-extras --universal --generate-hashes \
	  --custom-compile-command 'make constraints' --no-annotate --quiet $(UPGRADE) --output-file constraints.txt
	version=$$(sed -nE 's/^torch==([^ ]+) .*/\1/p' constraints.txt) && curl -fsS $(TORCH_CPU)/torch/ \
	  | sed -nE "s/.*torch-$$version%2Bcpu-.*linux.*#sha256=([0-9a-f]{64})\".*/    --hash=sha256:\1 \\\\/p" \
	  | sort > build/torch-cpu.txt
	test -s build/torch-cpu.txt
	grep -vxFf constraints.txt build/torch-cpu.txt | sed -i '/^torch==/r /dev/stdin' constraints.txt

clean:
	rm -rf .venv .venv-cuda build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
