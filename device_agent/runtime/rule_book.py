"""The degrade rules in effect: the device's own, or those that the server signed for it.

The update side replaces them (`update.rules`), the answering thread reads them before each look at
the machine; rules that are gone hold nothing.
"""

from collections.abc import Sequence

from compiler.contract.degrade import Rule


class RuleBook:
    """Rules and their revision; safe for any number of threads."""

    def __init__(self, own: Sequence[Rule] = ()) -> None:
        """Follow the device's own rules."""
        self._own = tuple(own)
        self._present: tuple[tuple[Rule, ...], int] = (self._own, 0)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Those in effect."""
        return self._present[0]

    @property
    def revision(self) -> int:
        """What the server's last word was; 0 if it never spoke."""
        return self._present[1]

    def follow(self, rules: Sequence[Rule] | None, revision: int) -> None:
        """Follow the server's rules from now on; None = the device's own again."""
        self._present = (self._own if rules is None else tuple(rules), revision)
