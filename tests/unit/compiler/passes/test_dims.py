import pytest

from compiler.dialects.dims import Dim, fit, parse_dim, symbol_dim, witnesses


@pytest.mark.parametrize("text", ["0", "7", "T", "P + T", "2*T + 3", "T - 1", "-1*P + 2*T"])
def test_it_reads_back_what_it_writes(text: str) -> None:
    assert str(parse_dim(text)) == text


@pytest.mark.parametrize("text", ["", "T*2", "t", "T + ", "1.5", "T * T"])
def test_it_refuses_what_is_not_linear(text: str) -> None:
    with pytest.raises(ValueError, match="size expression"):
        parse_dim(text)


def test_it_adds_and_substitutes() -> None:
    total = symbol_dim("P") + symbol_dim("T") + Dim(1)
    assert total.at({"P": 3, "T": 4}) == 8
    assert total.substitute({"T": Dim(32)}) == symbol_dim("P") + Dim(33)


def test_it_pins_a_linear_size_down_by_its_values() -> None:
    bindings = witnesses(("P", "T"))
    size = parse_dim("2*P + T + 5")
    assert fit([size.at(b) for b in bindings], bindings) == size


def test_it_notices_sizes_that_are_not_linear() -> None:
    bindings = witnesses(("P", "T"))
    assert fit([b["P"] * b["T"] for b in bindings], bindings) is None
    assert fit([max(b["P"], b["T"]) for b in bindings], bindings) is None
