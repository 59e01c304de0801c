"""Other people's text as one line that can only be read: for a terminal, and for a page's title."""

import unicodedata


def plain(text: str, limit: int) -> str:
    """At most `limit` characters; those that could move a cursor or turn the text are a dot."""
    shown = "".join(
        "\u00b7" if unicodedata.category(character)[0] == "C" else character
        for character in text[: limit + 1].replace("\n", "\u23ce")
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "\u2026"
