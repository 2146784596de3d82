"""The child: one job from stdin, the compiler or the delta codec, files into a folder.

`python -m builds.compile_runner.child`. Knows no Django and no database.
"""

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from builds.compile_runner.protocol import (
    DELTA_NAME,
    EXIT_REPORTED,
    REPORT_NAME,
    Event,
    Failure,
    Log,
    Progress,
    encode,
)
from compiler.contract.errors import ContractError
from compiler.contract.manifest import ReleaseManifest
from compiler.contract.planes import Plane
from compiler.errors import CompilerError

Say = Callable[[Event], None]
BSDIFF4_LIMIT_BYTES: Final = 16 << 20
"""Of both bundles' comparison; bsdiff4 takes 17 x of it in memory."""


def main(stdin: TextIO, stdout: TextIO) -> int:
    """Do the job on `stdin`; return the exit status."""

    def say(event: Event) -> None:
        stdout.write(encode(event) + "\n")
        stdout.flush()

    try:
        job = json.load(stdin)
        _JOBS[job["do"]](job, say)
    except CompilerError as error:
        say(Failure(error.code, str(error), error.hint, error.retryable))
    except ContractError as error:
        say(Failure("build.app.contract", f"{error.code}: {error}", error.hint, retryable=False))
    except MemoryError:
        say(Failure("build.app.memory", "out of memory", "give the worker more", retryable=True))
    except Exception as error:  # noqa: BLE001 -- the last line of defence: report, then leave
        say(Log("error", traceback.format_exc()))
        say(Failure("build.app.crash", f"{type(error).__name__}: {error}", "", retryable=False))
    else:
        return 0
    return EXIT_REPORTED


def _compile(job: Mapping[str, Any], say: Say) -> None:
    from compiler.driver.bundle_files import read_bundle, write_bundle
    from compiler.driver.cards import require_sets
    from compiler.driver.compile import compile_model
    from compiler.driver.gain_stage import scores_in
    from compiler.driver.options import CompileOptions

    require_sets(Path(job["submission"]))
    base = _base(*read_bundle(Path(job["base"]))) if job["base"] else None
    options = CompileOptions(
        target=job["target"],
        model=job["model"],
        version=job["version"],
        release_seq=job["release_seq"],
        security_epoch=job["security_epoch"],
        constant_time=job["constant_time"],
        cache_dir=Path(job["cache"]) if job["cache"] else None,
        base_sections=base[0] if base else None,
        base_planes=base[1] if base else None,
        base_answers=scores_in(job["base_report"]),
        progress=lambda stage, fraction: say(Progress(stage, fraction)),
    )
    write_bundle(compile_model(Path(job["submission"]), options), Path(job["out"]))


def _check(job: Mapping[str, Any], say: Say) -> None:
    from compiler.driver.cards import require_sets
    from compiler.driver.explain.sources import call_summaries, origin_facts
    from compiler.driver.lowering import lower_submission
    from compiler.driver.stages import StageClock
    from compiler.quant.constant_time import require_constant_time

    clock = StageClock(lambda stage, fraction: say(Progress(stage, fraction)))
    submission = Path(job["submission"])
    require_sets(submission)
    lowered = lower_submission(submission, clock)
    if job["constant_time"]:
        require_constant_time(lowered.module, call_summaries(origin_facts(lowered.provenance)))


def _base(
    manifest: ReleaseManifest, sections: Mapping[str, bytes]
) -> tuple[dict[str, bytes], dict[str, tuple[Plane, ...]]]:
    """Keep what grids and steering come from, which is the same for every target.

    So the stages before `kernels` are done once for all targets of a version.
    """
    from compiler.driver.plan_facts import base_parts

    planes, kept = _planes(manifest), base_parts(sections)
    return kept, {name: planes[name] for name in kept}


def _delta(job: Mapping[str, Any], say: Say) -> None:
    from compiler.delta import write_delta
    from compiler.delta.compare import bsdiff4_size
    from compiler.driver.bundle_files import bundle_replays, open_bundle

    say(Progress("read", 0.0))
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    with open_bundle(Path(job["base"])) as old, open_bundle(Path(job["new"])) as new:
        say(Progress("encode", 0.1))
        with (out / DELTA_NAME).open("wb") as file:
            made = write_delta(old, new, file, replays=bundle_replays(Path(job["new"])))
        say(Progress("compare", 0.7))
        old_bytes = sum(section.length for section in old.values())
        peer = bsdiff4_size(old, new) if old_bytes <= BSDIFF4_LIMIT_BYTES else None
    report = {
        "bsdiff4_bytes": peer,
        "full_bytes": sum(row.new_length for row in made.sections),
        "overhead_bytes": made.overhead_bytes,
        "changed_codes": made.changed_codes,
        "total_codes": made.total_codes,
        "sections": [{name: getattr(row, name) for name in row.__slots__} for row in made.sections],
    }
    (out / REPORT_NAME).write_text(json.dumps(report), encoding="utf-8")


def _planes(manifest: ReleaseManifest) -> dict[str, tuple[Plane, ...]]:
    return {section.component: section.planes for section in manifest.sections}


_JOBS: Final[Mapping[str, Callable[[Mapping[str, Any], Say], None]]] = {
    "compile": _compile,
    "delta": _delta,
    "check": _check,
}

if __name__ == "__main__":
    sys.exit(main(sys.stdin, sys.stdout))
