# SPDX-License-Identifier: Apache-2.0
"""Adapters on the target, grammars and priorities: the answers of no speculation, and the drafts of the reference."""

import pytest
import served
from reference_check import Reference
from tiny_models import VOCAB, Draft

K = 3
ENGINE = {"max_model_len": 160, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def folders(write_pair, tmp_path_factory):
    """(target, draft, adapter, target with the adapter merged)."""
    target, draft = write_pair(Draft(block=K + 1, layer_ids=(0, 1, 2)))
    folder = tmp_path_factory.mktemp("lora")
    served.write_tokenizer(target, VOCAB)
    served.write_adapter(folder / "adapter", target, folder / "merged")
    return target, draft, folder / "adapter", folder / "merged"


@pytest.fixture(scope="module")
def jobs(folders, prompts):
    """Arguments of ``served.generate`` by mode."""
    low = [[i + 20, *p[1:]] for i, p in enumerate([*prompts, *prompts])]
    return {
        "adapter": (prompts, 24, {"adapter": [folders[2]] * 4}),
        "none": (prompts, 24, {}),
        "grammar": (prompts, 40, {"grammars": [*served.GRAMMARS, served.GRAMMARS[0]]}),
        "priority": (low, 36, {"priorities": [8 - i for i in range(8)]}),
    }


@pytest.fixture(scope="module")
def expected(folders, engine_of, jobs):
    """Answers without speculation, by mode."""
    engine = engine_of(folders[0], **served.options(**ENGINE))
    return {mode: served.generate(engine, prompts, tokens, **more) for mode, (prompts, tokens, more) in jobs.items()}


@pytest.fixture(scope="module")
def engine(folders, engine_of, expected):
    return engine_of(*folders[:2], **served.options(**ENGINE))


def run(engine, jobs, mode, monkeypatch, replay=None):
    """(answers, log with requests numbered from 0, counters); ``replay``: answers to propose."""
    prompts, tokens, more = jobs[mode]
    first = engine.llm.request_counter.counter

    def replace(number, known, width):
        return replay[number - first][known - len(prompts[number - first]) :][:width]

    log = engine.record(monkeypatch, replay and replace)
    answers, grown = engine.counted(lambda: served.generate(engine, prompts, tokens, **more))
    return answers, [(number - first, known, drafts) for number, known, drafts in log], grown


def wrong_drafts(reference, prompts, answers, log, only):
    texts = [p + a for p, a in zip(prompts, answers, strict=True)]
    return reference.wrong_drafts(texts, [entry for entry in log if entry[0] in only])


def test_adapters_on_the_target(engine, jobs, expected, folders, monkeypatch):
    """Breaks if an adapter reaches the draft's own layers, or its borrowed vocabulary, or the drafts see the bare target.

    With and without go in batches of their own: vLLM 0.32's CPU operators give the adapter to every row.
    """
    for mode, target in (("adapter", folders[3]), ("none", folders[0])):
        answers, log, _ = run(engine, jobs, mode, monkeypatch)
        assert answers == expected[mode]
        assert wrong_drafts(Reference(target, folders[1]), jobs[mode][0], answers, log, {0, 1, 3}) == []
    assert expected["adapter"] != expected["none"]


@pytest.mark.parametrize("perfect", [False, True], ids=["own drafts", "perfect drafts"])
def test_grammars(engine, jobs, expected, monkeypatch, perfect):
    """Breaks if drafts that the grammar forbids are accepted, or those that it allows are lost behind the first.

    Or if the watchdog counts drafts that the grammar cut off, which nobody verified.
    """
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    vars(scheduler).pop("_dflash_watchdog", None)
    answers, _, grown = run(engine, jobs, "grammar", monkeypatch, expected["grammar"] if perfect else None)
    assert answers == expected["grammar"]
    watch = vars(scheduler)["_dflash_watchdog"].watch
    cells = watch._total, *watch._cells.values()
    assert sum(n * count for cell in cells for n, count in enumerate(cell.drafted)) == grown["num_draft_tokens"]
    assert sum(n * count for cell in cells for n, count in enumerate(cell.accepted)) == grown["num_accepted_tokens"]
    assert all(answer[-1] == 1 for answer in answers[:2])
    if perfect:
        # The drafts of an answer's last step go beyond its end.
        assert grown["num_draft_tokens"] - grown["num_accepted_tokens"] <= K * len(answers)


def test_priorities_with_preemption(engine, jobs, expected, folders, monkeypatch):
    """Later requests come first and push earlier ones out of the cache; breaks if a resumed request drafts over holes."""
    answers, log, grown = run(engine, jobs, "priority", monkeypatch)
    assert answers == expected["priority"]
    assert grown["num_preemptions"] > 0
    assert wrong_drafts(Reference(*folders[:2]), jobs["priority"][0], answers, log, {0, 3, 7}) == []
