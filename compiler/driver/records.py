"""Frozen dataclasses to cache parts and back, arrays beside the JSON.

    value -> parts {"record": JSON with {"array": n} in place of arrays, "arrays": bytes}

The types are read from the annotations, so a new field needs nothing here. What the annotations
cannot say how to rebuild is refused when it is written, and the caller then keeps nothing.
"""

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, TypeVar

import numpy as np

T = TypeVar("T")
RECORD: Final = "record"
ARRAYS: Final = "arrays"
_PLAIN: Final = (str, int, float, bool, type(None))


class UnkeepableError(TypeError):
    """A value of a type that cannot be rebuilt from its annotation."""


def to_parts(value: object) -> dict[str, bytes]:
    """Return the parts of a cache entry that holds a dataclass.

    Raises:
        UnkeepableError: Some field is of a type that `from_parts` could not rebuild.
    """
    arrays: list[np.ndarray] = []
    tree = _write(value, type(value), arrays)
    table = [[array.dtype.str, list(array.shape)] for array in arrays]
    head = json.dumps({"value": tree, "arrays": table}, allow_nan=True)
    return {RECORD: head.encode(), ARRAYS: b"".join(array.tobytes() for array in arrays)}


def from_parts(kind: type[T], parts: Mapping[str, bytes]) -> T:
    """Return the dataclass that `to_parts` wrote; its arrays are read-only."""
    document = json.loads(parts[RECORD])
    arrays, at = [], 0
    for dtype, shape in document["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(parts[ARRAYS], np.dtype(dtype), count, at)
        arrays.append(flat.reshape(shape))
        at += flat.nbytes
    built: T = _read(document["value"], kind, arrays)
    return built


def _write(value: Any, kind: Any, arrays: list[np.ndarray]) -> Any:  # noqa: ANN401 - any annotation
    kind = _chosen(value, kind)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise UnkeepableError("an array of objects")
        arrays.append(np.ascontiguousarray(value).reshape(value.shape))
        return {"array": len(arrays) - 1}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value):
        hints = _hints(type(value))
        return [_write(getattr(value, f.name), hints[f.name], arrays) for f in fields(value)]
    if isinstance(value, Mapping):
        inner = _arguments(kind, 2)
        return [
            [_write(name, inner[0], arrays), _write(item, inner[1], arrays)]
            for name, item in value.items()
        ]
    if isinstance(value, tuple | list | frozenset):
        items = sorted(value) if isinstance(value, frozenset) else value
        return [
            _write(item, one, arrays)
            for item, one in zip(items, _items(kind, len(items)), strict=True)
        ]
    if isinstance(value, _PLAIN):
        return value
    raise UnkeepableError(f"a value of {type(value).__name__}")


def _read(tree: Any, kind: Any, arrays: Sequence[np.ndarray]) -> Any:  # noqa: ANN401 - any annotation
    if isinstance(tree, dict):
        return arrays[tree["array"]]
    kind = _chosen(tree, kind)
    origin = typing.get_origin(kind) or kind
    if isinstance(origin, type):
        if is_dataclass(origin):
            hints = _hints(origin)
            return origin(
                **{
                    f.name: _read(item, hints[f.name], arrays)
                    for f, item in zip(fields(origin), tree, strict=True)
                }
            )
        if issubclass(origin, Enum):
            return origin(tree)
        if issubclass(origin, Mapping):
            inner = _arguments(kind, 2)
            return {_read(k, inner[0], arrays): _read(v, inner[1], arrays) for k, v in tree}
        if issubclass(origin, tuple | list | frozenset | Sequence) and isinstance(tree, list):
            made = [
                _read(item, one, arrays)
                for item, one in zip(tree, _items(kind, len(tree)), strict=True)
            ]
            return origin(made) if issubclass(origin, tuple | list | frozenset) else tuple(made)
    return tree


def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _chosen(value: object, kind: Any) -> Any:  # noqa: ANN401 - any annotation
    """Return the member of a union that fits: None, or the one other than None."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    others = [one for one in typing.get_args(kind) if one is not type(None)]
    if value is None:
        return type(None)
    if len(others) == 1 or all(one in _PLAIN for one in others):
        return others[0]
    raise UnkeepableError(f"a union {kind}")


def _arguments(kind: Any, count: int) -> tuple[Any, ...]:  # noqa: ANN401 - any annotation
    found = typing.get_args(kind)
    if len(found) != count:
        raise UnkeepableError(f"an annotation {kind} without {count} arguments")
    return found


def _items(kind: Any, count: int) -> Sequence[Any]:  # noqa: ANN401 - any annotation
    """Return the annotation of each item of a sequence of `count`."""
    found = typing.get_args(kind)
    if not found:
        raise UnkeepableError(f"a sequence annotated {kind}")
    if len(found) == 1 or found[1] is Ellipsis:
        return (found[0],) * count
    return found
