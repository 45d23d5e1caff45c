# SPDX-License-Identifier: Apache-2.0
"""What `vllm-dflash bench` makes of the engines' events; the engines themselves run in tests/server."""

import json

import pytest

from vllm_dflash.bench.arms import parse_arms
from vllm_dflash.bench.figures import cell_row, run_figures
from vllm_dflash.bench.gate import Verdict, last_number, read_questions
from vllm_dflash.bench.prompts import groups, prompt_set
from vllm_dflash.bench.record import save
from vllm_dflash.bench.report import HEADINGS, lines
from vllm_dflash.cli.failure import UserError


def event(step_s, counts, *, drafts=0, accepted=0, first=0.5):
    """A `result` event: prefill takes `first` seconds, then a step every `step_s`; request i gets `counts[i]` tokens a step."""
    steps = max(map(len, counts))
    ends = [first + step_s * i for i in range(steps)]
    outputs = [
        {"token_ids": list(range(sum(c))), "steps": list(c), "arrivals": list(range(len(c)))} for c in counts
    ]  # fmt: skip
    return {
        "step_ends": ends,
        "outputs": outputs,
        "seconds": ends[-1],
        "drafts": drafts,
        "accepted": accepted,
        "accepted_per_position": [accepted, 0],
    }


def test_figures_of_a_run_that_can_be_checked_by_hand():
    """Breaks if prefill leaks into the steady state, or tokens of the first step count as decoded."""
    row = run_figures(event(0.1, [[1] + [3] * 20, [1] + [3] * 12]))
    assert row["step_ms"] == pytest.approx(100)
    assert row["tok_s"] == pytest.approx(60)  # two requests, three tokens each, every 0.1 s
    assert row["ttft_ms"] == pytest.approx(500)
    assert row["tpot_ms"] == pytest.approx(100 / 3)
    assert row["tok_s_wall"] == pytest.approx((61 + 37) / 2.5)


def test_the_slowest_of_few_requests_is_their_99th_percentile():
    """Breaks if a percentile of eight values is the second largest."""
    counts = [[1] + [n] * 12 for n in (1, 2, 2, 2, 2, 2, 2, 2)]
    assert run_figures(event(0.1, counts))["tpot_p99_ms"] == pytest.approx(100)


def test_a_load_without_a_steady_state_in_one_arm_compares_whole_runs():
    """Breaks if one arm's whole run is divided by the other's steady state."""
    base = {"prompts": "copy", "temperature": 0.0, "concurrency": 1}
    rows = [base | {"arm": "none", "tok_s": 100.0, "tok_s_wall": 50.0}, base | {"arm": "ours", "tok_s_wall": 75.0}]
    assert [line[HEADINGS.index("vs none")] for line in lines(rows)] == ["1.00x", "1.50x"]


def test_a_run_without_a_steady_state_says_nothing_about_it():
    """Breaks if a window of one or two steps is divided by."""
    assert "tok_s" not in run_figures(event(0.1, [[1, 2], [1, 2]]))


def test_a_cell_is_the_median_and_acceptance_is_over_all_repetitions():
    """Breaks if an outlier moves the figure, or acceptance is averaged over runs of unequal length."""
    runs = [event(s, [[1] + [2] * 20], drafts=d, accepted=a) for s, d, a in ((0.1, 10, 10), (0.11, 30, 90), (0.9, 10, 20))]
    row = cell_row(runs, None)
    assert row["step_ms"] == pytest.approx(110)
    assert row["acceptance_length"] == pytest.approx(1 + 120 / 50)
    assert row["repeats"] == 3
    assert row["step_ms_spread"] == pytest.approx(800 / 110)


def test_answers_that_differ_are_counted():
    """Breaks if a lossy arm looks lossless."""
    plain, other = event(0.1, [[1] * 9, [1] * 9]), event(0.1, [[1] * 9, [1] * 9])
    other["outputs"][1]["token_ids"][4] = 99
    row = cell_row([other], [plain])
    assert (row["same_tokens"], row["answers"]) == (1, 2)


def test_the_table_has_a_cell_for_every_heading_and_relates_to_no_speculation():
    """Breaks if a column is added in one place only, or the ratio's base is another load."""
    base = {"prompts": "code", "temperature": 0.0, "repeats": 1}
    rows = [base | {"arm": "none", "concurrency": c, "tok_s": 10.0 * c, "tok_s_wall": 1.0} for c in (1, 2)]
    rows += [base | {"arm": "ours", "concurrency": c, "tok_s": 30.0, "tok_s_wall": 1.0} for c in (1, 2)]
    found = lines(rows)
    assert {len(line) for line in found} == {len(HEADINGS)}
    assert [line[HEADINGS.index("vs none")] for line in found] == ["1.00x", "1.00x", "3.00x", "1.50x"]


def test_arms_with_settings_of_their_own():
    """Breaks if the settings of an extra arm get lost."""
    arms = parse_arms("none,ours", ['wide=ours:{"speculative": {"draft_sample_method": "probabilistic"}}', "again=builtin"])
    assert [(arm.name, arm.kind) for arm in arms] == [("none", "none"), ("ours", "ours"), ("wide", "ours"), ("again", "builtin")]
    assert arms[2].speculative == {"draft_sample_method": "probabilistic"}


@pytest.mark.parametrize(
    ("names", "further", "sentence"),
    [
        ("none,theirs", [], "'theirs'; expected one of none, builtin, ours"),
        ("ours", ["ours=ours"], "ours given twice"),
        ("ours", ["x"], "expected NAME=KIND"),
        ("ours", ["x=ours:{"], "is not JSON"),
        ("ours", ['x=ours:{"k": 1}'], '"speculative" and "engine" at most'),
        (",", [], "expected some of none"),
    ],
)
def test_arms_that_cannot_be_read(names, further, sentence):
    """Breaks if a typing mistake ends in a traceback or is ignored."""
    with pytest.raises(UserError, match=sentence):
        parse_arms(names, further)


def test_prompts_of_files_of_a_folder_are_mixed(tmp_path):
    """Breaks if a small load sees one kind of prompt only."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a0"}\n{"prompt": "a1"}\n')
    (tmp_path / "b.jsonl").write_text('{"turns": ["b0", "no"]}\n\n{"question": "b1"}\n')
    assert prompt_set(str(tmp_path)) == ["a0", "b0", "a1", "b1"]
    assert prompt_set("code")
    assert groups(["p", "q", "r"], 2, 3) == [["p", "q"], ["r", "p"], ["q", "r"]]


@pytest.mark.parametrize(("line", "sentence"), [("{", "p.jsonl:1: not JSON"), ('{"a": 1}', "expected an object with text")])
def test_prompts_that_cannot_be_read(tmp_path, line, sentence):
    """Breaks if a broken line is skipped silently."""
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(UserError, match=sentence):
        prompt_set(str(tmp_path / "p.jsonl"))


@pytest.mark.parametrize(
    ("text", "number"),
    [("so it is 1,234.", 1234.0), ("#### -3", -3.0), (r"\boxed{0.5}", 0.5), ("3 and 4", 4.0), ("none", None)],
)
def test_the_last_number_is_the_answer(text, number):
    """Breaks if punctuation or separators make a right answer wrong."""
    assert last_number(text) == number


def test_the_gate_judges_both_limits(tmp_path):
    """Breaks if one of the limits is not looked at."""
    assert not list(Verdict(4, 3, 2.9, 0.75, 2.8).complaints)
    assert len(list(Verdict(4, 2, 2.7, 0.75, 2.8).complaints)) == 2
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"question": "2 + 2?", "answer": "because\n#### 4"}) + "\n")
    assert read_questions(str(file), 10)[0].answer == 4
    file.write_text('{"question": "2 + 2?", "answer": "four"}')
    with pytest.raises(UserError, match='question 1: expected "question" as text'):
        read_questions(str(file), 10)


def test_a_result_file_is_always_whole(tmp_path):
    """Breaks if a run that is stopped while writing leaves half a file."""
    path = tmp_path / "r.json"
    for rows in ([{"arm": "none"}], [{"arm": "none"}, {"arm": "ours"}]):
        save(path, rows, {"commit": "x"})
        assert json.loads(path.read_text())["rows"] == rows
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
