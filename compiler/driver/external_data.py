"""Which files besides its own an ONNX file reads: the places of its external data.

A compilation must be keyed by every byte it reads, and a key must be cheap. So a file is parsed
only if the word that every reference to external data contains stands in its bytes.
"""

import mmap
from pathlib import Path
from typing import Final

KEY: Final = b"location"


def external_files(path: Path) -> frozenset[str]:
    """Return the relative names of external data files that an ONNX file refers to.

    A file that cannot be read as ONNX refers to none: the importer says what is wrong with it.
    """
    if not _mentions(path):
        return frozenset()
    import onnx  # loaded only where it is needed: an unchanged submission must not wait for it
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    from compiler.frontend.model_size import all_tensors

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError, OSError):
        return frozenset()
    return frozenset(
        entry.value
        for tensor in all_tensors(model)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == KEY.decode()
    )


def _mentions(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return data.find(KEY) >= 0
    except (OSError, ValueError):
        return False
