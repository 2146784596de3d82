"""Update metadata under `/tuf/`."""

from django.urls import path

from builds.apis import tuf

urlpatterns = [
    path("image/metadata/<str:name>", tuf.image_metadata, name="tuf-image-metadata"),
    path("image/targets/<path:path>", tuf.image_target, name="tuf-image-target"),
    path("director/root.json", tuf.director_root, name="tuf-director-root"),
    path(
        "director/<int:version>.root.json",
        tuf.director_root_version,
        name="tuf-director-root-version",
    ),
]
