"""Addresses of the pages, at the root of the site."""

from django.urls import path

from dashboards.views import (
    audit,
    builds,
    bundles,
    devices,
    home,
    identity,
    models,
    rollout_form,
    rollouts,
    session,
    targets,
)
from dashboards.views import rollout_actions as actions

urlpatterns = [
    path("", home.overview, name="overview"),
    path("login", session.sign_in, name="login"),
    path("logout", session.sign_out, name="logout"),
    path("theme", session.theme, name="theme"),
    path("models", models.model_list, name="model-list"),
    path("models/<str:model>/confidential", models.confidential, name="model-confidential"),
    path("models/<str:model>/versions/<str:version>", models.version_detail, name="version-detail"),
    path(
        "models/<str:model>/versions/<str:version>/approve",
        models.version_approve,
        name="version-approve",
    ),
    path("builds", builds.build_list, name="build-list"),
    path("builds/<int:build_id>", builds.build_detail, name="build-detail"),
    path("builds/<int:build_id>/report.json", builds.build_report, name="build-report"),
    path("builds/<int:build_id>/retry", builds.build_retry, name="build-retry"),
    path("bundles/<str:manifest_sha256>", bundles.bundle_detail, name="bundle-detail"),
    path("bundles/<str:manifest_sha256>/manifest", bundles.bundle_manifest, name="bundle-manifest"),
    path("bundles/<str:manifest_sha256>/approve", bundles.bundle_approve, name="bundle-approve"),
    path("targets", targets.target_list, name="target-list"),
    path("targets/<str:name>/activate", targets.target_activate, name="target-activate"),
    path("devices", devices.device_list, name="device-list"),
    path("devices/identity", identity.identity, name="identity"),
    path("devices/identity/<int:row_id>/revoke", identity.revoke, name="preauthorisation-revoke"),
    path("devices/identity/<int:row_id>/settle", identity.settle, name="alert-settle"),
    path("devices/<int:device_id>", devices.device_detail, name="device-detail"),
    path("devices/<int:device_id>/<slug:name>", devices.device_action, name="device-action"),
    path("rollouts", rollouts.rollout_list, name="rollout-list"),
    path("rollouts/new", rollout_form.rollout_create, name="rollout-create"),
    path("rollouts/<int:rollout_id>", rollouts.rollout_detail, name="rollout-detail"),
    path("rollouts/<int:rollout_id>/promote", actions.rollout_promote, name="rollout-promote"),
    path("rollouts/<int:rollout_id>/<slug:name>", actions.rollout_action, name="rollout-action"),
    path("audit", audit.audit, name="audit"),
]
