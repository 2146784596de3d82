"""Update metadata under `/tuf/`."""

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
