"""Quantization methods of safetensors files: which tensors are a matrix together, and how.

`METHODS` is the table: for each `quant_method` of config.json the rules by which tensors of a
module become one of rows. A rule finds them by names and formats, so modules that are not quantized
are as in any model, and files with several kinds of them need nothing more.

Sources: transformers' integrations and quantizers; what AutoGPTQ, AutoAWQ, bitsandbytes,
compressed-tensors and TensorRT Model Optimizer write
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hotcold.model.config.json_reader import parse_json
from hotcold.model.config.quantization import PackedMethod
from hotcold.model.errors import CheckpointError, shown
from hotcold.model.files.packed_rows import (
    BYTE_TABLES,
    E2M1_TABLE,
    E2M1Rows,
    Grid,
    Numbers,
    PackedRows,
    grid,
    holder,
    nibbles,
    numbers_along_rows,
    run_of,
    unit_of,
    unpacked,
)
from hotcold.model.files.safetensors_file import (
    BIT_DTYPES,
    SafetensorsFile,
    TensorEntry,
)
from hotcold.numba_kernels.formats import (
    INT8,
    NF4,
    NF4_NUMBERS,
    NF4_VALUES,
    NVFP4,
    QUANT_GROUP,
    ROW_FORMATS,
    VALUES,
    block_dtype,
)
from hotcold.numba_kernels.load.stored_rows import RowSource

_ITEMS = {
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "BF16": np.uint16,
} | dict.fromkeys(("U8", *BYTE_TABLES), np.uint8)
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places of eight rows in a word
_PACKED_BITS = {2, 4, 8}  # which divide words
_MAX_STATE_BYTES = 1 << 16


class Parts:
    """The tensors of a module that make up one matrix, by the ends of their names."""

    def __init__(
        self, method: PackedMethod, name: str, found: dict[str, tuple[SafetensorsFile, str]]
    ):
        self.method, self.name, self.found = method, name, found

    def has(self, end: str) -> bool:
        """Whether the tensor is there."""
        return end in self.found

    def entry(self, end: str) -> TensorEntry:
        """Return where it is."""
        file, name = self.found[end]
        return file.entries[name]

    def format_name(self, end: str) -> str:
        """Return its format, as safetensors names it."""
        return self.entry(end).format_name

    def matrix(self, end: str) -> tuple[int, int]:
        """Return the shape of a tensor of two dimensions. Errors: CheckpointError for another."""
        shape = self.entry(end).shape
        if len(shape) != 2 or not all(shape):
            raise self.fail(end, "is no matrix")
        return shape[0], shape[1]

    def items(self, end: str) -> np.ndarray:
        """Return a view of the tensor, maybe unaligned; BF16 as uint16 bits, FP8 as bytes."""
        file, name = self.found[end]
        entry = file.entries[name]
        kind = _ITEMS.get(entry.format_name)
        if kind is None:
            raise self.fail(end, "is of no format that it can have")
        return file.stored_bytes(name).view(kind).reshape(entry.shape)

    def floats(self, end: str) -> np.ndarray:
        """Return the numbers as float32."""
        items, kind = self.items(end), self.format_name(end)
        if kind in BYTE_TABLES:
            return BYTE_TABLES[kind][items]
        if kind not in BIT_DTYPES:
            raise self.fail(end, "is to have numbers with a point")
        if kind == "BF16":
            return (items.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return items.astype(np.float32)

    def require(self, end: str, shape: tuple[int, ...], *kinds: str) -> None:
        """Raise CheckpointError unless the tensor has this shape, and one of these formats."""
        if self.entry(end).shape != shape:
            raise self.fail(end, f"is to have shape {list(shape)}")
        if kinds and self.format_name(end) not in kinds:
            raise self.fail(end, f"is to be {' or '.join(kinds)}")

    def fail(self, end: str, problem: str) -> CheckpointError:
        """Return the error that a tensor has `problem`."""
        file, name = self.found[end]
        entry = file.entries[name]
        return CheckpointError(
            f"{file.path}: tensor {shown(name)} of {self.method.name}, {entry.format_name} "
            f"{shown(list(entry.shape))}, {problem}; download it again"
        )


class Matrix(NamedTuple):
    """Rows that parts are read as: what the files say they hold, and blocks that hold it."""

    format_name: str
    dtype: np.dtype  # of BLOCK_FORMATS
    shape: tuple[int, ...]  # in weights; more dimensions than two are of stacked matrices
    source: Callable[[], RowSource]  # of all matrices' rows
    scales: str = ""  # the end of their name, where rows round them to float16
    held: np.dtype | None = None  # of rows, where it isn't what blocks are loaded as


class Rule(NamedTuple):
    """Tensors that belong together: one that ends in `main`, in one of `formats`, and others.

    Where a name's end is "" the others tell it from tensors that stand alone.
    """

    main: str
    formats: tuple[str, ...]
    needs: tuple[str, ...]
    read: Callable[[Parts], Matrix]
    name: str = ""  # how the matrix's name ends, instead
    takes: tuple[str, ...] = ()  # other tensors, that need not be there


def _block(parts: Parts, end: str, size: int, count: int, stated: Any = None) -> int:
    """How many rows, or columns, of `size` have each of `count` scales."""
    if type(stated) is int and stated > 0 and -(-size // stated) == count:
        return stated
    if count < 1 or size % count:
        raise parts.fail(end, f"has {count} scales for {size} weights")
    return size // count


def _integers(
    parts: Parts,
    name: str,
    shape: tuple[int, int],
    limits: tuple[int, int],
    group: int,
    numbers: Numbers,
    end: str,
    scales: Callable[[], np.ndarray],
    zeros: Grid | None = None,
    columns: np.ndarray | None = None,
) -> Matrix:
    """A matrix of integers within `limits` once zeros are off, a scale for each `group` columns.

    Shapes:  scales (R, groups); columns (C,): the group of each, where they have no order
    """
    unit = unit_of(group, shape[1]) if columns is None else 1
    dtype = holder(*limits, unit)
    groups = np.arange(shape[1]) // group if columns is None else columns

    def make() -> RowSource:
        of_group = grid(scales, 1, 1)
        of_columns: Grid = lambda ids, firsts: of_group(ids, groups[firsts])  # noqa: E731
        return PackedRows(dtype, shape, unit, numbers, of_columns, zeros and zeros_of_columns)

    def zeros_of_columns(ids: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        assert zeros is not None
        return zeros(ids, groups[firsts])

    rounds = dtype != VALUES and parts.format_name(end) == "F32"
    return Matrix(name, dtype, shape, make, end if rounds else "")


def _order(parts: Parts, end: str, width: int, groups: int, group: int) -> np.ndarray | None:
    """The group of each column, None where each group's follow each other."""
    parts.require(end, (width,), "I32")
    found = parts.items(end)
    if (found == np.arange(width) // group).all() or (found == -1).all():
        return None
    if found.min() < 0 or found.max() >= groups:
        raise parts.fail(end, f"is to have numbers from 0 to {groups - 1}")
    return found.astype(np.int64)


def _gptq(parts: Parts) -> Matrix:
    """Integers packed along columns, 32 / bits a word: (C, R); zeros along rows; less one in v1."""
    values, is_symmetric = parts.method.values, parts.method.values.get("sym") is True
    words, rows = parts.matrix(".qweight")
    bits = values["bits"]
    if values.get("dynamic") and parts.has(".g_idx"):  # modules of other bits
        bits = 32 * words // max(1, math.prod(parts.entry(".g_idx").shape))
        if bits not in _PACKED_BITS:
            raise parts.fail(".g_idx", f"is of {bits} bits a weight")
    per_word, half = 32 // bits, 1 << (bits - 1)
    groups = parts.matrix(".scales")[0]
    width = words * per_word
    group = _block(parts, ".scales", width, groups, values.get("group_size"))
    parts.require(".scales", (groups, rows), *BIT_DTYPES)
    parts.require(".qzeros", (groups, -(-rows // per_word)), "I32")
    columns = None
    if values.get("desc_act") and parts.has(".g_idx"):
        columns = _order(parts, ".g_idx", width, groups, group)
    less = 0 if values.get("checkpoint_format") == "gptq_v2" else 1

    def numbers(ids: np.ndarray, first: int, last: int) -> np.ndarray:
        packed = parts.items(".qweight")[first // per_word : -(-last // per_word), run_of(ids)]
        skipped = first % per_word
        return unpacked(packed.T, bits)[:, skipped : skipped + last - first]

    def zeros(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
        order = tuple(range(per_word))
        found = numbers_along_rows(parts.items(".qzeros"), of, ids, bits, order) + less
        if is_symmetric and (found != half).any():
            raise parts.fail(".qzeros", f"has others than {half}, which config.json's sym excludes")
        return found

    limits = (-half, half - 1) if is_symmetric else (-2 * half, 2 * half - 1)
    scales = lambda: parts.floats(".scales").T  # noqa: E731
    name = f"GPTQ{bits}"
    return _integers(
        parts, name, (rows, width), limits, group, numbers, ".scales", scales, zeros, columns
    )


def _awq(parts: Parts) -> Matrix:
    """Nibbles packed along rows, in an order of their own, of AutoAWQ's gemm: (C, R / 8)."""
    width, words = parts.matrix(".qweight")
    rows, groups = 8 * words, parts.matrix(".scales")[0]
    group = _block(parts, ".scales", width, groups, parts.method.values.get("group_size"))
    parts.require(".scales", (groups, rows), *BIT_DTYPES)
    parts.require(".qzeros", (groups, words), "I32")

    def numbers(ids: np.ndarray, first: int, last: int) -> np.ndarray:
        return numbers_along_rows(parts.items(".qweight"), slice(first, last), ids, 4, _AWQ_ORDER)

    def zeros(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
        return numbers_along_rows(parts.items(".qzeros"), of, ids, 4, _AWQ_ORDER)

    scales = lambda: parts.floats(".scales").T  # noqa: E731
    return _integers(
        parts, "AWQ4", (rows, width), (-15, 15), group, numbers, ".scales", scales, zeros
    )


def _packed_integers(parts: Parts) -> Matrix:
    """Integers packed along rows' columns, zeros along rows, both with 2 ^ (bits - 1) added."""
    rows, words = parts.matrix("_packed")
    bits = _bits(parts, words)
    per_word, half = 32 // bits, 1 << (bits - 1)
    width = words * per_word
    groups = parts.matrix("_scale")[1]
    parts.require("_scale", (rows, groups), *BIT_DTYPES)
    group = _block(parts, "_scale", width, groups)
    columns = _order(parts, "_g_idx", width, groups, group) if parts.has("_g_idx") else None

    def numbers(ids: np.ndarray, first: int, last: int) -> np.ndarray:
        packed = parts.items("_packed")[run_of(ids), first // per_word : -(-last // per_word)]
        skipped = first % per_word
        return unpacked(packed, bits)[:, skipped : skipped + last - first]

    zeros: Grid = lambda ids, of: np.full((1, 1), half)  # noqa: E731
    limits = -half, half - 1
    if parts.has("_zero_point"):
        parts.require("_zero_point", (-(-rows // per_word), groups), "I32")
        order, limits = tuple(range(per_word)), (1 - 2 * half, 2 * half - 1)

        def zeros(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
            return numbers_along_rows(parts.items("_zero_point").T, of, ids, bits, order)

    scales = partial(parts.floats, "_scale")
    return _integers(
        parts, f"INT{bits}", (rows, width), limits, group, numbers, "_scale", scales, zeros, columns
    )


def _bits(parts: Parts, words: int) -> int:
    """The bits of a packed number: config.json's, or where modules differ those of its shape."""
    stated = {bits for bits in parts.method.values_of_groups("num_bits") if type(bits) is int}
    known = sorted(stated & _PACKED_BITS)
    if len(known) == len(stated) == 1:
        return int(known[0])
    if not parts.has("_shape"):
        raise parts.fail("_packed", "has no weight_shape beside it")
    parts.require("_shape", (2,), "I64", "I32")
    width = int(parts.items("_shape")[1])
    for bits in known:
        if -(-width // (32 // bits)) == words:
            return int(bits)
    raise CheckpointError(
        f"{parts.found['_packed'][0].path}: tensor {shown(parts.found['_packed'][1])} has "
        f"{32 * words / width if width else 0:.3g} bits a weight, and 2, 4 and 8 are read; use the "
        "model that is not quantized"
    )


def _bytes(parts: Parts) -> Matrix:
    """Numbers of 8 bits with scales for blocks of rows and columns: int8, or FP8."""
    end = "_scale_inv" if parts.has("_scale_inv") else "_scale"
    entry = parts.entry("")
    if len(entry.shape) < 2 or not all(entry.shape):
        raise parts.fail("", "is no matrix")
    *stack, rows, width = entry.shape
    count = math.prod(stack)
    found = parts.entry(end).shape
    if stack and math.prod(found) == count:  # one a matrix
        found = (*stack, 1, 1)
    elif len(found) < 2:  # one for all, or one a row
        found = (*(1 for _ in stack), math.prod(found), 1)
    if len(found) != len(entry.shape) or math.prod(found[:-2]) not in (1, count):
        raise parts.fail(end, f"does not suit {shown(list(entry.shape))}")
    stated = parts.method.values.get("weight_block_size")
    sides = stated if isinstance(stated, list) and len(stated) == 2 else [128, 128]
    of_rows = _block(parts, end, rows, found[-2], sides[0])
    of_columns = _block(parts, end, width, found[-1], sides[1])
    is_float, is_one = entry.format_name in _FLOAT8, math.prod(found[:-2]) == 1
    joined = count * rows, width

    def scales() -> Grid:
        kept = parts.floats(end).reshape(-1, found[-1])

        def of_matrix(ids: np.ndarray, firsts: np.ndarray) -> np.ndarray:
            matrix, row = np.divmod(ids, rows)
            at = row // of_rows + (0 if is_one else matrix * found[-2])
            return kept[at[:, None], firsts[None] // of_columns]

        return of_matrix

    def numbers(ids: np.ndarray, first: int, last: int) -> np.ndarray:
        taken = parts.items("").reshape(joined)[run_of(ids), first:last]
        return BYTE_TABLES[entry.format_name][taken] if is_float else taken

    zeros: Grid | None = None
    if parts.has("_zero_point"):
        parts.require("_zero_point", parts.entry(end).shape, "I8")
        kept = parts.items("_zero_point").reshape(found[-2:])
        zeros = lambda ids, firsts: kept[ids[:, None] // of_rows, firsts[None] // of_columns]  # noqa: E731
    unit = unit_of(of_columns, width)
    dtype = VALUES if is_float or zeros else holder(-128, 127, unit)
    rounds = dtype == INT8 and parts.format_name(end) == "F32"
    return Matrix(
        "FP8" if is_float else "INT8",
        dtype,
        entry.shape,
        lambda: PackedRows(dtype, joined, unit, numbers, scales(), zeros),
        end if rounds else "",
    )


def _e2m1(main: str, of_all: str, divides: bool) -> Callable[[Parts], Matrix]:
    """NVFP4: pairs of E2M1, the low one first, FP8 scales for 16, and a float32 for all of them."""

    def read(parts: Parts) -> Matrix:
        rows, pairs = parts.matrix(main)
        width = 2 * pairs
        parts.require("_scale", (rows, -(-width // 16)), "F8_E4M3")
        if math.prod(parts.entry(of_all).shape) != 1 or width % 16:
            raise parts.fail(of_all, f"is to be one number, and {width} a multiple of 16")

        def scales() -> np.ndarray:
            factor = parts.floats(of_all).reshape(())
            own = parts.floats("_scale")
            with np.errstate(divide="ignore", invalid="ignore"):
                return own / factor if divides else own * factor

        def codes(ids: np.ndarray, first: int, last: int) -> np.ndarray:
            return nibbles(parts.items(main)[run_of(ids), first // 2 : last // 2])

        def scale_bytes(ids: np.ndarray, first: int, last: int) -> np.ndarray:
            own = parts.items("_scale")[run_of(ids), first // 16 : last // 16]
            if (own & 0x80).any():
                raise parts.fail("_scale", "is to have numbers above zero")
            return own

        def factor() -> np.float32:
            of_each = parts.floats(of_all).reshape(())[()]
            with np.errstate(divide="ignore"):
                return np.float32(np.float32(1) / of_each if divides else of_each)

        def make() -> RowSource:
            shape = rows, width
            numbers = lambda *place: E2M1_TABLE[codes(*place)]  # noqa: E731
            held = E2M1Rows(shape, codes, scale_bytes, factor)
            return PackedRows(VALUES, shape, 16, numbers, grid(scales, 1, 16), None, held)

        held = None if width % ROW_FORMATS[NVFP4].block_weights else NVFP4
        return Matrix("NVFP4", VALUES, (rows, width), make, held=held)

    return read


def _mxfp4(main: str, scales: str) -> Callable[[Parts], Matrix]:
    """MXFP4: pairs of E2M1, the low one first, and an exponent for 32, of one matrix or more."""

    def read(parts: Parts) -> Matrix:
        *matrices, groups = shape = parts.entry(scales).shape
        values = parts.entry(main).shape
        if values not in ((*shape, 16), (*matrices, 16 * groups)) or len(shape) < 2:
            raise parts.fail(main, f"does not belong beside scales of shape {shown(list(shape))}")
        parts.require(scales, shape, "U8", "F8_E8M0")

        def make() -> RowSource:
            # Numba takes a second to import, and commands' help needs no arrays.
            from hotcold.numba_kernels.load.blocks import PairedBlocks

            pairs = parts.items(main).reshape(-1, groups, 16)
            return PairedBlocks(pairs, parts.items(scales).reshape(-1, groups))

        return Matrix("MXFP4", block_dtype("MXFP4"), (*matrices, groups * QUANT_GROUP), make)

    return read


class _State(NamedTuple):
    """A matrix of bitsandbytes: how many weights have a number, how many of these another."""

    rows: int
    width: int
    size: int
    step: int
    offset: float


def _state(parts: Parts, end: str) -> _State:
    raw = parts.items(end).reshape(-1)
    if raw.size > _MAX_STATE_BYTES:
        raise parts.fail(end, "is too large")
    state = parse_json(raw.tobytes(), str(parts.found[end][0].path), CheckpointError)
    if not isinstance(state, dict):
        raise parts.fail(end, "is no JSON object")
    shape, own = state.get("shape"), (state.get("blocksize"), state.get("nested_blocksize", 1))
    sizes: list[Any] = [*shape, *own] if isinstance(shape, list) else []
    offset = state.get("nested_offset", 0.0)
    are_sizes = all(type(n) is int and 0 < n < 1 << 31 for n in sizes)
    if len(sizes) != 4 or not are_sizes or not isinstance(offset, int | float):
        raise parts.fail(end, f"is to have shape and blocksize, and has {shown(state, 60)}")
    rows, width, size, step = sizes
    return _State(rows, width, size, step, offset)


def _bits_and_bytes_4(parts: Parts) -> Matrix:
    """Numbers of values in a table, the high nibble first, whose blocks run on through the rows."""
    state_end = next(end for end in _STATES if parts.has(end))
    rows, width, size, step, offset = _state(parts, state_end)
    main = parts.entry("")
    if 2 * (main.end - main.start) != rows * width or width % 2:
        raise parts.fail("", f"is to have {rows * width} weights")
    parts.require(".quant_map", (16,), "F32")
    num_blocks = -(-rows * width // size)
    parts.require(".absmax", (num_blocks,), "U8", "F32")
    is_nested = parts.format_name(".absmax") == "U8"
    if is_nested:
        for end, length in ((".nested_absmax", -(-num_blocks // step)), (".nested_quant_map", 256)):
            if not parts.has(end):
                raise parts.fail(".absmax", f"lacks its {end[1:]}")
            parts.require(end, (length,), "F32")

    def largest() -> np.ndarray:
        if not is_nested:
            return parts.floats(".absmax")
        own = parts.floats(".nested_quant_map")[parts.items(".absmax")]
        own *= parts.floats(".nested_absmax")[np.arange(num_blocks) // step]
        return own + np.float32(offset)

    def codes(ids: np.ndarray, first: int, last: int) -> np.ndarray:
        packed = parts.found[""][0].stored_bytes(parts.found[""][1]).reshape(rows, width // 2)
        return nibbles(packed[run_of(ids), first // 2 : last // 2], high_first=True)

    def numbers(ids: np.ndarray, first: int, last: int) -> np.ndarray:
        return parts.floats(".quant_map")[codes(ids, first, last)]

    def scales() -> Grid:
        kept = largest()
        return lambda ids, firsts: kept[(ids[:, None] * width + firsts) // size]

    unit = unit_of(size, width)
    is_nf4 = (np.rint(127 * parts.floats(".quant_map")) == NF4_VALUES).all()

    def make() -> RowSource:
        own, shape = scales(), (rows, width)
        units: Grid = lambda ids, firsts: own(ids, firsts) * np.float32(1 / 127)  # noqa: E731
        of_numbers = PackedRows(NF4_NUMBERS, shape, unit, codes, units) if held else None
        return PackedRows(VALUES, shape, unit, numbers, own, None, of_numbers)

    held = NF4 if is_nf4 and unit == QUANT_GROUP else None
    return Matrix(state_end[-3:].upper(), VALUES, (rows, width), make, held=held)


_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")


def _bits_and_bytes_8(parts: Parts) -> Matrix:
    """int8, and 127 times each row's scale."""
    rows, width = parts.matrix(".weight")
    parts.require(".SCB", (rows,), "F32")

    def scales() -> np.ndarray:
        return parts.floats(".SCB")[:, None] * np.float32(1 / 127)

    def numbers(ids: np.ndarray, first: int, last: int) -> np.ndarray:
        return parts.items(".weight")[run_of(ids), first:last]

    return _integers(parts, "INT8", (rows, width), (-128, 127), width, numbers, ".SCB", scales)


_GPTQ = Rule(".qweight", ("I32",), (".qzeros", ".scales"), _gptq, ".weight", (".g_idx", ".bias"))
_SCALED = Rule("", ("I8", *_FLOAT8), ("_scale",), _bytes, "", ("_zero_point",))
_INVERSE = Rule("", _FLOAT8, ("_scale_inv",), _bytes)
METHODS: dict[str, tuple[Rule, ...]] = {
    "awq": (Rule(".qweight", ("I32",), (".qzeros", ".scales"), _awq, ".weight"),),
    "bitsandbytes": (
        *(
            Rule("", ("U8", *BIT_DTYPES), (".absmax", ".quant_map", state), _bits_and_bytes_4, "",
                 (".nested_absmax", ".nested_quant_map"))
            for state in _STATES
        ),
        Rule(".weight", ("I8",), (".SCB",), _bits_and_bytes_8, ".weight", (".weight_format",)),
    ),
    "compressed-tensors": (
        Rule("_packed", ("I32",), ("_scale",), _packed_integers, "",
             ("_shape", "_zero_point", "_g_idx")),
        Rule("_packed", ("U8",), ("_scale", "_global_scale"),
             _e2m1("_packed", "_global_scale", True)),
        Rule("_packed", ("U8",), ("_scale",), _mxfp4("_packed", "_scale")),
        _SCALED,
    ),
    "fbgemm_fp8": (_SCALED,),
    "fp8": (_INVERSE,),
    "gptq": (_GPTQ,),
    "modelopt": (
        Rule("", ("U8",), ("_scale", "_scale_2"), _e2m1("", "_scale_2", False)),
        _SCALED,
    ),
    "mxfp4": (Rule("_blocks", ("U8",), ("_scales",), _mxfp4("_blocks", "_scales"), "_blocks"),),
    "mxfp8": (_INVERSE, _SCALED),
    "quark": (_SCALED, Rule("", ("U8",), ("_scale",), _mxfp4("", "_scale"))),
}  # fmt: skip
