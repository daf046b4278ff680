"""The validator: replays submissions and signs verdicts."""

from roles.validator.session import Validator, ValidatorConfig

__all__ = ["Validator", "ValidatorConfig"]
