"""Gemma 4, whose layers are of two kinds, from prompts to the last token, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.errors import UsageError
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import batching
from tests.actors.in_process import InProcessSystem
from tests.actors.test_prefix_cache import answer
from tests.conftest import TinyCheckpoint
from tests.reference import reference_logits, relative_difference
from tests.tiny_models import VOCAB_SIZE, Variant
from tests.unit.test_gguf_architectures import CASES, IDS, written

Tiny = Callable[..., TinyCheckpoint]
_IDS = np.random.default_rng(21).integers(0, VOCAB_SIZE, 300).tolist()
# Of one token, within a step of kernels, and of chunks of 64: their ends are of any length.
_PROMPTS = [_IDS[:1], _IDS[:20], _IDS[3:67], _IDS[:145], _IDS]


def test_models_whose_layers_end_in_the_head_embed_no_texts(tiny: Tiny) -> None:
    request = GenerateRequest(SamplingParams(), prompt_ids=[1], wants_embedding=True)
    refused = pytest.raises(UsageError, match="computes no embeddings of texts")
    with batching(tiny("gemma4-e"), "dense") as (_, driver), refused:
        answer(driver, request)


@pytest.mark.sweep(kind=["Q8_0"])
@pytest.mark.parametrize(("kind", "most"), [("F16", 1e-3), ("Q8_0", 0.03)])
def test_files_in_several_formats(kind: str, most: float, tmp_path: Path) -> None:
    """`kind` of the matrices of layers' own embeddings; quantized ones round activations, too."""
    kinds = {
        "per_layer_token_embd": "Q5_1",
        "per_layer_model_proj": kind,
        "inp_gate": kind,
        ".proj": kind,
        "blk.0.attn_v": "F16",
        "ffn_": "F16",
    }
    case = CASES["gemma4"]
    model = Variant(case.variant, hidden_size=64)  # rows of whole blocks
    path = written(replace(case, model=model, kinds=kinds), "gemma4", tmp_path)
    ids = IDS[:11]
    expected = reference_logits(path, ids)
    with InProcessSystem(path, num_services=2, num_threads=2) as system:
        for way in ([1], [4], [len(ids)]):
            found = system.logits("dense", ids, way)
            assert relative_difference(found, expected) < most
