"""Errors of the demo: what went wrong, and what to do."""


class DemoError(Exception):
    """The demo cannot go on.

    Attributes:
        hint: What the reader can do about it, or an empty string.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
