# make demo: train a small GPT over four ranks on this machine and write its report
# make test: everything the project promises; make lint: style and types
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint browser slurm clean

demo: .venv/train.installed
	$(BIN)/tdpp data prepare --source stdlib --output data/stdlib
	$(BIN)/tdpp launch experiment=demo
	@echo "The report of this run:"
	@$(BIN)/tdpp report

test: .venv/dev.installed browser slurm
	$(BIN)/pytest

lint: .venv/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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

.venv/%.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
