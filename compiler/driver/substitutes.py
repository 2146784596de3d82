"""Substitutes of routers in a bundle: what can be made, what calibration allows, the section.

    routed layers, record -> shared only | narrow dense (fitted) | full dense  -> trial plan
    trial plan, calibration cards held out -> loss of each; bytes of each rung -> those that stay

A rung stays if it loses at most `MAX_LOSS` of the answers and needs fewer bytes than the rung above
it. A version that changes a few experts of a base keeps what was fitted and judged there, byte for
byte, as it keeps steering; any other version of the base keeps what was fitted there as long as it
loses little enough here, so that an update need not carry it. Called after entropy bands were
chosen and before the plan is emitted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from compiler.contract.bands import MILLION, Bands, is_within, parse_bands
from compiler.contract.canonical import Json
from compiler.contract.errors import ContractError
from compiler.contract.ladder import planned_bytes, substitute_bytes
from compiler.contract.plan import Plan
from compiler.contract.substitutes import (
    BY_RUNG,
    SECTION,
    Substitute,
    Substitutes,
    Trial,
    parse_substitutes,
)
from compiler.driver import substitute_trial
from compiler.driver.bands import BANDS, Banded
from compiler.driver.base_grids import changed_experts
from compiler.driver.cache import StageCache, cache_key, scratch_directory
from compiler.driver.kernel_stage import kernels_for
from compiler.driver.native_check import host_target, run_child, write_sections
from compiler.driver.provenance import calibration_digests, compiler_digest, section_digests
from compiler.driver.scheduling import schedule_module
from compiler.driver.sections import pipeline_section
from compiler.driver.substitute_fit import calibration_rows, fitted_layers, kept_layers
from compiler.emitters.plan import emit_plan
from compiler.emitters.substitutes import (
    NoSubstituteError,
    RoutedLayer,
    Substituted,
    has_shared,
    routed_layers,
    with_full,
    with_narrow,
    with_shared,
)
from compiler.errors import SelfTestError
from compiler.kernels.program import Module
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.narrow_dense import Pack, gate_biases
from compiler.quant.record import CalibrationRecord
from compiler.quant.w4 import PackedW4

TRIAL: Final = "substitute_trial"
TIMEOUT_S: Final = 600.0
MAX_LOSS: Final = 400_000
"""The most accuracy that a substitute may lose, millionths of the questions, with the confidence of
`compiler.contract.bands.most_lost`. Much, because what it stands against is no answer at all: only
rules that ask for the lowest rungs and faults that nothing else mends lead there, and every answer
is marked degraded."""
NOT_NATIVE: Final = "this machine runs no target natively, so answers could not be judged"
Maker = Callable[[Module], Substituted]


class Chosen(NamedTuple):
    """A module with the substitutes that it may have.

    Attributes:
        banded: As it was, or with their programs, their section and their rows of the report.
        packed: Packed form of all its weights, by id.
    """

    banded: Banded
    packed: Mapping[int, PackedW4]


def choose_substitutes(
    directory: Path,
    spec: PipelineSpec,
    banded: Banded,
    packed: Mapping[int, PackedW4],
    cache: StageCache,
    record: CalibrationRecord | None,
    pack: Pack,
    base: Mapping[str, bytes],
) -> Chosen:
    """Return the module with the substitutes that calibration allows.

    Args:
        directory: The submission, for its calibration cards.
        spec: Its words and limits.
        banded: The module with the variants of its entropy bands.
        packed: Its packed weights.
        cache: Where trials and kernels are.
        record: What calibration saw; None if there is nothing to fit and judge with.
        pack: Packs one weight.
        base: Sections of an older bundle; empty without one.

    Raises:
        SelfTestError: Native code crashed in the trial, or took too long.
    """
    if record is None or not record.routers:
        return Chosen(replace(banded, facts={**banded.facts, SECTION: None}), packed)
    stage = _Stage(directory, spec, banded, packed, cache)
    try:
        layers = routed_layers(banded.module)
        kept = _kept(stage, layers, base) or _kept_as_it_answers(stage, layers, base)
        if kept is not None:
            return kept
        makers, refused = _makers(banded.module, layers, record, pack)
    except NoSubstituteError as error:
        return stage.without(dict.fromkeys(Substitute, str(error)))
    if host_target() is None:
        return stage.without(dict.fromkeys(Substitute, NOT_NATIVE))
    return _tried(stage, makers, refused)


def _makers(
    module: Module,
    layers: Mapping[int, RoutedLayer],
    record: CalibrationRecord,
    pack: Pack,
) -> tuple[dict[Substitute, Maker], dict[Substitute, str]]:
    """Return what makes each substitute, and why others cannot be made."""
    makers: dict[Substitute, Maker] = {}
    refused: dict[Substitute, str] = {}
    if has_shared(module):
        makers[Substitute.SHARED_ONLY] = with_shared
    else:
        refused[Substitute.SHARED_ONLY] = "the model has no experts that every token has"
    rows = calibration_rows(module, layers, record)
    try:
        narrow = fitted_layers(module, layers, rows, pack)
        makers[Substitute.NARROW_DENSE] = lambda some: with_narrow(some, narrow)
    except NoSubstituteError as error:
        refused[Substitute.NARROW_DENSE] = str(error)
    biases = {number: gate_biases(rows[number], len(layers[number].experts)) for number in rows}
    makers[Substitute.FULL_DENSE] = lambda some: with_full(some, biases)
    return makers, refused


def _tried(
    stage: "_Stage", makers: Mapping[Substitute, Maker], refused: dict[Substitute, str]
) -> Chosen:
    """Return the substitutes that stay when all are tried."""
    made, refused = stage.made(makers, refused)
    there = [kind for kind in makers if kind not in refused]
    if not there:
        return stage.without(refused)
    plan, marks = stage.trial(made)
    found = judged(plan, stage.bands, marks, refused)
    if not found.rows:
        return stage.without(refused)
    if len(found.rows) < len(there):
        made, _ = stage.made({kind: makers[kind] for kind in found.kinds}, {})
    sizes = substitute_bytes(plan)
    planned: dict[str, Json] = {kind.value: sizes[kind] for kind in found.kinds}
    return stage.chosen(made, found, refused, planned=planned)


def judged(
    plan: Plan,
    bands: Bands | None,
    marks: Mapping[str, Sequence[bool]],
    refused: dict[Substitute, str],
) -> Substitutes:
    """Return the substitutes that lose little enough and save bytes; the others are `refused`.

    Args:
        plan: With all of them.
        bands: Of the bundle.
        marks: Per question, whether it was answered as expected, by kind; "" = without.
        refused: Gets the reasons.
    """
    plain, rows = marks[""], []
    ladder = planned_bytes(plan, bands)
    floor = min(size for rung, size in ladder.items() if rung not in BY_RUNG)
    rungs = {kind: rung for rung, kind in BY_RUNG.items()}
    for kind in Substitute:
        if kind not in marks:
            continue
        pairs = list(zip(plain, marks[kind], strict=True))
        worse, better = pairs.count((True, False)), pairs.count((False, True))
        size = ladder[rungs[kind]] if kind in rungs else 0
        if not is_within(worse, better, len(plain), MAX_LOSS):
            refused[kind] = (
                f"it loses {worse} and wins {better} of {len(plain)} questions: "
                f"more than {MAX_LOSS / MILLION:.0%} with confidence"
            )
        elif kind in rungs and size >= floor:
            refused[kind] = f"it needs {size} bytes a step, the rung above it {floor}"
        else:
            rows.append(Trial(kind, worse, better))
            floor = size if kind in rungs else floor
    return Substitutes(len(plain), sum(plain), MAX_LOSS, tuple(rows))


def _kept(
    stage: "_Stage", layers: Mapping[int, RoutedLayer], base: Mapping[str, bytes]
) -> Chosen | None:
    """Return the base's substitutes, if all weights but a few experts are those of the base."""
    if SECTION not in base:
        return None
    sections = emit_plan(stage.banded.module, weights_packed=stage.packed).sections
    changed = changed_experts(sections, base)
    if changed is None:
        return None
    there = _of_base(stage, layers, base)
    if there is None:
        return None
    found, made = there
    return stage.chosen(made, found, {}, kept_from_base=changed)


def _kept_as_it_answers(
    stage: "_Stage", layers: Mapping[int, RoutedLayer], base: Mapping[str, bytes]
) -> Chosen | None:
    """Return the base's substitutes, if all of them are still good enough here."""
    there = _of_base(stage, layers, base) if SECTION in base and host_target() else None
    if there is None:
        return None
    before, made = there
    plan, marks = stage.trial(made)
    refused: dict[Substitute, str] = {}
    found = judged(plan, stage.bands, marks, refused)
    if found.kinds != before.kinds:
        return None
    refused |= dict.fromkeys(set(Substitute) - set(found.kinds), "the base has none, and was kept")
    sizes = substitute_bytes(plan)
    planned: dict[str, Json] = {kind.value: sizes[kind] for kind in found.kinds}
    return stage.chosen(made, found, refused, planned=planned, fitted_for_base=True)


def _of_base(
    stage: "_Stage", layers: Mapping[int, RoutedLayer], base: Mapping[str, bytes]
) -> tuple[Substitutes, Substituted] | None:
    """Return the base's section, and the module with its substitutes; None if they do not fit."""
    try:
        found = parse_substitutes(base[SECTION])
        narrow, biases = kept_layers(layers, base, found.kinds)
    except (ContractError, KeyError):
        return None
    makers: dict[Substitute, Maker] = {
        Substitute.SHARED_ONLY: with_shared,
        Substitute.NARROW_DENSE: lambda some: with_narrow(some, narrow),
        Substitute.FULL_DENSE: lambda some: with_full(some, biases),
    }
    made, refused = stage.made({kind: makers[kind] for kind in found.kinds}, {})
    return None if refused or not found.kinds else (found, made)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What every step here needs."""

    directory: Path
    spec: PipelineSpec
    banded: Banded
    packed: Mapping[int, PackedW4]
    cache: StageCache

    @property
    def bands(self) -> Bands | None:
        """Those of the bundle."""
        section = self.banded.sections.get(BANDS)
        return None if section is None else parse_bands(section)

    def made(
        self, makers: Mapping[Substitute, Maker], refused: Mapping[Substitute, str]
    ) -> tuple[Substituted, dict[Substitute, str]]:
        """Return the module with what can be made, and the reasons of what cannot."""
        found, reasons = Substituted(self.banded.module), dict(refused)
        for kind in Substitute:
            if kind in makers:
                try:
                    found = found.then(makers[kind](found.module))
                except NoSubstituteError as error:
                    reasons[kind] = str(error)
        return found, reasons

    def without(self, refused: Mapping[Substitute, str]) -> Chosen:
        """Return the module as it was; the report says why."""
        facts: dict[str, Json] = {SECTION: {"rows": [], "refused": _reasons(refused)}}
        return Chosen(replace(self.banded, facts={**self.banded.facts, **facts}), self.packed)

    def chosen(
        self,
        made: Substituted,
        found: Substitutes,
        refused: Mapping[Substitute, str],
        **more: Json,
    ) -> Chosen:
        """Return the module with the substitutes of a section."""
        facts = {**asdict(found), "rows": [asdict(row) for row in found.rows]}
        facts |= {"refused": _reasons(refused), **more}
        banded = replace(
            self.banded,
            module=made.module,
            sections={**self.banded.sections, SECTION: found.to_bytes()},
            facts={**self.banded.facts, SECTION: facts},
            variants=made.sources,
        )
        return Chosen(banded, {**self.packed, **made.packed})

    def trial(self, made: Substituted) -> tuple[Plan, dict[str, list[bool]]]:
        """Return the plan with all substitutes, and how each answered, now or earlier."""
        module = schedule_module(made.module, None).module
        emitted = emit_plan(module, weights_packed={**self.packed, **made.packed})
        pipeline = pipeline_section(self.spec, emitted.plan).to_bytes()
        sections = {**emitted.sections, "plan": emitted.plan_bytes, "pipeline": pipeline}
        facts: dict[str, Json] = {
            "sections": dict(section_digests(sections)),
            "calibration": dict(calibration_digests(self.directory)),
            "compiler": compiler_digest(),
        }
        key = cache_key(TRIAL, facts)
        stored = self.cache.get(TRIAL, key)
        data = self._run(emitted.plan, sections) if stored is None else stored[TRIAL]
        if stored is None:
            self.cache.put(TRIAL, key, {TRIAL: data})
        return emitted.plan, json.loads(data)

    def _run(self, plan: Plan, sections: Mapping[str, bytes]) -> bytes:
        host = host_target()
        assert host is not None
        kernels = kernels_for(host, plan.ops, self.cache)
        with scratch_directory() as folder:
            write_sections(folder, {**sections, "kernels": kernels})
            paths = [folder, self.directory]
            done = run_child(substitute_trial.__name__, paths, TIMEOUT_S)
        if done.status:
            raise SelfTestError(f"substitutes could not be judged: {done.error_text(400)}")
        return done.output


def _reasons(refused: Mapping[Substitute, str]) -> dict[str, Json]:
    return {kind.value: refused[kind] for kind in Substitute if kind in refused}
