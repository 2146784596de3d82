"""The stages that are the same for every target: import, raise, quantise, plan.

    files --lowered--> module --weight, one entry each--> packed weights --portable--> sections
    module, cards --record--> what the module computes on them, for scales that are searched

Each arrow is an entry of the cache keyed by the content of what stands left of it and by the
compiler's sources. So a version that changes one expert imports again and searches scales only for
weights whose numbers or inputs changed, none on the grids of a base; another base lowers nothing
again, and a further target does nothing here at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from compiler.contract.canonical import Json, canonical_bytes, parse_object, sha256_hex
from compiler.contract.elements import WORKSPACE_BUDGET_BYTES
from compiler.contract.operations import Op
from compiler.contract.plan_format import KvKind
from compiler.contract.planes import Plane
from compiler.driver.activity import activity_facts
from compiler.driver.bands import Banded, band_module
from compiler.driver.base_grids import base_weights, base_widths, kept_codes
from compiler.driver.cache import StageCache, cache_key
from compiler.driver.calibrate import record_cached
from compiler.driver.explain.sources import call_summaries, named_rows, named_zeros, origin_facts
from compiler.driver.gain import ANSWERS, AnswerScores
from compiler.driver.lowering import Lowered, lower_submission
from compiler.driver.merges import merge_replays, merge_rows, merge_seeds
from compiler.driver.plan_facts import operation_counts, weight_kinds
from compiler.driver.provenance import compiler_digest
from compiler.driver.questions import questions_sha256
from compiler.driver.records import UnkeepableError, from_parts, to_parts
from compiler.driver.removal_stage import NOTHING_REMOVED, Removed, choose_cached
from compiler.driver.routing import Learned, learn_routing
from compiler.driver.scheduling import schedule_module
from compiler.driver.sections import (
    calibration_rows,
    index_check_rows,
    memory_rows,
    pipeline_section,
    sqnr_rows,
)
from compiler.driver.stages import ORIGINS, Portable, StageClock
from compiler.driver.steering_stage import kept_points, search_steering
from compiler.driver.substitutes import choose_substitutes
from compiler.emitters.plan import EmittedPlan, emit_plan
from compiler.frontend.limits import DEFAULT_LIMITS, ImportLimits
from compiler.kernels.program import Module
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.checks import CheckedCall, learn_checks
from compiler.quant.constant_time import constant_time, require_constant_time
from compiler.quant.grid_search import OutputError
from compiler.quant.merge import Seeds
from compiler.quant.module import PackedModule, PackedWeight, pack_module, pack_weight
from compiler.quant.neurons import NeuronChoice, choose_neurons
from compiler.quant.packing import PackedChoice, choose_packed
from compiler.quant.record import CalibrationRecord, InputSample
from compiler.quant.w4 import Floats, Grid, GridReport, PackedW4

LOWERED: Final = "lowered"
WEIGHT: Final = "weight"
_PARTS: Final = ("codes", "scales", "rows")

_BANDED: Final = 0.3
_EMITTED: Final = 0.4
"""Shares of the plan stage that are done when bands are tried and when the plan is emitted."""


class Ways(NamedTuple):
    """What a plan is to be like.

    Attributes:
        lossy: What removing may lose, 0 removes what is dead; how keys and values are stored.
        constant_time: Whether nothing may depend on values; see `compiler.quant.constant_time`.
        substitutes: Whether there may be variants without routers.
        seed_release: The release whose merged adapters are replayed on the base; 0 for none.
    """

    lossy: tuple[float, KvKind] = (0.0, KvKind.F32)
    constant_time: bool = False
    substitutes: bool = True
    seed_release: int = 0


def make_portable(
    directory: Path,
    spec: PipelineSpec,
    model_files: Mapping[str, str],
    calibration: Mapping[str, str],
    base: tuple[Mapping[str, bytes], Mapping[str, tuple[Plane, ...]] | None],
    costs: tuple[ImportLimits, int],
    cache: StageCache,
    clock: StageClock,
    begin_kernels: Callable[[frozenset[Op]], None],
    ways: Ways,
) -> Portable:
    """Compile what every target shares.

    Args:
        directory: The submission.
        spec: Its `pipeline.json`.
        model_files: SHA-256 of every file that the importer reads, by name.
        calibration: SHA-256 of the files of the calibration set, by name.
        base: Sections and planes of an older bundle; empty and None without one.
        costs: What importing it may cost, and the workspace budget of layouts in bytes.
        cache: Where `lowered`, `record` and `weight` entries are.
        clock: Gets the times.
        begin_kernels: Told the operations as soon as they are known.
        ways: What the plan is to be like.

    Raises:
        UserModelError: The submission is at fault.
        CompilerError: The base is no bundle, or a pass made an invalid program.
    """
    files, pack = {**model_files, **calibration}, (packing := Packing(cache)).pack
    removed = choose_cached(directory, spec, files, ways.lossy, costs[0], pack, cache, clock)
    lowered = lower_cached(directory, model_files, cache, clock, *costs, removed)
    with clock.stage("quantise"):
        old, seeds = _old(lowered, base, ways)
        record = record_cached(directory, spec, lowered.module, files, cache, clock, removed.digest)
        learned = learn_routing(lowered.module, record, base_widths(lowered.module, base[0]))
        begin_kernels(schedule_module(learned.module, record, None, ways.constant_time).module.ops)
        packed = pack_module(learned.module, base=old, record=record, pack=pack, seeds=seeds)
        facts = _weight_report(lowered.module, packed, old, record, calibration) | removed.report()
    clock.note("quantise", weights=len(packed.packed), from_cache=packing.found)
    with clock.stage("plan"):
        known = None if ways.constant_time else record  # neither entropy nor memory may be told
        banded = band_module(directory, spec, learned.module, packed.packed, known, cache)
        fit = cache, known if ways.substitutes else None, pack, base[0]
        banded, weights = choose_substitutes(directory, spec, banded, packed.packed, *fit)
        made, parts, plan_facts = _planned(spec, banded, weights, record, ways, clock)
        parts, routing = _with_routing(directory, parts, learned, known, cache, clock, base[0])
    facts |= plan_facts | routing | _pass_facts(lowered, banded)
    return _portable(lowered, made, parts, facts, packed)


def _old(
    lowered: Lowered,
    base: tuple[Mapping[str, bytes], Mapping[str, tuple[Plane, ...]] | None],
    ways: Ways,
) -> tuple[dict[int, PackedW4], Seeds]:
    """Return the weights of the base, and the seeds of what is replayed on them."""
    old = base_weights(_possible(lowered, ways.constant_time), *base)
    return old, merge_seeds(lowered.module, base[0], ways.seed_release)


def _portable(
    lowered: Lowered,
    made: EmittedPlan,
    parts: dict[str, bytes],
    facts: dict[str, Json],
    packed: PackedModule,
) -> Portable:
    """Return all of it, with the factors of what was replayed where its codes stand now."""
    replays = merge_replays(made.plan, made.planes, packed.factors)
    return Portable(parts, made.planes, lowered.ir_text, facts, made.plan, replays)


def _answer_facts(
    record: CalibrationRecord | None, calibration: Mapping[str, str]
) -> dict[str, Json]:
    """Return how probable the unquantised model finds right answers, for the gate of a release."""
    if record is None or not record.answers:
        return {ANSWERS: None}
    return {ANSWERS: AnswerScores(questions_sha256(calibration), record.answers).to_json()}


def _possible(lowered: Lowered, is_constant_time: bool) -> Module:
    """Return the module, unless it cannot be what was asked for."""
    if is_constant_time:
        require_constant_time(lowered.module, call_summaries(origin_facts(lowered.provenance)))
    return lowered.module


def _with_routing(
    directory: Path,
    parts: Mapping[str, bytes],
    learned: Learned,
    record: CalibrationRecord | None,
    cache: StageCache,
    clock: StageClock,
    base: Mapping[str, bytes],
) -> tuple[dict[str, bytes], dict[str, Json]]:
    """Return all sections with those about routers, and the facts of those."""
    sections = {**parts, **learned.sections}
    done = clock.within("plan")
    done(_EMITTED)
    kept = None if record is None else kept_points(sections, base)
    steering = kept or search_steering(
        directory,
        sections,
        learned.module,
        record,
        cache,
        lambda share: done(_EMITTED + (1 - _EMITTED) * share),
    )
    return {**sections, **steering.sections}, {**learned.facts, **steering.facts}


def _planned(
    spec: PipelineSpec,
    banded: Banded,
    packed: Mapping[int, PackedW4],
    record: CalibrationRecord | None,
    ways: Ways,
    clock: StageClock,
) -> tuple[EmittedPlan, dict[str, bytes], dict[str, Json]]:
    """Return what the plan became: its bytes, all sections that belong to it, and its facts."""
    clock.within("plan")(_BANDED)
    scheduled = schedule_module(
        banded.module, record, banded.likely, is_constant_time=ways.constant_time
    )
    checks: tuple[CheckedCall, ...] = ()
    neurons: tuple[NeuronChoice, ...] = ()
    rows: tuple[PackedChoice, ...] = ()
    if ways.constant_time:
        module = constant_time(scheduled.module)
    else:
        module, checks = learn_checks(scheduled.module, record)
        module, neurons = choose_neurons(module, record)
        module, rows = choose_packed(module)
    emitted = emit_plan(module, weights_packed=packed)
    scheduled.verify(emitted.plan)
    banded.verify(emitted.plan)
    pipeline = pipeline_section(spec, emitted.plan)
    sections = {**emitted.sections, **scheduled.sections, **banded.sections}
    sections |= {"plan": emitted.plan_bytes, "pipeline": pipeline.to_bytes()}
    facts = {**_plan_facts(module, emitted, checks), **scheduled.facts, **banded.facts}
    facts |= {"neurons": [asdict(row) for row in neurons], "constant_time": ways.constant_time}
    facts |= {"packed_rows": [asdict(row) for row in rows]}
    return emitted, sections, facts


def _plan_facts(
    module: Module, emitted: EmittedPlan, checks: Sequence[CheckedCall]
) -> dict[str, Json]:
    return {
        "checks": [asdict(row) for row in checks],
        "index_checks": index_check_rows(module),
        "operations": operation_counts(emitted.plan),
        "weight_bytes": weight_kinds(emitted.plan),
        "memory": memory_rows(emitted.memory, module.kv),
    }


def _weight_report(
    module: Module,
    packed: PackedModule,
    old: Mapping[int, PackedW4],
    record: CalibrationRecord | None,
    calibration: Mapping[str, str],
) -> dict[str, Json]:
    return {
        "sqnr_db": sqnr_rows(module, packed.packed),
        "calibration": calibration_rows(module, packed.errors),
        "base": _base_facts(packed, old),
        "adapters": merge_rows(module, packed.factors),
        **activity_facts(module, record),
        **_answer_facts(record, calibration),
    }


def _base_facts(packed: PackedModule, old: Mapping[int, PackedW4]) -> Json:
    """Return how much of the base's grids and codes stayed, or None without a base."""
    if not old:
        return None
    kept = kept_codes(packed.packed, old)
    return {
        "codes": kept.codes,
        "same_codes": kept.same,
        "weights_paired": len(old),
        "groups_refreshed": sum(r.groups_refreshed for r in packed.reports.values()),
        "rows_refreshed": sum(r.rows_refreshed for r in packed.reports.values()),
    }


def _pass_facts(lowered: Lowered, banded: Banded) -> dict[str, Json]:
    """Return what the passes say about the model, whatever the target."""
    origins = origin_facts(lowered.provenance)
    layouts: Mapping[str, Any] = parse_object(lowered.layouts.encode())
    return {
        "notes": list(lowered.notes),
        "sparsity": named_zeros(parse_object(lowered.sparsity.encode()), origins),
        ORIGINS: banded.with_sources(origins),
        "layouts": named_rows(layouts["layouts"], origins),
    }


def lower_cached(
    directory: Path,
    model_files: Mapping[str, str],
    cache: StageCache,
    clock: StageClock,
    limits: ImportLimits = DEFAULT_LIMITS,
    layout_workspace_bytes: int = WORKSPACE_BUDGET_BYTES,
    removed: Removed = NOTHING_REMOVED,
) -> Lowered:
    """Return the lowered submission, from the cache if these files were lowered before.

    Raises:
        UserModelError: The submission is at fault.
    """
    facts: dict[str, Json] = {
        "files": dict(model_files),
        "compiler": compiler_digest(),
        "layout_workspace_bytes": layout_workspace_bytes,
    }
    key = cache_key(LOWERED, facts | ({"loss": removed.digest} if removed.digest else {}))
    with clock.stage("import"):
        stored = cache.get(LOWERED, key)
        kept = from_parts(Lowered, stored) if stored is not None else None
    if kept is not None:
        clock.skip("import")
        clock.skip("raise")
        return kept
    lowered = lower_submission(directory, clock, limits, layout_workspace_bytes, removed.loss)
    with clock.stage("raise"):
        try:
            cache.put(LOWERED, key, to_parts(lowered))
        except UnkeepableError:  # a fact of a new type: slower next time, not wrong
            return lowered
    return lowered


class Packing:
    """Packs weights and keeps each whose scales were searched, by its numbers and its sample.

    Rounding to a grid that is kept takes less time than reading an entry.
    """

    def __init__(self, cache: StageCache) -> None:
        self.found = 0
        self._cache = cache

    def pack(
        self, array: Floats, grid: Grid | None, sample: InputSample | None = None
    ) -> PackedWeight:
        """Pack one matrix, or return what searching its scales gave before."""
        if grid is not None:
            return pack_weight(array, grid, sample)
        key = cache_key(WEIGHT, _weight_facts(array, sample))
        parts = self._cache.get(WEIGHT, key)
        if parts is not None:
            self.found += 1
            return _unpack(parts)
        packed = pack_weight(array, None, sample)
        self._cache.put(WEIGHT, key, _pack(packed))
        return packed


def _weight_facts(array: Floats, sample: InputSample | None) -> dict[str, Json]:
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.str,
        "sha256": sha256_hex(array.tobytes()),
        "sample": sha256_hex(sample.rows.tobytes() + sample.scales.tobytes()) if sample else "",
        "compiler": compiler_digest(),
    }


def _pack(weight: PackedWeight) -> dict[str, bytes]:
    packed, report, error = weight
    head: dict[str, Json] = {
        "n": packed.n,
        "k": packed.k,
        "report": [report.groups, report.groups_refreshed, report.rows_refreshed],
        "error": [error.rows, error.plain, error.found] if error else [],
    }
    return {"head": canonical_bytes(head), **{name: getattr(packed, name) for name in _PARTS}}


def _unpack(parts: Mapping[str, bytes]) -> PackedWeight:
    head: Mapping[str, object] = parse_object(parts["head"])
    n, k, report, error = head["n"], head["k"], head["report"], head["error"]
    assert isinstance(n, int)
    assert isinstance(k, int)
    assert isinstance(report, list)
    assert isinstance(error, list)
    codes, scales, rows = (parts[name] for name in _PARTS)
    return PackedWeight(
        PackedW4(n, k, codes, scales, rows),
        GridReport(*report),
        OutputError(*error) if error else None,
    )
