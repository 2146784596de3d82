"""What a first user stumbled over: pages say what a number, a stage and a state mean."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from django.test import Client

from builds.models import BuildJob, BuildTransition
from compiler.contract.telemetry import Sketch
from dashboards.badges import badge_of
from dashboards.charts import COMPACT, WIDE
from dashboards.evidence import evidence_strip, gate_rows, latency_comparison, look_of
from dashboards.reports import report_of
from dashboards.templatetags import sparsefleet as tags
from fleet.gates import decide
from fleet.gates.evidence import ArmCounts, Mode
from fleet.models import GateLook, Stage
from fleet.selectors.rollout_page import StageCard
from tests.unit.dashboards.test_evidence import SPEC, looks, points
from tests.unit.dashboards.world import World

LETTER_WIDTH = 6.2  # of a digit at 11 px, measured


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("evidence is 4.99e+03 : 1; more", "evidence is 4,990 : 1; more"),
        ("needed is 20 : 1.", "needed is 20 : 1."),
        ("it is 73,758 : 1", "it is 73,758 : 1"),
        ("more than a billion : 1", "more than a billion : 1"),
        ("odds of 1 : 1,329", "odds of 1 : 1,329"),
        ("as control and is rolled_back", "as control and is rolled back"),
        (None, ""),
    ],
)
def test_it_writes_stored_reasons_like_every_other_number(text: object, shown: str) -> None:
    assert tags.plain(text) == shown


def test_it_counts_stages_of_the_audit_log_from_one() -> None:
    assert tags.facts({"stage": 0, "following": 1}) == "stage: 1, following: 2"
    assert tags.facts({"stage": 3, "following": None}) == "stage: 4"
    assert tags.facts({"stage": "canary", "attempt": 0}) == "stage: canary, attempt: 0"


@pytest.mark.parametrize("frame", [0, 1])
def test_it_leaves_room_for_the_labels_of_the_evidence_axis(frame: int) -> None:
    chart = evidence_strip(points(*[40] * 12), SPEC).chart
    assert chart is not None
    left = (WIDE, COMPACT)[frame].left
    labels = [tick.label for tick in chart.drawings[frame].y_ticks]
    assert "100 M : 1" in labels
    assert max(len(label) for label in labels) * LETTER_WIDTH <= left - 8


def test_it_writes_the_mark_of_slow_answers_above_the_curve() -> None:
    sketch = Sketch()
    for value in (10.0, 20.0, 300.0):
        sketch.add(value)
    chart = latency_comparison(treatment=sketch, control=sketch, slow_ms=290.0).chart
    assert chart is not None
    drawing = chart.drawings[0]
    whole = next(tick.at for tick in drawing.y_ticks if tick.label == "100%")
    assert drawing.marks[0].label_y < whole


def test_it_claims_no_comparison_without_a_control() -> None:
    evidence, _ = looks(0, 0)[-1]
    alone = replace(evidence, mode=Mode.RELEASE, control=ArmCounts())
    verdict = decide(SPEC, alone)
    stored = GateLook(
        at=datetime(2026, 3, 1, tzinfo=UTC),
        stage=Stage(index=3),
        spec=json.loads(json.dumps(SPEC.to_json())),
        evidence=json.loads(json.dumps(alone.to_json())),
        verdict=json.loads(json.dumps(verdict.to_json())),
        decision=verdict.decision.value,
    )
    rows = {row.title: row for row in gate_rows(look_of(stored))}
    row = rows["Failed answers"]
    assert (row.ratio_low, row.ratio_high, row.harm, row.safe) == (None, None, None, None)
    assert row.word == "Not compared"
    assert row.note == ""
    assert "min_accuracy_drop" in rows["Wrong answers"].note


def card(stage: Stage, **counts: int) -> StageCard:
    whole = {"planned": 3, "enrolled": 3, "control": 2, "succeeded": 0, "failed": 0}
    return StageCard(stage=stage, open_count=0, keeps_control=True, **{**whole, **counts})


def test_it_says_which_devices_a_stage_takes() -> None:
    assert card(Stage(percent=20.0)).size_text == "20 %"
    assert card(Stage(percent=100.0)).size_text == "100 % except control"
    assert card(Stage(percent=100.0, is_release=True)).size_text.startswith("the control slice")
    assert replace(card(Stage(percent=100.0)), keeps_control=False).size_text == "100 %"


def test_it_counts_devices_that_went_back_as_bad() -> None:
    back = card(Stage(percent=20.0), succeeded=2, returned=2, returning=1)
    assert (back.kept, back.bad, back.taken_back) == (0, 3, 3)
    fine = card(Stage(percent=20.0), succeeded=2, failed=1)
    assert (fine.kept, fine.bad, fine.taken_back) == (2, 1, 0)


def test_it_names_a_column_of_durations_after_what_it_holds() -> None:
    table = report_of({"stages": [{"name": "plan", "seconds": 0.812}]}).tables[0]
    assert table.columns == ("Name", "Took")
    assert table.rows[0] == ("plan", "812 ms")


def test_it_says_compiling_on_the_badge_of_a_taken_build() -> None:
    assert tags.badge("leased")["badge"].word == "Compiling"
    assert badge_of("leased").word == "Taken by a worker"
    assert tags.verified("host")["badge"].word == "Verified on host"


@pytest.mark.django_db
def test_it_shows_that_a_stage_was_rolled_back(world: World, viewer: Client) -> None:
    assert world.bad is not None
    page = viewer.get(f"/rollouts/{world.bad.pk}").content.decode()
    assert "rolled back so far" in page
    assert "What these words mean" in page


@pytest.mark.django_db
def test_it_offers_no_button_on_a_finished_rollout(world: World, release_manager: Client) -> None:
    assert world.good is not None
    page = release_manager.get(f"/rollouts/{world.good.pk}").content.decode()
    assert "action-halt" not in page
    assert re.search(r"Finished <time", page)


@pytest.mark.django_db
def test_it_keeps_the_worker_of_a_finished_build(world: World, viewer: Client) -> None:
    job = world.bundles["1.1.0", "x86-64-v3"].job
    BuildJob.objects.filter(pk=job.pk).update(lease_owner="")
    BuildTransition.objects.create(subject=job, old="queued", new="leased", actor="worker-7")
    assert "worker-7" in viewer.get(f"/builds/{job.pk}").content.decode()


@pytest.mark.django_db
def test_it_folds_experts_into_one_line(world: World, viewer: Client) -> None:
    bundle = world.bundles["1.1.0", "x86-64-v3"]
    page = viewer.get(f"/bundles/{bundle.manifest_sha256}").content.decode()
    folded = page.index('id="d-experts"')
    assert "of the bundle</summary>" in page
    assert page.index("expert.L0.E0") > folded
    assert page.index("Verified on host") < folded


@pytest.mark.django_db
@pytest.mark.parametrize("address", ["/models", "/models/edgecard/versions/1.1.0"])
def test_it_says_that_claim_and_measurement_differ(
    world: World, viewer: Client, address: str
) -> None:
    assert "own evaluation set" in viewer.get(address).content.decode()
