# SPDX-License-Identifier: Apache-2.0
"""A draft with smaller weights and a small head: the text is the target's, and drafts come from the listed rows."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import VOCAB, Draft, Target, write_draft

ROWS = tuple(range(3, VOCAB, 2))


def options(**given):
    return {"additional_config": {"vllm_dflash": given}}


@pytest.fixture(scope="module")
def pair(write_pair, tmp_path_factory):
    """A pair of its own, with a row list beside the draft."""
    target, _ = write_pair(Draft())
    draft = write_draft(tmp_path_factory.mktemp("listed"), Draft(), Target())
    (draft / "draft_head_rows.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": ROWS}))
    return target, draft


@pytest.fixture(scope="module")
def plain(pair, prompts, engine_of):
    return engine_of(pair[0]).generate(prompts, 16)


def test_fp8_weights_and_a_small_head(pair, plain, prompts, engine_of, monkeypatch):
    """Breaks if drafts come from outside the list, the target's tensors are quantised too, or an update leaves old rows."""
    given = options(planner="off", draft_weights="fp8", draft_head="small", draft_head_rows=len(ROWS))
    engine = engine_of(*pair, speculative={"num_speculative_tokens": 7}, **given)
    log = engine.record(monkeypatch)
    assert engine.generate(prompts, 16) == plain
    proposed = {token for _, _, drafts in log for token in drafts}
    assert proposed <= set(ROWS)
    assert len(proposed) > 3
    model, stored = engine.proposer.model, load_file(pair[0] / "model.safetensors")
    head = engine.runner.model.lm_head.weight
    assert torch.equal(head[:VOCAB], stored["lm_head.weight"])  # vLLM pads behind
    assert engine.proposer.model.model.embed_tokens is engine.runner.model.model.embed_tokens
    assert "with fp8 weights, private draft head of 79 rows in float32" in engine.proposer.capability.facts[0]

    before = model.private_head.weight.data_ptr()
    expected = model.private_head.weight.flip(1)
    engine.runner.model.load_weights([("lm_head.weight", stored["lm_head.weight"].flip(1))])
    assert model.private_head.stale
    engine.generate(prompts[:1], 2)
    assert model.private_head.weight.data_ptr() == before
    assert torch.equal(model.private_head.weight, expected)


def test_a_small_head_takes_in_the_tokens_that_requests_use(pair, plain, prompts, engine_of, monkeypatch):
    """Breaks if drafts never come from the prompt's or the answer's own tokens, or come from tokens that were never there."""
    given = options(planner="off", draft_head="small", draft_head_rows=8, draft_head_guests=40)
    engine = engine_of(*pair, speculative={"num_speculative_tokens": 7}, **given)
    log = engine.record(monkeypatch)
    assert engine.generate(prompts, 16) == plain
    used = {token for text in (*prompts, *plain) for token in text}
    proposed = {token for _, _, drafts in log for token in drafts}
    assert proposed & (used - set(ROWS[:8]))
    assert proposed <= used | set(ROWS[:8])


def test_tokens_counted_while_serving_choose_the_rows_of_a_later_start(pair, plain, prompts, engine_of, tmp_path, monkeypatch):
    """Breaks if the target's own tokens are not those counted, an unfinished run loses them, or too few of them choose rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = {"planner": "off", "draft_head": "small", "draft_head_rows": 8, "draft_head_counting": True}
    engine = engine_of(*pair, speculative={"num_speculative_tokens": 7}, **options(**given))
    log = engine.record(monkeypatch)
    assert engine.generate(prompts, 16) == plain
    assert {token for _, _, drafts in log for token in drafts} <= set(ROWS[:8])
    del engine
    engine_of.shut_down()
    (file,) = (tmp_path / "vllm-dflash" / "served-tokens").glob("*.json")
    document = json.loads(file.read_text())
    times = Counter(token for answer in plain for token in answer)
    kept = {int(token): entry for token, entry in document["counts"].items()}
    # A step may sample more than max_tokens leaves of it.
    assert 0 <= document["tokens_counted"] - times.total() <= 7 * len(prompts)
    assert all(kept[token][0] >= count and kept[token][1] >= sum(token in a for a in plain) for token, count in times.items())

    monkeypatch.setattr("vllm_dflash.engine.head_rows.ENOUGH_TOKENS", times.total())
    engine = engine_of(*pair, speculative={"num_speculative_tokens": 7}, **options(**given))
    log = engine.record(monkeypatch)
    assert engine.generate(prompts, 16) == plain
    order = [*ROWS, *(token for token in range(VOCAB) if token not in ROWS)]
    best = sorted(kept, key=lambda token: (-kept[token][0], order.index(token)))[:8]
    assert {token for _, _, drafts in log for token in drafts} <= set(best)
    line = engine.proposer.capability.facts[0]
    assert f"{document['tokens_counted']} tokens counted while serving, then " in line
    assert re.search(r"expected to hold \d+\.\d% of further tokens", line)


def test_int8_weights(pair, plain, prompts, engine_of, tmp_path, monkeypatch):
    """Breaks if int8 products are wrong by more than rounding, or a reload by vLLM keeps the old weights or is done by halves."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    monkeypatch.setattr("vllm_dflash.engine.variant_choice.int8_times", lambda *_: (2.0, 1.0))
    engine = engine_of(*pair, speculative={"num_speculative_tokens": 7}, **options(planner="off", draft_weights="int8"))
    assert engine.generate(prompts, 16) == plain
    model = engine.proposer.model
    tensors = load_file(write_draft(tmp_path, Draft(), Target(), seed=21) / "model.safetensors")
    with pytest.raises(ValueError, match="vLLM packed the weights"):
        model.load_weights(tensors.items())
    reload_weights(engine.proposer.vllm_config, model, tensors.items(), None, is_checkpoint_format=True)
    weight = tensors["layers.1.mlp.down_proj.weight"]
    x = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(5))
    expected = x @ weight.T
    assert 0 < (model.model.layers[1].mlp.down_proj(x)[0] - expected).norm() < 0.02 * expected.norm()
    assert engine.generate(prompts, 16) == plain


def config_of(**given):
    return SimpleNamespace(
        additional_config={"vllm_dflash": given, "other": 1}, model_config=SimpleNamespace(dtype=torch.float32)
    )


@pytest.mark.parametrize(
    ("given", "times", "decided"),
    [("auto", None, "checkpoint"), ("fp8", None, "fp8"), ("int8", (2.0, 1.0), "int8"), ("int8", (1.0, 2.0), "checkpoint")],
)
def test_the_decision_is_part_of_the_configuration(given, times, decided, monkeypatch):
    """Breaks if a slower int8 is kept, or the decision is not where vLLM's compile cache hashes it."""
    from vllm_dflash.engine import variant_choice

    monkeypatch.setattr(variant_choice, "get_draft_quant_config", lambda _: None)
    monkeypatch.setattr(variant_choice, "int8_times", lambda *_: times)
    config = config_of(draft_weights=given)
    resolved = variant_choice.resolve_weights(config, None)
    assert resolved.additional_config == {"vllm_dflash": {"draft_weights": decided}, "other": 1}
    assert config.additional_config["vllm_dflash"]["draft_weights"] == given


def test_a_quantised_checkpoint_stays_as_it_is(monkeypatch):
    """Breaks if a checkpoint that vLLM quantises itself is quantised again."""
    from vllm_dflash.engine import variant_choice

    monkeypatch.setattr(variant_choice, "get_draft_quant_config", lambda _: SimpleNamespace(get_name=lambda: "awq"))
    resolved = variant_choice.resolve_weights(config_of(), None)
    assert resolved.additional_config["vllm_dflash"]["draft_weights"] == "checkpoint"
    with pytest.raises(ValueError, match=r"draft_weights: found 'fp8'; the draft checkpoint is already quantised \(awq\)"):
        variant_choice.resolve_weights(config_of(draft_weights="fp8"), None)
