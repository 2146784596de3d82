"""Writing one ONNX node out as plain nodes while a graph is evaluated.

`evaluate` makes a `Writer` for a node of `expansions.EXPANSIONS`; the row writes nodes with `op`,
and each is evaluated at once, so that a row may ask for the shape of what it has just made. Nodes
that no result needs leave no trace in the module.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from compiler.dialects.dims import Binding
from compiler.errors import UnsupportedOperatorError
from compiler.frontend.limits import FoldBudget
from compiler.frontend.values import Array, Known, Value

FIXED_HINT: Final = "pin what it depends on: sizes with dims, scalar inputs with constants"
Run = Callable[[Sequence[onnx.NodeProto]], None]


@dataclass(slots=True)
class Writer:
    """What a row of `EXPANSIONS` sees of its node, and how it writes the others.

    Attributes:
        proto: The node that is written out.
        values: All values so far, each under every binding of the lengths; writing adds to it.
        run: Evaluates nodes.
        opset: Version of the default operator set.
        prefix: What names of values made here begin with; unique in the graph.
        lengths: The bindings of the lengths.
        budget: What constants may take.
    """

    proto: onnx.NodeProto
    values: MutableMapping[str, tuple[Value, ...]]
    run: Run
    opset: int
    prefix: str
    lengths: Sequence[Binding]
    budget: FoldBudget
    count: int = 0
    tables: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)

    # ---- the node ----

    @property
    def label(self) -> str:
        """The node's name, or that of its first result."""
        return self.proto.name or next((name for name in self.proto.output if name), "?")

    @property
    def inputs(self) -> list[str]:
        """Names of operands, "" for absent ones; as many as an operator can have."""
        return [*self.proto.input, *[""] * 8]

    @property
    def outputs(self) -> list[str]:
        """Names of results, "" for those nobody wants."""
        return [*self.proto.output, *[""] * 4]

    def attrs(self, **defaults: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever they hold
        """Return the node's attributes with text as str, `defaults` where they are absent."""
        found = {a.name: helper.get_attribute_value(a) for a in self.proto.attribute}
        plain = {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}
        return {**defaults, **plain}

    def refusal(self, reason: str, hint: str = "") -> UnsupportedOperatorError:
        """Return the error that refuses this node."""
        return UnsupportedOperatorError(
            f"operator {self.proto.op_type} (node {self.label}): {reason}", hint=hint
        )

    def need(self, condition: bool, reason: str, hint: str = "") -> None:
        """Refuse the node unless a condition holds."""
        if not condition:
            raise self.refusal(reason, hint)

    # ---- values ----

    def family(self, name: str) -> tuple[Value, ...]:
        """Return a value under every binding."""
        if name not in self.values:
            raise ValueError(f"it reads {name!r}, which nothing makes")
        return self.values[name]

    def rank(self, name: str) -> int:
        """Return the number of axes."""
        return len(self.family(name)[0].shape)

    def dtype(self, name: str) -> str:
        """Return the numpy name of the element type."""
        return self.family(name)[0].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return sizes that are the same for all lengths.

        Raises:
            UnsupportedOperatorError: One of them depends on the run-time lengths.
        """
        first, *others = (value.shape for value in self.family(name))
        self.need(
            all(other == first for other in others),
            f"sizes of {name!r} are known only at run time",
            FIXED_HINT,
        )
        return first

    def size(self, name: str, axis: int) -> int:
        """Return the size of one axis, which must be the same for all lengths.

        Raises:
            UnsupportedOperatorError: It depends on the run-time lengths.
        """
        found = {sizes[axis] for sizes in self.sizes(name)}
        self.need(len(found) == 1, f"axis {axis} of {name!r} has a run-time size", FIXED_HINT)
        return found.pop()

    def sizes(self, name: str) -> list[tuple[int, ...]]:
        """Return the sizes under every binding of the lengths."""
        return [value.shape for value in self.family(name)]

    def known(self, name: str) -> Array | None:
        """Return the elements of a value that is the same for all lengths, or None."""
        found = self.arrays(name)
        same = found and all(a is found[0] or np.array_equal(a, found[0]) for a in found)
        return found[0] if found and same else None

    def arrays(self, name: str) -> list[Array] | None:
        """Return the elements of a value under every binding, None if they are not all known."""
        found = [value.array for value in self.family(name) if isinstance(value, Known)]
        return found if len(found) == len(self.family(name)) else None

    def stored(self, name: str, what: str) -> Array:
        """Return the elements of a value, which must be known.

        Raises:
            UnsupportedOperatorError: They depend on what the model is fed.
        """
        array = self.known(name)
        if array is None:
            raise self.refusal(f"{what} is known only at run time", FIXED_HINT)
        return array

    def integers(self, name: str, what: str) -> list[int]:
        """Return the integers of a value, which must be known."""
        return [int(item) for item in self.stored(name, what).reshape(-1)]

    # ---- writing ----

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:  # noqa: ANN401
        """Write a node with one result; return the result's name."""
        made = out or self.fresh()
        self._write(helper.make_node(kind, list(inputs), [made], **attributes))
        return made

    def ops(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:  # noqa: ANN401
        """Write a node with several results; return their names."""
        made = [self.fresh() for _ in range(count)]
        self._write(helper.make_node(kind, list(inputs), made, **attributes))
        return made

    def _write(self, node: onnx.NodeProto) -> None:
        node.name = self.label
        self.run([node])

    def fresh(self) -> str:
        """Return a new name."""
        self.count += 1
        return f"{self.prefix}{self.count}"

    def store(self, array: Array) -> str:
        """Add a constant; return its name."""
        self.budget.spend(array.nbytes, self.label)
        name = self.fresh()
        self.values[name] = (Known(np.asarray(array)),) * self.bindings
        return name

    def room(self, *sizes: int) -> None:
        """Check the size of a constant before it is made.

        Raises:
            LimitError: It has more elements than the limits allow.
        """
        if min(sizes, default=0) < 0:
            raise ValueError(f"a tensor of sizes {sizes}")
        self.budget.elements(sizes, f"operator {self.proto.op_type} (node {self.label})")

    @property
    def bindings(self) -> int:
        """Under how many bindings of the lengths values are known."""
        return len(self.lengths)

    def by_length(self, arrays: Sequence[Array]) -> str:
        """Add a value that follows from the lengths: its elements under every binding."""
        self.budget.spend(sum(array.nbytes for array in arrays), self.label)
        name = self.fresh()
        self.values[name] = tuple(Known(np.asarray(array)) for array in arrays)
        return name

    def ints(self, *values: int) -> str:
        """Add a constant i64 vector."""
        return self.store(np.array(values, np.int64))

    def scalar(self, value: int) -> str:
        """Add a constant i64 without axes."""
        return self.store(np.array(value, np.int64))

    def number(self, value: float, dtype: str = "float32") -> str:
        """Add a constant number without axes."""
        return self.store(np.array(value, dtype))

    def split(self, x: str, sizes: list[int], axis: int = 2) -> list[str]:
        """Write the split of an axis into parts."""
        return self.ops("Split", len(sizes), x, self.ints(*sizes), axis=axis)

    def reshape(self, x: str, *sizes: int, out: str = "") -> str:
        """Write a reshape to sizes as ONNX gives them (0 = as before, -1 = the rest)."""
        return self.op("Reshape", x, self.ints(*sizes), out=out)

    def slice(self, x: str, axis: int, start: int, end: int) -> str:
        """Write elements [start, end) of one axis."""
        return self.op("Slice", x, self.ints(start), self.ints(end), self.ints(axis))

    def floats(self, x: str) -> str:
        """Write a value as f32."""
        return self.op("Cast", x, to=TensorProto.FLOAT)

    def give(self, x: str, at: int = 0) -> None:
        """Name a value as result `at` of the node."""
        self.op("Identity", x, out=self.outputs[at])


Expansion = Callable[[Writer], None]
Expansions = Mapping[str, Expansion]
