"""The folder of one run: the submission, the base bundle, and room for the output."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings

from builds.compile_runner.protocol import (
    MANIFEST_NAME,
    REPLAYS,
    REPLAYS_NAME,
    SECTIONS_NAME,
)
from builds.models import Bundle, ModelVersion
from builds.storage import blob_store


@contextlib.contextmanager
def run_folder(prefix: str) -> Iterator[Path]:
    """Yield a private folder that is gone afterwards.

    Folders that killed runs of the same job left on this machine are removed: their lease is gone.
    """
    parent = settings.SPARSEFLEET.state_dir / "work"
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f"{prefix}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def cache_folder() -> Path:
    """Return the folder of stage results that builds share; losing it costs only time."""
    path: Path = settings.SPARSEFLEET.state_dir / "cache" / "compiler"
    path.mkdir(parents=True, exist_ok=True)
    return path


def lay_out_submission(version: ModelVersion, folder: Path) -> Path:
    """Put the files of a submission into `folder` under their names.

    Raises:
        NotFoundError: A blob is gone.
    """
    folder.mkdir(parents=True)
    for item in version.files:
        _place(item["sha256"], folder / item["name"])
    return folder


def lay_out_bundle(bundle: Bundle, folder: Path) -> Path:
    """Put manifest, sections and factors of merged adapters of a bundle into `folder`.

    Raises:
        NotFoundError: A blob is gone.
    """
    (folder / SECTIONS_NAME).mkdir(parents=True)
    (folder / MANIFEST_NAME).write_bytes(bundle.manifest_bytes)
    for section in bundle.sections.all():
        _place(section.sha256, folder / SECTIONS_NAME / section.component)
    replays = bundle.job.report.get("artifacts", {}).get(REPLAYS)
    if replays:
        _place(replays, folder / REPLAYS_NAME)
    return folder


def _place(sha256: str, path: Path) -> None:
    store = blob_store()
    store.size(sha256)
    try:
        path.symlink_to(store.path(sha256))
    except OSError:
        with store.open(sha256) as source, path.open("wb") as copy:
            shutil.copyfileobj(source, copy)
