"""Models with their versions, and one version with its build matrix."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from builds.common.auth import Actor
from builds.common.roles import Permission
from builds.models import ModelVersion
from builds.selectors.pages import MatrixCell, MatrixRow, deltas_of, gain_of, model_matrices
from builds.selectors.pages import version_detail as find_version
from builds.services.approvals import version_approve as approve
from builds.services.versions import model_confidential_set
from dashboards.pages import page, show
from dashboards.quality import Claim, claim_of
from dashboards.views.bundles import approved_text
from fleet.selectors.pages import Measured, measured_by_manifest
from fleet.selectors.rollout_lists import (
    SENT_BACK,
    rollout_lines,
    rollouts_of_version,
    versions_sent_back,
)

SHOWN_ROLLOUTS: Final = 10


@dataclass(frozen=True, slots=True)
class VersionLine:
    """One version as the list of models shows it."""

    version: ModelVersion
    claim: Claim
    measured: Measured
    cells: tuple[MatrixCell, ...]
    is_sent_back: bool


def _list(request: HttpRequest, actor: Actor) -> HttpResponse:
    matrices = model_matrices()
    measured = measured_by_manifest(_digests(row for item in matrices for row in item.rows))
    is_final = all(row.is_final for matrix in matrices for row in matrix.rows)
    sent_back = versions_sent_back()
    models = [
        (matrix, [_line(row, measured, sent_back) for row in matrix.rows]) for matrix in matrices
    ]
    context = {"models": models}
    return show(request, actor, "model_list", context, fragment="_model_matrices", final=is_final)


def _confidential(request: HttpRequest, actor: Actor, model: str) -> HttpResponseBase:
    wanted = request.POST.get("confidential") == "yes"
    model_confidential_set(actor=actor, name=model, confidential=wanted)
    way = "travel sealed" if wanted else "travel as they are"
    messages.success(request, f"Bundles of new versions of {model} {way}.")
    return redirect("model-list")


def _detail(request: HttpRequest, actor: Actor, model: str, version: str) -> HttpResponse:
    found, row = find_version(model=model, version=version)
    measured = measured_by_manifest(_digests([row]))
    rollouts = rollout_lines(rollouts_of_version(found.pk, limit=SHOWN_ROLLOUTS))
    newest = rollouts[0].rollout if rollouts else None
    sent_back = newest if newest and newest.state in SENT_BACK else None
    context = {
        "version": found,
        "line": _line(row, measured, frozenset([found.pk] if sent_back else [])),
        "rollouts": rollouts,
        "sent_back": sent_back,
        "cells": [
            (cell, measured.get(cell.bundle.manifest_sha256) if cell.bundle else None)
            for cell in row.cells
        ],
        "unapproved": sum(
            1
            for cell in row.cells
            if cell.bundle and not cell.bundle.approved_at and not cell.bundle.published_at
        ),
        "deltas": deltas_of(version_id=found.pk),
        "gain": gain_of(version_id=found.pk),
        "total_bytes": sum(int(item.get("size_bytes", 0)) for item in found.files),
    }
    return show(
        request, actor, "version_detail", context, fragment="_version_live", final=row.is_final
    )


def _approve(request: HttpRequest, actor: Actor, model: str, version: str) -> HttpResponseBase:
    found, _ = find_version(model=model, version=version)
    rows = approve(actor=actor, version=found)
    messages.success(request, approved_text(rows))
    return redirect("version-detail", model=model, version=version)


def _digests(rows: Iterable[MatrixRow]) -> list[str]:
    return [cell.bundle.manifest_sha256 for row in rows for cell in row.cells if cell.bundle]


def _line(
    row: MatrixRow, measured: Mapping[str, Measured], sent_back: frozenset[int]
) -> VersionLine:
    parts = [measured[digest] for digest in _digests([row]) if digest in measured]
    return VersionLine(
        version=row.version,
        claim=claim_of(row.version.claim),
        measured=sum(parts, start=Measured()),
        cells=row.cells,
        is_sent_back=row.version.pk in sent_back,
    )


model_list = require_safe(page(_list))
confidential = require_POST(page(_confidential, needs=Permission.MODEL_EDIT))
version_detail = require_safe(page(_detail))
version_approve = require_POST(page(_approve, needs=Permission.RELEASE_APPROVE))
