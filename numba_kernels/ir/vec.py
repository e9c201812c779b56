"""What kernels' intrinsics are written with: numbers and vectors that have NumPy's operators.

A `Vec` is a value of LLVM together with the builder that emits code: `a * b + c` emits a product
and a sum of every lane. A number is a `Vec` of one lane; it, or a number of Python, meets a vector
as in NumPy, in every lane. Integers are bits, which have no sign: `<`, `astype` and `shifted_right`
take them as signed, `>>`, `//` and `below` as unsigned. A `Ptr` is an address, counted in bytes.
`Arguments` are those of an intrinsic in these terms, and `codegen_of` makes one of a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from hotcold.numba_kernels.ir.target import has_feature

F32 = ir.FloatType()
HALF = ir.HalfType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
_BYTES = I8.as_pointer()


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BFLOAT = _Bfloat()
_FLOATS = (ir.FloatType, ir.HalfType, _Bfloat)


def item_bits(dtype: Any) -> int:
    """Bits of an item."""
    if isinstance(dtype, ir.IntType):
        return int(dtype.width)
    return 32 if dtype == F32 else 16


def shaped(dtype: Any, lanes: int) -> Any:
    """LLVM's type of so many lanes; of one it is the item's own."""
    return ir.VectorType(dtype, lanes) if lanes > 1 else dtype


def call_by_name(builder: Any, name: str, result: Any, values: Sequence[Any]) -> Any:
    """Call a function of C, or one of LLVM's, by its name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


class Vec:
    """A vector of `lanes` items of `dtype`, or one number."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = value
        is_vector = isinstance(value.type, ir.VectorType)
        self.lanes = value.type.count if is_vector else 1
        self.dtype = value.type.element if is_vector else value.type

    @classmethod
    def full(cls, builder: Any, number: Any, dtype: Any, lanes: int = 1) -> Vec:
        """A constant: `number` in every lane."""
        if lanes == 1:
            return cls(builder, dtype(number))
        kind = ir.VectorType(dtype, lanes)
        return cls(builder, ir.Constant(kind, [dtype(number)] * lanes))

    @classmethod
    def of(cls, builder: Any, numbers: Sequence[Any], dtype: Any) -> Vec:
        """A constant of these lanes."""
        kind = ir.VectorType(dtype, len(numbers))
        return cls(builder, ir.Constant(kind, [dtype(number) for number in numbers]))

    def like(self, number: float) -> Vec:
        """A constant of this type."""
        return Vec.full(self.builder, number, self.dtype, self.lanes)

    def spread(self, lanes: int) -> Vec:
        """A vector with this number in every lane."""
        undefined = ir.Constant(ir.VectorType(self.dtype, lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, self.value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [I32(0)] * lanes)
        return Vec(self.builder, self.builder.shuffle_vector(one, undefined, zeros))

    def __add__(self, other: Vec | float) -> Vec:
        return self._both(other, "add", "fadd")

    def __sub__(self, other: Vec | float) -> Vec:
        return self._both(other, "sub", "fsub")

    def __mul__(self, other: Vec | float) -> Vec:
        return self._both(other, "mul", "fmul")

    def __truediv__(self, other: Vec | float) -> Vec:
        return self._both(other, "", "fdiv")

    def __floordiv__(self, other: Vec | int) -> Vec:
        return self._both(other, "udiv", "")

    def __and__(self, other: Vec | int) -> Vec:
        return self._both(other, "and_", "")

    def __or__(self, other: Vec | int) -> Vec:
        return self._both(other, "or_", "")

    def __xor__(self, other: Vec | int) -> Vec:
        return self._both(other, "xor", "")

    def __lshift__(self, other: Vec | int) -> Vec:
        return self._both(other, "shl", "")

    def __rshift__(self, other: Vec | int) -> Vec:
        return self._both(other, "lshr", "")

    def shifted_right(self, places: int) -> Vec:
        """`>>` of signed numbers."""
        return self._both(places, "ashr", "")

    def __neg__(self) -> Vec:
        return Vec.full(self.builder, 0, self.dtype, self.lanes) - self

    def __lt__(self, other: Vec | float) -> Vec:
        return self._compared("<", other)

    def __ge__(self, other: Vec | float) -> Vec:
        return self._compared(">=", other)

    def equals(self, other: Vec | float) -> Vec:
        """A bit a lane."""
        return self._compared("==", other)

    def differs(self, other: Vec | int) -> Vec:
        """A bit a lane."""
        return self._compared("!=", other)

    def below(self, other: Vec | int) -> Vec:
        """`<` of unsigned numbers."""
        a, b = self._operands(other)
        return Vec(self.builder, self.builder.icmp_unsigned("<", a, b))

    def is_nan(self) -> Vec:
        """A bit a lane."""
        return Vec(self.builder, self.builder.fcmp_unordered("uno", self.value, self.value))

    def where(self, yes: Vec, no: Vec | float) -> Vec:
        """`yes` in lanes whose bit is set here, `no` in others, as numpy.where."""
        a, b = yes._operands(no)
        return Vec(self.builder, self.builder.select(self.value, a, b))

    def minimum(self, other: Vec | int) -> Vec:
        """The smaller one, of signed integers."""
        return (self < other).where(self, other)

    def fma(self, factor: Vec, addend: Vec) -> Vec:
        """self * factor + addend, rounded once."""
        suffix = "f32" if self.lanes == 1 else f"v{self.lanes}f32"
        return self.call(f"llvm.fma.{suffix}", self.value.type, self, factor, addend)

    def view(self, dtype: Any) -> Vec:
        """The same bits as items of another type."""
        lanes = self.lanes * item_bits(self.dtype) // item_bits(dtype)
        return Vec(self.builder, self.builder.bitcast(self.value, shaped(dtype, lanes)))

    def astype(self, dtype: Any, signed: bool = True) -> Vec:
        """The same numbers in another type; floats become integers towards zero."""
        kind, builder = shaped(dtype, self.lanes), self.builder
        to_float, is_float = isinstance(dtype, _FLOATS), isinstance(self.dtype, _FLOATS)
        if is_float and to_float:
            convert = builder.fpext if dtype == F32 else builder.fptrunc
        elif is_float:
            convert = builder.fptosi
        elif to_float:
            convert = builder.sitofp
        elif item_bits(dtype) < item_bits(self.dtype):
            convert = builder.trunc
        else:
            convert = builder.sext if signed else builder.zext
        return Vec(builder, convert(self.value, kind))

    def take(self, places: Sequence[int], other: Vec | None = None) -> Vec:
        """Lanes in another order; places from `lanes` on are those of `other`."""
        second = self.value if other is None else other.value
        indices = ir.Constant(ir.VectorType(I32, len(places)), [I32(place) for place in places])
        return Vec(self.builder, self.builder.shuffle_vector(self.value, second, indices))

    def __getitem__(self, lane: int) -> Vec:
        return Vec(self.builder, self.builder.extract_element(self.value, I32(lane)))

    def with_lane(self, lane: int, number: Vec) -> Vec:
        """This vector with another number in one lane."""
        return Vec(self.builder, self.builder.insert_element(self.value, number.value, I32(lane)))

    def sum(self) -> Vec:
        """The sum of all lanes by halving, which is the same on every CPU."""
        total = self
        while total.lanes > 2:
            half = total.lanes // 2
            total = total.take(range(half)) + total.take(range(half, 2 * half))
        return total[0] + total[1]

    def call(self, name: str, result: Any, *args: Vec) -> Vec:
        """A function of LLVM or an instruction of the CPU, by its intrinsic's name."""
        found = call_by_name(self.builder, name, result, [arg.value for arg in args])
        return Vec(self.builder, found)

    def _operands(self, other: Vec | float) -> tuple[Any, Any]:
        if not isinstance(other, Vec):
            other = Vec.full(self.builder, other, self.dtype, self.lanes)
        if other.lanes < self.lanes:
            other = other.spread(self.lanes)
        return (self if self.lanes == other.lanes else self.spread(other.lanes)).value, other.value

    def _both(self, other: Vec | float, of_integers: str, of_floats: str) -> Vec:
        name = of_floats if isinstance(self.dtype, _FLOATS) else of_integers
        return Vec(self.builder, getattr(self.builder, name)(*self._operands(other)))

    def _compared(self, sign: str, other: Vec | float) -> Vec:
        is_float = isinstance(self.dtype, _FLOATS)
        compare = self.builder.fcmp_ordered if is_float else self.builder.icmp_signed
        return Vec(self.builder, compare(sign, *self._operands(other)))


class Ptr:
    """An address in memory, counted in bytes."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder = builder
        self.value = builder.bitcast(value, _BYTES)

    def __add__(self, num_bytes: Vec | int) -> Ptr:
        offset = I64(num_bytes) if isinstance(num_bytes, int) else num_bytes.value
        return Ptr(self.builder, self.builder.gep(self.value, [offset], source_etype=I8))

    def load(self, dtype: Any, lanes: int = 1, align: int = 0) -> Vec:
        """So many items; `align` in bytes, an item's without it."""
        kind = shaped(dtype, lanes)
        typed = self.builder.bitcast(self.value, kind.as_pointer())
        bytes_ = align or item_bits(dtype) // 8
        return Vec(self.builder, self.builder.load(typed, align=bytes_, typ=kind))

    def store(self, vec: Vec, align: int = 0) -> None:
        """Write all items."""
        typed = self.builder.bitcast(self.value, vec.value.type.as_pointer())
        self.builder.store(vec.value, typed, align=align or item_bits(vec.dtype) // 8)

    def load_masked(self, dtype: Any, mask: Vec) -> Vec:
        """An item for each lane whose bit is set, read by itself; 0 in the others."""
        kind = ir.VectorType(dtype, mask.lanes)
        typed = Vec(self.builder, self.builder.bitcast(self.value, kind.as_pointer()))
        name = f"llvm.masked.load.v{mask.lanes}{dtype.intrinsic_name}.p0"
        nothing = Vec(self.builder, ir.Constant(kind, None))
        return mask.call(name, kind, typed, Vec.full(self.builder, 1, I32), mask, nothing)

    def touch(self) -> None:
        """Read the byte here. The read is atomic: LLVM drops ordinary ones that nobody uses."""
        self.builder.load_atomic(self.value, "monotonic", 1, typ=I8)

    def address(self) -> Vec:
        """The address as a number."""
        return Vec(self.builder, self.builder.ptrtoint(self.value, I64))

    def prefetch(self, locality: int = 3) -> None:
        """Ask for the line here, for reading: 3 into all caches, 2 into all but the first level.

        Rows are asked for with 2: a core waits for few lines of its first level at a time, and for
        more of its second.
        """
        values = self.value, I32(0), I32(locality), I32(1)
        call_by_name(self.builder, "llvm.prefetch.p0", ir.VoidType(), values)


class Var:
    """A value that changes from one round of a loop to the next; LLVM makes a register of it."""

    def __init__(self, first: Vec) -> None:
        self.builder = first.builder
        self._type = first.value.type
        self._cell = cgutils.alloca_once(self.builder, self._type)
        self.set(first)

    def get(self) -> Vec:
        """The value now."""
        return Vec(self.builder, self.builder.load(self._cell, typ=self._type))

    def set(self, value: Vec) -> None:
        """Change it."""
        self.builder.store(value.value, self._cell)


def stack_space(builder: Any, kind: Any) -> Ptr:
    """Memory on the stack for a value of LLVM's type `kind`; unlike Numba's it is not zeroed.

    It begins with a cache line: a vector that lies in two takes twice as long.
    """
    with builder.goto_entry_block():
        space = builder.alloca(kind)
        space.align = 64
        return Ptr(builder, space)


def held(vectors: list[Vec]) -> list[Vec]:
    """The same vectors, held in registers here, whatever LLVM would rather do; with AVX2.

    LLVM neither adds whole numbers up in another order across this place nor moves loads: it would
    run out of registers.
    """
    if len(vectors) == 1 or not has_feature("avx2"):  # of one LLVM wants no struct
        return vectors
    builder, kinds = vectors[0].builder, [vector.value.type for vector in vectors]
    kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    constraints = ["=x"] * len(kinds) + [str(place) for place in range(len(kinds))]
    nothing = ir.InlineAsm(kind, "", ",".join([*constraints, "~{memory}"]), side_effect=True)
    found = builder.call(nothing, [vector.value for vector in vectors])
    return [Vec(builder, builder.extract_value(found, i)) for i in range(len(kinds))]


def transposed(rows: Sequence[Vec]) -> list[Vec]:
    """Vectors of lane 0 of all rows, of lane 1 ..., of as many rows as lanes, a power of two."""
    found, count, size = list(rows), len(rows), 1
    while size < count:  # of blocks that change places with those beside them
        low = [lane if not lane & size else count + lane - size for lane in range(count)]
        high = [lane + size if not lane & size else count + lane for lane in range(count)]
        for i in (i for i in range(count) if not i & size):
            first, second = found[i], found[i + size]
            found[i], found[i + size] = first.take(low, second), first.take(high, second)
        size *= 2
    return found


def for_range(start: Vec | int, stop: Vec, step: int, body: Callable[[Vec], None]) -> None:
    """Emit `for index in range(start, stop, step): body(index)`; whole steps only."""
    builder = stop.builder
    first = I64(start) if isinstance(start, int) else start.value
    with cgutils.for_range_slice(builder, first, stop.value, I64(step), inc=True) as (index, _):
        body(Vec(builder, index))


def for_vectors(length: Vec, lanes: int, body: Callable[[Vec, int], None]) -> None:
    """Emit body(index, lanes) for a whole row: vectors, then body(index, 1) one by one."""
    whole = whole_steps(length, lanes)
    for_range(0, whole, lanes, lambda index: body(index, lanes))
    for_range(whole, length, 1, lambda index: body(index, 1))


def whole_steps(length: Vec, step: int) -> Vec:
    """The largest multiple of `step` that is not above `length`."""
    return length // step * step


class Array:
    """An array argument of an intrinsic."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        struct = context.make_array(kind)(context, builder, value=value)
        self.builder = builder
        self.kind = kind
        self._start = Ptr(builder, struct.data)
        self.shape = [Vec(builder, size) for size in cgutils.unpack_tuple(builder, struct.shape)]
        self.strides = [Vec(builder, s) for s in cgutils.unpack_tuple(builder, struct.strides)]

    def at(self, *indices: Vec | int) -> Ptr:
        """The address of an item, or of a row's first where indices are left out."""
        place = self._start
        for index, stride in zip(indices, self.strides, strict=False):
            place = place + stride * index
        return place

    def rows(self, first: Vec, column: Vec | int, count: int) -> list[Ptr]:
        """The addresses of an item in `column` of so many rows from `first` on, of a matrix."""
        corner = self.at(first, column)
        return [corner + self.strides[0] * r for r in range(count)]


class Arguments:
    """An intrinsic's arguments, by their places."""

    def __init__(self, context: Any, builder: Any, kinds: Sequence[Any], values: Any) -> None:
        self.builder = builder
        self._context = context
        self._kinds = kinds
        self._values = values

    def number(self, place: int) -> Vec:
        """A number."""
        return Vec(self.builder, self._values[place])

    def numbers(self, *places: int) -> list[Vec]:
        """Several numbers."""
        return [self.number(place) for place in places]

    def tuple_of(self, place: int) -> list[Vec]:
        """The numbers of a tuple."""
        return [
            Vec(self.builder, n) for n in cgutils.unpack_tuple(self.builder, self._values[place])
        ]

    def array(self, place: int) -> Array:
        """An array."""
        return Array(self._context, self.builder, self._kinds[place], self._values[place])

    def arrays(self, place: int) -> list[Array]:
        """The arrays of a named tuple, or an array alone."""
        kind, value = self._kinds[place], self._values[place]
        if not isinstance(kind, types.BaseNamedTuple):
            return [self.array(place)]
        return [
            Array(self._context, self.builder, part, self.builder.extract_value(value, i))
            for i, part in enumerate(kind.types)
        ]


def codegen_of(emit: Callable[[Arguments], Vec | Sequence[Vec] | None]) -> Any:
    """What Numba calls for an intrinsic's code: `emit` gives its result, a tuple, or None."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = emit(Arguments(context, builder, signature.args, args))
        if result is None:
            return context.get_dummy_value()
        if isinstance(result, Vec):
            return result.value
        return context.make_tuple(builder, signature.return_type, [one.value for one in result])

    return codegen
