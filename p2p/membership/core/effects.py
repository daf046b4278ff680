"""Where the parts of the core put their effects while an event is handled."""

from __future__ import annotations

from p2p.events import Send
from p2p.identity import PeerId
from p2p.membership.core.events import Change, Effect, Member, MemberEvent
from p2p.membership.messages import Message, encode_message


class EffectBuffer:
    """Effects, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def put(self, effect: Effect) -> None:
        """Any effect."""
        self._effects.append(effect)

    def send(self, peer: PeerId, message: Message) -> None:
        """A message to one peer."""
        self._effects.append(Send(peer, encode_message(message)))

    def send_all(self, peers: list[PeerId], message: Message) -> None:
        """The same message to several, encoded once."""
        if peers:
            data = encode_message(message)
            self._effects += [Send(peer, data) for peer in peers]

    def tell(self, change: Change, member: Member) -> None:
        """News for the node."""
        self._effects.append(MemberEvent(change, member))

    def take(self) -> list[Effect]:
        """What was put here since the last time."""
        effects, self._effects = self._effects, []
        return effects
