"""The device API under `/d/v1/`."""

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
