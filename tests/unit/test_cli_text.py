# SPDX-License-Identifier: Apache-2.0
"""What is printed for a human: marks, verdicts and the demo's judgement."""

import dataclasses
import io
import json
from typing import Literal

import pydantic
import pytest
from rich.console import Console

from vllm_dflash.cli.demo_report import DemoResult, print_report
from vllm_dflash.cli.engine_child import report_error
from vllm_dflash.cli.generate import verdict
from vllm_dflash.cli.marks import MarkedText

STEPS = [[("The", False)], [(" sea", True), (" is", True), (" blue", False)], [(" [x]", False)]]


def printed(*, terminal: bool, enabled: bool = True) -> str:
    """The steps as they appear on a terminal or in a pipe."""
    stream = io.StringIO()
    marks = MarkedText(
        Console(file=stream, force_terminal=terminal, no_color=False, color_system="standard" if terminal else None),
        enabled=enabled,
    )
    for step in STEPS:
        marks.step(step)
    return stream.getvalue()


def test_accepted_drafts_are_marked():
    """Breaks when a mark covers the target's own token, or text is taken for markup."""
    assert printed(terminal=False) == "The[ sea is] blue [x]"
    assert printed(terminal=False, enabled=False) == "The sea is blue [x]"
    assert printed(terminal=True) == "The\x1b[1;32m sea is\x1b[0m blue [x]"


@pytest.mark.parametrize(
    ("found", "wanted", "greedy", "sentence"),
    [
        ([1, 2], [1, 2], True, "tokens identical: all 2"),
        ([1, 3], [1, 2], True, "tokens differ from number 2 on: use --dtype float32"),
        ([1], [1, 2], True, "tokens differ from number 2 on: use --dtype float32"),
        ([1, 3], [1, 2], False, "tokens differ from number 2 on: sampled answers"),
    ],
)
def test_verdict(found, wanted, greedy, sentence):
    """Breaks when an answer that ends early counts as identical."""
    assert verdict(found, wanted, greedy=greedy).startswith(sentence)


def test_what_vllm_refuses_names_field_and_value():
    """Breaks when pydantic's own layout, or only half of the fault, is shown."""

    class Config(pydantic.BaseModel):
        dtype: Literal["auto", "float32"] | int

        @pydantic.field_validator("dtype")
        @classmethod
        def check(cls, value):
            if value == 7:
                raise ValueError("seven is not possible")
            return value

    def fail(error_type, values):
        if error_type is KeyError:
            raise KeyError("k")
        Config(**values)

    def told(error_type, **values):
        channel = io.StringIO()
        with pytest.raises(error_type) as error:
            fail(error_type, values)
        report_error(channel, error.value)
        return json.loads(channel.getvalue())

    refused = told(pydantic.ValidationError, dtype="float33")
    assert refused["message"] == "dtype: found 'float33'. Input should be 'auto' or 'float32'."
    assert refused["unexpected"] is False
    assert told(pydantic.ValidationError, dtype=7)["message"] == "dtype: found 7. seven is not possible."
    assert told(KeyError) == {"event": "error", "message": "KeyError: 'k'", "unexpected": True}


def batch(tokens: list[int], drafts: int, accepted: int) -> dict:
    """A `result` event of one request."""
    output = {"prompt_token_ids": [1], "token_ids": tokens, "pieces": [("a", False), ("b", True), ("c", False)]}
    return {"outputs": [output], "seconds": 0.5, "drafts": drafts, "accepted": accepted, "accepted_per_position": [accepted, 0]}


def result(ours: list[int], accepted: int, dtype: str = "float32") -> DemoResult:
    """One prompt; the reference accepts 200 of 100 drafts' tokens."""
    arms = {"none": [batch([5, 6], 0, 0)], "builtin": [batch([5, 6], 100, 150)], "ours": [batch(ours, 100, accepted)]}
    return DemoResult(["Hi"], arms, [{"drafts": 100, "accepted": 200}], k=2, dtype=dtype, max_tokens=2, batch=1)


def test_the_json_has_what_it_promises():
    """Breaks when a key that scripts read is renamed, or a figure computed differently."""
    found = result([5, 6], 200).to_json()
    assert {
        "prompts": 1,
        "lossless": True,
        "acceptance_length": 3.0,
        "reference_acceptance_length": 3.0,
        "builtin_acceptance_length": 2.5,
        "tokens_per_second": {"none": 4.0, "builtin": 4.0, "ours": 4.0},
        "k": 2,
        "dtype": "float32",
    }.items() <= found.items()
    assert found["acceptance_per_position"] == [2.0, 0.0]


@pytest.mark.parametrize(
    ("ours", "accepted", "dtype", "good"),
    [
        ([5, 6], 200, "float32", True),
        ([5, 6], 201, "float32", True),  # 0.33 %
        ([5, 6], 202, "float32", False),  # 0.67 %
        ([5, 6], 198, "float32", False),
        ([5, 7], 200, "float32", False),
        ([5, 7], 100, "bfloat16", True),
    ],
)
def test_what_the_demo_calls_wrong(ours, accepted, dtype, good):
    """Breaks when a lossy answer or an acceptance more than 0.5 % off, in either direction, ends with exit code 0."""
    assert result(ours, accepted, dtype).good is good


def test_drafts_that_follow_the_load_are_not_held_against_the_reference():
    """Breaks when a planner that drafts less fails the demo, or a lossy one passes it."""
    cut, lossy = result([5, 6], 100), result([5, 7], 100)
    assert [dataclasses.replace(one, planned=True).good for one in (cut, lossy)] == [True, False]


def test_the_report_shows_text_figures_and_verdict():
    """Breaks when the table loses an arm or the failure is not said."""
    stream = io.StringIO()
    print_report(Console(file=stream, width=120), result([5, 7], 200))
    shown = stream.getvalue()
    for part in (
        "> Hi",
        "a[b]c",
        "no speculation",
        "vLLM's built-in dflash",
        "vllm-dflash",
        "reference loop",
        "0 of 1",
        "not lossless",
    ):
        assert part in shown
