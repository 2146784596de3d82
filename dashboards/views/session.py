"""Signing in and out, and the choice of theme."""

from http import HTTPStatus

from django.contrib.auth.views import LoginView, LogoutView
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from dashboards.pages import THEME_COOKIE, THEMES, theme_of, with_headers

THEME_COOKIE_AGE_S = 365 * 86_400


class SignInView(LoginView):
    template_name = "dashboards/login.html"
    redirect_authenticated_user = True

    def form_invalid(self, form: object) -> HttpResponse:
        context = self.get_context_data(form=form)
        return self.render_to_response(context, status=HTTPStatus.UNPROCESSABLE_ENTITY)

    def get_context_data(self, **kwargs: object) -> dict[str, object]:
        return {**super().get_context_data(**kwargs), "theme": theme_of(self.request)}


def sign_in(request: HttpRequest) -> HttpResponseBase:
    return with_headers(SignInView.as_view()(request))


def sign_out(request: HttpRequest) -> HttpResponseBase:
    return with_headers(LogoutView.as_view(next_page="/login")(request))


@require_POST
def theme(request: HttpRequest) -> HttpResponseBase:
    """Remember the theme; an unknown one means that of the system."""
    response = redirect(_safe_path(request, request.POST.get("next", "/")))
    chosen = request.POST.get("theme", "")
    if chosen in THEMES:
        response.set_cookie(
            THEME_COOKIE, chosen, max_age=THEME_COOKIE_AGE_S, samesite="Lax", httponly=True
        )
    else:
        response.delete_cookie(THEME_COOKIE)
    return with_headers(response)


def _safe_path(request: HttpRequest, path: str) -> str:
    allowed = url_has_allowed_host_and_scheme(path, {request.get_host()}, request.is_secure())
    return path if allowed and path.startswith("/") else "/"
