"""Addresses of the fleet tests: the device API, and the management API with the fleet's routers."""

from django.urls import include, path

from builds.apis import api as management_api
from fleet.apis import routers

if not getattr(management_api, "has_fleet", False):
    registered = {prefix_router[1] for prefix_router in management_api._routers}
    for prefix, router, tag in routers:
        if router not in registered:
            management_api.add_router(prefix, router, tags=[tag])
    management_api.has_fleet = True

urlpatterns = [
    path("api/v1/", management_api.urls),
    path("d/v1/", include("fleet.urls")),
]
