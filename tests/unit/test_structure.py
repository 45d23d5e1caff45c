# SPDX-License-Identifier: Apache-2.0
"""The layers stay apart and the code stays small: what a reader may rely on without looking."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("vllm_dflash/**/*.py"), *ROOT.glob("kernels/**/*.py")]
HEAVY = {"torch", "vllm", "triton", "transformers", "safetensors", "tokenizers", "dflash_kernels", "numpy"}

# folder or file -> top-level packages that must not be imported anywhere in it
BANNED_ANYWHERE = {
    "kernels/dflash_kernels": {"vllm", "transformers", "vllm_dflash"},
    "vllm_dflash/reference": {"vllm", "triton", "dflash_kernels"},
    "vllm_dflash/demo_pair": {"vllm", "triton", "dflash_kernels"},
    "vllm_dflash/acceptance.py": HEAVY,
    "vllm_dflash/planner": HEAVY - {"numpy"},
    "vllm_dflash/checkpoint.py": HEAVY,
    "vllm_dflash/config_reader.py": HEAVY,
    "vllm_dflash/draft_config.py": HEAVY,
    "vllm_dflash/context_limits.py": HEAVY,
    "vllm_dflash/options.py": HEAVY,
    "vllm_dflash/token_frequency.py": HEAVY,
    "vllm_dflash/served_counts.py": HEAVY,
    "vllm_dflash/patching.py": HEAVY,
}
# imported by every process, or by every `--help`: nothing heavy at module level
BANNED_AT_THE_TOP = {"vllm_dflash/plugin.py": HEAVY, "vllm_dflash/hooks.py": HEAVY, "vllm_dflash/cli": HEAVY}


def _imports(tree: ast.AST, *, top_level: bool) -> Iterator[str]:
    nodes = ast.iter_child_nodes(tree) if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _below(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix else sorted(path.glob("**/*.py"))


@pytest.mark.parametrize(
    ("place", "banned", "top_level"),
    [(p, b, False) for p, b in BANNED_ANYWHERE.items()] + [(p, b, True) for p, b in BANNED_AT_THE_TOP.items()],
)
def test_layers_import_only_what_they_may(place, banned, top_level):
    """Breaks when a layer reaches across a boundary of docs/how-it-works.md, e.g. the reference starts to use vLLM."""
    files = _below(place)
    assert files, f"{place} is gone: correct this table"
    crossed = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in _imports(ast.parse(file.read_text()), top_level=top_level)
        if name.split(".")[0] in banned
    }
    assert not crossed


def test_only_engine_imports_vllm_at_module_level():
    """Breaks when vLLM becomes necessary to import anything but the engine: the plugin must load in a vLLM that differs."""
    outside = {
        str(file.relative_to(ROOT))
        for file in SOURCES
        if "engine" not in file.parts
        and any(name.split(".")[0] == "vllm" for name in _imports(ast.parse(file.read_text()), top_level=True))
    }
    assert not outside


def test_the_engine_does_not_lean_on_the_reference_or_the_command_line():
    """Breaks when the engine is tested against itself, or needs typer and rich in a worker."""
    crossed = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in _below("vllm_dflash/engine")
        for name in _imports(ast.parse(file.read_text()), top_level=False)
        if name.startswith(("vllm_dflash.reference", "vllm_dflash.cli", "typer", "rich"))
    }
    assert not crossed


def test_files_and_functions_stay_short():
    """Breaks when a file passes 350 lines, a function 60, or a Triton kernel 90."""
    long = []
    for file in SOURCES:
        text = file.read_text()
        if len(text.splitlines()) > 350:
            long.append(f"{file.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or 0) - node.lineno + 1
                limit = 90 if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list) else 60
                if size > limit:
                    long.append(f"{file.relative_to(ROOT)}: {node.name} has {size} lines")
    assert not long


def test_a_benchmark_names_its_rows_after_its_file():
    """Breaks if a benchmark that was measured counts as failed, as `run_all.py` finds no row of its name."""
    for path in ROOT.glob("kernels/benchmarks/bench_*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        cases = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Case"]
        names = {name.value for name in cases if isinstance(name, ast.Constant)}
        assert names <= {path.stem.removeprefix("bench_")}, path.name
