"""The management API under `/api/v1/`, for CI and for people's programs."""

from builds.apis.api import api
from builds.apis.blobs import router as blobs_router
from builds.apis.builds import router as builds_router
from builds.apis.versions import router as versions_router

api.add_router("", blobs_router, tags=["blobs"])
api.add_router("", versions_router, tags=["models"])
api.add_router("", builds_router, tags=["builds"])

__all__ = ["api"]
