"""Several turns, from draws to a ruling: honest work stands, cheats do not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from p2p.identity import verify
from proofs.checks import Evidence, Verdict, judge, judge_pool
from roles.contract.core.shape import Family
from roles.engines.base import Scored
from roles.engines.torch.model import TransformerModel
from roles.envs.base import Task
from roles.envs.client import LocalEnvironment
from roles.envs.contained import EnvironmentFailed
from roles.ledger.repeating import Bystander, Outcome
from roles.protocol.core.conviction import convict
from roles.protocol.core.findings import HEARS_OTHER, NO_ANSWER, Finding
from roles.protocol.core.groups import UNHEARD
from roles.protocol.scorer import ASKED, ENVIRONMENT_FAILED, HEARS_MORE, finding_against
from roles.trainer.taken import TakenPlace, decode_taken_untrusted, learnable_groups
from tests.support.models import SHAPES
from tests.support.turns import CHEATS, TRAINER, Talk, Talker, cheat, make_turns_run

SHAPE = SHAPES[Family.QWEN3]


@pytest.fixture(scope="module")
def talker() -> Talker:
    model = TransformerModel(SHAPE)
    model.initialise(5)
    run = make_turns_run(SHAPE, ends=range(1, 11))
    return Talker(run, model, Talk(SHAPE.vocabulary))


async def test_honest_work_in_turns_is_accepted(talker: Talker) -> None:
    turns = list[int]()
    for index in range(4):
        groups = await talker.draw(index)
        ruling = await talker.judge(index, groups)
        assert (ruling.verdict, ruling.reason) == (Verdict.ACCEPTED, "")
        for ours, theirs in zip(groups, ruling.groups, strict=True):
            assert [one.turns for one in ours.completions] == [
                one.turns for one in theirs.completions
            ]
        turns += [len(one.turns) + 1 for group in groups for one in group.completions]
        assert max(one.draw_distance for one in ruling.evidence) < 1e-5
    assert set(turns) >= {1, 2, 3, 4, 5}


async def test_what_was_heard_is_kept_with_a_place_until_it_is_learnt(talker: Talker) -> None:
    ruling = await talker.judge(0, await talker.draw(0))
    submission = talker.submit(0, await talker.draw(0))
    prompts = tuple(tuple(task.prompt) for task in ruling.tasks)
    turns = tuple(tuple(one.turns for one in group.completions) for group in ruling.groups)
    verdict = ruling.sign(submission.commitment, TRAINER)
    place = TakenPlace(verdict, submission, (0, 1), prompts, ruling.logprobs, turns)
    again = decode_taken_untrusted(place.to_bytes(), verify)
    assert again == place
    for number, one in enumerate(learnable_groups(again, 4)):
        assert [each.turns for each in one.group.completions] == list(turns[number])
    silent = replace(place, turns=())
    assert decode_taken_untrusted(silent.to_bytes(), verify) == silent


@pytest.mark.deep
async def test_of_2000_honest_submissions_none_is_refused(talker: Talker) -> None:
    recorded = list[Evidence]()
    for index in range(50):
        recorded += (await talker.judge(index, await talker.draw(index))).evidence
    assert len(recorded) == 100
    limits, rng = talker.run.terms.limits, Random(1)
    for _ in range(2000):
        pool = [rng.choice(recorded) for _ in range(8)]
        said = [*(judge(one, limits) for one in pool), judge_pool(pool, limits)]
        assert {one.verdict for one in said} == {Verdict.ACCEPTED}


@pytest.mark.parametrize("places", [2, pytest.param(10, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", CHEATS)
async def test_no_cheat_is_accepted(talker: Talker, name: str, places: int) -> None:
    accepted = groups = 0
    for index in range(places):  # of two groups each
        claimed = await cheat(talker, name, index)
        honest = await talker.draw(index)
        changed = [ours != theirs for ours, theirs in zip(claimed, honest, strict=True)]
        if not any(changed):
            continue
        groups += sum(changed)
        ruling = await talker.judge(index, claimed)
        accepted += ruling.verdict is Verdict.ACCEPTED
    assert groups >= places
    assert accepted == 0


async def test_an_environment_that_says_other_words_accuses_nobody(talker: Talker) -> None:
    other = talker.with_environment(Talk(SHAPE.vocabulary, b"other"))
    ruling = await talker.judge(0, await talker.draw(0, local=other))
    assert (ruling.verdict, ruling.reason) == (Verdict.INCONCLUSIVE, HEARS_OTHER)
    first, *more = await talker.draw(0)
    one, *rest = first.completions
    unheard = replace(first, completions=(replace(one, heard=UNHEARD), *rest))
    ruling = await talker.judge(0, (unheard, *more))
    assert (ruling.verdict, ruling.reason) == (Verdict.INCONCLUSIVE, HEARS_MORE)


async def test_who_accepts_what_nobody_heard_is_accused_and_a_bystander_repeats_it(
    talker: Talker, tmp_path: Path
) -> None:
    other = talker.with_environment(Talk(SHAPE.vocabulary, b"other"))
    finding = Finding(HEARS_OTHER, 1.0, 0.0)
    for is_true, groups in (
        (True, await talker.draw(0, local=other)),
        (False, await talker.draw(0)),
    ):
        ruling, submission = await talker.judge(0, groups), talker.submit(0, groups)
        commitment = submission.commitment
        stamped = replace(ruling, verdict=Verdict.ACCEPTED, reason="").sign(commitment, TRAINER)
        assert finding_against(stamped, ruling) == (finding if is_true else None)
        proof = convict(commitment, commitment.terms, stamped, submission, finding, verify)
        (tmp_path / "proof").write_bytes(proof.to_bytes())
        shelf: Any = Shelf(talker)
        bystander = Bystander(talker.run, talker.local, shelf, shelf)
        found = await bystander.look(tmp_path / "proof")
        assert found.accused == TRAINER.peer_id
        assert found.outcome is (Outcome.REPEATED if is_true else Outcome.REFUTED), found.why


class Shelf:
    def __init__(self, talker: Talker) -> None:
        self._talker = talker

    async def weights(self, _: object) -> str:
        return "here"

    async def load(self, _: str) -> None: ...

    async def score(self, tasks: Any, groups: Any, _: object) -> list[Scored]:
        return await self._talker.score(tasks, groups)


async def test_a_completion_on_which_the_environment_raises_is_void_and_no_other(
    talker: Talker, caplog: pytest.LogCaptureFixture
) -> None:
    """Where one machine fails alone, nobody is struck."""

    class Brittle(Talk):
        def respond(self, task: Task, tokens: Sequence[int], room: int) -> Sequence[int] | None:
            if sum(tokens) % 5 == 0:
                raise ValueError("a number that it cannot bear")
            return super().respond(task, tokens, room)

    brittle = replace(talker, environment=Brittle(SHAPE.vocabulary))
    groups = await brittle.draw(0)
    void = [one for group in groups for one in group.completions if one.heard == UNHEARD]
    assert 0 < len(void) < 8
    assert max(len(one.turns) for one in void) > 0
    ruling = await brittle.judge(0, groups)
    assert (ruling.verdict, ruling.reason) == (Verdict.ACCEPTED, "")
    assert "cannot bear" in caplog.text
    assert "such a completion is over" in caplog.text
    assert (await talker.judge(0, groups)).reason == HEARS_MORE
    ruling = await brittle.judge(0, await talker.draw(0))
    assert (ruling.verdict, ruling.reason) == (Verdict.INCONCLUSIVE, ENVIRONMENT_FAILED)


async def test_an_environment_that_contradicts_itself_is_at_fault_itself(
    talker: Talker,
) -> None:
    class Fickle(Talk):
        def respond(self, task: Task, tokens: Sequence[int], room: int) -> Sequence[int] | None:
            self._salt += b"x"
            return super().respond(task, tokens, room)

    fickle = replace(talker, environment=Fickle(SHAPE.vocabulary))
    with pytest.raises(EnvironmentFailed, match="asked again"):
        await fickle.judge(0, await talker.draw(0))


async def test_all_that_is_asked_about_a_place_has_one_bound(
    talker: Talker, autojump_clock: trio.testing.MockClock
) -> None:
    """Each call had its patience, and a place of sixteen calls cost its scorer minutes."""

    class Slow(LocalEnvironment):
        async def hear(self, answers: Any) -> Any:
            with trio.move_on_after(ASKED / 2):
                await trio.sleep_forever()
            return await super().hear(answers)

        async def pay(self, answers: Any) -> Any:
            with trio.move_on_after(ASKED / 2 + 1):
                await trio.sleep_forever()
            return await super().pay(answers)

    slow = replace(talker)
    slow.local = Slow(talker.local._environment)
    with pytest.raises(EnvironmentFailed, match=f"over {ASKED:g} s"):
        await slow.judge(0, await talker.draw(0))


@pytest.mark.parametrize(
    "change", [lambda tokens: (*tokens[:-1], 40, 1, 1, 1, 1, 1), lambda tokens: tokens[:0]]
)
async def test_a_completion_has_no_more_turns_than_the_run_allows(
    talker: Talker, change: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> None:
    first, *more = await talker.draw(0)
    one, *rest = first.completions
    odd = replace(first, completions=(replace(one, tokens=change(one.tokens)), *rest))
    ruling = await talker.judge(0, (odd, *more))
    assert (ruling.verdict, ruling.reason) == (Verdict.REJECTED, NO_ANSWER)
