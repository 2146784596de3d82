"""What a report warns of: nothing for a plain bundle, a sentence for each doubt."""

from compiler.contract.plan_format import KvKind
from compiler.driver.caveats import caveats_of
from compiler.driver.options import CompileOptions

OPTIONS = {"target": "x86-64-v3", "model": "m", "version": "1"}
COMPARED = {"rule": "gain", "f32": 0.2, "kept_ratio": 0.97, "says": "97 %"}
PLAIN = {
    "gain": COMPARED,
    "verified_on": "host",
    "memory": {"kv_kind": None},
    "base": None,
    "explained": {"programs": {"forward": {"calls": [{"is_reference": False}] * 3}}},
    "policy": {"fixed": False, "measured_on": "some machine"},
}


def caveats(report=PLAIN, **options) -> list[str]:
    return caveats_of(report, CompileOptions(**{**OPTIONS, **options}))


def test_it_says_nothing_of_a_bundle_without_doubts() -> None:
    assert caveats() == []
    assert caveats({**PLAIN, "memory": {"kv_kind": "i8"}}, kv=KvKind.I8) == []
    assert caveats({**PLAIN, "base": {"weights_paired": 1}}, base_sections={"plan": b""}) == []


def test_it_says_what_has_no_effect() -> None:
    assert caveats(kv=KvKind.I8) == [
        "keys and values as int8 change nothing: this model has no key/value cache"
    ]
    assert caveats(base_sections={"plan": b""}) == [
        "no weight of the base bundle fits this model: the update will be a whole one"
    ]


def test_it_says_what_nobody_ran_first() -> None:
    calls = [{"is_reference": True}, {"is_reference": False}]
    report = {
        **PLAIN,
        "verified_on": "assembled",
        "explained": {"programs": {"a": {"calls": calls}, "b": {"calls": calls}}},
        "policy": {"fixed": False, "measured_on": "unmeasured"},
    }
    first, slow, guesses = caveats(report)
    assert "never run" in first
    assert slow == "2 of 4 calls run on plain reference kernels: slow"
    assert "guesses" in guesses
    fixed = {**report, "policy": {"fixed": True, "measured_on": "unmeasured"}}
    assert len(caveats(fixed)) == 2


def test_it_says_whether_the_gain_was_compared_and_kept() -> None:
    base = {"base_sections": {"plan": b""}}
    known = {**PLAIN, "base": {"weights_paired": 1}}
    assert caveats({**known, "gain": {"rule": "no_gain", "f32": 0.0, "says": ""}}, **base) == []
    unknown = {"rule": "no_scores", "f32": None, "says": "there are no scores"}
    assert caveats({**known, "gain": unknown}, **base) == [
        "unverified whether the update survives quantisation: there are no scores"
    ]
    assert caveats({**PLAIN, "gain": unknown}) == []
    assert caveats({**known, "gain": {**COMPARED, "kept_ratio": 0.85}}, **base) == [
        "the gain may be lost in part, too few questions to tell: 97 %"
    ]
