"""The bounded queue of deltas: who waits outside, who is let in, and who comes first."""

from collections.abc import Iterator
from typing import Any

import pytest

from builds.apis.schemas import DeltaOut
from builds.models import Bundle, Delta, DeltaTransition
from builds.services.delta_queue import QUEUE_FULL, deltas_admit, deltas_rank
from builds.services.deltas import delta_lease_next, delta_request, deltas_ring_next
from builds.services.upkeep import everything_due
from builds.states import DeltaState
from tests.conftest import FakeClock
from tests.factories.builds import make_bundle, make_model, make_target, make_version

pytestmark = pytest.mark.django_db


@pytest.fixture
def limit(settings: Any) -> Iterator[int]:
    environment = settings.SPARSEFLEET
    before = environment.delta_queue_limit
    environment.delta_queue_limit = 2
    yield 2
    environment.delta_queue_limit = before


@pytest.fixture
def bundles() -> list[Bundle]:
    model, target = make_model(), make_target()
    return [make_bundle(make_version(model), target) for _ in range(6)]


def states(*deltas: Delta) -> list[str]:
    for delta in deltas:
        delta.refresh_from_db()
    return [delta.state for delta in deltas]


def test_it_defers_what_does_not_fit_and_says_why(limit: int, bundles: list[Bundle]) -> None:
    *base, new = bundles
    deltas = [delta_request(bundle, new) for bundle in base[:3]]
    assert states(*deltas) == ["queued", "queued", "deferred"]
    assert deltas[2].error_code == QUEUE_FULL
    assert "2 deltas wait or are built" in deltas[2].error_message
    assert "SPARSEFLEET_DELTA_QUEUE_LIMIT" in deltas[2].error_hint
    shown = DeltaOut.from_orm(deltas[2])
    assert (shown.state, shown.is_urgent) == (DeltaState.DEFERRED, False)
    assert shown.error is not None
    assert shown.error.code == QUEUE_FULL
    assert delta_request(base[2], new).state == "deferred"  # asked again: still full
    assert DeltaTransition.objects.filter(subject=deltas[2]).count() == 1


def test_it_admits_when_there_is_room(limit: int, bundles: list[Bundle], clock: FakeClock) -> None:
    *base, new = bundles
    deltas = [delta_request(bundle, new) for bundle in base[:4]]
    assert deltas_admit() == 0
    leased = delta_lease_next(owner="w", clock=clock)
    assert leased == deltas[0]
    assert deltas_admit() == 0  # what is built counts too
    Delta.objects.filter(pk=leased.pk).update(state=DeltaState.READY.value)
    deltas_ring_next(clock=clock)
    assert states(*deltas) == ["ready", "queued", "queued", "deferred"]
    assert (deltas[2].error_code, deltas[2].error_hint) == ("", "")
    Delta.objects.filter(pk=deltas[1].pk).update(state=DeltaState.TOO_LARGE.value)
    everything_due(clock=clock)
    assert states(*deltas) == ["ready", "too_large", "queued", "queued"]


def test_it_lets_an_urgent_delta_take_the_place_of_the_youngest_other(
    limit: int, bundles: list[Bundle], clock: FakeClock
) -> None:
    *base, new = bundles
    ahead = [delta_request(bundle, new) for bundle in base[:2]]
    urgent = delta_request(base[2], new, is_urgent=True)
    assert states(*ahead, urgent) == ["queued", "deferred", "queued"]
    assert delta_lease_next(owner="w", clock=clock) == urgent
    another = delta_request(base[3], new, is_urgent=True)
    assert states(*ahead, another) == ["deferred", "deferred", "queued"]
    third = delta_request(base[4], new, is_urgent=True)
    assert states(third) == ["deferred"]  # all that is in the queue is as urgent
    Delta.objects.filter(pk__in=[urgent.pk, another.pk]).update(state=DeltaState.READY.value)
    Delta.objects.filter(pk=ahead[0].pk).update(state=DeltaState.DEFERRED.value)
    deltas_admit()
    assert states(third, *ahead) == ["queued", "queued", "deferred"]


def test_it_lets_in_a_deferred_delta_that_becomes_urgent(limit: int, bundles: list[Bundle]) -> None:
    *base, new = bundles
    deltas = [delta_request(bundle, new) for bundle in base[:3]]
    assert delta_request(base[2], new, is_urgent=True).state == "queued"
    assert states(*deltas) == ["queued", "deferred", "queued"]


def test_it_builds_first_what_devices_wait_for(bundles: list[Bundle], clock: FakeClock) -> None:
    *base, new = bundles
    deltas = [delta_request(bundle, new, is_urgent=at == 0) for at, bundle in enumerate(base[:3])]
    deltas_rank([deltas[2].pk])
    for delta in deltas:
        delta.refresh_from_db()
    assert [delta.is_urgent for delta in deltas] == [False, False, True]
    order = [delta_lease_next(owner=f"w{at}", clock=clock) for at in range(3)]
    assert order == [deltas[2], deltas[0], deltas[1]]
    deltas_rank([])
    deltas[2].refresh_from_db()
    assert deltas[2].is_urgent  # it is built already
