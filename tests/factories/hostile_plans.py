"""Damaged plans and sections of every newer feature, loaded and run: whatever comes, no crash.

python -m tests.factories.hostile_plans COUNT [FEATURE ...]     prints what became of COUNT mutants

Run in a process of its own, because a fault would end it: weights and arena end at a page without
access. A mutant ends in a typed error when it is loaded or run, or runs to its end.
"""

import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from compiler.contract import native, native_weights
from compiler.contract.errors import ContractError
from compiler.contract.native import NativePlan
from compiler.contract.operations import ExpertAct, Op, RouteOrder
from compiler.contract.plan import Plan, PlanProgram
from compiler.contract.plan_format import Direction, DType
from compiler.kernels.program import COO, CSR, ELL, NM, TILES
from tests.factories.checked_kernels import GuardedMemory
from tests.factories.kernels import Case, library, native_targets
from tests.factories.legal_calls import draw
from tests.factories.modules import small_decoder
from tests.factories.w8 import product, routed
from tests.integration.test_native_checks import checked
from tests.integration.test_native_elements import linear, pruned
from tests.integration.test_native_nm import linear as nm_linear
from tests.integration.test_native_nm import shared
from tests.integration.test_native_router_codes import router
from tests.integration.test_native_schedule import fused, planned

FEATURES: Final[Mapping[str, Callable[[], Case]]] = {
    "csr": lambda: Case.of(linear(CSR, pruned("unstructured", 90, 200))),
    "coo": lambda: Case.of(linear(COO, pruned("unstructured", 90, 200))),
    "ell": lambda: Case.of(linear(ELL, pruned("blocks of 32 x 4", 90, 200))),
    "check": lambda: Case.of(checked(4)),
    "tiles": lambda: Case.of(checked(4, TILES)),
    "schedule": lambda: Case.of(planned(small_decoder(5))),
    "fused": lambda: Case.of(fused()),
    "nm": lambda: Case.of(nm_linear(NM, shared(90, 200))),
    "w8": lambda: Case.of(product(33, 40, None)),
    "w8 step": lambda: Case.of(product(33, 40, None, x_step=0.05)),
    "w8 experts": lambda: Case.of(routed(("w8", "w4"), ExpertAct.RELU, whole=False)),
    "w8 layer": lambda: Case.of(routed(("w4", "w8"), ExpertAct.RELU, whole=True)),
    "sparse conv": lambda: Case.of(draw(Op.SPARSE_CONV, 0).module),
    "packed": lambda: Case.of(draw(Op.PACKED, 0).module),
    "i8 router": lambda: Case.of(router(7, 13, 8, RouteOrder.TOPK_SOFTMAX)),
    "i16 router": lambda: Case.of(router(7, 13, 16, RouteOrder.SIGMOID_TOPK)),
}
NEAR: Final = (-64, -4, -2, -1, 1, 2, 4, 64)
WORDS: Final = (0, 1, 64, 65535, 70000, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
MAX_CHANGES: Final = 5


@dataclass
class Outcomes:
    """How many mutants were refused, and how many runs of the others ended well or in an error."""

    refused: int = 0
    ran: int = 0
    failed: int = 0


def _word(data: bytearray, random: np.random.Generator) -> None:
    """Overwrite a word by one of `WORDS`."""
    at = 4 * int(random.integers(len(data) // 4))
    struct.pack_into("<I", data, at, WORDS[int(random.integers(len(WORDS)))])


def _step(data: bytearray, random: np.random.Generator) -> None:
    """Move a word by a little: sizes, offsets and numbers of buffers stay plausible."""
    at = 4 * int(random.integers(len(data) // 4))
    (before,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at, (before + int(random.choice(NEAR))) & 0xFFFFFFFF)


def _byte(data: bytearray, random: np.random.Generator) -> None:
    data[int(random.integers(len(data)))] = int(random.integers(256))


def _damage(data: bytearray, random: np.random.Generator) -> None:
    (_step, _byte, _word)[int(random.integers(3))](data, random)


def mutant(case: Case, random: np.random.Generator) -> tuple[bytes, dict[str, bytes]]:
    """Return plan and sections with changes in either, or in both."""
    plan = bytearray(case.emitted.plan_bytes)
    sections = {name: bytearray(data) for name, data in case.emitted.sections.items()}
    where = int(random.integers(3))
    for _ in range(int(random.integers(1, 3)) if where != 1 else 0):
        _damage(plan, random)
    for _ in range(int(random.integers(1, MAX_CHANGES + 1)) if where != 0 else 0):
        data = sections[sorted(sections)[int(random.integers(len(sections)))]]
        _damage(data, random)
    return bytes(plan), {name: bytes(data) for name, data in sections.items()}


def inputs(plan: Plan, program: PlanProgram, tokens: int) -> dict[str, bytes]:
    """Return inputs of a program: of several tokens, some numbers are huge or none at all."""
    random = np.random.default_rng(tokens)
    found = {}
    for port in program.ports:
        if port.direction is not Direction.INPUT:
            continue
        buffer = plan.buffers[port.buffer]
        shape = (tokens if buffer.dynamic else buffer.rows, buffer.cols)
        if buffer.dtype is DType.F32:
            wild = 0.02 if tokens > 1 else 0.0
            scale = random.choice([1.0, 1e30, np.nan], shape, p=[1 - 2 * wild, wild, wild])
            found[port.role] = (random.standard_normal(shape) * scale).astype("<f4").tobytes()
        elif buffer.dtype is DType.I32:
            found[port.role] = random.integers(-1, 7, shape).astype("<i4").tobytes()
        else:
            found[port.role] = random.integers(0, 256, shape).astype("u1").tobytes()
    return found


def attack(case: Case, kernels: bytes, count: int, seed: int) -> Outcomes:
    """Load and run `count` mutants of a case, the same ones for the same seed."""
    random, outcomes = np.random.default_rng(seed), Outcomes()
    for _ in range(count):
        plan_bytes, sections = mutant(case, random)
        threads = int(random.integers(1, 4))
        try:
            loaded = NativePlan(kernels, plan_bytes, sections, threads=threads)
        except ContractError:
            outcomes.refused += 1
            continue
        with loaded:
            for program in loaded.plan.programs:
                for tokens in (1, loaded.plan.max_tokens):
                    try:
                        loaded.run(program.name, inputs(loaded.plan, program, tokens))
                        outcomes.ran += 1
                    except ContractError:
                        outcomes.failed += 1
    return outcomes


def main(count: int, features: list[str]) -> None:
    """Attack every feature on this machine's best target and print a line each."""
    native.Memory = GuardedMemory  # type: ignore[assignment,misc]
    native_weights.Memory = GuardedMemory  # type: ignore[assignment,misc]
    kernels = library(native_targets()[-2])
    for name in features or FEATURES:
        done = attack(FEATURES[name](), kernels, count, seed=len(name))
        print(f"{name}: {done.refused} refused, {done.ran} ran, {done.failed} failed", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
