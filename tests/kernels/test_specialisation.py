# SPDX-License-Identifier: Apache-2.0
"""No kernel is compiled while serving: what differs from step to step must not be part of what Triton compiles for.

Triton compiles anew for an integer that is 1 or a multiple of 16, and for a pointer that is a multiple of 16 bytes. Launches are
recorded here, not run: their arguments alone decide.
"""

import importlib
import inspect
import pkgutil
from collections import defaultdict

import pytest
import torch

import dflash_kernels
from dflash_kernels.block_attention import AttentionWorkspace, block_attention
from dflash_kernels.context_kv import LayerCaches, context_kv
from dflash_kernels.draft_budget import TILES, Admission, draft_budget
from dflash_kernels.draft_head import HeadWorkspace, Temperatures, draft_head
from dflash_kernels.draft_head_fp8 import draft_head_fp8
from dflash_kernels.fp8_linear import Fp8Workspace, fp8_linear
from dflash_kernels.guest_rows import admit_guests
from dflash_kernels.page_list import PageList, page_list
from dflash_kernels.query_block import DraftBlockTables, QueryBlockBuffers, QueryBlockSpec, TargetStep, query_block
from dflash_kernels.query_kv import query_kv

Q, K, MOST, SIZE, HEADS, KV_HEADS, PAGE, VOCAB, HIDDEN = 4, 3, 48, 32, 4, 2, 16, 640, 64
REQUESTS = (1, 2, 3, 15, 16, 17, 32, 47, 48)
# Tile shapes follow from the number of requests alone, and the draft step is captured for every number that can occur.
CAPTURED = {"ODDS", "SPLIT", "BLOCK_M", "BLOCK_V", "BLOCK_K", "BLOCK_N", "BLOCK_T", "num_warps", "num_stages"}


def launched_kernels():
    """Names of all kernels of the package that a launcher starts (device functions are called otherwise)."""
    modules = [importlib.import_module(f"dflash_kernels.{m.name}") for m in pkgutil.iter_modules(dflash_kernels.__path__)]
    return {n for m in modules for n, f in vars(m).items() if n.endswith("_kernel") and hasattr(f, "pre_run_hooks")}


def variant_of(kernel, args, kwargs):
    """What Triton compiles for: (compile-time constants, specialisation of everything else)."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    options = getattr(kernel, "kwargs", None) or vars(kernel)
    fixed_ints = set(options.get("do_not_specialize") or ())
    unaligned = set(options.get("do_not_specialize_on_alignment") or ())
    signature = inspect.signature(kernel.fn)
    launch = {name: value for name, value in kwargs.items() if name not in signature.parameters}
    bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in launch})
    constants, rest = dict(launch), []
    for name, value in bound.arguments.items():
        if "constexpr" in str(signature.parameters[name].annotation):
            constants[name] = str(value)
        else:
            special = native_specialize_impl(BaseBackend, value, False, name not in fixed_ints, name not in unaligned)
            rest.append((name, str(special)))
    return constants, tuple(rest)


@pytest.fixture
def launches(monkeypatch):
    """{kernel name: [(constants, specialisation)]} of launches, which are recorded only."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found = defaultdict(list)

    def run(self, *args, grid, warmup, **kwargs):  # Triton's signature
        found[self.fn.__name__].append(variant_of(self, args, kwargs))

    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", run)
    return found


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def shifted(tensor, by):
    """The same values at another address: slices of a step's tensors begin anywhere."""
    room = torch.zeros(tensor.numel() + by, dtype=tensor.dtype)
    return room[by:].view(tensor.shape)


class Launchers:
    """Every launcher as the engine calls it; what lives as long as an engine is made once."""

    def __init__(self):
        self.buffers = QueryBlockBuffers.allocate(MOST + 2, Q, K, 4096, 1, "cpu")
        self.tables = DraftBlockTables.build([ints(MOST, 9)], [PAGE])
        self.cache = torch.zeros(3, PAGE, KV_HEADS, 2 * SIZE)
        self.k_cache, self.v_cache = self.cache.split(SIZE, dim=-1)
        self.caches = LayerCaches.build([self.k_cache] * 2, [self.v_cache] * 2, [0, 0])
        self.cos_sin, self.norm = torch.zeros(128, SIZE), torch.ones(2, SIZE)
        sizes = {"num_query_per_req": Q, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": SIZE}
        self.attention = AttentionWorkspace(max_num_reqs=MOST, max_seq_len=4096, device="cpu", num_sms=132, **sizes)
        self.head = HeadWorkspace(max_rows=MOST * Q, vocab_rows=VOCAB, dtype=torch.float32, device="cpu", odds=True)
        self.head_weight = torch.zeros(VOCAB, HIDDEN)
        self.fp8_weight, self.fp8_scale = ints(VOCAB, HIDDEN, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(VOCAB)
        self.fp8 = Fp8Workspace("cpu")
        self.pages = PageList.empty(MOST, 9, "cpu")
        self.admission, self.confidences = Admission.empty(MOST, "cpu"), torch.ones(MOST, K)
        self.guest_maps = ints(VOCAB), ints(VOCAB), ints(2 * SIZE), ints(1)

    def step(self, requests, context_rows, width=K):
        """All launches of one step; ``context_rows`` as of a prefill where they are more than the draft's own.

        ``width``: drafts of this step. Fewer than K change the inputs of the step alone: the rest of it is captured by width.
        """
        rows, at = requests * Q, requests % 5
        vectors = (shifted(ints(requests), at) for _ in range(2))
        step = TargetStep(
            shifted(ints(requests + 1), at),
            shifted(ints(context_rows, dtype=torch.int64), at),
            shifted(ints(requests, dtype=torch.int64), at),
            *vectors,
            shifted(ints(MOST, 1, dtype=torch.int64), at),
            shifted(ints(1, MOST), at),
            shifted(ints(1, MOST), at),
        )
        sizes = {"num_reqs": requests, "num_reqs_padded": requests, "num_context_rows": context_rows}
        spec = QueryBlockSpec(width + 1, width, 5, 128, draft_mid_prefill=False)
        query_block(self.buffers, self.tables, spec, step, **sizes, max_query_len=context_rows)
        kv = torch.zeros(context_rows, 4 * KV_HEADS * SIZE)
        positions, slots = self.buffers.context_positions[at:], self.buffers.context_slots[:, at:]
        context_kv(self.caches, kv, positions, slots, self.cos_sin, self.norm, eps=1e-6)
        qkv = torch.zeros(rows, (HEADS + 2 * KV_HEADS) * SIZE)
        heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": SIZE, "eps": 1e-6}
        query_kv(
            qkv, self.buffers.positions[at:], self.buffers.slots[0, at:], self.cos_sin, self.norm[0], self.norm[1], self.k_cache,
            self.v_cache, **heads,
        )  # fmt: skip
        query, table, lengths = torch.zeros(rows, HEADS, SIZE), shifted(ints(requests, 9), at), shifted(ints(requests), at)
        sizes = {"workspace": self.attention, "num_query_per_req": Q, "scale": 1.0}
        block_attention(query, self.k_cache, self.v_cache, table, lengths, **sizes)
        page_list(table, lengths, PAGE, self.pages)
        mapping, scheduled = shifted(ints(requests, dtype=torch.int64), at), shifted(ints(2, requests), at)
        draft_budget(self.confidences, mapping, scheduled, context_rows % 50, width, self.admission)
        hidden = torch.zeros(rows, HIDDEN)
        states = shifted(ints(rows, dtype=torch.int64), at)
        for temperatures in (None, Temperatures(states, self.norm[0])):
            draft_head(hidden, self.head_weight, workspace=self.head, temperatures=temperatures)
            if rows <= 64:
                draft_head_fp8(hidden, self.fp8_weight, self.fp8_scale, None, workspace=self.head, temperatures=temperatures)
        maps, guest_rows = self.guest_maps, (self.fp8_weight, self.fp8_scale, ints(VOCAB, dtype=torch.int64))
        admit_guests(shifted(ints(context_rows), at), self.head_weight, *maps, *guest_rows, first_row=VOCAB - 2 * SIZE)
        if rows <= 64:
            fp8_linear(hidden, self.fp8_weight, self.fp8_scale, workspace=self.fp8)


def test_no_size_of_a_step_is_compiled_for(launches, monkeypatch):
    """Breaks if a kernel specialises on a number of requests or rows, on a planned width, or on where a slice begins."""
    monkeypatch.setattr(torch, "mm", lambda *_, out: out)
    launchers = Launchers()
    for requests in REQUESTS:
        for context_rows in (requests, requests * Q, 1000 + requests):
            for width in range(1, K + 1):
                launchers.step(requests, context_rows, width)
    assert set(launches) == launched_kernels(), "name the new kernel's launcher in Launchers.step"
    for name, variants in launches.items():
        compiled = defaultdict(set)
        for constants, rest in variants:
            compiled[tuple(sorted((k, v) for k, v in constants.items() if k in CAPTURED))].add((str(constants), rest))
        several = {tiles: found for tiles, found in compiled.items() if len(found) > 1}
        assert not several, f"{name} is compiled {len(several)} times over for sizes of a step: {several}"


def test_the_cut_has_a_variant_per_tile(launches):
    """Breaks if a budget or a number of requests is compiled for, beyond the tiles that are warmed at start-up."""
    room = TILES[-1]
    out, confidences = Admission.empty(room, "cpu"), torch.ones(room, K)
    for requests in (1, 2, 16, TILES[0], TILES[0] + 1, 80, TILES[1], TILES[1] + 1, 512, room):
        for budget in (0, 1, 15, 16, requests * K):
            mapping, scheduled = shifted(ints(requests, dtype=torch.int64), budget % 3), shifted(ints(2, requests), budget % 3)
            draft_budget(confidences, mapping, scheduled, budget, 1, out)
    variants = {(str(constants), rest) for constants, rest in launches["_draft_budget_kernel"]}
    assert len(variants) == len(TILES)
