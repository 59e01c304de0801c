"""The whole configuration: one frozen tree, one TOML file, dotted overrides.

Every process reads the same file and computes the same `digest`, which the handshake compares. Unknown
keys are errors that name the nearest known key; numbers that follow from others are properties.
"""

from asyncrl.config.engine import EngineConfig, HFEngineConfig, VllmEngineConfig
from asyncrl.config.read import read_config
from asyncrl.config.run import RunConfig
from asyncrl.config.sections import LearnerConfig, LoraConfig, PipelineConfig
from asyncrl.config.tasks import (
    JsonlTask,
    ProductsTask,
    ReasoningGymTask,
    RepeatLetterTask,
    ReverseDigitsTask,
    TaskConfig,
)
from asyncrl.config.text import to_toml

__all__ = [
    "EngineConfig",
    "HFEngineConfig",
    "JsonlTask",
    "LearnerConfig",
    "LoraConfig",
    "PipelineConfig",
    "ProductsTask",
    "ReasoningGymTask",
    "RepeatLetterTask",
    "ReverseDigitsTask",
    "RunConfig",
    "TaskConfig",
    "VllmEngineConfig",
    "read_config",
    "to_toml",
]
