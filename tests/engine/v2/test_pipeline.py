# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages on Model Runner V2: the last one drafts, from hidden states that the first one captured too."""

import multiprocessing
import types

import pytest
import tiny_models
from tiny_models import Draft, Target

K, TOKENS = 3, 9
PROMPTS = [[3, 17, 44, 8, 21], [60, 2, 9]]
TARGET = Target(layers=4)
# Outputs of layers 3, 0 and 1, stated where vLLM's own look-up does not read them. Layer 1 ends the first stage.
DRAFT = Draft(
    block=K + 1, layer_ids=(3, 0, 1), dflash=(("target_layer_ids", None),), config=(("aux_hidden_state_layer_ids", [4, 1, 2]),)
)
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers that have imported everything, the interpreter's repairs included, and are a step behind the scheduler.

    vLLM's CPU build would spawn them, and turn asynchronous scheduling off.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr("vllm.v1.executor.multiproc_executor.get_mp_context", lambda: fork)
    return cleanup_dist_env_and_memory  # threads of a process group do not survive a fork


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_models.write_target(folder / "target", TARGET)
    return str(target), str(tiny_models.write_draft(folder / "draft", DRAFT, TARGET))


def test_a_pipeline_without_asynchronous_scheduling_is_refused(folders):
    """Breaks if it ends in an assertion of vLLM's on the first stage, after the weights are loaded."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dflash.engine.pair import resolve_draft

    speculative = {"method": "dflash", "model": folders[1]}
    arguments = EngineArgs(folders[0], speculative_config=speculative, pipeline_parallel_size=2, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"async_scheduling: found False with pipeline_parallel_size 2; .* needs True"):
        resolve_draft(arguments.create_engine_config())


@pytest.mark.slow  # three interpreted engines: 25 CPU seconds
def test_drafts_over_two_stages(folders, engine_of, forked_workers):
    """Breaks if a stage captures other layers than the draft reads, or their states or the drafts stay on their stage."""
    engine_class = engine_of.__self__
    single = engine_of(*folders)
    drafts = single.watch(PROMPTS)
    answers = single.generate(PROMPTS, TOKENS)
    engine_class.close()
    forked_workers()
    staged = engine_class(*folders, **STAGES)
    first = staged.llm.request_counter.counter

    def watch(worker):
        speculator = worker.model_runner.speculator
        if speculator is not None:
            counter = types.SimpleNamespace(request_counter=types.SimpleNamespace(counter=first))
            worker.proposals = engine_class.watch(types.SimpleNamespace(llm=counter, speculator=speculator), PROMPTS)

    staged.llm.collective_rpc(watch)
    assert staged.generate(PROMPTS, TOKENS) == answers
    nothing, proposals = staged.llm.collective_rpc(lambda worker: getattr(worker, "proposals", None))
    assert nothing is None
    # Behind the last token only one of the engines may leave drafting out.
    common = drafts.keys() & proposals.keys()
    assert {key: proposals[key] for key in common} == {key: drafts[key] for key in common}
    assert len(common) >= len(PROMPTS) * (TOKENS - 2)
