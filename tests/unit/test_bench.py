# SPDX-License-Identifier: Apache-2.0
"""What `vllm-dflash bench` makes of the engines' events; the engines themselves run in tests/server."""

import json

import pytest
from typer.testing import CliRunner

from vllm_dflash.bench.arms import parse_arms
from vllm_dflash.bench.figures import cell_row, crowded, over, run_figures
from vllm_dflash.bench.gate import Verdict, last_number, read_questions
from vllm_dflash.bench.loads import Cell, parse_cells
from vllm_dflash.bench.plots import plot_acceptance, plot_speedup, plot_widths
from vllm_dflash.bench.prompts import groups, label, prompt_set, split_name
from vllm_dflash.bench.record import load, save, without_folders
from vllm_dflash.bench.report import HEADINGS, lines, repeatability, width_shares
from vllm_dflash.bench.rounds import Player, rows_of_cell
from vllm_dflash.cli.app import app
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


def test_a_load_that_was_not_served_at_once_is_complained_about():
    """Breaks if requests that wait for KV cache go unnoticed: 256 asked for, and the figures are those of 185."""
    outputs = [[1] + [2] * 20 for _ in range(8)]
    full = run_figures(event(0.1, outputs))
    assert full["at_a_time"] == 8
    waiting = event(0.1, outputs)
    for output in waiting["outputs"][:4]:  # preempted for half of the time: tokens in every other step
        output["arrivals"] = output["arrivals"][::2]
        output["steps"] = output["steps"][::2]
        output["arrivals"][-1] = 20
    short = run_figures(waiting)
    assert short["at_a_time"] < 7
    where = {"prompts": "copy", "concurrency": 8}
    (sentence,) = crowded([where | {"arm": "ours"} | short, where | {"arm": "none"} | full])
    assert "ours served 6 in a step" in sentence
    assert "kv_cache_memory_bytes" in sentence
    queued = event(0.1, [[1] * 10 for _ in range(8)])
    for output in queued["outputs"][4:]:  # begin when the first ones have ended: no step is of all
        output["arrivals"] = [10 + step for step in output["arrivals"]]
    queued["step_ends"] = [0.5 + 0.1 * step for step in range(20)]
    waited = run_figures(queued)
    assert "tok_s" not in waited
    assert ["ours served 4 in a step" in found for found in crowded([where | {"arm": "ours"} | waited])] == [True]


def test_the_slowest_of_few_requests_is_their_99th_percentile():
    """Breaks if a percentile of eight values is the second largest."""
    counts = [[1] + [n] * 12 for n in (1, 2, 2, 2, 2, 2, 2, 2)]
    assert run_figures(event(0.1, counts))["tpot_p99_ms"] == pytest.approx(100)


def test_a_load_without_a_steady_state_in_one_arm_compares_whole_runs():
    """Breaks if one arm's whole run is divided by the other's steady state."""
    base = {"prompts": "copy", "temperature": 0.0, "concurrency": 1}
    rows = [base | {"arm": "none", "tok_s": 100.0, "tok_s_wall": 50.0}, base | {"arm": "ours", "tok_s_wall": 75.0}]
    assert [line[HEADINGS.index("vs none")] for line in lines(rows)] == ["1.00x", "1.50x"]


def test_repetitions_compare_on_their_own_prompts():
    """Breaks if the middle repetition of one arm is divided by that of another, whose prompts are others: answers differ
    threefold, so twice as fast on every prompt would read as anything; or if whoever is the numerator gains by it."""
    base = {"prompts": "copy", "temperature": 0.0, "concurrency": 1}
    plain = base | {"arm": "none", "tok_s": 100.0, "tok_s_wall": 50.0, "tok_s_each": [100.0, 99.0, 300.0]}
    ours = base | {"arm": "ours", "tok_s": 298.0, "tok_s_wall": 75.0, "tok_s_each": [200.0, 298.0, 599.0]}
    assert over(ours, plain, "tok_s") == pytest.approx(2.0)
    assert [line[HEADINGS.index("vs none")] for line in lines([plain, ours])] == ["1.00x", "2.00x"]
    assert over(ours, plain | {"tok_s_each": [100.0]}, "tok_s") == pytest.approx(2.98)  # not all of them have the same prompts
    assert over(ours, plain, "tok_s_wall") == pytest.approx(1.5)
    two, other = ours | {"tok_s_each": [100.0, 400.0]}, plain | {"tok_s_each": [200.0, 200.0]}
    assert [over(two, other, "tok_s"), over(other, two, "tok_s")] == pytest.approx([1.0, 1.0])
    assert over(ours, plain | {"tok_s_each": [0.0, 99.0, 300.0]}, "tok_s") == pytest.approx(2.98)  # a repetition without tokens
    assert over(ours, {}, "tok_s") is over({}, plain, "tok_s") is None


def test_a_whole_run_counts_the_tokens_that_every_arm_must_have():
    """Breaks if an arm that goes on for longer, while the batch is kept full, spreads its prefill over more tokens."""
    slow, fast = (run_figures(event(0.1, counts) | {"at_least": 9}) for counts in ([[1] * 9] * 2, [[1] + [4] * 8, [1] * 9]))
    assert slow["tok_s_wall"] == fast["tok_s_wall"] == pytest.approx(18 / 1.3)
    early = run_figures(event(0.1, [[1] + [4] * 8]) | {"at_least": 9})  # has them after the third step
    assert early["tok_s_wall"] == pytest.approx(9 / 0.7)


def test_a_run_without_a_steady_state_says_nothing_about_it():
    """Breaks if a window of one or two steps is divided by."""
    assert "tok_s" not in run_figures(event(0.1, [[1, 2], [1, 2]]))


def test_a_cell_is_the_median_and_acceptance_is_over_all_repetitions():
    """Breaks if an outlier moves the figure, acceptance is averaged over runs of unequal length, or repetitions, which are of
    other prompts, cannot be set against those of another arm one by one."""
    runs = [event(s, [[1] + [2] * 20], drafts=d, accepted=a) for s, d, a in ((0.1, 10, 10), (0.11, 30, 90), (0.9, 10, 20))]
    row = cell_row(runs, None)
    assert row["step_ms"] == pytest.approx(110)
    assert row["acceptance_length"] == pytest.approx(1 + 120 / 50)
    assert row["repeats"] == 3
    assert row["step_ms_spread"] == pytest.approx(800 / 110)
    assert row["tok_s_each"] == [run_figures(run)["tok_s"] for run in runs]


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


def test_a_published_command_names_no_folders():
    """Breaks if a path of the machine that measured gets into a committed result, or a hub name loses its owner."""
    given = ["/a/b/c.json", '{"out": "/a/b/c.json", "prompts": "vllm:sharegpt:/a/d.json,chat"}', "owner/name", "1/2"]
    kept = ["c.json", '{"out": "c.json", "prompts": "vllm:sharegpt:d.json,chat"}', "owner/name", "1/2"]
    assert [without_folders(argument) for argument in given] == kept


def test_a_result_file_is_always_whole(tmp_path):
    """Breaks if a run that is stopped while writing leaves half a file."""
    path = tmp_path / "r.json"
    for rows in ([{"arm": "none"}], [{"arm": "none"}, {"arm": "ours"}]):
        save(path, rows, {"commit": "x"})
        assert load(path) == (rows, {"commit": "x"})
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_only_the_tokens_that_every_arm_must_have_are_compared():
    """Breaks if an arm that went on for longer, as fast ones do while the batch is kept full, counts as different."""
    plain, other = (event(0.1, [[1] * n]) | {"at_least": 5} for n in (5, 9))
    assert cell_row([other], [plain])["same_tokens"] == 1
    other["outputs"][0]["token_ids"][4] = 99
    assert cell_row([other], [plain])["same_tokens"] == 0
    assert cell_row([plain], None)["steady_steps"] == 2  # of five: no margin at an end that is no tail


def test_loads_with_lengths_of_their_own():
    """Breaks if a large batch gets the long answers of a single request, or random ids are answered greedily."""
    cells = parse_cells(["code", "random"], temperature="0,0.7", concurrency="1,32", max_tokens="96,16", repeats="3,1")
    assert [(cell.prompts, cell.temperature, cell.concurrency, cell.max_tokens, cell.repeats) for cell in cells] == [
        *[("code", heat, *load) for heat in (0.0, 0.7) for load in ((1, 96, 3), (32, 16, 1))],
        *[("random", 2.0, *load) for load in ((1, 96, 3), (32, 16, 1))],
    ]
    assert split_name("random@0") == ("random", 0.0)
    assert split_name("/a@b/c.jsonl") == ("/a@b/c.jsonl", None)
    names = ("/a/code.jsonl", "vllm:sharegpt:/a/b.json", "vllm:hf:owner/name")
    assert [label(name) for name in names] == ["code", "vllm:sharegpt", "name"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_tokens": "8,8,8"}, "--max-tokens: found 3 numbers; expected one, or 2"),
        ({"max_tokens": "3"}, "found 3; expected at least 4"),
        ({"repeats": "0"}, "--repeats: found '0'; expected numbers from 1 on"),
        ({"concurrency": "1,x"}, "--concurrency: found '1,x'"),
    ],
)
def test_loads_that_cannot_be_read(change, sentence):
    """Breaks if a list of the wrong length is cut or stretched silently."""
    options = {"temperature": "0", "concurrency": "1,2", "max_tokens": "8", "repeats": "1"}
    with pytest.raises(UserError, match=sentence):
        parse_cells(["code"], **options | change)


def planned(*timeline, widths, probes=0):
    steps = sum(widths.values())
    costs = {"verified": 12 * steps, "expected_rate": 100.0, "seconds": 0.02}
    return {"widths": widths, "steps": steps, "probes": probes, "timeline": list(timeline)} | costs


def test_what_the_planner_chose_is_in_the_row_and_the_table():
    """Breaks if widths of two repetitions are not added up, or the timeline begins at the engine's first step."""
    reports = [
        planned([50, 8, 7, False], widths={"7": 10}),
        planned([90, 8, 7, False], [96, 8, 3, True], widths={"7": 6, "3": 4}),
    ]
    row = cell_row([event(0.1, [[1] * 20]) | {"planner": report} for report in reports], None)
    assert row["widths"] == {"7": 16, "3": 4}
    assert row["planning_ms"] == pytest.approx(2)
    assert (row["verified_per_step"], row["expected_tok_s"]) == (12, 100)
    assert (row["timeline"], row["timeline_steps"]) == ([[0, 8, 7, False], [6, 8, 3, True]], 10)
    assert width_shares(row) == "7: 80 %, 3: 20 %"
    players = {"ours": Player(None, 7), "ours K=3": Player(None, 3, hold=3)}
    results = {name: [event(0.1, [[1] * 20]) | {"planner": reports[0]}] for name in players}
    chosen, held = rows_of_cell([results], Cell("code", 1, 0.0, 20, 1), players, None)
    assert "timeline" in chosen
    assert "timeline" not in held
    assert (chosen["k"], held["k"]) == (7, 3)


def test_a_second_run_says_how_far_the_ratios_moved():
    """Breaks if the runs are thrown together before they are compared, or the arm's own speed counts and not its ratio."""
    players = {"none": Player(None, 0), "ours": Player(None, 7)}
    counts = {"none": [[1] * 20], "ours": [[1] + [2] * 20]}
    runs = [{name: [event(step, counts[name])] for name, step in steps.items()} for steps in ({"none": 0.1, "ours": 0.1},
            {"none": 0.2, "ours": 0.16})]  # fmt: skip
    rows = rows_of_cell(runs, Cell("code", 1, 0.0, 20, 1), players, "none")
    assert rows[1]["vs_none_by_run"] == pytest.approx([2.0, 2.5])
    assert repeatability(rows) == pytest.approx({"cells": 1, "median": 0.25, "max": 0.25})
    assert rows[1]["repeats"] == 2
    assert repeatability(rows_of_cell(runs[:1], Cell("code", 1, 0.0, 20, 1), players, "none")) == {}
    noise = rows_of_cell(runs, Cell("code", 1, 0.0, 20, 1), players, "none", compare=False)
    assert repeatability(noise)["cells"] == 1  # of dummy weights, too
    assert "answers" not in noise[1]
    silent = [runs[0], runs[1] | {"ours": [event(0.1, [[0] * 20])]}]  # not a token of it in one run
    assert "vs_none_by_run" not in rows_of_cell(silent, Cell("code", 1, 0.0, 20, 1), players, "none", compare=False)[1]


def test_runs_are_compared_in_one_figure():
    """Breaks if the steady state of one run is compared with the whole of another: what moves is then the figure."""
    players = {"none": Player(None, 0), "ours": Player(None, 7)}
    short = {"none": [event(0.1, [[1] * 20])], "ours": [event(0.1, [[5, 5, 5, 5]])]}
    long = {"none": [event(0.1, [[1] * 20])], "ours": [event(0.1, [[1] + [2] * 20])]}
    rows = rows_of_cell([short, long], Cell("code", 1, 0.0, 20, 1), players, "none")
    plain = 20 / 2.4
    assert rows[1]["vs_none_by_run"] == pytest.approx([20 / 0.8 / plain, 41 / 2.5 / plain])


def test_an_acceptance_length_that_compares_with_no_other_is_not_shown():
    """Breaks if a planned or trimmed arm, which drafts where it pays, looks as if its drafts were worse."""
    base = {"prompts": "code", "temperature": 0.0, "concurrency": 1, "tok_s": 1.0, "tok_s_wall": 1.0, "acceptance_length": 2.5}
    more = [{}, {"widths": {"7": 9}}, {"widths": {"7": 9, "3": 1}}, {"adaptive_verification": True}]
    found = lines(base | {"arm": str(number)} | each for number, each in enumerate(more))
    assert [line[HEADINGS.index("AL")] for line in found] == ["2.50", "2.50", "-", "-"]


@pytest.mark.parametrize(
    ("also", "sentence"),
    [
        ({"repeat_run": 0}, "--also repeat_run: found 0; expected an integer from 1 on"),
        ({"prompt_tokens": "x"}, "--also prompt_tokens: found 'x'; expected an integer from 1 on"),
        ({"out": 3}, "--also out: found 3; expected a path"),
        ({"out": "bench.json"}, "--also out: found bench.json twice"),
    ],
)
def test_further_loads_that_cannot_be_measured(also, sentence):
    """Breaks if one list of loads overwrites another, or a mistake ends in a traceback or in no load at all."""
    done = CliRunner().invoke(app, ["bench", "--also", json.dumps({"out": "other.json"} | also)])
    assert done.exit_code == 1
    assert sentence in " ".join(done.stderr.split())


def test_pictures_are_drawn(tmp_path):
    """Breaks if a picture fails on rows of one load, without acceptance, or without a planner."""
    pytest.importorskip("matplotlib", reason="an extra of its own")
    base = {"prompts": "code", "temperature": 0.0, "concurrency": 1, "tok_s": 1.0, "tok_s_wall": 1.0}
    rows = [base | {"arm": "none"}]
    assert not plot_widths(rows, tmp_path / "w.png")
    rows += [base | {"arm": "ours", "acceptance_per_position": [0.5], "timeline": [[0, 1, 7, False]], "timeline_steps": 5}]
    plot_speedup(rows, tmp_path / "s.png")
    plot_acceptance(rows, tmp_path / "a.png")
    assert plot_widths(rows, tmp_path / "w.png")
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.iterdir())
