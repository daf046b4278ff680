"""The validator: scores the places of newcomers and signs verdicts.

Read `session` first: from the content of a place to a durable verdict that the trainer has
taken. `roles.protocol.scorer` does the scoring. `status` is the snapshot that people see,
`panels` is what the dashboard shows of it, `config` is the owner's table, `role` is what a node
opens.
"""

from roles.validator.config import ValidatorConfig
from roles.validator.role import Validator

__all__ = ["Validator", "ValidatorConfig"]
