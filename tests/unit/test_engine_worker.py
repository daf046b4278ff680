"""An engine in a process of its own: values and errors cross whole, and nothing outlives the
node."""

from pathlib import Path

from p2p.machine import open_world
from proofs.checks import Limits, Verdict, judge
from roles.engines.base import Group, GroupTask, Sampling, TrainingGroup, draw_all
from roles.engines.client import open_engine
from roles.envs.base import Task
from roles.envs.sort import SortEnvironment
from tests.support.tasks import make_tasks
from tests.support.toys import QUICK, sorting_engine, sorting_learner

CONFIG = sorting_engine(learner=sorting_learner(minibatches=2, warm_up=QUICK), nice=5)
SAMPLING = Sampling(1.0, 12, 4)
SORT = SortEnvironment()


async def test_a_round_of_the_recipe(tmp_path: Path) -> None:
    """Learner, generator, scorer, step: everything that crosses the pipe, in its order."""
    tasks = make_tasks(24)
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        assert await engine.open("engine/checkpoint") == 0
        await engine.save("engine/checkpoint", "engine/policies/0.safetensors")
        await engine.load("engine/policies/0.safetensors")
        groups = await draw_all(engine, tasks, SAMPLING)
        assert [group.group for group in groups] == [task.group for task in tasks]
        scored = await engine.score(tasks, groups, SAMPLING)
        verdicts = {judge(one.evidence, Limits.fp32()).verdict for one in scored}
        assert verdicts == {Verdict.ACCEPTED}
        assert [len(one.logprobs) for one in scored] == [
            2 * sum(len(each.tokens) for each in group.completions) for group in groups
        ]
        rewarded = [rate(task, group) for task, group in zip(tasks, groups, strict=True)]
        report = await engine.step([one for one in rewarded if len(set(one.rewards)) > 1])
        assert (report.step, report.tokens > 0) == (1, True)
        answers = await engine.answer(tasks, SAMPLING)
        assert [len(one) for one in answers] == [len(task.seeds) for task in tasks]
        await engine.save("engine/checkpoint", "engine/policies/1.safetensors")
        assert await world.disk.list("engine/policies") == ["0.safetensors", "1.safetensors"]
        await engine.load("engine/policies/1.safetensors")
        stale = await engine.score(tasks, groups, SAMPLING)
        verdicts = {judge(one.evidence, Limits.fp32()).verdict for one in stale}
        assert Verdict.ACCEPTED not in verdicts
    async with open_world(tmp_path) as world, open_engine(world, CONFIG) as engine:
        assert await engine.open("engine/checkpoint") == 1


def rate(task: GroupTask, group: Group) -> TrainingGroup:
    """Rewards for ending early: any policy shows spread in that."""
    full = Task(task.prompt, SORT.solution(task.prompt))
    rewards = tuple(
        max(SORT.reward(full, one.tokens), float(len(one.tokens) < 6))
        for one in group.completions
    )
    return TrainingGroup(task.prompt, group.completions, rewards)
