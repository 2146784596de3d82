"""A publisher killed while it holds the lock: devices see what was, and the next one goes on."""

import subprocess
from pathlib import Path

import pytest

from tests.integration.platform import ROOT, Platform

KILLED = """
import os
from builds.services import publishing
from builds.services.signing import release_publish
from tests.factories.builds import make_bundle
put = publishing.file_put
def die(repository, role, document, data):
    if role == {role!r}:
        os.kill(os.getpid(), 9)
    put(repository, role, document, data)
publishing.file_put = die
release_publish(bundles=[make_bundle()])
"""
HEADS = """
from builds.models import Bundle, MetadataFile
names = MetadataFile.objects.order_by("name").values_list("name", "version", "role")
print(json.dumps([list(names), Bundle.objects.count()]))
"""


@pytest.mark.parametrize("role", ["snapshot", "timestamp"])
def test_a_publisher_killed_while_it_holds_the_lock_leaves_what_was(
    tmp_path: Path, role: str
) -> None:
    platform = Platform(tmp_path).install()
    before = platform.ask(HEADS)
    died = subprocess.run(
        platform.script(KILLED.format(role=role)),
        cwd=ROOT,
        env=platform.env,
        check=False,
    )
    assert died.returncode == -9
    names, bundles = platform.ask(HEADS)
    assert names == before[0]
    assert bundles == 1
    published = """
    from builds.models import Bundle, MetadataFile
    from builds.services.signing import release_publish
    release_publish(bundles=Bundle.objects.all())
    print(json.dumps(MetadataFile.objects.get(name="timestamp.json").version))
    """
    assert platform.ask(published) == 2
