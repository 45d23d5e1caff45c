# SPDX-License-Identifier: Apache-2.0
"""The widened demo pair in the cache, made when it is first asked for."""

import shutil
from pathlib import Path

from rich.console import Console

from vllm_dflash.cli.failure import UserError
from vllm_dflash.cli.models import prepared_demo_pair


def prepared_wide_pair(preset: str, console: Console) -> tuple[str, str]:
    """Folders of target and draft of a preset (``1b``, ``8b``, ``30b``), bfloat16.

    Raises:
        UserError: no such preset, or the disk is too small.
    """
    from vllm_dflash.demo_pair.prepare import default_cache_dir
    from vllm_dflash.demo_pair.widen import PRESETS, widen

    if preset not in PRESETS:
        raise UserError(f"--widen: found {preset!r}; expected one of {', '.join(PRESETS)}.")
    small = prepared_demo_pair(console)
    out = default_cache_dir() / f"wide-{preset}"
    if not all((out / name / "config.json").is_file() for name in ("target", "draft")):
        _check_room(out.parent, PRESETS[preset].num_params * 2)
        with console.status(f"widening the demo pair to {preset}: {PRESETS[preset].num_params / 1e9:.1f}e9 parameters"):
            widen(Path(small[0]), Path(small[1]), out, PRESETS[preset])
    return str(out / "target"), str(out / "draft")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < 1.3 * needed:  # the draft besides
        raise UserError(
            f"--widen: {free / 1e9:.0f} GB are free in {folder}; expected {1.3 * needed / 1e9:.0f}. Set XDG_CACHE_HOME to a "
            "folder on a larger disk."
        )
