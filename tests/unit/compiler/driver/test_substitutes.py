"""Which substitutes a bundle carries: what can be made, what is judged good, what is kept."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.plan import Plan, parse_plan
from compiler.contract.substitutes import SECTION, Substitute, parse_substitutes
from compiler.driver import substitutes as stage
from compiler.driver.bands import Banded
from compiler.driver.cache import StageCache
from compiler.driver.questions import MAX_CARDS, evenly, held_out
from compiler.driver.substitute_fit import calibration_rows, fitted_layers, kept_layers
from compiler.driver.substitutes import Chosen, choose_substitutes, judged
from compiler.emitters.plan import emit_plan
from compiler.emitters.schedule import obey, schedule_ops
from compiler.emitters.substitutes import (
    NoSubstituteError,
    Substituted,
    has_shared,
    narrow_names,
    routed_layers,
    with_full,
    with_narrow,
    with_shared,
)
from compiler.kernels.program import Act, Call, ExpertAct, Module, Op, RouteOrder, validate_module
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.module import pack_module, pack_weight
from compiler.quant.record import CalibrationRecord, RouterSample
from tests.factories.kernels import Case
from tests.factories.modules import DecoderBuilder, ModuleBuilder
from tests.factories.substitutes import FOUND, case_of, narrow_layers, substituted

SHARED, NARROW, FULL = Substitute
ASKED = 400


def small(hidden: int = 64) -> Module:
    builder = DecoderBuilder(5, hidden=hidden)
    builder.add_see()
    builder.add_step()
    return builder.module()


def marks(lost: int = 0, won: int = 0) -> list[bool]:
    plain = plain_marks()
    return [not plain[at] if at < lost or at >= ASKED - won else plain[at] for at in range(ASKED)]


def plain_marks() -> list[bool]:
    return [at < ASKED * 3 // 4 for at in range(ASKED)]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return parse_plan(case_of(substituted(small())).emitted.plan_bytes)


def test_what_loses_too_much_is_refused_with_the_reason(plan: Plan) -> None:
    refused: dict[Substitute, str] = {}
    found = judged(
        plan, None, {"": plain_marks(), NARROW: marks(60, 10), FULL: marks(200, 2)}, refused
    )
    assert (found.questions, found.right) == (ASKED, 300)
    assert [(row.kind, row.worse, row.better) for row in found.rows] == [(NARROW, 60, 10)]
    assert refused == {
        FULL: "it loses 200 and wins 2 of 400 questions: more than 40% with confidence"
    }
    assert parse_substitutes(found.to_bytes()) == found


def test_a_rung_that_saves_nothing_is_refused_with_the_bytes(plan: Plan) -> None:
    """Shared experts alone need less than a narrow layer below them; a fallback may need more."""
    refused: dict[Substitute, str] = {}
    every = {"": plain_marks(), **dict.fromkeys(Substitute, marks(1))}
    found = judged(plan, None, every, refused)
    assert found.kinds == (SHARED, FULL)
    assert "it needs" in refused[NARROW]
    refused.clear()
    found = judged(plan, None, {**every, SHARED: marks(200)}, refused)
    assert found.kinds == (NARROW, FULL)
    assert refused.keys() == {SHARED}


def shared_module(*, fused: bool) -> Module:
    """Return a layer of routed experts beside one that every token has."""
    b = ModuleBuilder(3, 8)
    x = b.buffer(None, 32)
    h = b.call(Op.NORM, [x], [b.buffer(None, 32)], [b.vector(32, offset=1.0)], kind=0, eps=1e-6)
    index, gate = b.buffer(None, 2, "i32"), b.buffer(None, 2)
    router = b.weight(b.normal(4, 32))
    b.call(Op.ROUTE, [h], [index, gate], [router], k=2, order=RouteOrder.TOPK_SOFTMAX)
    experts = [
        at
        for expert in range(4)
        for at in (b.w4(64, 32, f"expert.L0.E{expert}"), b.w4(32, 64, f"expert.L0.E{expert}"))
    ]
    y = b.call(Op.EXPERTS, [h, index, gate], [b.buffer(None, 32)], experts, act=ExpertAct.RELU)
    z = b.call(Op.LINEAR, [h], [b.buffer(None, 48)], [b.w4(48, 32)], act=Act.RELU)
    down = b.w4(32, 48)
    if fused:
        out = b.call(Op.LINEAR, [z, y], [b.buffer(None, 32)], [down])
    else:
        shared = b.call(Op.LINEAR, [z, x], [b.buffer(None, 32)], [down])
        out = b.call(Op.ADD, [shared, y], [b.buffer(None, 32)])
    b.program("step", {"x": x}, {"y": out, "index": index})
    return b.module()


@pytest.mark.parametrize("fused", [False, True])
def test_it_finds_experts_that_every_token_has(fused: bool) -> None:
    module = shared_module(fused=fused)
    assert has_shared(module)
    made = with_shared(module)
    validate_module(made.module)
    x = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    simulator = Case.of(made.module).exact()
    alone = simulator.run_arrays("step.shared", {"x": x})
    assert alone.keys() == {"y"}
    silent = [
        replace(weight, array=np.zeros_like(weight.array))
        if weight.section.startswith("expert.")
        else weight
        for weight in module.weights
    ]
    without = Case.of(replace(module, weights=tuple(silent))).exact()
    assert np.allclose(alone["y"], without.run_arrays("step", {"x": x})["y"])
    assert not np.allclose(alone["y"], simulator.run_arrays("step", {"x": x})["y"])


def test_a_residual_is_no_shared_expert() -> None:
    assert not has_shared(small())
    assert not has_shared(Module((), (), (), None, 1))


def test_full_layers_weigh_all_experts_by_their_mean_gates() -> None:
    module = shared_module(fused=True)
    share = np.array([0.5, 0.25, 0.125, 0.0625])
    made = with_full(module, {0: np.log(share / (1 - share)).astype(np.float32)})
    validate_module(made.module)
    x = np.random.default_rng(1).standard_normal((3, 32))
    simulator = Case.of(made.module).exact()
    got = simulator.run_arrays("step.full", {"x": x})["y"]
    shared = Case.of(with_shared(module).module).exact().run_arrays("step.shared", {"x": x})["y"]
    norm = module.weights[0].array * x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-6)
    experts = [
        (module.weights[first].array, module.weights[second].array)
        for first, second in routed_layers(module)[0].experts
    ]
    routed = sum(
        g * (np.maximum(norm @ w_in.T, 0) @ w_out.T)
        for g, (w_in, w_out) in zip(share, experts, strict=True)
    )
    assert np.allclose(got, shared + routed, atol=1e-5)


def test_experts_that_something_else_chooses_have_no_substitute() -> None:
    module = small()
    step = module.programs[-1]
    calls = tuple(
        Call(Op.COLS_SLICE, call.inputs[:1], call.outputs[:1], (), {"start": 0, "count": 2})
        if call.op is Op.ROUTE
        else call
        for call in step.calls
    )
    odd = replace(module, programs=(*module.programs[:-1], replace(step, calls=calls)))
    with pytest.raises(NoSubstituteError, match="something else"):
        routed_layers(odd)


def record_of(module: Module, rows: int = 90) -> CalibrationRecord:
    random = np.random.default_rng(2)
    layers = routed_layers(module)
    samples = []
    for number, layer in layers.items():
        weight = layer.router[0]
        inputs = random.standard_normal((rows, 48)).astype(np.float32)
        index = np.zeros((rows, 2), np.uint16)
        run, vision = np.arange(rows, dtype=np.int32), np.arange(rows) % 2 == 0
        samples.append(RouterSample(number, weight, -1, inputs, index, run, vision, by_logits=True))
    return CalibrationRecord({}, (), tuple(samples))


def test_rows_go_where_the_router_sends_them() -> None:
    module = small()
    layers, record = routed_layers(module), record_of(module)
    rows = calibration_rows(module, layers, record)
    for number, layer in layers.items():
        logits = record.routers[number].inputs @ module.weights[layer.router[0]].array.T
        assert (rows[number].index[:, 0] == logits.argmax(axis=1)).all()
        assert np.allclose(rows[number].gate.sum(axis=1), 1)
    with pytest.raises(NoSubstituteError, match="never reached"):
        calibration_rows(module, layers, replace(record, routers=record.routers[:1]))


def test_experts_that_are_too_narrow_or_of_another_kind_are_refused() -> None:
    module = small(hidden=40)
    layers = routed_layers(module)
    rows = calibration_rows(module, layers, record_of(module))
    with pytest.raises(NoSubstituteError, match="too narrow"):
        fitted_layers(module, layers, rows, pack_weight)
    clipped = {
        number: replace(
            layer,
            mix=replace(layer.mix, params={**layer.mix.params, "act": ExpertAct.SWIGLU_CLIPPED}),
        )
        for number, layer in layers.items()
    }
    with pytest.raises(NoSubstituteError, match="swiglu_clipped"):
        fitted_layers(module, clipped, rows, pack_weight)


def test_layers_come_back_from_a_base_as_they_were() -> None:
    module = small()
    layers = routed_layers(module)
    made = substituted(module, NARROW, FULL)
    emitted = case_of(made).emitted
    base = {**emitted.sections, "plan": emitted.plan_bytes}
    narrow, biases = kept_layers(layers, base, (NARROW, FULL))
    again = with_full(with_narrow(module, narrow).module, biases)
    again = replace(again, packed={**with_narrow(module, narrow).packed, **again.packed})
    assert case_of(again).emitted.sections == emitted.sections
    fitted = narrow_layers(module)
    for number, layer in layers.items():
        assert tuple(fitted[number].arrays) == narrow_names(layer)
        for name, packed in fitted[number].packed.items():
            assert narrow[number].packed[name].codes == packed.codes
    with pytest.raises(KeyError):
        kept_layers(layers, {name: base[name] for name in base if "dense" not in name}, (NARROW,))


def spec() -> PipelineSpec:
    return PipelineSpec.__new__(PipelineSpec)  # nothing of it is read before the trial


def choose(
    module: Module, record: CalibrationRecord | None, base: dict[str, bytes], folder: Path
) -> Chosen:
    packed = pack_module(module).packed
    cache = StageCache(folder, 1 << 30)
    return choose_substitutes(
        folder, spec(), Banded(module), packed, cache, record, pack_weight, base
    )


def test_a_few_changed_experts_keep_what_the_base_has(tmp_path: Path) -> None:
    builder = DecoderBuilder(5, hidden=64, experts=16)
    builder.add_see()
    builder.add_step()
    module = builder.module()
    emitted = case_of(substituted(module, NARROW, FULL)).emitted
    section = replace(FOUND, rows=FOUND.rows[1:]).to_bytes()
    base = {**emitted.sections, "plan": emitted.plan_bytes, SECTION: section}
    weights = list(module.weights)
    at = next(w.id for w in weights if w.section == "expert.L0.E3")
    weights[at] = replace(weights[at], array=weights[at].array[::-1].copy())
    changed = replace(module, weights=tuple(weights))
    banded, packed = choose(changed, record_of(changed), base, tmp_path)
    facts = banded.facts[SECTION]
    assert isinstance(facts, dict)
    assert facts["kept_from_base"] == 1
    assert banded.sections[SECTION] == section
    made = obey(banded.module, schedule_ops(banded.module))
    new = emit_plan(made, weights_packed=packed)
    dense = {name for name in new.sections if name.startswith("dense.")}
    assert dense == {"dense.L0", "dense.L1"}
    assert {name: new.sections[name] for name in dense} == {name: base[name] for name in dense}
    banded.verify(new.plan)


@pytest.mark.parametrize(("right", "is_kept"), [(90, True), (20, False)])
def test_another_version_keeps_what_was_fitted_for_the_base_while_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: int, is_kept: bool
) -> None:
    builder = DecoderBuilder(5, hidden=64, experts=16)
    builder.add_see()
    builder.add_step()
    module = builder.module()
    emitted = case_of(substituted(module, NARROW)).emitted
    section = replace(FOUND, rows=FOUND.rows[1:2]).to_bytes()
    base = {**emitted.sections, "plan": emitted.plan_bytes, SECTION: section}
    changed = replace(
        module,
        weights=tuple(
            replace(w, array=w.array[::-1].copy()) if w.section.startswith("expert.") else w
            for w in module.weights
        ),
    )
    tried: list[bool] = []

    def trial(self: stage._Stage, made: Substituted) -> tuple[Plan, dict[str, list[bool]]]:
        plan = emit_plan(
            stage.schedule_module(made.module, None).module,
            weights_packed={**self.packed, **made.packed},
        ).plan
        tried.append(True)
        marks = {NARROW: [at < right for at in range(100)]}
        return plan, {"": [True] * 100, **marks}

    monkeypatch.setattr(stage._Stage, "trial", trial)
    banded, packed = choose(changed, record_of(changed), base, tmp_path)
    facts = banded.facts[SECTION]
    assert isinstance(facts, dict)
    assert ("fitted_for_base" in facts) is is_kept
    assert len(tried) == (1 if is_kept else 2)
    if is_kept:
        made = obey(banded.module, schedule_ops(banded.module))
        new = emit_plan(made, weights_packed=packed)
        dense = {name for name in new.sections if name.startswith("dense.")}
        assert dense == {"dense.L0", "dense.L1"}
        assert {name: new.sections[name] for name in dense} == {name: base[name] for name in dense}


def test_a_machine_that_runs_nothing_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stage, "host_target", lambda: None)
    module = small()
    banded, packed = choose(module, record_of(module), {}, tmp_path)
    assert banded.module == module
    assert not packed.keys() - pack_module(module).packed.keys()
    facts = banded.facts[SECTION]
    assert isinstance(facts, dict)
    assert facts["refused"]["narrow_dense"] == stage.NOT_NATIVE
    assert facts["rows"] == []


def test_without_a_record_nothing_is_said(tmp_path: Path) -> None:
    module = small()
    banded, packed = choose(module, None, {}, tmp_path)
    assert (banded.module, banded.facts[SECTION]) == (module, None)
    assert packed.keys() == pack_module(module).packed.keys()


@pytest.mark.parametrize("count", [1, 7, MAX_CARDS, MAX_CARDS + 1, 128])
def test_cards_that_were_recorded_judge_nothing(count: int) -> None:
    cards = list(range(count))
    recorded, rest = evenly(cards, MAX_CARDS), held_out(cards)
    if len(recorded) == count:
        assert rest == cards
    else:
        assert sorted([*recorded, *rest]) == cards
