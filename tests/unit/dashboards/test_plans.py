"""The picture and the tables of a plan on the page of a build: shown, bounded, escaped."""

import copy
import re

import pytest
from django.test import Client
from django.urls import reverse

from builds.models import BuildJob
from dashboards.plans import (
    LEGEND,
    MAX_PIXELS,
    TONES,
    fate_tables,
    plan_picture,
    plan_tables,
    sparsity_tables,
)
from dashboards.reports import MAX_ITEMS
from tests.factories.explained import explained_report
from tests.unit.dashboards.world import World


def test_it_draws_what_the_compiler_laid_out() -> None:
    report = explained_report()
    plan = plan_picture(report)
    assert plan is not None
    assert len(plan.nodes) == len(report["picture"]["nodes"])
    assert len(plan.edges) == len(report["picture"]["edges"])
    assert plan.shares == "measured"
    assert {node.tone for node in plan.nodes} <= TONES == {tone for tone, _ in LEGEND}
    assert any(node.share_width > 1 for node in plan.nodes)
    assert {text.title for text in plan.headings} == {"program see", "program step"}


def test_it_lists_every_call_in_a_table() -> None:
    report = explained_report()
    tables = plan_tables(report)
    programs = report["explained"]["programs"]
    assert len(tables) == len(programs)
    for table, program in zip(tables, programs.values(), strict=True):
        assert len(table.rows) == sum(length for _, length, _ in program["segments"])
        assert all(len(row) == len(table.columns) for row in table.rows)
    cells = [cell for table in tables for row in table.rows for cell in row]
    assert any("experts" in cell and " of " in cell for cell in cells)
    assert any(cell.startswith("exact: the router") for cell in cells)


def test_it_names_the_nodes_that_a_call_stands_for() -> None:
    report = explained_report()
    plan = plan_picture(report)
    assert all("MatMul" in node.source and "/layers" in node.source for node in plan.nodes)
    assert all("stands for MatMul /layers." in node.hint for node in plan.nodes)
    at = plan_tables(report)[0].columns.index("Nodes of the file")
    assert plan_tables(report)[0].rows[0][at] == "/layers.0/<see>/MatMul"


def test_it_says_what_became_of_all_nodes() -> None:
    report = explained_report()
    calls = sum(len(item["calls"]) for item in report["explained"]["programs"].values())
    (table,) = fate_tables(report)
    title = "Nodes of the model's files:"
    assert table.title == f"{title} {calls} in calls, 1 folded when compiling, 0 dead"
    assert table.columns == (
        *("Component", "Operator", "In calls"),
        "Folded when compiling",
        "Dead",
    )
    assert table.rows[-1] == ("decoder", "Constant", "0", "1", "0")
    for broken in (None, {}, {"explained": 3}, {"explained": {"fates": [3]}}):
        assert fate_tables(broken) == ()


def test_it_lists_the_zeros_that_were_found() -> None:
    savings, sources = sparsity_tables(explained_report())
    assert savings.title == "Program step, work that zeros save"
    assert savings.rows == (("24:moe.experts", "524,288", "65,536", "65,536", "2 of 16 experts"),)
    assert sources.title == "Program step, where sparsity comes from"
    for report in (None, {}, {"sparsity": []}, {"sparsity": {"see": 3}}):
        assert sparsity_tables(report) == ()


HOSTILE = {
    "nodes": [
        {
            "x": -5,
            "y": 10**12,
            "width": True,
            "height": "50",
            "tone": 'x" onload="alert(1)',
            "title": "<script>alert(1)</script>" * 20,
            "detail": None,
            "share_ratio": 1e300,
            "hint": "<script>" * 1_000,
            "source": "<img src=x onerror=alert(1)>" * 99,
        },
        "no object",
    ],
    "edges": [
        {"path": "M0 0H9"},
        {"path": "url(javascript:alert(1))"},
        {"path": 'M0 0"/><script>'},
        {"path": "M" * 1_000},
        {},
    ],
    "frames": "none",
    "headings": [{"title": "<b>"}],
    "width": 10**9,
    "height": 5,
    "shares": {"a": "b"},
}


def test_it_bounds_whatever_a_report_says() -> None:
    plan = plan_picture({"picture": HOSTILE})
    assert plan is not None
    (node,) = plan.nodes
    assert (node.x, node.y, node.width, node.height) == (0, MAX_PIXELS, 0, 0)
    assert node.tone == "move"
    assert len(node.title) <= 22
    assert len(node.source) <= 30
    assert len(node.hint) <= 1_000
    assert node.share_width == 0
    assert [edge.path for edge in plan.edges] == ["M0 0H9"]
    assert (plan.width, plan.frames) == (MAX_PIXELS, ())
    many = {"picture": {**HOSTILE, "nodes": [{}] * (MAX_ITEMS + 5)}}
    assert len(plan_picture(many).nodes) == MAX_ITEMS


@pytest.mark.parametrize(
    "report",
    [
        None,
        [],
        {},
        {"picture": None, "explained": None},
        {"picture": {"nodes": []}, "explained": {"programs": []}},
        {"picture": {"nodes": [{}], "width": 0}, "explained": {"programs": {"see": 3}}},
    ],
)
def test_it_shows_nothing_of_a_report_without_a_plan(report) -> None:
    assert plan_picture(report) is None
    assert plan_tables(report) == ()


@pytest.mark.parametrize(
    "segments", [None, [[0]], [["a", "b", "c"]], [[0, 10**9, 10**9]], [[10**9, 1, 1]], [[-1, 2, 0]]]
)
def test_it_survives_segments_that_make_no_sense(segments) -> None:
    program = copy.deepcopy(explained_report()["explained"]["programs"]["see"])
    program["segments"] = segments
    (table,) = plan_tables({"explained": {"programs": {"see": program}}})
    assert len(table.rows) <= len(program["calls"])


def test_it_shows_the_plan_on_the_page_of_a_build(world: World, viewer: Client) -> None:
    job = BuildJob.objects.exclude(report={}).latest("pk")
    page = viewer.get(reverse("build-detail", args=[job.pk])).content.decode()
    assert "What runs on the device" in page
    assert page.count('class="box"') == len(explained_report()["picture"]["nodes"])
    assert "exact: the router" in page
    assert "<style" not in page
    assert not re.search(r"\sstyle=", page)


def test_it_escapes_what_a_report_says(world: World, viewer: Client) -> None:
    job = BuildJob.objects.exclude(report={}).latest("pk")
    job.report = {"picture": HOSTILE, "explained": {"programs": {"<i>": {"calls": []}}}}
    job.save()
    page = viewer.get(reverse("build-detail", args=[job.pk])).content.decode()
    assert "<script>alert" not in page
    assert "<i>" not in page
    assert 'onload="' not in page
    assert "&lt;script&gt;" in page
