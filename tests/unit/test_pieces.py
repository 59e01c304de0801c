"""Texts of single tokens: together they are the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.learner.pieces import Pieces


def byte_tokenizer():
    """One token a byte, so that every other character is spread over several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inside = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    inside.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inside.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inside)


def word_tokenizer():
    """Words that begin with a space; decoding drops the first one."""
    vocab = {"<unk>": 0, "▁a": 1, "▁the": 2, "▁cat": 3, "s": 4}
    inside = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inside.pre_tokenizer = pre_tokenizers.Metaspace()
    inside.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inside, unk_token="<unk>")


BYTES = byte_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_texts_of_bytes_join_to_the_text_and_a_character_belongs_to_its_last_byte(text):
    tokens = BYTES.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode())
    found = Pieces(BYTES)(tokens)
    # Worked out by hand from UTF-8: all bytes of a character but the last have no text.
    wanted = [piece for c in text for piece in [""] * (len(c.encode()) - 1) + [c]]
    if "\ufffd" not in text:
        assert found == wanted
    assert "".join(found) == text


@given(st.lists(st.integers(0, 255), max_size=12))
def test_texts_of_any_bytes_join_to_what_the_tokenizer_makes_of_all(tokens):
    pieces = Pieces(BYTES)
    assert len(pieces(tokens)) == len(tokens)
    if "\ufffd" not in BYTES.decode(tokens):
        assert "".join(pieces(tokens)) == BYTES.decode(tokens)


def test_a_word_keeps_its_space_though_alone_it_would_lose_it():
    tokenizer = word_tokenizer()
    assert tokenizer.decode([3]) == "cat"
    assert Pieces(tokenizer)([2, 3, 4]) == [" the", " cat", "s"]


@pytest.mark.parametrize("end", [1, 2])
def test_half_a_character_at_the_end_is_shown_as_broken(end):
    tokens = BYTES.encode("€", add_special_tokens=False)[:end]
    found = Pieces(BYTES)(tokens)
    assert "".join(found).strip("\ufffd") == ""
    assert found[-1] != ""
