"""The vllm engine in its worker process: one policy to sample and to score with.

vLLM is given a folder of its own with nothing in it but a ``config.json``, which is written
from the run's signed shape: a policy's own might name another architecture, code to run, or
another length. Weights come in by `OpenWeights`.

A batch is drained before `generate` and `score` return, and so before weights change: no
completion is written by two policies. The cache of prompts, which the completions of a group
share, is emptied with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

from p2p.errors import ConfigError
from roles.engines.base import (
    Answers,
    Completion,
    EngineError,
    EngineUnusable,
    Group,
    GroupTask,
    Sampling,
    Scored,
    StepReport,
    TrainingGroup,
)
from roles.engines.config import ROWS, EngineConfig, Family
from roles.engines.vllm import requirements
from roles.engines.vllm.extension import SLOT
from roles.models.bundle import CONFIG
from roles.models.config import ModelConfig, write_config

EXTENSION: Final = "roles.engines.vllm.extension.ShoalExtension"
"""What vLLM mixes into its workers."""

BLOCK: Final = 32
"""Tokens of a block of the cache. The completions of a group share the whole blocks of their
prompt: with vLLM's 128 on CPUs a prompt of 100 tokens would be read 16 times for a group of 16.
A multiple of 32 is what its CPU kernels ask for, GPUs take any of 16."""


class VllmEngine:
    """Implements `roles.engines.worker.LocalEngine`, but for training."""

    def __init__(self, config: EngineConfig) -> None:
        requirements.prepare()
        shape = config.shape
        if shape.family is Family.QWEN2 and (
            shape.width != shape.query_heads * shape.head_width
        ):
            raise ConfigError(
                f"vLLM computes a Qwen2 model with heads of {shape.width // shape.query_heads}"
                f" features (width / query_heads), this run's have {shape.head_width}: use the"
                " torch engine"
            )
        self._config = config
        self._vllm: Any = None
        self._is_loaded = False

    def load(self, weights: str) -> None:
        """See `roles.engines.base.Generator`."""
        if not Path(weights).exists():
            raise FileNotFoundError(f"there are no weights at {weights}")
        if self._vllm is None:
            self._vllm = self._open()
        if self._vllm.llm_engine.has_unfinished_requests():
            raise EngineUnusable(
                "a batch was left unfinished, and its completions would be written by two"
                " policies"
            )
        self._is_loaded = False  # unless all of it succeeds
        self._tell("shoal_load", weights)
        if not self._vllm.reset_prefix_cache():
            raise EngineUnusable("vLLM kept states of the policy before")
        self._is_loaded = True

    def generate(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Group]:
        """See `roles.engines.base.Generator`."""
        rows = [(task.prompt, seed) for task in tasks for seed in task.seeds]
        self._check(tasks, sampling)
        if not rows:
            return []
        starts, seeds = [len(prompt) - 1 for prompt, _ in rows], [seed for _, seed in rows]
        self._tell("shoal_draw", starts, seeds, sampling)
        self._run([prompt for prompt, _ in rows], sampling.max_new_tokens)
        completions: Iterator[Completion] = iter(self._tell("shoal_completions"))
        return [
            Group(task.group, tuple(islice(completions, len(task.seeds)))) for task in tasks
        ]

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        """See `roles.engines.base.Scorer`."""
        rows = [
            (task.prompt, one.tokens)
            for task, group in zip(tasks, groups, strict=True)
            for one in group.completions
        ]
        self._check(tasks, sampling)
        if not rows:
            return []
        starts, counts = [len(prompt) - 1 for prompt, _ in rows], [len(t) for _, t in rows]
        self._tell("shoal_replay", starts, counts)
        # nothing follows the last token
        self._run([prompt + tokens[:-1] for prompt, tokens in rows], 1)
        scored: list[Scored] = self._tell("shoal_scored", tasks, groups, sampling)
        return scored

    def open(self, checkpoint: str, base: str = "") -> int:
        """Not for this engine."""
        self._refuse()

    def adopt(self, weights: str, step: int, base: str = "") -> None:
        """Not for this engine."""
        self._refuse()

    def step(self, groups: Sequence[TrainingGroup]) -> StepReport:
        """Not for this engine."""
        self._refuse()

    def save(self, checkpoint: str, weights: str) -> None:
        """Not for this engine."""
        self._refuse()

    def answer(self, tasks: Sequence[GroupTask], sampling: Sampling) -> list[Answers]:
        """Not for this engine."""
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
                f" the context of {self._config.context}: lower max_new_tokens of the recipe,"
                " or let the environment ask shorter questions"
            )

    def _open(self) -> Any:
        """Start vLLM with weights of chance, which `load` replaces."""
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

    def _run(self, prompts: Sequence[tuple[int, ...]], limit: int) -> None:
        """Drain one batch; what it leaves is in the extension."""
        from vllm import SamplingParams, TokensPrompt

        is_replay = limit == 1
        parameters = [
            SamplingParams(
                temperature=0.0,  # the hook leaves one token to take
                max_tokens=limit,
                ignore_eos=True,
                stop_token_ids=list(self._config.end_tokens),
                detokenize=False,
                skip_reading_prefix_cache=is_replay,  # each state must be computed
                extra_args={SLOT: slot},
            )
            for slot in range(len(prompts))
        ]
        texts = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        self._vllm.generate(texts, parameters, use_tqdm=False)

    def _tell(self, method: str, *arguments: object) -> Any:
        """Call the extension in every worker; the answer of the first, whose rank is 0."""
        return self._vllm.collective_rpc(method, args=arguments)[0]
