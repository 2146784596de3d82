"""Windows over images, as the parameters of CONV2D, CONV_DEPTHWISE and SPARSE_CONV give them.

    kh, kw, stride, pad, act, H, W, stride_x

`stride_x` 0 is `stride`. `pad` holds four numbers below 128: bits 0-6 the rows of zeros above the
image, bits 8-14 the columns left of it, 16-22 the rows below, 24-30 the columns right of it; the
last three exclusive-or the first, so that a number below 128 is the same on all four sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_PAD: Final = 127
MAX_PAD_CODE: Final = 0x7F7F7F7F
_SHIFTS: Final = (8, 16, 24)


def pad_code(top: int, left: int, bottom: int, right: int) -> int:
    """Return the parameter `pad` for zeros on each side, at most `MAX_PAD`.

    Raises:
        ValueError: A side is out of range.
    """
    if not all(0 <= side <= MAX_PAD for side in (top, left, bottom, right)):
        raise ValueError(f"padding of {(top, left, bottom, right)}, at most {MAX_PAD} is stored")
    others = zip((left, bottom, right), _SHIFTS, strict=True)
    return top + sum((side ^ top) << shift for side, shift in others)


@dataclass(frozen=True, slots=True)
class Window:
    """A window over an image of height x width and the zeros around it.

    Attributes:
        down: Rows from one window to the next, as `across` columns.
        top: Rows of zeros above the image, as the other sides.
    """

    height: int
    width: int
    kh: int
    kw: int
    down: int
    across: int
    top: int
    left: int
    bottom: int
    right: int

    @classmethod
    def of(cls, params: Mapping[str, int | float]) -> "Window":
        """Return the window of a call; unused bits of `pad` are not looked at."""
        code, down = int(params["pad"]), int(params["stride"])
        top = code & MAX_PAD
        left, bottom, right = ((code >> shift & MAX_PAD) ^ top for shift in _SHIFTS)
        return cls(
            height=int(params["H"]),
            width=int(params["W"]),
            kh=int(params["kh"]),
            kw=int(params["kw"]),
            down=down,
            across=int(params.get("stride_x", 0)) or down,
            top=top,
            left=left,
            bottom=bottom,
            right=right,
        )

    @property
    def framed(self) -> tuple[int, int]:
        """Height and width of the image with its zeros."""
        return self.height + self.top + self.bottom, self.width + self.left + self.right

    @property
    def fits(self) -> bool:
        """Whether at least one window lies within the frame."""
        tall, wide = self.framed
        return tall >= self.kh and wide >= self.kw

    @property
    def out(self) -> tuple[int, int]:
        """Windows down and across, of a window that `fits`."""
        tall, wide = self.framed
        return (tall - self.kh) // self.down + 1, (wide - self.kw) // self.across + 1
