"""GGUF files for tests: written byte by byte, so that any may be wrong, or from tiny models."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from hotcold.jobs.support.model_checks import check_files
from hotcold.model.gguf.tensor_types import TENSOR_TYPES
from hotcold.numba_kernels.formats import BLOCK_FORMATS
from tests.recurrent_files import recurrent_tensors

STRING, ARRAY, UINT32, INT32, FLOAT32, BOOL, UINT64 = 8, 9, 4, 5, 6, 7, 10
_KINDS = {str: STRING, bool: BOOL, int: UINT32, float: FLOAT32}
_LETTERS = {UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q", 0: "B", 12: "d"}


def string(text: str | bytes) -> bytes:
    """A string as a file has it."""
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def array(kind: int, items: Sequence[Any], count: int | None = None) -> bytes:
    """An array's bytes; `count` instead of the true number."""
    number = len(items) if count is None else count
    body = b"".join(
        string(i) if kind == STRING else struct.pack(f"<{_LETTERS[kind]}", i) for i in items
    )
    return struct.pack("<IQ", kind, number) + body


def scalar(kind: int, value: Any) -> bytes:
    """A value's bytes."""
    return string(value) if kind == STRING else struct.pack(f"<{_LETTERS[kind]}", value)


@dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor: sizes, the row's first."""

    name: str
    sizes: tuple[int, ...]
    type: int = 0
    offset: int = 0
    num_dimensions: int | None = None


@dataclass(frozen=True)
class Draft:
    """A file's parts; counts may be given otherwise than they are."""

    keys: tuple[tuple[str | bytes, int, bytes], ...] = ()
    tensors: tuple[Tensor, ...] = ()
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    num_keys: int | None = None
    num_tensors: int | None = None
    alignment: int = 32

    def pieces(self) -> list[bytes]:
        """The file, cut wherever its structure has a seam."""
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.keys) if self.num_keys is None else self.num_keys
        pieces = [self.magic, *(struct.pack("<I", self.version),)]
        pieces += [struct.pack("<Q", num_tensors), struct.pack("<Q", num_keys)]
        for name, kind, value in self.keys:
            pieces += [string(name)[:8], string(name)[8:], struct.pack("<I", kind)]
            pieces += [value[:4], value[4:12], value[12:]]
        for tensor in self.tensors:
            count = len(tensor.sizes) if tensor.num_dimensions is None else tensor.num_dimensions
            pieces += [string(tensor.name)[:8], string(tensor.name)[8:], struct.pack("<I", count)]
            pieces += [struct.pack("<Q", size) for size in tensor.sizes]
            pieces += [struct.pack("<I", tensor.type), struct.pack("<Q", tensor.offset)]
        header = sum(map(len, pieces))
        pieces += [bytes(-header % self.alignment), self.data]
        return [piece for piece in pieces if piece]

    def content(self) -> bytes:
        """The whole file."""
        return b"".join(self.pieces())

    def with_key(self, name: str | bytes, kind: int, value: Any) -> Draft:
        """With one more key; `value` may be its bytes."""
        content = value if isinstance(value, bytes) else scalar(kind, value)
        return replace(self, keys=(*self.keys, (name, kind, content)))

    def with_keys(self, **values: Any) -> Draft:
        """With these, __ for each dot: numbers are of 32 bits, lists are arrays."""
        found = self
        for name, value in values.items():
            is_list = isinstance(value, list)
            kind = _KINDS[type(value[0] if is_list else value)]
            if is_list:
                kind, value = ARRAY, array(INT32 if kind == UINT32 else kind, value)
            found = found.with_key(name.replace("__", "."), kind, value)
        return found

    def without_key(self, name: str) -> Draft:
        """Without a key."""
        return replace(self, keys=tuple(key for key in self.keys if key[0] != name))


def small_llama(tokens: int = 8, width: int = 32, heads: int = 2, layers: int = 1) -> Draft:
    """A whole model of float32 zeros and ones, small enough to be changed in any place."""
    draft = Draft().with_keys(
        general__architecture="llama",
        llama__block_count=layers,
        llama__context_length=64,
        llama__embedding_length=width,
        llama__feed_forward_length=width,
        llama__attention__head_count=heads,
        llama__attention__head_count_kv=heads,
        llama__attention__layer_norm_rms_epsilon=1e-5,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__tokens=["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"][:tokens],
        tokenizer__ggml__token_type=[2, 3, 3, 1, 1, 1, 1, 1][:tokens],
        tokenizer__ggml__scores=[-float(i) for i in range(tokens)],
    )
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd", (width, tokens)),
        ("output_norm", (width,)),
    ]
    for layer in range(layers):
        shapes += [(f"blk.{layer}.{name}", (width,)) for name in ("attn_norm", "ffn_norm")]
        matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        shapes += [(f"blk.{layer}.{name}", (width, width)) for name in matrices]
    tensors, offset = [], 0
    for name, sizes in shapes:
        tensors.append(Tensor(f"{name}.weight", sizes, 0, offset))
        offset += 4 * int(np.prod(sizes))
    return replace(draft, tensors=tuple(tensors), data=bytes(offset))


def quantized(values: np.ndarray, kind: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    """Rows as blocks of ggml's type `kind`: quantized where the gguf package can, else drawn.

    Drawn ones have the values' mean of about 0 and deviation, as weights have.
    """
    qtype = GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values.astype(np.float32), qtype), qtype
    except NotImplementedError:
        return _drawn(values, kind), qtype


def _drawn(values: np.ndarray, kind: str) -> np.ndarray:
    raw = random_blocks(values.shape, kind, zlib.crc32(values.tobytes()))
    blocks = raw.reshape(-1, block_size(kind)[1])
    if kind in _MINIMA:  # each group's number for its minimum is that for its scale
        if kind == "Q2_K":
            blocks[:, :16] = blocks[:, :16] % 16 * 17
        else:
            blocks[:, 8:12], blocks[:, 12:16] = blocks[:, 4:8], blocks[:, 12:16] % 16 * 17
        at, to = _scales_of(kind)
        _scale(blocks, at, to, _MINIMA[kind])
    factor = values.std() / dequantized(blocks, kind).std()
    for at in _scales_of(kind):
        _scale(blocks, at, at, factor)
    return raw


def _scale(blocks: np.ndarray, at: int, to: int, factor: float) -> None:
    """The blocks' float16 number at byte `to` is `factor` times that at byte `at`."""
    scales = blocks[:, at : at + 2].copy().view(np.float16) * np.float32(factor)
    blocks[:, to : to + 2] = scales.astype(np.float16).view(np.uint8)


def random_blocks(shape: tuple[int, ...], kind: str, seed: int = 0) -> np.ndarray:
    """Any blocks of a type, with float16 scales of about 1/1000."""
    weights, num_bytes = block_size(kind)
    rng = np.random.default_rng(seed)
    rows, blocks = int(np.prod(shape[:-1])), shape[-1] // weights
    raw = rng.integers(0, 256, (rows, blocks, num_bytes), dtype=np.uint8)
    for at in _scales_of(kind):
        scales = rng.uniform(0.0005, 0.002, (rows, blocks, 1)).astype(np.float16)
        raw[:, :, at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        raw[:, :, 0] = rng.integers(117, 120, (rows, blocks))
    if kind == "NVFP4":
        raw[:, :, :4] = rng.integers(1, 32, (rows, blocks, 4))
    if kind == "IQ1_M":  # a nibble each
        scales = rng.uniform(0.0005, 0.002, (rows, blocks, 1)).astype(np.float16)
        nibbles = scales.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16)
        raw[:, :, 49::2] = raw[:, :, 49::2] & 15 | (nibbles & 15) << 4
    return raw.reshape(*shape[:-1], blocks * num_bytes)


# All types of blocks that are read.
BLOCKS = [
    block for block in BLOCK_FORMATS.values() if TENSOR_TYPES[block.ggml_type].name == block.name
]


def block_size(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return _NEWER.get(kind) or gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def dequantized(raw: np.ndarray, kind: str) -> np.ndarray:
    """The values of blocks, by the gguf package but of types that are newer: ggml-quants.c."""
    if kind not in _NEWER:
        return gguf.quants.dequantize(raw, GGMLQuantizationType[kind])
    num_bytes = _NEWER[kind][1]
    blocks = raw.reshape(*raw.shape[:-1], -1, num_bytes)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little")
    codes = 2 * bits - 1.0 if kind == "Q1_0" else bits[..., ::2] + 2.0 * bits[..., 1::2] - 1
    values = scales * codes.astype(np.float32)
    return values.reshape(*raw.shape[:-1], -1)


def left_out(path: Path) -> list[str]:
    """What `hotcold doctor` says of a file's tensors and keys that are not read."""
    found = (one.text for one in check_files(path) if one.subject == "left out")
    return [text for text in found if "that are not read" in text]


# Of K-quants with minima: half of the largest code.
_MINIMA = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
_NEWER = {"Q1_0": (128, 18), "Q2_0": (64, 18)}
# Where a block has float16 numbers, if not at its beginning alone.
_SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "IQ1_M": (),  # in four parts
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),  # a power of two
    "NVFP4": (),  # E4M3
}


def _scales_of(kind: str) -> tuple[int, ...]:
    return _SCALES.get(kind, (0,))


@dataclass
class LlamaFile:
    """Writes a Hugging Face Llama's tensors as llama.cpp's converter does."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]  # by Hugging Face's names
    kinds: dict[str, str] = field(default_factory=dict)  # a part of a file's name -> ggml's type
    keys: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, np.ndarray] = field(default_factory=dict)  # tensors by the file's names
    arch: str = "llama"
    names_arch: str = ""  # whose names of tensors it has, where that is not `arch`
    pairs_rows: bool = True
    halves: int = 0  # rows of a head, in pairs of neighbours, that are written half of them apart
    adds_one: bool = False

    def write(self, path: Path, most: int = 0) -> dict[str, np.ndarray]:
        """Write the file; returns the values it holds, dequantized, by Hugging Face's names.

        most: write it in parts of so many tensors
        """
        writer = gguf.GGUFWriter(str(path), self.arch, split_max_tensors=most)
        self._add_keys(writer)
        held: dict[str, np.ndarray] = {}
        for name, values in self.tensors.items():
            converted = recurrent_tensors(self.config, self.arch, name, values)
            if converted is not None:
                for own, part in converted.items():
                    self._add(writer, own, part)
                continue
            target = _target(self.names_arch or self.arch, name)
            rows = self.in_file(name, values)
            if ".conv.conv." in name:  # (channels, 1, taps)
                rows = rows[:, 0]
            if self.adds_one and target.endswith("norm.weight"):
                rows = rows + 1
            stored = self._add(writer, target, rows)
            is_vector = values.ndim == 1
            held[name] = values.astype(np.float32) if is_vector else self._unpaired(name, stored)
        for name, values in self.extra.items():
            self._add(writer, name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return held

    def _add(self, writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> np.ndarray:
        """Write a tensor in its format; returns the values that the file then holds."""
        kind = next((k for part, k in self.kinds.items() if part in name), "F32")
        if values.ndim == 1 or kind in ("F32", "F16"):
            is_half = values.ndim > 1 and kind == "F16"
            stored = values.astype(np.float16 if is_half else np.float32)
            writer.add_tensor(name, stored)
            return stored.astype(np.float32)
        raw, qtype = quantized(values, kind)
        writer.add_tensor(name, raw, raw_dtype=qtype)
        return gguf.quants.dequantize(raw, qtype)

    def _add_keys(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        if "rms_norm_eps" in config:
            writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        for key, value in self.keys.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)

    def _heads(self, name: str) -> int:
        if "q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if "k_proj." in name else 0

    def in_file(self, name: str, values: np.ndarray) -> np.ndarray:
        """A tensor's rows in the file's order."""
        if self.halves and (heads := self._heads(name)):
            parts = values.reshape(heads, -1, *values.shape[1:]).copy()
            pairs = parts[:, : self.halves].copy()
            parts[:, : self.halves] = np.concatenate([pairs[:, ::2], pairs[:, 1::2]], axis=1)
            return parts.reshape(values.shape)
        return self._swapped(name, values, (2, -1))

    def _unpaired(self, name: str, values: np.ndarray) -> np.ndarray:
        return self._swapped(name, values, (-1, 2))

    def _swapped(self, name: str, values: np.ndarray, halves: tuple[int, int]) -> np.ndarray:
        heads = self._heads(name) if self.pairs_rows else 0
        if not heads:
            return values
        parts = values.reshape(heads, *halves, *values.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(values.shape)


@functools.cache
def _name_map(arch: str) -> gguf.TensorNameMap:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[arch], 8)


def _target(arch: str, name: str) -> str:
    name += ".weight" * name.endswith("layer_scalar")
    of_arch, suffixes = _name_map(arch), (".weight", ".bias")
    found = of_arch.get_name(name, suffixes)
    found = found or of_arch.get_name(name.replace("model.", "backbone."), suffixes)
    assert found is not None, name
    return found
