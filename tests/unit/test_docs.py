# SPDX-License-Identifier: Apache-2.0
"""README and docs say what is there: links lead somewhere, commands exist, versions are the supported ones."""

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


def test_the_readme_fits_one_screen():
    """Breaks when it grows into a manual."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 70
