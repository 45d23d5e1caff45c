# SPDX-License-Identifier: Apache-2.0
"""Each repair of vLLM's CPU sampling: what is wrong without it, and what is right with it.

When one of the ``..._is_still_needed`` tests fails on the oldest supported vLLM, its repair and its hook can go.
"""

import types

import pytest
import torch


def original(function):
    """vLLM's own function, whether or not the plugin has replaced it in this process."""
    return getattr(function, "__wrapped__", function)


def test_expansion_repair_is_still_needed():
    """Breaks when vLLM's CPU expansion fills a float32 output itself: the repair can then go."""
    import vllm._custom_ops  # noqa: F401  # loads the compiled ops
    from vllm.utils import cpu_triton_utils

    output = torch.full((3,), -9.0)
    arguments = (torch.tensor([0.5, 0.0]), torch.tensor([2, 3]), 0, 1)
    original(cpu_triton_utils._expand_kernel_impl)(output, *arguments, MAX_NUM_TOKENS=32)
    assert output.tolist() == [-9.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_rows_get_their_requests_value(dtype):
    """Breaks if a request without rows shifts the others, or if the replaced value leaks."""
    from vllm_dflash.engine.cpu_sampling import expand_rows

    output = torch.full((6,), -9, dtype=dtype)
    expand_rows(output, torch.tensor([5, 0, 7, 8], dtype=dtype), torch.tensor([2, 5, 5, 6]), 0, 1)
    assert output.tolist() == [5, 5, 1, 1, 1, 8]


def test_top_k_repair_is_still_needed():
    """Breaks when vLLM's top-k takes no rows: the repair can then go."""
    from vllm.v1.sample.ops import topk_topp_sampler

    from vllm_dflash.engine.cpu_sampling import allow_no_rows

    plain, empty = original(topk_topp_sampler.apply_top_k_only), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="max"):
        plain(torch.zeros(0, 8), empty)
    repaired = allow_no_rows(plain)
    assert repaired(torch.zeros(0, 8), empty).shape == (0, 8)
    kept = repaired(torch.arange(8.0).view(1, 8).clone(), torch.tensor([3], dtype=torch.int32))
    assert kept.isfinite().sum() == 3


def test_seed_repair_is_still_needed():
    """Breaks when torch's CPU generators get the offset that vLLM rewinds by: the repair can then go."""
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator("cpu").get_offset()


def test_discarded_draws_are_taken_back():
    """Breaks if a seeded request in mid-prefill does not start over, or one that has answered or samples loses its generator."""
    from vllm_dflash.engine.cpu_sampling import rewind_seeds

    generators = {row: torch.Generator("cpu").manual_seed(row + 40) for row in range(3)}
    fresh = [torch.Generator("cpu").manual_seed(row + 40).get_state() for row in range(3)]
    for generator in generators.values():
        torch.rand(1, generator=generator)
    batch = types.SimpleNamespace(generators=generators, num_reqs=3, req_ids=["a", "b", "c"])
    answered = types.SimpleNamespace(output_token_ids=[1])
    new = types.SimpleNamespace(output_token_ids=[])
    runner = types.SimpleNamespace(
        device=torch.device("cpu"),
        input_batch=batch,
        requests={"a": new, "b": answered, "c": new},
        discard_request_mask=types.SimpleNamespace(np=torch.tensor([True, True, False]).numpy()),
    )
    seen = rewind_seeds(lambda runner: set(runner.input_batch.generators))(runner)
    assert seen == {2}
    assert batch.generators is generators
    started_over = [bool(torch.equal(generators[row].get_state(), fresh[row])) for row in range(3)]
    assert started_over == [True, False, False]
