# SPDX-License-Identifier: Apache-2.0
"""`doctor` on set-ups that are broken in known ways: it names fault and cure, exits with 1, and always prints."""

import json

import pytest
from draft_configs import SPECULATORS, zlab
from pair_folders import TARGET, TOKENIZER, write_folder, write_pair
from typer.testing import CliRunner

from vllm_dflash.cli import doctor, machine, probes
from vllm_dflash.cli.app import app
from vllm_dflash.cli.doctor import command_line
from vllm_dflash.cli.probes import Finding, guarded


def answering(value):
    """A function that answers `value`, whatever it is asked."""
    return lambda *_args, **_named: value


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No look-ups on a hub, and none of the variables that the plugin reads."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("VLLM_PLUGINS", "VLLM_DFLASH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def without_vllm_import(monkeypatch):
    """Leaves out the probe that imports vLLM (ten seconds each time); `test_the_real_thing` runs it."""
    monkeypatch.setattr(probes, "hooks_and_backend", answering([]))


def examined(*args: str) -> dict:
    """The JSON report; its exit code and `ok` must say the same."""
    done = CliRunner().invoke(app, ["doctor", "--json", *args])
    report = json.loads(done.stdout)
    assert done.exit_code == (0 if report["ok"] else 1)
    return report


def failures(report: dict, status: str = "fail") -> dict[str, str]:
    """Name and text of the findings of a status."""
    return {check["name"]: check["text"] for check in report["checks"] if check["status"] == status}


def test_the_real_thing(tmp_path):
    """Breaks when a hook of the installed vLLM differs, or a sound pair is complained about."""
    target, draft = write_pair(tmp_path)
    report = examined("--target", target, "--draft", draft)
    assert failures(report) == {}
    names = [check["name"] for check in report["checks"]]
    models = ["target", "draft", "weights", "weights", "k", "match", "rope", "tokenizer", "reach", "groups", "memory"]
    assert names == ["vllm", "plugin", "hooks", "backend", *models]
    backend = report["checks"][3]["data"]
    assert backend == {"backend": "CPU_ATTN", "graphs": False, "runner": "V1"}
    hooks = report["checks"][2]
    assert all(hook["problem"] is None for hook in hooks["data"]["hooks"])
    memory = report["checks"][-1]["data"]
    assert memory["target_kv_bytes_per_token"] == 2 * 36 * 8 * 128 * 2
    assert memory["draft_kv_bytes_per_token"] == 2 * 5 * 8 * 128 * 2
    assert memory["buffer_bytes"] == 8192 * 5 * 2560 * 2
    assert report["versions"]["vllm"].startswith("0.3")
    assert f"{target}" in report["command"]


def cut_off(folder):
    """Half a download: the header names more bytes than there are."""
    header = b'{"fc.weight":{"dtype":"BF16","shape":[2560,12800],"data_offsets":[0,65536000]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))


def without_a_shard(folder):
    """An index whose second file was never downloaded."""
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_another_combiner(folder):
    """Weights for three captured layers under a config that names five."""
    header = b'{"fc.weight":{"dtype":"BF16","shape":[2560,7680],"data_offsets":[0,0]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


BROKEN = {
    # what is done to a sound pair: (changes of the draft's config, its folder, the environment, arguments), finding, fault, cure
    "hidden size": ({"hidden_size": 4096}, None, {}, (), "match", "hidden size 4096; this target", "trained for this target"),
    "vocabulary": ({"vocab_size": 248320}, None, {}, (), "match", "has 248320 tokens", "trained for this target"),
    "layer ids": (
        {"num_target_layers": None, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 36]}},
        None, {}, (), "match", "target layers [36]; this target has layers 0 to 35", "trained for this target",
    ),
    "mask token": ({"dflash_config": {"target_layer_ids": [1]}}, None, {}, (), "draft", "mask_token_id: missing", "add the id"),
    "rope": ({"rope_theta": None}, None, {}, (), "draft", "rope_theta: found None", "Add the theta"),
    "block length": ({}, None, {}, ("--k", "16"), "k", "16 is more than this DFlash draft", "Set it to 15 or less"),
    "hidden by VLLM_PLUGINS": ({}, None, {"VLLM_PLUGINS": "other"}, (), "plugin", "hides the plugin", "Add dflash to it"),
    "switched off": ({}, None, {"VLLM_DFLASH": "0"}, (), "plugin", "vLLM's own DFlash is used", "Unset it"),
    "no weights": ({}, lambda f: (f / "model.safetensors").unlink(), {}, (), "weights", "draft: no weights", "Download"),
    "a shard is missing": ({}, without_a_shard, {}, (), "weights", "model-00002-of-00002.safetensors missing", "Download"),
    "a download cut off": ({}, cut_off, {}, (), "weights", "model.safetensors is cut off", "Download it again"),
    "a Git LFS pointer": (
        {}, lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        {}, (), "weights", "Git LFS pointer", "git lfs pull",
    ),
    "weights for other layers": ({}, with_another_combiner, {}, (), "weights", "[2560, 7680]", "Correct target_layer_ids"),
    "corrupt config.json": (
        {}, lambda f: (f / "config.json").write_text('{"hidden_size": 25'), {}, (), "draft", "is not JSON", "Download",
    ),
    "unknown option": (
        {}, None, {}, ("--options", '{"draft_windw": 9}'), "options", "unknown option 'draft_windw'", "Did you mean 'draft_w",
    ),
    "options that are no JSON": ({}, None, {}, ("--options", "draft_window=9"), "options", "not JSON", "expected an object"),
    "a hook differs": (
        {}, None, {}, (), "hooks", "a:b: expected this name, found none", "Install a supported vLLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_set_ups(case, tmp_path, monkeypatch):
    """Breaks when a fault is only a warning, has no cure, hides behind another, or ends the report with a traceback."""
    changes, damage, environment, arguments, name, fault, cure = BROKEN[case]
    hooks = (
        [{"path": "a:b", "moment": "load", "problem": "a:b: expected this name, found none"}] if case == "a hook differs" else []
    )
    backend = {"backend": "CPU_ATTN", "graphs": None, "runner": "V1", "error": None}
    monkeypatch.setattr(probes, "_ask_vllm", answering(({"hooks": {"hooks": hooks}, "backend": backend}, "")))
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    target, draft = write_pair(tmp_path, **changes)
    if damage is not None:
        damage(tmp_path / "draft")
    report = examined("--target", target, "--draft", draft, *arguments)
    found = failures(report)
    assert list(found) == [name]
    assert fault in found[name]
    assert cure in found[name]
    assert report["command"] is None


@pytest.mark.usefixtures("without_vllm_import")
class TestReach:
    """What the engine would do with a pair, told without an engine."""

    def test_options_and_their_effect(self, tmp_path):
        """Breaks when an option is accepted and its effect, or the option itself in the command to run, is left out."""
        target, draft = write_pair(tmp_path)
        given = ("--options", '{"draft_window": 4096, "draft_max_context": 30000}')
        report = examined("--target", target, "--draft", draft, *given)
        told = failures(report, "ok")
        assert told["options"] == "draft_window = 4096, draft_max_context = 30000"
        assert "look back at most 4096 tokens; KV blocks behind are kept" in told["window"]
        assert "contexts up to 30000 tokens" in told["reach"]
        assert """--additional-config '{"vllm_dflash":{"draft_window":4096,"draft_max_context":30000}}'""" in report["command"]

    def test_a_draft_shorter_than_its_target(self, tmp_path):
        """Breaks when requests that will not be accelerated go unmentioned."""
        target, draft = write_pair(tmp_path, max_position_embeddings=8192)
        report = examined("--target", target, "--draft", draft)
        assert report["ok"]
        assert "contexts up to 8176 tokens; longer requests go on without drafts" in failures(report, "warn")["reach"]

    @pytest.mark.parametrize(
        ("target_types", "draft_changes", "with_draft", "without"),
        [
            (None, {}, 1, 1),
            (["linear_attention"] * 3 + ["full_attention"], {}, 3, 4),  # 27 + (9 + 5): the draft joins the full layers
            (["linear_attention"] * 3 + ["full_attention"], {"num_key_value_heads": 2}, 9, 4),
        ],
    )
    def test_kv_cache_groups(self, tmp_path, target_types, draft_changes, with_draft, without):
        """Breaks when a draft that splits a hybrid target's cache into many groups is not told from one that does not."""
        types = {} if target_types is None else {"layer_types": target_types * 9}
        target = write_folder(tmp_path / "target", TARGET | types, TOKENIZER)
        report = examined("--target", target, "--draft", write_folder(tmp_path / "draft", zlab(**draft_changes)))
        groups = next(check["data"] for check in report["checks"] if check["name"] == "groups")
        assert groups == {"with_draft": with_draft, "without_draft": without}


@pytest.mark.usefixtures("without_vllm_import")
class TestModels:
    """Faults of the models."""

    def test_a_model_that_is_not_there(self, tmp_path):
        """Breaks when the report ends at the first fault."""
        target, _ = write_pair(tmp_path)
        report = examined("--target", target, "--draft", "/nowhere")
        assert "no such folder" in failures(report)["draft"]
        assert "target" in failures(report, "ok")
        report = examined("--draft", "owner/nobody-has-this")
        assert "the hub does not give it" in failures(report)["draft"]

    def test_k_beyond_the_trained_block(self, tmp_path):
        """Breaks when doctor and engine disagree on the largest K."""
        target, draft = write_pair(tmp_path)
        assert "Set it to 15 or less" in failures(examined("--target", target, "--draft", draft, "--k", "16"))["k"]
        assert "--k: found 0" in failures(examined("--target", target, "--draft", draft, "--k", "0"))["k"]
        assert "--k 15" in (examined("--target", target, "--draft", draft, "--k", "15")["command"] or "")

    def test_what_is_odd_is_a_warning(self, tmp_path):
        """Breaks when a copied theta, an ordinary mask token or an assumption goes unsaid."""
        target, draft = write_pair(tmp_path, rope_theta=10000, dflash_config={"target_layer_ids": [1], "mask_token_id": 151668})
        report = examined("--target", target, "--draft", draft)
        warnings = failures(report, "warn")
        assert report["ok"]
        assert "rope_theta 10000, the target's is 1e+06" in warnings["rope"]
        assert "mask token 151668 is the ordinary token 'ordinary'" in warnings["tokenizer"]

    def test_a_draft_with_another_tokenizer(self, tmp_path):
        """Breaks when equal sizes are taken for equal vocabularies."""
        target, _ = write_pair(tmp_path)
        other = {"model": {"vocab": {"z": 0, "b": 1, "ordinary": 151668}}, "added_tokens": TOKENIZER["added_tokens"]}
        draft = write_folder(tmp_path / "other", zlab(), other)
        report = examined("--target", target, "--draft", draft)
        assert "the draft's tokenizer differs" in failures(report)["tokenizer"]

    def test_the_speculators_dialect_is_told(self, tmp_path):
        """Breaks when ids of this dialect are shown one too high, or its note on heads is lost."""
        draft = write_folder(tmp_path / "draft", SPECULATORS)
        text = failures(examined("--draft", draft), "ok")["draft"]
        assert "speculators config" in text
        assert "target layers 1 9 17 25 33" in text

    def test_a_draft_that_is_not_ours(self, tmp_path):
        """Breaks when DFlash2 is announced as ours."""
        draft = write_folder(tmp_path / "draft", zlab(architectures=["DFlash2DraftModel"]))
        assert "vLLM's own implementation will run it" in failures(examined("--draft", draft), "warn")["draft"]

    def test_a_multimodal_target(self, tmp_path):
        """Breaks when the language model's numbers are looked for at the top level only."""
        target = write_folder(tmp_path / "vl", {"architectures": ["VL"], "text_config": TARGET})
        draft = write_folder(tmp_path / "draft", zlab())
        assert failures(examined("--target", target, "--draft", draft)) == {}


@pytest.mark.usefixtures("without_vllm_import")
class TestEnvironment:
    """Faults of the installation."""

    def test_a_hidden_plugin(self, monkeypatch):
        """Breaks when the usual reason for 'it does nothing' is not found."""
        monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver,other")
        assert "hides the plugin" in failures(examined())["plugin"]
        monkeypatch.setenv("VLLM_PLUGINS", "other, dflash")
        assert examined()["ok"]

    def test_the_kill_switch(self, monkeypatch):
        """Breaks when a forgotten VLLM_DFLASH=0 goes unsaid; it is the user's choice, so no failure."""
        monkeypatch.setenv("VLLM_DFLASH", "0")
        report = examined()
        assert report["ok"]
        assert "vLLM's own DFlash is used" in failures(report, "warn")["plugin"]

    def test_no_vllm(self, monkeypatch):
        """Breaks when doctor needs what it looks for."""
        monkeypatch.setattr(probes, "distribution_version", answering(None))  # it cannot be uninstalled for a test
        report = examined()
        assert "vLLM is not installed" in failures(report)["vllm"]
        assert "pip install 'vllm-dflash[gpu]'" in failures(report)["vllm"]

    @pytest.mark.parametrize("version", ["0.31.0", "0.34.1", "1.0", "dev"])
    def test_an_untested_vllm(self, monkeypatch, version):
        """Breaks when an unknown version is called supported; hooks decide, so it is a warning."""
        monkeypatch.setattr(probes, "distribution_version", answering(version))
        assert "is untested; expected 0.32 and 0.33" in failures(examined(), "warn")["vllm"]

    @pytest.mark.parametrize("version", ["0.32.0", "0.33.0+cpu", "0.33.1.dev3+g123"])
    def test_a_supported_vllm(self, monkeypatch, version):
        """Breaks when a local version part is held against it."""
        monkeypatch.setattr(probes, "distribution_version", answering(version))
        assert "is supported" in failures(examined(), "ok")["vllm"]

    def test_not_installed_as_a_plugin(self, monkeypatch):
        """Breaks when the package on PYTHONPATH alone passes for an installation."""
        monkeypatch.setattr(probes, "entry_points", answering([]))
        assert "Install vllm-dflash with pip" in failures(examined())["plugin"]


def test_differing_hooks(monkeypatch):
    """Breaks when a hook of the runner that this build cannot use fails the check, or one that it uses does not."""
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    hooks = [
        {"path": "a:b", "moment": "v1", "problem": "a:b: expected this name, found none"},
        {"path": "c:d", "moment": "v2", "problem": "c:d: expected this name, found none"},
        {"path": "e:f", "moment": "load", "problem": None},
    ]
    monkeypatch.setattr(probes, "_ask_vllm", answering(({"hooks": {"hooks": hooks}}, "no backend")))
    found = {(f.name, f.status): f.text for f in probes.hooks_and_backend(None)}
    assert found["hooks", "fail"].startswith("a:b: expected this name, found none. Install a supported vLLM")
    assert found["hooks", "warn"].startswith("c:d")
    assert found["backend", "warn"] == "not known: no backend"


def test_a_vllm_that_cannot_be_imported(monkeypatch, tmp_path):
    """Breaks when a broken installation breaks the report: the probe runs in a process of its own."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = probes.hooks_and_backend(None)
    assert found.status == "fail"
    assert "vLLM cannot be imported" in found.text


def test_a_probe_that_fails_is_a_finding():
    """Breaks when an unforeseen file content ends the report with a traceback."""

    def probe():
        yield Finding("a", "ok", "fine")
        raise KeyError("oops")

    assert guarded("a", probe) == [Finding("a", "fail", "KeyError: 'oops'")]


def test_the_screen(tmp_path, monkeypatch):
    """Breaks when the signs or the command to run are lost."""
    monkeypatch.setattr(probes, "hooks_and_backend", answering([Finding("hooks", "ok", "12 of 12 match")]))
    target, draft = write_pair(tmp_path)
    shown = CliRunner().invoke(app, ["doctor", "--target", target, "--draft", draft]).stdout
    assert " ✓ hooks     12 of 12 match\n" in shown
    assert f" → {command_line(target, draft, None)}" in shown
    assert doctor.SIGNS.keys() == {"ok", "warn", "fail"}


def test_the_command_fits_the_machine(monkeypatch):
    """Breaks when a GPU user is sent to our wrapper, or the JSON does not survive a shell."""
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(machine, "version", lambda name: {"vllm": "0.33.0"}[name])  # no GPU build can be installed here
    expected = """vllm serve T --speculative-config '{"method":"dflash","model":"D","num_speculative_tokens":7}'"""
    assert command_line("T", "D", 7) == expected
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert command_line("T", "D", None) == "vllm-dflash serve T --draft D"
