"""How a device steers routers at run time: the record, the experts of a router, what was done.

    Steering + Residency -(SteeringSeat, or the simulator)-> every routed row from the next run on

With u = what a router chooses by (its logits z, or of the sigmoid orders the corrected scores),
per routed row and router:

    d = max u - min u;  D = exponential mean of d, rate `SPREAD_RATE`, since the cache was last cut
    u'[e] = u[e] - pull * D * absent[e] + modality * bias[e]   (pull: some, not all, are absent)
    m = min(k, max_k); 1 if g1 - g2 > margin * sum of g, with g the gates of the unsteered choice
    m experts: the `protect` best of u, then the best of u'; gates by the router's own rule from z

What is absent is lowered, not what is resident raised: the order is the same, and a shift of all
experts alike changes nothing. Where `may_load` is false absent experts are passed over for the next
best; where none is left a row has fewer, down to none: its slots hold expert -1, gate 0, and its
layer adds what is shared. A router is steered if exactly one EXPERTS call reads its choice (of a
MOE_LAYER: none) and all other readers only carry it to a port. Pure, standard library only.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from compiler.contract.errors import ContractError
from compiler.contract.expert_pages import TapeCall, experts_of
from compiler.contract.operations import Op

MAX_K: Final = 64
MAX_PULL: Final = 64.0
MAX_BIAS: Final = (2.0 - 2.0**-23) * 2.0**127
"""The greatest finite f32: a larger bias would be infinite in the record."""
SPREAD_RATE: Final = 0.0625
"""Weight of a row in the mean spread of its router."""
CARRIERS: Final = (Op.ROWS_SLICE, Op.ROWS_CONCAT, Op.COLS_SLICE, Op.COLS_CONCAT)
"""Operations that may read a steered choice besides its experts: they move it."""
NO_EXPERT: Final = -1
"""What a slot holds that took no expert."""


class SteeringError(ContractError):
    """A steering record makes no sense for a plan."""

    code: ClassVar[str] = "contract.steering"


@dataclass(frozen=True, slots=True)
class Steering:
    """One record.

    Attributes:
        pull: By how many mean spreads of the logits an absent expert is lowered, 0 to `MAX_PULL`.
        protect: How many of the router's own best are always taken (if they may be loaded).
        margin: A token whose best expert leads the second by more than this share of all gates
            takes that one alone; 1 = never.
        max_k: The most experts of a token; 0 = as many as the router takes.
        modality: Text (1) or picture (-1), or between: how much of `bias` is added.
        bias: Per weight of the plan, read where an expert's first weight is; empty = none.
        may_load: Whether an absent expert may be chosen, to be loaded.
    """

    pull: float = 0.0
    protect: int = 1
    margin: float = 1.0
    max_k: int = 0
    modality: float = 0.0
    bias: tuple[float, ...] = ()
    may_load: bool = True

    def check(self, weights: int) -> None:
        """Check the record against a plan of so many weights.

        Raises:
            SteeringError: A value is out of range, or the bias is of another plan.
        """
        for name, value, low, high in (
            ("pull", self.pull, 0.0, MAX_PULL),
            ("protect", self.protect, 0, MAX_K),
            ("margin", self.margin, 0.0, 1.0),
            ("max_k", self.max_k, 0, MAX_K),
            ("modality", self.modality, -1.0, 1.0),
        ):
            if not low <= value <= high:
                raise SteeringError(f"{name} {value} is not between {low:g} and {high:g}")
        if self.bias and len(self.bias) != weights:
            raise SteeringError(f"a bias of {len(self.bias)} entries for {weights} weights")
        if not all(-MAX_BIAS <= entry <= MAX_BIAS for entry in self.bias):
            raise SteeringError("a bias must be finite")


class Residency:
    """Which experts are in memory: a byte per weight of the plan, 1 where such an expert begins.

    Any thread may write it while runs go on; a row reads each byte once.
    """

    def __init__(self, weights: int) -> None:
        """Begin with every expert in memory."""
        self._table = (ctypes.c_uint8 * weights)(*([1] * weights))
        self.address: Final = ctypes.addressof(self._table)

    def __len__(self) -> int:
        """Return how many weights the plan has."""
        return len(self._table)

    def __getitem__(self, weight: int) -> bool:
        """Return whether the expert whose first weight this is is in memory."""
        return bool(self._table[weight])

    def __setitem__(self, weight: int, is_resident: bool) -> None:
        """Say so."""
        self._table[weight] = is_resident


@dataclass(frozen=True, slots=True)
class Counts:
    """What steering did to the routed rows of a plan, summed over its routers.

    Attributes:
        rows: Rows routed.
        chosen: Experts taken.
        narrowed: Rows that were to take fewer than the router takes.
        substituted: Experts that were wanted, were absent and might not be loaded.
        missing: Slots of those that no other expert filled.
    """

    rows: int = 0
    chosen: int = 0
    narrowed: int = 0
    substituted: int = 0
    missing: int = 0

    def since(self, before: "Counts") -> "Counts":
        """Return what was done after `before`."""
        return Counts(
            *(getattr(self, name) - getattr(before, name) for name in self.__slots__),
        )

    @property
    def mean_k(self) -> float | None:
        """Experts per routed row; None if there was none."""
        return self.chosen / self.rows if self.rows else None


class RoutedCall(TapeCall, Protocol):
    """A call of a program, with its operands."""

    @property
    def inputs(self) -> Sequence[int]:
        """Numbers of the buffers that it reads, -1 = absent."""

    @property
    def outputs(self) -> Sequence[int]:
        """Numbers of the buffers that it writes."""


def steered_experts(
    calls: Sequence[RoutedCall], rows_of: Mapping[int, int] | Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return whose experts each router of a program chooses, if it may be steered.

    Args:
        calls: All calls of the program.
        rows_of: Rows of a weight, by its number.

    Returns:
        By position of a ROUTE or MOE_LAYER, the first weight of every expert; and of an
        EXPERT_FORESEE about the same experts.
    """
    found = {}
    for at, call in enumerate(calls):
        if call.op not in (Op.ROUTE, Op.MOE_LAYER):
            continue
        mixer = _mixer(call, calls[at + 1 :])
        firsts = () if mixer is None else tuple(expert[0] for expert in experts_of(mixer))
        if firsts and len(firsts) == rows_of[router_matrix(call)]:
            found[at] = firsts
    early = {
        at: tuple(expert[0] for expert in experts_of(call))
        for at, call in enumerate(calls)
        if call.op is Op.EXPERT_FORESEE
    }
    return found | {at: firsts for at, firsts in early.items() if firsts in found.values()}


def router_matrix(call: TapeCall) -> int:
    """Return the number of the matrix of a ROUTE or MOE_LAYER: by it a router is known."""
    return call.weights[2 if call.op is Op.MOE_LAYER else 0]


def _mixer(router: RoutedCall, later: Sequence[RoutedCall]) -> RoutedCall | None:
    """Return the call with the experts that a router chooses; None if something else reads it."""
    is_fused = router.op is Op.MOE_LAYER
    chosen = tuple(router.outputs[is_fused : is_fused + 2])
    found = router if is_fused else None
    carried = {*chosen}
    for call in later:
        if not carried & {*call.inputs}:
            continue
        if call.op in CARRIERS:
            carried.add(call.outputs[0])
            continue
        mixes = call.op is Op.EXPERTS and tuple(call.inputs[1:3]) == chosen
        if found is not None or not mixes or call.inputs[0] in carried:
            return None
        found = call
    return found
