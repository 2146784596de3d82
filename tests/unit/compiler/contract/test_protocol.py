"""What is said between device and server."""

import pytest

from compiler.contract.errors import ContractError
from compiler.contract.protocol import OfferKind, UpdateState, one_of


def test_a_member_is_found_by_its_value() -> None:
    assert one_of(OfferKind, "rollback", "offer kind") is OfferKind.ROLLBACK


@pytest.mark.parametrize("value", [None, "", "Rollback", "ROLLBACK", 1, True, [], {}, ["rollback"]])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ContractError, match="unknown update state"):
        one_of(UpdateState, value, "update state")  # type: ignore[arg-type]
