"""Signing in and out, and the theme."""

from typing import Any

import pytest
from django.template.loader import render_to_string
from django.test import Client

from builds.common.roles import Role
from tests.factories.builds import make_user

pytestmark = pytest.mark.django_db


def test_it_signs_in_and_goes_where_one_wanted_to_go(stranger: Client) -> None:
    user = make_user(Role.VIEWER)
    page = stranger.get("/login?next=/devices")
    assert 'name="next" value="/devices"' in page.content.decode()
    response = stranger.post(
        "/login", {"username": user.username, "password": "secret", "next": "/devices"}
    )
    assert response.headers["Location"] == "/devices"
    assert stranger.get("/devices").status_code == 200


def test_it_does_not_lead_to_another_site(stranger: Client) -> None:
    user = make_user(Role.VIEWER)
    response = stranger.post(
        "/login", {"username": user.username, "password": "secret", "next": "//evil.example/"}
    )
    assert response.headers["Location"] == "/"


def test_it_refuses_a_wrong_password_without_saying_which_was_wrong(stranger: Client) -> None:
    user = make_user(Role.VIEWER)
    texts = []
    for name in (user.username, "nobody"):
        response = stranger.post("/login", {"username": name, "password": "wrong"})
        assert response.status_code == 422
        texts.append(response.content.decode().split('role="alert">')[1].split("<")[0])
    assert texts[0] == texts[1]
    assert stranger.get("/").status_code == 302


def test_it_signs_out_by_post_only(viewer: Client) -> None:
    assert viewer.get("/logout").status_code == 405
    assert viewer.get("/").status_code == 200
    assert viewer.post("/logout").headers["Location"] == "/login"
    assert viewer.get("/").status_code == 302


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_remembers_the_theme(viewer: Client, theme: str) -> None:
    response = viewer.post("/theme", {"theme": theme, "next": "/builds"})
    assert response.headers["Location"] == "/builds"
    assert f'data-theme="{theme}"' in viewer.get("/").content.decode()
    viewer.post("/theme", {"theme": "", "next": "/"})
    assert "data-theme" not in viewer.get("/").content.decode()


def test_it_takes_no_other_theme_and_no_other_site(viewer: Client) -> None:
    viewer.cookies["theme"] = '"><script>'
    assert "data-theme" not in viewer.get("/").content.decode()
    for path in ("https://evil.example/", "//evil.example", "javascript:alert(1)"):
        assert viewer.post("/theme", {"theme": "x", "next": path}).headers["Location"] == "/"


def test_it_is_at_the_root_of_the_real_site(viewer: Client, settings: Any) -> None:
    settings.ROOT_URLCONF = "dashboards.conf.urls"
    assert viewer.get("/").status_code == 200
    assert viewer.get("/login").status_code == 302
    response = viewer.get("/no/such/page")
    assert response.status_code == 404
    assert "No such page" in response.content.decode()


def test_it_shows_our_own_page_when_something_breaks() -> None:
    page = render_to_string("500.html")
    assert "Something broke on our side" in page
    assert "Traceback" not in page
