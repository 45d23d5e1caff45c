# SPDX-License-Identifier: Apache-2.0
"""`vllm-dflash calibrate` up to where engines start: prompts, counted text, the file, and what it refuses."""

import json
from pathlib import Path

import pytest
from pair_folders import write_pair
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from vllm_dflash.cli.app import app
from vllm_dflash.cli.calibrate import read_prompts
from vllm_dflash.cli.failure import UserError


def test_prompts_of_both_kinds_of_file(tmp_path):
    """Breaks if empty lines or later turns become prompts, or a line without a prompt is passed over in silence."""
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"turns": ["three", "x"]}\n{"prompt": "four"}\n')
    (tmp_path / "c.jsonl").write_text('{"prompt": "five"}\n{"question": "six"}\n')
    assert read_prompts(tmp_path / "a.txt") == ["one", "two"]
    assert read_prompts(tmp_path / "b.jsonl") == ["three", "four"]
    with pytest.raises(UserError, match="line 2: expected an object"):
        read_prompts(tmp_path / "c.jsonl")


def test_text_is_counted_and_the_list_written_beside_the_draft(tmp_path):
    """Breaks if the list is not where a small head looks, or frequent tokens of the text are not in front."""
    target, draft = map(Path, write_pair(tmp_path))
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(target / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("ab ab ab c\n" * 3)
    command = ["calibrate", "--target", str(target), "--draft", str(draft), "--text", str(tmp_path / "text.txt")]
    result = CliRunner().invoke(app, [*command, "--no-compare", "--rows", "16"])
    assert result.exit_code == 0, result.output
    assert "12 tokens counted; 16 rows written" in " ".join(result.output.split())
    document = json.loads((draft / "draft_head_rows.json").read_text())
    assert document["token_ids"][:4] == [3, 2, 0, 1]
    assert document["coverage"] == 1.0
    assert document["calibrated"] is True
