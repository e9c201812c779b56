"""Named tuples of many arrays reach compiled code by their address.

Numba passes each number of each array of a tuple as an argument of its own, a hundred of them, and
copies them all wherever one array is read. What lies in memory once costs compilers, and calls,
an address. Such a tuple owns nothing: who made its arrays keeps them. It is good for one turn of a
loop, as the next one makes its own in the same place. Python calls no kernel with one that has
`_nrt=True`: the references that are counted for its arrays would stay.
"""

import hashlib
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.imputils import impl_ret_borrowed
from numba.extending import NativeValue, lower_getattr_generic, models, register_model, unbox

_PACKAGE = f"{__package__}."
_FEW = 4  # arrays

_make_type, _make_tuple = types.BaseTuple.from_types, BaseContext.make_tuple


class TupleByAddress(types.NamedTuple):  # type: ignore[misc]
    """The type of such a tuple in compiled code.

    Numba looks it up wherever the tuple occurs, and would go over all its fields each time.
    """

    _hash = 0

    def __hash__(self) -> int:
        self._hash = self._hash or hash(self.key)
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or bool(super().__eq__(other))

    def __reduce__(self) -> Any:
        rebuild, (make, arguments, state) = super().__reduce__()
        return rebuild, (make, arguments, state | {"_hash": 0})  # hashes are a process's own


@register_model(TupleByAddress)
class _Model(models.StructModel):  # type: ignore[misc]
    """The fields in memory; a value is their address, which is good while its function runs."""

    def __init__(self, dmm: Any, fe_type: TupleByAddress) -> None:
        members = list(zip(fe_type.fields, fe_type.types, strict=True))
        super().__init__(dmm, fe_type, members)

    def get_value_type(self) -> Any:
        return self.get_data_type().as_pointer()

    get_argument_type = get_value_type

    def as_data(self, builder: Any, value: Any) -> Any:
        return builder.load(value)

    def from_data(self, builder: Any, value: Any) -> Any:
        return cgutils.alloca_once_value(builder, value)

    as_return, from_return = as_data, from_data

    def as_argument(self, builder: Any, value: Any) -> Any:
        return value

    def from_argument(self, builder: Any, value: Any) -> Any:
        value.add_attribute("noalias")
        return value

    def load_from_data_pointer(self, builder: Any, ptr: Any, align: Any = None) -> Any:
        return ptr

    def traverse(self, builder: Any) -> list[Any]:
        return []

    def inner_models(self) -> tuple[Any, ...]:
        return ()

    def field(self, builder: Any, value: Any, index: int) -> Any:
        """Field number `index` of the tuple at `value`."""
        place = cgutils.gep_inbounds(builder, value, 0, index)
        return self.get_model(index).load_from_data_pointer(builder, place)

    def build(self, builder: Any, values: Any) -> Any:
        """The address of a tuple of these values."""
        place = cgutils.alloca_once(builder, self.get_data_type())
        for index, value in enumerate(values):
            data = self.get_model(index).as_data(builder, value)
            builder.store(data, cgutils.gep_inbounds(builder, place, 0, index))
        return place


@lower_getattr_generic(TupleByAddress)
def _field(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    index = kind.fields.index(name)
    found = context.data_model_manager[kind].field(builder, value, index)
    return impl_ret_borrowed(context, builder, kind.types[index], found)


@unbox(TupleByAddress)
def _read_tuple(kind: Any, obj: Any, c: Any) -> Any:
    """An entry's argument. Numba would write out each array of it, which is most of the entry."""
    place = cgutils.alloca_once(c.builder, c.context.data_model_manager[kind].get_data_type())
    return NativeValue(place, is_error=c.builder.call(_reader(kind, c), (obj, place)))


def _reader(kind: Any, c: Any) -> Any:
    """The module's function that writes a Python object, as `kind`, to an address.

    It returns whether that failed.
    """
    module, model = c.builder.module, c.context.data_model_manager[kind]
    name = f"read.{hashlib.sha256(str(kind).encode()).hexdigest()[:16]}"
    if name in module.globals:
        return module.globals[name]
    arguments = c.pyapi.pyobj, model.get_data_type().as_pointer()
    function = ir.Function(module, ir.FunctionType(cgutils.bool_t, arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    obj, place = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    c = c._replace(builder=builder, pyapi=c.context.get_python_api(builder))
    if isinstance(kind, TupleByAddress):
        failed = cgutils.false_bit
        for index, each in enumerate(kind.types):
            item = c.pyapi.tuple_getitem(obj, index)
            target = cgutils.gep_inbounds(builder, place, 0, index)
            failed = builder.or_(failed, builder.call(_reader(each, c), (item, target)))
    else:
        found = c.unbox(kind, obj)
        if found.cleanup is not None:
            raise NotImplementedError(f"{kind} in a tuple by address")
        builder.store(model.as_data(builder, found.value), place)
        failed = found.is_error
    builder.ret(failed)
    return function


def num_arrays(kind: Any) -> int:
    """How many arrays a type has, with those of tuples within."""
    if isinstance(kind, types.Optional):
        return num_arrays(kind.type)
    if isinstance(kind, types.BaseTuple):
        return sum(map(num_arrays, kind.types))
    return int(isinstance(kind, types.Array))


def _type_of(tys: Any, pyclass: Any = None) -> Any:
    is_ours = pyclass is not None and pyclass.__module__.startswith(_PACKAGE)
    if is_ours and sum(map(num_arrays, tys)) > _FEW:
        return TupleByAddress(tuple(map(types.unliteral, tys)), pyclass)
    return _make_type(tys, pyclass)


def _tuple_of(self: Any, builder: Any, typ: Any, values: Any) -> Any:
    if isinstance(typ, TupleByAddress):
        return self.data_model_manager[typ].build(builder, values)
    return _make_tuple(self, builder, typ, values)


types.BaseTuple.from_types, BaseContext.make_tuple = staticmethod(_type_of), _tuple_of
