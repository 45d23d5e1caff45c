# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2: the draft's context of steps that draft nothing, stored for many steps at once.

While nothing is drafted nobody reads the draft's K/V, yet ``fc`` and the K/V projections read all of their weights for the one
row that each request adds: 250 MB in bfloat16 for an 8B target, by the roofline of an H200 some 60 us, in every step of some
5 ms. Their GEMMs read as much for 150 rows. So the rows of plain decode steps wait on the device, and are stored in one pass
before anything else is.

All that decides is on the host: names of requests, numbers of rows. No tensor is read there, nothing waits for the device, and
every tensor-parallel rank decides alike.

What must hold: **rows wait only while their requests hold their blocks.** A block that changes hands would have two rows for one
slot in one pass, and a request that finds it as a cached prefix reads it at once. Blocks change hands when a request ends, is
preempted or comes, and all of these show in the next step: other names, or a prefill. What waits is stored before that step's own
context; what it then writes to a block of a request that is gone, its new owner overwrites in the same step, before any read.
Between the two lies the target's pass, which must not use those bytes: see the reasons of :func:`why_at_once`. Counterpart of
``pending_context.py``, which reads slots on the host and so follows blocks one by one.

The planner is not told which step stores what waited: one in 16 or more is longer by the pass, and medians leave it out.
"""

from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dflash.draft_config import DraftConfig

MOST_STEPS = 32
"""That wait together: a request alone then pays a 32nd of a pass in each. A drafting step that finds rows pays one whole."""
MOST_ROWS = 512
"""Beyond some 150 rows, by the roofline, the pass is bound by compute: more of them save launches, not bytes."""
MOST_BYTES = 32 << 20
"""Of hidden states that wait; 512 rows of 5 layers of 4096 in bfloat16 are 20 MiB."""
LEAST_STEPS = 16
"""Batches of which fewer steps would fit, from 33 requests on, are stored in each step, by its graph: the pass is launched kernel
by kernel, and has more than the 150 rows to begin with."""


def why_at_once(vllm_config: VllmConfig, draft: DraftConfig) -> str | None:
    """Why the context of every step is stored in it, whatever the KV cache; None where that of plain steps may wait."""
    parallel = vllm_config.parallel_config
    windows = [layer.window for layer in draft.layers if layer.window is not None and layer.frees]
    split = parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
    reasons = {
        "every step drafts": not vllm_config.speculative_config.uses_dynamic_speculative_decoding(),
        "data-parallel ranks run the same as each other": parallel.data_parallel_size > 1,
        "pipeline stages take turns with batches": parallel.pipeline_parallel_size > 1,  # no two steps in a row have the same
        "ranks share requests, which was not tried": split,
        "a KV connector saves blocks when a step ends": vllm_config.kv_transfer_config is not None,
        "a window lets go of blocks whose rows would still wait": min(windows, default=MOST_STEPS) < MOST_STEPS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def shares_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a block can hold other layers in other hands: the next request's target would store its K/V where rows wait for.

    For several groups only does vLLM also copy blocks, of prefixes that end within one.
    """
    return len(kv_cache_config.kv_cache_groups) > 1


def capacity(max_requests: int, row_bytes: int) -> int:
    """Rows of ``row_bytes`` each to make room for in an engine of ``max_requests``; see the bounds above."""
    return min(MOST_STEPS * max_requests, MOST_ROWS, MOST_BYTES // row_bytes)


class DeferredContext:
    """Rows that wait for their K and V, in the order of their steps.

    Made with the speculator and not with a KV cache, whose memory sleep mode takes away.

    Args:
        num_rows: that may wait.
        aux_width: values of aux states per row. dtype: theirs.
    """

    def __init__(self, num_rows: int, aux_width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._aux = torch.zeros(num_rows, aux_width, dtype=dtype, device=device)
        self._positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._slots = torch.zeros(1, num_rows, dtype=torch.int64, device=device)  # of the one KV group
        self._names: Sequence[str] = ()
        self._steps = self._rows = 0

    def __len__(self) -> int:
        """Rows that wait."""
        return self._rows

    @property
    def max_rows(self) -> int:
        """Rows that there is room for."""
        return self._aux.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return self._aux.nbytes + self._positions.nbytes + self._slots.nbytes

    def suits(self, batch: InputBatch) -> bool:
        """Whether rows of ``batch`` may wait: one of each request, none of a prompt, few enough for several steps."""
        one_each = batch.num_tokens == batch.num_reqs and not batch.num_draft_tokens and not batch.has_prefill
        return one_each and batch.num_reqs * LEAST_STEPS <= self.max_rows

    def continues(self, batch: InputBatch) -> bool:
        """Whether ``batch`` has the requests of the rows that wait, in any case their blocks, and there is room for it."""
        if not self._rows:
            return True
        room = self._steps < MOST_STEPS and self._rows + batch.num_reqs <= self.max_rows
        return room and self._names == batch.req_ids

    def add(self, names: Sequence[str], positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Have the rows of a step wait, one of each of ``names``; what has been asked of it: :meth:`suits`, :meth:`continues`.

        Args:
            names: n requests.
            positions: int64 [n].
            slots: int64 [1, n], -1 for rows not to store.

        Returns:
            [n, aux_width] to be filled with the aux states of the rows, at once and on the same stream.
        """
        new = slice(self._rows, self._rows + len(names))
        self._positions[new].copy_(positions)
        self._slots[:, new].copy_(slots)
        self._names = names
        self._rows, self._steps = new.stop, self._steps + 1
        return self._aux[new]

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All rows that wait, to be used before the next are added: aux states, positions and slots, as :meth:`add` got them."""
        rows = slice(0, self._rows)
        self.drop()
        return self._aux[rows], self._positions[rows], self._slots[:, rows]

    def drop(self) -> None:
        """Forget what waits: its KV cache is gone."""
        self._names = ()
        self._steps = self._rows = 0


def deferred_context(
    vllm_config: VllmConfig, draft: DraftConfig, max_requests: int, aux_width: int, dtype: torch.dtype, device: torch.device
) -> DeferredContext | None:
    """Memory for rows that wait; None where :func:`why_at_once` says so."""
    if why_at_once(vllm_config, draft) is not None:
        return None
    return DeferredContext(capacity(max_requests, aux_width * dtype.itemsize), aux_width, dtype, device)
