"""Every address of the platform: device API, update metadata, management API, pages."""

from builds.apis import api as management_api
from django.urls import include, path

from dashboards.views.health import healthz, readyz

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("api/v1/", management_api.urls),
    path("d/v1/", include("fleet.urls")),
    path("tuf/", include("builds.urls")),
    path("", include("dashboards.urls")),
]
