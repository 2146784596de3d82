"""One identity on two machines is told from reboots, retries and restored backups, and shut out."""

import pytest

from builds.models import AuditEvent
from compiler.contract.protocol import UpdateState
from fleet.clones import SAME_POLL_S, WINDOW_S, Sighting, Trail, observed, parse_boot, trail_of
from fleet.edge.snapshot import snapshot_build
from fleet.models import Device, Heartbeat, IdentityAlert, Update
from fleet.selectors.poll import device_explain, device_poll_answer
from fleet.services.enrolment import device_admit
from fleet.services.running import Beat, heartbeats_store
from fleet.states import DeviceEvent, DeviceState
from tests.factories.fleet import MANAGER, SimulatedFleet, make_device

A, B, C, D = (letter * 16 for letter in "abcd")


def seen(*polls: tuple[str, int], every_s: float = 300.0) -> Trail:
    """Return the trail of polls (boot, number) that come one after the other."""
    sightings = (Sighting(boot, number, at * every_s) for at, (boot, number) in enumerate(polls))
    return observed(Trail(), sightings)


LEGAL = {
    "one boot": [(A, number) for number in range(1, 50)],
    "reboots": [(A, 1), (A, 2), (B, 1), (C, 1), (C, 2), (D, 1)],
    "a crash loop": [(f"{number:016x}", 1) for number in range(40)],
    # the disk of yesterday in the same machine: the agent starts anew, so its boot is new
    "a restored backup": [(A, 1), (A, 2), (B, 1), (B, 2), (C, 1), (C, 2)],
    # the memory of an hour ago, once: its boot comes back one time
    "a restored snapshot": [(A, 1), (A, 2), (A, 3), (B, 1), (A, 2), (A, 3), (A, 4)],
    "two restored snapshots": [*((A, n) for n in (70, 7, 8, 9, 10, 2, 3, 4, 5, 6, 7, 8))],
    "polls that were lost": [(A, 1), (A, 5), (A, 90)],
}
CLONES = {
    "a copied disk": [(A, 1), (B, 1), (A, 2), (B, 2), (A, 3)],
    "one copy polls rarely": [(A, 1), (A, 2), (B, 1), (A, 3), (A, 4), (B, 2), (A, 5)],
    "three copies": [(A, 1), (B, 1), (C, 1), (A, 2), (B, 2), (C, 2)],
    "a copied running machine": [(A, 7), (A, 7), (A, 8), (A, 8), (A, 9), (A, 9)],
    "a copy that lags behind": [(A, 70), (A, 7), (A, 71), (A, 8), (A, 72), (A, 9)],
    "a copy that reboots": [(A, 1), (B, 1), (A, 2), (C, 1), (A, 3), (D, 1), (A, 4)],
}


@pytest.mark.parametrize("polls", LEGAL.values(), ids=LEGAL)
def test_it_takes_no_single_machine_for_a_clone(polls):
    assert not seen(*polls).is_of_a_clone


@pytest.mark.parametrize("polls", CLONES.values(), ids=CLONES)
def test_it_knows_two_machines_from_their_polls(polls):
    assert seen(*polls).is_of_a_clone


def test_it_forgives_a_proxy_that_sends_a_poll_again():
    again = [(A, number) for number in range(1, 9) for _ in range(2)]
    assert not seen(*again, every_s=SAME_POLL_S / 4).is_of_a_clone


def test_it_forgets_returns_after_a_day():
    polls = [(A, 1), (B, 1), (A, 2), (B, 2)]  # two returns
    trail = seen(*polls)
    assert len(trail.returns) == 2
    late = Sighting(A, 3, 4 * 300 + WINDOW_S)
    assert not observed(trail, [late]).is_of_a_clone
    assert observed(trail, [Sighting(A, 3, 4 * 300)]).is_of_a_clone


def test_it_ignores_a_poll_that_another_process_wrote_down_late():
    trail = observed(Trail(), [Sighting(A, 9, 100.0), Sighting(B, 1, 101.0)])
    assert observed(trail, [Sighting(A, 8, 99.0)] * 5) == trail


def test_it_remembers_a_trail_as_json():
    trail = seen(*CLONES["a copied disk"])
    assert trail_of(trail.to_json()) == trail
    assert trail_of({}) == Trail()


@pytest.mark.parametrize(
    ("header", "boot"),
    [
        (f"{A}.7", (A, 7)),
        (f"{A}.", None),
        (A, None),
        ("xyz.1", None),
        (f"{A}.-1", None),
        (f"{A}.1234567890", None),
        (f"{A}.\u0667", None),
    ],
)
def test_it_reads_the_header_of_a_poll(header, boot):
    assert parse_boot(header) == boot


def beats(device: Device, clock, *polls: tuple[str, int]) -> list[Beat]:
    found = []
    for poll in polls:
        clock.advance(300)
        found.append(Beat(device.pk, clock.now(), "", poll))
    return found


@pytest.mark.django_db
@pytest.mark.parametrize("at_once", [True, False])
def test_it_quarantines_a_clone_and_takes_its_update(clock, at_once):
    fleet = SimulatedFleet(per_target=2)
    fleet.release()
    update = fleet.rollout().updates.first()
    device = Device.objects.get(pk=update.device_id)
    polls = beats(device, clock, *CLONES["a copied disk"])
    for part in [polls] if at_once else [[poll] for poll in polls]:
        heartbeats_store(beats=part)
    device.refresh_from_db()
    assert (device.state, device.token_generation) == (DeviceState.QUARANTINED, 1)
    assert Update.objects.get(pk=update.pk).state == UpdateState.REMOVED
    assert device_poll_answer(device_pk=device.pk) is None
    snapshot = snapshot_build()
    assert device.pk in snapshot.denied
    assert update.pk not in snapshot.live
    assert update.pk not in snapshot.downloads
    assert "two machines" in device_explain(device_pk=device.pk).reasons[1]
    alert = IdentityAlert.objects.get()
    assert (alert.kind, alert.device_id, alert.settled_at) == ("clone", device.pk, None)
    assert AuditEvent.objects.filter(action="device.quarantine").count() == 1
    assert AuditEvent.objects.filter(action="alert.clone").count() == 1


@pytest.mark.django_db
def test_it_lets_a_released_device_begin_a_new_trail(clock):
    device = make_device()
    heartbeats_store(beats=beats(device, clock, *CLONES["a copied disk"]))
    device_admit(
        actor=MANAGER, device_pk=device.pk, event=DeviceEvent.RELEASE, reason="the copy is gone"
    )
    device.refresh_from_db()
    assert device.state == DeviceState.ACCEPTED
    assert Heartbeat.objects.get(device=device).trail == {}
    alert = IdentityAlert.objects.get()
    assert alert.settled_by == MANAGER.name
    assert "the copy is gone" in alert.note
    heartbeats_store(beats=beats(device, clock, (A, 4), (A, 5), (B, 3)))
    device.refresh_from_db()
    assert device.state == DeviceState.ACCEPTED
    heartbeats_store(beats=beats(device, clock, (A, 6), (B, 4), (A, 7)))
    device.refresh_from_db()
    assert device.state == DeviceState.QUARANTINED
    assert IdentityAlert.objects.filter(settled_at=None).count() == 1


@pytest.mark.django_db
def test_it_leaves_devices_alone_that_do_not_say_their_boot(clock):
    device = make_device()
    heartbeats_store(beats=[Beat(device.pk, clock.now(), None) for _ in range(9)])
    assert Heartbeat.objects.get(device=device).trail == {"boots": [], "returns": []}


@pytest.mark.django_db
def test_it_retires_a_quarantined_device_for_good(clock):
    device = make_device(state=DeviceState.QUARANTINED)
    device_admit(actor=MANAGER, device_pk=device.pk, event=DeviceEvent.RETIRE)
    heartbeats_store(beats=beats(device, clock, *CLONES["a copied disk"]))
    device.refresh_from_db()
    assert device.state == DeviceState.RETIRED
