"""Rows of different length decoded together: one left-padded cache over a causal LM.

Every row ends at the right edge, so a new token is always appended in the same column:

    row 0   [ .  .  a  b  c ]      "." is padding: masked, and position ids start after it,
    row 1   [ d  e  f  g  h ]      so a row's result does not depend on the rows beside it

Invariant: row i's context is in the last `lengths[i]` columns of the cache, padding before it.
Only full key/value caches can be padded so; models that keep other state are refused. A sliding
window is a mask over the full cache here, which is exact and keeps more memory than it must.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from asyncrl.errors import ConfigError

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""What `forward` calls its cache, from transformers 5.24 on and before."""

ROOM_COLUMNS = 32
"""Columns that a cache layer keeps free, so that it is copied once in so many tokens."""


class RoomyLayer(DynamicLayer):
    """A growing cache layer that appends in place while it has room; DynamicLayer always copies."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self._stores: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns to keys and values [B, heads, L, D]; all columns so far are returned."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held, added = self.get_seq_length(), key_states.shape[-2]
        # Whoever replaced keys and values (selected rows, cut columns) has left the stores behind.
        inside = self._views and self.keys is self._views[0] and self.values is self._views[1]
        if not inside or held + added > self._stores[0].shape[-2]:
            self._stores = [
                _with_room(old, new, held)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            ]
        for store, new in zip(self._stores, (key_states, value_states), strict=True):
            store[:, :, held : held + added] = new
        self._views = [store[:, :, : held + added] for store in self._stores]
        self.keys, self.values = self._views
        return self.keys, self.values


def _with_room(old: torch.Tensor, new: torch.Tensor, held: int) -> torch.Tensor:
    batch, heads, added, width = new.shape
    store = new.new_empty(batch, heads, held + added + ROOM_COLUMNS, width)
    if held:
        store[:, :, :held] = old
    return store


class CachedModel:
    """A causal LM called with left-padded rows; returns only the logits of the last column."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model in eval mode.

        Raises:
            ConfigError: it keeps state other than one key and value per token and layer.
        """
        self._model = model
        self._device = model.device
        self._parameters = inspect.signature(model.forward).parameters
        config = model.config.get_text_config(decoder=True)
        layers = {type(layer) for layer in DynamicCache(config=config).layers}
        chunked = getattr(config, "attention_chunk_size", None) is not None
        names = [name for name in CACHE_ARGUMENTS if name in self._parameters]
        if not names or chunked or not layers <= {DynamicLayer, DynamicSlidingWindowLayer}:
            raise ConfigError(
                f"engine.kind='hf' runs causal LMs with full or sliding-window attention only, but "
                f"model.path is a {type(model).__name__}, which keeps other state (chunked, linear "
                "or recurrent layers)"
            )
        self._cache_argument = names[0]

    def forward(self, tokens: torch.Tensor, lengths: Sequence[int], cache: Cache) -> torch.Tensor:
        """Append `tokens` [B, S] to the cache; `lengths` [B] are the contexts after that.

        Returns:
            float32 logits [B, V] of the last column.
        """
        columns = cache.get_seq_length() + tokens.shape[1]
        padding = columns - torch.tensor(lengths, device=self._device)
        offsets = torch.arange(columns, device=self._device) - padding[:, None]
        inputs: dict[str, Any] = {
            "attention_mask": (offsets >= 0).long(),
            "position_ids": offsets.clamp(min=0)[:, -tokens.shape[1] :],
            # As the number 1 it gives the head a strided view, for which torch copies the head's
            # weights once a row (1.3 s of the 1.8 s that 8 prompts of 68 tokens took); an index
            # gives it a copy of the column.
            "logits_to_keep": torch.tensor([tokens.shape[1] - 1], device=self._device),
        }
        known = {name: value for name, value in inputs.items() if name in self._parameters}
        known[self._cache_argument] = cache
        output = self._model(input_ids=tokens, use_cache=True, **known)
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()


class PaddedBatch:
    """The cache of the running rows and how much of it belongs to each."""

    def __init__(self, model: CachedModel, device: torch.device) -> None:
        """Start without rows."""
        self._model = model
        self._device = device
        # Without any padding transformers gives no mask, and then takes a path for grouped heads
        # that is five times slower on a CPU in bfloat16. One masked column keeps it away.
        self._spare_columns = 1 if device.type == "cpu" else 0
        self._cache = Cache(layer_class_to_replicate=RoomyLayer)
        self._lengths: list[int] = []

    @property
    def num_columns(self) -> int:
        """Columns of the cache: the longest context, and a spare one."""
        return self._cache.get_seq_length()

    def prefill(self, prompts: Sequence[NDArray[np.int32]]) -> torch.Tensor:
        """Fill an empty batch with one row a prompt, in one forward pass; logits [B, V]."""
        self._lengths = [len(prompt) for prompt in prompts]
        padded = np.zeros((len(prompts), max(self._lengths)), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[-len(prompt) :] = prompt
        return self._model.forward(
            torch.from_numpy(padded).to(self._device), self._lengths, self._cache
        )

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to every row; logits [B, V] of the next."""
        self._lengths = [length + 1 for length in self._lengths]
        column = torch.tensor(tokens, device=self._device)[:, None]
        return self._model.forward(column, self._lengths, self._cache)

    def select(self, rows: Sequence[int]) -> None:
        """Keep `rows` in this order; a row named several times is copied. Drops spare padding."""
        self._lengths = [self._lengths[row] for row in rows]
        if not rows:
            self._cache = Cache(layer_class_to_replicate=RoomyLayer)
            return
        self._cache.batch_select_indices(torch.tensor(rows, device=self._device))
        self._resize(max(self._lengths) + self._spare_columns)

    def extend(self, other: "PaddedBatch") -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        if not self._lengths:
            self._cache, self._lengths = other._cache, other._lengths
            return
        columns = max(self.num_columns, other.num_columns)
        self._resize(columns)
        other._resize(columns)
        for mine, theirs in zip(self._cache.layers, other._cache.layers, strict=True):
            mine.keys = torch.cat([mine.keys, theirs.keys])
            mine.values = torch.cat([mine.values, theirs.values])
        self._lengths += other._lengths

    def _resize(self, columns: int) -> None:
        """Add or drop padding on the left. Caches have no public call for it: `crop` cuts right."""
        added = columns - self.num_columns
        if added == 0:
            return
        for layer in self._cache.layers:
            # A negative pad cuts.
            layer.keys = torch.nn.functional.pad(layer.keys, (0, 0, added, 0))
            layer.values = torch.nn.functional.pad(layer.values, (0, 0, added, 0))
