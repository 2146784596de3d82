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

The agent itself answers through `answers.BundleAnswerer`; this is the door for everybody else.
"""

import difflib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from compiler.contract.bands import BandedRunner
from compiler.contract.degrade import Rule
from compiler.contract.errors import ContractError
from compiler.contract.pipeline import PREFIX, Pipeline, TokenSpec, shown
from compiler.contract.pooled_weights import PooledWeights
from compiler.contract.session import Answer, Dialogue, Manner, PlanRunner
from compiler.contract.session import Session as PlanSession
from device_agent.errors import BundleError, RequestError, RuntimeBusyError
from device_agent.runtime.affinity import AUTO
from device_agent.runtime.bundle import (
    LoadedBundle,
    installed_bundle,
    load_bundle,
    load_directory,
)
from device_agent.runtime.degrade_keeper import DEFAULT_RULES, DegradeKeeper, rungs_of
from device_agent.runtime.generation import (
    Generation,
    Limits,
    Reason,
    Stats,
    Stop,
    require_ids,
    require_limits,
)
from device_agent.runtime.pictures import Picture, pixels_of
from device_agent.runtime.residency import residency_of
from device_agent.runtime.rungs import take_rung
from device_agent.runtime.sampling import Chooser, chooser
from device_agent.runtime.sentinel import SentinelRunner
from device_agent.runtime.steering_keeper import SteeringKeeper, steering_keeper
from device_agent.runtime.threads import require_threads
from device_agent.runtime.tuning import Tuned, tune
from device_agent.runtime.weights import WeightPool

QUESTION: Final = "question"
PLAIN: Final = ""
"""The template of a prompt that stands alone."""
_UNTUNED: Final = Tuned({}, None)


class MoERuntime:
    """A bundle in memory, ready to answer."""

    def __init__(
        self,
        bundle: LoadedBundle,
        tuned: Tuned = _UNTUNED,
        rules: Sequence[Rule] | DegradeKeeper = DEFAULT_RULES,
        monotonic: Callable[[], float] = time.perf_counter,
        steering: SteeringKeeper | None = None,
    ) -> None:
        """Hold a loaded bundle; `open` and `installed` are what callers use.

        Args:
            bundle: Loaded, its cache empty; closed with this.
            tuned: How it runs here.
            rules: When it does less; or who says so.
            monotonic: Clock in seconds.
            steering: Of its routers; None = they choose as the model says.
        """
        self.manifest_sha256: Final = bundle.manifest_sha256
        self.pipeline: Final[Pipeline] = bundle.pipeline
        self._bundle = bundle
        self._tuned = tuned
        self._steering = steering
        nearest: PlanRunner = bundle.runner if steering is None else steering.runner
        self._watched = SentinelRunner(nearest, bundle.pipeline)
        self._banded = None if bundle.bands is None else BandedRunner(self._watched, bundle.bands)
        self._pager = residency_of(getattr(bundle.runner, "weights", None), monotonic)
        rungs = rungs_of(bundle.bands, is_paged=self._pager is not None)
        self._degrade: DegradeKeeper = (
            rules if isinstance(rules, DegradeKeeper) else DegradeKeeper(rules, rungs, monotonic)
        )
        self._session: Session | None = None
        self._is_closed = False
        self.monotonic: Final = monotonic

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

        Raises:
            BundleError: There is no whole bundle, or it does not load here.
            ConfigurationError: The threads are no number from 0 to 64.
        """
        require_threads(threads)
        bundle = load_directory(Path(directory), pool)
        return cls._started(bundle, threads, cpus, rules, steers=steers)

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
    ) -> Self:
        """Open the bundle that an agent runs; changes nothing in its folder.

        Args:
            state_dir: Folder of the agent.
            threads: As for `open`.
            cpus: As for `open`.
            rules: As for `open`.
            pool: As for `open`.
            steers: As for `open`.

        Raises:
            NoBundleError: Nothing is installed there.
            BundleError: It is damaged, or does not load here.
            ConfigurationError: The threads are no number from 0 to 64.
        """
        require_threads(threads)
        store, current = installed_bundle(Path(state_dir))
        bundle = load_bundle(store, current, pool)
        return cls._started(bundle, threads, cpus, rules, steers=steers)

    @classmethod
    def _started(
        cls, bundle: LoadedBundle, threads: int, cpus: str, rules: Sequence[Rule], *, steers: bool
    ) -> Self:
        try:
            tuned, steering = tune(bundle, threads, cpus), None
            if steers:
                is_paged = isinstance(bundle.runner.weights, PooledWeights)
                steering = steering_keeper(bundle, time.perf_counter, is_paged=is_paged)
            return cls(bundle, tuned, rules, steering=steering)
        except ContractError as error:
            bundle.runner.close()
            raise BundleError(f"the bundle does not run: {error}", hint=error.hint) from error
        except BaseException:
            bundle.runner.close()
            raise

    @property
    def runner(self) -> PlanRunner:
        """What runs the programs of the plan, each `step` as the bands say."""
        return self._banded or self._watched

    @property
    def tokens(self) -> TokenSpec:
        """Words and templates of the model.

        Raises:
            RequestError: It does not answer in words.
        """
        if self.pipeline.tokens is None:
            raise RequestError(
                "this bundle does not answer in words",
                hint="its programs: " + ", ".join(sorted(self.pipeline.programs)),
            )
        return self.pipeline.tokens

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of the prompts that words go into, and of those that stand alone."""
        names = (name.removesuffix(PREFIX) for name in self.tokens.prompts)
        return tuple(sorted({name for name in names if not name.endswith("_suffix")}))

    @property
    def facts(self) -> Mapping[str, object]:
        """Threads, policy and rung: what `status` shows of a running bundle."""
        facts = {**self._tuned.facts, "degrade": self._degrade.facts()}
        facts |= {} if self._pager is None else self._pager.facts()
        if self._steering is not None:
            facts["steering"] = self._steering.facts()
        return facts if self._banded is None else {**facts, "steps": dict(self._banded.ran)}

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

    def begin_answer(self) -> bool:
        """Take the rung of the next answer; return whether that changes answers."""
        rung = self._degrade.rung()
        take_rung(rung, self._banded, self._pager, self._steering)
        return rung.changes_answers

    def end_answer(self, *, failed: bool, latency_ms: float | None) -> bool:
        """Count an answer, and what it took if it was whole; the policy may move after it.

        Returns:
            Whether it did without an expert that might not be loaded.
        """
        self._degrade.answered(failed=failed, latency_ms=latency_ms)
        if self._tuned.keeper is not None:
            self._tuned.keeper.answered()
        return self._steering is not None and self._steering.answered()

    def let_go(self, session: "Session") -> None:
        """Forget a session that was closed."""
        if self._session is session:
            self._session = None

    def close(self) -> None:
        """End the session and free the native memory."""
        self._is_closed = True
        if self._session is not None:
            self._session.close()
        self._bundle.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """One picture in view, any number of questions about it; used by one thread."""

    def __init__(self, runtime: MoERuntime, tokens: TokenSpec) -> None:
        """Start with nothing in view; `MoERuntime.session` is what callers use."""
        self._runtime, self._tokens = runtime, tokens
        self._plan = PlanSession(runtime.runner, runtime.pipeline)
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
        limits = self._limits(max_tokens, deadline, cancel)
        choose = chooser(self._runtime.pipeline, temperature, seed)
        pixels = None if image is None else pixels_of(image, self._runtime.pipeline.image)
        ids = self._ids(prompt, template)
        if self._generation is not None:
            self._generation.close()
        if pixels is not None:
            self._plan.keep(pixels)
        self._generation = self._begun(ids, limits, choose)
        return self._generation

    def _begun(self, ids: list[int], limits: Limits, choose: Chooser) -> Generation:
        def dialogue(tell: Callable[[int], None]) -> Dialogue[Answer]:
            return self._plan.answers(ids, Manner(limits.most, choose, tell))

        stats = Stats(len(ids))
        runtime = self._runtime
        try:
            made = Generation(
                runtime.runner,
                dialogue,
                self._tokens,
                limits,
                stats,
                self._answered,
                runtime.monotonic,
            )
        except ContractError as error:
            raise RequestError(str(error), hint=error.hint) from error
        stats.degraded = runtime.begin_answer()
        return made

    def _limits(
        self, max_tokens: int | None, deadline: float | None, cancel: Stop | None
    ) -> Limits:
        most = self._tokens.max_answer_tokens if max_tokens is None else max_tokens
        require_limits(most, deadline)
        return Limits(most, deadline, cancel or threading.Event())

    def forget(self) -> None:
        """Have no picture in view."""
        self._require_open()
        if self._generation is not None:
            self._generation.close()
        self._plan.forget()

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

    def _answered(self, reason: Reason, stats: Stats) -> None:
        is_whole = reason in (Reason.ENDED, Reason.MAX_TOKENS, Reason.CONTEXT_FULL)
        latency_ms = stats.total_ms if is_whole else None
        failed = reason is Reason.ERROR
        stats.degraded |= self._runtime.end_answer(failed=failed, latency_ms=latency_ms)

    def _ids(self, prompt: str | Sequence[int], template: str | None) -> list[int]:
        try:
            if not isinstance(prompt, str):
                return require_ids(prompt, self._tokens)
            words = prompt.split()
            if template is None:
                template = QUESTION if QUESTION in self._runtime.templates else PLAIN
            if template not in (PLAIN, *self._runtime.templates):
                known = ", ".join(self._runtime.templates) or "none"
                raise RequestError(f"no prompt {shown(template)!r}", hint=f"prompts: {known}")
            if not words and template not in self._tokens.prompts:
                raise RequestError("nothing was asked", hint=self._templates_hint())
            if template == PLAIN:
                return self._tokens.ids(words)
            return self._tokens.prompt(template, words)
        except ContractError as error:
            raise RequestError(str(error), hint=self._hint(error, prompt)) from error

    def _templates_hint(self) -> str:
        alone = [name for name in self._runtime.templates if name in self._tokens.prompts]
        return "give words" + (
            f", or a template that stands alone: {', '.join(alone)}" if alone else ""
        )

    def _hint(self, error: ContractError, prompt: str | Sequence[int]) -> str:
        """Return the error's hint, or the words of the vocabulary that are spelt alike."""
        known = self._tokens.vocabulary
        words = prompt.split() if isinstance(prompt, str) else []
        unknown = [word for word in words if word not in known]
        near = difflib.get_close_matches(shown(unknown[0]), known) if unknown else []
        return f"did you mean {' or '.join(map(repr, near))}?" if near else error.hint
