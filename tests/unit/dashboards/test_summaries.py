"""What a release manager reads of a build: figures by hand, and nothing of a report that is odd."""

import pytest

from dashboards.reports import ReportTable
from dashboards.summaries import caveats_of, summary_of

POLICY = {
    "measured_on": "one machine",
    "held_out_error": 0.08,
    "cells": 9,
    "cells_in_doubt": 4,
    "fixed": False,
    "densities": ["<=0.5", ">0.5"],
    "classes": [
        {
            "kind": "LINEAR_F32",
            "size": "<=32K",
            "rows": ">128",
            "calls": {"step": 3},
            "variants": ["ALONE", "UNCHECKED_ALONE"],
            "in_doubt": [False, True],
            "used": [True, True],
        }
    ],
}
BANDS = {
    "questions": 200,
    "right": 150,
    "worse": 3,
    "better": 1,
    "bands": [
        {"low": 0, "share": 250, "program": "step.band0", "top_k": 1, "worse": 2, "better": 0}
        | {"reason": "few are lost"},
        {"low": 1500, "share": 750, "program": "step", "top_k": 2, "worse": 0, "better": 0}
        | {"reason": "many would be lost"},
    ],
}
SUBSTITUTES = {
    "questions": 200,
    "right": 150,
    "rows": [{"kind": "narrow_dense", "worse": 31, "better": 1}],
    "planned": {"narrow_dense": 1200},
    "refused": {"shared_only": "there are none"},
}
REPORT = {
    "verified_on": "qemu",
    "total_bytes": 4_000,
    "memory": {"arena_bytes": 2_000, "kv_bytes": 0},
    "native_check": {"vectors": 16, "failed_vectors": 0},
    "sizes": {"expert.L0.E0": 1_000, "expert.L0.E1": 2_000, "weights.shared": 900, "plan": 100},
    "explain": [{"operation": "LINEAR", "kernel": "k", "calls": {"step": 3}, "weight_bytes": 900}],
    "policy": POLICY,
    "bands": BANDS,
    "substitutes": SUBSTITUTES,
    "stages": [{"name": "plan", "seconds": 0.5, "cached": False, "weights": 3}],
    "caveats": ["one thing", 3],
    "neurons": [{"operation": "LINEAR"}],
}


def tables(report=REPORT) -> dict[str, ReportTable]:
    return {table.title.split(":")[0]: table for table in summary_of(report, verified_on="").tables}


def test_it_says_how_large_a_bundle_is_and_where_it_was_checked() -> None:
    facts = dict(summary_of(REPORT, verified_on="host").facts)
    assert facts["Download"] == "4.0 kB"
    assert facts["Memory of a run"] == "2.0 kB"
    assert facts["Code checked on"] == "host"
    assert facts["Self-test"] == "16 questions, none differ"
    assert "Key/value cache" not in facts
    assert dict(summary_of(REPORT, verified_on="").facts)["Code checked on"] == "qemu"


def test_it_adds_up_the_parts_of_a_bundle() -> None:
    rows = tables()["What is in the bundle"].rows
    assert rows[0] == ("Experts, one section each", "2", "3.0 kB", "75.0 %")
    assert [row[3] for row in rows] == ["75.0 %", "22.5 %", "2.5 %"]


def test_it_names_kernels_and_where_they_were_checked() -> None:
    (row,) = tables()["Kernels"].rows
    assert row[:5] == ("LINEAR", "k", "qemu", "step 3", "900 B")
    assert not tables()["Kernels"].note
    assert tables({**REPORT, "verified_on": "assembled"})["Kernels"].note


def test_it_says_how_calls_run() -> None:
    found = tables()["Policy"]
    assert found.columns[-2:] == ("≤ 0.5", "> 0.5")
    assert found.rows == (
        ("linear f32", "≤ 32K", "> 128", "step 3", "alone*", "unchecked alone*?"),
    )
    assert found.note.startswith("Fitted to calls measured on one machine, 8.0 % off on others.")
    assert "4 of 9 classes" in found.note
    guess = tables({"policy": {**POLICY, "held_out_error": None}})["Policy"].note
    assert guess.startswith("Never measured on this target")
    fixed = tables({"policy": {**POLICY, "fixed": True}})["Policy"].note
    assert fixed.startswith("Fixed")


def test_it_says_when_fewer_experts_do() -> None:
    found = tables()["Entropy bands"]
    assert found.rows == (
        ("0.000 to 1.500", "25.0 %", "step.band0", "top-1", "74.0 %", "few are lost"),
        ("1.500 on", "75.0 %", "step", "top-2", "75.0 %", "many would be lost"),
    )
    assert found.note == "75.0 % of 200 calibration questions right without, 74.0 % with them."


def test_the_rest_is_in_the_download() -> None:
    assert tables().keys() == {
        *("What is in the bundle", "Kernels", "Policy", "Entropy bands", "Without routers"),
        "Compiler stages",
    }
    assert tables()["Compiler stages"].columns == ("Name", "Took", "Cached")
    assert caveats_of(REPORT) == ("one thing",)


def test_it_says_what_stands_in_for_routers_and_why_not() -> None:
    found = tables()["Without routers"]
    assert found.rows == (
        ("narrow_dense", "60.0 %", "1,200", "may stand in"),
        ("shared_only", "\N{EN DASH}", "\N{EN DASH}", "there are none"),
    )
    assert found.note == "75.0 % of 200 held-out questions right with routers."
    alone = tables({"substitutes": {"rows": [], "refused": {"full_dense": "too many"}}})
    assert [row[0] for row in alone["Without routers"].rows] == ["full_dense"]
    assert "Without routers" not in tables({"substitutes": None})


@pytest.mark.parametrize("odd", [None, [], 3, {}, {"sizes": 3}, {"caveats": {}}, {"bands": []}])
def test_an_odd_report_shows_nothing(odd: object) -> None:
    assert not summary_of(odd, verified_on="")
    assert caveats_of(odd) == ()


def test_parts_of_another_form_are_left_out() -> None:
    odd = {name: {"classes": [3], "bands": [3], "x": "y"} for name in REPORT}
    found = summary_of({**odd, "verified_on": "host"}, verified_on="")
    assert [table.title.split(":")[0] for table in found.tables] == ["Policy"]
    row = {"kind": 3, "variants": ["A"] * 9, "used": 3}
    found = summary_of({"policy": {**POLICY, "classes": [row]}}, verified_on="")
    assert [len(cells) for cells in found.tables[0].rows] == [6]
