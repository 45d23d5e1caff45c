# SPDX-License-Identifier: Apache-2.0
"""The planner under data parallelism: ranks of a dense target choose their widths alone, ranks in lockstep keep K."""

import pytest
from tiny_models import Draft

K = 3


@pytest.fixture
def config_of(write_pair, monkeypatch):
    """The configuration of an engine on two data-parallel ranks, before they start."""
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    def build(*, experts=False, table=None, **options):
        if experts:
            monkeypatch.setattr(ModelConfig, "is_moe", property(lambda _: True))
        target, draft = write_pair(Draft(block=K + 1))
        speculative = {"method": "dflash", "model": str(draft), "num_speculative_tokens": K}
        return EngineArgs(
            str(target),
            speculative_config=speculative | ({"num_speculative_tokens_per_batch_size": table} if table else {}),
            additional_config={"vllm_dflash": {"planner": "on"}},
            data_parallel_size=2,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=4,
            kv_cache_memory_bytes=16 << 20,
            **options,
        ).create_engine_config()

    return build


def test_ranks_of_a_dense_target_plan_alone(config_of, write_pair, engine_of, prompts):
    """Breaks if vLLM drops the planner's table for ranks that never wait for each other, or a rank does not use it."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    from vllm_dflash.engine.planner_access import report_of

    expected = engine_of(write_pair(Draft(block=K + 1))[0]).generate(prompts[:2], 9)
    engine_of.shut_down()
    config = config_of(distributed_executor_backend="uni")
    assert config.parallel_config.data_parallel_size == 2
    config.parallel_config.reconfigure_for_independent_dp_rank()  # what vLLM's engine core does first
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
    assert answers(engine, prompts[:2], 9) == expected
    assert sum(report_of(engine)["widths"].values()) > 3


def answers(engine, prompts, max_tokens):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished}
    return [done[str(number)] for number in range(len(prompts))]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"experts": True}, marks=pytest.mark.slow),
        {"distributed_executor_backend": "external_launcher"},
        {"table": [(1, 2, 3), (3, 4, 1)]},
    ],
    ids=["experts", "a launcher of the user's", "a table of the user's"],
)
def test_k_stays_where_ranks_must_agree(layout, config_of, monkeypatch):
    """Breaks if ranks that join their forwards draft different widths (they would wait for ever), or vLLM's rule is undone."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = config_of(**layout)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
