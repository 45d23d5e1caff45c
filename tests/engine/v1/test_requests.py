# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for: with speculation the answer is the one without, in float32, whatever the parameters.

The trained demo pair, so that drafts are accepted in every request. Both engines run all requests of ``FEATURES`` as one
batch, and each test compares one of them. The table in docs/requests.md names these tests.
"""

import dataclasses
import gc
import math
from collections.abc import Sequence
from typing import Any

import pytest

pytestmark = pytest.mark.demo

K, TOKENS = 3, 20
SEASONS, NAMES = "Name the four seasons.", "List five fruits and their colours."
SCHEMA = {
    "type": "object",
    "properties": {"fruit": {"enum": ["apple", "plum"]}, "ripe": {"type": "boolean"}},
    "required": ["fruit", "ripe"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "The " fruit " is " ("red" | "green") "."\nfruit ::= "apple" | "plum"'
SAMPLED = {"temperature": 1.3, "top_k": 40, "top_p": 0.95}


@dataclasses.dataclass(frozen=True)
class Feature:
    """Sampling parameters of one request; ``same`` where they leave the greedy answer as it is."""

    params: dict[str, Any]
    question: str = SEASONS
    same: bool = False


def structured(**kind: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**kind)}


FEATURES: dict[str, Feature] = {
    "greedy": Feature({}, same=True),
    "logprobs": Feature({"logprobs": 3}, same=True),
    "prompt_logprobs": Feature({"prompt_logprobs": 2}, same=True),
    "presence_penalty": Feature({"presence_penalty": -2.0}),
    "frequency_penalty": Feature({"frequency_penalty": -2.0}),
    "repetition_penalty": Feature({"repetition_penalty": 1.6}),
    "min_p": Feature({"min_p": 1.0, "temperature": 1.5}, same=True),  # all but the likeliest token are masked
    "logit_bias": Feature({"logit_bias": {281: 6.0, 260: -30.0, 339: 4.5}}),
    "bad_words": Feature({"bad_words": ["seasons", "Spring", " four"]}),
    "allowed_token_ids": Feature({"allowed_token_ids": list(range(200, 900))}),
    "min_tokens": Feature({"min_tokens": 15, "stop_token_ids": [30, 28, 216]}),
    "stop strings": Feature({"stop": ["our", "ummer"], "include_stop_str_in_output": True}),
    "stop tokens": Feature({"stop_token_ids": [28, 30, 216]}),
    "JSON schema": Feature(structured(json=SCHEMA) | {"max_tokens": 40}, NAMES),
    "regex": Feature(structured(regex=r"[A-Z][a-z]{2,8}, [a-z]{3,8}\."), NAMES),
    "choice": Feature(structured(choice=["summer and winter", "spring and autumn"])),
    "grammar": Feature(structured(grammar=GRAMMAR), NAMES),
    "n > 1": Feature({"n": 2, "logprobs": 0, "min_p": 1.0, "temperature": 1.5}, same=True),
    "one token": Feature({"max_tokens": 1}),
    "all at once": Feature(
        {
            "logit_bias": {281: 3.0},
            "presence_penalty": 0.7,
            "repetition_penalty": 1.2,
            "bad_words": ["the"],
            "min_tokens": 12,
            "stop_token_ids": [28, 30],
            "logprobs": 2,
        }
    ),
}


class Requests:
    """An engine with or without speculation, and the answers to all of ``FEATURES``."""

    def __init__(self, target: Any, draft: Any = None) -> None:
        from vllm import LLM

        speculative = None if draft is None else {"method": "dflash", "model": str(draft), "num_speculative_tokens": K}
        self.llm: Any = LLM(
            str(target),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=10,
            max_num_batched_tokens=256,
            block_size=128,
            kv_cache_memory_bytes=256 << 20,
            enforce_eager=True,
            enable_prompt_embeds=True,
            scheduling_policy="priority",
            disable_log_stats=False,
            speculative_config=speculative,
            additional_config={} if draft is None else {"vllm_dflash": {"planner": "off"}},
        )
        self.tokenizer = self.llm.get_tokenizer()
        prompts = [self.prompt(f.question) for f in FEATURES.values()]
        self.answers = dict(zip(FEATURES, self.generate(prompts, [f.params for f in FEATURES.values()]), strict=True))

    def prompt(self, question: str) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return text

    def generate(self, prompts: Sequence[Any], params: Sequence[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams

        wanted = [SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS} | p) for p in params]
        results: list[Any] = self.llm.generate(list(prompts), wanted, use_tqdm=False)
        return results

    def accepted(self) -> float:
        return float(sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"))


@pytest.fixture(scope="module")
def engines():
    """(answers without speculation, answers of embeddings and beams without, the running engine with speculation)."""
    from vllm_dflash.demo_pair.prepare import prepare

    pair = prepare()
    plain = Requests(pair.target)
    answers, beams = plain.answers, beam_search(plain)
    del plain
    gc.collect()
    ours = Requests(pair.target, pair.draft)
    yield answers, beams, ours
    del ours
    gc.collect()


@pytest.fixture(scope="module")
def plain(engines):
    return engines[0]


@pytest.fixture(scope="module")
def ours(engines):
    return engines[2]


def beam_search(requests):
    from vllm.sampling_params import BeamSearchParams

    found = requests.llm.beam_search([{"prompt": requests.prompt(SEASONS)}], BeamSearchParams(beam_width=2, max_tokens=5))
    return [(sequence.tokens, sequence.text) for sequence in found[0].sequences]


def close(found, expected):
    """The same tokens with the same log-probabilities at every position; None positions (first prompt token) alike."""
    if not found or not expected:
        return found == expected
    return len(found) == len(expected) and all(
        a == b or (set(a) == set(b) and all(math.isclose(a[t].logprob, b[t].logprob, abs_tol=2e-3) for t in a))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", FEATURES)
def test_equal_to_no_speculation(name, plain, ours):
    """Breaks if a parameter is applied to the bonus row only, or to another row than its own."""
    feature, found, expected = FEATURES[name], ours.answers[name], plain[name]
    assert found.prompt == expected.prompt  # what a server echoes
    assert close(found.prompt_logprobs, expected.prompt_logprobs)
    assert len(found.outputs) == len(expected.outputs) == feature.params.get("n", 1)
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert (one.text, list(one.token_ids)) == (other.text, list(other.token_ids))
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert close(one.logprobs, other.logprobs)
        assert (list(one.token_ids) == list(plain["greedy"].outputs[0].token_ids)) is feature.same


def test_drafts_were_accepted(ours):
    """Breaks if requests with such parameters are decoded without drafts: equality would then prove nothing."""
    before = ours.accepted()
    ours.generate([ours.prompt(SEASONS)] * 3, [FEATURES[f].params for f in ("logit_bias", "all at once", "grammar")])
    assert ours.accepted() - before >= 8


def test_seeds_repeat_and_differ(ours):
    """Breaks if a request's draws depend on its neighbours, or if the seed is not its own.

    ``n`` samples of one seeded request differ from each other, and repeat together.
    """
    prompt = ours.prompt(SEASONS)
    wanted = [SAMPLED | {"seed": 7}, SAMPLED | {"seed": 8}, SAMPLED | {"seed": 7, "n": 2}]
    first = [[list(o.token_ids) for o in r.outputs] for r in ours.generate([prompt] * 3, wanted)]
    second = [[list(o.token_ids) for o in r.outputs] for r in ours.generate([prompt] * 3, wanted[::-1])][::-1]
    assert first == second
    assert first[0] != first[1]
    assert first[2][0] != first[2][1]


def test_beam_search_finds_the_same_beams(engines):
    """Breaks if the log-probabilities of single-token requests are not the target's."""
    assert beam_search(engines[2]) == engines[1]


def test_embeddings_as_prompt(plain, ours):
    """Breaks if the draft needs token ids of a prompt that was given as embeddings."""
    ids = plain["greedy"].prompt_token_ids
    model = ours.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    import torch

    with torch.inference_mode():
        embedded = model.model.embed_tokens.weight[torch.tensor(ids)].clone()
    (result,) = ours.generate([{"prompt_embeds": embedded}], [{}])
    assert list(result.outputs[0].token_ids) == list(plain["greedy"].outputs[0].token_ids)


def test_priority_goes_first(plain, ours):
    """Breaks if an urgent request waits behind less urgent ones, or if its answer suffers from overtaking."""
    from vllm import SamplingParams

    engine, done, texts = ours.llm.llm_engine, [], {}
    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompt = ours.prompt(SEASONS)
    for i in range(14):
        engine.add_request(f"patient-{i}", prompt, params, priority=5)
    engine.step()
    engine.add_request("urgent", prompt, params, priority=0)
    while engine.has_unfinished_requests():
        for result in engine.step():
            if result.finished:
                done.append(result.request_id)
                texts[result.request_id] = list(result.outputs[0].token_ids)
    assert set(map(tuple, texts.values())) == {tuple(plain["greedy"].outputs[0].token_ids[:8])}
    waiting = [i for i in done if i != "urgent"][-4:]  # max_num_seqs is 10
    assert all(done.index("urgent") < done.index(i) for i in waiting)


def test_custom_logits_processors_are_refused_at_start(ours):
    """Breaks if our patch lets them pass: a processor of the user's knows nothing of rows that may be rejected."""
    import torch
    from vllm.v1.sample.logits_processor import build_logitsprocs
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor

    config = ours.llm.llm_engine.vllm_config
    with pytest.raises(ValueError, match="speculative"):
        build_logitsprocs(config, torch.device("cpu"), False, False, [MinPLogitsProcessor])


def test_a_bad_parameter_is_refused_and_the_engine_lives(plain, ours):
    """Breaks if vLLM's other checks go together with the refusal of min_p and logit_bias."""
    from vllm.exceptions import VLLMValidationError

    for params, message in (({"min_p": 1.5}, "min_p"), ({"logit_bias": {10**6: 1.0}}, "vocab"), ({"logprobs": 99}, "logprobs")):
        with pytest.raises(VLLMValidationError, match=message):
            ours.generate([ours.prompt(SEASONS)], [params])
    (result,) = ours.generate([ours.prompt(SEASONS)], [{"max_tokens": 6}])
    assert list(result.outputs[0].token_ids) == list(plain["greedy"].outputs[0].token_ids[:6])
