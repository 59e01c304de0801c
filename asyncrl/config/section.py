"""The base of every section of the config."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, unknown keys refused, docstrings double as descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @property
    def implied(self) -> frozenset[str]:
        """Keys whose values follow from others; a printed config shows them as comments."""
        return frozenset()
