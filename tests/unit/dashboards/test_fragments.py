"""Polling: one source of markup, the right status, and an end."""

import re

import pytest
from django.test import Client

from builds.models import BuildJob
from builds.states import BuildState
from tests.unit.dashboards.world import World

pytestmark = pytest.mark.django_db

HTMX = {"HX-Request": "true"}


def test_it_answers_a_fragment_whose_root_has_its_own_name(world: World, viewer: Client) -> None:
    assert world.bad is not None
    for address, name in (
        ("/", "_overview_live"),
        ("/models", "_model_matrices"),
        ("/models/edgecard/versions/1.1.0", "_version_live"),
        ("/builds", "_build_rows"),
        (f"/builds/{world.bundles['1.0.0', 'x86-64-v1'].job_id}", "_build_live"),
        ("/devices", "_device_rows"),
        (f"/devices/{world.devices[0].pk}", "_device_live"),
        ("/rollouts", "_rollout_rows"),
        (f"/rollouts/{world.bad.pk}", "_rollout_live"),
    ):
        fragment = viewer.get(address, headers=HTMX)
        text = fragment.content.decode()
        assert "<html" not in text, address
        assert re.search(r'id="([^"]+)"', text).group(1) == name, address  # type: ignore[union-attr]
        page = viewer.get(address)
        assert f'id="{name}"' in page.content.decode(), address
        for response in (page, fragment):
            assert "HX-Request" in response.headers["Vary"], address


def test_it_answers_a_boosted_request_with_the_page(world: World, viewer: Client) -> None:
    response = viewer.get("/builds", headers={**HTMX, "HX-Boosted": "true"})
    assert "<html" in response.content.decode()


def test_it_ends_the_polling_of_a_final_state(world: World, viewer: Client) -> None:
    assert world.good is not None
    for address in (
        f"/rollouts/{world.good.pk}",
        f"/builds/{world.bundles['1.0.0', 'x86-64-v1'].job_id}",
        "/models/edgecard/versions/1.0.0",
    ):
        response = viewer.get(address, headers=HTMX)
        assert response.status_code == 286, address
        assert "hx-trigger" not in response.content.decode(), address
        assert viewer.get(address).status_code == 200, address


def test_it_goes_on_polling_until_then(world: World, viewer: Client) -> None:
    assert world.bad is not None
    running = BuildJob.objects.get(state=BuildState.COMPILING.value)
    for address in (f"/rollouts/{world.bad.pk}", f"/builds/{running.pk}", "/models", "/builds"):
        response = viewer.get(address, headers=HTMX)
        assert response.status_code == 200, address
        assert 'hx-trigger="every 2s"' in response.content.decode(), address


def test_it_polls_the_address_with_its_filter(world: World, viewer: Client) -> None:
    text = viewer.get("/builds?state=compiling", headers=HTMX).content.decode()
    assert 'hx-get="/builds?state=compiling"' in text


def test_it_shows_the_live_state_of_a_build(world: World, viewer: Client) -> None:
    running = BuildJob.objects.get(state=BuildState.COMPILING.value)
    text = viewer.get(f"/builds/{running.pk}", headers=HTMX).content.decode()
    assert "cc: 12 of 26 kernels" in text
    assert "46 %" in text
