# SPDX-License-Identifier: Apache-2.0
"""Which rows a private draft head gets: from the user's list, from the one beside the draft, or from the tokenizer's merges."""

import json
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dflash.options import PluginOptions
from vllm_dflash.token_frequency import LIST_FILE, RowList, RowListError, merge_order, parse_list

logger = init_logger("vllm.plugins.dflash")


def find_rows(vllm_config: Any, options: PluginOptions) -> RowList:
    """Tokens of the target by falling frequency; at least ``options.draft_head_rows`` of them where the vocabulary has them.

    Raises:
        RowListError: the list cannot be read or belongs to another vocabulary.
    """
    model_config = vllm_config.model_config
    vocab_size = model_config.get_vocab_size()
    draft_config = vllm_config.speculative_config.draft_model_config
    rows = None
    if options.draft_head_list is not None:
        rows = _read(Path(options.draft_head_list), vocab_size)
    else:
        document = get_hf_file_to_dict(LIST_FILE, draft_config.model, draft_config.revision)
        if document is not None:
            rows = parse_list(document, LIST_FILE, vocab_size)
    if rows is not None and len(rows.token_ids) >= min(options.draft_head_rows, vocab_size):
        return rows
    guessed = _guess(model_config, vocab_size)
    if rows is None:
        return guessed
    return RowList(tuple(dict.fromkeys([*rows.token_ids, *guessed.token_ids])), vocab_size, rows.source, rows.calibrated)


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
