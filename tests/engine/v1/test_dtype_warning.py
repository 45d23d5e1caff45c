# SPDX-License-Identifier: Apache-2.0
"""Running a bfloat16 draft in float16 is said once; nothing else in the log would explain the lost acceptance."""

import logging

import pytest
from tiny_models import Draft, Target, edit_config, write_draft


@pytest.mark.parametrize(
    ("stored", "dtype", "warned"), [("bfloat16", "float16", 1), ("bfloat16", "bfloat16", 0), ("float16", "float16", 0)]
)
def test_a_bfloat16_draft_in_float16(stored, dtype, warned, write_pair, tmp_path, caplog):
    """Breaks if the warning is missing, or comes with every look at the pair."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dflash.engine.pair import resolve_draft

    draft = edit_config(write_draft(tmp_path / "draft", Draft(), Target()), torch_dtype=stored)
    config = EngineArgs(
        model=str(write_pair()[0]),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=64,
        speculative_config={"method": "dflash", "model": str(draft), "num_speculative_tokens": 3},
    ).create_engine_config()
    logger = logging.getLogger("vllm.plugins.dflash")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, logger=logger.name)
    try:
        resolve_draft(config)
        resolve_draft(config)
    finally:
        logger.removeHandler(caplog.handler)
    # The handler sits on two loggers once another test has let vLLM's propagate: one record may then be listed twice.
    said = {id(record) for record in caplog.records if "stored in bfloat16" in record.getMessage()}
    assert len(said) == warned
