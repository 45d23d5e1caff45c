# SPDX-License-Identifier: Apache-2.0
"""The loop is lossless: greedy text is the target's own, sampled text has the target's distribution, and the cache stays true."""

import json
from pathlib import Path
from runpy import run_path

import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import chisquare

from vllm_dflash.checkpoint import CheckpointError
from vllm_dflash.reference.decode import Target, block_proposals, load_pair, plain_decode, speculative_decode
from vllm_dflash.reference.sampling import SamplingSettings, distribution

VOCAB = 16
PROMPT = [5, 1, 12, 9]


class OracleDraft:
    """Proposes the target's own greedy continuation (a draft that is always right), or a wrong token at one position."""

    def __init__(self, draft, answer, wrong_at=None):
        self.inner, self.answer, self.wrong_at = draft, answer, wrong_at
        self.config, self.new_context = draft.config, draft.new_context
        self.extend_context, self.to_target_ids = draft.extend_context, draft.to_target_ids

    def block_logits(self, context, anchor, num_speculative_tokens):
        known = [*PROMPT, *self.answer]
        start = context.num_tokens + 1
        assert anchor == known[start - 1]
        ids = (known[start:] + [0] * num_speculative_tokens)[:num_speculative_tokens]
        if self.wrong_at is not None:
            ids[self.wrong_at] = (ids[self.wrong_at] + 1) % VOCAB
        return torch.nn.functional.one_hot(torch.tensor(ids), VOCAB).float()


@pytest.fixture
def pair(target_of, draft_of):
    model = target_of(VOCAB)
    draft = draft_of(model)
    return Target(model, draft.config.target_layer_ids), draft


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 5])
def test_greedy_text_is_the_targets_own(pair, num_speculative_tokens):
    """Breaks when a rejected row stays in a cache, or the wrong row gives the bonus token."""
    target, draft = pair
    run = speculative_decode(target, draft, PROMPT, 80, num_speculative_tokens=num_speculative_tokens)
    assert run.tokens == plain_decode(target, PROMPT, 80)
    assert 0 < sum(run.accepted) < num_speculative_tokens * len(run.accepted)  # both accepting and rejecting were tried


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 4])
def test_a_draft_that_knows_the_answer_is_accepted_to_the_token(pair, wrong_at):
    """Breaks when anchors, positions or counts are off by one: a random draft hardly ever gets that far."""
    target, draft = pair
    answer = plain_decode(target, PROMPT, 61)
    run = speculative_decode(target, OracleDraft(draft, answer, wrong_at), PROMPT, 61)
    assert run.tokens == answer
    accepted = 5 if wrong_at is None else wrong_at
    steps = 60 // (accepted + 1)
    assert run.accepted == [accepted] * steps
    assert run.acceptance_length == accepted + 1


def test_every_draft_of_the_loop_is_the_teacher_forced_one(pair):
    """Breaks when the context cache holds a rejected token, misses one, or its positions drift."""
    target, draft = pair
    run = speculative_decode(target, draft, PROMPT, 60)
    starts, n = [], len(PROMPT) + 1
    for accepted in run.accepted:
        starts.append(n)
        n += accepted + 1
    text = [*PROMPT, *run.tokens]
    assert block_proposals(target, draft, text, starts[:-1], 5) == run.drafts[:-1]


def test_a_reduced_vocabulary_stays_lossless(target_of, draft_of):
    """Breaks when draft ids reach the target untranslated."""
    model = target_of(VOCAB)
    ids = torch.tensor([1, 2, 5, 7, 9, 13])
    head = model.lm_head.weight[ids].clone()
    draft = draft_of(model, draft_vocab_size=6, tensors={"d2t": ids - torch.arange(6), "lm_head.weight": head})
    target = Target(model, draft.config.target_layer_ids)
    run = speculative_decode(target, draft, PROMPT, 60)
    assert run.tokens == plain_decode(target, PROMPT, 60)
    assert {token for drafts in run.drafts for token in drafts} <= set(ids.tolist())
    sampled = speculative_decode(target, draft, PROMPT, 60, settings=SamplingSettings(1.0), probabilistic_drafts=True, seed=1)
    assert {token for drafts in sampled.drafts for token in drafts} <= set(ids.tolist())


@pytest.mark.parametrize("probabilistic_drafts", [False, True], ids=["argmax drafts", "sampled drafts"])
def test_sampled_text_has_the_targets_distribution(pair, probabilistic_drafts):
    """Breaks when the loop hands the wrong rows, filters or streams to the acceptance rule: chi-square on the third token."""
    target, draft = pair
    settings = SamplingSettings(temperature=0.9, top_k=6)
    vocabulary = torch.arange(VOCAB)
    q1 = distribution(target.model(torch.tensor([PROMPT])).logits[:, -1], settings)[0]
    after_one = torch.cat([torch.tensor(PROMPT).expand(VOCAB, -1), vocabulary[:, None]], dim=1)
    q2 = distribution(target.model(after_one).logits[:, -1], settings)
    after_two = torch.cat([after_one.repeat_interleave(VOCAB, 0), vocabulary.repeat(VOCAB)[:, None]], dim=1)
    q3 = distribution(target.model(after_two).logits[:, -1], settings)
    expected = (q1[:, None] * q2).flatten() @ q3
    counts = torch.zeros(VOCAB)
    for seed in range(400):
        run = speculative_decode(
            target,
            draft,
            PROMPT,
            3,
            num_speculative_tokens=2,
            settings=settings,
            probabilistic_drafts=probabilistic_drafts,
            seed=seed,
        )
        counts[run.tokens[2]] += 1
    large = expected * 400 >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]]) * 400
    assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-4


def test_generation_ends_at_a_stop_token_or_at_the_limit(pair):
    """Breaks when tokens after a stop token inside a block, or beyond the limit, reach the answer."""
    target, draft = pair
    answer = plain_decode(target, PROMPT, 40)
    oracle = OracleDraft(draft, answer)
    for limit in (1, 2, 6, 7, 8):
        assert speculative_decode(target, oracle, PROMPT, limit).tokens == answer[:limit]
    stop = answer[9]
    cut = answer[: answer.index(stop) + 1]
    assert speculative_decode(target, oracle, PROMPT, 40, stop_ids=[stop]).tokens == cut
    assert plain_decode(target, PROMPT, 40, stop_ids=[stop]) == cut


def test_a_seed_repeats_itself(pair):
    """Breaks when sampling reads a global generator."""
    target, draft = pair
    runs = [speculative_decode(target, draft, PROMPT, 30, settings=SamplingSettings(1.0), seed=s) for s in (3, 3, 4)]
    assert runs[0].tokens == runs[1].tokens != runs[2].tokens


def test_pairs_are_loaded_from_folders_and_checked(target_of, tmp_path, draft_of):
    """Breaks when a draft for another target is loaded without a word."""
    target_folder, draft_folder = tmp_path / "target", tmp_path / "draft"
    model = target_of(VOCAB)
    model.save_pretrained(target_folder)
    draft_folder.mkdir()
    draft = draft_of(model)
    save_file(draft.state_dict(), draft_folder / "model.safetensors")
    config = run_path(str(Path(__file__).with_name("conftest.py")))["draft_json"](VOCAB)
    (draft_folder / "config.json").write_text(json.dumps(config))
    target, loaded = load_pair(target_folder, draft_folder)
    expected = speculative_decode(Target(model, (2, 0)), draft, PROMPT, 30)
    assert speculative_decode(target, loaded, PROMPT, 30) == expected
    (draft_folder / "config.json").write_text(json.dumps(config | {"num_target_layers": 36}))
    with pytest.raises(CheckpointError, match="trained on a target with 36 layers; this target has 4"):
        load_pair(target_folder, draft_folder)


@pytest.mark.demo
def test_demo_pair_is_lossless_and_worth_it():
    """Breaks when the trained draft stops being accepted (a shift by one leaves about 1), or changes greedy text."""
    from transformers import AutoTokenizer

    from vllm_dflash.demo_pair.prepare import prepare
    from vllm_dflash.demo_pair.prompts import PROMPTS

    folders = prepare()
    target, draft = load_pair(folders.target, folders.draft)
    tokenizer = AutoTokenizer.from_pretrained(folders.target)
    accepted = []
    for prompt in (PROMPTS[0], PROMPTS[7], PROMPTS[-1]):
        chat = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        run = speculative_decode(target, draft, ids, 32, stop_ids=[tokenizer.eos_token_id])
        assert run.tokens == plain_decode(target, ids, 32, stop_ids=[tokenizer.eos_token_id])
        accepted += run.accepted
    assert 1 + sum(accepted) / len(accepted) > 2
