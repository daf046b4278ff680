"""Inside vLLM's worker: weights in, and a head that draws by seeds.

Theory of operation
-------------------
vLLM mixes `ShoalExtension` into its worker class; the engine calls its methods by
``collective_rpc``, in every worker of a tensor-parallel group alike. `HeadHook` takes the place
of three functions: the runner's ``execute_model``, which tells it what the scheduler put into
the step, and ``_model_forward``, which gives it the final-normed hidden states of all tokens;
and the model's ``compute_logits``, which gets those behind the next tokens. Its answer leaves
vLLM's sampler, which is greedy, no choice but the token that was drawn.

The head is ours: a float32 copy, whatever the dtype of the rest. With logits in bfloat16 half
as many honest draws again would differ between two engines. It costs vocabulary x width x 4
bytes (113 MB with 49,152 x 576) in each worker.

Whatever is taken from inside vLLM is looked for when the hook is attached, and named if it is
not there: these are no public interfaces, which is why one version is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from roles.engines.base import Completion, EngineError, Group, GroupTask, Sampling, Scored
from roles.engines.config import EngineConfig
from roles.engines.replay import GroupReplay, conclude
from roles.engines.torch.instruments import instruments_for
from roles.engines.torch.model import slice_rows
from roles.engines.vllm.recording import Drawing, Replaying, RowSpan
from roles.engines.vllm.requirements import SUPPORTED
from roles.engines.vllm.weights import OpenWeights

SLOT: Final = "shoal_slot"
"""Key of ``SamplingParams.extra_args`` under which a request carries its slot."""

_WORKER: Final = ("model_runner", "reload_weights", "use_v2_model_runner", "rank")
_RUNNER: Final = (
    "execute_model", "_model_forward", "get_model", "input_batch", "requests", "device",
)  # fmt: skip
_BATCH: Final = ("req_ids", "num_computed_tokens_cpu")
_MODEL: Final = ("compute_logits", "load_weights")


class ShoalExtension:
    """Methods that vLLM's worker gains; the engine calls them by name."""

    model_runner: Any
    reload_weights: Callable[..., None]
    use_v2_model_runner: bool
    rank: int

    def shoal_attach(self, config: EngineConfig) -> None:
        """Put the hook in the place of the model's head, once."""
        _check(self, _WORKER)
        if self.use_v2_model_runner:
            raise EngineError(
                "vLLM chose its second model runner, of which the vllm engine knows nothing"
            )
        self._shoal_config = config
        self._shoal_hook = HeadHook(self.model_runner, config)
        self._shoal_hook.attach()

    def shoal_load(self, weights: str) -> None:
        """Replace all weights in place by those of a file or a folder. Raises `EngineError`,
        before anything has changed, if they do not fit the model."""
        with OpenWeights(Path(weights), self._shoal_config.shape) as opened:
            self._shoal_hook.set_head(opened.head())
            self.reload_weights(weights_iterator=opened.tensors())

    def shoal_draw(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        seeds: Sequence[bytes],
        sampling: Sampling,
    ) -> None:
        """Draw completions for the requests that come next, besides those that draw already.
        The first token of each stands behind its position ``start``."""
        hook, rule = self._shoal_hook, self._shoal_config.draw
        drawing = hook.recording
        if not isinstance(drawing, Drawing) or drawing.sampling != sampling:
            drawing = Drawing(sampling, rule, proves=self.rank == 0)
            hook.begin(drawing)
        drawing.add(slots, starts, seeds)

    def shoal_replay(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Replay the requests of the next batch, without drawing."""
        width = self._shoal_config.shape.width
        self._shoal_hook.begin(Replaying(starts, counts, width))

    def shoal_completions(self, slots: Sequence[int]) -> list[Completion]:
        """Return the completions of these slots, which have ended. Raises `EngineError` if a
        step failed."""
        self._shoal_hook.check()
        drawing = self._shoal_hook.recording
        assert isinstance(drawing, Drawing)
        return drawing.take(slots)

    def shoal_forget(self) -> None:
        """Forget all draws and failures, since no request is left."""
        self._shoal_hook.begin(None)

    def shoal_scored(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        """Return the results for the groups that the batch read; only the first worker computes
        them."""
        replaying = self._shoal_hook.end()
        assert isinstance(replaying, Replaying)
        if self.rank:
            return []
        states = iter(replaying.states())
        size = slice_rows(self._shoal_config.shape.vocabulary)
        ends, rule = frozenset(self._shoal_config.end_tokens), self._shoal_config.draw
        tools, replays = instruments_for(self._shoal_hook.device), []
        for task, group in zip(tasks, groups, strict=True):
            replay = GroupReplay(task, group, sampling, ends, rule, replay=tools.replay)
            for values, mine in zip(replay.activations, states, strict=False):
                values.add(mine.numpy())
                for start in range(0, len(mine), size):
                    logits = self._shoal_hook.logits(mine[start : start + size])
                    replay.add_logits(tools.view(logits))
            replays.append(replay)
        return conclude(replays, sampling.proof_values)


class HeadHook:
    """Stands in for the model's head in vLLM."""

    def __init__(self, runner: Any, config: EngineConfig) -> None:
        self._runner = runner
        self._dtype: torch.dtype = getattr(torch, config.dtype.value)
        self._vocabulary = config.shape.vocabulary
        self._end = config.end_tokens[0]
        self._head: Tensor | None = None
        self._scheduled: dict[str, int] = {}
        self._states: Tensor | None = None
        self.recording: Drawing | Replaying | None = None
        self._failure = ""

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return torch.device(self._runner.device)

    def attach(self) -> None:
        """Replace the three functions. Raises `EngineError` if one is missing."""
        runner = self._runner
        _check(runner, _RUNNER)
        _check(runner.input_batch, _BATCH)
        model = runner.get_model()
        _check(model, _MODEL)
        execute, forward = runner.execute_model, runner._model_forward

        def execute_model(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            self._scheduled = scheduled.num_scheduled_tokens
            return execute(scheduled, *arguments, **named)

        def model_forward(*arguments: Any, **named: Any) -> Any:
            self._states = forward(*arguments, **named)
            return self._states

        runner.execute_model = execute_model
        runner._model_forward = model_forward
        model.compute_logits = self.compute_logits

    def set_head(self, weight: Tensor) -> None:
        """Set the head's weights, rounded as the run's dtype rounds them."""
        rounded = weight.to(self._runner.device, self._dtype)
        self._head = rounded.to(torch.float32, copy=True)

    def begin(self, recording: Drawing | Replaying | None) -> None:
        """Record draws or states of requests from now on."""
        self.recording, self._failure = recording, ""

    def check(self) -> None:
        """Raise `EngineError` if a step has failed."""
        if self._failure:
            raise EngineError(self._failure)

    def end(self) -> Drawing | Replaying:
        """Stop recording. Raises `EngineError` if a step failed."""
        recording, failure = self.recording, self._failure
        self.recording, self._failure, self._states = None, "", None
        if failure:
            raise EngineError(failure)
        if recording is None:
            raise EngineError("no batch was begun")
        return recording

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, vocabulary) of rows of hidden states, on the model's
        device."""
        if self._head is None:
            raise EngineError("no weights were loaded")
        return F.linear(hidden.to(self._head), self._head)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (requests, width) to (requests, vocabulary), in the place of the model's own
        method.

        Rows that lead to no token get an end token, which vLLM drops. When a step fails, all
        get one: the batch ends at once, and no request is left behind for the next.
        """
        tokens = np.full(len(hidden), self._end)
        if self.recording is not None and not self._failure:
            spans = self._spans()
            if len(spans) != len(hidden):
                self._failure = (
                    f"vLLM asks for {len(hidden)} tokens of {len(spans)} requests, and the vllm"
                    " engine draws one of each: no speculative decoding"
                )
            else:
                self._record(self.recording, spans, hidden, tokens)
        answer = hidden.new_full(
            (len(hidden), self._vocabulary), -torch.inf, dtype=torch.float32
        )
        return answer.scatter_(1, torch.from_numpy(tokens).to(hidden.device)[:, None], 0.0)

    def _record(
        self,
        recording: Drawing | Replaying,
        spans: Sequence[RowSpan],
        hidden: Tensor,
        tokens: NDArray[np.integer],
    ) -> None:
        """Record this step, and write the drawn tokens into ``tokens``."""
        if isinstance(recording, Replaying):
            assert self._states is not None
            recording.take(spans, self._states)
            return
        wanted = recording.wanted(spans)
        if not wanted:
            return
        chosen = hidden[wanted]
        slots = [spans[number].slot for number in wanted]
        try:
            tokens[wanted] = recording.draw(slots, chosen.float(), self.logits(chosen))
        except ValueError as error:
            self._failure = f"no token can be drawn: {error}"

    def _spans(self) -> list[RowSpan]:
        """Return the tokens of each request that this step computed, in the order of its
        rows."""
        batch, requests, spans, row = self._runner.input_batch, self._runner.requests, [], 0
        for number, name in enumerate(batch.req_ids):
            count = self._scheduled[name]
            first = int(batch.num_computed_tokens_cpu[number])
            slot = requests[name].sampling_params.extra_args[SLOT]
            spans.append(RowSpan(slot, first, count, row))
            row += count
        return spans


def _check(owner: object, names: Sequence[str]) -> None:
    """Raise `EngineError` unless ``owner``, a part of vLLM, has the attributes that the hook
    uses."""
    for name in names:
        if not hasattr(owner, name):
            raise EngineError(
                f"vLLM's {type(owner).__name__} has no {name}: the vllm engine works with"
                f" vllm {SUPPORTED}, install that version"
            )
