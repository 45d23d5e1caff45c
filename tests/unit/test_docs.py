# SPDX-License-Identifier: Apache-2.0
"""README and docs say what is there: links lead somewhere, commands exist, versions are the supported ones."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dflash.cli.app import app
from vllm_dflash.hooks import SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Breaks when a file is moved and a page still points to its old place."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_commands_exist(page):
    """Breaks when a page names a command of `vllm-dflash` or a make target that is gone."""
    text = page.read_text()
    commands = {command.name for command in app.registered_commands}
    assert (
        set(re.findall(r"`vllm-dflash ([a-z]+)", text)) | set(re.findall(r"^vllm-dflash ([a-z]+)", text, re.MULTILINE))
        <= commands
    )
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_the_supported_versions_are_named():
    """Breaks when a vLLM is added to the code and not to README and changelog."""
    for name in ("README.md", "CHANGELOG.md"):
        assert ", ".join(SUPPORTED_VLLM) in (ROOT / name).read_text()


def test_the_benchmark_page_is_what_the_results_say():
    """Breaks when a figure is edited by hand, or a new result is committed without its page."""
    assert subprocess.run([sys.executable, ROOT / "docs" / "make_benchmarks.py", "--check"]).returncode == 0


def test_the_options_page_is_what_the_code_says():
    """Breaks when an option is added or reworded and the page is not made again."""
    assert subprocess.run([sys.executable, ROOT / "docs" / "make_options.py", "--check"]).returncode == 0


def test_the_options_page_knows_vllms_fields():
    """Breaks when a vLLM with another speculative config is supported: its fields are given a meaning here, or left to others."""
    spec = importlib.util.find_spec("vllm")  # does not import it
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "config" / "speculative.py").read_text())
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig")
    fields = {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}
    others = ("prompt_lookup", "suffix_", "dspark_", "xpress_", "index_share", "target_", "draft_model_config", "draft_parallel")
    meant = {field for field in fields if not field.startswith(others)}
    meant -= {"tensor_parallel_size", "use_heterogeneous_vocab", "disable_lookahead_block_hashes"}
    named = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE))
    assert meant <= named


def test_the_readme_fits_one_screen():
    """Breaks when it grows into a manual."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 70
