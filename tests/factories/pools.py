"""Plans whose experts lie in files and come into memory within a budget."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from compiler.contract.expert_pool import ExpertFile
from compiler.contract.native import NativePlan
from compiler.contract.native_library import KernelLibrary
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.plan_format import align
from compiler.contract.pool_abi import LEAST_RUN_BYTES
from compiler.contract.pool_plan import PoolPlan, paged_sections, plan_pool, runs_of
from compiler.contract.pooled_weights import PooledWeights
from tests.factories.kernels import Case, library

RUN = LEAST_RUN_BYTES


def memory_file(data: bytes) -> int:
    """Return a file of these bytes; the caller closes it."""
    fd = os.memfd_create("expert")
    os.pwrite(fd, data, 0)
    return fd


def expert_files(layout: PoolPlan, sections: Mapping[str, bytes]) -> list[ExpertFile]:
    return [
        ExpertFile(
            memory_file(sections[expert.name]),
            expert.length,
            hashlib.sha256(sections[expert.name]).hexdigest(),
            expert.layer,
        )
        for expert in layout.experts
    ]


def budget_of(plan: Plan, share: float) -> int:
    """Return a budget for all that stays and a share of the experts, at least what is needed."""
    names = paged_sections(plan)
    stays = sum(align(section.length) for section in plan.sections if section.name not in names)
    every = sum(runs_of(s.length, RUN) for s in plan.sections if s.name in names)
    least = plan_pool(plan, 1 << 50, RUN).least_bytes
    return max(least, stays + int(share * every) * RUN)


@contextmanager
def pooled(
    case: Case, target: str, share: float, *, reads_ahead: bool = True
) -> Iterator[tuple[NativePlan, PooledWeights]]:
    """Yield a plan that has a share of its experts in memory, and its weights."""
    plan = parse_plan(case.emitted.plan_bytes)
    layout = plan_pool(plan, budget_of(plan, share), RUN)
    files = expert_files(layout, case.emitted.sections)
    kernels = library(target)
    try:
        weights = PooledWeights(
            KernelLibrary(kernels), layout, case.emitted.sections, files, reads_ahead=reads_ahead
        )
        with NativePlan(kernels, case.emitted.plan_bytes, weights) as native:
            yield native, weights
    finally:
        for file in files:
            os.close(file.fd)
