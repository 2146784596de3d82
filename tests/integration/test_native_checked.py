"""Kernels under watch: unmapped pages behind memory, undefined behaviour, another compiler."""

import shutil

import pytest

from tests.factories.checked_kernels import compared


def test_it_touches_nothing_behind_weights_and_arena() -> None:
    assert compared("guarded") > 250


def test_it_has_no_undefined_behaviour() -> None:
    assert compared("trapping") > 250


@pytest.mark.full
def test_it_gives_the_same_bits_when_gcc_compiles_it() -> None:
    if shutil.which("gcc", path="/usr/bin:/bin") is None:
        pytest.skip("gcc is not installed: apt-get install gcc")
    assert compared("gcc") > 250
