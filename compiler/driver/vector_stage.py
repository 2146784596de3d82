"""The self-test's vectors: native code looks for rare experts, the simulator records the answers.

They are kept by the content of plan, weights, pipeline and calibration set.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from compiler.contract.pipeline import parse_pipeline
from compiler.contract.plan import Plan
from compiler.contract.selftest import SelfTest
from compiler.driver import scout
from compiler.driver.bundle_simulator import BundleSimulator
from compiler.driver.cache import scratch_directory
from compiler.driver.cards import read_cards
from compiler.driver.native_check import run_child, write_sections
from compiler.driver.plan_facts import expert_sections
from compiler.driver.provenance import CALIBRATION
from compiler.driver.selftest import Hint, make_selftest


def make_vectors(
    directory: Path,
    sections: Mapping[str, bytes],
    plan: Plan,
    host_kernels: Callable[[], bytes | None],
    vectors: int,
    timeout_s: float,
) -> SelfTest:
    """Return the vectors with the simulator's answers.

    Args:
        directory: The submission, for its calibration set.
        sections: `plan`, `pipeline` and all weights.
        plan: What section `plan` says.
        host_kernels: Returns kernels for this machine, or None where it can run no target.
        vectors: The fewest vectors.
        timeout_s: Seconds that the scout may take.

    Raises:
        MalformedModelError: The calibration set is malformed.
        SelfTestError: Some expert is not reached, or the scout crashed.
    """
    pipeline = parse_pipeline(sections["pipeline"])
    cards = read_cards(directory, CALIBRATION, pipeline.image) if pipeline.image else ()
    kernels = host_kernels()
    experts = expert_sections(sections)
    with ThreadPoolExecutor(max_workers=1) as beside:  # the scout is a process: it runs meanwhile
        scouting: Future[Sequence[Hint]] | None = None
        if kernels is not None and experts and cards:
            native = {**sections, "kernels": kernels}
            scouting = beside.submit(find_hints, native, directory, timeout_s)
        simulator = BundleSimulator(sections, plan)
        hints = scouting.result if scouting is not None else tuple
        return make_selftest(simulator, pipeline, cards, experts, vectors, hints)


def find_hints(sections: Mapping[str, bytes], submission: Path, timeout_s: float) -> Sequence[Hint]:
    """Return hints about rare experts from native code that runs here; none if there are none.

    Args:
        sections: A bundle without its self-test, with kernels that this machine can run.
        submission: Directory with the calibration set.
        timeout_s: Seconds after which the child is killed.

    Raises:
        SelfTestError: The native code crashed or took too long.
    """
    with scratch_directory() as folder:
        write_sections(folder, sections)
        done = run_child(scout.__name__, [folder, submission], timeout_s)
    return scout.parse_hints(done.output.decode()) if done.status == 0 else []
