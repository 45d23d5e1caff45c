# SPDX-License-Identifier: Apache-2.0
"""Adapters on the target, grammars and priorities on Model Runner V2: the answers of no speculation, the reference's drafts."""

import sys
from pathlib import Path

import pytest
import served
import tiny_models
import vllm

sys.path.append(str(Path(__file__).parents[1] / "v1"))  # reference_check
from reference_check import Reference

pytestmark = pytest.mark.skipif(vllm.__version__.startswith("0.32"), reason="dear under the interpreter; GPUs run newer vLLMs")

K = 3
ENGINE = {"block_size": 32, "num_gpu_blocks_override": 8}
CROWD = [[(7 * i * i + 3 * i + 11 + n) % 90 for i in range(n)] for n in (90, 60, 28)]  # each needs another page very soon


@pytest.fixture(scope="module", autouse=True)
def adapters_without_a_head():
    """vLLM's runner maps adapters to requests where its CPU operator wants logits, K + 1 per request; ours has no head part."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PunicaWrapperCPU, "add_lora_logits", lambda *_, **__: None)
        yield


@pytest.fixture(scope="module")
def folders(draft, tmp_path_factory):
    """(target, draft, adapter, target with the adapter merged)."""
    folder = tmp_path_factory.mktemp("lora")
    target = tiny_models.write_target(folder / "target", tiny_models.Target())
    served.write_tokenizer(target, tiny_models.VOCAB)
    served.write_adapter(folder / "adapter", target, folder / "merged")
    return str(target), draft, folder / "adapter", folder / "merged"


@pytest.fixture(scope="module")
def jobs(folders, prompts):
    """Arguments of ``served.generate`` by mode."""
    return {
        "adapter": (prompts[:2], 6, {"adapter": [folders[2]] * 2}),
        "none": (prompts[:2], 6, {}),
        "grammar": (prompts[:3], 13, {"grammars": served.GRAMMARS}),
        "priority": (CROWD, 10, {"priorities": [0, 1, 2]}),
    }


@pytest.fixture(scope="module")
def expected(folders, engine_of, jobs):
    """Answers without speculation, by mode."""
    engine = engine_of(folders[0], **served.options(**ENGINE))
    return {mode: served.generate(engine, prompts, tokens, **more) for mode, (prompts, tokens, more) in jobs.items()}


@pytest.fixture
def run(folders, engine_of, jobs, expected):
    """Mode -> (answers, log for the reference, drafted and accepted tokens); checks the answers."""
    engine = engine_of(*folders[:2], **served.options(**ENGINE))

    def serve(mode, *, perfect=False):
        prompts, tokens, more = jobs[mode]
        proposals = engine.watch(prompts, replay=expected[mode] if perfect else None)
        *counts, answers = engine.acceptance_of(lambda: served.generate(engine, prompts, tokens, **more))
        assert answers == expected[mode]
        return answers, [(number, anchor + 1, drafts) for (number, anchor), drafts in proposals.items()], counts

    serve.engine = engine
    return serve


def wrong_drafts(reference, prompts, answers, log, only):
    texts = [p + a for p, a in zip(prompts, answers, strict=True)]
    return reference.wrong_drafts(texts, [entry for entry in log if entry[0] in only])


def test_adapters_on_the_target(run, jobs, expected, folders):
    """Breaks if an adapter reaches the draft's own layers, or its borrowed vocabulary, or the drafts see the bare target.

    With and without go in batches of their own: vLLM 0.32's CPU operators give the adapter to every row.
    """
    for mode, target in (("adapter", folders[3]), ("none", Path(folders[0]))):
        answers, log, _ = run(mode)
        assert wrong_drafts(Reference(target, Path(folders[1])), jobs[mode][0], answers, log, {0, 1}) == []
    assert expected["adapter"] != expected["none"]


def test_grammars(run):
    """Breaks if drafts that the grammar forbids are accepted, or those that it allows are lost behind the first."""
    answers, _, _ = run("grammar")
    assert all(answer[-1] == 1 for answer in answers[:2])
    _, _, (drafted, accepted) = run("grammar", perfect=True)
    assert drafted - accepted <= K * len(answers)  # the drafts of an answer's last step go beyond its end


def test_priorities_with_preemption(run, jobs, folders):
    """Later requests come first and push earlier ones out of the cache; breaks if a resumed request drafts over holes."""
    answers, log, _ = run("priority")
    metrics = {m.name: m.value for m in run.engine.llm.get_metrics() if hasattr(m, "value")}
    assert metrics["vllm:num_preemptions"] > 0
    reference = Reference(Path(folders[0]), Path(folders[1]))
    assert wrong_drafts(reference, jobs["priority"][0], answers, log, {0, 1, 2}) == []
