# SPDX-License-Identifier: Apache-2.0
"""Generated text with its origin visible: accepted drafts in colour on a terminal, in brackets where there is no colour."""

from collections.abc import Iterable

from rich.console import Console

STYLE = "bold green"
LEGEND = "accepted drafts"


class MarkedText:
    """Prints pieces of text as they come; one mark spans neighbouring pieces of the same step."""

    def __init__(self, console: Console, *, enabled: bool = True) -> None:
        self._console = console
        self.coloured = enabled and console.is_terminal and not console.no_color
        self._bracketed = enabled and not self.coloured

    def step(self, pieces: Iterable[tuple[str, bool]]) -> None:
        """Print the pieces of one step: text, and whether it came from accepted drafts."""
        pieces = list(pieces)
        accepted = "".join(text for text, is_draft in pieces if is_draft)
        own = "".join(text for text, is_draft in pieces if not is_draft)
        self._write(f"[{accepted}]" if accepted and self._bracketed else accepted, STYLE if self.coloured else "")
        self._write(own, "")

    def end(self) -> None:
        """Close the last line."""
        self._write("\n", "")

    def legend(self) -> str:
        """How accepted drafts look here, for a line below the text."""
        return f"{LEGEND} are green" if self.coloured else f"{LEGEND} are in [brackets]"

    def _write(self, text: str, style: str) -> None:
        if text:
            self._console.out(text, style=style or None, end="", highlight=False)
