"""`#sp.enc`: what a tensor type knows beyond its shape, in the slot MLIR calls the encoding.

Written `#sp.enc<dims ["P + T"]>` for a dense tensor with run-time axes (one expression per `?`) and

    #sp.enc<dims ["T"], levels ["dense", "compressed"], order [1, 0], block [32, 32],
            pos 32, crd 16, masks [0, 2], dynamic>

for one whose zeros are known: one level type per axis as in MLIR's `sparse_tensor` (`dense`,
`compressed`, `singleton`, `blocked`, `structured[n,m]`), the order in which axes are stored, the
block, the widths in bits of positions (pointers) and coordinates (indices), and the numbers of the
run-time sources that its zeros come from (`compiler.analysis.propagation`). `order` is left out if
it is the identity and `block` if there is none. Buffers and counters of a stored tensor are
run-time values, operands of `sp.pack`, never part of a type.
"""

import re
from collections.abc import Sequence
from typing import Final

from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr
from xdsl.ir import Attribute, ParametrizedAttribute
from xdsl.irdl import irdl_attr_definition, param_def
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from compiler.dialects.dims import Dim, parse_dim

LEVELS: Final = ("dense", "compressed", "singleton", "blocked")
WIDTHS: Final = (8, 16, 32, 64)
POS_BITS, CRD_BITS = 32, 32

_STRUCTURED: Final = re.compile(r"structured\[(\d+),(\d+)\]")


def structured(level: str) -> tuple[int, int] | None:
    """Return n and m of `structured[n,m]`: at most n of m neighbours are non-zero."""
    match = _STRUCTURED.fullmatch(level)
    return (int(match[1]), int(match[2])) if match else None


def coordinate_bits(shape: Sequence[Dim]) -> int:
    """Return the width that coordinates of a shape need: 16 where every size is known to fit."""
    fits = all(dim.is_static and dim.constant <= 1 << 16 for dim in shape)
    return 16 if fits else CRD_BITS


@irdl_attr_definition
class EncodingAttr(ParametrizedAttribute):
    """Run-time axes and sparsity of a tensor type."""

    name = "sp.enc"
    dims: ArrayAttr[StringAttr] = param_def()
    levels: ArrayAttr[StringAttr] = param_def()
    order: ArrayAttr[IntAttr] = param_def()
    block: ArrayAttr[IntAttr] = param_def()
    pos: IntAttr = param_def()
    crd: IntAttr = param_def()
    masks: ArrayAttr[IntAttr] = param_def()
    dynamic: IntAttr = param_def()

    @classmethod
    def make(
        cls,
        dims: Sequence[str] = (),
        levels: Sequence[str] = (),
        block: Sequence[int] = (),
        masks: Sequence[int] = (),
        *,
        order: Sequence[int] | None = None,
        pos: int = POS_BITS,
        crd: int = CRD_BITS,
        dynamic: bool = False,
    ) -> "EncodingAttr":
        """Build the attribute from plain values; no `order` means the identity."""
        axes = range(len(levels)) if order is None else order
        return cls(
            ArrayAttr([StringAttr(d) for d in dims]),
            ArrayAttr([StringAttr(level) for level in levels]),
            _integers(axes),
            _integers(block),
            IntAttr(pos),
            IntAttr(crd),
            _integers(masks),
            IntAttr(int(dynamic)),
        )

    def with_dims(self, dims: Sequence[str]) -> "EncodingAttr":
        """Return the same sparsity over other run-time axes."""
        names = ArrayAttr([StringAttr(d) for d in dims])
        return EncodingAttr(
            names,
            self.levels,
            self.order,
            self.block,
            self.pos,
            self.crd,
            self.masks,
            self.dynamic,
        )

    @property
    def is_sparse(self) -> bool:
        """Whether zeros of the tensor are known by structure."""
        return bool(self.levels.data)

    @property
    def level_names(self) -> tuple[str, ...]:
        """Level types, one per axis in storage order."""
        return tuple(level.data for level in self.levels.data)

    def verify(self) -> None:
        """Refuse unknown levels, wrong widths, orders and blocks, and masks of a dense tensor."""
        for dim in self.dims.data:
            try:
                parse_dim(dim.data)
            except ValueError as error:
                raise VerifyException(str(error)) from error
        if self.masks.data and not self.levels.data:
            raise VerifyException("sp.enc names masks of a dense tensor")
        for before, level in zip(("", *self.level_names), self.level_names, strict=False):
            _verify_level(before, level)
        order = [axis.data for axis in self.order.data]
        if sorted(order) != list(range(len(self.levels.data))):
            raise VerifyException(f"sp.enc: order {order} is not a permutation of its levels")
        block = [size.data for size in self.block.data]
        if block and (len(block) != len(order) or min(block) < 1):
            raise VerifyException(f"sp.enc: block {block} does not fit {len(order)} levels")
        if ("blocked" in self.level_names) != bool(block):
            raise VerifyException("sp.enc: a blocked level and a block need each other")
        for name, width in (("pos", self.pos.data), ("crd", self.crd.data)):
            if width not in WIDTHS:
                raise VerifyException(f"sp.enc: {name} {width} is not one of {WIDTHS}")

    def verify_shape(self, shape: Sequence[Dim]) -> None:
        """Refuse what does not fit a tensor of this shape.

        Raises:
            VerifyException: Levels do not match the axes, or coordinates could overflow.
        """
        if not self.is_sparse:
            return
        if len(shape) != len(self.levels.data):
            raise VerifyException(f"sp.enc: {len(self.levels.data)} levels for {len(shape)} axes")
        largest = 1 << self.crd.data
        for dim in shape:
            if self.crd.data < CRD_BITS and not (dim.is_static and dim.constant <= largest):
                raise VerifyException(
                    f"sp.enc: {self.crd.data}-bit coordinates cannot index an axis of size {dim}"
                )

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        """Parse the text between the angle brackets, brackets included."""
        square = parser.Delimiter.SQUARE

        def integers() -> list[int]:
            return parser.parse_comma_separated_list(square, parser.parse_integer)

        def comma() -> bool:
            return parser.parse_optional_punctuation(",") is not None

        levels: list[str] = []
        numbers: dict[str, list[int]] = {"order": [], "block": [], "masks": []}
        widths = {"pos": POS_BITS, "crd": CRD_BITS}
        dynamic, has_order = False, False
        with parser.in_angle_brackets():
            parser.parse_keyword("dims")
            dims = parser.parse_comma_separated_list(square, parser.parse_str_literal)
            while comma():
                key = parser.parse_identifier()
                if key == "levels":
                    levels = parser.parse_comma_separated_list(square, parser.parse_str_literal)
                elif key in numbers:
                    numbers[key] = integers()
                    has_order |= key == "order"
                elif key in widths:
                    widths[key] = parser.parse_integer()
                elif key == "dynamic":
                    dynamic = True
                else:
                    parser.raise_error(f"sp.enc has no parameter {key!r}")
        order = numbers["order"] if has_order else None
        return cls.make(
            dims, levels, numbers["block"], numbers["masks"], order=order, dynamic=dynamic, **widths
        ).parameters

    def print_parameters(self, printer: Printer) -> None:
        """Print the text that `parse_parameters` reads."""
        text = "<dims [" + ", ".join(f'"{d.data}"' for d in self.dims.data) + "]"
        if self.is_sparse:
            text += ", levels [" + ", ".join(f'"{name}"' for name in self.level_names) + "]"
            order = [axis.data for axis in self.order.data]
            text += f", order {order}" if order != sorted(order) else ""
            block = [size.data for size in self.block.data]
            text += f", block {block}" if block else ""
            text += f", pos {self.pos.data}, crd {self.crd.data}"
            text += f", masks {[mask.data for mask in self.masks.data]}"
            text += ", dynamic" if self.dynamic.data else ""
        printer.print_string(text + ">")


def _integers(values: Sequence[int]) -> ArrayAttr[IntAttr]:
    return ArrayAttr([IntAttr(value) for value in values])


def _verify_level(before: str, level: str) -> None:
    pair = structured(level)
    if level not in LEVELS and pair is None:
        raise VerifyException(f"unknown level type {level!r} in sp.enc")
    if pair is not None and not 1 <= pair[0] <= pair[1]:
        raise VerifyException(f"sp.enc: {level} keeps more than there are")
    if level == "singleton" and before not in ("compressed", "singleton"):
        raise VerifyException("sp.enc: a singleton level follows a compressed one")
