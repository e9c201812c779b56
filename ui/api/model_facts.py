"""What a served model is, by its files, its plan and its tokenizer."""

from __future__ import annotations

import asyncio
import functools
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup.account import loaded_bytes
from hotcold.actors.setup.preflight import read_model
from hotcold.actors.setup.shards import served_config, system_kv_bytes
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import HotcoldError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.sizes import num_parameters, stored_bytes
from hotcold.ui.api.backend import Backend


class Facts(NamedTuple):
    """Facts from a model's files."""

    config: ModelConfig
    modified_at: datetime
    digest: str = ""
    num_parameters: int = 0
    stored_bytes: int = 0
    format_name: str = ""  # of most of these bytes


async def facts_of(backend: Backend) -> Facts:
    """The model's, or what is known without its files where they cannot be read."""
    try:
        return await asyncio.to_thread(_read_facts, backend.config.model_path)
    except (HotcoldError, OSError):
        return Facts(backend.prompts.config, datetime.fromtimestamp(backend.created_at, UTC))


@functools.lru_cache(maxsize=64)
def _read_facts(model_path: str) -> Facts:
    """Read once: a model is not changed while it is served. Errors: HotcoldError, OSError"""
    path = Path(model_path)
    config, checkpoint = read_model(path), Checkpoint(path)
    stored = stored_bytes(checkpoint)
    file = path if path.is_file() else path / "config.json"
    return Facts(
        config=config,
        modified_at=datetime.fromtimestamp(file.stat().st_mtime, UTC),
        digest=ModelIdentity.of(path).digest,
        num_parameters=num_parameters(checkpoint, config),
        stored_bytes=sum(stored.values()),
        format_name=next(iter(stored)),
    )


def planned_bytes(system: SystemConfig) -> int:
    """Weights as they are loaded, and the KV cache. Errors: HotcoldError, OSError"""
    config = served_config(system, read_config(system.model_path))
    return loaded_bytes(system, config) + system_kv_bytes(system, config)
