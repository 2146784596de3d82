"""The file of factors beside a bundle."""

import numpy as np
import pytest

from compiler.contract.errors import ContractError
from compiler.delta.replay_file import pack_replays, read_replays
from tests.unit.compiler.delta.merged import MERGED, adapter


def packed() -> bytes:
    rng = np.random.default_rng(3)
    shapes = {(MERGED, 0): (16, 32, 2), ("weights.shared", 12): (48, 64, 3)}
    return pack_replays({key: adapter(rng, *shape, 0.01) for key, shape in shapes.items()})


def test_it_reads_what_it_wrote() -> None:
    found = read_replays(packed())
    assert set(found) == {(MERGED, 0), ("weights.shared", 12)}
    assert found["weights.shared", 12].left.shape == (48, 3)
    assert pack_replays(found) == packed()


def test_a_file_that_is_cut_or_longer_is_refused() -> None:
    data = packed()
    for bad in (*(data[:at] for at in range(0, len(data), 7)), data + b"\0"):
        with pytest.raises(ContractError):
            read_replays(bad)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda d: b"SFR2" + d[4:], id="magic"),
        pytest.param(lambda d: d[:4] + b"\xff\xff\xff\xff" + d[8:], id="count"),
        pytest.param(lambda d: d.replace(b"expert.L0", b"../../etc"), id="name"),
        pytest.param(lambda d: d[:4] + b"\x02\0\0\0" + 2 * one(d), id="twice"),
    ],
)
def test_a_wrong_file_is_refused(bad) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ContractError):
        read_replays(bad(packed()))


def one(data: bytes) -> bytes:
    """The entry of one weight."""
    return pack_replays({(MERGED, 0): read_replays(data)[MERGED, 0]})[8:]
