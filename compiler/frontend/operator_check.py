"""Operators without any rule: every one of a graph is named at once, before work begins.

`evaluate` asks before it walks a graph, `describe` before it writes a submission, so that a model
with five such operators is refused once and not five times. Branches and bodies of loops are asked
when they are reached: what is never taken is never needed.
"""

from collections.abc import Mapping, Sequence

import onnx

from compiler.errors import UnsupportedOperatorError
from compiler.frontend.control_flow import CONTROL
from compiler.frontend.expansions import EXPANSIONS
from compiler.frontend.node_numbers import name_of
from compiler.frontend.onnx_file import DEFAULT_DOMAINS
from compiler.frontend.onnx_ops import OPERATORS
from compiler.frontend.refused import REFUSED
from compiler.frontend.sequences import SEQUENCES


def kind_of(proto: onnx.NodeProto) -> str:
    """Return an operator's name, with its domain unless it is the default one."""
    return proto.op_type if proto.domain in DEFAULT_DOMAINS else f"{proto.domain}::{proto.op_type}"


def require_operators(nodes: Sequence[onnx.NodeProto]) -> None:
    """Refuse nodes whose operator has no rule of any kind.

    Raises:
        UnsupportedOperatorError: Names each such operator with its first node; the hint says per
            operator why and what to do instead, or lists what is supported.
    """
    found: dict[str, list[str]] = {}
    for proto in nodes:
        kind = kind_of(proto)
        if not any(kind in rules for rules in (OPERATORS, EXPANSIONS, SEQUENCES, CONTROL)):
            found.setdefault(kind, []).append(name_of(proto))
    if found:
        raise unsupported(found)


def unsupported(found: Mapping[str, Sequence[str]]) -> UnsupportedOperatorError:
    """Return the error for operators without a rule: names of nodes by name of operator."""
    reasons = {kind: REFUSED[kind] for kind in found if kind in REFUSED}
    if len(found) == 1:
        ((kind, refusal),) = reasons.items() if reasons else ((next(iter(found)), None),)
        text = f"operator {_places(kind, found[kind])} is not supported"
        text += f": {refusal.reason}" if refusal else ""
        return UnsupportedOperatorError(text, hint=refusal.way_out if refusal else _supported())
    places = ", ".join(_places(kind, names) for kind, names in found.items())
    lines = [f"{kind}: {why.reason}; {why.way_out}" for kind, why in reasons.items()]
    lines += [_supported()] if len(reasons) < len(found) else []
    return UnsupportedOperatorError(f"operators {places} are not supported", hint="\n".join(lines))


def _places(kind: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{kind} (node {names[0]}{more})"


def _supported() -> str:
    known = sorted({*OPERATORS, *EXPANSIONS, *SEQUENCES, *CONTROL})
    return "supported operators: " + ", ".join(known)
