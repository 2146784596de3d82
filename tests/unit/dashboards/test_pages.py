"""Every page is there for those who may see it, whole, and marked up so that all can use it."""

import re
from html.parser import HTMLParser

import pytest
from django.test import Client

from fleet.models import DeviceStats
from tests.unit.dashboards.world import World, make_rollout

pytestmark = pytest.mark.django_db

VOID = {"meta", "link", "input", "br", "path", "rect", "line", "circle", "polyline", "hr", "img"}


def addresses(world: World) -> dict[str, str]:
    assert world.good is not None
    assert world.bad is not None
    assert world.failed_job is not None
    bundle = world.bundles["1.1.0", "x86-64-v3"]
    return {
        "overview": "/",
        "models": "/models",
        "version": "/models/edgecard/versions/1.1.0",
        "invalid version": "/models/edgecard/versions/1.3.0-rc1",
        "builds": "/builds",
        "build": f"/builds/{bundle.job_id}",
        "failed build": f"/builds/{world.failed_job.pk}",
        "bundle": f"/bundles/{bundle.manifest_sha256}",
        "targets": "/targets",
        "devices": "/devices",
        "device": f"/devices/{world.devices[0].pk}",
        "identities": "/devices/identity",
        "rollouts": "/rollouts",
        "good rollout": f"/rollouts/{world.good.pk}",
        "bad rollout": f"/rollouts/{world.bad.pk}",
    }


class Outline(HTMLParser):
    """Checks nesting, and collects ids, labels and headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.labelled: list[str] = []
        self.controls: list[dict[str, str | None]] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if found.get("id"):
            self.ids.append(found["id"] or "")
        if tag == "label" and found.get("for"):
            self.labelled.append(found["for"] or "")
        if tag in ("input", "select", "textarea") and found.get("type") != "hidden":
            self.controls.append(found)
        self.inline += [name for name in found if name == "style" or name.startswith("on")]
        if tag == "script" and not found.get("src"):
            self.inline.append("script")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()


def outline(text: str) -> Outline:
    parser = Outline()
    parser.feed(text)
    assert parser.open == []
    return parser


def test_it_shows_every_page_to_a_viewer(world: World, viewer: Client) -> None:
    for name, address in addresses(world).items():
        response = viewer.get(address)
        assert response.status_code == 200, name
        text = response.content.decode()
        page = outline(text)
        assert page.tags.count("h1") == 1, name
        assert page.tags.count("main") == 1, name
        assert "nav" in page.tags, name
        assert len(page.ids) == len(set(page.ids)), name
        assert page.inline == [], name
        unnamed = [
            control
            for control in page.controls
            if control.get("id") not in page.labelled and not control.get("aria-label")
        ]
        assert unnamed == [], name
        assert "{{" not in text, name
        assert "{%" not in text, name


def test_it_sends_strict_headers(world: World, viewer: Client) -> None:
    for address in addresses(world).values():
        headers = viewer.get(address).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["Cache-Control"] == "private, no-store"
        assert headers["X-Frame-Options"] == "DENY"


def test_it_sends_a_stranger_to_the_sign_in(world: World, stranger: Client) -> None:
    for address in addresses(world).values():
        response = stranger.get(address)
        assert response.status_code == 302
        assert response.headers["Location"].startswith("/login?next=")


def test_it_tells_a_polling_page_whose_session_ended_to_sign_in(
    world: World, stranger: Client
) -> None:
    response = stranger.get("/rollouts", headers={"HX-Request": "true"})
    assert response.status_code == 401
    assert response.headers["HX-Redirect"] == "/login"


def test_it_names_only_loopback_and_own_addresses(world: World, viewer: Client) -> None:
    for address in addresses(world).values():
        text = viewer.get(address).content.decode()
        assert not re.search(r'(?:src|href)="(?:https?:)?//', text)


def test_it_shows_the_error_of_a_refused_submission_with_its_hint(
    world: World, viewer: Client
) -> None:
    for address in ("/models/edgecard/versions/1.3.0-rc1", addresses(world)["failed build"]):
        text = viewer.get(address).content.decode()
        assert "compile.user.unsupported_op" in text
        assert "NonMaxSuppression" in text
        assert "replace it by TopK" in text


def test_it_shows_claimed_beside_measured_accuracy(world: World, viewer: Client) -> None:
    text = viewer.get("/models/edgecard/versions/1.0.0").content.decode()
    assert "86.9 %" in text
    assert "86.5 %" in text


def test_it_warns_of_a_version_that_was_taken_back(world: World, viewer: Client) -> None:
    assert world.bad is not None
    bad, good = world.bad.version.version, "1.1.0"
    text = viewer.get(f"/models/edgecard/versions/{bad}").content.decode()
    assert "The newest rollout of this version</a> took it back" in text
    assert f'href="/rollouts/{world.bad.pk}"' in text
    assert "took it back" not in viewer.get(f"/models/edgecard/versions/{good}").content.decode()
    rows = viewer.get("/models").content.decode().split("<tr>")
    marked = {
        version: "Rolled back" in row
        for row in rows
        for version in (bad, good)
        if f"/versions/{version}" in row
    }
    assert marked == {bad: True, good: False}


def test_it_warns_no_more_after_a_later_rollout(world: World, viewer: Client) -> None:
    assert world.bad is not None
    version = world.bad.version.version
    make_rollout(world, version, "1.0.0", state="succeeded", start=world.now)
    text = viewer.get(f"/models/edgecard/versions/{version}").content.decode()
    assert "took it back" not in text
    assert f'href="/rollouts/{world.bad.pk}"' in text
    assert "Rolled back" not in viewer.get("/models").content.decode()


def test_it_offers_the_next_rollout_of_a_version_taken_back_less_loudly(
    world: World, release_manager: Client
) -> None:
    assert world.bad is not None
    text = release_manager.get(
        f"/models/edgecard/versions/{world.bad.version.version}"
    ).content.decode()
    assert "Start another rollout" in text
    assert "Start a rollout" not in text


def test_it_shows_full_delta_and_bsdiff_bytes(world: World, viewer: Client) -> None:
    bundle = world.bundles["1.1.0", "x86-64-v3"]
    text = viewer.get(f"/bundles/{bundle.manifest_sha256}").content.decode()
    for size in (bundle.total_bytes, bundle.total_bytes // 5, bundle.total_bytes // 2):
        assert f"{size / 1000:.1f} kB" in text


def test_it_serves_the_manifest_byte_for_byte(world: World, viewer: Client) -> None:
    bundle = world.bundles["1.1.0", "x86-64-v3"]
    response = viewer.get(f"/bundles/{bundle.manifest_sha256}/manifest")
    assert response.content == bundle.manifest_bytes
    assert "edgecard-1.1.0-x86-64-v3.json" in response.headers["Content-Disposition"]


def test_it_shows_evidence_stages_and_decisions_of_a_bad_version(
    world: World, viewer: Client
) -> None:
    assert world.bad is not None
    text = viewer.get(f"/rollouts/{world.bad.pk}").content.decode()
    assert "Harm shown" in text
    assert "roll back at 100 : 1" in text
    assert "hold at 20 : 1" in text
    assert "fail: roll back" in text
    assert "agent.probation_failures" in text
    assert "p-value" not in text
    assert "confidence" not in text


def test_it_finds_builds_and_devices_by_filter(world: World, viewer: Client) -> None:
    assert world.failed_job is not None
    text = viewer.get("/builds?state=failed_user").content.decode()
    assert f"/builds/{world.failed_job.pk}" in text
    assert text.count('<th scope="row">') == 1
    text = viewer.get("/devices?target=x86-64-v3&text=edge-01").content.decode()
    assert "edge-01" in text
    assert "edge-02" not in text
    assert "No device" in viewer.get("/devices?text=nobody").content.decode()


def test_it_shows_who_is_below_normal_and_why(world: World, viewer: Client) -> None:
    def text_of(path: str) -> str:
        return viewer.get(path).content.decode()

    assert "below normal</a>" not in text_of("/devices")
    device = next(one for one in world.devices if one.running_manifest_sha256)
    stats, _ = DeviceStats.objects.get_or_create(
        device=device, manifest_sha256=device.running_manifest_sha256
    )
    stats.rung, stats.degraded, stats.degraded_by = 3, 5, {"temperature": 4, "oom": 1}
    stats.gauges = {"rung": 3, "rules_revision": 7, "energy_uj_per_answer": 2500}
    stats.gauges |= {"energy_is_model": 1}
    stats.save()
    assert "1 below normal</a>" in text_of("/devices")
    listed = text_of("/devices?signal=degraded")
    assert listed.count('<th scope="row">') == 1
    assert device.serial in listed
    shown = text_of(f"/devices/{device.pk}")
    for expected in ("fewer experts", "rules 7", "5 degraded: temperature 4, oom 1", "2.50 mJ"):
        assert expected in shown
    assert "model, unverified" in shown


@pytest.mark.parametrize("below", ["0", "-1", "x", "1" * 40, "²"])
def test_it_takes_a_bad_page_key_as_the_first_page(
    world: World, viewer: Client, below: str
) -> None:
    assert "edge-12" in viewer.get("/devices", {"below": below}).content.decode()


def test_it_pages_by_key(world: World, viewer: Client) -> None:
    middle = world.devices[5].pk
    text = viewer.get("/devices", {"below": middle}).content.decode()
    assert "edge-05" in text
    assert "edge-06" not in text
    assert "Newest" in text


def test_it_escapes_what_devices_and_ci_send(world: World, viewer: Client) -> None:
    device = world.devices[0]
    device.name = '<script>alert("x")</script>'
    device.save()
    world.versions[1].notes = "<img src=x onerror=alert(1)>"
    world.versions[1].save()
    for address in (f"/devices/{device.pk}", "/devices", "/models/edgecard/versions/1.1.0"):
        text = viewer.get(address).content.decode()
        assert "<script>alert" not in text
        assert "<img src=x" not in text
