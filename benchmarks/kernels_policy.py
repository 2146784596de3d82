"""What selection costs: a policy lookup, measuring at load, and a plan started from the cache.

The lookup is timed in C, because calling it from Python takes longer than it does. Tuning and start
are those of EdgeCard's own bundle, through the agent's own code.
"""

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.answer import build
from benchmarks.priority import uninterrupted
from benchmarks.runner import Claim
from benchmarks.synthetic import CACHE, moe_walk
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import parse_pipeline
from compiler.contract.plan import parse_plan
from compiler.contract.policy import CELLS, parse_policy
from compiler.contract.selftest import parse_selftest
from compiler.driver.options import CompiledBundle
from compiler.emitters.backends import build_kernels, render_kernels
from compiler.emitters.toolchain import compile_shared
from compiler.hardware.targets import find_target
from compiler.kernels.program import Op
from device_agent.runtime.bundle import LoadedBundle
from device_agent.runtime.tuning import tune
from examples.edgecard.materialise import materialise

ROUNDS: Final = 9
LOOKUPS: Final = 1_000_000
LOOKUP_BAR_NS: Final = 50.0
TUNE_BAR_MS: Final = 50.0
START_BAR_MS: Final = 20.0
LOOKUP_SOURCE: Final = """
SF_EXPORT uint64_t sf_bench_lookup(void *context, uint64_t count) {
  const sf_context *ctx = context;
  const sf_policy *policy = __atomic_load_n(&ctx->policy.next, __ATOMIC_ACQUIRE);
  uint64_t sum = 0;
  for (uint64_t i = 0, at = 0; i < count; i++, at = at + 1 == ctx->n_calls ? 0 : at + 1) {
    const uint32_t cell = sf_policy_cell(ctx, &ctx->calls[at], 1 + (uint32_t)(i & 15));
    sum += policy->variants[cell];
    __asm__ volatile("" : "+r"(sum));
  }
  return sum;
}
"""
"""Every lookup waits for the one before: its latency, the loop included."""


def _median(sample: Callable[[], float]) -> float:
    found = []
    for _ in range(ROUNDS):
        with uninterrupted():
            found.append(sample())
        time.sleep(0.01)
    return statistics.median(found)


def _claim(name: str, value: float, unit: str, bar: float, note: str) -> Claim:
    return Claim(name, value, unit, "bar", "", bar, bar / value, 1.0, "host", note)


def lookup_claim(target: str) -> Claim:
    """Return nanoseconds of a lookup, over the calls of a routed plan."""
    made = moe_walk(8, 64, 64, 4)
    source = render_kernels(find_target(target), (Op.MOE_LAYER,)) + LOOKUP_SOURCE
    kernels = compile_shared(source, find_target(target), CACHE)
    emitted = made.emit()
    with NativePlan(kernels, emitted.plan_bytes, emitted.sections) as plan:
        plan.policy.publish(bytes(CELLS))
        library = plan._library
        assert library is not None
        look = library._lib.sf_bench_lookup
        look.argtypes, look.restype = (ctypes.c_void_p, ctypes.c_uint64), ctypes.c_uint64

        def sample() -> float:
            start = time.perf_counter()
            look(plan._context, LOOKUPS)
            return (time.perf_counter() - start) / LOOKUPS * 1e9

        spent = _median(sample)
    return _claim("kernels.policy.lookup", spent, "ns", LOOKUP_BAR_NS, f"in C, {target}")


def _loaded(bundle: CompiledBundle, threads: int = 1) -> LoadedBundle:
    sections = bundle.sections
    plan = NativePlan(sections["kernels"], sections["plan"], sections, threads=threads)
    return LoadedBundle(
        "",
        plan,
        parse_pipeline(sections["pipeline"]),
        sections["selftest"],
        parse_policy(sections["policy"]),
    )


def tune_claim(bundle: CompiledBundle, target: str) -> Claim:
    """Return milliseconds of measuring threads and cells when a bundle starts."""
    facts = {}

    def sample() -> float:
        loaded = _loaded(bundle)
        tuned = tune(loaded, 0)
        loaded.runner.close()
        facts.update(tuned.facts)
        return float(str(tuned.facts["tuned_ms"]))

    spent = _median(sample)
    note = f"EdgeCard, threads and cells in doubt together: {facts['policy']}, {target}"
    return _claim("kernels.policy.tune", spent, "ms", TUNE_BAR_MS, note)


def start_claim(bundle: CompiledBundle, target: str) -> Claim:
    """Return milliseconds from kernels in the compiler's cache to the end of a plan's first run."""
    sections = bundle.sections
    ops = parse_plan(sections["plan"]).ops
    first = parse_selftest(sections["selftest"]).vectors[0].runs[0]
    build_kernels(find_target(target), ops, CACHE)

    def sample() -> float:
        start = time.perf_counter()
        kernels = build_kernels(find_target(target), ops, CACHE)
        with NativePlan(kernels, sections["plan"], sections) as plan:
            plan.run(first.program, first.inputs)
            return (time.perf_counter() - start) * 1e3

    note = f"EdgeCard: kernels from the cache, plan verified, weights copied, first run, {target}"
    return _claim("kernels.plan.cold_start", _median(sample), "ms", START_BAR_MS, note)


def policy_claims(target: str) -> list[Claim]:
    """Return the rows of selection for `benchmarks.kernels`."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = build(materialise("v1", Path(folder)))
    return [lookup_claim(target), tune_claim(bundle, target), start_claim(bundle, target)]


if __name__ == "__main__":
    from benchmarks.runner import table
    from compiler.driver.native_check import host_target

    host = host_target()
    assert host is not None
    print(table(policy_claims(host.id)))
