"""The one place that turns a function of the simulation into machine code, and arrays into what such code is given.

Owns: the typed decorator `compiled`, and `columns_of`, by which compiled code sees many arrays behind one pointer. Does
not own: any cache of compiled code, which is a folder and therefore an adapter's (`adapters.compiled_code`).
Why a pointer: passed as they are, twenty arrays are 150 words in every call. Compiling took 17 s of CPU time that way
and takes 8 s this way, and the simulation runs twice as fast. Why a decorator of our own: a test replaces this module
to run the same sources as plain Python with a fault planted in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core import cgutils
from numba.core.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model
from numba.core.typing.templates import AttributeTemplate
from numba.np.arrayobj import populate_array

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F) -> _F:
    """Compile on the first call with each set of types.

    Division follows numpy (no exception). Without numba's reference counts: compiled code borrows the caller's arrays
    and makes none, which is twice as fast.
    """
    compiler: Any = njit  # `_nrt` is numba's own switch for code without reference counts and is not in its stubs
    return cast(_F, compiler(error_model="numpy", _nrt=False)(function))


def address_book(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """Where each array lies and its shape: what compiled code is given. The arrays must outlive its use."""
    words: list[int] = []
    for column in columns:
        if not column.flags.c_contiguous:
            raise ValueError("a column must be contiguous")
        words += [column.ctypes.data, *column.shape]
    return np.array(words, dtype=np.int64)


class ColumnsType(types.Type):
    """The compiler's type of "arrays behind one pointer", by name: (place in the address book, element type, axes)."""

    def __init__(self, name: str, fields: Mapping[str, tuple[int, Any, int]]) -> None:
        super().__init__(name=f"Columns({name})")
        self.fields = fields


@register_model(ColumnsType)
class _ColumnsModel(models.OpaqueModel):
    """A pointer to the address book."""


@infer_getattr
class _ColumnsAttributes(AttributeTemplate):
    key = ColumnsType

    def generic_resolve(  # type: ignore[override]  # numba's stub says NotImplemented
        self, typ: ColumnsType, attr: str
    ) -> object:
        """The array type of one column."""
        if attr not in typ.fields:
            return None
        _, element, axes = typ.fields[attr]
        return types.Array(element, axes, "C")


@lower_getattr_generic(ColumnsType)  # type: ignore[no-untyped-call, untyped-decorator]  # numba has no types here
def _load_column(context: Any, builder: Any, typ: ColumnsType, value: Any, attr: str) -> Any:
    """Machine code for `columns.attr`: an array made of its address and shape, which never change during a call."""
    place, element, axes = typ.fields[attr]
    array_type = types.Array(element, axes, "C")
    word = context.get_value_type(types.intp)
    book = builder.bitcast(value, word.as_pointer())

    def load(at: int) -> Any:
        loaded = builder.load(builder.gep(book, [context.get_constant(types.intp, at)]))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    array = context.make_array(array_type)(context, builder)
    pointer = context.get_data_type(element).as_pointer()
    item_bytes = context.get_abi_sizeof(context.get_data_type(element))
    shape = [load(place + 1 + axis) for axis in range(axes)]
    strides = [context.get_constant(types.intp, item_bytes)]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    populate: Any = populate_array
    pack: Any = cgutils.pack_array
    populate(
        array,
        data=builder.inttoptr(load(place), pointer),
        shape=pack(builder, shape),
        strides=pack(builder, strides),
        itemsize=context.get_constant(types.intp, item_bytes),
        meminfo=None,
    )
    return array._getvalue()


def columns_of(name: str, layout: Sequence[tuple[str, npt.DTypeLike, int]]) -> Any:
    """The function that compiled code calls on an address book to see its arrays by name.

    `layout` lists (name, element type, axes) in the order of `address_book`.
    """
    from numba.np.numpy_support import from_dtype

    fields: dict[str, tuple[int, Any, int]] = {}
    place = 0
    for column, element, axes in layout:
        fields[column] = (place, from_dtype(np.dtype(element)), axes)
        place += 1 + axes
    made = ColumnsType(name, fields)

    @intrinsic
    def columns(typing_context: Any, book: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, arguments[0])
            return builder.bitcast(array.data, cgutils.voidptr_t)

        return made(book), code

    return columns
