"""Accepted places, as they lie on the trainer's disk until all their groups are used.

A record holds all that a step needs, so that resuming asks neither engine nor environment: the
submission, which groups were replayed, their prompts and the scorer's log-probs, and the
trainer's own verdict with the rewards.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from p2p.errors import BadMessage
from p2p.identity import Verify
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from roles.engines.base import TrainingGroup, Turn
from roles.engines.codec import decode_turns, encode_turns
from roles.protocol.core.groups import decode_groups_untrusted, decode_logprobs_untrusted
from roles.protocol.core.verdict import SignedVerdict, decode_verdict_untrusted
from roles.protocol.core.window import Submission, content_digest, decode_submission_untrusted
from roles.trainer.core.buffer import BufferedGroup


@dataclass(frozen=True, slots=True)
class TakenPlace:
    """An accepted place, its verdict, and what the scorer found about its groups."""

    verdict: SignedVerdict
    submission: Submission
    replayed: tuple[int, ...]
    """Indices, from 0, of the groups that the scorer replayed. Only these may be learnt
    from."""
    prompts: tuple[tuple[int, ...], ...]
    """Prompts of the replayed groups."""
    logprobs: bytes
    """Little-endian float16 of every token of those groups, in order."""
    turns: tuple[tuple[tuple[Turn, ...], ...], ...] = ()
    """For each completion of the replayed groups, its turns with the environment's answers;
    empty in a run of one turn."""

    @property
    def key(self) -> bytes:
        """Digest of the place's commitment."""
        return self.verdict.commitment.digest

    def to_bytes(self) -> bytes:
        """Return the form on disk."""
        parts = [self.verdict.to_bytes(), self.submission.to_bytes()]
        lengths = struct.pack(f"<{len(self.prompts)}I", *map(len, self.prompts))
        tokens = [token for prompt in self.prompts for token in prompt]
        prompts = struct.pack(f"<{len(tokens)}I", *tokens)
        kept = [*parts, bytes(self.replayed), lengths, prompts, self.logprobs]
        return pack([*kept, *([encode_turns(self.turns)] if self.turns else [])])


def decode_taken_untrusted(data: bytes, verify: Verify) -> TakenPlace:
    """Decode the output of `TakenPlace.to_bytes`.

    Raises:
        BadMessage: A part is damaged, or they do not belong together.
    """
    listed = unpack_untrusted(data)
    has_turns = isinstance(listed, list) and len(listed) == 7
    raw_verdict, raw_submission, replayed, raw_lengths, raw_tokens, logprobs, *raw_turns = (
        fields_untrusted(listed, *[bytes] * (6 + has_turns), what="taken place")
    )
    verdict = decode_verdict_untrusted(raw_verdict, verify)
    submission = decode_submission_untrusted(raw_submission, verify)
    if verdict.commitment != submission.commitment:
        raise BadMessage("the verdict of a taken place is about another place")
    if verdict.logprobs != content_digest(logprobs):
        raise BadMessage("the log-probs of a taken place are not those of its verdict")
    if len(raw_lengths) != 4 * len(replayed) or len(raw_tokens) % 4:
        raise BadMessage("a taken place has one prompt for each replayed group")
    lengths = struct.unpack(f"<{len(replayed)}I", raw_lengths)
    tokens = struct.unpack(f"<{len(raw_tokens) // 4}I", raw_tokens)
    if sum(lengths) != len(tokens):
        raise BadMessage("the prompts of a taken place are damaged")
    prompts, start = [], 0
    for length in lengths:
        prompts.append(tokens[start : start + length])
        start += length
    try:
        turns = decode_turns(raw_turns[0]) if raw_turns else ()
    except (ValueError, TypeError) as error:
        raise BadMessage(f"the turns of a taken place are damaged: {error}") from None
    if raw_turns and len(turns) != len(replayed):
        raise BadMessage("a taken place has the turns of other groups")
    return TakenPlace(verdict, submission, tuple(replayed), tuple(prompts), logprobs, turns)


def learnable_groups(place: TakenPlace, group_size: int) -> list[BufferedGroup]:
    """Return the replayed groups of a place, ready to learn from.

    Args:
        place: Accepted, by this trainer's scorer.
        group_size: Completions of one group.

    Raises:
        BadMessage: Rewards or log-probs do not fit the groups.
    """
    groups = decode_groups_untrusted(place.submission.content)
    rewards = place.verdict.rewards
    if len(rewards) != group_size * len(groups):
        raise BadMessage("the rewards of a taken place do not fit its groups")
    if not all(number < len(groups) for number in place.replayed):
        raise BadMessage("a taken place says that it replayed groups that it has not")
    chosen = tuple(groups[number] for number in place.replayed)
    scored = decode_logprobs_untrusted(place.logprobs, chosen)
    version = place.verdict.commitment.version
    learnable = []
    turns = place.turns or [[()] * group_size] * len(scored)
    for number, prompt, group, heard in zip(
        place.replayed, place.prompts, scored, turns, strict=True
    ):
        completions = tuple(
            replace(one, proof=b"", turns=tuple(said))
            for one, said in zip(group.completions, heard, strict=True)
        )
        earned = rewards[number * group_size : (number + 1) * group_size]
        training = TrainingGroup(prompt, completions, earned)
        learnable.append(BufferedGroup(version, place.key, number, training))
    return learnable
