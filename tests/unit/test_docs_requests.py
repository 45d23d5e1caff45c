# SPDX-License-Identifier: Apache-2.0
"""docs/requests.md claims what is tested: each row of its first table names a test that exists, its second is the families."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "requests.md").read_text()
REQUESTS, TARGETS = PAGE.split("## Families of targets")


def rows(text):
    """Cells of the table's rows, without its head."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def value_of(path, name):
    """The syntax tree of what ``name`` is set to, at the top of a file."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if name in [getattr(t, "id", None) for t in [*getattr(node, "targets", []), getattr(node, "target", None)]]:
            return node.value
    raise AssertionError(f"{path} has no {name}")


def keys(path, name):
    return [key.value for key in value_of(path, name).keys]


def test_every_row_is_tested():
    """Breaks when a feature is listed without a test, or a test is renamed and the page is not."""
    for feature, answer, test in rows(REQUESTS):
        path, function, _, case = re.fullmatch(r"`([\w/.]+)::(\w+)(\[(.+)\])?`", test).groups()
        source = (ROOT / path).read_text()
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), feature
        assert case is None or case in keys(path, "FEATURES"), feature
        assert answer.split(",")[0].split(":")[0] in ("works", "refused", "refused at start"), feature


def test_every_tested_parameter_has_a_row():
    """Breaks when a parameter is tested and nobody can read that it works."""
    named = re.findall(r"test_equal_to_no_speculation\[(.+?)\]", REQUESTS)
    assert sorted(named) == sorted(keys("tests/engine/v1/test_requests.py", "FEATURES"))


def test_the_families_are_the_tested_ones():
    """Breaks when a family is added, dropped or captured otherwise and the page is not changed."""
    path = "tests/engine/target_families.py"
    families = value_of(path, "FAMILIES")
    tested = []
    for name, call in zip(families.keys, families.values, strict=True):
        arguments = dict(zip(("model_type", "vllm_class", "special", "config", "capture"), call.args, strict=False))
        arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
        capture = arguments["capture"].value if "capture" in arguments else "native"
        tested.append([name.value, arguments["special"].value, capture])
    assert rows(TARGETS) == tested
