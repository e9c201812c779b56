"""What an intrinsic is given, as values of `numba_kernels.ir.vec`, and how it is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.core import cgutils, types

from hotcold.numba_kernels.ir.vec import Ptr, Vec


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
