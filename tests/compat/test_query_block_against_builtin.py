# SPDX-License-Identifier: Apache-2.0
"""Our `query_block` against the kernel that vLLM's own DFlash speculator uses, on the same batches.

Runs in a process of its own: vLLM must see the interpreter backend of `tests/shim` before it is imported. The test can go
when vLLM no longer ships `prepare_dflash_inputs`.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).parents[2]
K, MASK, MAX_MODEL_LEN, MAX_NUM_REQS, MAX_NUM_TOKENS = 3, 500, 64, 6, 48
Q = K + 1

# (start, span, rejected, sampled, state) per request. The end of the context is left out: there the built-in stores a
# position behind max_model_len into an earlier slot of the last page, which is the defect that we do not copy.
BATCHES = [
    [(10, 4, 2, 2, 5)],
    [(0, 9, 0, 0, 2), (12, 4, 3, 1, 0), (7, 1, 0, 1, 1)],
    [(40, 4, 0, 4, 3), (0, 17, 0, 1, 4), (16, 8, 0, 0, 2), (5, 4, 1, 3, 0)],
]


def make_batch(requests, device):
    """The parts of a model-runner batch that both kernels read; sampled token of state s 100 + s, prompt token 200 + s."""
    spans = torch.tensor([span for _, span, *_ in requests], dtype=torch.int32)
    starts = torch.zeros(len(requests) + 1, dtype=torch.int32)
    starts[1:] = spans.cumsum(0)
    positions = [start + i for start, span, *_ in requests for i in range(span)]
    column = {name: [request[i] for request in requests] for i, name in enumerate(("", "", "rejected", "sampled", "state"))}
    return SimpleNamespace(
        num_reqs=len(requests),
        num_tokens=len(positions),
        num_scheduled_tokens=spans.numpy(),
        query_start_loc=starts.to(device),
        positions=torch.tensor(positions, device=device),
        idx_mapping=torch.tensor(column["state"], device=device),
        num_sampled=torch.tensor(column["sampled"], dtype=torch.int32, device=device),
        num_rejected=torch.tensor(column["rejected"], dtype=torch.int32, device=device),
        last_sampled=100 + torch.arange(MAX_NUM_REQS, device=device)[:, None],
        next_prefill_tokens=200 + torch.arange(MAX_NUM_REQS, dtype=torch.int32, device=device)[None, :],
    )


def run_builtin(batch, table, kv_block_size, device):
    """What vLLM's kernel leaves in its buffers, under our names."""
    from vllm.v1.worker.gpu.input_batch import InputBuffers
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import prepare_dflash_inputs

    def zeros(size, dtype=torch.int64):
        return torch.zeros(size, dtype=dtype, device=device)

    buffers = InputBuffers(MAX_NUM_REQS, MAX_NUM_TOKENS, torch.device(device))
    slots, context_positions, context_slots = (zeros(MAX_NUM_TOKENS) for _ in range(3))
    rows, sample_positions, states = (zeros(MAX_NUM_REQS * K) for _ in range(3))
    temperature, seeds = zeros(MAX_NUM_REQS, torch.float32), zeros(MAX_NUM_REQS)
    prepare_dflash_inputs(
        buffers, slots, context_positions, context_slots, rows, sample_positions, states, temperature, seeds, batch,
        batch.num_sampled, batch.num_rejected, batch.last_sampled, batch.next_prefill_tokens, temperature.clone(),
        seeds.clone(), table, kv_block_size, 0, 1, 1, MASK, Q, K, MAX_NUM_REQS, MAX_NUM_TOKENS, MAX_MODEL_LEN,
    )  # fmt: skip
    real, num_tokens = batch.num_reqs, batch.num_tokens
    return {
        "input_ids": buffers.input_ids[: real * Q],
        "positions": buffers.positions[: real * Q],
        "slots": slots[: MAX_NUM_REQS * Q],
        "query_start_loc": buffers.query_start_loc,
        "seq_lens": buffers.seq_lens,
        # The built-in keeps the position of the sampled token and subtracts 1 later; padding stays 0.
        "sample_positions": torch.where(states >= 0, sample_positions - 1, 0),
        "sample_req_state": states,
        "context_positions": context_positions[:num_tokens],
        "context_slots": context_slots[:num_tokens],
    }


def run_ours(batch, table, kv_block_size, device):
    """The same parts of our buffers."""
    from dflash_kernels.query_block import DraftBlockTables, QueryBlockBuffers, QueryBlockSpec, TargetStep, query_block

    out = QueryBlockBuffers.allocate(MAX_NUM_REQS, Q, K, MAX_NUM_TOKENS, 1, device)
    names = [name for name in TargetStep.__dataclass_fields__ if name != "num_blocks"]
    query_block(
        out,
        DraftBlockTables.build([table], [kv_block_size]),
        QueryBlockSpec(Q, K, MASK, MAX_MODEL_LEN),
        TargetStep(**{name: getattr(batch, name) for name in names}),
        num_reqs=batch.num_reqs,
        num_reqs_padded=MAX_NUM_REQS,
        num_context_rows=MAX_NUM_TOKENS,
        max_query_len=int(batch.num_scheduled_tokens.max()),
    )
    real, num_tokens = batch.num_reqs, batch.num_tokens
    return {
        "input_ids": out.input_ids[: real * Q],
        "positions": out.positions[: real * Q],
        "slots": out.slots[0],
        "query_start_loc": out.query_start_loc,
        "seq_lens": out.seq_lens,
        "sample_positions": out.sample_positions,
        "sample_req_state": out.sample_req_state,
        "context_positions": out.context_positions[:num_tokens],
        "context_slots": out.context_slots[0, :num_tokens],
    }


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for requests in BATCHES:
        for kv_block_size in (4, 16, 24):
            columns = -(-MAX_MODEL_LEN // kv_block_size)
            table = 1 + torch.randperm(MAX_NUM_REQS * columns).reshape(MAX_NUM_REQS, columns).to(torch.int32)
            table[0, 0] = 0  # an evicted page
            batch, table = make_batch(requests, device), table.to(device)
            ours, builtin = run_ours(batch, table, kv_block_size, device), run_builtin(batch, table, kv_block_size, device)
            for name, expected in builtin.items():
                torch.testing.assert_close(ours[name], expected, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_same_query_block_as_the_builtin():
    """A difference would be lost acceptance without an error: verification hides a wrong draft input."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "shim"), environment["PYTHONPATH"]])
    result = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


if __name__ == "__main__":
    main()
