"""Every address of the platform: device API, update metadata, management API, pages."""

from django.urls import include, path

from builds.apis import api as management_api
from dashboards.views.health import healthz, readyz
from fleet.apis import routers as fleet_routers

for _prefix, _router, _tag in fleet_routers:
    management_api.add_router(_prefix, _router, tags=[_tag])

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("api/v1/", management_api.urls),
    path("d/v1/", include("fleet.urls")),
    path("tuf/", include("builds.urls")),
    path("", include("dashboards.urls")),
]
