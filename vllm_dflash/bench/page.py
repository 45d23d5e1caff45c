# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page of a benchmark: table, plots, where it was measured."""

import base64
import html
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_dflash.bench.figures import Row
from vllm_dflash.bench.plots import plot_acceptance, plot_speedup, plot_widths
from vllm_dflash.bench.report import HEADINGS, lines

_STYLE = "body{font:15px sans-serif;margin:2em;max-width:75em}td,th{padding:.2em .7em;text-align:right}img{max-width:100%}"


def write_page(path: Path, rows: Sequence[Row], origin: Row) -> None:
    """Write the page; pictures are inside it."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines(rows))
    facts = "".join(f"<li>{html.escape(key)}: {html.escape(str(value))}</li>" for key, value in origin.items())
    pictures = "".join(_picture(draw, rows) for draw in (plot_speedup, plot_acceptance, plot_widths))
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><title>vllm-dflash bench</title><style>{_STYLE}</style>'
        f"<h1>vllm-dflash bench</h1><table><tr>{head}</tr>{body}</table>{pictures}<h2>Measured with</h2><ul>{facts}</ul>",
        encoding="utf-8",
    )


def _picture(draw: Callable[[Sequence[Row], Path], object], rows: Sequence[Row]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.png"
        draw(rows, file)
        if not file.exists():
            return ""
        return f'<p><img src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"></p>'
