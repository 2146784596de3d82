"""Deltas between real bundles, made by the real codec in its own process."""

import hashlib
import io
import random
import sys
from typing import Any

import pytest

from builds.common.errors import InvalidInputError
from builds.compile_runner.deltas import delta_run_one
from builds.errors import BuildOutputError, CompileFailure, LeaseLostError
from builds.models import Bundle, Delta
from builds.services.deltas import (
    delta_fail,
    delta_heartbeat,
    delta_lease_next,
    delta_leases_expire,
    delta_request,
    deltas_ring,
)
from builds.services.signing import assignment_sign, keys_generate, repositories_init
from builds.services.upkeep import everything_due
from builds.storage import blob_store
from compiler.contract.protocol import OfferKind
from compiler.delta import MemorySections, apply_delta
from tests.conftest import FakeClock
from tests.factories.builds import make_bundle, make_model, make_target, make_version

pytestmark = pytest.mark.django_db
APP = CompileFailure("codec crashed", failure_code="build.app.crash", can_retry=True)


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def pair(old: dict[str, bytes], new: dict[str, bytes]) -> tuple[Bundle, Bundle]:
    model, target = make_model(), make_target()
    base = make_bundle(make_version(model), target, old)
    return base, make_bundle(make_version(model), target, new)


@pytest.fixture
def close_pair() -> tuple[Bundle, Bundle]:
    weights = noise(1, 40_000)
    changed = weights[:20_000] + b"!" + weights[20_001:]
    return pair(
        {"plan": b"same plan", "weights.shared": weights},
        {"plan": b"same plan", "weights.shared": changed},
    )


def section(bundle: Bundle, component: str) -> bytes:
    row = bundle.sections.get(component=component)
    with blob_store().open(row.sha256) as file:
        return file.read()


def test_it_makes_a_delta_that_leads_to_the_new_bytes(close_pair: tuple[Bundle, Bundle]) -> None:
    base, new = close_pair
    delta = delta_request(base, new)
    assert delta_request(base, new) == delta
    assert delta_run_one(delta.pk) is not None
    delta.refresh_from_db()
    assert (delta.state, delta.lease_owner, delta.attempt) == ("ready", "", 1)
    assert 0 < delta.size_bytes < 2_000
    assert delta.report["full_bytes"] == 40_000
    assert delta.bsdiff4_bytes is not None
    with blob_store().open(delta.sha256) as file:
        data = file.read()
    assert hashlib.sha256(data).hexdigest() == delta.sha256
    old = MemorySections({"weights.shared": section(base, "weights.shared")})
    made = MemorySections()
    apply_delta(old, io.BytesIO(data), made)
    assert made.section("weights.shared") == section(new, "weights.shared")
    assert delta_run_one(delta.pk) is None


def test_it_keeps_no_delta_that_saves_too_little() -> None:
    base, new = pair({"weights.shared": noise(1, 20_000)}, {"weights.shared": noise(2, 20_000)})
    delta = delta_request(base, new)
    delta_run_one(delta.pk)
    delta.refresh_from_db()
    assert (delta.state, delta.sha256) == ("too_large", "")
    assert delta.size_bytes > 0.4 * 20_000
    assert delta_request(base, new).state == "too_large"


def test_it_names_a_ready_delta_in_an_assignment_and_no_other(
    close_pair: tuple[Bundle, Bundle],
) -> None:
    keys_generate()
    repositories_init()
    base, new = close_pair
    delta = delta_request(base, new)

    def assigned(bundle: Bundle) -> bytes:
        return assignment_sign(
            device_id="ab" * 16,
            key_thumbprint="cd" * 32,
            assignment_seq=1,
            nonce="00" * 16,
            kind=OfferKind.INSTALL,
            bundle=bundle,
            delta=delta,
            security_floor=0,
        )

    assert b'"delta":null' in assigned(new)
    delta_run_one(delta.pk)
    delta.refresh_from_db()
    assert delta.sha256.encode() in assigned(new)
    with pytest.raises(BuildOutputError, match="does not lead"):
        assigned(base)


def test_it_refuses_pairs_that_are_no_update(close_pair: tuple[Bundle, Bundle]) -> None:
    base, _ = close_pair
    stranger = make_bundle()
    elsewhere = make_bundle(make_version(base.version.model), make_target("x86-64-v1"))
    for old, young in ((base, base), (base, stranger), (base, elsewhere)):
        with pytest.raises(InvalidInputError):
            delta_request(old, young)
    assert Delta.objects.count() == 0


def test_it_reports_a_section_that_is_gone(close_pair: tuple[Bundle, Bundle]) -> None:
    base, new = close_pair
    blob_store().path(base.sections.get(component="plan").sha256).unlink()
    delta = delta_request(base, new)
    delta_run_one(delta.pk)
    delta.refresh_from_db()
    assert (delta.state, delta.error_code) == ("failed", "build.app.not_found")
    assert delta_request(base, new).state == "queued"


def test_it_reports_a_section_with_a_flipped_bit(close_pair: tuple[Bundle, Bundle]) -> None:
    base, new = close_pair
    blob_store().path(base.sections.get(component="plan").sha256).write_bytes(b"sAme plan")
    delta = delta_request(base, new)
    delta_run_one(delta.pk)
    delta.refresh_from_db()
    assert (delta.state, delta.error_code) == ("failed", "build.app.contract")


def test_it_tries_a_crashed_codec_again(
    close_pair: tuple[Bundle, Bundle], settings: Any, clock: FakeClock
) -> None:
    delta = delta_request(*close_pair)
    environment = settings.SPARSEFLEET
    environment.compile_command = f"{sys.executable} -c pass"
    try:
        delta_run_one(delta.pk)
    finally:
        environment.compile_command = ""
    delta.refresh_from_db()
    assert (delta.state, delta.error_code) == ("queued", "build.app.output")
    assert delta.not_before is not None
    clock.at = delta.not_before
    clock.advance(-1)
    assert delta_lease_next(owner="w", clock=clock) is None
    clock.advance(1)
    assert delta_lease_next(owner="w", clock=clock) == delta


def test_it_frees_and_gives_up_the_lease_of_a_silent_worker(
    close_pair: tuple[Bundle, Bundle], clock: FakeClock
) -> None:
    delta = delta_request(*close_pair)
    for attempt in (1, 2, 3):
        leased = delta_lease_next(owner=f"w{attempt}", clock=clock)
        assert leased is not None
        clock.advance(100)
        delta_heartbeat(delta=leased, owner=f"w{attempt}", clock=clock)
        clock.advance(100)
        assert delta_leases_expire(clock=clock) == 0
        clock.advance(21)
        assert delta_leases_expire(clock=clock) == 1
        with pytest.raises(LeaseLostError):
            delta_heartbeat(delta=leased, owner=f"w{attempt}", clock=clock)
        with pytest.raises(LeaseLostError):
            delta_fail(delta=leased, owner=f"w{attempt}", failure=APP, clock=clock)
    delta.refresh_from_db()
    assert (delta.state, delta.error_code) == ("failed", "build.app.worker_lost")


def test_it_is_made_by_the_tick_when_messages_are_lost(
    close_pair: tuple[Bundle, Bundle], clock: FakeClock
) -> None:
    delta = delta_request(*close_pair)
    assert deltas_ring(clock=clock) == []
    clock.advance(16)
    assert everything_due(clock=clock).delta_id == delta.pk
