"""What whoever releases a bundle should know of it: options without effect, doubts, slow paths.

A pure function of a finished report and of what was asked. Called by `compile_model`, which keeps
the sentences as `caveats` of the report; `compile` prints them, `explain` and the build's page show
them. None of them is an error: the bundle is right, and does what it says.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from compiler.contract.plan_format import KvKind
from compiler.driver.gain import LEAST_RATIO
from compiler.driver.options import CompileOptions
from compiler.hardware.measured import UNMEASURED

_NOT_RUN: Final[Mapping[str, str]] = {
    "assembled": "the code was assembled but never run: try it on a device before a rollout",
    "structural": "the code was checked by its structure only: try it on a device first",
    "unverified": "nothing ran or checked the code: try it on a device before a rollout",
}
Report = Mapping[str, Any]


def caveats_of(report: Report, options: CompileOptions) -> list[str]:
    """Return the sentences, most important first; empty if there is nothing to say."""
    found = (rule(report, options) for rule in _RULES)
    return [text for text in found if text]


def _unverified(report: Report, _: CompileOptions) -> str:
    return _NOT_RUN.get(report["verified_on"], "")


def _without_cache(report: Report, options: CompileOptions) -> str:
    if options.kv is KvKind.F32 or report["memory"]["kv_kind"] is not None:
        return ""
    return "keys and values as int8 change nothing: this model has no key/value cache"


def _without_base(report: Report, options: CompileOptions) -> str:
    if not options.base_sections or report["base"]:
        return ""
    return "no weight of the base bundle fits this model: the update will be a whole one"


def _gain_unverified(report: Report, options: CompileOptions) -> str:
    gain = report["gain"]
    if not options.base_sections or gain["f32"] is not None:
        return ""
    return f"unverified whether the update survives quantisation: {gain['says']}"


def _gain_short(report: Report, _: CompileOptions) -> str:
    gain = report["gain"]
    if gain["rule"] != "gain" or gain["kept_ratio"] >= LEAST_RATIO:
        return ""
    return f"the gain may be lost in part, too few questions to tell: {gain['says']}"


def _slow_calls(report: Report, _: CompileOptions) -> str:
    calls = [call for part in report["explained"]["programs"].values() for call in part["calls"]]
    slow = sum(call["is_reference"] for call in calls)
    return f"{slow} of {len(calls)} calls run on plain reference kernels: slow" if slow else ""


def _unmeasured(report: Report, _: CompileOptions) -> str:
    policy = report["policy"]
    if policy["fixed"] or policy["measured_on"] != UNMEASURED:
        return ""
    return "how calls run was never measured on this target: the policy starts from guesses"


_RULES: Final[tuple[Callable[[Report, CompileOptions], str], ...]] = (
    _unverified,
    _without_cache,
    _without_base,
    _gain_unverified,
    _gain_short,
    _slow_calls,
    _unmeasured,
)
