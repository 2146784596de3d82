"""What moves: polling, its end, Halt with and without scripts, mistakes on a form."""

import time
from collections.abc import Callable

import pytest

from builds.common.roles import Role
from builds.models import BuildJob, BuildLogLine
from fleet.models import Rollout, Stage
from fleet.states import RolloutState
from tests.browser.chromium import Chromium
from tests.unit.dashboards.world import World, make_rollout

pytestmark = pytest.mark.browser
SignIn = Callable[[Role], str]


@pytest.fixture
def running(world: World) -> Rollout:
    """Return a running rollout."""
    assert world.bad is not None
    Rollout.objects.filter(pk=world.bad.pk).delete()
    rollout = make_rollout(world, "1.2.0", "1.1.0", state="running", start=world.now)
    Stage.objects.filter(rollout=rollout, index=0).update(state="running", opened_at=world.now)
    return rollout


def test_it_follows_a_build_and_stops_asking_when_it_is_done(
    world: World, browser: Chromium, signed_in: SignIn
) -> None:
    site = signed_in(Role.VIEWER)
    job = BuildJob.objects.get(state="compiling")
    address = f"{site}/builds/{job.pk}"
    browser.open(address)
    BuildLogLine.objects.create(job=job, at=world.now, level="info", text="linked 26 kernels")
    browser.wait_for(lambda: "linked 26 kernels" in browser.html())
    BuildJob.objects.filter(pk=job.pk).update(state="ready", stage="")
    browser.wait_for(lambda: "hx-trigger" not in browser.html())
    browser.requests.clear()
    time.sleep(2.5)
    assert browser.requests == []
    assert browser.errors == []


def test_it_keeps_open_what_the_reader_opened(
    running: Rollout, world: World, browser: Chromium, signed_in: SignIn
) -> None:
    from tests.unit.dashboards.world import make_looks

    stage = running.stages.get(index=0)
    make_looks(running, stage, failing=0.0, looks=3, action="", devices=(1, 2))
    browser.open(f"{signed_in(Role.VIEWER)}/rollouts/{running.pk}")
    browser.click("#d-strip > summary")
    assert browser.run("document.getElementById('d-strip').open") is True
    browser.requests.clear()
    browser.wait_for(lambda: len(browser.requests) >= 2)
    time.sleep(0.3)
    assert browser.run("document.getElementById('d-strip').open") is True


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
def test_it_halts_with_one_press(
    running: Rollout, browser: Chromium, signed_in: SignIn, scripts: bool
) -> None:
    site = signed_in(Role.RELEASE_MANAGER)
    browser.call("Emulation.setScriptExecutionDisabled", value=not scripts)
    opens = time.monotonic()
    browser.open(f"{site}/rollouts/{running.pk}")
    pressed = time.monotonic()
    browser.click("#action-halt")
    browser.wait_for(lambda: Rollout.objects.get(pk=running.pk).state == RolloutState.STOPPED)
    took = time.monotonic() - pressed
    browser.wait_for(lambda: "Halted: offers stopped" in browser.html())
    assert took < max(2.0, 2 * (pressed - opens))  # on a busy machine: two pages' time
    browser.wait_for(lambda: 'id="action-halt"' not in browser.html())  # finished: nothing to press
    assert "Finished" in browser.html()


def test_it_does_not_lose_the_press_of_a_button_to_a_poll(
    running: Rollout, browser: Chromium, signed_in: SignIn
) -> None:
    browser.open(f"{signed_in(Role.RELEASE_MANAGER)}/rollouts/{running.pk}")
    box = browser.run(
        "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        "(document.getElementById('action-halt').getBoundingClientRect())"
    )
    place = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
    browser.call("Input.dispatchMouseEvent", type="mousePressed", **place)
    browser.requests.clear()
    browser.wait_for(lambda: len(browser.requests) >= 2)  # polls came and went under the finger
    time.sleep(0.3)
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", **place)
    browser.wait_for(lambda: Rollout.objects.get(pk=running.pk).state == RolloutState.STOPPED)


def test_it_shows_a_mistake_in_place_and_keeps_what_was_typed(
    world: World, browser: Chromium, signed_in: SignIn
) -> None:
    browser.open(f"{signed_in(Role.RELEASE_MANAGER)}/rollouts/new")
    browser.run("document.getElementById('id_name').value = 'to the lab'")
    browser.run("document.getElementById('id_stages').value = 'half of them'")
    browser.click("#_rollout_form button.primary")
    browser.wait_for(lambda: "is no stage" in browser.html())
    assert browser.run("document.getElementById('id_name').value") == "to the lab"
    assert (
        browser.run("document.getElementById('id_stages').getAttribute('aria-invalid')") == "true"
    )
    assert browser.run("location.pathname") == "/rollouts/new"
    # Chromium reports every 4xx answer to a script as an error of the page: exactly this one.
    assert all("422" in error for error in browser.errors)
