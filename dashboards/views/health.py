"""Liveness and readiness for supervisors and balancers."""

from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.utils import timezone

from builds.selectors.expiry import expiries, is_near


def healthz(_request: HttpRequest) -> JsonResponse:
    return JsonResponse({"status": "ok"})


def readyz(_request: HttpRequest) -> JsonResponse:
    """Say that the database answers, and which signed metadata is about to end."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    warnings = [str(row) for row in expiries(timezone.now()) if is_near(row)]
    return JsonResponse({"status": "ready", "warnings": warnings})
