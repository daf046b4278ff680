"""Does a policy learn to use turns? One environment in one process, with the production's
sampler, environment and learner.

``python -m bench turns NAME [--model DIR] [--seed 0] [--minutes 25] [--turns N] [...]``

The network of 105,088 parameters plays ``guess``, and ``calculator`` with a tokenizer of its
own; with ``--model`` that model plays. ``--turns 1`` is the control: the same budget, and
nobody answers. The warm-up of ``calculator`` shows products that are said at once, and few
(`CALLS`) that are asked of the calculator, which alone gets large ones right: that it pays has
to be found out.

An evaluation prints the held-out reward, greedy and at the sampling temperature, the part of
both that was earned in a single turn, the share of groups since the last evaluation whose
rewards are not all alike, and minutes. The run ends after ``--steps``, or with the evaluation
after ``--minutes`` of wall time.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final

from tokenizers import Tokenizer as Core, decoders, models, pre_tokenizers, trainers

from bench.alone import NO_CHECKPOINT, Alone
from proofs.sampling import DrawRule
from roles.contract.core.shape import Dtype
from roles.engines.base import EngineError
from roles.engines.config import EngineConfig
from roles.envs.base import Task, TurnLimits
from roles.envs.calculator import CalculatorEnvironment
from roles.envs.data import pin_data
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.envs.text import TextModel, TokenizedTurns, unpack_text_task_untrusted
from roles.models.bundle import read_config
from roles.models.tokenizer import CHAT_TEMPLATE, TOKENIZER_CONFIG, Tokenizer
from roles.own.draft import NUMBERS, fit
from roles.rl.learner import WarmUp
from roles.rl.recipes import NETWORK, SMALL_MODEL, SORTER

CALLS: Final = 0.125
"""Share of the first turns of a warm-up that ask the calculator."""
SETTINGS: Final = (
    "steps", "turns", "heard", "max_new_tokens", "group_size", "lag", "temperature",
)  # fmt: skip
CALL: Final = re.compile("<calc>.*?</calc>")
LEARNING: Final = ("rate", "groups", "minibatches")
TEMPLATE: Final = (
    "{% for one in messages %}<|start|>{{ one.role }} {{ one.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)


def run(args: list[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench turns")
    parser.add_argument("name", help="the environment")
    parser.add_argument("--model", type=Path, help="a model's folder")
    parser.add_argument("--data", type=Path, help="the file that the environment reads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--at-once", type=int, default=64, help="tasks drawn at a time")
    parser.add_argument("--questions", type=int, default=0, help="held-out tasks; 0: all")
    parser.add_argument("--warm-up", type=int, help="supervised steps")
    for name in (*SETTINGS, *LEARNING):
        kind = float if name in ("rate", "temperature") else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    options = parser.parse_args(args)
    if options.model is None and options.name not in (*NUMBERS, "calculator"):
        parser.error(f"{options.name} is of text: add --model, a folder with a model")
    with TemporaryDirectory() as folder:
        return follow(options, options.model or Path(folder))


def follow(options: argparse.Namespace, folder: Path) -> int:
    """Learn, and print each evaluation."""
    if options.name == "calculator" and options.model is None:
        write_tokenizer(folder)
    config, setup = read_options(options, folder)
    wall, cpu = time.perf_counter(), time.process_time()
    alone = Alone(config, setup=setup, base=options.model, at_once=options.at_once)
    alone.learner.open(NO_CHECKPOINT, options.model)
    talks = alone.environment.environments[options.name]
    if options.warm_up and isinstance(talks, TokenizedTurns):
        recipe = WarmUp(steps=options.warm_up, rate=4e-3)
        if options.model is not None:
            recipe = replace(recipe, rate=1e-4, batch=16, ramp=5)
        teacher: Any = Teacher(talks, Tokenizer.open(folder))
        alone.learner._warm_up(teacher, recipe)
    drawn = unlike = 0
    for step in range(config.sampling.steps + 1):
        minutes = (time.perf_counter() - wall) / 60
        is_last = step == config.sampling.steps or minutes > options.minutes
        course = alone.course
        if step % options.every == 0 or is_last:
            result = alone.evaluate()
            (at_once, turns), (drawn_at_once, drawn_turns) = alone.turns.values()
            spread = (course.unlike - unlike) / max(1, course.tasks - drawn)
            drawn, unlike = course.tasks, course.unlike
            last = course.reports[-1] if course.reports else None
            print(
                f"{options.name} seed {options.seed} step {step}: greedy {result.greedy:.3f}"
                f" ({at_once:.3f} in one turn, turns {turns:.2f}), sampled"
                f" {result.sampled:.3f} ({drawn_at_once:.3f}, {drawn_turns:.2f}); groups not"
                f" alike {spread:.2f}"
                + (f", entropy {last.entropy:.3f}, k3 {last.k3:.3f}" if last else "")
                + f"; {(time.perf_counter() - wall) / 60:.1f} min,"
                f" CPU {(time.process_time() - cpu) / 60:.1f} min",
                flush=True,
            )
        if is_last:
            break
        try:
            alone.step()
        except EngineError as error:  # no group whose rewards differ
            print(f"step {step + 1}: {error}", flush=True)
            break
    return 0


def read_options(
    options: argparse.Namespace, folder: Path
) -> tuple[EngineConfig, EnvironmentSetup]:
    """Return the engine and the environment, by the recipe of the model's kind and the
    options. ``folder`` has the tokenizer, if the environment is one of text."""
    chosen = {key: value for key, value in vars(options).items() if value is not None}
    kind = NETWORK if options.model is None else SMALL_MODEL
    is_text = options.name not in NUMBERS
    usual = fit(kind, [options.name])
    if is_text and options.model is None:
        usual = replace(usual, max_new_tokens=48)
    if options.turns == 1:
        chosen["heard"] = 0
    sampling = replace(usual, **{key: chosen[key] for key in SETTINGS if key in chosen})
    learner = replace(
        kind.learner,
        evaluate_tasks=options.questions,
        **{key: chosen[key] for key in LEARNING if key in chosen},
    )
    config = EngineConfig(seed=options.seed, sampling=sampling, learner=learner)
    if not is_text:
        if options.warm_up and learner.warm_up:
            learner = replace(learner, warm_up=replace(learner.warm_up, steps=options.warm_up))
        config = replace(config, environment=options.name, learner=learner)
    elif options.model is None:
        tokenizer = Tokenizer.open(folder)
        config = replace(
            config,
            shape=replace(SORTER, vocabulary=tokenizer.vocabulary),
            end_tokens=tuple({end for ends in tokenizer.end_tokens().values() for end in ends}),
            learner=replace(learner, warm_up=None),
            context=512,
        )
    else:
        found = read_config(folder)
        config = replace(
            config,
            shape=found.shape,
            dtype=Dtype.BFLOAT16,
            draw=DrawRule.GUMBEL,
            end_tokens=found.end_tokens,
            context=found.context,
        )
    model = TextModel(
        folder=str(folder),
        end_tokens=config.end_tokens,
        vocabulary=config.shape.vocabulary,
        context=config.context,
        max_new_tokens=sampling.max_new_tokens,
    )
    limits = TurnLimits(
        most=sampling.turns,
        heard=sampling.heard,
        max_new_tokens=sampling.max_new_tokens,
        end_tokens=config.end_tokens,
    )
    data = options.data and pin_data(str(options.data))
    return config, EnvironmentSetup(
        parts=(EnvironmentPart(name=options.name, data=data),),
        model=model if is_text else None,
        folder=str(options.data.parent) if options.data else "",
        turns=limits,
    )


class Teacher:
    """Shows what can be said to a question of ``calculator``: the product at once, a call, and
    the result that was heard. How a call goes on is shown more often than that there is one.
    """

    def __init__(self, talks: TokenizedTurns, tokenizer: Tokenizer) -> None:
        self._talks, self._tokenizer = talks, tokenizer
        (self._end,) = tokenizer.end_tokens()[CHAT_TEMPLATE]

    def warm_up(self, rng: Random, count: int) -> list[Task]:
        return [self._example(rng) for _ in range(count)]

    def _example(self, rng: Random) -> Task:
        task = self._talks.task(rng.randbytes(32))
        plain = unpack_text_task_untrusted(task.source)
        first, *rest = self._said(CALL.findall(plain.messages[0].content)[0])
        match rng.randrange(3):
            case 0:
                is_call = rng.random() < CALLS
                said = (first, *rest) if is_call else self._said(plain.answer)
                return Task(task.prompt, said)
            case 1:
                return Task((*task.prompt, first), tuple(rest))
        heard = self._talks.respond(task, (first, *rest), 96) or ()
        return Task((*task.prompt, first, *rest, *heard), self._said(plain.answer))

    def _said(self, text: str) -> tuple[int, ...]:
        return (*self._tokenizer.encode(text), self._end)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that knows the words of ``calculator`` and each digit, and a chat
    template."""
    core, alphabet = Core(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    questions = [one.messages[0].content for one in CalculatorEnvironment().evaluation()]
    calls = [CALL.findall(question)[0] for question in questions]
    core.train_from_iterator([*questions, *calls, "user ", "assistant "] * 2, trainer)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config))
