# SPDX-License-Identifier: Apache-2.0
"""The JSON file of a benchmark: where the figures come from, and the rows."""

import datetime as dt
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_dflash.bench.figures import Row
from vllm_dflash.cli.demo_report import versions
from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.machine import on_cpu
from vllm_dflash.cli.probes import hardware

COMMIT = "DFLASH_COMMIT"
"""Environment variable that names the commit where the code has no history."""


def provenance(**facts: Any) -> Row:
    """Versions, hardware, command, commit and date, and what else the caller knows."""
    found: Row = {"versions": versions(), "hardware": hardware(), "commit": _commit()}
    if not on_cpu():
        import torch

        found["gpu"] = torch.cuda.get_device_name()
    command = shlex.join(["vllm-dflash", *map(without_folders, sys.argv[1:])])
    return found | {"command": command, "date": dt.datetime.now(tz=dt.timezone.utc).isoformat(timespec="seconds"), **facts}


def without_folders(argument: str) -> str:
    """Where a file lay on the machine that measured says nothing to a reader; it may stand inside JSON, or behind a colon."""
    return re.sub(r"(?<![\w.~-])/(?:[^/\s\",]+/)*", "", argument)


def _commit() -> str:
    if given := os.environ.get(COMMIT):
        return given
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def save(path: Path, rows: list[Row], origin: Row, moved: Row | None = None) -> None:
    """Write the file whole, so that a run that is stopped leaves the cells it has finished; ``moved``: between two runs."""
    staging = path.with_name(path.name + ".part")
    found = {"provenance": origin} | ({"repeatability": moved} if moved else {}) | {"rows": rows}
    staging.write_text(_narrow(json.dumps(found, indent=1)) + "\n", encoding="utf-8")
    staging.replace(path)


def _narrow(text: str) -> str:
    """Lists of numbers on one line each."""
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


def load(path: Path) -> tuple[list[Row], Row]:
    """Rows and provenance of a result file.

    Raises:
        UserError: it is missing, or no result of a benchmark.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found["rows"], found["provenance"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--show {path}: not a result of `vllm-dflash bench` ({type(error).__name__}).") from error
