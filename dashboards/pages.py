"""How a page is answered: who may see it, which headers it carries, page or fragment, error pages.

One markup source: a page template includes its fragments. A request by htmx gets the fragment
alone, an ordinary one gets the page; both vary on `HX-Request`. A fragment whose subject has
reached a final state is answered with 286, which tells htmx to stop polling.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from http import HTTPStatus
from typing import Any, Concatenate, Final, ParamSpec, cast

from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django_htmx.middleware import HtmxDetails

from builds.common.auth import Actor, require, user_actor
from builds.common.errors import ApplicationError, ForbiddenError
from builds.common.roles import Permission, Role

P = ParamSpec("P")
STOP_POLLING: Final = 286
THEMES: Final = ("light", "dark")
THEME_COOKIE: Final = "theme"
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "private, no-store",
}
ROLE_TITLES: Final[Mapping[Role, str]] = {role: role.value.replace("_", " ") for role in Role}


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks at the page, for templates."""

    name: str
    role_title: str
    may: frozenset[str]


def is_partial(request: HttpRequest) -> bool:
    """Return whether htmx asks for a fragment (and not, boosted, for a whole page)."""
    htmx = cast("HtmxDetails", request.htmx)  # type: ignore[attr-defined]
    return bool(htmx) and not htmx.boosted


def page(
    view: Callable[Concatenate[HttpRequest, Actor, P], HttpResponseBase],
    *,
    needs: Permission = Permission.VIEW,
) -> Callable[Concatenate[HttpRequest, P], HttpResponseBase]:
    """Wrap a view: sign-in, permission, error pages, security headers."""

    @wraps(view)
    def answer(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if not request.user.is_authenticated:
            return _sign_in(request)
        actor = user_actor(request.user)
        try:
            require(actor, needs)
            response = view(request, actor, *args, **kwargs)
        except ApplicationError as error:
            response = error_page(request, error, actor=actor)
        return with_headers(response)

    return answer


def with_headers(response: HttpResponseBase) -> HttpResponseBase:
    """Add the headers that every page carries."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def show(
    request: HttpRequest,
    actor: Actor,
    template: str,
    context: Mapping[str, Any],
    *,
    fragment: str = "",
    final: bool = False,
    status: int = HTTPStatus.OK,
) -> HttpResponse:
    """Render a page, or its `fragment` when htmx asks.

    Args:
        request: The request.
        actor: Who looks.
        template: Page below `dashboards/`, without suffix.
        context: What the template shows.
        fragment: Fragment below `dashboards/`, without suffix; empty when the page has none.
        final: The subject will not change any more: answer a fragment with 286.
        status: HTTP status of anything that is no final fragment.
    """
    partial = bool(fragment) and is_partial(request)
    name = fragment if partial else template
    if partial and final:
        status = STOP_POLLING
    values = {**context, "viewer": viewer_of(actor), "is_final": final, "theme": theme_of(request)}
    response = render(request, f"dashboards/{name}.html", values, status=status)
    if fragment:
        patch_vary_headers(response, ("HX-Request",))
    return response


def viewer_of(actor: Actor) -> Viewer:
    """Return what templates may know about the actor."""
    may = frozenset(item.value for item in Permission if actor.may(item))
    title = ROLE_TITLES[actor.role] if actor.role else "no role"
    return Viewer(name=actor.name, role_title=title, may=may)


def theme_of(request: HttpRequest) -> str:
    """Return the theme that the reader chose: `light`, `dark`, or empty for that of the system."""
    chosen = request.COOKIES.get(THEME_COOKIE, "")
    return chosen if chosen in THEMES else ""


def error_page(request: HttpRequest, error: ApplicationError, *, actor: Actor) -> HttpResponse:
    """Show an error that a service raised on purpose, with code and hint."""
    title = "You may not do this" if isinstance(error, ForbiddenError) else error.status.phrase
    context = {"title": title, "message": str(error), "error": error, "status": error.status.value}
    return show(request, actor, "error", context, status=error.status)


def sentence(error: ApplicationError) -> str:
    """Return message and hint of an error as sentences, for a notice above a page."""
    parts = [part.strip().rstrip(".") for part in (str(error), error.hint) if part.strip()]
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def _sign_in(request: HttpRequest) -> HttpResponse:
    # htmx would swap the sign-in page into a fragment: tell the browser to go there instead.
    if is_partial(request):
        return HttpResponse(status=HTTPStatus.UNAUTHORIZED, headers={"HX-Redirect": "/login"})
    return redirect_to_login(request.get_full_path())
