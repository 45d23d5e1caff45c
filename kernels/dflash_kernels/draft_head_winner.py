# SPDX-License-Identifier: Apache-2.0
"""Second stage of `draft_head`: the winner over tiles or over ranks, mapped from a reduced draft vocabulary to the target's.

CUDA graphs: one kernel per power of two of tiles and per form of the map; the map keeps its address, contents may change.
"""

from typing import NamedTuple

import torch
import triton

from .draft_head_kernel import _pick_winner_kernel


class Temperatures(NamedTuple):
    """Temperature of each sample row, by its request: asks for the odds against the winner.

    Indices and table, not one value per row: a captured graph then reads what the engine keeps by request anyway.

    Attributes:
        states: int64 `[m]`, index into `by_state`; -1 for rows without a request, which count as temperature 1.
        by_state: fp32 `[n]`, 0 (greedy) counts as 1.
    """

    states: torch.Tensor
    by_state: torch.Tensor

    def rows(self, part: slice) -> "Temperatures":
        """Of some of the sample rows."""
        return Temperatures(self.states[part], self.by_state)


class Winner(NamedTuple):
    """Winning token and its logit per sample row.

    Attributes:
        tokens: int64 `[m]`.
        values: fp32 `[m]`.
        against: fp32 `[m]`, odds against the winner at the row's temperature: `(1 - q) / q`, the sum over all other tokens of
            `exp((logit - winner's) / temperature)`; so its log-odds are `-log(against)`. Infinite where every logit is -inf or
            NaN. None where no temperatures were given.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    against: torch.Tensor | None = None

    @classmethod
    def empty(cls, num_rows: int, device: torch.device, *, odds: bool = False) -> "Winner":
        """Unwritten outputs for `num_rows` rows."""
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        values, against = (torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(2))
        return cls(tokens, values, against if odds else None)

    def rows(self, part: slice) -> "Winner":
        """Views of some of the rows."""
        return Winner(self.tokens[part], self.values[part], None if self.against is None else self.against[part])


def combine_shards(
    values: torch.Tensor,
    tokens: torch.Tensor,
    *,
    d2t: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
    against: torch.Tensor | None = None,
    temperatures: Temperatures | None = None,
    out: Winner | None = None,
) -> Winner:
    """Winner over all ranks of what `draft_head_local` returned.

    Args:
        values: fp32 `[tp, m]`, contiguous.
        tokens: int64 `[tp, m]`, contiguous, global indices.
        d2t: as in `draft_head`, over the whole draft vocabulary.
        target_ids: the same.
        against: fp32 `[tp, m]`, contiguous, the ranks' odds; with `temperatures` only.
        temperatures: as in `draft_head`, the same on every rank.
        out: tensors to write; allocated where None.

    Returns:
        `Winner`; the lowest token on ties.

    Raises:
        ValueError: shapes or dtypes differ from the above.
    """
    shapes_fit = values.ndim == 2 and values.shape == tokens.shape and values.is_contiguous() and tokens.is_contiguous()
    if not shapes_fit or values.dtype != torch.float32 or tokens.dtype != torch.int64:
        raise ValueError(
            "combine_shards takes contiguous values fp32 [tp, m] and tokens int64 [tp, m]; got "
            f"{values.dtype} {list(values.shape)} and {tokens.dtype} {list(tokens.shape)}."
        )
    if (against is None) != (temperatures is None) or (against is not None and against.shape != values.shape):
        raise ValueError(
            f"odds of {values.shape[0]} ranks combine from against fp32 {list(values.shape)} and temperatures; got "
            f"{None if against is None else list(against.shape)} and {type(temperatures).__name__}. Pass both or neither."
        )
    shape = values.shape
    return pick_winner(
        values, tokens, shape[0], shape[1], d2t=d2t, target_ids=target_ids, others=against, temperatures=temperatures, out=out
    )


def pick_winner(
    values: torch.Tensor,
    indices: torch.Tensor,
    num_tiles: int,
    num_rows: int,
    *,
    vocab_start: int = 0,
    d2t: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
    others: torch.Tensor | None = None,
    temperatures: Temperatures | None = None,
    out: Winner | None = None,
) -> Winner:
    """Second stage: winner per row over `[num_tiles, num_rows]` pairs (values fp32, indices int32 | int64).

    `vocab_start` is added to the winner, which then gets the offset `d2t[winner]` or becomes `target_ids[winner]` (int64
    both): a reduced draft vocabulary costs one load here instead of a gather afterwards. Lowest index on ties. With
    `temperatures` the odds come from `others`, fp32 like `values`: the sums over each tile without its winner.
    """
    odds = temperatures is not None
    out = Winner.empty(num_rows, values.device, odds=odds) if out is None else out
    _check_odds(num_rows, temperatures, out)
    if out.tokens.shape != (num_rows,) or out.values.shape != (num_rows,) or out.tokens.dtype != torch.int64:
        raise ValueError(
            f"out must be int64 tokens [{num_rows}] and fp32 values [{num_rows}]; got {out.tokens.dtype} "
            f"{list(out.tokens.shape)} and {list(out.values.shape)}. Slice the buffers to the rows of this call."
        )
    if d2t is not None and target_ids is not None:
        raise ValueError("d2t and target_ids are two forms of one map; got both. Pass one of them.")
    for name, table in (("d2t", d2t), ("target_ids", target_ids)):
        if table is not None and (table.dtype != torch.int64 or not table.is_contiguous()):
            kind = "offsets" if name == "d2t" else "ids"
            raise ValueError(f"{name} must hold int64 {kind}, contiguous; got {table.dtype}. Convert it once at load.")
    if num_rows:
        _pick_winner_kernel[(num_rows,)](
            values,
            indices,
            others if odds else None,
            temperatures.states if temperatures is not None else None,
            temperatures.by_state if temperatures is not None else None,
            d2t if target_ids is None else target_ids,
            out.tokens,
            out.values,
            out.against if odds else None,
            num_tiles,
            num_rows,
            vocab_start,
            MAP="offsets" if d2t is not None else "ids" if target_ids is not None else "",
            ODDS=odds,
            BLOCK_T=triton.next_power_of_2(num_tiles),
        )
    return out


def _check_odds(num_rows: int, temperatures: Temperatures | None, out: Winner) -> None:
    if temperatures is None:
        return
    states, by_state = temperatures
    fit = states.dtype == torch.int64 and states.shape == (num_rows,) and states.is_contiguous()
    if not fit or by_state.dtype != torch.float32 or not by_state.is_contiguous():
        raise ValueError(
            f"temperatures must be int64 states [{num_rows}] and an fp32 table, contiguous; got {states.dtype} "
            f"{list(states.shape)} and {by_state.dtype}. Slice the states to the rows of this call."
        )
    if out.against is None or out.against.shape != (num_rows,) or out.against.dtype != torch.float32:
        raise ValueError(f"out must have fp32 against [{num_rows}] with temperatures; got none. Make it with odds=True.")
