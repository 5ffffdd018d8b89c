# make demo   set-up, then checkpoint to decision on SmolLM2-135M (about 15 minutes on 2 cores)
# make test   the test suite          make lint   ruff, mypy, import-linter          make bench   the benchmarks
#
# A CUDA user installs their build of torch into .venv before the first make; it is kept.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: setup demo test lint bench bench-quantize clean

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

clean:
	rm -rf $(VENV) runs mlruns mlflow.db quantgate.db .mypy_cache .ruff_cache .import_linter_cache .hypothesis
