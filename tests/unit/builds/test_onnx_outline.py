"""The outline of ONNX files: real models pass, cut ones and other files do not."""

import io

import pytest
from django.conf import settings

from builds.errors import MalformedUploadError
from builds.onnx_outline import require_onnx
from tests.factories.builds import MINIMAL_ONNX

EXAMPLES = settings.BASE_DIR / "examples"
REAL = sorted(EXAMPLES.glob("**/*.onnx"))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_it_passes_real_models(path) -> None:  # type: ignore[no-untyped-def]
    with path.open("rb") as stream:
        require_onnx(stream, path.name)


def test_it_refuses_a_real_model_cut_off_anywhere() -> None:
    data = min(REAL, key=lambda path: path.stat().st_size).read_bytes()
    for size in [*range(64), *range(64, len(data), len(data) // 200 + 1), len(data) - 1]:
        with pytest.raises(MalformedUploadError):
            require_onnx(io.BytesIO(data[:size]), "model.onnx")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"\xff" * 100,
        b"PK\x03\x04" + b"x" * 100,
        b"this is no ONNX file",
        b'{"schema": "x"}',
        MINIMAL_ONNX + b"\n",
        MINIMAL_ONNX + b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        MINIMAL_ONNX.replace(b"\x3a\x00", b""),
        b"\x0a\x00" + MINIMAL_ONNX,
        MINIMAL_ONNX + b"\x08\x08" * 100_000,
    ],
)
def test_it_refuses_other_files(data: bytes) -> None:
    with pytest.raises(MalformedUploadError, match=r"model\.onnx") as caught:
        require_onnx(io.BytesIO(data), "model.onnx")
    assert caught.value.hint
