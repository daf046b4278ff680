"""What crosses the pipe between a node and the process of its environments, as plain values.

Both ends are this project at one version (`roles.engines.codec`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from roles.envs.base import Task
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.envs.text import TextModel
from roles.models.pin import FilePin


def setup_to_wire(setup: EnvironmentSetup) -> dict[str, Any]:
    """As a table."""
    return asdict(setup)


def setup_from_wire(value: dict[str, Any]) -> EnvironmentSetup:
    """What `setup_to_wire` made."""
    model = value["model"]
    return EnvironmentSetup(
        parts=tuple(
            EnvironmentPart(**{**part, "data": part["data"] and FilePin(**part["data"])})
            for part in value["parts"]
        ),
        model=model and TextModel(**{**model, "end_tokens": tuple(model["end_tokens"])}),
        folder=value["folder"],
    )


def task_to_wire(task: Task) -> list[object]:
    """As a list."""
    return [list(task.prompt), list(task.answer), task.source, task.environment, task.kind]


def task_from_wire(value: Sequence[Any]) -> Task:
    """What `task_to_wire` made."""
    prompt, answer, source, environment, kind = value
    return Task(tuple(prompt), tuple(answer), source, environment, kind)
