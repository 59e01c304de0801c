"""What every message is: a closed schema, nothing converted, nothing unknown."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]


class WireMessage(BaseModel):
    """The base of all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
