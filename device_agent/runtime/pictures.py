"""Pictures as a bundle takes them: u8 pixels, rows from the top, channels last.

    file.npy (uint8)  file.pgm (grey)  file.ppm (RGB)  bytes of either, or of bare pixels -> pixels

Called by the command line, and by whoever opens a `Session`. A picture is never scaled or
converted: what the model was trained on is for its makers to say, so another size is refused.
"""

import io
import re
import stat
from pathlib import Path
from typing import Final

import numpy as np

from compiler.contract.pipeline import ImageSpec
from device_agent.errors import PictureError

MAX_IMAGE_BYTES: Final = 64 << 20
MAX_HEAD_BYTES: Final = 4096
"""Of a .pgm or .ppm, comments included."""
_NPY: Final = b"\x93NUMPY"
_GAP: Final = rb"(?:\s|#[^\n]*+\n)++"  # possessive: a head that is none is refused in linear time
_NETPBM: Final = re.compile(
    rb"P([56])" + _GAP + rb"(\d{1,9})" + _GAP + rb"(\d{1,9})" + _GAP + rb"255\s"
)
_CHANNELS: Final = {b"5": 1, b"6": 3}
_KINDS: Final = "a picture is .npy (uint8), binary .pgm (grey) or binary .ppm (RGB), 255 levels"
Picture = Path | str | bytes | bytearray | memoryview
"""A file, the bytes of one, or bare pixels."""


def read_image(path: Path) -> bytes:
    """Return the pixels of a picture file, uint8.

    Raises:
        PictureError: It cannot be read, or is no picture.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, a device never end
            raise PictureError(f"{path.name} is no file", hint=_KINDS)
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PictureError(f"{path.name} cannot be read: {reason}") from error
    if len(data) > MAX_IMAGE_BYTES:
        raise PictureError(f"{path.name} is larger than {MAX_IMAGE_BYTES} bytes")
    return decode_image(data, path.name)


def decode_image(data: bytes, name: str) -> bytes:
    """Return the pixels in the bytes of a picture file, uint8.

    Args:
        data: The file's bytes.
        name: What to call it in errors.

    Raises:
        PictureError: It is no picture.
    """
    if data.startswith(_NPY):
        return _npy(data, name)
    match = _NETPBM.match(data, 0, MAX_HEAD_BYTES)
    if match is None:
        raise PictureError(f"{name} is no picture", hint=_KINDS)
    size = int(match[2]) * int(match[3]) * _CHANNELS[match[1]]
    if len(data) - match.end() != size:
        found = len(data) - match.end()
        raise PictureError(f"{name} has {found} bytes of pixels, its head says {size}")
    return data[match.end() :]


def pixels_of(picture: Picture, spec: ImageSpec | None) -> bytes:
    """Return the pixels of a picture that a model can see.

    Args:
        picture: A file, the bytes of one, or bare pixels of exactly the model's size.
        spec: What the model takes; None = it sees none.

    Raises:
        PictureError: It cannot be read, is no picture, or has another size.
    """
    if spec is None:
        raise PictureError("this model sees no pictures", hint="ask it without one")
    if isinstance(picture, Path | str):
        name, pixels = Path(picture).name, read_image(Path(picture))
    else:
        name, pixels = "the picture", bytes(picture)
        if len(pixels) != spec.size_bytes:
            if not pixels.startswith(_NPY) and _NETPBM.match(pixels) is None:
                found = f"{len(pixels)} bytes, bare pixels have {spec.size_bytes}"
                raise PictureError(f"{name} is no file of one and has {found}", hint=_KINDS)
            pixels = decode_image(pixels, name)
    if len(pixels) != spec.size_bytes:
        raise PictureError(
            f"{name} has {len(pixels)} bytes of pixels, the model takes {spec.size_bytes}",
            hint=f"{spec.height} x {spec.width} pixels, channels: {spec.channels}",
        )
    return pixels


def _npy(data: bytes, name: str) -> bytes:
    try:
        pixels = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a head that is none ends in errors of many kinds
        raise PictureError(f"{name} cannot be read: {error}") from error
    if pixels.dtype != np.uint8:
        raise PictureError(f"{name}: pixels must be uint8, not {pixels.dtype}", hint=_KINDS)
    return bytes(pixels.tobytes())
