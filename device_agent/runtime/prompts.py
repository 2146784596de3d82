"""What a developer writes as a prompt, in tokens of the model: words in a template, or bare ids.

Pure; `Session.generate` calls it. What the model does not know is refused with a hint: its
templates, or its words that are spelt alike.
"""

import difflib
import operator
from collections.abc import Sequence
from typing import Final

from compiler.contract.errors import ContractError
from compiler.contract.pipeline import PREFIX, TokenSpec, shown
from device_agent.errors import RequestError

QUESTION: Final = "question"
"""The template around words, where the bundle has it."""
PLAIN: Final = ""
"""The template of a prompt that stands alone."""
_SHOWN_BITS: Final = 64


def templates_of(tokens: TokenSpec) -> tuple[str, ...]:
    """Return names of the prompts that words go into, and of those that stand alone."""
    names = (name.removesuffix(PREFIX) for name in tokens.prompts)
    return tuple(sorted({name for name in names if not name.endswith("_suffix")}))


def prompt_ids(tokens: TokenSpec, prompt: str | Sequence[int], template: str | None) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        tokens: Words and templates of the model.
        prompt: Words with white space between them, or token ids, which no template goes around.
        template: Name of the prompt around the words; empty = none; None = `question` where the
            bundle has it.

    Raises:
        RequestError: The model has no such word, id or template, or nothing was asked.
    """
    try:
        if not isinstance(prompt, str):
            return require_ids(prompt, tokens)
        words, templates = prompt.split(), templates_of(tokens)
        if template is None:
            template = QUESTION if QUESTION in templates else PLAIN
        if template not in (PLAIN, *templates):
            known = ", ".join(templates) or "none"
            raise RequestError(f"no prompt {shown(template)!r}", hint=f"prompts: {known}")
        if not words and template not in tokens.prompts:
            raise RequestError("nothing was asked", hint=_templates_hint(tokens))
        return tokens.ids(words) if template == PLAIN else tokens.prompt(template, words)
    except ContractError as error:
        raise RequestError(str(error), hint=_hint(tokens, error, prompt)) from error


def require_ids(prompt: Sequence[int], tokens: TokenSpec) -> list[int]:
    """Return a prompt of token ids as it is.

    Raises:
        ContractError: One is no whole number, or not in the vocabulary.
    """
    hint = f"ids are 0 to {len(tokens.vocabulary) - 1}"
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise ContractError(f"a prompt that holds no token ids: {error}", hint=hint) from error
    for at, token in enumerate(ids):
        if not 0 <= token < len(tokens.vocabulary):
            name = token if token.bit_length() <= _SHOWN_BITS else f"number {at}"
            raise ContractError(f"token {name} is outside the vocabulary", hint=hint)
    return ids


def _templates_hint(tokens: TokenSpec) -> str:
    alone = [name for name in templates_of(tokens) if name in tokens.prompts]
    return "give words" + (
        f", or a template that stands alone: {', '.join(alone)}" if alone else ""
    )


def _hint(tokens: TokenSpec, error: ContractError, prompt: str | Sequence[int]) -> str:
    """Return the error's hint, or the words of the vocabulary that are spelt alike."""
    words = prompt.split() if isinstance(prompt, str) else []
    unknown = [word for word in words if word not in tokens.vocabulary]
    near = difflib.get_close_matches(shown(unknown[0]), tokens.vocabulary) if unknown else []
    return f"did you mean {' or '.join(map(repr, near))}?" if near else error.hint
