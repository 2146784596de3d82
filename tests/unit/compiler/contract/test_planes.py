"""The closed grammar of component names."""

import pytest

from compiler.contract.errors import ContractError
from compiler.contract.planes import require_component

PLAIN = "plan kernels pipeline selftest router_stats expert_groups schedule bands policy steering"


@pytest.mark.parametrize(
    "name",
    [
        *PLAIN.split(),
        "weights.shared",
        "adapter.0",
        "adapter.9999",
        "expert.L0.E0",
        "expert.L12.E34",
    ],
)
def test_it_knows_every_section_that_the_compiler_makes(name: str) -> None:
    assert require_component(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "adapter", "adapter.", "adapter.00", "adapter.10000", "adapter.-1", "adapter.1.2",
     "adapter.1\n", "expert.L0", "expert.L0.E01", "weights/shared", "../plan", None, 7],
)  # fmt: skip
def test_it_refuses_every_other_name(name: object) -> None:
    with pytest.raises(ContractError):
        require_component(name)
