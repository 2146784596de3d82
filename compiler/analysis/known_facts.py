"""Facts of a module, analysed again only after the module changed.

The pass manager asks before and after every pass, and some passes ask themselves; most passes
change little or nothing. One of these belongs to one module and its constants
(`compiler.passes.base.PassContext`).
"""

from dataclasses import dataclass
from typing import Any

from xdsl.dialects.builtin import ModuleOp

from compiler.analysis.constants import ConstantTable
from compiler.analysis.module_state import ModuleState, state_of
from compiler.analysis.propagation import STANDARD, Facts, ZeroLogic, module_facts


@dataclass(slots=True)
class KnownFacts:
    """The last analysis, and what it was of."""

    _last: tuple[ModuleState, ZeroLogic, dict[str, Facts]] | None = None

    def of(
        self,
        module: ModuleOp,
        constants: ConstantTable,
        logic: ZeroLogic = STANDARD,
        state: ModuleState | None = None,
    ) -> dict[str, Facts]:
        """Return the facts of each function by name, in order; nobody may write to them.

        Args:
            module: The module.
            constants: Arrays of its constants.
            logic: The rules.
            state: `state_of(module)`, if the caller has it.
        """
        now = state_of(module) if state is None else state
        if self._last is not None and self._last[1] is logic and self._last[0] == now:
            return self._last[2]
        funcs: list[Any] = [one.own.op for one in now]
        found = module_facts(funcs, constants, logic)
        facts = {one.name: each for one, each in zip(now, found, strict=True)}
        self._last = now, logic, facts
        return facts
