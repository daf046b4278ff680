"""What the folder of a model raises."""

from __future__ import annotations

from p2p.errors import ShoalError


class BadModel(ShoalError):
    """The folder of a model cannot be used; the message names the file, what is wrong with it
    and, where there is one, the remedy."""
