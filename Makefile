# Developers' targets. Users need none of them: `python3 manage.py demo` and `python3 manage.py test` set up everything.
PY ?= .venv/bin/python

.PHONY: help env check format test full states openapi bench-answer bench-bits bench-compile bench-decode bench-delta bench-kernels bench-layouts bench-leak bench-policy bench-prune bench-publish bench-rollback bench-routing bench-runtime bench-slices demo fuzz lock lock-exporters peers

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env: ## Build the virtual environment with the test lock
	python3 manage.py test --only-setup

check: env ## Format, lint, types, layers, migrations, freshness of generated documents
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(dir $(PY))lint-imports
	$(PY) manage.py makemigrations --check --dry-run
	$(PY) manage.py openapi --check
	$(PY) manage.py states_print --check

format: ## Rewrite the sources in the house format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

test: ## The everyday tier
	python3 manage.py test

full: ## The everyday tier and the long campaigns
	python3 manage.py test --full

fuzz: env ## Every parser of bytes from outside, guided by coverage: FUZZ_SECONDS (20) each
	$(PY) -m pip install -q --require-hashes -r requirements-fuzz.lock
	$(PY) -m tests.fuzz --seconds $(or $(FUZZ_SECONDS),20)

states: ## Print the state diagrams into docs/states
	$(PY) manage.py states_print

openapi: ## Write docs/openapi.json
	$(PY) manage.py openapi

demo: ## The main job, once
	python3 manage.py demo --once

bench-answer: env ## Whole answer of EdgeCard against ONNX Runtime f32
	$(PY) -m benchmarks.answer --check

bench-bits: env ## The same bits in every build, by two compilers, on 1 to 3 threads, under emulators
	$(PY) -m benchmarks.bits --check

bench-compile: env ## Compile EdgeCard cold, after one changed expert, unchanged, for a second target
	$(PY) -m benchmarks.compile --check

peers: env ## What we measure against, once: ggml is built here, a few minutes and a C++ compiler
	CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DLLAVA_BUILD=OFF" \
	  $(PY) -m pip install --require-hashes -r requirements-peers.lock

bench-decode: peers ## A whole decoder, token by token, against ONNX Runtime and llama.cpp; the result table
	$(PY) -m benchmarks.decode --check

bench-delta: peers ## Bytes, time and memory of updates against bsdiff4, HDiffPatch, xdelta3, zstd, detools
	$(PY) -m benchmarks.delta --check

bench-kernels: peers ## Products and routed layers against the read limit, ONNX Runtime, ggml and OpenVINO
	$(PY) -m benchmarks.kernels --check

bench-layouts: env ## Layouts of pruned weights on held-out shapes: regret of the choice; run-time checks
	$(PY) -m benchmarks.layouts --check

bench-policy: env ## Cost model of policies on held-out shapes: error; measured crossovers
	$(PY) -m benchmarks.policy --check
bench-leak: env ## Whether times tell how many neurons are dead: constant-time plans, and skipping as the control
	$(PY) -m benchmarks.leak --check

bench-rollback: env ## Going back to the version before: seconds and payload bytes of a device
	$(PY) -m benchmarks.rollback --check

bench-routing: env ## Steered routers of EdgeCard: experts loaded with 25 to 75 % in memory, answers lost
	$(PY) -m benchmarks.routing --check

bench-prune: env ## Adaptive pruning of EdgeCard: accuracy, rows kept, time
	$(PY) -m benchmarks.prune --check

bench-publish: env ## 80 releases published among 100,000: seconds, and bytes a device downloads
	$(PY) -m benchmarks.publish --check

bench-runtime: env ## A model larger than its memory: misses, time, first token, memory, against LRU over malloc
	$(PY) -m benchmarks.runtime --check

bench-slices: env ## Slices seen while the one before is kept, against one after the other; the timeline
	$(PY) -m benchmarks.slices --check

lock: ## Resolve the lock files again from requirements*.in
	$(PY) -m uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header requirements.in -o requirements.lock
	$(PY) -m uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header requirements-dev.in -o requirements-dev.lock
	$(PY) -m uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header requirements-peers.in -o requirements-peers.lock
	$(PY) -m uv pip compile --universal --python-version 3.11 --no-deps --generate-hashes --no-emit-index-url --no-header requirements-models.in -o requirements-models.lock
	$(PY) -m uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-header requirements-fuzz.in -o requirements-fuzz.lock

lock-exporters: ## The same for the exporters of examples/moe-exports; UV_FIND_LINKS names where torch for the CPU is
	$(PY) -m uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header requirements-exporters.in -o requirements-exporters.lock
