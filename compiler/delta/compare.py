"""What another engine would need for the same update: a figure to show, never a way to ship."""

from collections.abc import Iterable

from compiler.delta.choose import changed_sections
from compiler.delta.records import Bundle


def bsdiff4_size(old: Bundle, new: Bundle) -> int:
    """Return the bytes of one bsdiff4 patch over all changed sections, joined in component order.

    Takes about 17 x the old bytes in memory and most of a second per megabyte.

    Raises:
        ContractError: A component name is outside the grammar.
    """
    import bsdiff4

    names = [section.component for section in changed_sections(old, new)]
    return len(bsdiff4.diff(_joined(old, names), _joined(new, names)))


def _joined(bundle: Bundle, names: Iterable[str]) -> bytes:
    found = (bundle[name] for name in names if name in bundle)
    return b"".join(section.read(section.length, 0) for section in found)
