"""`SparsityInvariant`: the interface through which an operation names its zero rule.

The rule itself is a row of `compiler.analysis.zero_rules.ZERO_RULES`; an operation without the
interface, or whose key has no row, is dense: nothing is claimed about what nobody described.
"""

from dataclasses import dataclass

from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import Operation
from xdsl.traits import OpTrait

from compiler.dialects.types import encoding_of, shape_of


@dataclass(frozen=True)
class SparsityInvariant(OpTrait):
    """The operation keeps, makes or destroys zeros as one row of the table says.

    Attributes:
        selector: Property that tells apart the rows of one operation (`kind` of `sp.binary`).
    """

    selector: str = ""

    def zero_rule(self, op: Operation) -> str:
        """Return the key of the rule: the operation's name, and the selected property's text."""
        if not self.selector:
            return op.name
        choice = op.properties[self.selector]
        assert isinstance(choice, StringAttr)
        return f"{op.name}:{choice.data}"

    def verify(self, op: Operation) -> None:
        """Refuse operands and results whose encoding does not fit their shape."""
        for value in (*op.operands, *op.results):
            if isinstance(value.type, TensorType):
                encoding = encoding_of(value)
                if encoding is not None:
                    encoding.verify_shape(shape_of(value))


def zero_rule(op: Operation) -> str | None:
    """Return the key of the rule that `op` names, or None if it has no interface."""
    trait = op.get_trait(SparsityInvariant)
    return trait.zero_rule(op) if trait is not None else None
