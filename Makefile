PYTHON ?= python3
BIN := .venv/bin

.PHONY: env dev environments train train-agent train-images test test-long test-ci test-release test-cuda test-cuda-vllm vllm-facts mutations nightly lint verify families bench start-up waiting two-trees host-cost gpu-counts gpu-day gpu-day-wheels sampling tools trl-tests long-context proof-overhead learning false-alarms draws filters filter-curve server-sync push-changes server-load plan tied-head docs newcomer house

# Makes the environment once, and again when pyproject.toml or the script changes. `env` has what runs need; `dev` has also what
# tests, linters and benchmarks need, 1.5 GB more.
env:
	@$(PYTHON) scripts/make_env.py

dev:
	@$(PYTHON) scripts/make_env.py --dev

# Trains a real language model with GRPO. vLLM generates, and every step is checked. An interrupted run can continue.
train: env
	@$(BIN)/lockstep demo $(ARGS)

# Trains the same model to use a calculator tool (docs/internals/conversations.md).
train-agent: env
	@$(BIN)/lockstep grpo --config recipes/agent.yaml $(ARGS)

# Trains a tiny model on a question that only a picture answers, and prints its held-out reward before and after (docs/internals/images.md).
train-images: env
	@$(BIN)/python examples/red_half.py $(ARGS)

# Runs every proof on the recipe's model and engine. ARGS=--self-test injects the known faults instead.
verify: env
	@$(BIN)/lockstep verify --config recipes/arithmetic.yaml $(ARGS)

# Verifies a tiny random model of each of some forty families on vLLM (docs/internals/models-and-tokens.md).
families: dev
	@$(BIN)/python -m benchmarks.proofs.vllm_families $(ARGS)

# Compares a whole step, and its learning half, with TRL on the same work. Measures scaling and lower bounds (docs/internals/speed.md).
bench: dev
	@$(BIN)/python -m benchmarks.against_trl.run $(ARGS)

# Measures the seconds from enter to the first sampled token, and where they go (docs/internals/speed.md).
start-up: dev
	@$(BIN)/python -m benchmarks.host.start_up $(ARGS)

# Measures the steps of a trainer that has waited, beside its other steps (docs/internals/speed.md).
waiting: dev
	@$(BIN)/python -m benchmarks.host.waiting $(ARGS)

# Measures the recipe's step beside the step of another checkout, in pairs: ARGS="--other ../before" (docs/internals/speed.md).
two-trees: dev
	@$(BIN)/python -m benchmarks.host.two_trees $(ARGS)

# Measures the cost of a step without the model and the engine, per sampled token (docs/internals/speed.md).
host-cost: dev
	@$(BIN)/python -m benchmarks.host.cost $(ARGS)

# Counts what keeps a GPU from working, on the pretend GPU: waits of the host, bytes of a push (docs/internals/pretend-gpu.md).
gpu-counts: dev
	@$(BIN)/python tests/pretend_cuda/counts.py

# Measures on a borrowed GPU machine without network (docs/internals/speed.md): needs no environment, only a Python with PyTorch.
# gpu-day-wheels collects the packages that this Python lacks, on a machine with a registry.
gpu-day:
	@$(PYTHON) -m benchmarks.gpu_day.run $(ARGS)

gpu-day-wheels: dev
	@$(BIN)/python -m benchmarks.gpu_day.run --collect-wheels

# Measures tokens per second of vLLM in this process, for the settings that a run can choose.
sampling: dev
	@$(BIN)/python -m benchmarks.sampling.settings $(ARGS)

# Measures rollouts with tools against their floors, and a training step with tools beside TRL's (docs/internals/conversations.md).
tools: dev
	@$(BIN)/python -m benchmarks.sampling.tools $(ARGS)

# Runs TRL's public tests with TRL's trainers and with ours, and prints both columns (ARGS=PATH_TO_TRL_CHECKOUT).
trl-tests: dev
	@$(BIN)/python scripts/trl_tests.py $(ARGS)

# Measures what it costs to record the ids that a filter keeps.
filters: dev
	@$(BIN)/python -m benchmarks.sampling.filters $(ARGS)

# Learns with top-p (ARGS=--regex: with a regular expression), scored as sampled and against the whole vocabulary.
filter-curve: dev
	@$(BIN)/python -m benchmarks.learning.filter_curve $(ARGS)

# Measures memory and time of forward and backward over packs of up to 32,768 tokens.
long-context: dev
	@$(BIN)/python -m benchmarks.learning.long_context $(ARGS)

# Measures the output head's forward and backward over the ids that a sampling filter kept, against the whole vocabulary.
filtered-head: dev
	@$(BIN)/python -m benchmarks.learning.filtered_head $(ARGS)

# Measures the cost of the proofs on the recipe (proof-overhead), and how often they stop a correct run (false-alarms).
proof-overhead: dev
	@$(BIN)/python -m benchmarks.proofs.overhead $(ARGS)

false-alarms: dev
	@$(BIN)/python -m benchmarks.proofs.false_alarms $(ARGS)

# Prints how many tokens the draws proof needs to notice each fault of sampling (docs/internals/proof.md).
draws: dev
	@$(BIN)/python -m benchmarks.proofs.draws $(ARGS)

# Trains a tiny model with every method on a task that it cannot do at first, and draws one reward curve per method.
learning: dev
	@$(BIN)/python -m benchmarks.learning.methods $(ARGS)

# Measures the cost of a push to a server (server-sync), what a push of the changed elements saves (push-changes), and a server under ten
# minutes of load (server-load).
server-sync: dev
	@$(BIN)/python -m benchmarks.servers.push $(ARGS)

push-changes: dev
	@$(BIN)/python -m benchmarks.servers.push_changes $(ARGS)

server-load: dev
	@$(BIN)/python -m benchmarks.servers.load $(ARGS)

# Predicts a step's seconds on 8 to 1,024 GPUs, and how to divide them between trainers and servers (docs/internals/plan.md).
plan:
	@$(PYTHON) -m benchmarks.plan.run $(ARGS)

# Shows a defect of vLLM that only the proofs detect.
tied-head: env
	@$(BIN)/python examples/tied_head.py $(ARGS)

# Plays somebody who installs the wheel and types every command of README and of the page of the first task, which takes hours.
# ARGS=--reuse installs the wheel alone, beside the packages of this environment; ARGS=--short does so and takes a minute (.ci/run).
newcomer: dev
	@$(BIN)/python scripts/newcomer.py $(ARGS)

# Two workers, because most tests use only one core. At the end pytest prints the seconds of each folder and the slowest tests.
PYTEST := $(BIN)/python -m pytest --dist loadfile --durations 20

test: dev
	@$(PYTEST) -n 2 -m "not long and not release" $(ARGS)

# The longer tests, which CI runs too: servers that are killed, started again, or split over two workers. Three workers, because
# these tests wait for servers a quarter of their time.
test-long: dev
	@$(PYTEST) -n 3 -m "long and not release" $(ARGS)

# The tests of `make test` and `make test-long` in one session, as CI runs them. Each worker imports the libraries and reads the tests
# once, and while some tests wait for servers, others compute.
test-ci: dev
	@$(PYTEST) -n 3 -m "not release" $(ARGS)

# Installs OpenEnv, verifiers, smolagents and LangGraph in Pythons of their own, for tests/environments and tests/gateway. The first two
# need older packages than vLLM.
environments: $(addprefix .environments/,openenv verifiers smolagents langgraph)
.environments/openenv: PACKAGE = openenv==0.10.0
.environments/verifiers: PACKAGE = verifiers==0.1.14
.environments/smolagents: PACKAGE = smolagents[openai]==1.26.0
.environments/langgraph: PACKAGE = langgraph==1.2.24 langchain-openai==1.7.4
.environments/%: | dev
	@$(BIN)/python -m venv $@.new && $@.new/bin/pip install --quiet $(PACKAGE) && mv $@.new $@

# Tests that take minutes. They are run by hand before a release, not by CI.
test-release: dev
	@$(PYTEST) -n 2 -m release $(ARGS)

# The suite, or a part of it, with the pretend GPU on (docs/internals/pretend-gpu.md). By hand, before a release.
test-cuda: dev
	@PYTHONPATH=$(CURDIR)/tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTEST) -p pretend_cuda.plugin -n 2 -m "not release" $(ARGS)

# The tests with vLLM, or a part of them, with vLLM's CUDA path on the pretend GPU (docs/internals/engines.md). By hand, before a release.
test-cuda-vllm: dev
	@PYTHONPATH=$(CURDIR)/tests/pretend_cuda/vllm/site:$(CURDIR)/tests$(if $(PYTHONPATH),:$(PYTHONPATH)) PRETEND_GIB=4 PRETEND_DEVICES=2 $(PYTEST) -p pretend_cuda.vllm.plugin -n 2 -m "vllm and not release" $(ARGS)

# Reads what Lockstep relies on from another release of vLLM, into tests/vllm_facts_VERSION.json: make vllm-facts VERSION=0.33.0
vllm-facts: dev
	@$(BIN)/python scripts/vllm_facts.py $(VERSION)

# Breaks a copy of the source in one place at a time; the tests of that place must fail.
mutations: dev
	@$(BIN)/python scripts/mutations.py $(ARGS)

# Whole self-tests, and a sample of the release tests and of the mutations: three hours in all. ARGS="--seed N" draws a sample again.
nightly: dev
	@$(BIN)/python scripts/nightly.py $(ARGS)

# Counts what a reader meets in the source, and prints it beside what is asked (docs/internals/design.md).
# ARGS="--tree ../other" counts another checkout, --files prints the names behind the figures. Needs no environment.
house:
	@$(PYTHON) scripts/house.py $(ARGS)

lint: dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && \
		$(BIN)/python scripts/mutations.py --fit

# Builds the site of docs/ in build/site, and fails on a link to a page or heading that does not exist. Takes seconds.
# ZENSICAL=… names another installation of the builder.
ZENSICAL ?= $(BIN)/zensical
docs: dev
	@$(ZENSICAL) build --strict --clean --config-file mkdocs.yml && $(BIN)/python scripts/site_hosts.py build/site
