"""A new rollout: mistakes come back as the form with 422, a good one is made by the service."""

import pytest
from django.core.exceptions import ValidationError
from django.test import Client

from builds.models import Target
from dashboards.forms import parse_stages
from fleet.cohorts import Goal
from fleet.models import Group, Rollout
from tests.unit.dashboards.world import World

pytestmark = pytest.mark.django_db

HTMX = {"HX-Request": "true"}


def fields(world: World, **changes: object) -> dict[str, object]:
    assert world.group is not None
    values: dict[str, object] = {
        "version": world.versions[2].pk,
        "group": world.group.pk,
        "name": "to everyone",
        "stages": "1 device, 50 %, 100 %",
        "profile": "lab",
    }
    return {**values, **changes}


@pytest.mark.parametrize(
    ("text", "goals"),
    [
        ("5 %, 25 %, 100 %", [Goal(percent=5.0), Goal(percent=25.0), Goal(percent=100.0)]),
        ("2 devices,100%", [Goal(count=2), Goal(percent=100.0)]),
        (" 1 ", [Goal(count=1)]),
        ("1 device, 12.5 %,", [Goal(count=1), Goal(percent=12.5)]),
    ],
)
def test_it_reads_stages(text: str, goals: list[Goal]) -> None:
    assert parse_stages(text) == goals


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "x",
        "0 %",
        "101 %",
        "0",
        "1.5 devices",
        "-3",
        "5 %, 5 %",
        "50 %, 10 %",
        "9, 3",
        "٣",
        "1e9 %",
        ",".join(str(n) for n in range(1, 40)),
    ],
)
def test_it_refuses_what_is_no_stage(text: str) -> None:
    with pytest.raises(ValidationError):
        parse_stages(text)


def test_it_offers_sane_defaults(world: World, release_manager: Client) -> None:
    text = release_manager.get(f"/rollouts/new?version={world.versions[2].pk}").content.decode()
    assert 'value="5 %, 25 %, 100 %"' in text
    assert f'<option value="{world.versions[2].pk}" selected>' in text
    assert "1.3.0-rc1" not in text


def test_it_makes_a_rollout(world: World, release_manager: Client) -> None:
    response = release_manager.post("/rollouts/new", fields(world, alpha="1000", min_answers="50"))
    rollout = Rollout.objects.get(name="to everyone")
    assert response.status_code == 302
    assert response.headers["Location"] == f"/rollouts/{rollout.pk}"
    assert rollout.gate["alpha"] == pytest.approx(0.001)
    assert rollout.gate["min_answers"] == 50
    assert rollout.gate["profile"] == "lab"
    assert [(stage.count, stage.percent) for stage in rollout.stages.order_by("index")] == [
        (1, None),
        (None, 50.0),
        (None, 100.0),
    ]
    assert release_manager.get(f"/rollouts/{rollout.pk}").status_code == 200


def test_it_tells_htmx_where_to_go(world: World, release_manager: Client) -> None:
    response = release_manager.post("/rollouts/new", fields(world), headers=HTMX)
    rollout = Rollout.objects.get(name="to everyone")
    assert response.headers["HX-Redirect"] == f"/rollouts/{rollout.pk}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": ""}, "This field is required"),
        ({"version": "999999"}, "Select a valid choice"),
        ({"stages": "half"}, "is no stage"),
        ({"profile": "brave"}, "Select a valid choice"),
        ({"alpha": "1"}, "greater than or equal to 5"),
        ({"min_answers": "0"}, "min_answers must be an integer"),
        ({"hold_evidence": "0.5"}, "hold_evidence must be in"),
    ],
)
def test_it_shows_a_mistake_on_the_form(
    world: World, release_manager: Client, changes: dict[str, object], words: str
) -> None:
    count = Rollout.objects.count()
    for headers in ({}, HTMX):
        response = release_manager.post("/rollouts/new", fields(world, **changes), headers=headers)
        text = response.content.decode()
        assert response.status_code == 422
        assert words in text
        assert ("<html" in text) == (headers == {})
        assert 'value="to everyone"' in text
    assert Rollout.objects.count() == count


def test_it_refuses_a_group_of_another_model(world: World, release_manager: Client) -> None:
    from tests.factories.builds import make_model

    other = Group.objects.create(name="other", model=make_model("other"))
    response = release_manager.post("/rollouts/new", fields(world, group=other.pk))
    assert response.status_code == 422
    assert "This group is about other" in response.content.decode()


def test_it_makes_the_group_of_every_device(world: World, release_manager: Client) -> None:
    for _ in range(2):
        assert release_manager.post("/rollouts/new", fields(world, group="")).status_code == 302
    group = Group.objects.get(name="all-edgecard")
    assert group.filter == {}
    assert group.rollouts.count() == 2


def test_it_previews_stages_and_makes_nothing(world: World, release_manager: Client) -> None:
    count = Rollout.objects.count()
    response = release_manager.post("/rollouts/new", fields(world, preview="1"), headers=HTMX)
    text = response.content.decode()
    assert response.status_code == 200
    assert "If it started now" in text
    assert "12 devices of the group" in text
    assert Rollout.objects.count() == count


def test_it_keeps_the_form_from_a_viewer(world: World, viewer: Client) -> None:
    for response in (viewer.get("/rollouts/new"), viewer.post("/rollouts/new", fields(world))):
        assert response.status_code == 403
        assert "release_manager" in response.content.decode()
    assert not Rollout.objects.filter(name="to everyone").exists()
    assert Target.objects.exists()
