"""Other people's text on a terminal: completions, and what a scorer says, are shown and never obeyed."""

import unicodedata


def plain(text: str, limit: int) -> str:
    """One line of at most `limit` characters that a terminal only prints, and UTF-8 can encode."""
    shown = "".join(
        "\u00b7" if unicodedata.category(character)[0] == "C" else character
        for character in text[: limit + 1].replace("\n", "\u23ce")
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "\u2026"
