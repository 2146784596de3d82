"""Addresses of the pages alone, so that their tests need no other interface."""

from dashboards.urls import urlpatterns

__all__ = ["urlpatterns"]
