"""Degrade rules from the server: asked for now and then, verified, kept, followed.

    signed order -(director's keys, device, nonce, revision not below the last)-> kept twice on disk
    -> the rule book of the running bundle

What does not verify, is older, or does not parse changes nothing: the last good rules stay, over
restarts too. Telemetry says which revision is followed.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from compiler.contract.canonical import Json
from compiler.contract.degrade import parse_rules
from compiler.contract.errors import ContractError
from compiler.contract.protocol import integer
from compiler.contract.rules_order import MAX_REVISION, RulesOrder
from device_agent.errors import AgentError, ReplayError
from device_agent.machine import describe
from device_agent.runtime.rule_book import RuleBook
from device_agent.storage.twin import TwinDocument

log = logging.getLogger("device_agent.update")

RETRY_S: Final = 60.0


class Orders(Protocol):
    """Where verified orders come from."""

    def rules_order(self) -> RulesOrder | None:
        """Return the newest order; None if the server has none.

        Raises:
            AgentError: It cannot be had or trusted.
        """


class RulesWatch:
    """Keeps a rule book as the server says; belongs to one thread."""

    def __init__(
        self,
        orders: Orders,
        book: RuleBook,
        kept: TwinDocument,
        interval_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        """Follow what was kept.

        Args:
            orders: Asks the server.
            book: Told what to follow.
            kept: The last good order.
            interval_s: Time between two questions; 0 = never ask.
            monotonic: Clock in seconds.
        """
        self._orders, self._book, self._kept = orders, book, kept
        self._interval_s, self._monotonic = interval_s, monotonic
        self._due_at = -float("inf")
        self._document: dict[str, Json] = {}
        self._recall()

    def turn(self) -> None:
        """Ask if it is time to; whatever goes wrong, the last good rules stay."""
        now = self._monotonic()
        if not self._interval_s or now < self._due_at:
            return
        self._due_at = now + self._interval_s
        try:
            order = self._orders.rules_order()
            if order is not None:
                self._take(order)
        except (AgentError, ContractError) as error:
            self._due_at = now + min(RETRY_S, self._interval_s)
            hint = describe(error) if isinstance(error, AgentError) else str(error)
            log.warning("degrade rules stay at revision %d: %s", self._book.revision, hint)

    def _take(self, order: RulesOrder) -> None:
        if order.revision < self._book.revision:
            raise ReplayError(
                f"rules of revision {order.revision}, this device follows {self._book.revision}"
            )
        document: dict[str, Json] = {
            "revision": order.revision,
            "rules": order.text,
        }
        if document == self._document:
            return
        rules = order.rules()
        self._kept.save(document)
        self._document = document
        self._book.follow(rules, order.revision)
        count = "those of the device" if rules is None else f"{len(rules)} rules"
        log.info("degrade rules: revision %d, %s", order.revision, count)

    def _recall(self) -> None:
        try:
            document = self._kept.load()
            if document is None:
                return
            rules = document["rules"]
            parsed = None if rules is None else parse_rules(str(rules).encode())
            self._book.follow(parsed, integer(document, "revision", MAX_REVISION))
            self._document = document
        except (ContractError, KeyError, TypeError) as error:
            log.warning("the degrade rules kept here cannot be read: %s", error)
