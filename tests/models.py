"""Small models for everybody's tests."""

from pathlib import Path

from launch.make_model import make_tiny


def make_tiny_model(path: Path, *, seed: int = 0, layers: int = 2, hidden: int = 64) -> Path:
    """A random Llama of about 130 k parameters with a character tokenizer, saved in `path`."""
    return make_tiny(path, seed=seed, num_layers=layers, hidden_size=hidden)
