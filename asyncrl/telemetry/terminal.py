"""Other people's text on a terminal: completions, and what a scorer says, are shown and never obeyed."""

import contextlib
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path


def say(line: str) -> None:
    """A line of progress on standard output, at once."""
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def say_and_keep(path: Path) -> Callable[[str], None]:
    """As `say`, which also puts each line at the end of a file, behind the local time."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def tell(line: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(f"{now} {printable(line)}\n")  # a full disk is another one's failure
        say(line)

    return tell


def printable(text: str) -> str:
    """What a terminal only prints and UTF-8 can encode: a dot for anything else but line ends."""
    return "".join(
        "\u00b7" if unicodedata.category(character)[0] == "C" and character != "\n" else character
        for character in text
    )


def plain(text: str, limit: int) -> str:
    """The same as one line of at most `limit` characters."""
    shown = printable(text[: limit + 1].replace("\n", "\u23ce"))
    return shown if len(shown) <= limit else shown[: limit - 1] + "\u2026"
