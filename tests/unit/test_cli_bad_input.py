# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with the input: one sentence on stderr, exit code 1, nothing started."""

import subprocess
import sys

import pytest
from draft_configs import zlab
from pair_folders import TARGET, write_folder, write_pair
from typer.testing import CliRunner

from vllm_dflash.cli.app import app


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No look-ups: a wrong name must be told without a network too."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def refused(*args: str, stdin: str | None = None) -> str:
    """The one line that a refused command prints."""
    done = CliRunner().invoke(app, list(args), input=stdin)
    assert done.exit_code == 1, done.output
    assert done.stdout == ""
    assert done.exception is None or isinstance(done.exception, SystemExit)
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-dflash: ")
    return line


BAD_DRAFTS = {
    "no mask token": (zlab("dflash_config__mask_token_id"), "mask_token_id: missing"),
    "no layer shapes": ({"architectures": ["DFlashDraftModel"]}, "hidden_size: missing"),
    "not JSON": ('{"hidden_size": 25', "is not JSON"),
    "a list": ([1, 2], "holds a list; expected an object"),
    "for another width": (zlab(hidden_size=4096), "target_hidden_size: the DFlash draft expects a target with hidden size 4096"),
    "for another vocabulary": (zlab(vocab_size=248320), "vocab_size: the DFlash draft has 248320 tokens"),
    "layer ids out of range": (zlab("num_target_layers", dflash_config__target_layer_ids=[1, 36]), "target layers [36]"),
    "for another depth": (zlab(num_target_layers=48), "trained on a target with 48 layers"),
}


@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_a_bad_draft_is_refused_before_anything_starts(tmp_path, command, name):
    """Breaks when a draft's fault is left to vLLM, whose traceback of eighty lines names another cause."""
    config, sentence = BAD_DRAFTS[name]
    target, draft = write_folder(tmp_path / "target", TARGET), write_folder(tmp_path / "draft", config)
    models = ["--target", target, "Hello"] if command == "generate" else [target]
    assert sentence in refused(command, *models, "--draft", draft)


BAD_TARGETS = {
    "no vocabulary": (
        {k: v for k, v in TARGET.items() if k != "vocab_size"},
        "vocab_size: missing from the target's config.json",
    ),
    "is the draft": (zlab(), "is a DFlash draft; expected the model to be accelerated"),
    "not JSON": ("nonsense", "is not JSON"),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_a_bad_target_is_refused(tmp_path, name):
    """Breaks when target and draft can be swapped unnoticed, or a broken download ends in a traceback."""
    config, sentence = BAD_TARGETS[name]
    target, draft = write_folder(tmp_path / "target", config), write_folder(tmp_path / "draft", zlab())
    assert sentence in refused("generate", "Hello", "--target", target, "--draft", draft)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("/no/such/folder", "no such folder"),
        ("./relative", "no such folder"),
        ("justaname", "no such folder"),
        ("owner/model-that-nobody-has", "the hub does not give it"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_is_not_there(tmp_path, name, sentence, role):
    """Breaks when a typing error in a path is looked up on the hub, or the hub's traceback comes through."""
    target, draft = write_pair(tmp_path)
    names = {"target": target, "draft": draft} | {role: name}
    line = refused("generate", "Hello", "--target", names["target"], "--draft", names["draft"])
    assert f"{role} {name!r}" in line
    assert sentence in line


def test_a_file_instead_of_a_folder(tmp_path):
    """Breaks when the weights file itself, a usual guess, is not understood."""
    target, draft = write_pair(tmp_path)
    assert "is a file" in refused("generate", "Hello", "--target", target, "--draft", f"{draft}/config.json")


@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize(
    ("k", "sentence"), [("16", "num_speculative_tokens: 16 is more"), ("0", "--k: found 0"), ("-3", "--k: found -3")]
)
def test_a_k_that_the_draft_cannot_do(tmp_path, command, k, sentence):
    """Breaks when K = block size passes: acceptance collapses at every position, silently."""
    target, draft = write_pair(tmp_path)
    models = ["--target", target, "Hello"] if command == "generate" else [target]
    assert sentence in refused(command, *models, "--draft", draft, "--k", k)


def test_half_a_pair(tmp_path):
    """Breaks when the missing half is filled in from the demo pair."""
    target, draft = write_pair(tmp_path)
    assert "--draft is missing" in refused("generate", "Hello", "--target", target)
    assert "--target is missing" in refused("generate", "Hello", "--draft", draft)
    assert "--draft is missing" in refused("serve", target)


def test_no_prompt(tmp_path):
    """Breaks when an empty prompt is generated from."""
    target, draft = write_pair(tmp_path)
    assert "the prompt is empty" in refused("generate", "--target", target, "--draft", draft, stdin="  \n")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [(["--prompts", "500"], "--prompts: found 500; expected at most"), (["--dtype", "int4"], "--dtype: found 'int4'")],
)
def test_demo_options(args, sentence):
    """Breaks when the demo starts to download before it looks at its options."""
    assert sentence in refused("demo", *args)


@pytest.mark.parametrize("option", ["--speculative-config={}", "--model"])
def test_serve_keeps_its_own_options(tmp_path, option):
    """Breaks when a second speculative config silently replaces ours."""
    target, draft = write_pair(tmp_path)
    assert f"{option.partition('=')[0]}: `vllm-dflash serve` sets it" in refused("serve", target, "--draft", draft, option)


def test_a_reader_that_goes_away_is_no_error_of_ours():
    """Breaks when `vllm-dflash ... | head -1` ends in a traceback."""
    code = (
        "import os, sys\n"
        "from vllm_dflash.cli.failure import one_sentence\n"
        "import typer\n"
        "@one_sentence\n"
        "def flood():\n"
        "    for _ in range(100000): print('x' * 80)\n"
        "typer.run(flood)\n"
    )
    done = subprocess.run(
        f'{sys.executable} -c "$CODE" | head -1',
        shell=True,
        capture_output=True,
        text=True,
        env={"CODE": code, "PATH": "/usr/bin:/bin"},
    )
    assert "Traceback" not in done.stderr
