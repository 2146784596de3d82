"""Overlays: a model version stored as what differs from the version before it.

An overlay is a safetensors file. A key is either a tensor's name (the whole tensor replaces the
base's) or `name@row` (one row along the first axis does), so that a version that trained 4 of 16
experts stores 4 of 16.

Command line: `python -m examples.edgecard.overlay BASE.safetensors NEW.safetensors OUT.safetensors`
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Tensors = dict[str, NDArray[np.generic]]
ROW_MARK = "@"


def make_overlay(base: Mapping[str, NDArray[np.generic]], new: Tensors) -> Tensors:
    """Return the smallest overlay that turns `base` into `new`.

    Raises:
        ValueError: The two do not have the same tensors with the same shapes and types.
    """
    if base.keys() != new.keys():
        raise ValueError(f"tensors differ: {sorted(base.keys() ^ new.keys())}")
    overlay: Tensors = {}
    for name, tensor in new.items():
        if tensor.shape != base[name].shape or tensor.dtype != base[name].dtype:
            raise ValueError(f"{name}: shape or type changed")
        changed = _changed_rows(base[name], tensor)
        if tensor.ndim < 2 or len(changed) == len(tensor):
            overlay |= {name: tensor} if len(changed) else {}
        else:
            overlay |= {f"{name}{ROW_MARK}{row}": tensor[row] for row in changed}
    return overlay


def apply_overlay(base: Mapping[str, NDArray[np.generic]], overlay: Tensors) -> Tensors:
    """Return `base` with the tensors and rows of `overlay` in place; `base` is not changed.

    Raises:
        ValueError: The overlay names a tensor or row that the base does not have, or has another
            shape.
    """
    result = dict(base)
    for key, value in overlay.items():
        name, _, row = key.partition(ROW_MARK)
        if name not in base:
            raise ValueError(f"overlay names an unknown tensor {name!r}")
        if not row:
            _require_shape(key, value, base[name].shape)
            result[name] = value
            continue
        if int(row) >= len(base[name]):
            raise ValueError(f"overlay names row {row} of {name!r}, which has {len(base[name])}")
        _require_shape(key, value, base[name].shape[1:])
        if result[name] is base[name]:
            result[name] = base[name].copy()
        result[name][int(row)] = value
    return result


def _changed_rows(old: NDArray[np.generic], new: NDArray[np.generic]) -> list[int]:
    rows = [np.atleast_1d(tensor).reshape(len(np.atleast_1d(tensor)), -1) for tensor in (old, new)]
    return [int(row) for row in np.flatnonzero((rows[0] != rows[1]).any(axis=1))]


def _require_shape(key: str, value: NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"overlay {key!r} has shape {value.shape}, expected {shape}")


def main() -> None:
    """Write the overlay of two safetensors files."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.edgecard.overlay", description=__doc__.splitlines()[0]
    )
    for name in ("base", "new", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    overlay = make_overlay(load_file(arguments.base), load_file(arguments.new))
    save_file(overlay, arguments.out)
    print(f"{arguments.out}: {len(overlay)} tensors, {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
