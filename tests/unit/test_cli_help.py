# SPDX-License-Identifier: Apache-2.0
"""The command line starts at once and explains itself."""

import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_dflash import __version__
from vllm_dflash.cli.app import app

HELP = "import sys; sys.argv = ['vllm-dflash', '--help']\nfrom vllm_dflash.cli.app import main\n"
HEAVY = ("torch", "vllm", "transformers", "numpy", "huggingface_hub")


def test_help_takes_less_than_half_a_second():
    """Breaks when a command imports something heavy at module level. CPU time: the clock of a busy machine proves nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", f"{HELP}main()"], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "demo" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_help_imports_nothing_heavy():
    """Breaks with the same mistake, and names it."""
    code = f"{HELP}import contextlib\nwith contextlib.suppress(SystemExit): main()\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.partition("MODULES")[2].split()
    assert [name for name in HEAVY if name in modules] == []


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("demo", ["--k", "--dtype", "--max-tokens", "--batch", "--prompts", "--json"]),
        (
            "generate",
            ["--target", "--draft", "--compare", "--temperature", "--top-p", "--seed", "--max-tokens", "--k", "--dtype"],
        ),
        ("doctor", ["--target", "--draft", "--json"]),
        ("serve", ["--draft", "--k"]),
    ],
)
def test_every_command_names_its_options(command, options):
    """Breaks when an option that the README names is renamed."""
    shown = CliRunner().invoke(app, [command, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    assert [option for option in options if option not in shown.output] == []


def test_version():
    """Breaks when the version is printed with decoration that scripts cannot read."""
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"vllm-dflash {__version__}\n")
