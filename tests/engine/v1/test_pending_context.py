# SPDX-License-Identifier: Apache-2.0
"""Context that waits until it is read, and steps that verify nothing: a simulated scheduler, then the real engine."""

import resource

import pytest
import torch
from tiny_models import Draft, Target
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_dflash.engine.pending_context import PendingContext
from vllm_dflash.engine.query_block import CommittedRows
from vllm_dflash.planner import measured

KV_BLOCK, BLOCKS = 4, 12


class Pool:
    """What a scheduler does to blocks: requests take and leave them, full ones are found again by what they hold.

    ``truth`` is what each slot should hold, ``cache`` what was stored there.
    """

    def __init__(self, seed, most_rows):
        self.random = torch.Generator().manual_seed(seed)
        self.truth, self.cache = torch.zeros(BLOCKS * KV_BLOCK), torch.full((BLOCKS * KV_BLOCK,), -1.0)
        self.free = list(range(BLOCKS))
        self.prefixes, self.requests = [], []  # lists of full blocks; [blocks, tokens of context]
        self.added = self.written = self.late = 0
        owned = lambda: [block for blocks, _ in self.requests for block in blocks]  # noqa: E731
        self.pending = PendingContext(BLOCKS, KV_BLOCK, self.write, owned, most_bytes=4 * most_rows)

    def write(self, states, positions, slots):
        assert torch.equal(positions, states[:, 0].long() % 100)  # rows keep their positions
        self.cache[slots] = states[:, 0]
        self.written += len(slots)

    def draw(self, below):
        return int(torch.randint(below, (), generator=self.random))

    def begin(self):
        shared = self.prefixes[self.draw(len(self.prefixes))] if self.prefixes and self.draw(2) else []
        self.free = [block for block in self.free if block not in shared]
        self.requests.append([list(shared), len(shared) * KV_BLOCK])

    def end(self, request):
        blocks, tokens = request
        self.requests.remove(request)
        held = {block for other, _ in self.requests for block in other}
        if full := blocks[: tokens // KV_BLOCK]:
            self.prefixes.append(full)
        self.free += [block for block in blocks if block not in held]

    def take_block(self):
        block = self.free.pop(0)
        self.prefixes = [prefix for prefix in self.prefixes if block not in prefix]
        return block

    def rows(self, request, count):
        """Slots and values of the next tokens; a value tells its position."""
        blocks, tokens = request
        while len(blocks) * KV_BLOCK < tokens + count:
            blocks.append(self.take_block())
        positions = range(tokens, tokens + count)
        slots = [blocks[p // KV_BLOCK] * KV_BLOCK + p % KV_BLOCK for p in positions]
        values = [float(100 * (self.added + i + 1) + p) for i, p in enumerate(positions)]
        self.added += count
        request[1] += count
        return slots, values

    def step(self):
        """Some requests go on, one behind a row that was rejected; some of them draft."""
        slots, values = [], []
        for request in list(self.requests):
            count = min(1 + self.draw(3), len(self.free) * KV_BLOCK)
            if count == 0:
                self.end(request)  # preempted, or ended
                continue
            more = self.rows(request, count)
            slots, values = slots + more[0], values + more[1]
        if not self.requests:
            return
        states, at = torch.tensor([*values, -7.0]).unsqueeze(1), torch.tensor(slots)
        committed = CommittedRows(torch.arange(len(values)), states[:-1, 0].long() % 100, at, torch.empty(0))
        self.truth[at] = states[:-1, 0]
        self.pending.add(committed, states)
        drafting = torch.rand(len(self.requests), generator=self.random) < 0.2
        if bool(drafting.any()):
            self.draft(drafting)

    def draft(self, drafting):
        width = max(len(blocks) for blocks, _ in self.requests)
        table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks, _ in self.requests], dtype=torch.int32)
        self.late += self.pending.write_for(table, torch.tensor([tokens for _, tokens in self.requests]), drafting) > 0
        for (blocks, tokens), drafts in zip(self.requests, drafting.tolist(), strict=True):
            if drafts:
                read = torch.tensor([blocks[p // KV_BLOCK] * KV_BLOCK + p % KV_BLOCK for p in range(tokens)], dtype=torch.int64)
                assert torch.equal(self.cache[read], self.truth[read])


@pytest.mark.parametrize("most_rows", [3, 24, 400])
def test_what_a_draft_reads_is_there(most_rows):
    """Breaks if a row is lost, goes to another slot or comes back from an earlier owner of its block: when blocks change hands,
    are shared as a prefix, or the memory for what waits is full."""
    for seed in range(6):
        pool = Pool(seed, most_rows)
        for _ in range(120):
            if pool.free and len(pool.requests) < 3:
                pool.begin()
            pool.step()
            if pool.requests and pool.draw(8) == 0:
                pool.end(pool.requests[pool.draw(len(pool.requests))])
        assert pool.added > 300
        assert pool.written < pool.added  # what ends undrafted, outside of full blocks, is never computed
        assert most_rows < 20 or pool.late > 3
        assert measured.take_catch_up() > 0  # the planner does not charge it to the step


def test_reserved_memory_is_touched_before_it_is_needed():
    """Breaks if pages are first touched while serving, one fault for each of 4 KiB of every step's rows."""
    pending = PendingContext(64, 1024, lambda *_: None, list, most_bytes=64 << 20)
    pending.reserve(torch.empty(0, 256))
    states, rows = torch.ones(32_768, 256), torch.arange(32_768)  # 32 MiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pending.add(CommittedRows(None, rows, rows, torch.empty(0, dtype=torch.int64)), states)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2_000  # of 8,192 pages


@pytest.fixture(scope="module")
def engine(write_pair, engine_of):
    target, draft = write_pair(Draft(block=8), Target())
    return engine_of(
        target,
        draft,
        speculative={"num_speculative_tokens": 7},
        additional_config={"vllm_dflash": {"planner": "on"}},
        enable_prefix_caching=True,
        max_num_batched_tokens=48,  # long prompts come in chunks
    )


def hold(engine, width):
    from vllm_dflash.engine.planner_access import hold_width

    hold_width(engine.llm.llm_engine, width)


def calls_of(module, monkeypatch):
    """Calls of a module's ``forward`` from now on."""
    calls, real = [], module.forward
    monkeypatch.setattr(module, "forward", lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1])
    return calls


def test_an_engine_that_starts_has_its_memory(engine):
    """Breaks if the first request waits for it, or rows are reserved of another size than they come in."""
    engine.proposer._bind_context(engine.runner.kv_cache_config)
    states = engine.proposer._pending._states
    assert (states.shape[1], states.dtype) == (2 * Target().hidden, torch.float32)


def test_nothing_is_verified_or_computed_for_no_drafts(engine, prompts, monkeypatch):
    """Breaks if a step without drafts runs the rejection sampler, or the draft's context is computed where nobody reads it."""
    verified = calls_of(engine.runner.rejection_sampler, monkeypatch)
    combined = calls_of(engine.proposer.model.fc, monkeypatch)
    asked = {"temperature": 1.0, "seed": 5}
    hold(engine, 0)
    plain, sampled = engine.generate(prompts, 12), engine.generate(prompts[:1], 12, **asked)
    assert (len(verified), len(combined)) == (0, 0)
    hold(engine, 7)
    assert engine.generate(prompts, 12) == plain
    assert len(verified) > 0
    assert len(combined) > 0
    hold(engine, 0)
    assert engine.generate(prompts[:1], 12, **asked) == sampled


def test_tokens_of_plain_steps_are_those_that_vllm_finds(engine, prompts, monkeypatch):
    """Breaks if what is left out for plain steps finds another token, or is left out of a prefill in chunks: it samples none."""
    base, seen = SpecDecodeBaseProposer.prepare_next_token_ids_padded, []
    real = engine.proposer.prepare_next_token_ids_padded

    def both(sampled, requests, batch, discarded):
        found = real(sampled, requests, batch, discarded)
        for ours, theirs in zip(found, base(engine.proposer, sampled, requests, batch, discarded), strict=True):
            assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
        seen.append((sampled.shape[1], bool(discarded[: len(sampled)].any())))
        return found

    monkeypatch.setattr(engine.proposer, "prepare_next_token_ids_padded", both)
    long = [(prompts[0] * 20)[:100], prompts[1]]
    engine.llm.reset_prefix_cache()
    hold(engine, 0)
    engine.generate(long, 12)
    hold(engine, 3)
    engine.generate(long, 12)
    assert {(1, False), (1, True), (4, False)} <= set(seen)


@pytest.mark.parametrize("most_rows", [None, 48])
def test_a_cached_prefix_brings_its_context_along(most_rows, engine, prompts, monkeypatch):
    """Requests that were never drafted for end; others find their prompts cached and draft what those of a cold cache drafted.

    Breaks if what waits is dropped with the request that it came from (``most_rows``: when memory is short, too).
    """
    hold(engine, 7)
    engine.llm.reset_prefix_cache()
    log = engine.record(monkeypatch)
    engine.generate(prompts, 24)
    first = max(number for number, _, _ in log) - len(prompts) + 1
    cold = {(number - first, known): drafts for number, known, drafts in log}
    engine.llm.reset_prefix_cache()
    engine.proposer._bind_context(engine.runner.kv_cache_config)
    if most_rows:
        pending = engine.proposer._pending
        pending._most_bytes = most_rows * 4 * 2 * Target().hidden
        pending.reserve(pending._states)
        assert len(pending._states) == most_rows
    hold(engine, 0)
    engine.generate(prompts, 24)
    hold(engine, 7)
    del log[:]
    engine.generate(prompts, 24)
    first += 2 * len(prompts)
    warm = {(number - first, known): drafts for number, known, drafts in log}
    assert warm == cold
    assert engine.counters()["prefix_cache_hits"] > 0
