"""Command lines whose `key=value` overrides stand before, between or behind the options."""

import argparse
from collections.abc import Sequence


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """As `parse_args`, for commands with any number of positional `overrides`.

    argparse gives such a positional one unbroken series of arguments, and parse_intermixed_args, which
    would do, refuses subcommands.
    """
    options, left = parser.parse_known_args(arguments)
    if left and ("overrides" not in options or any(item.startswith("-") for item in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        options.overrides = [*options.overrides, *left]
    return options
