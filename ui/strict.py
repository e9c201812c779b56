"""The base of what requests may hold."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Types are strict: a number is no text. Fields that are not named are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)
