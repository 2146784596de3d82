"""The decoder of `benchmarks.decode` as a compiled plan, in a folder as a device has it.

    narrow graph --import, all passes--> module --experts widened--> plan with drawn codes

The graph is the one that ONNX Runtime runs (`decode_graph`), lowered by the product's own importer
and passes, so that calls, fusions and cache are what a user gets. Two things differ from
`compile`: experts are lowered `NARROW` wide and take their full width afterwards, since no call
depends on it; and codes are drawn instead of quantised. The reason is size: the whole model is
4.9 GB in f32, which passes, search for scales and self-test in the simulator would hold and visit
several times. Queries, keys and values are three products in the graph; the compiler makes them
one again.
"""

import mmap
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.decode_graph import PATCH, PICTURE, Shape, write_submission
from benchmarks.synthetic import CACHE, random_w4, shape_only
from compiler.contract.bands import PREFIX, STEP
from compiler.contract.native import NativePlan
from compiler.contract.session import step_inputs
from compiler.driver.lowering import lower_submission
from compiler.driver.options import no_progress
from compiler.driver.scheduling import schedule_module
from compiler.driver.stages import StageClock
from compiler.emitters.backends import build_kernels
from compiler.emitters.bands import with_variants
from compiler.emitters.plan import emit_plan
from compiler.hardware.targets import find_target
from compiler.kernels.program import Module, Weight
from compiler.quant.w4 import PackedW4

NARROW: Final = 32
BLOCK: Final = 32
EXPERT: Final = "expert."
PLAN, KERNELS, SECTIONS = "plan", "kernels", "sections"
FIRST_POSITION: Final = (PICTURE // PATCH) ** 2
TOKEN_BYTES: Final = 4


def variant(top: int) -> str:
    """Return the name of the program that takes `top` experts per token."""
    return f"{PREFIX}{top}"


def write_plan(shape: Shape, target: str, step_tokens: int, folder: Path) -> None:
    """Write plan, kernels and sections.

    Besides `step` there are variants of it with one expert per token and with all of them.

    Args:
        target: Whom the kernels are for.
        step_tokens: The most tokens of one call.
    """
    module = lowered(shape, step_tokens)
    packed = {
        weight.id: random_w4(*weight.array.shape, weight.id)
        for weight in module.weights
        if weight.kind == "w4"
    }
    write_folder(module, packed, target, folder)


def write_folder(module: Module, packed: Mapping[int, PackedW4], target: str, folder: Path) -> None:
    """Write plan, kernels and sections of a module to a folder that is made here."""
    emitted = emit_plan(module, weights_packed=packed)
    folder.mkdir()
    (folder / PLAN).write_bytes(emitted.plan_bytes)
    (folder / KERNELS).write_bytes(build_kernels(find_target(target), tuple(module.ops), CACHE))
    (folder / SECTIONS).mkdir()
    for name, data in emitted.sections.items():
        (folder / SECTIONS / name).write_bytes(data)


def lowered(shape: Shape, step_tokens: int) -> Module:
    """Return the module that the compiler makes of the graph, experts at full width, no values."""
    with tempfile.TemporaryDirectory() as name:
        write_submission(replace(shape, hidden=NARROW), BLOCK, Path(name), step_tokens)
        module = lower_submission(Path(name), StageClock(no_progress)).module
    wide = tuple(_widened(weight, shape) for weight in module.weights)
    step = tuple(program for program in module.programs if program.name == STEP)
    tops = (1, shape.experts)
    variants = {variant(top): [top] * shape.layers for top in tops}
    module = with_variants(replace(module, programs=step, weights=wide), variants)
    return schedule_module(module, None).module


def _widened(weight: Weight, shape: Shape) -> Weight:
    if weight.kind != "w4":
        return weight
    n, k = weight.array.shape
    if weight.section.startswith(EXPERT):
        n, k = (n, shape.hidden) if k == NARROW else (2 * shape.hidden, k)
    return replace(weight, array=shape_only(n, k))


class PlanDecoder:
    """A loaded plan. One token or one prompt per call."""

    def __init__(
        self, folder: Path, threads: int, program: str = STEP, single: float = 0.0
    ) -> None:
        """Load what `write_plan` wrote.

        Args:
            program: What runs.
            single: Share of the tokens, prompts apart, for which one expert is taken instead.
        """
        sections = {path.name: _mapped(path) for path in (folder / SECTIONS).iterdir()}
        plan = (folder / PLAN).read_bytes()
        self.plan = NativePlan(folder / KERNELS, plan, sections, threads=threads)
        self._program, self._single, self._due = program, single, 0.0

    def forget(self) -> None:
        """Empty the cache."""
        self.plan.kv_length = 0

    def step(self, ids: list[int]) -> int:
        """Append tokens; return the greedy next one."""
        inputs = step_inputs(ids, FIRST_POSITION + self.plan.kv_length)
        token = self.plan.run(self._next(len(ids)), inputs)["token"]
        return int.from_bytes(token[:TOKEN_BYTES], "little", signed=True)

    def _next(self, rows: int) -> str:
        """Return the program of a call, the variant of one expert evenly among the others."""
        self._due += self._single if rows == 1 else 0.0
        if self._due < 1.0:
            return self._program
        self._due -= 1.0
        return variant(1)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
