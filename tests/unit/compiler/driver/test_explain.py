"""The explain document and its picture: figures by hand, repeats found once, texts escaped."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from compiler.contract.operands import KvShape
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import KvKind
from compiler.contract.policy import LEGAL, CallKind, parse_policy
from compiler.contract.policy_calls import call_cell, call_kind
from compiler.contract.selftest import parse_selftest
from compiler.driver.explain.costs import Situation, costs, expected_cycles
from compiler.driver.explain.document import explain_document, situations
from compiler.driver.explain.picture import NODE_HEIGHT, NODE_WIDTH, picture
from compiler.driver.explain.repeats import Segment, segments
from compiler.driver.explain.running_text import policy_lines
from compiler.driver.explain.sources import origins_of
from compiler.driver.explain.svg import (
    LEGEND,
    LEGEND_STEP,
    SOURCE_CHARACTERS,
    short_source,
    svg_text,
)
from compiler.driver.explain.text import check_text, explain_lines
from compiler.emitters.plan import emit_plan
from compiler.hardware.targets import find_target
from compiler.kernels.program import Act, Op
from compiler.kernels.select import select_tile
from compiler.quant.module import pack_module
from tests.factories.bundles import compiled
from tests.factories.modules import ModuleBuilder, small_decoder

TARGET = find_target("x86-64-v3")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def edgecard(tmp_path_factory):
    return compiled("v1", TARGET.id, tmp_path_factory.mktemp("edgecard"))


@pytest.fixture(scope="module")
def explained(edgecard):
    return edgecard.report["explained"]


def _experts(explained, program):
    calls = explained["programs"][program]["calls"]
    return [call for call in calls if (call["sparsity"] or {}).get("kind") == "experts"]


def test_it_counts_what_experts_compute_and_leave_out(explained) -> None:
    first = _experts(explained, "step")[0]
    # one token, two of sixteen experts of two 128 x 128 matrices, and a router of 16 x 128
    experts, router = 2 * 2 * 2 * 128 * 128, 2 * 16 * 128
    assert experts <= first["flops"] <= experts + 1.2 * router
    assert first["dense_flops"] - first["flops"] == 7 * experts
    assert (first["sparsity"]["kept"], first["sparsity"]["of"]) == (2, 16)
    assert "weight 0" in first["sparsity"]["proof"]
    assert "weighted merge" in first["fused"]


def test_it_adds_up(explained) -> None:
    for program in explained["programs"].values():
        calls = program["calls"]
        assert program["flops"] == sum(call["flops"] for call in calls)
        assert program["flops"] < program["dense_flops"]
        assert program["moved_bytes"] < program["dense_bytes"]
        assert sum(call["expected_ratio"] for call in calls) == pytest.approx(1, abs=0.01)
        assert [call["call"] for call in calls] == list(range(len(calls)))


def test_it_measures_every_call_where_the_code_runs(edgecard, explained) -> None:
    if edgecard.manifest.verified_on != "host":
        pytest.skip("this machine cannot run the target")
    assert explained["shares"] == "measured"
    for program in explained["programs"].values():
        assert sum(call["measured_ratio"] for call in program["calls"]) == pytest.approx(
            1, abs=0.01
        )
        assert all(call["measured_us"] >= 0 for call in program["calls"])
        assert program["measured_us"] > 0
    heavy = _experts(explained, "step")[0]
    light = [call for call in explained["programs"]["step"]["calls"] if not call["flops"]]
    assert heavy["measured_us"] > min(call["measured_us"] for call in light)


def test_it_labels_shares_of_a_foreign_target_as_expected(edgecard) -> None:
    plan = parse_plan(edgecard.sections["plan"])
    document = explain_document(
        plan, find_target("aarch64"), parse_selftest(edgecard.sections["selftest"])
    )
    assert document["shares"] == "cost model"
    call = document["programs"]["step"]["calls"][0]
    assert call["measured_ratio"] is None
    assert call["kernel"].endswith("vec128")
    assert picture(document)["shares"] == "cost model"


def test_it_looks_at_sizes_of_the_selftest(edgecard) -> None:
    plan = parse_plan(edgecard.sections["plan"])
    found = situations(plan, parse_selftest(edgecard.sections["selftest"]))
    assert found.keys() == {program.name for program in plan.programs}
    assert found["step"].tokens == 1
    assert found["step"].past > 0


def test_it_finds_the_repeated_layers(explained) -> None:
    for program in explained["programs"].values():
        parts = [Segment(*part) for part in program["segments"]]
        assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
        assert parts[-1].end == len(program["calls"])
        assert max(part.repeats for part in parts) == 3


def _chain(layers: int):
    builder = ModuleBuilder(max_tokens=4)
    first = at = builder.buffer(4, 32)
    gamma = builder.vector(32, offset=1.0)
    for _ in range(layers):
        norm = builder.call(Op.NORM, [at], [builder.buffer(4, 32)], [gamma], kind=1, eps=1e-5)
        wide = builder.call(
            Op.LINEAR, [norm], [builder.buffer(4, 32)], [builder.w4(32, 32)], act=int(Act.RELU)
        )
        at = builder.call(Op.ADD, [wide, at], [builder.buffer(4, 32)])
    builder.program("forward", {"tensor": first}, {"tensor": at})
    module = builder.module()
    packed = pack_module(module).packed
    return parse_plan(emit_plan(module, weights_packed=packed).plan_bytes)


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_it_collapses_a_chain_of_equal_layers(layers) -> None:
    plan = _chain(layers)
    (program,) = plan.programs
    expected = [Segment(0, 3, layers)] if layers > 1 else [Segment(0, 3)]
    assert segments(plan, program.calls) == expected


def test_it_expects_more_of_more_work() -> None:
    plan = _chain(1)
    (program,) = plan.programs
    small = costs(plan, program, Situation(tokens=1)).costs
    (norm, linear, add) = small
    assert linear.flops == 2 * 4 * 32 * 32
    assert norm.sparsity is linear.sparsity is add.sparsity is None
    tiles = [select_tile(find_target(name).isa) for name in ("x86-64-v3", "x86-64-v1")]
    fast, slow = (expected_cycles(Op.LINEAR, linear, tile) for tile in tiles)
    assert fast <= slow


@pytest.mark.parametrize(
    ("params", "kind", "rows"),
    [
        ({}, KvKind.F32, 5 + 3),
        ({"window": 3, "sink": 1}, KvKind.F32, 3 + 3),  # the first query sees 1 + 2 old rows
        ({"append_only": 1}, KvKind.F32, 3),
        ({}, KvKind.I8, 5 + 3),
    ],
)
def test_it_counts_the_rows_of_the_cache_that_a_call_touches(params, kind, rows) -> None:
    module = small_decoder(9)
    plan = parse_plan(emit_plan(module, weights_packed=pack_module(module).packed).plan_bytes)
    step = next(program for program in plan.programs if program.name == "step")
    call = next(call for call in step.calls if call.op is Op.ATTENTION)
    call = replace(call, params={**call.params, **params})
    if "append_only" in params:
        call = replace(call, outputs=())
    plan = replace(plan, kv=KvShape(layers=2, heads=2, head_dim=8, capacity=16, kind=kind))
    program = replace(step, calls=(call,))
    (cost,) = costs(plan, program, Situation(tokens=3, past=5, past_ratio=2.0)).costs
    each = 2 * 2 * (8 + 4 if kind is KvKind.I8 else 4 * 8)
    operands = sum(
        (3 if plan.buffers[at].dynamic else plan.buffers[at].rows) * 4 * plan.buffers[at].cols
        for at in (*call.inputs, *call.outputs)
        if at >= 0
    )
    assert cost.size_bytes == rows * each + operands
    old = 0 if "append_only" in params else 5 * 2
    assert cost.dense_bytes == (old + 3) * 2 * 2 * 4 * 8 + operands


def test_it_draws_nodes_that_do_not_overlap(explained) -> None:
    drawing = picture(explained)
    boxes = [(node["x"], node["y"]) for node in drawing["nodes"]]
    calls = sum(len(program["calls"]) for program in explained["programs"].values())
    assert len(boxes) < 0.7 * calls  # repeats are drawn once
    for at, (x, y) in enumerate(boxes):
        assert 0 <= x <= drawing["width"] - NODE_WIDTH
        assert 0 <= y <= drawing["height"] - NODE_HEIGHT
        for other_x, other_y in boxes[at + 1 :]:
            assert abs(x - other_x) >= NODE_WIDTH or abs(y - other_y) >= NODE_HEIGHT
    assert sum(node["density_ratio"] is not None for node in drawing["nodes"]) >= 4
    for name in explained["programs"]:
        assert f"program {name}" in [heading["title"] for heading in drawing["headings"]]


def test_it_draws_the_shares_of_all_repeats(explained) -> None:
    total = sum(node["share_ratio"] for node in picture(explained)["nodes"])
    assert total == pytest.approx(len(explained["programs"]), abs=0.02)


def test_it_writes_well_formed_svg_whatever_names_say(explained) -> None:
    drawing = picture(explained)
    drawing["nodes"][0]["title"] = "<script>alert(1)</script>"
    drawing["nodes"][0]["hint"] = '"><b>&'
    drawing["nodes"][0]["tone"] = '"/><script>'
    text = svg_text(drawing)
    root = ElementTree.fromstring(text)
    assert "<script" not in text
    assert len(root.findall(f".//{SVG}g")) == len(drawing["nodes"])
    assert {item.tag for item in root.iter()} <= {
        SVG + name for name in ("svg", "style", "rect", "path", "text", "g", "title")
    }


def test_it_says_which_nodes_a_call_stands_for(edgecard, explained) -> None:
    nodes = explained["nodes"]
    calls = [call for program in explained["programs"].values() for call in program["calls"]]
    listed = {number for call in calls for number in call["nodes"]}
    assert listed == {at for at, node in enumerate(nodes) if node[3] == "call"}
    totals = [sum(row[fate] for row in explained["fates"]) for fate in ("call", "folded", "dead")]
    assert totals == [len(listed), len(nodes) - len(listed), 0]
    prune = next(call for call in calls if call["operation"] == "PRUNE")
    assert "DynamicPrune" in prune["source"]
    assert prune["source"].endswith(f" +{len(prune['nodes']) - 1}")
    made = next(call for call in calls if call["operation"] == "IMAGE_U8")
    assert (made["nodes"], made["source"]) == ([], "added by the compiler")
    hints = [node["hint"] for node in picture(explained)["nodes"]]
    assert any("stands for " in hint and "ai.sparsefleet::MoERouter" in hint for hint in hints)


def test_it_keeps_the_nodes_out_of_the_bundle(edgecard, explained) -> None:
    names = [node[1].encode() for node in explained["nodes"] if node[1].startswith("node_")]
    assert len(names) > 100
    sections = edgecard.sections.values()
    assert not any(name in data for name in names for data in sections)
    assert "origins" not in edgecard.report


def test_it_makes_the_same_document_again_from_itself(edgecard, explained) -> None:
    plan = parse_plan(edgecard.sections["plan"])
    selftest = parse_selftest(edgecard.sections["selftest"])
    again = explain_document(plan, TARGET, selftest, None, origins_of(explained))
    assert (again["nodes"], again["fates"]) == (explained["nodes"], explained["fates"])
    for name, program in again["programs"].items():
        for new, old in zip(program["calls"], explained["programs"][name]["calls"], strict=True):
            assert (new["nodes"], new["source"]) == (old["nodes"], old["source"])


def test_it_names_no_nodes_without_their_record(edgecard) -> None:
    plan = parse_plan(edgecard.sections["plan"])
    document = explain_document(plan, TARGET, parse_selftest(edgecard.sections["selftest"]))
    assert document["fates"] == []
    assert {call["source"] for call in document["programs"]["step"]["calls"]} == {""}


def test_it_cuts_long_names_in_the_middle() -> None:
    name = "/model/layers.0/self_attn/q_proj/MatMul +11"
    short = short_source({"source": name})
    assert len(short) == SOURCE_CHARACTERS
    assert short.startswith("/model/")
    assert short.endswith("/MatMul +11")
    assert short_source({"source": "Conv a"}) == "Conv a"


def test_it_reports_what_the_analysis_proved(edgecard) -> None:
    found = edgecard.report["sparsity"]
    shown = edgecard.report["explained"]["programs"].keys()
    assert found.keys() == {name for name in shown if "." not in name}
    assert {source["kind"] for source in found["step"]["sources"]} == {"route"}
    experts = [row for row in found["step"]["operations"] if "experts" in row["operation"]]
    assert len(experts) == 4
    nodes = edgecard.report["explained"]["nodes"]
    for row in experts:
        assert "MoEExpert" in row["source"]
        assert "ai.sparsefleet::MoEExpert" in {nodes[number][2] for number in row["nodes"]}
        assert row["multiply_adds_most"] * 8 == row["multiply_adds_dense"]
        assert row["why"] == "2 of 16 experts"


def test_it_names_nodes_and_no_number_of_the_ir(edgecard, explained) -> None:
    text = "\n".join(explain_lines(edgecard.report, explained))
    assert "sp.linear" not in text
    assert "moe.experts" not in text
    assert "constant of MatMul" in text
    for heading in ("zeros come from", "call ", "operation ", "entropy, nats", "calls "):
        assert any(line.strip().startswith(heading) for line in text.splitlines()), heading
    spans = [line.split()[:3] for line in text.splitlines() if line.startswith("  0.000 to")]
    assert len(spans) == 2  # both tables of entropy are in nats
    assert all(0.0 < float(end) < 5.0 for _, _, end in spans)


def test_it_says_how_each_class_of_calls_runs(edgecard, explained) -> None:
    policy = edgecard.report["policy"]
    table = parse_policy(edgecard.sections["policy"])
    plan = parse_plan(edgecard.sections["plan"])
    calls = sum(len(LEGAL[call_kind(plan, c)]) > 1 for p in plan.programs for c in p.calls)
    assert sum(sum(row["calls"].values()) for row in policy["classes"]) == calls
    step = next(p for p in plan.programs if p.name == "step")
    cell = next(
        call_cell(plan, call, 1) for call in step.calls if call_kind(plan, call) is CallKind.EXPERTS
    )
    (row,) = [
        row
        for row in policy["classes"]
        if (row["kind"], row["size"], row["rows"]) == ("EXPERTS", cell.size_name, cell.rows_name)
    ]
    assert row["calls"]["step"] >= 1
    assert row["used"][cell.density]
    assert row["variants"][cell.density] == table.variant(cell).name
    assert row["in_doubt"][cell.density] == bool(table.candidates(cell))
    text = "\n".join(explain_lines(edgecard.report, explained))
    assert f"policy: fitted to calls measured on {policy['measured_on']}" in text
    assert "left to the device to measure" in text


def test_it_says_what_a_policy_rests_on() -> None:
    facts = {"fixed": False, "measured_on": "unmeasured", "held_out_error": None}
    facts |= {"cells": 9, "cells_in_doubt": 4}
    (_, line) = policy_lines(facts)
    assert line.startswith("policy: never measured on this target, a guess; 4 of 9 classes")
    (_, line) = policy_lines({**facts, "fixed": True})
    assert line == "policy: fixed, the device measures and adapts nothing"
    assert list(policy_lines(None)) == []


def test_it_says_in_words_what_the_self_test_came_to() -> None:
    check = {"vectors": 16, "runs": 20, "failed_vectors": 0, "mismatches": []}
    assert check_text({"native_check": check}) == (
        "16 vectors in 20 runs, every bit as in the simulator"
    )
    check["failed_vectors"] = 2
    assert check_text({"native_check": check}).endswith("2 of them with other bits")
    assert check_text({}) == check_text({"native_check": {}}) == ""


def test_it_gathers_passes_that_found_nothing_to_do(explained) -> None:
    report = {"notes": ["m: 3 nodes", "fold: 0", "raise: 2; a, b", "fold: 1", "prune: 0"]}
    lines = list(explain_lines({**report, "experts": {"L0": 4, "L1": 8}}, explained))
    assert lines[-5:] == [
        "experts per layer: L0 4, L1 8",
        "note: m: 3 nodes",
        "note: raise: 2; a, b",
        "note: fold: 1",
        "note: nothing to do for prune",
    ]
    assert not [line for line in explain_lines({}, explained) if "experts per layer" in line]


def test_it_leaves_room_for_the_legend_of_a_narrow_plan(explained) -> None:
    narrow = {**picture(explained), "width": 200}
    width = float(ElementTree.fromstring(svg_text(narrow)).attrib["width"])
    assert width >= LEGEND_STEP * len(LEGEND)
