"""The page of the targets: what was checked where, and what no device is given."""

import re

import pytest
from django.test import Client

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("world")]


def test_it_lists_gpus_as_unverified(viewer: Client) -> None:
    text = viewer.get("/targets").content.decode()
    row = next(row for row in text.split("<tr>") if "Snapdragon 8 Gen 2" in row)
    cell = next(
        cell for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) if "Adreno" in cell
    )
    assert "Adreno 740" in cell
    assert "opencl" in cell
    assert "Unverified" in cell
    apple = next(row for row in text.split("<tr>") if "A14 Bionic" in row)
    assert "opencl" not in apple
    assert "no device is given it" in text
