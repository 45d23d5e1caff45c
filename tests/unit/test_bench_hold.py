# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash bench --hold`: where the engines run, and what is refused before any of them starts."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_dflash.bench import command, hold
from vllm_dflash.bench.arms import parse_arms
from vllm_dflash.bench.dummy import SHAPES, write_dummy_pair
from vllm_dflash.bench.hold import need_planner, planning_arm, widths_to_hold
from vllm_dflash.cli import engine_run, machine
from vllm_dflash.cli.app import app
from vllm_dflash.cli.engine_run import Child
from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.machine import IN_PROCESS

OFF = 'fixed=ours:{"engine": {"additional_config": {"vllm_dflash": {"planner": "off"}}}}'
ON = 'ours=ours:{"engine": {"additional_config": {"vllm_dflash": {"planner": "on"}}}}'


def on_a_gpu(monkeypatch):
    """Stand-in for the machine: a GPU build is told by its distribution, and its provenance asks CUDA."""
    for module in (machine, command, hold):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    monkeypatch.setattr(command, "provenance", lambda **facts: facts)
    monkeypatch.delenv(IN_PROCESS, raising=False)


@pytest.fixture
def started(monkeypatch):
    """Environments of the engines that a command starts; the first that is waited for has had enough."""
    environments = []

    def begin(self, module, first_line, environment):
        environments.append(environment)

    def ready(self):
        if len(environments) == 2:
            raise UserError("enough")
        return {}

    monkeypatch.setattr(Child, "__init__", begin)
    monkeypatch.setattr(Child, "__exit__", lambda *_: None)
    monkeypatch.setattr(engine_run.Engine, "ready", ready)
    return environments


@pytest.fixture
def models(tmp_path):
    """Options that name a pair of an 8B shape."""
    target, draft = write_dummy_pair("8b", tmp_path)
    return ["--target", target, "--draft", draft, "--prompts", "chat", "--concurrency", "1", "--out", str(tmp_path / "o.json")]


def said(*options):
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 1
    return " ".join(done.stderr.split())


ALSO = ["--also", json.dumps({"out": "other.json", "hold": "1"})]


TWO_RANKS = ["--engine-args", json.dumps({"tensor_parallel_size": 2})]
ALONE = ["--engine-args", json.dumps({"distributed_executor_backend": "mp"})]


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--hold", "1", *TWO_RANKS], "0"),
        ([*ALSO, *TWO_RANKS], "0"),
        (["--hold", "1", *ALONE], "0"),
        (["--hold", "1"], None),
        (ALSO, None),
        (TWO_RANKS, None),
    ],
)
def test_engines_whose_planner_is_asked_run_where_it_can_be(monkeypatch, models, started, options, value):
    """Breaks if a bench on a GPU starts its engines and then finds no planner, its arms run in different ways, or in another
    way than engines of users do, though that was not needed."""
    on_a_gpu(monkeypatch)
    assert "enough" in said(*models, "--arms", "none,ours", *options)
    assert [environment.get(IN_PROCESS) for environment in started] == [value] * 2


@pytest.mark.parametrize("options", [["--hold", "1", *TWO_RANKS], [*ALSO, *TWO_RANKS], ["--hold", "1", *ALONE]])
def test_what_the_user_set_is_not_overruled(monkeypatch, models, started, options):
    """Breaks if a variable that keeps planners out of reach is found after minutes, or silently changed."""
    on_a_gpu(monkeypatch)
    monkeypatch.setenv(IN_PROCESS, "1")
    sentence = said(*models, "--arms", "none,ours", *options)
    assert f"{IN_PROCESS}: found '1'; --hold needs 0" in sentence
    assert not started
    assert "enough" in said(*models, "--arms", "none,ours")
    assert [environment[IN_PROCESS] for environment in started] == ["1", "1"]
    monkeypatch.setenv(IN_PROCESS, "0")
    started.clear()
    assert "enough" in said(*models, "--arms", "none,ours", *options)


@pytest.mark.parametrize(
    ("arms", "engine", "sentence"),
    [
        ("none", {"data_parallel_size": 2}, "data_parallel_size 2 in arm none; expected 1"),
        ("none", {"worker_extension_cls": "mine.Worker"}, "worker_extension_cls 'mine.Worker' in arm ours; expected none"),
        ("none", {"pipeline_parallel_size": 2}, "arm ours has a fixed K, as pipeline_parallel_size is 2"),
        ("none", {"additional_config": {"vllm_dflash": {"planner": "off"}}}, "found none of kind ours with a planner"),
    ],
)
def test_engine_arguments_of_all_arms_are_looked_at(monkeypatch, models, started, arms, engine, sentence):
    """Breaks if what all arms were given is forgotten when the planner is looked for: the engines would start in vain."""
    on_a_gpu(monkeypatch)
    found = said(*models, "--arms", f"{arms},ours", "--hold", "1", "--engine-args", json.dumps(engine))
    assert sentence in found
    assert not started


@pytest.mark.parametrize(
    ("arm", "sentence"),
    [
        (
            'ours=ours:{"speculative": {"num_speculative_tokens_per_batch_size": []}}',
            "num_speculative_tokens_per_batch_size is set",
        ),
        (
            'ours=ours:{"speculative": {"enable_adaptive_verification": true}, "engine": {"tensor_parallel_size": 2}}',
            "enable_adaptive_verification is set with tensor_parallel_size 2",
        ),
        ('ours=ours:{"engine": {"data_parallel_size": 4}}', "data_parallel_size 4 in arm ours"),
    ],
)
def test_a_planner_that_will_not_be_there(monkeypatch, arm, sentence):
    """Breaks if settings that fix K, or take the planner to another process, are found when all engines have started."""
    on_a_gpu(monkeypatch)
    with pytest.raises(UserError, match=sentence):
        need_planner(parse_arms("none", [arm]))


def test_where_workers_have_processes_of_their_own(monkeypatch):
    """Breaks if a CPU's engines, whose workers do, are started where their planner is out of reach, an executor that was not
    chosen counts as chosen, or an extension is refused where none is needed."""
    mine = 'ours=ours:{"engine": {"worker_extension_cls": "mine.Worker", "distributed_executor_backend": null}}'
    assert need_planner(parse_arms("none", [mine]))
    monkeypatch.setenv(IN_PROCESS, "1")
    with pytest.raises(UserError, match="--hold needs 0 on a CPU"):
        need_planner(parse_arms("none,ours", []))
    on_a_gpu(monkeypatch)
    assert not need_planner(parse_arms("none,ours", []))
    with pytest.raises(UserError, match=r"found worker_extension_cls 'mine\.Worker'"):
        need_planner(parse_arms("none", [mine]))


def test_a_small_target_is_not_planned_for_on_a_gpu(monkeypatch):
    """Breaks if "auto" is taken for a planner where the engine leaves K fixed, or refused where it plans."""

    def pair(shape):
        size = SHAPES[shape]
        config = {"hidden_size": size.hidden, "num_hidden_layers": size.layers, "vocab_size": size.vocab}
        return SimpleNamespace(k=7, target_config=config)

    assert widths_to_hold("1,3", pair("1b"), parse_arms("ours", [])) == [1, 3]  # a CPU
    on_a_gpu(monkeypatch)
    with pytest.raises(UserError, match='arm ours has planner "auto", which leaves K fixed'):
        widths_to_hold("1", pair("1b"), parse_arms("ours", []))
    assert widths_to_hold("1", pair("1b"), parse_arms("", [ON])) == [1]
    assert widths_to_hold("1", pair("8b"), parse_arms("ours", [])) == [1]
    assert widths_to_hold(None, pair("1b"), parse_arms("ours", [])) == []


def test_the_planner_that_is_held_must_be_one():
    """Breaks if the widths are given to an arm whose planner is off, or to any of two."""
    equal = 'alike=ours:{"engine": {"additional_config": {"vllm_dflash": {"verify_lengths": "equal"}}}}'
    assert planning_arm(parse_arms("none,ours", [OFF])).name == "ours"
    assert planning_arm(parse_arms("none,ours", [OFF, equal])).name == "alike"  # a fixed K verifies all of its drafts
    assert planning_arm(parse_arms("none", ['bare=ours:{"engine": {"additional_config": null}}'])).name == "bare"
    for arms in (parse_arms("none", [OFF]), parse_arms("ours", ["again=ours"])):
        with pytest.raises(UserError, match=r"--hold: found .* of kind ours with a planner; expected one"):
            planning_arm(arms)
