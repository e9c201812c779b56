"""The models in answers of /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotcold.model.errors import HotcoldError
from hotcold.model.sampling import PARAMETERS
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.model_facts import Facts, facts_of, planned_bytes
from hotcold.ui.api.ollama.schemas import OllamaShow, written
from hotcold.ui.api.served_models import TAG

_NEVER = "2262-04-11T23:47:16Z"  # the last whole second of a date in nanoseconds


async def listed(backends: Iterable[Backend]) -> dict[str, Any]:
    """All models, loaded or not; without their files' facts where these cannot be read."""
    found = []
    for backend in backends:
        facts = await facts_of(backend)
        more = {"modified_at": written(facts.modified_at), "capabilities": _capabilities(backend)}
        found.append(_described(backend, facts, facts.stored_bytes) | more)
    return {"models": found}


async def running(backends: Iterable[Backend]) -> dict[str, Any]:
    """The loaded models, and the memory of each by its plan; 0 where unknown."""
    found = []
    for backend in backends:
        if not backend.is_loaded:
            continue
        facts, system, size = await facts_of(backend), backend.config, 0
        with suppress(HotcoldError, OSError):
            size = await asyncio.to_thread(planned_bytes, system)
        more = {
            "expires_at": _NEVER,
            "size_vram": system.gpu_memory_bytes if system.device == "cuda" else 0,
            "context_length": backend.prompts.context_length,
        }
        found.append(_described(backend, facts, size) | more)
    return {"models": found}


async def show(backend: Backend, body: OllamaShow) -> dict[str, Any]:
    """What a model is."""
    facts, defaults = await facts_of(backend), backend.defaults
    config, tokenizer = facts.config, backend.prompts.tokenizer
    own = [name for name, one in PARAMETERS.items() if one.is_models]
    sampled = {name: getattr(defaults, name) for name in own}
    parameters = "\n".join(f"{name:<30} {value:g}" for name, value in sampled.items())
    of_family = {
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "block_count": config.num_layers,
        "context_length": backend.prompts.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.ffn_size,
        "vocab_size": config.vocab_size,
    }
    if config.experts is not None:
        of_family |= {
            "expert_count": config.experts.router.num_experts,
            "expert_used_count": config.experts.router.num_chosen,
            "expert_feed_forward_length": config.experts.size,
        }
    return {
        "modelfile": f"FROM {backend.settings.model_name}\n",
        "parameters": parameters,
        # In Jinja's language, and not in Go's; without one, Ollama's own.
        "template": (tokenizer and tokenizer.chat_template) or "{{ .Prompt }}",
        "details": _details(backend, facts),
        "model_info": {
            "general.architecture": config.family,
            "general.basename": config.name,
            "general.parameter_count": facts.num_parameters,
            **{f"{config.family}.{name}": value for name, value in of_family.items()},
        },
        "capabilities": _capabilities(backend),
        "modified_at": written(facts.modified_at),
    }


def _described(backend: Backend, facts: Facts, size: int) -> dict[str, Any]:
    """A model in a list. Its name without a tag has one in Ollama; `size` in bytes."""
    name = backend.name if ":" in backend.name else f"{backend.name}{TAG}"
    details = _details(backend, facts)
    return {"name": name, "model": name, "size": size, "digest": facts.digest, "details": details}


def _details(backend: Backend, facts: Facts) -> dict[str, Any]:
    config = facts.config
    return {
        "parent_model": "",
        "format": "gguf" if Path(backend.config.model_path).is_file() else "safetensors",
        "family": config.family,
        "families": [config.family],
        "parameter_size": _short(facts.num_parameters) if facts.num_parameters else "",
        "quantization_level": (backend.config.weight_dtype or facts.format_name).upper(),
        "context_length": backend.prompts.context_length,
        "embedding_length": config.hidden_size,
    }


def _capabilities(backend: Backend) -> list[str]:
    """Every model with a chat template can use tools: grammars enforce its calls."""
    found = ["completion", "tools"] if backend.has_chat_template else ["completion"]
    return [*found, "thinking"] if backend.thinks else found


def _short(count: int) -> str:
    """A count as Ollama writes it, such as 7.6B or 134.52M."""
    return f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.2f}M"
