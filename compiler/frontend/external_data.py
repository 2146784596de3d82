"""External data of an ONNX file: bytes beside the model, never from anywhere else.

`onnx_file.read_model` calls `load_external_data` after the model's structure has been checked. A
location is refused if it leaves the directory of the model, also through a symbolic link, if it is
no regular file, or if offset and length do not lie inside it; nothing is read before all of this.
"""

import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

import onnx

from compiler.errors import MalformedModelError
from compiler.frontend.limits import ImportLimits, exceeded
from compiler.frontend.model_size import all_tensors

HINT: Final = "send the data file beside the model, in the same directory"
_INTEGERS: Final = frozenset({"offset", "length"})


def load_external_data(
    model: onnx.ModelProto, directory: Path, file: str, limits: ImportLimits
) -> None:
    """Replace every reference of `model` into files of `directory` by the bytes it names.

    Args:
        model: Changed in place; afterwards it refers to no file.
        directory: Where the model lies.
        file: The model's name, for messages.
        limits: `max_file_bytes` bounds the model with all bytes that are read here.

    Raises:
        MalformedModelError: A location is missing, leaves the directory, or is too short.
        LimitError: Too many bytes.
    """
    total = (directory / file).stat().st_size
    for tensor in _external(model):
        path, offset, length = _place(tensor, directory, file)
        total += length
        if total > limits.max_file_bytes:
            what = f"{file} with its external data has {total} bytes or more"
            raise exceeded("max_file_bytes", what, limits)
        with path.open("rb") as stream:
            stream.seek(offset)
            tensor.raw_data = stream.read(length)
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def external_names(model: onnx.ModelProto, directory: Path, file: str) -> tuple[str, ...]:
    """Return the locations of all external data of `model`, each once, checked like the data.

    Raises:
        MalformedModelError: As `load_external_data`.
    """
    names = []
    for tensor in _external(model):
        _place(tensor, directory, file)
        names += [entry.value for entry in tensor.external_data if entry.key == "location"][-1:]
    return tuple(dict.fromkeys(names))


def _external(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor


def _place(tensor: onnx.TensorProto, directory: Path, file: str) -> tuple[Path, int, int]:
    """Return file, offset and length of a tensor's bytes."""
    where = f"external data of {tensor.name!r} in {file}"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _file(entries.get("location", ""), directory, where)
    numbers = {key: _number(entries[key], where) for key in _INTEGERS & set(entries)}
    size, offset = path.stat().st_size, numbers.get("offset", 0)
    length = numbers.get("length", max(0, size - offset))
    if offset + length > size:
        raise MalformedModelError(
            f"{where} lies at bytes {offset} to {offset + length}, {path.name} has {size}",
            hint="the data file may be truncated; send the exporter's file",
        )
    return path, offset, length


def _file(location: str, directory: Path, where: str) -> Path:
    plain = PurePosixPath(location)
    leaves = plain.is_absolute() or ".." in plain.parts or "\0" in location
    if not location or leaves or PureWindowsPath(location).drive or "\\" in location:
        raise MalformedModelError(f"{where} leaves the directory: {location!r}", hint=HINT)
    try:
        path = (directory / location).resolve(strict=True)
        inside = path.is_relative_to(directory.resolve(strict=True))
        regular = stat.S_ISREG(path.stat().st_mode)
    except (OSError, RuntimeError, ValueError) as error:
        raise MalformedModelError(f"{where} is missing: {location!r}", hint=HINT) from error
    if not inside or not regular:
        raise MalformedModelError(
            f"{where} is a link out of the directory or no file: {location!r}", hint=HINT
        )
    return path


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise MalformedModelError(f"{where} has offset or length {text!r}")
    return int(text)
