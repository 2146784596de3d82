"""Decide stored looks of a gate again: `manage.py gate_replay 17` or `--rollout 3`."""

from collections.abc import Iterable

from django.core.management.base import CommandError, CommandParser

from builds.common.commands import DatabaseCommand
from builds.common.errors import NotFoundError
from fleet.services.replays import Replay, look_replay, rollout_replay


class Command(DatabaseCommand):
    """Decide again and compare; exit status 1 when anything differs."""

    help = "Decide stored looks of a gate again, from their stored inputs."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the arguments."""
        parser.add_argument("look", nargs="?", type=int, help="number of one look")
        parser.add_argument("--rollout", type=int, help="all looks of a rollout, and their chain")

    def handle(self, *args: object, **options: object) -> None:
        """Replay and print one line per look that differs, and a last line for all."""
        count, wrong = 0, 0
        try:
            for replay in _replays(options["look"], options["rollout"]):
                count += 1
                wrong += not replay.is_same
                if not replay.is_same or options["look"] is not None:
                    self.stdout.write(_line(replay))
        except NotFoundError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{count} looks decided again, {wrong} differ")
        if wrong:
            raise CommandError("a stored verdict does not follow from its stored inputs")


def _replays(look: object, rollout: object) -> Iterable[Replay]:
    if isinstance(look, int) and rollout is None:
        return [look_replay(look_id=look)]
    if isinstance(rollout, int) and look is None:
        return rollout_replay(rollout_id=rollout)
    raise CommandError("give the number of one look, or --rollout")


def _line(replay: Replay) -> str:
    text = f"look {replay.look_id}: stored {replay.stored}, decided again {replay.replayed}"
    return text if replay.is_same else f"{text}; differs in {', '.join(replay.differences)}"
