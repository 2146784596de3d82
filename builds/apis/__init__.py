"""The management API under `/api/v1/`, for CI and for people's programs."""

from ninja import NinjaAPI

from builds.common.auth import BrowserAuth, TokenAuth

api = NinjaAPI(
    title="Sparsefleet management API",
    version="1",
    urls_namespace="management",
    auth=[TokenAuth(), BrowserAuth()],
)
