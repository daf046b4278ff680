"""``shoal run export DIR -o rollouts.parquet`` or ``-o traces.jsonl``: accepted answers.

A row is one answer that the trainer's own scorer replayed and accepted: what was asked, what
was said, the scorer's log-probs, reward and advantage, and the signed verdict. The columns of
the Parquet file have TRL's names, the lines of ``traces.jsonl`` are episodes of verifiers. The
trainer keeps a place until a checkpoint covers it; with ``keep_rollouts`` it keeps it for
longer.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from p2p.errors import BadMessage, ConfigError, MissingDependency
from p2p.identity import verify
from p2p.node.tables import load_toml
from p2p.node.usage import patience, remark, say
from roles.contract import Run
from roles.engines.base import Completion
from roles.engines.config import MachineLimits
from roles.envs.base import Task
from roles.envs.client import setup_of
from roles.envs.mix import MixedEnvironment, open_mix
from roles.envs.text import TextTask, unpack_text_task_untrusted
from roles.models.errors import BadModel
from roles.own.layout import RunFolder
from roles.own.people import load_run
from roles.protocol.core.assignment import draw_order
from roles.protocol.model_files import FOLDER
from roles.rl.algorithms.base import Group
from roles.rl.algorithms.find import Objective, find_algorithm
from roles.rl.learner import FILE as LEARNER
from roles.rl.recipes import read_learner
from roles.trainer.inbox import USED, decode_kept_untrusted
from roles.trainer.role import INBOX, ROLLOUTS
from roles.trainer.taken import TakenPlace, decode_taken_untrusted, learnable_groups

SUFFIXES: Final = (".parquet", ".jsonl")
SCHEMA: Final = "1"  # of the columns
AT_ONCE: Final = 512  # rows of a row group

Row = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """The files of a finished run in a trainer's folder, opened for reading."""

    node: Path
    run: Run
    environment: MixedEnvironment
    objective: Objective

    def places(self) -> Iterator[tuple[TakenPlace, dict[int, int]]]:
        """Yield each accepted place, and the step that each of its groups went into."""
        steps: dict[str, dict[int, int]] = {}
        try:
            used = (self.node / INBOX / USED).read_bytes().partition(b"\n")[2]
            for key, number, step in json.loads(used):
                steps.setdefault(key, {})[number] = step
        except (OSError, ValueError, TypeError):
            steps = {}
        kept = sorted((self.node / ROLLOUTS).glob("*"))
        waiting = sorted(path for path in (self.node / INBOX).glob("*") if path.name != USED)
        for path in (*kept, *waiting):
            try:
                data, known = path.read_bytes(), steps.get(path.name, {})
                if path.parent.name == Path(ROLLOUTS).name:
                    known, data = decode_kept_untrusted(data)
                yield decode_taken_untrusted(data, verify), known
            except FileNotFoundError:  # the trainer works, and has just forgotten it
                continue
            except BadMessage as error:
                remark(f"{path} is left out: {error}")

    def rows(self) -> Iterator[Row]:
        """Yield a row for each answer."""
        ends = self.run.terms.model.end_tokens
        for place, steps in self.places():
            signed, commitment = place.verdict, place.verdict.commitment
            order = draw_order(self.run, commitment.node, commitment.version, commitment.policy)
            seeds = order.task_seeds(commitment.index)
            for one in learnable_groups(place, order.group_size):
                answers, rewards = one.group.completions, one.group.rewards
                task = self.environment.task(seeds[one.number])
                seen = Group(
                    rewards=rewards,
                    lengths=tuple(len(answer.tokens) for answer in answers),
                    ended=tuple(answer.tokens[-1] in ends for answer in answers),
                    limit=self.run.terms.sampling.max_new_tokens,
                )
                [advantages] = self.objective.advantages([seen])
                name = hashlib.sha256(place.key + one.number.to_bytes(4, "big")).digest()
                learnt = steps.get(one.number, -1)
                for slot, answer in enumerate(answers):
                    yield {
                        **self._said(task, one.group.prompt, answer),
                        "advantage": float(advantages[slot]),
                        "reward": rewards[slot],
                        "model_version": int(commitment.version),
                        "group_id": int.from_bytes(name[:8], "big") >> 1,
                        "environment": task.environment,
                        "environment_digest": self._digest(task.environment),
                        "kind": task.kind,
                        "task_seed": seeds[one.number].hex(),
                        "run": self.run.id.hex(),
                        "node": str(commitment.node),
                        "validator": str(signed.validator),
                        "verdict": signed.verdict.name.lower(),
                        "place": commitment.index,
                        "learnt_at": learnt if learnt >= 0 else None,
                        "slot": slot,
                        "turns": len(answer.turns) + 1,
                        "ended": answer.tokens[-1] in ends,
                        "statistic": signed.statistic,
                        "limit": signed.limit,
                        "commitment": commitment.to_bytes(),
                        "signature": signed.to_bytes(),
                    }

    def _digest(self, name: str) -> str:
        pins = self.run.terms.environments
        return next((pin.digest.hex() for pin in pins if pin.name == name), "")

    def _said(self, task: Task, prompt: tuple[int, ...], answer: Completion) -> Row:
        text, drawn = answer.text
        where = [len(prompt) + place for place in drawn]
        logprobs, mask = [0.0] * (len(prompt) + len(text)), [0] * (len(prompt) + len(text))
        for place, logprob in zip(where, answer.logprobs, strict=True):
            logprobs[place], mask[place] = logprob, 1
        asked, read = _asked(task), self.environment.text
        completion, start = list[Row](), 0
        for turn in answer.turns:
            completion += [
                {"role": "assistant", "content": read(task, answer.tokens[start : turn.after])},
                {"role": "tool", "content": read(task, turn.inserted)},
            ]
            start = turn.after
        last = read(task, answer.tokens[start:])
        return {
            "prompt": [
                {"role": one.role, "content": one.content}
                for one in (asked.messages if asked is not None else ())
            ],
            "completion": [*completion, {"role": "assistant", "content": last}],
            "input_ids": [*prompt, *text],
            "completion_mask": mask,
            "old_log_probs": logprobs,
        }


def _asked(task: Task) -> TextTask | None:
    return unpack_text_task_untrusted(task.source) if task.source else None


def open_finished(folder: Path) -> Finished:
    """Open the files in the folder of a run or a trainer.

    Raises:
        ConfigError: The folder has none.
    """
    nodes = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    node = next((path for path in nodes if (path / INBOX).is_dir()), None)
    if node is None:
        raise ConfigError(
            f"{folder} has no answers that a trainer took: name the folder of a run that has"
            " started, or of its trainer"
        )
    places = (node / "run.shoal", RunFolder(node.parent).document)
    run = load_run(next((path for path in places if path.exists()), places[0]))
    base = node / FOLDER
    machine = MachineLimits(environment_data=str(RunFolder(node.parent).data))
    try:
        setup = setup_of(run, machine, str(base) if run.terms.model.base else None)
        environment = open_mix(setup)
    except BadModel as error:
        raise ConfigError(f"{base}: {error}") from error
    path = node / LEARNER
    table = load_toml(path) if path.exists() else None
    rules = read_learner(table, str(path), run.name, run.terms.model)
    return Finished(node, run, environment, find_algorithm(rules.algorithm, rules.options))


def export(folder: Path, target: Path) -> int:
    """Write the accepted answers of a folder.

    Raises:
        ConfigError: The folder has none.
    """
    write = _write_parquet if target.suffix == ".parquet" else _write_traces
    part = target.with_name(f"{target.name}.part")
    with patience("reading what the trainer took ..."):
        found = open_finished(folder)
        try:
            count = write(found, part)
            part.replace(target)
        except OSError as error:
            raise ConfigError(f"-o {target} cannot be written: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)
    say(f"{count:,} answers: {target}")
    if not (found.node / ROLLOUTS).is_dir():
        remark(
            "older answers are gone: the trainer forgets what its checkpoints cover, unless"
            " keep_rollouts of [role.trainer] says how many GiB it keeps"
        )
    return 0


def _write_parquet(found: Finished, target: Path) -> int:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingDependency(
            "Parquet needs pyarrow: pip install 'shoal[data]'; -o traces.jsonl needs nothing"
        ) from None
    turns = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    kinds = {
        turns: ("prompt", "completion"),
        pa.list_(pa.int32()): ("input_ids",),
        pa.list_(pa.int8()): ("completion_mask",),
        pa.list_(pa.float32()): ("old_log_probs",),
        pa.float32(): ("advantage", "reward"),
        pa.int32(): ("model_version", "place", "learnt_at"),
        pa.int64(): ("group_id",),
        pa.string(): ("environment", "environment_digest", "kind", "task_seed", "run", "node",
                      "validator", "verdict"),
        pa.int16(): ("slot", "turns"),
        pa.bool_(): ("ended",),
        pa.float64(): ("statistic", "limit"),
        pa.binary(): ("commitment", "signature"),
    }  # fmt: skip
    fields = [(name, kind) for kind, names in kinds.items() for name in names]
    tokenizer = [pin for pin in found.run.terms.model.base if pin.name == "tokenizer.json"]
    schema = pa.schema(fields).with_metadata(
        {
            "shoal.schema": SCHEMA,
            "shoal.run": base64.b64encode(found.run.document).decode(),
            "shoal.tokenizer": tokenizer[0].digest.hex() if tokenizer else "",
        }
    )
    count, rows = 0, found.rows()
    with parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        while batch := list(itertools.islice(rows, AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def _write_traces(found: Finished, target: Path) -> int:
    count = 0
    with target.open("w", encoding="utf-8") as file:
        for row in found.rows():
            file.write(json.dumps(_episode(row), ensure_ascii=False) + "\n")
            count += 1
    return count


def _episode(row: Row) -> dict[str, Any]:
    """Return a completion as the verifiers library writes one: a node for each message of the
    prompt, and one for the completion, with all tokens that the model drew or read in it."""
    ids, mask, logprobs = row["input_ids"], row["completion_mask"], row["old_log_probs"]
    start = mask.index(1) if 1 in mask else len(ids)
    asked, said = row["prompt"], row["completion"]
    nodes: list[dict[str, Any]] = [
        {"parent": at - 1 if at else None, "message": turn, "sampled": False, "timestamp": 0.0}
        for at, turn in enumerate(asked or [{"role": "user", "content": ""}])
    ]
    nodes[-1] |= {"token_ids": ids[:start], "mask": [False] * start}
    words = "".join(turn["content"] for turn in said)
    nodes.append(
        {
            "parent": len(nodes) - 1,
            "message": {"role": "assistant", "content": words},
            "sampled": True,
            "timestamp": 0.0,
            "token_ids": ids[start:],
            "mask": list(map(bool, mask[start:])),
            "logprobs": [one for one, drawn in zip(logprobs, mask, strict=True) if drawn],
        }
    )
    name = f"{row['group_id']:016x}{row['slot']:04x}"
    data = {"idx": row["group_id"], "prompt": asked}
    task = {"type": row["environment"], "data": data, "key": row["task_seed"]}
    shoal = {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for key, value in row.items()
        if key in ("advantage", "model_version", "environment_digest", "kind", "run", "node",
                   "validator", "verdict", "place", "learnt_at", "slot", "turns", "commitment",
                   "signature")
    }  # fmt: skip
    shoal |= {key: row[key] for key in ("statistic", "limit") if math.isfinite(row[key])}
    trace = {
        "version": 1,
        "id": name,
        "task": task,
        "agent": {"config": {}},
        "nodes": nodes,
        "rewards": {"reward": {"score": row["reward"], "weight": 1.0}},
        "stop_condition": "agent_completed" if row["ended"] else "max_tokens",
        "is_completed": True,
        "info": {"shoal": shoal},
    }
    return {"id": name, "task": task, "traces": [trace]}
