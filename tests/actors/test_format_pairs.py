"""Formats that a file may have beside each other, against float32 of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, pairwise, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.sizes import attention_bytes, ffn_bytes
from hotcold.numba_kernels.formats import FLOAT_FORMATS
from tests import reference, reference_experts
from tests.actors.in_process import InProcessSystem
from tests.gguf_files import BLOCKS
from tests.mxfp4_models import WIDE, make_mxfp4
from tests.tiny_models import MIXTURES, VOCAB_SIZE, Variant, make_tiny
from tests.unit.test_gguf_architectures import CASES, written
from tests.unit.test_gguf_architectures import IDS as FEW_IDS
from tests.unit.test_gguf_model import file_of, tiny
from tests.unit.test_mixtures import FILES, write_gguf

IDS = np.random.default_rng(7).integers(0, VOCAB_SIZE, 48)

FLOATS = [kind.short.upper() for kind in FLOAT_FORMATS.values()]
FORMATS = [*FLOATS]
# One of all that become the same rows, best one that has as many bits.
BY_BITS = sorted(BLOCKS, key=lambda block: block.is_as_stored(block.loaded_as))
FORMATS += {block.loaded_as: block.name for block in BY_BITS}.values()
# Each beside two others, of which codes through a table differ in the table alone.
TABLES = [name for name in FORMATS if name.startswith(("IQ", "MXFP4", "NVFP4", "Q3_K"))]
OTHERS = [name for name in FORMATS if name not in TABLES]
PAIRS = [("Q4_K", "Q6_K"), *pairwise([*OTHERS, *TABLES, OTHERS[0]])]
EXPERTS = 7


def kinds(pair: tuple[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Gate and up of the first format, down of the second; so one layer, the next one swapped."""
    one, other = pair
    found: dict[str, str] = {}
    for layer, name in product((0, 1), names):
        first, second = (one, other) if (layer == 0) == (name == names[0]) else (other, one)
        rows = {"gate": first, "up": first, "down": second}
        found |= {f"blk.{layer}.ffn_{part}{name}.": kind for part, kind in rows.items()}
    return found


def dense(kinds: dict[str, str], folder: Path) -> None:
    file_of(tiny(), folder / "m.gguf", kinds)


def mixture(kinds: dict[str, str], folder: Path) -> None:
    """Of two layers, with shared experts. All experts are chosen."""
    made = MIXTURES["qwen2-moe"]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts_per_tok": EXPERTS}
    sizes["num_hidden_layers"] = 2
    sizes = made.keywords | sizes | {"shared_expert_intermediate_size": 512}
    with mock.patch.dict(MIXTURES, {"wide": Variant(made.func, *made.args, **sizes)}):
        make_tiny("wide", folder)
    keys = {"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 512}
    keys["expert_used_count"] = EXPERTS
    write_gguf(folder, "qwen2moe", kinds=kinds, changed_keys=keys)


Written = Callable[[dict[str, str], Path], None]
NAMES: dict[Written, tuple[str, ...]] = {dense: ("",), mixture: ("_exps", "_shexp")}


def rounding_logits(path: Path, of: tuple[ModuleType, ...]) -> np.ndarray:
    """`reference_logits`, of vectors as rows of few bits take them: 8 bits, in groups of 32.

    `of` are the modules of the reference whose products have such rows.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if len(weight) > EXPERTS:  # no router
            groups = x.unflatten(-1, (-1, 32))
            scale = (groups.abs().amax(-1, keepdim=True).float() / 127).double()
            x = (torch.round(groups / scale.clamp(min=1e-30)) * scale).flatten(-2)
        return functional.linear(x, weight, bias)

    with ExitStack() as patched:
        # The FFN's own tensors, not what a row a neuron would make of them.
        patched.enter_context(mock.patch.object(reference, "_load_ffn", lambda *_: None))
        for module in of:
            patched.enter_context(
                mock.patch.object(module, "functional", SimpleNamespace(linear=linear))
            )
        return reference.reference_logits(path, IDS)


def require_good(
    path: Path, rounding: tuple[ModuleType, ...], num_services: int = 2, most: float = 0.1
) -> np.ndarray:
    """In steps of one and of five tokens, to the bit, and in a prompt of other kernels.

    most: as large a difference as may be, of tokens that a rounded number moves
    """
    options = SystemOptions(context_length=128, num_cpu_actors=num_services, kv_dtype="float32")
    system, config = prepare_system(path, options)
    wanted = rounding_logits(path, rounding)
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as running:
        one_by_one = running.logits("dense", IDS, (1,))
        assert np.array_equal(one_by_one, running.logits("dense", IDS, (5,)))
        prompt = running.logits("dense", IDS, (48,))
        assert not running.python_answers
    for found in (one_by_one, prompt):
        errors = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
        if Checkpoint(path).conversion_note(dict(config.mean_row_bytes)):
            assert np.quantile(errors, 0.85) < 0.03
        else:  # a number half a step from the reference's moves its token and some that follow
            assert errors.min() < 1e-5
            assert np.quantile(errors, 0.85) < 0.01
        assert errors.max() < most  # of other tokens it would be 1 or more
    return one_by_one


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("pair", "written"),
    list(zip(PAIRS, cycle([mixture, dense]))),
    ids=lambda one: "-".join(one) if isinstance(one, tuple) else one.__name__,
)
def test_two_formats(written: Written, pair: tuple[str, str], tmp_path: Path) -> None:
    """A mixture's shared experts have the formats the other way round."""
    written(kinds(pair, NAMES[written]), tmp_path)
    require_good(tmp_path / "m.gguf", () if set(pair) <= {*FLOATS} else (reference_experts,))


def test_formats_of_each_matrix(tmp_path: Path) -> None:
    """As in files that have more bits where these matter: memory and numbers are the file's."""
    path, parts = tmp_path / "m.gguf", ["attn_q.", "attn_k.", "attn_v.", "attn_output."]
    parts += [f"ffn_{part}." for part in ("gate", "up", "down")]
    names = [f"blk.{layer}.{part}" for part in parts for layer in (0, 1)]
    types = "Q4_K", "Q8_0", "Q6_K", "Q5_K", "Q4_0"  # as many bytes in memory
    dense({name: types[i % len(types)] for i, name in enumerate(names)}, tmp_path)
    one, two = (require_good(path, (reference, reference_experts), count) for count in (1, 2))
    assert np.array_equal(one, two)
    _, config = prepare_system(path, SystemOptions(context_length=128))
    stored = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    of_ffn = sum(stored[f"{name}weight"] for name in names if "ffn" in name)
    assert ffn_bytes(config, config.num_neurons) == of_ffn + 4 * config.num_neurons
    attention = load_attention(Checkpoint(path), config)
    of_attention = sum(stored[f"{name}weight"] for name in names if "attn" in name)
    assert attention.qkv.nbytes + attention.out.nbytes == of_attention
    assert attention_bytes(config) == sum(array.nbytes for array in vars(attention).values())
    assert not Checkpoint(path).conversion_note(dict(config.mean_row_bytes))


@pytest.mark.parametrize("variant", ["gpt-oss", "gpt-oss-plain"])
def test_experts_in_mxfp4(variant: str, tmp_path: Path) -> None:
    """As published, with the numbers that transformers makes of them, and in a GGUF file."""
    path, floats = make_mxfp4(tmp_path, variant), tmp_path / "floats"
    exact, files = reference.reference_logits(path, IDS), [path]
    assert reference.relative_difference(reference.reference_logits(floats, IDS), exact) < 1e-12
    if variant == "gpt-oss-plain":
        name, arch, pairs_rows, keys = FILES["gpt-oss"]
        keys = keys | {"expert_feed_forward_length": WIDE["intermediate_size"]}
        with mock.patch.dict(FILES, {"gpt-oss": (name, arch, pairs_rows, keys)}):
            write_gguf(floats, "gpt-oss", kinds={"exps.weight": "MXFP4"})
        files.append(floats / "m.gguf")
    for file in files:
        system, config = prepare_system(file, SystemOptions(context_length=128))
        assert system.down_transposed and config.dtype_of("qkv") == "float32"
        assert {config.dtype_of("gate"), config.dtype_of("down")} == {"mxfp4"}
        found = require_good(file, (reference_experts,), most=0.02)
        assert reference.relative_difference(found, exact) < 0.06


@pytest.mark.sweep(kind=["Q8_0"])
@pytest.mark.parametrize(("kind", "most"), [("F16", 1e-3), ("Q8_0", 0.03)])
def test_layers_own_embeddings(kind: str, most: float, tmp_path: Path) -> None:
    """Those of Gemma 4, and what matrices make of them; quantized ones round activations, too."""
    case = CASES["gemma4"]
    kinds = {
        "per_layer_token_embd": "Q5_1",
        "per_layer_model_proj": kind,
        "inp_gate": kind,
        ".proj": kind,
        "blk.0.attn_v": "F16",
        "ffn_": "F16",
    }
    model = Variant(case.variant, hidden_size=64)  # rows of whole blocks
    path = written(replace(case, model=model, kinds=kinds), "gemma4", tmp_path)
    ids = np.array(FEW_IDS[:11])
    expected = reference.reference_logits(path, ids)
    with InProcessSystem(path, num_services=2, num_threads=2) as system:
        for way in ([1], [4], [ids.size]):
            found = system.logits("dense", ids, way)
            assert reference.relative_difference(found, expected) < most
