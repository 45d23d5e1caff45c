# Two commands do everything on a machine with Python 3.11 and make: `make demo` and `make test`. Both may be interrupted
# and started again.

PYTHON ?= python3.11
VENV   ?= .venv
CACHE  ?= .cache
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
NEWER  := $(CURDIR)/$(CACHE)/vllm-0.33
WHEEL  := $(CACHE)/vllm-0.33.0-*.whl

# CPU engines: one thread (vLLM's second one spins), a small KV cache, no look-ups on a hub.
ENGINE := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
# `make test ALL=1`: also what is marked slow, and everything on both versions of vLLM; an hour.
PYTEST := $(BIN)/python -m pytest -q $(if $(ALL),,-m "not slow")
# Triton's interpreter stands in for a GPU; a stub gives vLLM a Triton backend for CPUs. Decided at import: processes of their own.
TRITON := TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/tests/shim

# CPU torch: from a folder of wheels where pip knows one, else from PyTorch's CPU index.
ifneq ($(PIP_FIND_LINKS),)
TORCH := UV_FIND_LINKS="$(PIP_FIND_LINKS)"
else
TORCH_BACKEND := --torch-backend=cpu
endif

# What depends on vLLM's version: run on both. The rest runs on 0.32 (V1, as installed) or on 0.33 (Model Runner V2).
CORE_V1 := $(addsuffix .py,$(addprefix tests/engine/v1/test_,capture drafts_match_reference sampling))
CORE_V2 := $(addsuffix .py,$(addprefix tests/engine/v2/test_,capture drafts_match_reference greedy target_graphs))

# Parts of `make test`, two at a time: engines are single-threaded here.
PARTS := static engine-v1 newer-v1 engine-v2 newer-v2 server unit reference kernels

.PHONY: demo test bench install clean $(PARTS)

demo: $(READY)
	$(BIN)/vllm-dflash demo

# Three arms over the demo pair on this machine, about 10 minutes on two cores.
bench: $(READY)
	$(BIN)/vllm-dflash bench --dtype float32 --k 3 --concurrency 1,4,16 --prompts chat,code,copy --max-tokens 48 --out bench.json

install: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(TORCH) $(BIN)/python -m uv pip install --quiet --compile-bytecode $(TORCH_BACKEND) -e '.[cpu]' --group dev
	touch $@

test: $(READY) $(NEWER)/.complete
	$(MAKE) --no-print-directory -k -j2 --output-sync=target $(PARTS)

static: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(READY)
	$(ENGINE) $(PYTEST) tests/unit

reference: $(READY)
	$(ENGINE) $(PYTEST) tests/reference

kernels: $(READY)
	$(ENGINE) $(TRITON) $(PYTEST) tests/kernels

# vLLM 0.32 as installed: the V1 runner (what CPU builds run), then Model Runner V2.
engine-v1: $(READY)
	$(ENGINE) $(PYTEST) tests/engine/v1

engine-v2: $(READY)
	$(ENGINE) $(TRITON) $(PYTEST) $(if $(ALL),tests/engine/v2,$(CORE_V2)) tests/compat

server: $(READY)
	$(ENGINE) $(PYTEST) tests/server

# vLLM 0.33: its Python files over the compiled operators of the CPU wheel.
newer-v1: $(NEWER)/.complete
	$(ENGINE) PYTHONPATH=$(NEWER) $(PYTEST) $(if $(ALL),tests/engine/v1,$(CORE_V1))

newer-v2: $(NEWER)/.complete
	$(ENGINE) $(TRITON):$(NEWER) $(PYTEST) tests/engine/v2 tests/compat

$(NEWER)/.complete: tests/overlay.py | $(READY)
	ls $(WHEEL) >/dev/null 2>&1 || $(BIN)/python -m pip download --quiet --no-deps --dest $(CACHE) vllm==0.33.0
	$(BIN)/python tests/overlay.py $(WHEEL) $(NEWER)
	touch $@

clean:
	rm -rf $(VENV) $(CACHE)
