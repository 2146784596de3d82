"""Pages of an installation in which nothing has happened, and of things that are not there."""

import pytest
from django.test import Client

pytestmark = pytest.mark.django_db


def test_it_says_what_is_missing(viewer: Client) -> None:
    for address in (
        "/models/no/versions/1",
        "/builds/7",
        "/bundles/abc",
        "/devices/7",
        "/rollouts/7",
    ):
        response = viewer.get(address)
        assert response.status_code == 404
        assert "app.not_found" in response.content.decode()
    assert viewer.get("/nowhere").status_code == 404


def test_it_is_calm_when_there_is_nothing(viewer: Client) -> None:
    assert "All calm" in viewer.get("/").content.decode()
    assert "No model yet" in viewer.get("/models").content.decode()
    assert "No build" in viewer.get("/builds").content.decode()
    assert "No device" in viewer.get("/devices").content.decode()
    assert "No rollout" in viewer.get("/rollouts").content.decode()
