"""Query budgets: a page costs the same number of queries whatever it shows."""

from collections.abc import Callable

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from builds.states import BuildState
from fleet.models import Heartbeat
from tests.factories import builds as make
from tests.unit.dashboards.world import World, make_device, make_rollout

pytestmark = pytest.mark.django_db

# Session, user and role are three of each; the second number is the whole budget.
BUDGETS = {
    "/": 22,
    "/models": 10,
    "/models/edgecard/versions/1.1.0": 14,
    "/builds": 6,
    "/targets": 6,
    "/devices": 7,
    "/rollouts": 10,
}
SIGNED_IN = 3


def queries(client: Client, address: str) -> int:
    with CaptureQueriesContext(
        connection,
    ) as caught:
        assert client.get(address).status_code == 200
    return len(caught)


@pytest.fixture
def grow(world: World) -> Callable[[], None]:
    """Return a function that makes the world larger in every direction."""

    def more() -> None:
        for number in range(20, 26):
            target = world.targets[number % 3]
            make_device(number, target, world.model, world.bundles["1.1.0", target.name], world.now)
            row = make.make_version(world.model, f"2.0.{number}")
            make.make_job(row, target, state=BuildState.FAILED_APP)
        for version in ("1.1.0", "1.2.0"):
            make_rollout(world, version, "1.0.0", state="ready", start=world.now)

    return more


@pytest.mark.parametrize(("address", "budget"), [*BUDGETS.items()])
def test_it_stays_inside_its_budget_while_the_world_grows(
    viewer: Client, grow: Callable[[], None], address: str, budget: int
) -> None:
    before = queries(viewer, address)
    grow()
    assert queries(viewer, address) == before
    assert before <= budget


def test_it_shows_a_rollout_inside_its_budget(world: World, viewer: Client) -> None:
    assert world.good is not None
    assert world.bad is not None
    assert queries(viewer, f"/rollouts/{world.good.pk}") <= 19 + SIGNED_IN
    assert queries(viewer, f"/rollouts/{world.bad.pk}") <= 19 + SIGNED_IN


def test_it_shows_a_device_inside_its_budget(world: World, viewer: Client) -> None:
    assert queries(viewer, f"/devices/{world.devices[0].pk}") <= 7 + 8 + SIGNED_IN


def test_it_shows_a_build_and_a_bundle_inside_their_budgets(world: World, viewer: Client) -> None:
    bundle = world.bundles["1.1.0", "x86-64-v3"]
    assert queries(viewer, f"/builds/{bundle.job_id}") <= 4 + SIGNED_IN
    assert queries(viewer, f"/bundles/{bundle.manifest_sha256}") <= 6 + SIGNED_IN


def test_it_shows_devices_without_a_heartbeat(world: World, viewer: Client) -> None:
    Heartbeat.objects.all().delete()
    assert viewer.get("/devices").status_code == 200
    assert viewer.get("/").status_code == 200
