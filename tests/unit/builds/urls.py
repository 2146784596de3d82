"""Addresses of the builds app alone, so that its tests need no other app's pages."""

from django.urls import include, path

from builds.apis import api

urlpatterns = [path("api/v1/", api.urls), path("tuf/", include("builds.urls"))]
