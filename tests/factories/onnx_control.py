"""ONNX graphs with control flow and sequences, in the text form of the ONNX package."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import parser

_HEAD = '<ir_version: 10, opset_import: ["" : 18]>\n'


@dataclass(frozen=True)
class ControlCase:
    """One model.

    Attributes:
        operators: The operators that the model is here to show.
        inputs: Shapes of its f32 inputs.
    """

    name: str
    operators: frozenset[str]
    inputs: dict[str, tuple[int, ...]]
    text: str

    def model(self) -> onnx.ModelProto:
        return parser.parse_model(_HEAD + self.text)

    def arrays(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(8)
        return {k: random.standard_normal(v).astype(np.float32) for k, v in self.inputs.items()}


_BRANCH = """branch (float[3, 4] x) => (float[3, 4] y) {
  n = Shape (x)
  zero = Constant <value_ints = [0]> ()
  first = Gather (n, zero)
  three = Constant <value_ints = [3]> ()
  yes = Equal (first, three)
  y = If (yes) <
    then_branch = then_graph () => (float[3, 4] a) { a = Relu (x) },
    else_branch = else_graph () => (float[3, 4] b) { b = Neg (x) }>
}"""
_LOOP = """loop (float[3, 4] x) => (float[3, 4] last, float[n, 3, 4] rows) {
  trips = Constant <value_int = 3> ()
  go = Constant <value = bool {1}> ()
  last, rows = Loop (trips, go, x) <
    body = round (int64 i, bool on, float[3, 4] held)
        => (bool next, float[3, 4] after, float[3, 4] row) {
      next = Identity (on)
      step = Cast <to = 1> (i)
      grown = Add (held, step)
      after = Tanh (grown)
      row = Mul (after, x)
    }>
}"""
_SCAN = """scan (float[4] start, float[5, 4] a, float[4, 5] b)
    => (float[4] last, float[4, 5] sums, float[5, 4] rows) {
  last, sums, rows = Scan <
    num_scan_inputs = 2, scan_input_axes = [0, 1], scan_input_directions = [0, 1],
    scan_output_axes = [-1, 0], scan_output_directions = [1, 0],
    body = step (float[4] held, float[4] p, float[4] q)
        => (float[4] after, float[4] total, float[4] row) {
      inner = Mul (p, q)
      total = Add (held, inner)
      after = Tanh (total)
      row = Sub (after, start)
    }> (start, a, b)
}"""
_LISTS = """lists (float[5, 4] x, float[2, 4] z)
    => (float[n] picked, float[m, 4] joined, float[3, 2, 4] stacked, float[1] count) {
  sizes = Constant <value_ints = [2, 1, 2]> ()
  parts = SplitToSequence <axis = 0> (x, sizes)
  one = Constant <value_int = 1> ()
  back = Constant <value_int = -1> ()
  zero = Constant <value_int = 0> ()
  middle = SequenceAt (parts, one)
  flat = Constant <value_ints = [-1]> ()
  picked = Reshape (middle, flat)
  fewer = SequenceErase (parts, one)
  more = SequenceInsert (fewer, z, zero)
  joined = ConcatFromSequence <axis = 0> (more)
  made = SequenceConstruct (z, z)
  longer = SequenceInsert (made, z)
  shorter = SequenceErase (longer)
  again = SequenceInsert (shorter, z, back)
  stacked = ConcatFromSequence <axis = 0, new_axis = 1> (again)
  length = SequenceLength (more)
  number = Cast <to = 1> (length)
  single = Reshape (number, flat)
  some = Gather (x, zero)
  first = ReduceSum <keepdims = 0> (some)
  count = Mul (single, first)
}"""
_GROWN = """grown (float[6, 4] x) => (float[6, 4] y, float[6, 4] same) {
  trips = Constant <value_int = 6> ()
  go = Constant <value = bool {1}> ()
  none = SequenceEmpty <dtype = 1> ()
  rows = Loop (trips, go, none) <
    body = round (int64 i, bool on, seq(float[4]) held) => (bool next, seq(float[4]) after) {
      next = Identity (on)
      row = Gather (x, i)
      turned = Neg (row)
      after = SequenceInsert (held, turned)
    }>
  y = ConcatFromSequence <axis = 0, new_axis = 1> (rows)
  maybe = Optional (x)
  there = OptionalHasElement (maybe)
  got = OptionalGetElement (maybe)
  same = If (there) <
    then_branch = then_graph () => (float[6, 4] a) { a = Relu (got) },
    else_branch = else_graph () => (float[6, 4] b) { b = Neg (x) }>
}"""

CONTROL_CASES = (
    ControlCase("branch", frozenset({"If"}), {"x": (3, 4)}, _BRANCH),
    ControlCase("loop", frozenset({"Loop"}), {"x": (3, 4)}, _LOOP),
    ControlCase("scan", frozenset({"Scan"}), {"start": (4,), "a": (5, 4), "b": (4, 5)}, _SCAN),
    ControlCase(
        "lists",
        frozenset(
            {
                *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceErase"),
                *("SequenceInsert", "SequenceLength", "SplitToSequence"),
            }
        ),
        {"x": (5, 4), "z": (2, 4)},
        _LISTS,
    ),
    ControlCase(
        "grown",
        frozenset({"SequenceEmpty", "Optional", "OptionalGetElement", "OptionalHasElement"}),
        {"x": (6, 4)},
        _GROWN,
    ),
)
