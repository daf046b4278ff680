"""``shoal sft MODEL --data FILE -o FOLDER``: teach a model a format before a run rewards it.

It is the owner's own stage and no algorithm of a run: nobody could check that a trainer learnt
from a file that only it has. What comes of it is a model's folder, which the run pins by
digest like any other base. Each answer of a chat is one row behind its conversation, packed
with others by the learner's own packing; the loss is on the tokens of the answer and its end.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from p2p.errors import ConfigError, MissingDependency
from p2p.node.usage import CommandParser, expanded, interruptible, remark, say, whole_number
from roles.engines.base import Completion, TrainingGroup
from roles.envs.text import Message, is_held_out
from roles.models.bundle import read_config
from roles.models.ends import need_end_tokens
from roles.models.errors import BadModel
from roles.models.fetch import base_folder
from roles.own.layout import link_files
from roles.own.tables import as_chat, read_rows
from roles.rl.algorithms.base import Group, Sequences, Tokens

if TYPE_CHECKING:
    from torch import Tensor

    from roles.engines.torch.learner import TorchLearner

TEMPLATE: Final = "chat_template.jinja"
MOST_ROWS: Final = 200_000  # answers that are held in memory
MOST_HELD_OUT: Final = 64  # answers on which the loss is measured
TOLD: Final = 10  # steps between two lines


@dataclass(frozen=True)
class Supervised:
    """Cross-entropy on the given tokens, as an objective of the learner."""

    def advantages(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        return [np.ones(len(one.rewards), np.float32) for one in groups]

    def loss(self, tokens: Tokens, sequences: Sequences) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -tokens.logprobs.sum() / tokens.total, {"nats": -tokens.logprobs.detach()}


def main(argv: Sequence[str] | None = None) -> int:
    """Teach a model a format by a file of chats, before a run rewards it."""
    parser = CommandParser(prog="shoal sft", description=main.__doc__)
    add = parser.add_argument
    add("model", help="smollm2, or a folder in Hugging Face's layout")
    add("--data", type=Path, required=True, metavar="FILE",
        help="chats: JSON lines or Parquet with messages, prompt and completion, or question"
        " and answer")  # fmt: skip
    add("-o", dest="out", type=Path, required=True, metavar="FOLDER", help="a new folder")
    add("--template", type=Path, metavar="FILE", help="a chat template that replaces its own")
    add("--steps", type=whole_number(1, 10**6), metavar="N", help="(once through the file)")
    add(
        "--rows",
        type=whole_number(1, 4096),
        default=16,
        metavar="N",
        help="answers a step (16)",
    )
    add("--rate", type=float, default=2e-5, help="at its peak (2e-5)")
    add("--length", type=whole_number(8, 32_768), default=1024, metavar="N",
        help="tokens of a row; longer ones are left out (1024)")  # fmt: skip
    add("--device", default="auto", help="cpu, cuda ... (auto)")
    add("--threads", type=whole_number(0, 4096), default=0, metavar="N", help="(all cores)")
    return interruptible(lambda: _main(parser.parse_args(argv)))


def _main(options: argparse.Namespace) -> int:
    target: Path = expanded(options.out).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"-o {target}: it exists already; name a new folder")
    if not 0 < options.rate < 1:
        raise ConfigError(f"--rate must be above 0 and below 1, not {options.rate:g}")
    source = base_folder(options.model, "MODEL")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".sft-", dir=target.parent) as place:
            base = Path(place)
            base.chmod(0o755)  # a sandbox reads the tokenizer as somebody else
            link_files(source, base)
            if options.template is not None:
                (base / TEMPLATE).unlink(missing_ok=True)
                shutil.copyfile(expanded(options.template), base / TEMPLATE)
            _teach(options, base, target)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    except BadModel as error:
        raise ConfigError(f"{source}: {error}") from error
    say(f"{target}")
    say(f"shoal run init DIR --model {target}")
    return 0


def _teach(options: argparse.Namespace, base: Path, target: Path) -> None:
    try:
        import torch

        from roles.engines.torch.learner import TorchLearner
    except ImportError:
        raise MissingDependency(
            "shoal sft needs torch: pip install 'shoal[torch,hf]'"
        ) from None
    from roles.contract.core.sampling import SamplingTerms
    from roles.engines.config import EngineConfig
    from roles.engines.torch.device import find_device
    from roles.rl.algorithms.find import Objective
    from roles.rl.learner import LearnerConfig, Schedule

    described = read_config(base)
    ends = need_end_tokens(base, described).tokens
    taught, held = read_lessons(expanded(options.data), base, ends[0], options.length)
    steps = options.steps or -(-len(taught) // options.rows)
    device = find_device(options.device)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    rules = LearnerConfig(
        rate=options.rate, groups=options.rows, schedule=Schedule.COSINE,
        ramp=max(1, steps // 20), betas=(0.9, 0.95), weight_decay=0.01,
    )  # fmt: skip
    sampling = SamplingTerms(steps=steps, group_size=2, max_new_tokens=options.length)
    learner = TorchLearner(
        EngineConfig(
            shape=described.shape, sampling=sampling, learner=rules, end_tokens=ends,
            environment=None, device=str(device), context=described.context,
        ),
        device,
    )  # fmt: skip
    learner.objective = Objective("sft", Supervised())
    learner.open(base / "no checkpoint", base)
    before = measure(learner, held)
    rng, order, start = Random(0), list[int](), time.monotonic()  # noqa: TID251 - a person's tool
    tokens = 0
    for step in range(1, steps + 1):
        if len(order) < options.rows:
            order += rng.sample(range(len(taught)), len(taught))
        batch, order = order[: options.rows], order[options.rows :]
        report = learner.step([taught[at] for at in batch])
        tokens += report.tokens
        if step % TOLD == 0 or step == steps:
            past = time.monotonic() - start  # noqa: TID251
            remark(
                f"step {step:,} of {steps:,}, loss {report.metrics['nats']:.3f} nats a token,"
                f" {tokens / past:,.0f} tokens a second"
            )
    after = measure(learner, held)
    say(
        f"held-out loss    {before:.3f} to {after:.3f} nats a token, {len(held)} answers\n"
        f"learnt           {steps:,} steps, {tokens:,} tokens of answers"
    )
    learner.save(None, target)


def measure(learner: TorchLearner, held: Sequence[TrainingGroup]) -> float:
    """Return the mean loss of the tokens of answers, in nats."""
    from roles.engines.torch.gradient import learning_batches, old_log_probs

    ones = [np.ones(1, np.float32)] * len(held)
    batches = learning_batches(held, ones, device=learner.model.device)
    sums = [float(old_log_probs(learner.model, one, 1.0).sum()) for one in batches]
    return -math.fsum(sums) / sum(map(len, batches))


def read_lessons(
    path: Path, base: Path, end: int, most: int
) -> tuple[list[TrainingGroup], list[TrainingGroup]]:
    """Return the lessons and the held-out lessons: a group of one for each answer of each chat.

    Raises:
        ConfigError: A row is no chat, or too few are left.
    """
    from roles.models.tokenizer import Tokenizer
    from roles.models.trial import try_tokenizer

    try_tokenizer(base, (end,))  # in a process of its own: it may end that
    tokenizer = Tokenizer.open(base)
    taught, held, long = list[TrainingGroup](), list[TrainingGroup](), 0
    for place, row in read_rows(path):
        try:
            turns = [Message(**turn) for turn in as_chat(row)["messages"]]
        except ValueError as error:
            raise ConfigError(f"{path}: {place} {error}") from None
        side = held if is_held_out(turns[0].content) and len(held) < MOST_HELD_OUT else taught
        for lesson in _lessons(turns, tokenizer, end):
            if len(lesson.prompt) + len(lesson.completions[0].tokens) > most:
                long += 1
            else:
                side.append(lesson)
        if len(taught) > MOST_ROWS:
            raise ConfigError(f"{path} has over {MOST_ROWS:,} answers: give a part of it")
    if long:
        remark(
            f"{long:,} answers are longer than --length {most:,} with their prompt: left out"
        )
    if not taught or not held:
        raise ConfigError(
            f"{path} has {len(taught)} answers to learn from and {len(held)} held out: one chat"
            " in eight is held out by its hash, and each side needs at least one"
        )
    return taught, held


def _lessons(turns: Sequence[Message], tokenizer: Any, end: int) -> Iterator[TrainingGroup]:
    for at, turn in enumerate(turns):
        if turn.role != "assistant" or not at:
            continue
        before = tokenizer.render(turns[:at])
        said = tokenizer.encode_behind(before, turn.content)
        if tokenizer.decode(said) != turn.content:  # a token reaches over the border
            said = tokenizer.encode(turn.content)
        said = (*said, end)
        answer = Completion(said, (0.0,) * len(said))
        yield TrainingGroup(tokenizer.encode(before), (answer,), (1.0,))
