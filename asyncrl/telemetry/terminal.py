"""Other people's text on a terminal: completions, and what a scorer says, are shown and never obeyed."""

import sys
import unicodedata


def say(line: str) -> None:
    """A line of progress on standard output, at once."""
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


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
