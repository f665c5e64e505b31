"""Where tables go."""

from __future__ import annotations

from rich.console import Console


def make_console() -> Console:
    """The terminal; wide enough for every table where the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
