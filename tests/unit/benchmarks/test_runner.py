"""The benchmark runner: order of runs, bars, and the file it writes."""

import json

import pytest

from benchmarks.runner import Claim, faster_claim, interleaved, main, table, write_results


def _claim(ratio: float | None, bar: float | None) -> Claim:
    return Claim("a.b", 1.5, "ms", "peer", "1.0", 3.0, ratio, bar, "host")


def test_it_runs_candidates_in_turn_and_keeps_measured_rounds() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 4)
    assert "".join(order) == "ba" + "abbaabba"
    assert {name: len(items) for name, items in seconds.items()} == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("ratio", "bar", "ok"),
    [(2.0, 2.0, True), (1.99, 2.0, False), (0.1, None, True), (None, 1.0, False)],
)
def test_it_is_ok_when_the_bar_is_reached(ratio, bar, ok) -> None:
    assert _claim(ratio, bar).ok is ok


def test_it_compares_medians() -> None:
    claim = faster_claim(
        "a.b",
        [0.1, 0.2, 9.0],
        [0.4, 0.6, 0.8],
        per=0.001,
        unit="ms",
        peer="p",
        peer_version="1",
        bar=2.0,
        label="host",
    )
    assert (claim.value, claim.peer_value) == (200.0, 600.0)
    assert claim.ratio == pytest.approx(3.0)


def test_it_refuses_a_label_of_no_meaning() -> None:
    with pytest.raises(ValueError, match="somewhere"):
        Claim("a", 1, "ms", "", "", None, None, None, "somewhere")


def test_it_writes_claims_with_their_verdict(tmp_path) -> None:
    path = write_results("x", [_claim(1.0, 2.0)], tmp_path / "results")
    (row,) = json.loads(path.read_text())["claims"]
    assert row["ok"] is False
    assert row["peer_value"] == 3.0
    assert "NO" in table([_claim(1.0, 2.0)])


@pytest.mark.parametrize(
    ("bar", "arguments", "status"), [(2.0, ["--check"], 1), (2.0, [], 0), (1.0, ["--check"], 0)]
)
def test_it_exits_with_one_when_a_checked_bar_is_missed(
    tmp_path, monkeypatch, capsys, bar, arguments, status
) -> None:
    monkeypatch.setattr("benchmarks.runner.write_results", lambda name, claims: tmp_path / name)
    assert main("x", lambda: [_claim(1.5, bar)], arguments) == status
    assert ("bar missed: a.b" in capsys.readouterr().err) is bool(status)
