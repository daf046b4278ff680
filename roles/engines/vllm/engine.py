"""The vllm engine in its worker process: one policy to sample and to score with.

vLLM is given a folder of its own with nothing in it but a ``config.json``, which is written
from the run's signed shape: a policy's own might name another architecture, code to run, or
another length. Weights come in by `OpenWeights`.

Every completion is a request of its own, which enters vLLM's scheduler when it is submitted and
leaves it when it has ended; vLLM takes its steps inside `advance`, and inside `score`, which
returns when nothing is left. Weights change only while there is no request: no completion is
written by two policies. The cache of prompts, which the completions of a group share, is
emptied with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, NoReturn

from roles.engines.base import (
    Answers,
    EngineError,
    EngineUnusable,
    Group,
    GroupTask,
    Placement,
    Row,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
    check_numbers,
)
from roles.engines.config import ROWS, EngineConfig
from roles.engines.hardware import threads_of
from roles.engines.vllm import requirements
from roles.engines.vllm.extension import SLOT
from roles.models.bundle import CONFIG
from roles.models.config import ModelConfig, write_config

EXTENSION: Final = "roles.engines.vllm.extension.ShoalExtension"
"""Class that vLLM mixes into its workers."""

BLOCK: Final = 32
"""Tokens of a block of the cache. The completions of a group share the whole blocks of their
prompt: with vLLM's 128 on CPUs a prompt of 100 tokens would be read 16 times for a group of 16.
A multiple of 32 is what its CPU kernels ask for, GPUs take any of 16."""


@dataclass(slots=True, init=False)
class _Requests:
    """Open requests of a group with completions that have not ended."""

    task: GroupTask
    slots: list[int]
    missing: int

    def __init__(self, task: GroupTask, slots: list[int]) -> None:
        self.task, self.slots, self.missing = task, slots, len(slots)


class VllmEngine:
    """Implements `roles.engines.worker.LocalEngine` except for training."""

    def __init__(self, config: EngineConfig) -> None:
        requirements.prepare()
        requirements.check_run(config)
        self._config = config
        self._vllm: Any = None
        self._is_loaded = False
        self._slots = itertools.count()
        self._under_way: dict[str, _Requests] = {}  # by the names of requests
        self._sampling: Sampling | None = None

    def placement(self) -> Placement:
        device = "cpu" if requirements.is_for_cpu() else "cuda"
        return Placement("vllm", device, threads_of(self._config))

    def load(self, weights: str) -> None:
        if not Path(weights).exists():
            raise FileNotFoundError(f"there are no weights at {weights}")
        if self._vllm is None:
            self._vllm = self._open()
        if self._vllm.llm_engine.has_unfinished_requests():
            raise EngineError(
                "groups are under way, and would be written by two policies: draw them to their"
                " end, or drop them, before other weights are loaded"
            )
        self._is_loaded = False  # unless all of it succeeds
        self._tell("shoal_load", weights)
        if not self._vllm.reset_prefix_cache():
            raise EngineUnusable("vLLM kept states of the policy before")
        self._is_loaded = True

    @property
    def has_room(self) -> bool:
        return len(self._under_way) < ROWS

    def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        self._check(tasks, sampling)
        check_numbers(tasks, {group.task.group for group in self._under_way.values()})
        if self._under_way and sampling != self._sampling:
            raise EngineError(
                f"groups that are sampled by {self._sampling} are under way: none by {sampling}"
                " can be drawn beside them"
            )
        self._sampling = sampling
        groups = [_Requests(task, [next(self._slots) for _ in task.seeds]) for task in tasks]
        rows = [(slot, one.task.prompt) for one in groups for slot in one.slots]
        if not rows:
            return
        slots, prompts = [slot for slot, _ in rows], [prompt for _, prompt in rows]
        starts = [len(prompt) - 1 for prompt in prompts]
        seeds = [seed for task in tasks for seed in task.seeds]
        self._tell("shoal_draw", slots, starts, seeds, sampling)
        self._enqueue(slots, prompts, sampling.max_new_tokens)
        self._under_way |= {str(slot): one for one in groups for slot in one.slots}

    def advance(self, seconds: float) -> list[Group]:
        end, ended = perf_counter() + seconds, list[_Requests]()
        while self._under_way:
            for output in self._vllm.llm_engine.step():
                group = self._under_way.pop(output.request_id)
                group.missing -= 1
                ended += [group] if not group.missing else []
            if perf_counter() >= end:
                break
        slots = [slot for one in ended for slot in one.slots]
        completions = iter(self._tell("shoal_completions", slots) if slots else ())
        return [
            Group(one.task.group, tuple(islice(completions, len(one.slots)))) for one in ended
        ]

    @property
    def waiting(self) -> list[Row]:
        """Always empty: completions of this engine have one turn."""
        return []

    def hear(self, answers: Sequence[Row]) -> None:
        self._refuse()

    def drop(self) -> None:
        if self._under_way:
            self._vllm.llm_engine.abort_request(list(self._under_way))
            self._under_way.clear()
        if self._vllm is not None:
            self._tell("shoal_forget")

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        rows = [
            (task.prompt, one.tokens)
            for task, group in zip(tasks, groups, strict=True)
            for one in group.completions
        ]
        self._check(tasks, sampling)
        if not rows:
            return []
        if self._under_way:
            raise EngineError("groups are under way: the vllm engine scores when none is")
        starts, counts = [len(prompt) - 1 for prompt, _ in rows], [len(t) for _, t in rows]
        self._tell("shoal_replay", starts, counts)
        # nothing follows the last token
        self._run([prompt + tokens[:-1] for prompt, tokens in rows])
        scored: list[Scored] = self._tell("shoal_scored", tasks, groups, sampling)
        return scored

    def open(self, checkpoint: str, base: str = "") -> int:
        self._refuse()

    def adopt(self, weights: str, step: int, base: str = "") -> float:
        self._refuse()

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        self._refuse()

    def save(self, checkpoint: str, weights: str) -> None:
        self._refuse()

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EngineError(
            "the vllm engine samples and scores, it does not train: a trainer's engine is torch"
        )

    def _check(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        """Raise `EngineError` if nothing is loaded, or a prompt leaves too little of the
        context for its answer."""
        if not self._is_loaded:
            raise EngineError("no weights were loaded")
        longest = max((len(task.prompt) for task in tasks), default=0)
        if longest + sampling.max_new_tokens > self._config.context:
            raise EngineError(
                f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones exceed"
                f" the context of {self._config.context}: lower max_new_tokens in [sampling],"
                " or let the environment ask shorter questions"
            )

    def _open(self) -> Any:
        """Start vLLM with random weights, which `load` replaces."""
        from vllm import LLM

        config, options = self._config, self._config.vllm
        model = ModelConfig(shape=config.shape, context=config.context + 1)
        with TemporaryDirectory(prefix="shoal-vllm-") as folder:
            (Path(folder) / CONFIG).write_bytes(write_config(model))
            vllm = LLM(
                model=folder,
                skip_tokenizer_init=True,
                generation_config="vllm",
                load_format="dummy",
                dtype=config.dtype.value,
                max_model_len=model.context,
                max_num_seqs=ROWS,
                kv_cache_memory_bytes=options.cache,
                tensor_parallel_size=options.tensor_parallel,
                distributed_executor_backend="uni" if options.tensor_parallel == 1 else "mp",
                enforce_eager=options.eager,
                async_scheduling=False,
                enable_prefix_caching=True,
                block_size=BLOCK,
                worker_extension_cls=EXTENSION,
                disable_log_stats=True,
                seed=0,
            )
        self._vllm = vllm
        self._tell("shoal_attach", config)
        return vllm

    def _run(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Run these prompts alone, to the end; the extension keeps its recordings."""
        self._enqueue(range(len(prompts)), prompts, 1)
        while self._vllm.llm_engine.has_unfinished_requests():
            self._vllm.llm_engine.step()

    def _enqueue(
        self, slots: Sequence[int], prompts: Sequence[tuple[int, ...]], limit: int
    ) -> None:
        """Begin requests, each named by the number of its slot."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        is_replay = limit == 1
        for slot, prompt in zip(slots, prompts, strict=True):
            parameters = SamplingParams(
                temperature=0.0,  # the hook leaves one token to take
                max_tokens=limit,
                ignore_eos=True,
                stop_token_ids=list(self._config.end_tokens),
                detokenize=False,
                skip_reading_prefix_cache=is_replay,  # each state must be computed
                extra_args={SLOT: slot},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            text = TokensPrompt(prompt_token_ids=list(prompt))
            self._vllm.llm_engine.add_request(str(slot), text, parameters)

    def _tell(self, method: str, *arguments: object) -> Any:
        """Call the extension in every worker, and return the answer of rank 0."""
        return self._vllm.collective_rpc(method, args=arguments)[0]
