# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton pointers have no Python type.)
"""Device code of `draft_head`: per-tile winners of the LM head, and the reduction over tiles.

Every first stage writes one (value, row of the head) pair per vocabulary tile and sample row into `[num_tiles, m]`
scratch; one second stage picks the winner. Ties go to the lowest row in both stages, NaN counts as -inf.

With `ODDS` a tile also sums `exp((logit - tile's winner) / temperature)` over its other rows, and the second stage adds the sums
up to the odds against the winner, `(1 - q) / q` for its probability q. The winner itself is never in a sum: 1 - q keeps its
precision where q is nearly 1.
"""

import triton
import triton.language as tl


@triton.jit
def _inverse_temperature(states_ptr, temperature_ptr, rows, mask):
    """1 / temperature of sample rows by their request's state; 1 for greedy requests (0) and for rows without one (-1)."""
    states = tl.load(states_ptr + rows, mask=mask, other=-1)
    temperature = tl.load(temperature_ptr + states, mask=mask & (states >= 0), other=0.0)
    return 1.0 / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _store_tile_winner(
    logits, ids, num_valid, rows, num_rows, at, values_ptr, indices_ptr, others_ptr, states_ptr, temperature_ptr,
    ODDS: tl.constexpr,
):  # fmt: skip
    """Store the winner along axis 0 of `logits` [vocabulary, rows]; `ids` and `rows` name both axes, `at` where to store."""
    mask = rows < num_rows
    usable = (ids < num_valid)[:, None] & (logits == logits)  # padding and NaN never win
    logits = tl.where(usable, logits, float("-inf"))
    value, winner = tl.max(logits, 0, return_indices=True)
    winner += tl.min(ids, 0)
    tl.store(values_ptr + at, value, mask=mask)
    tl.store(indices_ptr + at, winner, mask=mask)
    if ODDS:
        inverse = _inverse_temperature(states_ptr, temperature_ptr, rows, mask)
        counts = (ids[:, None] != winner[None, :]) & (logits > float("-inf"))
        gaps = tl.where(counts, (logits - value[None, :]) * inverse[None, :], float("-inf"))
        tl.store(others_ptr + at, tl.sum(tl.exp(gaps), 0), mask=mask)


# Batch-dependent integers are not specialised: one compiled kernel per tile shape, nothing compiles after warm-up.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["states_ptr"])
def _head_tiles_kernel(
    hidden_ptr,  # [m, HIDDEN]
    weight_ptr,  # [V, HIDDEN]
    values_ptr,  # fp32 [num_tiles, m]
    indices_ptr,  # int32 [num_tiles, m]
    others_ptr,  # fp32 [num_tiles, m]; this and the next two with ODDS
    states_ptr,  # int64 [m]
    temperature_ptr,  # fp32, by state
    num_rows,
    num_valid,
    stride_hidden,
    stride_weight,
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,  # Triton's interpreter has no bf16 product
    ODDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Row tiles of one vocabulary tile are neighbours, so that its weights come from L2 after the first.
    m_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0) // m_tiles
    rows = (tl.program_id(0) % m_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    depth = tl.arange(0, BLOCK_K)
    # Clamped rows cost nothing and need no mask in the loop; their results are dropped below.
    hidden_at = tl.minimum(rows, num_rows - 1).to(tl.int64) * stride_hidden
    weight_at = tl.minimum(ids, num_valid - 1).to(tl.int64) * stride_weight
    # Vocabulary is the M side of the product: wgmma wants 64 rows there but takes as few as 8 columns, and this kernel
    # serves 64 sample rows at most.
    logits = tl.zeros([BLOCK_V, BLOCK_M], tl.float32)
    for k0 in range(0, HIDDEN, BLOCK_K):
        k = k0 + depth
        if HIDDEN % BLOCK_K == 0:
            weight = tl.load(weight_ptr + weight_at[:, None] + k[None, :], eviction_policy="evict_first")
            hidden = tl.load(hidden_ptr + hidden_at[:, None] + k[None, :])
        else:
            inside = (k < HIDDEN)[None, :]
            weight = tl.load(weight_ptr + weight_at[:, None] + k[None, :], mask=inside, other=0.0)
            hidden = tl.load(hidden_ptr + hidden_at[:, None] + k[None, :], mask=inside, other=0.0)
        if WIDEN:
            weight = weight.to(tl.float32)
            hidden = hidden.to(tl.float32)
        logits = tl.dot(weight, tl.trans(hidden), logits, input_precision=PRECISION)
    at = tile.to(tl.int64) * num_rows + rows
    _store_tile_winner(
        logits, ids, num_valid, rows, num_rows, at, values_ptr, indices_ptr, others_ptr, states_ptr, temperature_ptr, ODDS
    )


@triton.jit
def _tile_winner(values, first):
    """Highest of `values` [BLOCK] (NaN counts as -inf) and its index from `first` on, the lowest on ties.

    Two plain reductions take 5 instructions per value; one over (value, index) pairs takes 10 and is no longer bound by memory.
    """
    best = tl.max(values, 0)
    winner = first + tl.min(tl.where(values == best, tl.arange(0, values.shape[0]), values.shape[0]), 0)
    none = (best != best) | (best == float("-inf"))  # maxima skip NaN: best is NaN where all are
    return tl.where(none, float("-inf"), best), tl.where(none, first, winner)


@triton.jit(
    do_not_specialize=["num_rows", "first_row"],
    do_not_specialize_on_alignment=["states_ptr"],
)
def _logit_tiles_kernel(
    logits_ptr,  # [rows of this launch, stride]
    values_ptr,  # fp32 [num_tiles, m]
    indices_ptr,  # int32 [num_tiles, m]
    others_ptr,  # fp32 [num_tiles, m]; this and the next two with ODDS
    states_ptr,  # int64 [m]
    temperature_ptr,  # fp32, by state
    num_rows,  # m
    first_row,
    num_valid,
    stride,  # a multiple of 16: loads are 16 bytes wide whatever num_valid is
    ODDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_V
    row = tl.program_id(1).to(tl.int64)
    ids = first + tl.arange(0, BLOCK_V)
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < stride, other=float("-inf")).to(tl.float32)
    if first + BLOCK_V > num_valid:
        logits = tl.where(ids < num_valid, logits, float("-inf"))
    value, winner = _tile_winner(logits, first)
    at = tl.program_id(0).to(tl.int64) * num_rows + first_row + row
    tl.store(values_ptr + at, value)
    tl.store(indices_ptr + at, winner)
    if ODDS:
        inverse = _inverse_temperature(states_ptr, temperature_ptr, first_row + row, True)
        gaps = tl.where((ids != winner) & (logits > float("-inf")), (logits - value) * inverse, float("-inf"))
        tl.store(others_ptr + at, tl.sum(tl.exp(gaps), 0))


@triton.jit(
    do_not_specialize=["num_tiles", "num_rows"],
    do_not_specialize_on_alignment=[
        *("values_ptr", "indices_ptr", "others_ptr", "states_ptr"),
        *("map_ptr", "tokens_ptr", "best_ptr", "against_ptr"),
    ],
)
def _pick_winner_kernel(
    values_ptr,  # fp32 [num_tiles, m]
    indices_ptr,  # int32 | int64 [num_tiles, m]
    others_ptr,  # fp32 [num_tiles, m]; with ODDS, as states, temperature and against
    states_ptr,  # int64 [m]
    temperature_ptr,  # fp32, by state
    map_ptr,  # int64 [draft vocabulary], offsets to target ids or the ids themselves
    tokens_ptr,  # int64 [m]
    best_ptr,  # fp32 [m]
    against_ptr,  # fp32 [m]
    num_tiles,
    num_rows,
    vocab_start,
    MAP: tl.constexpr,  # "offsets", "ids", or "" for none
    ODDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0)
    tiles = tl.arange(0, BLOCK_T)
    at = tiles.to(tl.int64) * num_rows + row
    values = tl.load(values_ptr + at, mask=tiles < num_tiles, other=float("-inf"))
    indices = tl.load(indices_ptr + at, mask=tiles < num_tiles, other=0).to(tl.int64)
    best = tl.max(values, 0)
    # A row of -inf has a winner too, its lowest index, so that a token is always inside the vocabulary.
    winner = tl.min(tl.where((values == best) & (tiles < num_tiles), indices, 0x7FFFFFFFFFFFFFFF), 0)
    if ODDS:
        inverse = _inverse_temperature(states_ptr, temperature_ptr, row, True)
        others = tl.load(others_ptr + at, mask=tiles < num_tiles, other=0.0)
        # What tiles hold besides the winner: all of the losing ones, their own winners included.
        losing = tl.where(values > float("-inf"), tl.exp((values - best) * inverse) * (1.0 + others), 0.0)
        against = tl.sum(tl.where((values == best) & (indices == winner), others, losing), 0)
        tl.store(against_ptr + row, tl.where(best > float("-inf"), against, float("inf")))
    winner += vocab_start
    if MAP == "offsets":
        winner += tl.load(map_ptr + winner)
    elif MAP == "ids":
        winner = tl.load(map_ptr + winner)
    tl.store(tokens_ptr + row, winner)
    tl.store(best_ptr + row, best)
