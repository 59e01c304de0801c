"""The text of single tokens, which a tokenizer only promises for whole sequences.

A token's text is what it adds behind a fixed other token (alone, some tokenizers drop its leading space);
that is a fact of the vocabulary, so each token is decoded once a run. Characters that are spread over
several tokens belong to the last of them: "".join(texts) is the sequence, special tokens included.
"""

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\ufffd"
"""What decoders write for bytes that are no character by themselves."""


class Tokenizer(Protocol):
    """What is called of a tokenizer of transformers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Text."""


class Pieces:
    """Texts of tokens under one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._before = self._decode(self._anchor)
        self._known: dict[int, str] = {}

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        """One text a token; "" where a later token completes the character."""
        texts = [self._piece(token) for token in tokens]
        start = 0
        while start < len(texts):
            if _BROKEN not in texts[start]:
                start += 1
                continue
            end = start
            while end < len(texts) and _BROKEN in texts[end]:
                end += 1
            texts[start:end] = self._joined(tokens[start:end])
            start = end
        return texts

    def _piece(self, token: int) -> str:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._behind([token])
        return found

    def _joined(self, tokens: Sequence[int]) -> list[str]:
        """Texts of tokens that are parts of characters: each gets what it completes."""
        texts: list[str] = []
        done = ""
        for end in range(1, len(tokens) + 1):
            text = self._behind(tokens[:end])
            # Unfinished at its end; if nothing follows, it stays broken and belongs to the last.
            whole = text if end == len(tokens) else text.rstrip(_BROKEN)
            whole = whole if len(whole) > len(done) else done
            texts.append(whole[len(done) :])
            done = whole
        return texts

    def _behind(self, tokens: Sequence[int]) -> str:
        return self._decode([*self._anchor, *tokens])[len(self._before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
