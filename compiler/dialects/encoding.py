"""`#sp.enc`: what a tensor type knows beyond its shape, in the slot MLIR calls the encoding.

Written `#sp.enc<dims ["P + T"]>` for a dense tensor with run-time axes (one expression per `?`) and
`#sp.enc<dims ["T"], levels ["dense", "compressed"], block [], masks [0, 2], dynamic>` for one whose
zeros are known: level types as in MLIR's `sparse_tensor`, the block shape, and the mask sources
whose zeros are certainly zeros of this tensor too (see `compiler.analysis.zeros`).
"""

from collections.abc import Sequence

from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr
from xdsl.ir import Attribute, ParametrizedAttribute
from xdsl.irdl import irdl_attr_definition, param_def
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import VerifyException

from compiler.dialects.dims import parse_dim

LEVELS = ("dense", "compressed", "singleton", "blocked", "nm")


@irdl_attr_definition
class EncodingAttr(ParametrizedAttribute):
    """Run-time axes and sparsity of a tensor type."""

    name = "sp.enc"
    dims: ArrayAttr[StringAttr] = param_def()
    levels: ArrayAttr[StringAttr] = param_def()
    block: ArrayAttr[IntAttr] = param_def()
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
        dynamic: bool = False,
    ) -> "EncodingAttr":
        """Build the attribute from plain values."""
        return cls(
            ArrayAttr([StringAttr(d) for d in dims]),
            ArrayAttr([StringAttr(level) for level in levels]),
            ArrayAttr([IntAttr(b) for b in block]),
            ArrayAttr([IntAttr(m) for m in masks]),
            IntAttr(int(dynamic)),
        )

    @property
    def is_sparse(self) -> bool:
        """Whether zeros of the tensor are known by structure."""
        return bool(self.levels.data)

    def verify(self) -> None:
        """Refuse unknown level types, unreadable sizes, and masks on a dense tensor."""
        for level in self.levels.data:
            if level.data not in LEVELS:
                raise VerifyException(f"unknown level type {level.data!r} in sp.enc")
        for dim in self.dims.data:
            try:
                parse_dim(dim.data)
            except ValueError as error:
                raise VerifyException(str(error)) from error
        if self.masks.data and not self.levels.data:
            raise VerifyException("sp.enc names masks of a dense tensor")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        """Parse the text between the angle brackets, brackets included."""
        square = parser.Delimiter.SQUARE
        with parser.in_angle_brackets():
            parser.parse_keyword("dims")
            dims = parser.parse_comma_separated_list(square, parser.parse_str_literal)
            levels: list[str] = []
            block: list[int] = []
            masks: list[int] = []
            dynamic = False
            if parser.parse_optional_punctuation(","):
                parser.parse_keyword("levels")
                levels = parser.parse_comma_separated_list(square, parser.parse_str_literal)
                parser.parse_punctuation(",")
                parser.parse_keyword("block")
                block = parser.parse_comma_separated_list(square, parser.parse_integer)
                parser.parse_punctuation(",")
                parser.parse_keyword("masks")
                masks = parser.parse_comma_separated_list(square, parser.parse_integer)
                if parser.parse_optional_punctuation(","):
                    parser.parse_keyword("dynamic")
                    dynamic = True
        return cls.make(dims, levels, block, masks, dynamic=dynamic).parameters

    def print_parameters(self, printer: Printer) -> None:
        """Print the text that `parse_parameters` reads."""
        dims = ", ".join(f'"{d.data}"' for d in self.dims.data)
        text = f"<dims [{dims}]"
        if self.is_sparse:
            levels = ", ".join(f'"{level.data}"' for level in self.levels.data)
            block = ", ".join(str(b.data) for b in self.block.data)
            masks = ", ".join(str(m.data) for m in self.masks.data)
            text += f", levels [{levels}], block [{block}], masks [{masks}]"
            text += ", dynamic" if self.dynamic.data else ""
        printer.print_string(text + ">")
