"""GGUF files that are damaged or hostile: each is refused in one line, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hotcold.actors.setup.preflight import read_model
from hotcold.model.errors import CheckpointError, ConfigError, HotcoldError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.text.bpe import CONTROL, NORMAL
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.numba_kernels.formats import BlockFormat
from tests.gguf_files import (
    ARRAY,
    BLOCKS,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    UINT64,
    Draft,
    Tensor,
    array,
    small_llama,
    string,
)
from tests.reference import reference_logits

pytestmark = pytest.mark.sweep(keep=40)

GOOD = small_llama()
WIDE = small_llama(width=256, heads=4)
MAX_BYTES = 24 << 20
HUGE = (1 << 64) - 1
TOKENS = "tokenizer.ggml.tokens"


def use(path: Path) -> Tokenizer | None:
    """All that a command does with a model before anything starts, and a prompt."""
    read_model(path)
    ModelIdentity.of(path)
    tokenizer = Tokenizer.from_model(path)
    if tokenizer is not None:
        tokenizer.encode("a b")
        if tokenizer.has_chat_template:
            tokenizer.render_chat([{"role": "user", "content": "a"}])
    return tokenizer


def truncated() -> Iterator[tuple[str, bytes]]:
    pieces, length = GOOD.pieces(), 0
    for piece in pieces:
        yield f"cut-at-{length}", GOOD.content()[:length]
        length += len(piece)
    yield "cut-in-data", GOOD.content()[:-1]
    yield "cut-in-magic", GOOD.content()[:2]


def header() -> Iterator[tuple[str, Draft]]:
    yield "magic", replace(GOOD, magic=b"GGUM")
    yield "magic-powerinfer", replace(GOOD, magic=b"PWRJ")
    for version in (0, 4, 0x03000000):
        yield f"version-{version:x}", replace(GOOD, version=version)
    for count in (1 << 20, 1 << 32, HUGE, len(GOOD.keys) + len(GOOD.tensors)):
        yield f"keys-{count:x}", replace(GOOD, num_keys=count)
        yield f"tensors-{count:x}", replace(GOOD, num_tensors=count)
    yield "fewer-keys", replace(GOOD, num_keys=len(GOOD.keys) - 1)
    yield "fewer-tensors", replace(GOOD, num_tensors=len(GOOD.tensors) - 1)
    yield "no-tensors", replace(GOOD, tensors=())
    yield "no-keys", replace(GOOD, keys=())


def keys() -> Iterator[tuple[str, Draft]]:
    yield "key-twice", GOOD.with_key("llama.block_count", UINT32, 1)
    yield "key-empty", GOOD.with_key("", UINT32, 1)
    yield "key-not-utf8", GOOD.with_key(b"\xff\xfe", UINT32, 1)
    for kind in (13, 0xFFFFFFFF):
        yield f"kind-{kind}", GOOD.with_key("x", kind, b"\0" * 8)
        items = struct.pack("<IQ", kind, 1) + b"\0" * 8
        yield f"array-of-kind-{kind}", GOOD.with_key("x", ARRAY, items)
    yield "bool-2", GOOD.with_key("x", BOOL, b"\2")
    for length in (1 << 20, 1 << 62, HUGE - 7):
        yield f"string-{length:x}", GOOD.with_key("x", STRING, struct.pack("<Q", length) + b"abc")
    yield "string-not-utf8", GOOD.with_key("x", STRING, string(b"\xff\xfe\x80"))
    for count in (1 << 20, 1 << 61, HUGE):
        for kind in (0, UINT64, STRING):
            yield f"array-{kind}-{count:x}", GOOD.with_key("x", ARRAY, array(kind, [], count))
    nested = struct.pack("<IQ", ARRAY, 1) * 30 + struct.pack("<IQ", UINT32, 0)
    yield "nested-arrays", GOOD.with_key("x", ARRAY, nested)
    bomb = struct.pack("<IQ", STRING, 3) + string("a") + struct.pack("<Q", HUGE - 15)
    yield "array-string-wraps", GOOD.with_key("x", ARRAY, bomb + b"\0" * 64)
    for value in (0, 33, 1 << 21):
        yield f"alignment-{value}", GOOD.with_key("general.alignment", UINT32, value)
    yield "alignment-text", GOOD.with_key("general.alignment", STRING, "32")
    yield "alignment-array", GOOD.with_key("general.alignment", ARRAY, array(UINT32, [32]))


def tensors() -> Iterator[tuple[str, Draft]]:
    first, *rest = GOOD.tensors

    def changed(**values: object) -> Draft:
        return replace(GOOD, tensors=(replace(first, **values), *rest))  # type: ignore[arg-type]

    for sizes in (
        (1 << 63, 2), (1 << 31, 1 << 33, 1, 1), (HUGE, HUGE, HUGE, HUGE),
        (32, 0), (HUGE,), (1 << 41, 1), ((1 << 64) // 4, 1),
    ):  # fmt: skip
        yield f"sizes-{sizes}", changed(sizes=sizes)
    for count in (0, 5, 0xFFFFFFFF):
        yield f"dimensions-{count}", changed(num_dimensions=count)
    for kind in (4, 31, 36, 43, 0xFFFFFFFF):
        yield f"type-{kind}", changed(type=kind)
    for kind in (15, 24):
        yield f"unread-type-{kind}", changed(type=kind, sizes=(256, 1))
    yield "no-whole-blocks", changed(type=12, sizes=(32, 8))
    size = len(GOOD.data)
    for offset in (1, size, size - 32, 1 << 40, HUGE - 31):
        yield f"offset-{offset:x}", changed(offset=offset)
    yield "overlap", changed(offset=rest[0].offset)
    *others, end = GOOD.tensors
    moved = replace(end, offset=end.offset + 1)  # to a place of its own
    yield "unaligned", replace(GOOD, tensors=(*others, moved), data=GOOD.data + bytes(32))
    yield "tensor-twice", replace(GOOD, tensors=(first, *GOOD.tensors))
    yield "tensor-unnamed", changed(name="")
    yield "tensor-long-name", changed(name="x" * 5000)
    last = GOOD.tensors[-1].offset + 4 * 32 * 32
    extra = Tensor("blk.0.attn_sinks.weight", (2,), 0, last)
    more = replace(GOOD, tensors=(*GOOD.tensors, extra), data=GOOD.data + bytes(8))
    yield "tensor-without-place", more
    yield "tensor-missing", replace(GOOD, tensors=GOOD.tensors[:-1])
    yield "shape-transposed", changed(sizes=(8, 32))


def blocks() -> Iterator[tuple[str, Draft]]:
    """Of every type of blocks: no whole ones, too few of them, one in another's place."""
    first, *rest = WIDE.tensors

    def changed(data: bytes = WIDE.data, **values: object) -> Draft:
        tensors = replace(first, **values), *rest  # type: ignore[arg-type]
        return replace(WIDE, tensors=tensors, data=data)

    for block in BLOCKS:
        name, kind, weights = block.name, block.ggml_type, block.weights
        for width in (1, weights - 1, weights + 1, 256 + weights // 2):
            yield f"{name}-width-{width}", changed(type=kind, sizes=(width, 8))
        rows = 1 + len(WIDE.data) * weights // (block.num_bytes * 256)
        yield f"{name}-rows", changed(type=kind, sizes=(256, rows))
        size = -(-256 // weights) * block.num_bytes * 8
        at = -(-len(WIDE.data) // 32) * 32
        begun = WIDE.data + bytes(at - len(WIDE.data) + size - 1)
        yield f"{name}-cut", changed(begun, type=kind, offset=at)
        yield f"{name}-overlap", changed(type=kind, offset=rest[0].offset)
        yield f"{name}-unaligned", changed(type=kind, offset=block.num_bytes)


def changed_key(name: str, kind: int, value: object) -> Draft:
    return GOOD.without_key(name).with_key(name, kind, value)


def model() -> Iterator[tuple[str, Draft]]:
    for full_name, kind, _ in GOOD.keys:
        name = str(full_name)
        if name.startswith(("general.", "llama.")) and "kv" not in name:
            yield f"without-{name}", GOOD.without_key(name)
        if kind == UINT32 and name.startswith("llama."):
            yield f"text-{name}", changed_key(name, STRING, "many")
            yield f"zero-{name}", changed_key(name, UINT32, 0)
            yield f"huge-{name}", changed_key(name, UINT32, 0xFFFFFFFF)
    for name in ("unknown", "", "clip", "llama4"):
        yield f"architecture-{name}", changed_key("general.architecture", STRING, name)
    yield "architecture-number", changed_key("general.architecture", UINT32, 3)
    yield "epsilon", changed_key("llama.attention.layer_norm_rms_epsilon", FLOAT32, float("nan"))
    yield "rope-scaling", GOOD.with_key("llama.rope.scaling.type", STRING, "dynamite")
    yield "rope-part", GOOD.with_key("llama.rope.dimension_count", UINT32, 3)
    yield "experts", GOOD.with_key("llama.expert_count", UINT32, 8)
    yield "heads-of-layers", changed_key("llama.attention.head_count", ARRAY, array(UINT32, [2, 4]))
    yield "values-width", GOOD.with_key("llama.attention.value_length", UINT32, 8)
    for count, number in ((2, 0), (2, 1), (0xFFFF, 0)):
        split = GOOD.with_key("split.count", UINT32, count)
        yield f"split-{number}-of-{count}", split.with_key("split.no", UINT32, number)
    yield "split-text", GOOD.with_key("split.count", STRING, "two")
    yield "split-tensors", GOOD.with_key("split.tensors.count", INT32, 99)


def long_tokens(draft: Draft, kind: int) -> Draft:
    """With some tokens that are so long that seconds go by for each where their square counts."""
    tokens = ["<unk>", "<s>", "</s>", "a", *(f"{place}{'a' * 80_000}" for place in range(4))]
    values = {"tokens": array(STRING, tokens), "token_type": array(INT32, [kind] * len(tokens))}
    values["scores"] = array(FLOAT32, [0.0] * len(tokens))
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        draft = draft.without_key(key).with_key(key, ARRAY, value)
    return draft


def vocabulary() -> Iterator[tuple[str, Draft]]:
    for name in ("bert", "rwkv", "t5", "plamo2"):
        yield f"tokenizer-{name}", changed_key("tokenizer.ggml.model", STRING, name)
    yield "tokens-numbers", changed_key(TOKENS, ARRAY, array(UINT32, [1, 2]))
    yield "tokens-one", changed_key(TOKENS, STRING, "all")
    yield "tokens-not-utf8", changed_key(TOKENS, ARRAY, array(STRING, [b"\xff"]))
    yield "types-short", changed_key("tokenizer.ggml.token_type", ARRAY, array(INT32, [1]))
    yield "types-texts", changed_key("tokenizer.ggml.token_type", ARRAY, array(STRING, ["a"]))
    yield "scores-short", changed_key("tokenizer.ggml.scores", ARRAY, array(FLOAT32, [1.0]))
    yield "bos-outside", changed_key("tokenizer.ggml.bos_token_id", UINT32, 99)
    yield "eos-outside", changed_key("tokenizer.ggml.eos_token_id", UINT32, 0xFFFFFFF0)
    yield "eos-text", changed_key("tokenizer.ggml.eos_token_id", STRING, "</s>")
    bytes_model = changed_key("tokenizer.ggml.model", STRING, "gpt2")
    for model_label, draft in (("pieces", GOOD), ("bytes", bytes_model)):
        for kind in (NORMAL, CONTROL):
            yield f"tokens-long-{model_label}-{kind}", long_tokens(draft, kind)
    yield "pre-unknown", bytes_model.with_key("tokenizer.ggml.pre", STRING, "mystery")
    for label, merges in (("one", ["a"]), ("none", [""]), ("unknown", ["q z"]), ("end", ["a "])):
        items = array(STRING, merges)
        yield f"merge-{label}", bytes_model.with_key("tokenizer.ggml.merges", ARRAY, items)
        pieces = changed_key("tokenizer.ggml.model", STRING, "gemma4")
        yield f"merge-{label}-gemma4", pieces.with_key("tokenizer.ggml.merges", ARRAY, items)
    suppressed = "tokenizer.ggml.suppress_tokens"
    yield "suppressed-text", changed_key(suppressed, ARRAY, array(STRING, ["a"]))
    yield "suppressed-one", changed_key(suppressed, UINT32, 1)
    for label, text in (
        ("syntax", "{% for %}"),
        ("loop", "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3),
        ("range", "{% for a in range(999999999) %}x{% endfor %}"),
        ("recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        ("text", "{% set ns = namespace(t='x') %}{% for a in range(99) %}"
                 "{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}"),
        ("reach", "{{ ().__class__.__base__.__subclasses__() }}"),
    ):  # fmt: skip
        yield f"template-{label}", GOOD.with_key("tokenizer.chat_template", STRING, text)
    yield "template-number", GOOD.with_key("tokenizer.chat_template", UINT32, 1)


def every() -> dict[str, bytes]:
    found = dict(truncated())
    for draft in (header, keys, tensors, blocks, model, vocabulary):
        found |= {label: made.content() for label, made in draft()}
    return found


HOSTILE = every()


def test_the_model_they_are_made_of_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.touch()
    with pytest.raises(CheckpointError, match="the file is empty; download it again"):
        use(path)
    path.write_bytes(GOOD.content())
    tokenizer = use(path)
    assert tokenizer is not None
    assert tokenizer.encode("ab a") == [1, 6, 5, 6]


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_scales_that_are_not_finite(block: BlockFormat, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    for number, name in enumerate(("ffn_gate", "ffn_down", "attn_output", "token_embd")):
        others = [each for each in WIDE.tensors if f"{name}." not in each.name]
        (tensor,) = set(WIDE.tensors) - set(others)
        width, rows = tensor.sizes
        size = width // block.weights * block.num_bytes * rows
        stored = replace(tensor, type=block.ggml_type, offset=len(WIDE.data))
        bad = bytes(size - block.num_bytes) + b"\xff" * block.num_bytes
        for data in (bytes(size), *([] if block.name == "NVFP4" else [bad])):
            draft = replace(WIDE, tensors=(*others, stored), data=WIDE.data + data)
            path.write_bytes(draft.content())
            use(path)
            if not any(data):
                reference_logits(path, [1, number])
                continue
            with pytest.raises(CheckpointError, match=r"hostile.gguf.* NaN or infinite") as refused:
                reference_logits(path, [1, number])
            assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("label", HOSTILE)
def test_is_refused(label: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[label])
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointError, ConfigError)) as refused:
            use(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    text = str(refused.value)
    assert isinstance(refused.value, HotcoldError)
    assert "hostile.gguf" in text and text.isprintable() and len(text) < 600
    assert most < MAX_BYTES
