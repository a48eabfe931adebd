# `make` alone lists the targets. Everything is installed into .venv, with the versions in constraints.txt.
PYTHON ?= python3
ARGS ?=
VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
SDK_VERSIONS = $(shell cat tests/sdk_matrix/versions.txt)
# Where the peer of `make bench` may find a Python 3.12; PEER_PYTHON=/path/to/python3.12 says it.
PEER_PYTHONS = $(PEER_PYTHON) python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python3.12
PIP_INSTALL = pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo docs docs-version test slow bench chaos hosts check prose format aot aot-cuda aot-tpu s3 cookbook console console-check console-test sdk-matrix container-test fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/installed ## train a tiny model end to end; options: make demo ARGS="--learning-rate 0"
	.venv/bin/spmd-tx demo $(ARGS)

test: .venv/installed ## run the tests, without those marked slow, in four processes; options: make test ARGS="-k losses"
	PYTHONDONTWRITEBYTECODE= .venv/bin/pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not slow and not chaos and not cookbook and not console and not sdk_matrix and not container and not fuzz" $(ARGS)

slow: .venv/installed ## run the tests marked slow: meshes over many processes, thousands of stories of crashes
	.venv/bin/pytest -rs -m slow --ignore tests/hosts --ignore tests/sdk/test_s3.py $(ARGS)

bench: .venv/installed .venv-peer/installed ## compare speed and memory with SkyRL's JAX backend (installs it); ARGS="--help"
	.venv/bin/python -m tools.bench.compare $(ARGS)

chaos: .venv/installed ## kill servers hundreds of times, for hours, and compare with runs that nobody killed; ARGS="-k SQLite-1" for less
	.venv/bin/pytest -s -m chaos tests/chaos $(ARGS)

hosts: .venv/installed ## run workers in four network namespaces, and break the network between them (needs root)
	.venv/bin/pytest -s -rs tests/hosts -m slow $(ARGS)

check: .venv/installed ## formatting, lint, types, import rules, and the words of docstrings and comments
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/basedpyright
	.venv/bin/lint-imports --no-logo
	.venv/bin/python -m tests.prose.source

prose: .venv/installed tests/prose/node_modules/installed ## lint the prose of docs, help texts and messages (needs Node 20)
	.venv/bin/python -m tests.prose.messages .cache/prose/messages.md
	cd tests/prose && npx textlint -c textlintrc.json -f unix ../../.cache/prose/messages.md ../../README.md ../../CHANGELOG.md ../../CONTRIBUTING.md '../../docs/**/*.md'

format: .venv/installed ## apply the formatting and the safe fixes of lint
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

aot: aot-cuda aot-tpu ## compile for GPUs and TPUs, and compare with tests/aot/budgets.toml (installs 7 GB); ARGS="--only qwen3-4b"

aot-cuda: .venv-aot-cuda/installed
	.venv-aot-cuda/bin/python -m tests.aot.check cuda $(ARGS)

aot-tpu: .venv-aot-tpu/installed
	.venv-aot-tpu/bin/python -m tests.aot.check tpu $(ARGS)

s3: .venv-s3/installed ## keep checkpoints in an S3 endpoint on loopback (moto), and take it away for a while
	.venv-s3/bin/pytest -s -rs tests/sdk/test_s3.py -m slow $(ARGS)

cookbook: .venv/installed .venv-cookbook/hub ## run recipes of tinker-cookbook, unmodified and offline (installs torch)
	.venv/bin/pytest -s -m cookbook tests/cookbook $(ARGS)

docs: .venv/installed .venv-docs/installed ## build the documentation site into site/, without warnings (installs mkdocs)
	.venv/bin/python -m tests.write_openapi docs/reference/openapi
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet $(ARGS)
	@echo "open site/index.html"

docs-version: docs ## add the site to the branch gh-pages, beside those of other versions: make docs-version VERSION=0.2
	NO_MKDOCS_2_WARNING=1 VERSIONS_BY=mike PATH="$(CURDIR)/.venv-docs/bin:$$PATH" mike deploy --update-aliases --alias-type copy $(VERSION) latest
	PATH="$(CURDIR)/.venv-docs/bin:$$PATH" mike set-default latest
	@echo "git push origin gh-pages publishes it"

console: .venv/installed console/node_modules/installed ## generate the console's types, check them, and build it into the package (needs Node 20)
	.venv/bin/python -m tests.console.api_schema .cache/console/openapi.json
	cd console && npm run --silent generate ../.cache/console/openapi.json
	cd console && npm run --silent types && npm run --silent build

console-check: console/node_modules/installed ## formatting, lint, types and unit tests of the console's source (needs Node 20)
	cd console && npm run --silent style && npm run --silent types && npm run --silent unit

console-test: .venv/installed console ## drive every page of the console in Chromium, and look for faults of access
	.venv/bin/pytest -rs -m console tests/console $(ARGS)

sdk-matrix: .venv/installed $(SDK_VERSIONS:%=.venv-sdk/%/installed) ## train with each of many releases of the SDK (installs them)
	.venv/bin/pytest -s -m sdk_matrix tests/sdk_matrix $(ARGS)

container-test: .venv/installed .venv-helm/installed ## build the image of containers, and train in it; render the Helm chart (needs podman, buildah, uidmap, slirp4netns, mmdebstrap and at times runc, of Debian; 25 GB, or 10 with ARGS=tests/container/test_image.py)
	.venv/bin/pytest -s -rs -m container tests/container $(ARGS)

fuzz: .venv/installed .venv-fuzz/installed ## odd requests by the thousand at the door and behind it, kills, restarts (installs schemathesis)
	FUZZ_EXAMPLES=3000 .venv/bin/pytest -s tests/fuzz tests/coordinator/http/tinker/test_fuzz.py $(ARGS)

clean: ## remove caches and what demo and cookbook wrote; the environments stay
	rm -rf .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis demo runs

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("$(PYTHON) is older than 3.11; try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	.venv/bin/$(PIP_INSTALL) -e '.[dev]'
	touch $@

.venv-docs/installed: docs/reference/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r docs/reference/requirements.txt
	touch $@

# Helm's own library, with bindings.
.venv-helm/installed:
	$(PYTHON) -m venv .venv-helm
	.venv-helm/bin/pip install --quiet --disable-pip-version-check helm-python-sdk==0.2.2
	touch $@

.venv-s3/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/$(PIP_INSTALL) -e '.[dev,s3]' 'moto[server]==5.2.5'
	touch $@

.venv-aot-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-aot-$*
	.venv-aot-$*/bin/$(PIP_INSTALL) -e '.[aot-$*]'
	touch $@

.venv-peer/installed:
	@for python in $(PEER_PYTHONS); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
			exec "$$python" -m venv .venv-peer; \
		fi; \
	done; \
	echo "the peer needs Python 3.12; install it, as with: pyenv install 3.12 or: apt install python3.12-venv" >&2; \
	echo "or say where it is: make bench PEER_PYTHON=/path/to/python3.12" >&2; \
	exit 1
	.venv-peer/bin/pip install --quiet --disable-pip-version-check 'skyrl[jax,tinker]==0.3.0' tinker==0.24.1 psutil
	touch $@

# PyTorch comes first: with the other packages in one command pip would look at many of its versions.
.venv-cookbook/installed: tests/cookbook/requirements.txt
	$(PYTHON) -m venv .venv-cookbook
	.venv-cookbook/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-cookbook/bin/pip install --quiet --disable-pip-version-check -r tests/cookbook/requirements.txt
	.venv-cookbook/bin/pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
	touch $@

.venv-cookbook/hub: .venv-cookbook/installed tests/cookbook/make_offline_hub.py $(wildcard tests/cookbook/offline_*.py)
	HF_HUB_OFFLINE=1 .venv-cookbook/bin/python tests/cookbook/make_offline_hub.py $@
	touch $@

%/node_modules/installed: %/package-lock.json
	cd $* && npm ci --silent
	touch $@

.venv-fuzz/installed: tests/fuzz/requirements.txt
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/pip install --quiet --disable-pip-version-check -r tests/fuzz/requirements.txt
	touch $@

.venv-sdk/%/installed: tests/sdk_matrix/versions.txt
	$(PYTHON) -m venv .venv-sdk/$*
	.venv-sdk/$*/bin/pip install --quiet --disable-pip-version-check tinker==$*
	touch $@
