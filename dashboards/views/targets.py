"""The targets that we compile for."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from builds.common.auth import Actor
from builds.common.roles import Permission
from builds.selectors.pages import target_list as find_targets
from builds.services.targets import target_activate as activate
from compiler.contract.fingerprint import TARGET_LADDER
from compiler.hardware.library import accelerators, load_socs, variants
from compiler.hardware.measured import measured_label
from dashboards.pages import page, show
from fleet.selectors.pages import device_counts_by_target

NEEDED_FEATURES = {name: sorted(features) for name, _machine, features in TARGET_LADDER}


def _list(request: HttpRequest, actor: Actor) -> HttpResponse:
    counts = device_counts_by_target()
    rows = [
        (
            target,
            counts.get(target.pk, 0),
            NEEDED_FEATURES.get(target.name, []),
            measured_label(target.name),
        )
        for target in find_targets()
    ]
    socs = [(soc, variants(soc), accelerators(soc)) for soc in load_socs()]
    return show(request, actor, "target_list", {"rows": rows, "socs": socs})


def _activate(request: HttpRequest, actor: Actor, name: str) -> HttpResponseBase:
    activate(name=name, actor=actor)
    messages.success(request, f"Target {name} is active: current versions are built for it.")
    return redirect("target-list")


target_list = require_safe(page(_list))
target_activate = require_POST(page(_activate, needs=Permission.TARGET_ACTIVATE))
