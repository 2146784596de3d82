"""Names in signed metadata: a closed grammar, matched before a name is used for anything."""

import re
from typing import Final

from device_agent.errors import TargetNameError

_TARGET_PATH: Final = re.compile(
    r"releases/[a-z0-9][a-z0-9._-]{0,63}/[1-9][0-9]{0,15}-[a-z0-9][a-z0-9._-]{0,63}\.json"
)


def require_target_path(path: str) -> str:
    """Return `path` if it is the TUF target path of a release manifest.

    Raises:
        TargetNameError: It is anything else, e.g. absolute or with `..`.
    """
    if _TARGET_PATH.fullmatch(path) is None or ".." in path:
        raise TargetNameError(f"{path[:80]!r} is not the path of a release manifest")
    return path
