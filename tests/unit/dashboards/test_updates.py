"""Pages about updates: gains kept in quantisation, deferred deltas, metered networks."""

import pytest
from django.test import Client

from builds.models import BuildJob, Delta
from fleet.models import Device, Rollout, Update
from tests.unit.dashboards.test_rollout_form import fields
from tests.unit.dashboards.world import World

pytestmark = pytest.mark.django_db
SAYS = "over the base, 48 right answers gain +0.2000 nats in f32: 97% of the gain"


def text(client: Client, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200
    return answer.content.decode()


def test_a_version_says_whether_its_gain_was_kept(world: World, viewer: Client) -> None:
    path = "/models/edgecard/versions/1.1.0"
    assert "Quantisation:" not in text(viewer, path)
    job = BuildJob.objects.get(pk=world.bundles["1.1.0", "x86-64-v3"].job_id)
    job.report = {**job.report, "gain": {"rule": "gain", "passed": True, "says": SAYS}}
    job.save()
    assert f"Quantisation: {SAYS}." in text(viewer, path)
    assert SAYS in text(viewer, f"/builds/{job.pk}")


def test_a_deferred_delta_says_why(world: World, viewer: Client) -> None:
    code = "build.app.delta_queue_full"
    delta = Delta.objects.filter(new__version__version="1.1.0").first()
    assert delta is not None
    Delta.objects.filter(pk=delta.pk).update(state="deferred", error_code=code)
    shown = text(viewer, "/models/edgecard/versions/1.1.0")
    assert "Deferred" in shown
    assert code in shown
    assert "built as soon as there is room" in shown


def test_a_device_says_its_network_and_why_it_waits(world: World, viewer: Client) -> None:
    update = Update.objects.select_related("device").first()
    assert update is not None
    reason = "the network is metered and the rollout waits for one that is not"
    Update.objects.filter(device=update.device).exclude(pk=update.pk).delete()
    Update.objects.filter(pk=update.pk).update(
        state="queued", is_offerable=True, waits_for=reason, kind="install"
    )
    Device.objects.filter(pk=update.device_id).update(network="metered", state="accepted")
    Rollout.objects.filter(pk=update.rollout_id).update(
        state="running", network_policy="wait_unmetered", unmetered_wait_s=3600.0
    )
    shown = text(viewer, f"/devices/{update.device_id}")
    assert "<dd>metered</dd>" in shown
    assert f"waits: {reason}" in shown
    assert f"waits: {reason}, until " in shown  # why it gets this answer
    assert "waits on metered networks for" in text(viewer, f"/rollouts/{update.rollout_id}")


def test_a_new_rollout_takes_a_policy_for_metered_networks(
    world: World, release_manager: Client
) -> None:
    posted = fields(world, network_policy="wait_unmetered", unmetered_wait_h="12")
    assert release_manager.post("/rollouts/new", posted).status_code == 302
    rollout = Rollout.objects.first()
    assert rollout is not None
    assert (rollout.network_policy, rollout.unmetered_wait_s) == ("wait_unmetered", 12 * 3600.0)
    assert (
        release_manager.post("/rollouts/new", fields(world, network_policy="never")).status_code
        == 422
    )
    assert (
        release_manager.post("/rollouts/new", fields(world, unmetered_wait_h="-1")).status_code
        == 422
    )
