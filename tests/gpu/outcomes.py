# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin (``-p outcomes``): outcome, seconds and recorded properties of each test, as lines of JSON in a file.

DFLASH_OUTCOMES names the file.

Lines are written as tests end, so a run that is stopped at its time limit leaves what it has finished.
"""

import json
import os
from collections import defaultdict
from pathlib import Path

VARIABLE = "DFLASH_OUTCOMES"
_seconds = defaultdict(float)
_said = {}
_facts = {}


def pytest_runtest_logreport(report):
    _seconds[report.nodeid] += report.duration
    if report.failed or (report.skipped and report.nodeid not in _said):
        _said[report.nodeid] = ("failed" if report.failed else "skipped", _reason(report))
    _facts.setdefault(report.nodeid, {}).update(report.user_properties)
    if report.when == "teardown":
        outcome, reason = _said.get(report.nodeid, ("passed", ""))
        _write(report.nodeid, outcome, reason)


def pytest_collectreport(report):
    if report.failed:
        _write(report.nodeid, "failed", _reason(report))


def _reason(report):
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[:400]


def _write(nodeid, outcome, reason):
    row = {"test": nodeid, "outcome": outcome, "seconds": round(_seconds[nodeid], 2), **_facts.get(nodeid, {})}
    with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | ({"reason": reason} if reason else {})) + "\n")
