# SPDX-License-Identifier: Apache-2.0
"""Which rows a private draft head gets: of the user's list, of what was served, of the list beside the draft, of the merges."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dflash.engine.served_tokens import place_of
from vllm_dflash.options import PluginOptions
from vllm_dflash.served_counts import read_counts
from vllm_dflash.token_frequency import (
    ENOUGH_TOKENS,
    LIST_FILE,
    RowList,
    RowListError,
    expected_coverage,
    merge_order,
    parse_list,
    ranked,
)

logger = init_logger("vllm.plugins.dflash")


@dataclasses.dataclass(frozen=True, slots=True)
class Shortlist:
    """Rows of a small head.

    Attributes:
        rows: int64 [R], rows of the whole head (all ranks), by falling frequency.
        source: where their order comes from, in words.
        coverage: share of further text that they are expected to hold; None where unknown.
    """

    rows: torch.Tensor
    source: str
    coverage: float | None

    def describe(self) -> str:
        """For the start-up line."""
        return self.source if self.coverage is None else f"{self.source}, expected to hold {self.coverage:.1%} of further tokens"


def find_rows(vllm_config: Any, options: PluginOptions) -> RowList:
    """Tokens of the target by falling frequency; at least ``options.draft_head_rows`` of them where the vocabulary has them.

    A named list goes first, then tokens counted while serving (where that is on and they are enough), then the list beside the
    draft; the tokenizer's order fills what they leave.

    Raises:
        RowListError: the list cannot be read or belongs to another vocabulary.
    """
    model_config = vllm_config.model_config
    vocab_size = model_config.get_vocab_size()
    guessed = _guess(model_config, vocab_size)
    if options.draft_head_list is not None:
        return _filled(_read(Path(options.draft_head_list), vocab_size), guessed)
    draft_config = vllm_config.speculative_config.draft_model_config
    document = get_hf_file_to_dict(LIST_FILE, draft_config.model, draft_config.revision)
    found = guessed if document is None else _filled(parse_list(document, LIST_FILE, vocab_size), guessed)
    return _served(vllm_config, options.draft_head_rows, found) if options.draft_head_counting else found


def _filled(rows: RowList, guessed: RowList) -> RowList:
    return dataclasses.replace(rows, token_ids=tuple(dict.fromkeys([*rows.token_ids, *guessed.token_ids])))


def _served(vllm_config: Any, num_rows: int, otherwise: RowList) -> RowList:
    """Rows by the counts of earlier runs, ``otherwise`` behind them; just the latter while they are too few."""
    counts = read_counts(place_of(vllm_config), otherwise.vocab_size)
    total = counts.total
    if total < ENOUGH_TOKENS:
        logger.info_once(f"DFlash draft head: {total} tokens counted while serving, {ENOUGH_TOKENS} are needed to use them")
        return otherwise
    order = otherwise.token_ids
    coverage = expected_coverage(counts, order, num_rows)
    source = f"{total} tokens counted while serving, then {otherwise.source}"
    return RowList(tuple(ranked(counts.times, order)), otherwise.vocab_size, source, True, coverage, num_rows)


def _read(path: Path, vocab_size: int) -> RowList:
    try:
        document = json.loads(path.expanduser().read_text())
    except (OSError, ValueError) as error:
        raise RowListError(
            f"draft_head_list: {path} cannot be read ({error}); expected a JSON file made by `vllm-dflash calibrate`."
        ) from error
    return parse_list(document, str(path), vocab_size)


def _guess(model_config: Any, vocab_size: int) -> RowList:
    """The order of the target's tokenizer; without one, the lowest ids, which most tokenizers gave to frequent tokens."""
    where = model_config.tokenizer or model_config.model
    tokenizer = get_hf_file_to_dict("tokenizer.json", where, model_config.tokenizer_revision)
    order = [] if tokenizer is None else [token for token in merge_order(tokenizer) if token < vocab_size]
    source = "merge order of the tokenizer" if order else "lowest token ids, as the target has no tokenizer.json"
    return RowList(tuple(dict.fromkeys([*order, *range(vocab_size)])), vocab_size, source, calibrated=False)


def rows_on_all_ranks(vllm_config: Any, options: PluginOptions) -> RowList:
    """The list, or the error, of rank 0 on all tensor-parallel ranks: another engine may be adding to a file of counts."""
    group = get_tp_group()
    found: RowList | RowListError | None = None
    if group.rank_in_group == 0:
        try:
            found = find_rows(vllm_config, options)
        except RowListError as error:
            found = error
    if group.world_size > 1:
        found = group.broadcast_object(found, src=0)
    if isinstance(found, RowListError):
        raise found
    assert found is not None
    return found


def shortlist_of(found: RowList, table: torch.Tensor | None, count: int) -> Shortlist:
    """The first ``count`` tokens that the head has."""
    coverage = found.coverage if found.num_rows is not None and count >= found.num_rows else None
    return Shortlist(_rows_of_head(found.token_ids, table, count), found.source, coverage)


def _rows_of_head(token_ids: Sequence[int], table: torch.Tensor | None, count: int) -> torch.Tensor:
    """Rows of the head for the first ``count`` tokens that it has, int64."""
    if table is None:
        return torch.tensor(token_ids[:count])
    row_of = {token: row for row, token in enumerate(table.tolist())}
    found = [row_of[token] for token in token_ids if token in row_of]
    return torch.tensor(found[:count])
