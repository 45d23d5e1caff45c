# SPDX-License-Identifier: Apache-2.0
"""Second stage of `draft_head`: the winner over tiles or over ranks, mapped from a reduced draft vocabulary to the target's.

CUDA graphs: one kernel per power of two of tiles and per form of the map; the map keeps its address, contents may change.
"""

from typing import NamedTuple

import torch
import triton

from .draft_head_kernel import _pick_winner_kernel


class Winner(NamedTuple):
    """Winning token and its logit per sample row.

    Attributes:
        tokens: int64 `[m]`.
        values: fp32 `[m]`.
    """

    tokens: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Winner":
        """Unwritten outputs for `num_rows` rows."""
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        return cls(tokens, torch.empty(num_rows, dtype=torch.float32, device=device))


def combine_shards(
    values: torch.Tensor,
    tokens: torch.Tensor,
    *,
    d2t: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
    out: Winner | None = None,
) -> Winner:
    """Winner over all ranks of what `draft_head_local` returned.

    Args:
        values: fp32 `[tp, m]`, contiguous.
        tokens: int64 `[tp, m]`, contiguous, global indices.
        d2t: as in `draft_head`, over the whole draft vocabulary.
        target_ids: the same.
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
    return pick_winner(values, tokens, values.shape[0], values.shape[1], d2t=d2t, target_ids=target_ids, out=out)


def pick_winner(
    values: torch.Tensor,
    indices: torch.Tensor,
    num_tiles: int,
    num_rows: int,
    *,
    vocab_start: int = 0,
    d2t: torch.Tensor | None = None,
    target_ids: torch.Tensor | None = None,
    out: Winner | None = None,
) -> Winner:
    """Second stage: winner per row over `[num_tiles, num_rows]` pairs (values fp32, indices int32 | int64).

    `vocab_start` is added to the winner, which then gets the offset `d2t[winner]` or becomes `target_ids[winner]` (int64
    both): a reduced draft vocabulary costs one load here instead of a gather afterwards. Lowest index on ties.
    """
    out = Winner.empty(num_rows, values.device) if out is None else out
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
            d2t if target_ids is None else target_ids,
            out.tokens,
            out.values,
            num_tiles,
            num_rows,
            vocab_start,
            MAP="offsets" if d2t is not None else "ids" if target_ids is not None else "",
            BLOCK_T=triton.next_power_of_2(num_tiles),
        )
    return out
