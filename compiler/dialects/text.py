"""Text form of modules: MLIR syntax, generic where an operation has no own form."""

from io import StringIO

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.dialects.func import Func
from xdsl.ir import Attribute
from xdsl.parser import Parser
from xdsl.printer import Printer

from compiler.dialects.hw import Hw
from compiler.dialects.mm import Mm
from compiler.dialects.moe import Moe
from compiler.dialects.moe_schedule import LAYER_ATTRS, LAYER_OPS
from compiler.dialects.sp import Sp


def make_context() -> Context:
    """Return a context that knows every dialect of ours and what they are embedded in."""
    context = Context()
    for dialect in (Builtin, Func, Sp, Moe, Mm, Hw):
        context.load_dialect(dialect)
    for op in LAYER_OPS:
        context.load_op(op)
    for attr in LAYER_ATTRS:
        context.load_attr_or_type(attr)
    return context


def parse_module(text: str) -> ModuleOp:
    """Parse and verify a module.

    Raises:
        xdsl.utils.exceptions.ParseError: The text is not a module of our dialects.
        xdsl.utils.exceptions.VerifyException: It is, and breaks a rule of an operation.
    """
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


def print_module(module: ModuleOp) -> str:
    """Return the text of a module; `parse_module` reads it back to the same text."""
    text = StringIO()
    _Printer(text).print_op(module)
    return text.getvalue() + "\n"


class _Printer(Printer):
    """Makes the text of an attribute once: types and properties recur on every line."""

    def __init__(self, stream: StringIO) -> None:
        super().__init__(stream=stream)
        self._known: dict[int, tuple[Attribute, str]] = {}

    def print_attribute(self, attribute: Attribute) -> None:
        """Print an attribute."""
        known = self._known.get(id(attribute))
        if known is None:  # the attribute is kept, so that no other one gets its id
            known = self._known[id(attribute)] = (attribute, str(attribute))
        self.print_string(known[1])
