"""The page about identities: alerts to settle, and devices that may join with their key."""

from collections.abc import Callable

import pytest
from django.test import Client

from builds.common.roles import Role
from fleet.models import IdentityAlert, Preauthorisation
from fleet.services.alerts import alert_raise
from fleet.states import AlertKind
from tests.unit.dashboards.world import World

pytestmark = pytest.mark.django_db
KEY = "ab" * 32


@pytest.fixture
def alert(world: World) -> IdentityAlert:
    device = world.devices[0]
    alert_raise(
        kind=AlertKind.SECOND_KEY, serial=device.serial, key_thumbprint=KEY, text="Somebody asked."
    )
    return IdentityAlert.objects.get()


def test_it_shows_alerts_where_operators_look(
    viewer: Client, world: World, alert: IdentityAlert
) -> None:
    for address in ("/", "/devices/identity"):
        text = viewer.get(address).content.decode()
        assert "Somebody asked." in text, address
        assert alert.serial in text
    assert "Settle" not in viewer.get("/devices/identity").content.decode()


def test_it_settles_an_alert(release_manager: Client, world: World, alert: IdentityAlert) -> None:
    address = f"/devices/identity/{alert.pk}/settle"
    assert release_manager.post(address).status_code == 302
    alert.refresh_from_db()
    assert alert.settled_at is not None
    again = release_manager.post(address, follow=True)
    assert "is settled" in again.content.decode()


def test_it_preauthorises_and_revokes(release_manager: Client, world: World) -> None:
    asked = {"serial": "new-1", "key_thumbprint": KEY}
    assert release_manager.post("/devices/identity", asked).status_code == 302
    row = Preauthorisation.objects.get()
    assert (row.serial, row.replaces) == ("new-1", False)
    taken = release_manager.post("/devices/identity", asked)
    assert taken.status_code == 409
    assert "exists" in taken.content.decode()
    wrong = release_manager.post("/devices/identity", {**asked, "key_thumbprint": "x"})
    assert wrong.status_code == 422
    assert "64 lower-case" in wrong.content.decode()
    release_manager.post(f"/devices/identity/{row.pk}/revoke")
    assert not Preauthorisation.objects.exists()


def test_it_lets_nobody_else(sign_in: Callable[[Role], Client], alert: IdentityAlert) -> None:
    client = sign_in(Role.DEVELOPER)
    asked = {"serial": "new-1", "key_thumbprint": KEY}
    assert client.post("/devices/identity", asked).status_code == 403
    assert client.post(f"/devices/identity/{alert.pk}/settle").status_code == 403
    assert client.post("/devices/identity/1/revoke").status_code == 403
    assert not Preauthorisation.objects.exists()
