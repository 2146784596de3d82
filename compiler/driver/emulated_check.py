"""Run a target's kernels under an emulator against the self-test, where one is installed.

The emulator plays a freestanding program that holds the same kernel source as the shipped library
(see `compiler.emitters.runner`). It says that the bits are right, and nothing about speed.
"""

from collections.abc import Mapping
from pathlib import Path

from compiler.contract.canonical import Json
from compiler.contract.errors import ContractError
from compiler.contract.plan import parse_plan
from compiler.contract.selftest import output_digests, parse_selftest
from compiler.emitters.runner import ScriptRun, build_runner, play
from compiler.errors import SelfTestError
from compiler.hardware.targets import Target


def check_emulated(
    sections: Mapping[str, bytes], target: Target, emulator: tuple[str, ...], cache_dir: Path
) -> dict[str, Json]:
    """Run every self-test vector under an emulator; return what to report.

    Args:
        sections: Every section of the bundle by component.
        target: What to emulate.
        emulator: See `compiler.driver.native_check.emulator_of`.
        cache_dir: Folder of the C compiler's results.

    Raises:
        SelfTestError: An output differs from the simulator's, or a run failed.
        ToolchainError: The program could not be built, started, or crashed.
    """
    selftest = parse_selftest(sections["selftest"])
    runs = [(vector.name, run) for vector in selftest.vectors for run in vector.runs]
    script = [ScriptRun(run.program, run.inputs, keep=run.kv_length) for _, run in runs]
    runner = build_runner(target, parse_plan(sections["plan"]).ops, cache_dir)
    try:
        results = play(runner, emulator, sections["plan"], sections, script)
    except ContractError as error:
        raise SelfTestError(f"the self-test failed under {emulator[0]}: {error}") from error
    for (name, run), outputs in zip(runs, results, strict=True):
        found = output_digests({role: memoryview(data) for role, data in outputs.items()})
        if found != dict(run.outputs):
            raise SelfTestError(f"{emulator[0]} and simulator differ in {name}, {run.program}")
    return {"emulator": " ".join(emulator), "vectors": len(selftest.vectors), "runs": len(runs)}
