"""The account of a system's bytes: beside what its services allocate, and what is said by it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotcold.actors.attention.attention_service import load_attention_service
from hotcold.actors.cpu.cpu_service import load_cpu_service
from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.setup import account as accounts
from hotcold.actors.setup.account import (
    Account,
    account,
    attention_parts_bytes,
    loaded_bytes,
    require_memory,
)
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.actors.setup.shards import arena_layout, service_specs
from hotcold.actors.setup.storage import storage_within
from hotcold.jobs.cli import main
from hotcold.model.config.build import read_config
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.weights.quantized_checkpoint import write_quantized
from tests.quantized_models import make_model
from tests.tiny_models import MAX_POSITIONS, make_tiny

GIB = 1 << 30
NO_WEIGHTS = (
    *("keys", "values", "rope_tables", "numbers", "logit_softcap"),
    *("recurrent_numbers", "recurrent_pages"),
    *("starts", "first_stripe", "stripes_at_once"),
)


def allocated(system: SystemConfig, path: Path) -> tuple[int, int]:
    """Bytes of weights and of the KV cache that a system's services hold, loaded in turn."""
    weights = kv = 0
    config = read_config(path)
    for spec in service_specs(system, read_model(path, system.weight_dtype or None)):
        load: Any = load_cpu_service if spec.is_cpu_service else load_attention_service
        service = load(spec, config, lambda count: None)
        if not spec.is_cpu_service:
            kv += service.arrays.keys.nbytes + service.arrays.values.nbytes
            kv += service.arrays.recurrent_pages.nbytes
        for one in filter(None, (service, service.draft)):
            weights += sum(
                array.nbytes
                for name, array in one.arrays._asdict().items()
                if name not in NO_WEIGHTS
            )
    return weights, kv


def require_equal(path: Path, **options: Any) -> None:
    """The account is what is allocated, but for numbers of neurons and padding."""
    config = read_model(path, options.get("weight_dtype"))
    system = choose_system(path, config, SystemOptions(context_length=70, **options))
    found = account(system, config)
    weights = found.attention_bytes + found.head_bytes + found.ffn_bytes + found.draft_bytes
    held, kv = allocated(system, path)
    assert found.kv_cache_bytes == kv
    assert weights == pytest.approx(held, abs=16 * config.num_neurons, rel=0.005)
    assert found.arena_bytes == arena_layout(system, config).num_bytes
    if system.num_cpu_actors == 1:
        assert loaded_bytes(system, config) == weights


# But for predictors in experts, of which test_expert_weights.py counts each array.
@pytest.mark.parametrize(
    "variant",
    ["llama-mlp-bias", "opt-postnorm", "falcon-bias", "falcon-grouped", "gemma3", "phi3",
     "minicpm", "gpt-oss", "glm4-moe-groups", "granite-moe-shared", "smallthinker-windows",
     "qwen3.5", "qwen3-next"],
)  # fmt: skip
def test_it_is_what_services_allocate(variant: str, tmp_path: Path) -> None:
    require_equal(make_tiny(variant, tmp_path), num_cpu_actors=1)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["q-llama-tied", "q-opt", "q-falcon-grouped"])
@pytest.mark.parametrize("dtype", ["q8", "mxfp4", "bf16"])
def test_it_is_what_services_allocate_in_other_formats(
    name: str, dtype: str, tmp_path: Path
) -> None:
    more = {"draft": "q4"} if dtype in ("q8", "bf16") else {}
    require_equal(make_model(name, tmp_path), weight_dtype=dtype, num_cpu_actors=2, **more)


def test_a_quantized_cache(tmp_path: Path) -> None:
    path = make_tiny("llama-gqa", tmp_path)
    require_equal(path, kv_dtype="q8", kv_positions=1000, max_batch=3, num_cpu_actors=1)


def test_what_processes_take(tmp_path: Path) -> None:
    """Arenas of calls; segments and rope's table of long contexts; torch for .bin files."""
    path = make_tiny("llama-gqa", tmp_path)
    config, system = read_model(path), SystemConfig(str(path), num_cpu_actors=3, exchange="calls")
    plain = account(system, config)
    assert plain.arena_bytes == 5 * arena_layout(system, config).num_bytes
    rests = []
    for pages in (4, 400):
        longer = replace(system, context_length=64 * pages, max_batch=1)
        parts = attention_parts_bytes(longer, config)
        num_tokens = min(32, arena_layout(longer, config).max_tokens)
        assert parts == num_tokens * (pages // 4) * config.num_heads * (config.head_dim + 2) * 4
        table = 64 * pages * (config.head_dim + 1) * 4
        rests.append(account(longer, config).process_bytes - parts - table)
    assert rests[0] == rests[1]
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert account(system, config).process_bytes - plain.process_bytes == (2 + 3) * (130 << 20)


def test_with_neurons_on_storage_the_cache_is_that_of_such_a_system(tmp_path: Path) -> None:
    """Long prompts go in larger steps then, so layers with a window have more pages."""
    path = make_tiny("gemma3", tmp_path)
    config = read_model(path)
    system = choose_system(path, config, SystemOptions(kv_positions=20_000, num_cpu_actors=1))
    with pytest.raises(MemoryBudgetError) as refused:
        storage_within(None, system, config, 0)
    told = re.search(r"at least .* \((\d+) bytes\)", str(refused.value))
    assert told is not None
    limit = int(told[1]) + 1000
    stored = replace(system, storage=storage_within(None, system, config, limit))
    need = account(stored, config)
    assert limit - 1000 <= need.total_bytes <= limit
    assert need.kv_cache_bytes > account(system, config).kv_cache_bytes
    spec = service_specs(stored, config)[0]
    arrays = load_attention_service(spec, read_config(path), lambda count: None).arrays
    assert spec.cache is not None  # pages beyond these are never written
    num_pages = sum(spec.cache.pages_of(layer.page_group) for layer in config.layers)
    assert need.kv_cache_bytes == 2 * num_pages * arrays.keys.pages(0)[0].nbytes


def test_doctor_and_generate_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny("opt-postnorm", tmp_path, dtype="float16")
    for context in ([], ["--context", "32"]):
        assert main(["doctor", "--no-measure", "--json", *context, str(path)]) == 1  # no tokenizer
        total = json.loads(capsys.readouterr().out.splitlines()[-1])["model"]["total_bytes"]
        length = int(context[1]) if context else None
        prepare_system(path, SystemOptions(context_length=length, cpu_memory_bytes=total))
        with pytest.raises(MemoryBudgetError, match="--cpu-memory"):
            prepare_system(path, SystemOptions(context_length=length, cpu_memory_bytes=total - 1))
    assert main(["doctor", "--no-measure", "--context", str(MAX_POSITIONS + 1), str(path)]) == 1


def test_a_system_fits_beside_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "available_bytes", lambda: 30 * GIB)
    need = Account(5 * GIB, 5 * GIB, 10 * GIB, 5 * GIB, 1 * GIB, 1 * GIB)
    require_memory(need, monitor_bytes=3 * GIB)
    monkeypatch.setattr(accounts, "memory_limit", lambda: None)
    with pytest.raises(MemoryBudgetError, match=r"26.00 GiB .* free besides the 4.00 GiB that Ray"):
        require_memory(need, monitor_bytes=4 * GIB)
    monkeypatch.setattr(accounts, "memory_limit", lambda: 32 * GIB)
    with pytest.raises(MemoryBudgetError, match=r"are free within a control group's limit of 32"):
        require_memory(replace(need, arena_bytes=9 * GIB))


def total_bytes(path: Path, dtype: str | None) -> int:
    """What `generate` with that --dtype takes, counted for it alone."""
    config = read_model(path, dtype)
    options = SystemOptions(weight_dtype=dtype)
    return account(choose_system(path, config, options), config).total_bytes


def advice(path: Path, limit: int, dtype: str | None = None) -> str:
    """What the error says to use under --cpu-memory `limit`."""
    with pytest.raises(MemoryBudgetError) as caught:
        prepare_system(path, SystemOptions(cpu_memory_bytes=limit, weight_dtype=dtype))
    text = str(caught.value)
    assert "\n" not in text
    return text[text.index("; use ") + len("; use ") :]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_dtype_that_fits_is_named(dtype: str, tmp_path: Path) -> None:
    path = make_model("q-llama-tied", tmp_path, dtype=dtype)
    names = "q8", "q4_1", "q4", "mxfp4"
    stored, q8, q4_1, q4, mxfp4 = (total_bytes(path, dtype) for dtype in (None, *names))
    assert mxfp4 < q4 < q4_1 < q8 < stored
    prepare_system(path, SystemOptions(cpu_memory_bytes=stored))
    first = "f16" if dtype == "float32" else "q8"
    limits = stored - 1, q8, q8 - 1, q4_1 - 1, q4 - 1
    for limit, found in zip(limits, (first, *names), strict=True):
        assert re.match(rf"--dtype {found}, with which it needs \d+\.\d MiB$", advice(path, limit))
        prepare_system(path, SystemOptions(cpu_memory_bytes=limit, weight_dtype=found))
    assert advice(path, mxfp4 - 1, "q4") == "a smaller model or a smaller --context"
    if dtype == "float16":
        assert advice(path, q8 - 1, "q8").startswith("--dtype q4_1")


def test_models_that_cannot_be_quantized_are_to_be_smaller(tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path / "rows-of-48", dtype="float16")
    assert advice(path, total_bytes(path, None) - 1).startswith("a smaller model")
    original = make_model("q-llama", tmp_path / "original")
    write_quantized(original, tmp_path / "q8", "q8")
    limit = total_bytes(tmp_path / "q8", None) - 1
    assert advice(tmp_path / "q8", limit).startswith("a smaller model")
    assert advice(original, limit, "q8").startswith("--dtype q4")
