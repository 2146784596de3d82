"""Score the quantised plan beside the rest of a compilation, and judge the gain over the base.

    portable sections, host kernels --child process--> int4 scores     cache: `answers`
    record of the submission -------------------------> f32 scores     part of the record
    report of the base's build -----------------------> its scores     nothing is run again

The child runs while the self-test is made, so that a compilation hardly takes longer for it. Scores
do not depend on the target: every target computes the same bits. A model without calibration
questions, or a machine that runs no target natively, gives no scores, and the report says so.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes
from compiler.driver.cache import StageCache, cache_key, scratch_directory
from compiler.driver.gain import ANSWERS, GAIN, AnswerScores, Gain, judge_gain, require_gain
from compiler.driver.native_check import run_child, write_sections
from compiler.driver.provenance import calibration_digests, compiler_digest, section_digests
from compiler.errors import SelfTestError

TRIAL: Final = "compiler.driver.gain_trial"


class GainStage:
    """Scores of one compilation, on their way."""

    def __init__(
        self,
        directory: Path,
        sections: Mapping[str, bytes],
        facts: Mapping[str, Json],
        host_kernels: Callable[[], bytes | None],
        cache: StageCache,
        timeout_s: float,
    ) -> None:
        """Begin to score, unless it was done before or there is nothing to score.

        Args:
            directory: The submission.
            sections: Those of every target.
            facts: What the portable stages say; `answers` are the scores in f32.
            host_kernels: Returns kernels that run here, or None.
            cache: Where scores are.
            timeout_s: How long the child may run.
        """
        document = facts.get(ANSWERS)
        self._cache = cache
        self._f32 = AnswerScores.from_json(document) if isinstance(document, Mapping) else None
        self._key = ""
        self._pending: Future[bytes] | None = None
        self._found = b"[]"
        if self._f32 is None or not self._f32.f32:
            return
        self._key = _key(directory, sections)
        stored = cache.get(ANSWERS, self._key)
        kernels = None if stored is not None else host_kernels()
        if stored is not None:
            self._found = stored[ANSWERS]
        elif kernels is not None:
            whole = {**sections, "kernels": kernels}
            pool = ThreadPoolExecutor(1, ANSWERS)
            self._pending = pool.submit(_run, directory, whole, timeout_s)
            pool.shutdown(wait=False)

    @property
    def is_pending(self) -> bool:
        """Return whether there is a child to wait for."""
        return self._pending is not None

    def scores(self) -> AnswerScores | None:
        """Return the scores of both kinds; waits for the child.

        Raises:
            SelfTestError: Native code crashed, or took too long.
        """
        if self._f32 is None:
            return None
        if self._pending is not None:
            self._found = self._pending.result()
            self._pending = None
            self._cache.put(ANSWERS, self._key, {ANSWERS: self._found})
        return replace(self._f32, int4=tuple(json.loads(self._found)))

    def facts(self, base: AnswerScores | None, *, has_base: bool) -> dict[str, Json]:
        """Return the rows of the report.

        Args:
            base: Scores of the base bundle, if they are known.
            has_base: Whether there is one.

        Raises:
            GainLostError: What was gained over the base does not survive quantisation.
            SelfTestError: As `scores`.
        """
        new = self.scores()
        if new is None or (base is None and has_base):
            shown = None if new is None else new.to_json()
            return {ANSWERS: shown, GAIN: Gain("no_scores").to_json()}
        gain = require_gain(judge_gain(base, new))
        return {ANSWERS: new.to_json(), GAIN: gain.to_json()}


def scores_in(report: object) -> AnswerScores | None:
    """Return the scores in the report of an older build; None if it has none.

    Raises:
        ContractError: They are malformed.
    """
    document = report.get(ANSWERS) if isinstance(report, Mapping) else None
    return AnswerScores.from_json(document) if isinstance(document, Mapping) else None


def _key(directory: Path, sections: Mapping[str, bytes]) -> str:
    return cache_key(
        ANSWERS,
        {
            "sections": dict(section_digests(sections)),
            "calibration": dict(calibration_digests(directory)),
            "compiler": compiler_digest(),
        },
    )


def _run(directory: Path, sections: Mapping[str, bytes], timeout_s: float) -> bytes:
    with scratch_directory() as folder:
        bundle = folder / "bundle"
        bundle.mkdir()
        write_sections(bundle, sections)
        done = run_child(TRIAL, [bundle, directory], timeout_s)
    if done.status:
        raise SelfTestError(f"answers could not be scored: {done.error_text(400)}")
    return canonical_bytes(json.loads(done.output))
