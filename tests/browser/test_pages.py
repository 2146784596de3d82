"""The pages in a real browser: no error, nothing from elsewhere, nothing cut off, all named."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from builds.common.roles import Role
from tests.browser.chromium import Chromium
from tests.unit.dashboards.test_pages import addresses
from tests.unit.dashboards.world import World

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_it_shows_every_page(
    world: World,
    browser: Chromium,
    signed_in: Callable[[Role], str],
    gallery: Path,
    width: int,
    theme: str,
) -> None:
    site = signed_in(Role.RELEASE_MANAGER)
    browser.cookie(site, "theme", theme)
    browser.size(width)
    pages = {**addresses(world), "new rollout": "/rollouts/new", "audit": "/audit"}
    for name, address in pages.items():
        browser.open(site + address)
        assert browser.run("document.querySelectorAll('h1').length") == 1, name
        assert browser.run("document.documentElement.scrollWidth") <= width, name
        assert browser.run("getComputedStyle(document.documentElement).colorScheme") == theme, name
        assert browser.run("typeof htmx") == "object", name
        assert browser.unnamed() == [], name
        picture = browser.screenshot(gallery / f"{name.replace(' ', '-')}-{width}-{theme}.png")
        shown_width, shown_height = struct.unpack(">II", picture[16:24])
        assert shown_width == width, name
        assert shown_height >= 300, name
        assert len(picture) > 8_000, name
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(site)] == []


def test_it_follows_the_theme_of_the_system_and_then_the_choice(
    browser: Chromium, signed_in: Callable[[Role], str]
) -> None:
    site = signed_in(Role.VIEWER)
    scheme = "getComputedStyle(document.documentElement).colorScheme"
    for system in ("dark", "light"):
        features = [{"name": "prefers-color-scheme", "value": system}]
        browser.call("Emulation.setEmulatedMedia", features=features)
        browser.open(site)
        assert browser.run(scheme) == system
    browser.click("button[name=theme][value=dark]")
    browser.wait_for(lambda: browser.run(scheme) == "dark")
    browser.call("Emulation.setEmulatedMedia", features=[])


def test_it_shows_where_the_keyboard_is(
    browser: Chromium, signed_in: Callable[[Role], str]
) -> None:
    site = signed_in(Role.VIEWER)
    browser.open(site + "/devices")
    seen = []
    for _ in range(4):
        for kind in ("keyDown", "keyUp"):
            browser.call(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
        seen.append(browser.run("document.activeElement.textContent.trim()"))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert seen[0] == "Skip to content"
    assert "Overview" in seen
