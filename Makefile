# Two commands do everything on a machine with Python 3.11 and make: `make demo` and `make test`. Both may be interrupted
# and started again.

PYTHON ?= python3.11
VENV   ?= .venv
CACHE  ?= .cache
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
NEWER  := $(CACHE)/vllm-0.33

# CPU engines: one thread (vLLM's second one spins), a small KV cache, no look-ups on a hub.
ENGINE := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
PYTEST := $(BIN)/python -m pytest -q
# Triton's interpreter stands in for a GPU; a stub gives vLLM a Triton backend for CPUs. Decided at import: processes of their own.
TRITON := TRITON_INTERPRET=1

# CPU torch: from a folder of wheels where pip knows one, else from PyTorch's CPU index.
ifneq ($(PIP_FIND_LINKS),)
TORCH := UV_FIND_LINKS="$(PIP_FIND_LINKS)"
else
TORCH_BACKEND := --torch-backend=cpu
endif

.PHONY: demo test install static unit kernels engine engine-newer clean

demo: $(READY)
	$(BIN)/vllm-dflash demo

install: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(TORCH) $(BIN)/python -m uv pip install --quiet --compile-bytecode $(TORCH_BACKEND) -e '.[cpu]' --group dev
	touch $@

test: static unit kernels engine engine-newer

static: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(READY)
	$(ENGINE) $(PYTEST) tests/unit tests/reference

kernels: $(READY)
	$(ENGINE) $(TRITON) PYTHONPATH=tests/shim $(PYTEST) tests/kernels

# vLLM 0.32 as installed: V1 runner (what CPU builds run), then Model Runner V2.
engine: $(READY)
	$(ENGINE) $(PYTEST) tests/engine/v1 tests/server
	$(ENGINE) $(TRITON) PYTHONPATH=tests/shim $(PYTEST) tests/engine/v2 tests/compat

# vLLM 0.33: its Python files over the compiled operators of the CPU wheel.
engine-newer: $(NEWER)/.complete
	$(ENGINE) PYTHONPATH=$(NEWER) $(PYTEST) tests/engine/v1
	$(ENGINE) $(TRITON) PYTHONPATH=$(NEWER):tests/shim $(PYTEST) tests/engine/v2 tests/compat

$(NEWER)/.complete: tests/overlay.py | $(READY)
	$(BIN)/python tests/overlay.py 0.33.0 $(NEWER)
	touch $@

clean:
	rm -rf $(VENV) $(CACHE)
