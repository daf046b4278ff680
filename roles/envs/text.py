"""Environments of text: a question in a conversation, an answer as text, a reward.

Theory of operation
-------------------
Nodes exchange tokens, engines know tokens, proofs are about tokens; an author of tasks wants to
write text. So an author writes a `TextEnvironment`, which knows no tokenizer, and
`TokenizedEnvironment` makes of it, for the model of a run, what `roles.envs.base.Environment`
asks: the chat template and the tokenizer make the prompt, the completion without its end token
becomes the text that is paid. All of it runs in the contained process of the environment
(`roles.envs.worker`): the run's owner wrote the template, strangers wrote the completions.

A reward is computed in another call than its task, perhaps by another process: the text of a
task travels beside its tokens, packed (`Task.source`).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, Protocol, TypeGuard

import trio

from p2p.errors import BadMessage
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted
from roles.envs.answers import open_thought
from roles.envs.base import Task
from roles.envs.contained import EnvironmentFailed

MAX_MESSAGES: Final = 64
"""Messages of one task. A question has one or two; examples of a dozen turns leave room."""
MAX_SOURCE: Final = 256 * KI
"""Bytes of a packed task: 64,000 tokens of four bytes. Those of a submission of 64 groups take
16 MiB at most on their way through a pipe of 64."""
DRAWS: Final = 16
"""Tasks that are drawn for one seed before an environment whose prompts are too long is said to
fail: where one question in ten is too long, that has a probability of 10^-16."""
_MAX_ITEMS: Final = 4 * MAX_MESSAGES + 16
"""Items of a packed task: a list, a role and a content for each message, and what is around."""
LENGTH_DOMAIN: Final = b"/shoal/length/1.0.0"
"""Prefix of the hash of the length target: the target is independent of what an environment
draws from the same seed.
"""
OPENING: Final = 16
"""Tokens at the end of a prompt in which a chat template may begin the model's thought."""
HELD_OUT_BELOW: Final = 32
"""A question is held out if the first byte of its sha256 is below this: one in eight."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """Role as chat templates name it: ``system``, ``user`` or ``assistant``."""

    content: str
    """Words of the message."""


@dataclass(frozen=True, slots=True)
class TextTask:
    """A question, and the data from which a reward is computed."""

    messages: tuple[Message, ...]
    """The conversation; the model speaks next."""

    prefill: str
    """Beginning of the model's turn, where it goes on. ``27 + 82 =`` spares a small model the
    words that it was taught to say around an answer.
    """

    answer: str
    """The right answer. No model sees it."""

    info: str = ""
    """Whatever else the environment wants to find again when it computes the reward."""

    kind: str = ""
    """Name under which the task is counted in evaluations; empty if there is only one kind."""

    length: int = 0
    """Tokens that the prompt asks for; 0: none. Set by `LengthTargets` alone."""


@dataclass(frozen=True, slots=True)
class LengthTargets:
    """Length rewards as in INTELLECT-2 (arXiv 2505.07291, section 4.1): the prompt names a
    number of tokens, and the reward falls with the distance from it."""

    targets: tuple[int, ...]
    """Target lengths in tokens; a task takes one by its number."""

    penalty: float
    """Subtracted from the reward for each token of distance."""

    def asked(self, task: TextTask, number: int) -> TextTask:
        """Return ``task`` with a target in its last message of the user."""
        length = self.targets[number % len(self.targets)]
        messages = list(task.messages)
        at = max((i for i, one in enumerate(messages) if one.role == "user"), default=None)
        ask = f"Think for {length} tokens before giving a response."
        if at is None:
            messages.append(Message("user", ask))
        else:
            messages[at] = Message("user", f"{messages[at].content}\n\n{ask}")
        return replace(task, messages=tuple(messages), length=length)

    def paid(self, reward: float, length: int, tokens: int) -> float:
        """Return ``reward``, from 0 to 1, less the length penalty for ``tokens``.

        A number outside of 0 to 1 is the environment's fault, and is returned unchanged for the
        caller to see.
        """
        if not 0.0 <= reward <= 1.0:
            return reward
        return max(0.0, reward - self.penalty * abs(length - tokens))


class TextEnvironment(Protocol):
    """A source of questions and a checker of answers, in text.

    Implementations are deterministic and hold no state: every node computes the same. That
    ``reward`` is ``async`` tells them from environments of tokens. An author may derive from
    this class, or not.
    """

    name: str
    """Name of the environment in the run file."""

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        """Return the task of a seed of 32 bytes; ``held_out`` draws from tasks that are never
        trained on.
        """
        ...

    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        """Return the reward of a completion, 0 to 1, whatever the text: a stranger wrote it.

        ``text`` is what the model said behind the prefill, with its thoughts, whose beginning
        is there also where the chat template wrote it (`roles.envs.answers.spoken` leaves them
        out). ``ended`` says that the model stopped by itself, before the limit.
        """
        ...

    def evaluation(self) -> list[TextTask]:
        """Return the fixed held-out tasks that progress is measured on."""
        ...


class TurnTextEnvironment(Protocol):
    """A conversation: the model speaks, the environment answers, until it ends the completion.

    All three methods are functions of their arguments, which strangers call again. ``said`` is
    what the model said so far, turn by turn, as `TextEnvironment.reward` has its text.
    """

    name: str

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask: ...

    async def respond(self, task: TextTask, said: Sequence[str]) -> str | None:
        """Return the environment's next words to the model, as a user; None ends the
        completion.
        """
        ...

    async def reward(self, task: TextTask, said: Sequence[str], ended: bool) -> float:
        """Return the reward of the completion, 0 to 1; ``ended`` if the model ended its last
        turn.
        """
        ...

    def evaluation(self) -> list[TextTask]: ...


class Tail(Protocol):
    """The part of `roles.models.tokenizer.Tail` that environments use."""

    @property
    def foot(self) -> str: ...

    def tokens(self, words: str, room: int) -> tuple[int, ...] | None: ...


class ChatTokenizer(Protocol):
    """The part of `roles.models.tokenizer.Tokenizer` that environments use."""

    def tail(self, end_tokens: Collection[int]) -> Tail:
        """Return the way in which a conversation goes on when somebody answers the model."""
        ...

    def require(self, tokens: Iterable[int]) -> None:
        """Check that the tokenizer has all of ``tokens``.

        Raises:
            roles.models.errors.BadModel: It lacks one.
        """
        ...

    def chat(self, messages: Sequence[Message], prefill: str = "") -> tuple[int, ...]:
        """Return the prompt of a conversation, up to the place where the model goes on."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """The facts about a run's model that an environment of text needs."""

    folder: str
    """Folder of this machine with the tokenizer. The node has compared its files with the run's
    pins.
    """

    end_tokens: tuple[int, ...]
    """Tokens that each end a completion."""

    vocabulary: int
    """Number of token ids that the model knows, from 0 on."""

    context: int
    """Tokens of the model's context, prompt and completion together."""

    max_new_tokens: int
    """Most tokens of a completion, which are part of the context."""


class PromptTooLong(ValueError):
    """A prompt leaves no room for a completion in the model's context; the message has the
    numbers."""


def is_text(environment: object) -> TypeGuard[TextEnvironment]:
    """Return True if an environment is one of text: its reward is ``async``."""
    return inspect.iscoroutinefunction(getattr(environment, "reward", None))


def is_turns(environment: object) -> TypeGuard[TurnTextEnvironment]:
    """Return True if an environment of text answers the model."""
    return is_text(environment) and hasattr(environment, "respond")


def is_held_out(question: str) -> bool:
    """Return True if a question belongs to the eighth that is never trained on, by its hash."""
    return hashlib.sha256(question.encode()).digest()[0] < HELD_OUT_BELOW


def pack_text_task(task: TextTask) -> bytes:
    """Return a task as bytes for `Task.source`.

    Raises:
        ValueError: It is larger than a task may be.
    """
    if len(task.messages) > MAX_MESSAGES:
        raise ValueError(
            f"a task has {len(task.messages)} messages, over the limit of {MAX_MESSAGES}"
        )
    turns = [list(astuple(message)) for message in task.messages]
    source = pack([turns, task.prefill, task.answer, task.info, task.kind, task.length])
    if len(source) > MAX_SOURCE:
        raise ValueError(
            f"a task takes {len(source):,} bytes, over the limit of {MAX_SOURCE:,}"
        )
    return source


def unpack_text_task_untrusted(source: bytes) -> TextTask:
    """Return the task that `pack_text_task` packed.

    Raises:
        BadMessage: The bytes are no task. Nothing else is raised, whatever the bytes.
    """
    if len(source) > MAX_SOURCE:
        raise BadMessage(f"a task of {len(source):,} bytes is over the limit of {MAX_SOURCE:,}")
    turns, *rest = fields_untrusted(
        unpack_untrusted(source, max_items=_MAX_ITEMS),
        list, str, str, str, str, int, what="task of text",
    )  # fmt: skip
    if len(turns) > MAX_MESSAGES:
        raise BadMessage(f"a task of {len(turns)} messages is over the limit of {MAX_MESSAGES}")
    messages = (fields_untrusted(turn, str, str, what="message") for turn in turns)
    return TextTask(tuple(Message(*message) for message in messages), *rest)


class TokenizedEnvironment:
    """Wraps an environment of text as one of tokens, for one model."""

    def __init__(
        self,
        environment: TextEnvironment,
        tokenizer: ChatTokenizer,
        model: TextModel,
        lengths: LengthTargets | None = None,
    ) -> None:
        """Wrap ``environment``.

        Raises:
            roles.models.errors.BadModel: The tokenizer lacks an end token.
        """
        tokenizer.require(model.end_tokens)
        self._foot = ""
        """Text that the model reads before a later turn."""
        self.name = environment.name
        self._environment = environment
        self._tokenizer = tokenizer
        self._model = model
        self._lengths = lengths

    def task(self, seed: bytes, *, held_out: bool = False) -> Task:
        """Return the task of ``seed``; if its prompt is too long, of the seed's SHA-256, and so
        on.

        Raises ValueError, with the numbers, if `DRAWS` in a row are. Without the other draws
        one long question in a file of thousands would stop each node whose turn it is until the
        next policy, and if it stopped all, for good.
        """
        for _ in range(DRAWS - 1):
            try:
                return self._drawn(seed, held_out)
            except PromptTooLong:
                seed = hashlib.sha256(seed).digest()
        return self._drawn(seed, held_out)

    def evaluation(self) -> list[Task]:
        """Return the held-out tasks whose prompts are not too long.

        Raises:
            ValueError: All prompts are too long.
        """
        tasks, errors = [], []
        for number, task in enumerate(self._environment.evaluation()):
            try:
                tasks.append(self._tokenized(task, number))
            except PromptTooLong as error:
                errors.append(error)
        if errors and not tasks:
            raise errors[0]
        return tasks

    def reward(self, task: Task, tokens: Sequence[int]) -> float:
        """Pay for the text of ``tokens``, their end token left out. Not within a running trio.

        An event loop for each reward takes 0.25 ms, and what a reward leaves running in its own
        nursery ends with it.
        """
        ended = bool(tokens) and tokens[-1] in self._model.end_tokens
        source = self._source(task)
        paid = trio.run(self._environment.reward, source, self._words(task, tokens), ended)
        if self._lengths is None:
            return paid
        return self._lengths.paid(paid, source.length, len(tokens))

    def _source(self, task: Task) -> TextTask:
        try:
            return unpack_text_task_untrusted(task.source)
        except BadMessage as error:
            raise EnvironmentFailed(
                f"a task of the environment {self.name!r} comes back as none: {error}"
            ) from error

    def _words(self, task: Task, tokens: Sequence[int]) -> Any:
        """Return the completion's text as an author's ``reward`` gets it."""
        return self._turns(task, tokens)[0]

    def _turns(self, task: Task, tokens: Sequence[int]) -> list[str]:
        """Return the text of each turn, without its end token; one at least."""
        said, turn = list[str](), list[int]()
        opening = self._tokenizer.decode(task.prompt[-OPENING:])
        for token in tokens:
            if token in self._model.end_tokens:
                said.append(open_thought(opening) + self._tokenizer.decode(turn))
                opening, turn = self._foot, []
            else:
                turn.append(token)
        if turn or not said:
            said.append(open_thought(opening) + self._tokenizer.decode(turn))
        return said

    def expect(self, method: str, answers: Sequence[tuple[Task, Sequence[Any]]]) -> None:
        """Let the environment prepare ``reward`` or ``respond`` of all these completions."""
        if hasattr(self._environment, "expect") and hasattr(self._environment, method):
            self._environment.expect(
                call
                for task, given in answers
                for tokens in given
                for call in self._calls(method, self._source(task), task, tokens)
            )

    def _calls(
        self, method: str, source: TextTask, task: Task, tokens: Sequence[int]
    ) -> list[tuple[Any, ...]]:
        words = self._words(task, tokens)
        ends = [token in self._model.end_tokens for token in tokens]
        if method == "respond":
            return [(method, source, words[:turn]) for turn in range(1, sum(ends) + 1)]
        return [(method, source, words, ends[-1:] == [True])]

    @property
    def plain(self) -> TextEnvironment:
        """The environment of text that this one wraps."""
        return self._environment

    def text(self, task: Task, tokens: Sequence[int]) -> str:
        """Return ``tokens`` as people read them."""
        return self._tokenizer.decode(tokens)

    def _drawn(self, seed: bytes, held_out: bool) -> Task:
        number = int.from_bytes(hashlib.sha256(LENGTH_DOMAIN + seed).digest()[:8], "big")
        return self._tokenized(self._environment.task(seed, held_out=held_out), number)

    def _tokenized(self, task: TextTask, number: int) -> Task:
        """Convert a task of text to a task of tokens.

        Raises:
            PromptTooLong: Its prompt leaves no room for a completion.
            ValueError: The template makes no prompt, or one with tokens that the model lacks.
        """
        model = self._model
        if self._lengths is not None:
            task = self._lengths.asked(task, number)
        prompt = tuple(self._tokenizer.chat(task.messages, task.prefill))
        if not prompt:
            raise ValueError("the chat template makes no prompt of the task's messages")
        if len(prompt) + model.max_new_tokens > model.context:
            raise PromptTooLong(
                f"the prompt of a task is {len(prompt):,} tokens long; with"
                f" {model.max_new_tokens:,} new ones that is over the model's context of"
                f" {model.context:,}: make shorter tasks, or lower max_new_tokens in [sampling]"
            )
        if max(prompt) >= model.vocabulary:
            raise ValueError(
                f"the tokenizer makes token {max(prompt)}, the model knows 0 to"
                f" {model.vocabulary - 1}: the run pins the tokenizer of another model"
            )
        return Task(prompt, (), source=pack_text_task(task), kind=task.kind)


class TokenizedTurns(TokenizedEnvironment):
    """Wraps a conversation as an environment of tokens (`roles.envs.base.TurnEnvironment`)."""

    def __init__(
        self,
        environment: TurnTextEnvironment,
        tokenizer: ChatTokenizer,
        model: TextModel,
        lengths: LengthTargets | None = None,
    ) -> None:
        """Wrap ``environment``.

        Raises:
            roles.models.errors.BadModel: The chat template cannot carry turns.
        """
        untyped: Any = environment
        super().__init__(untyped, tokenizer, model, lengths)
        self._talks = environment
        self._tail = tokenizer.tail(model.end_tokens)
        self._foot = self._tail.foot

    def respond(self, task: Task, tokens: Sequence[int], room: int) -> Sequence[int] | None:
        """Return the environment's next tokens. Like `reward`, call it outside a running
        trio.
        """
        said = self._words(task, tokens)
        words = trio.run(self._talks.respond, self._source(task), said)
        return None if words is None else self._tail.tokens(words, room)

    def _words(self, task: Task, tokens: Sequence[int]) -> Any:
        return tuple(self._turns(task, tokens))
