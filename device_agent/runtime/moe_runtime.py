"""What a developer holds: a loaded bundle, and a session that answers, token by token.

    >>> with MoERuntime.open(bundle) as runtime, runtime.session() as session:
    ...     answer = session.generate("what at top left", image=card, deadline=60.0)
    ...     for token in answer:
    ...         print(token.text, end=" ")
    ...     print(answer.reason, answer.stats.tokens)
    ...     print(session.generate("what at top right", max_tokens=1).text())
    e a s t ended 4
    4

One `MoERuntime` is one native context: router, memory and pipeline of the plan. It has one cache,
so one session at a time; more runtimes of one bundle may share its weights (`pool`). Answers are
greedy, the same bits on every machine, unless a temperature is given.

Only wrong arguments raise. A fault of the device is met by the remedies that an agent has
(`faults`), and what none mends ends the answer with `Reason.ERROR` and the kind of the fault; both
are counted in `facts["guard"]`. The agent itself answers through `answers.BundleAnswerer`, over the
same `Assembly`; this is the door for everybody else.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final, Self

from compiler.contract.degrade import Rule
from compiler.contract.errors import ContractError
from compiler.contract.pipeline import Pipeline, TokenSpec
from compiler.contract.session import STEP, require_room
from device_agent.errors import RequestError, RuntimeBusyError
from device_agent.runtime.affinity import AUTO
from device_agent.runtime.assembly import Assembly, Opening
from device_agent.runtime.bundle import (
    LoadedBundle,
    installed_bundle,
    load_bundle,
    load_directory,
)
from device_agent.runtime.course import Course, Told, View
from device_agent.runtime.custody import Custody
from device_agent.runtime.degrade_keeper import DEFAULT_RULES
from device_agent.runtime.energy import EnergyMeter
from device_agent.runtime.generation import Generation, Stats
from device_agent.runtime.heat import CriticalHeat
from device_agent.runtime.limits import Limits, Stop, require_limits
from device_agent.runtime.pictures import Picture, pixels_of
from device_agent.runtime.prompts import prompt_ids, templates_of
from device_agent.runtime.sampling import Chooser, chooser
from device_agent.runtime.threads import require_threads
from device_agent.runtime.tuning import tune
from device_agent.runtime.weights import WeightPool

CALL_S: Final = 60.0
"""A native call that takes `custody.HARD_LIMIT` times as long is given up, and its plan with it."""


class MoERuntime:
    """A bundle in memory, ready to answer."""

    def __init__(
        self,
        opening: Opening,
        timeout_s: float = CALL_S,
        is_critical: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load a bundle; `open` and `installed` are what callers use.

        Args:
            opening: Loads it, and again after a fault that only that cures.
            timeout_s: Of one native call, and of looking at weights after a fault, seconds; see
                `CALL_S`.
            is_critical: Whether the machine is about to be switched off by heat.

        Raises:
            BundleError: It does not load here.
        """
        self.monotonic: Final = opening.monotonic
        self.custody: Final[Custody[Assembly]] = Custody(
            opening.open, timeout_s, is_critical, opening.monotonic
        )
        self.pipeline: Final[Pipeline] = self.custody.latest.pipeline
        self._session: Session | None = None
        self._is_closed = False

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        threads: int = 0,
        cpus: str = AUTO,
        rules: Sequence[Rule] = DEFAULT_RULES,
        pool: WeightPool | None = None,
        steers: bool = True,
        timeout_s: float = CALL_S,
    ) -> Self:
        """Open a bundle directory as `python -m compiler compile --out` writes it.

        Digests are checked; there are no signatures in a directory, and kernels are code: open what
        you compiled or trust.

        Args:
            directory: The bundle, or its `manifest.json`.
            threads: Threads of one answer; 0 = as many as help, measured now.
            cpus: Where lent threads run: `auto`, `off` or a list of cores.
            rules: When it does less than the bundle asks for; empty = never.
            pool: Weights in memory, to be shared with other runtimes, and how many there may be.
            steers: Whether routers go by what lies in memory, and by how sure they are.
            timeout_s: Of one native call, seconds; see `CALL_S`.

        Raises:
            BundleError: There is no whole bundle, or it does not load here.
            ConfigurationError: The threads are no number from 0 to 64.
        """
        require_threads(threads)
        path = Path(directory)

        def load() -> LoadedBundle:
            return load_directory(path, pool)

        return cls._started(load, threads, cpus, rules, steers=steers, timeout_s=timeout_s)

    @classmethod
    def installed(
        cls,
        state_dir: Path | str,
        *,
        threads: int = 0,
        cpus: str = AUTO,
        rules: Sequence[Rule] = DEFAULT_RULES,
        pool: WeightPool | None = None,
        steers: bool = True,
        timeout_s: float = CALL_S,
    ) -> Self:
        """Open the bundle that an agent runs; changes nothing in its folder.

        Args:
            state_dir: Folder of the agent.
            threads: As for `open`.
            cpus: As for `open`.
            rules: As for `open`.
            pool: As for `open`.
            steers: As for `open`.
            timeout_s: As for `open`.

        Raises:
            NoBundleError: Nothing is installed there.
            BundleError: It is damaged, or does not load here.
            ConfigurationError: The threads are no number from 0 to 64.
        """
        require_threads(threads)
        store, current = installed_bundle(Path(state_dir))

        def load() -> LoadedBundle:
            return load_bundle(store, current, pool)

        return cls._started(load, threads, cpus, rules, steers=steers, timeout_s=timeout_s)

    @classmethod
    def _started(
        cls,
        load: Callable[[], LoadedBundle],
        threads: int,
        cpus: str,
        rules: Sequence[Rule],
        *,
        steers: bool,
        timeout_s: float,
    ) -> Self:
        opening = Opening(
            load,
            lambda bundle: tune(bundle, threads, cpus),
            rules,
            time.perf_counter,
            EnergyMeter(),
            steers=steers,
        )
        return cls(opening, timeout_s, CriticalHeat(time.perf_counter).is_critical)

    @property
    def manifest_sha256(self) -> str:
        """Return which bundle it is."""
        return self.custody.manifest_sha256

    @property
    def tokens(self) -> TokenSpec:
        """Words and templates of the model.

        Raises:
            RequestError: It does not answer in words.
        """
        if self.pipeline.tokens is None or STEP not in self.pipeline.programs:
            raise RequestError(
                "this bundle does not answer in words",
                hint="its programs: " + ", ".join(sorted(self.pipeline.programs)),
            )
        return self.pipeline.tokens

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of the prompts that words go into, and of those that stand alone."""
        return templates_of(self.tokens)

    @property
    def facts(self) -> Mapping[str, object]:
        """Threads, policy, rung, faults: what `status` shows of a running bundle."""
        return self.custody.facts

    def session(self) -> "Session":
        """Return a session with nothing in view.

        Raises:
            RuntimeBusyError: Another session is open, or the runtime is closed.
            RequestError: The bundle does not answer in words.
        """
        if self._is_closed:
            raise RuntimeBusyError("the runtime is closed", hint="open the bundle again")
        if self._session is not None:
            raise RuntimeBusyError(
                "the runtime has an open session, and one cache",
                hint="close it, or open the bundle once more with the same pool",
            )
        self._session = Session(self, self.tokens)
        return self._session

    def let_go(self, session: "Session") -> None:
        """Forget a session that was closed."""
        if self._session is session:
            self._session = None

    def close(self) -> None:
        """End the session and free the native memory."""
        self._is_closed = True
        if self._session is not None:
            self._session.close()
        self.custody.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """One picture in view, any number of questions about it; used by one thread."""

    def __init__(self, runtime: MoERuntime, tokens: TokenSpec) -> None:
        """Start with nothing in view; `MoERuntime.session` is what callers use."""
        self._runtime, self._tokens = runtime, tokens
        self._view = View(runtime.pipeline)
        self._generation: Generation | None = None
        self._is_closed = False

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        template: str | None = None,
        image: Picture | None = None,
        max_tokens: int | None = None,
        deadline: float | None = None,
        cancel: Stop | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Generation:
        """Return an answer, to be iterated over; it ends the one before.

        Args:
            prompt: Words with white space between them, or token ids as they are.
            template: Name of the prompt around the words, see `MoERuntime.templates`; empty = none;
                None = `question` where the bundle has it.
            image: Picture to look at from now on: a file, the bytes of one, or bare pixels. None
                keeps the one in view.
            max_tokens: Tokens at most; None = as the bundle says.
            deadline: Seconds for all of it, from the first token that is asked for. Looked at
                between native calls; what was said until then stays.
            cancel: Ends it when set.
            temperature: 0 = greedy.
            seed: Of the draws where `temperature` is above 0.

        Raises:
            RequestError: A word, a limit or a setting is not the model's; see its hint.
            PictureError: The picture cannot be read or has another size.
            RuntimeBusyError: The session is closed.
        """
        self._require_open()
        if not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt of {prompt!r}", hint="words, or a list of token ids")
        pipeline = self._runtime.pipeline
        limits = self._limits(max_tokens, deadline, cancel)
        chooser(pipeline, temperature, seed)
        pixels = None if image is None else pixels_of(image, pipeline.image)
        ids = prompt_ids(self._tokens, prompt, template)
        _require_room(pipeline, ids, self._view.seen if pixels is None else 0)
        if self._generation is not None:
            self._generation.close()
        if pixels is not None:
            self._view.show(pixels)

        self._generation = self._begun(ids, limits, partial(chooser, pipeline, temperature, seed))
        return self._generation

    def _begun(self, ids: list[int], limits: Limits, choosing: Callable[[], Chooser]) -> Generation:
        def course(told: Told) -> Course:
            return Course(self._runtime.custody, self._view, ids, limits.most, choosing, told)

        return Generation(course, self._tokens, limits, Stats(len(ids)), self._runtime.monotonic)

    def _limits(
        self, max_tokens: int | None, deadline: float | None, cancel: Stop | None
    ) -> Limits:
        most = self._tokens.max_answer_tokens if max_tokens is None else max_tokens
        require_limits(most, deadline)
        return Limits(most, deadline, cancel or Event())

    def forget(self) -> None:
        """Have no picture in view."""
        self._require_open()
        if self._generation is not None:
            self._generation.close()
        self._view.forget()

    def close(self) -> None:
        """End the answer in progress and give the context back."""
        self._is_closed = True
        if self._generation is not None:
            self._generation.close()
        self._runtime.let_go(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeBusyError("the session is closed", hint="take another one")


def _require_room(pipeline: Pipeline, ids: Sequence[int], seen: int) -> None:
    try:
        require_room(pipeline, ids, seen)
    except ContractError as error:
        raise RequestError(str(error), hint=error.hint) from error
