"""Entry points over HTTP: the device API (plain views) and routers of the management API."""

from typing import Final

from ninja import Router

from fleet.apis.claims import router as claims_router
from fleet.apis.devices import router as devices_router
from fleet.apis.groups import router as groups_router
from fleet.apis.identity import router as identity_router
from fleet.apis.rollouts import router as rollouts_router
from fleet.apis.rules import router as rules_router

# (prefix, router, tag): added to the management API by the topmost layer
routers: Final[tuple[tuple[str, Router, str], ...]] = (
    ("", devices_router, "devices"),
    ("", groups_router, "groups"),
    ("", rollouts_router, "rollouts"),
    ("", claims_router, "claim tokens"),
    ("", identity_router, "identities"),
    ("", rules_router, "degrade rules"),
)

__all__ = ["routers"]
