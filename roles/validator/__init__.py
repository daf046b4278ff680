"""The validator: scores the places of newcomers and signs verdicts.

Read `session` first: from the content of a place to a durable verdict that the trainer has
taken. `roles.protocol.scorer` does the scoring. `panels` is what the dashboard shows, `role`
what a node opens.
"""

from roles.validator.role import Validator

__all__ = ["Validator"]
