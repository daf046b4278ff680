"""The validator: replays submissions, signs verdicts, delivers accepted work to the trainer.

Read `session` first: a submission's way from its stream to its verdict. On that way lie, in
this order:

* `reception` reads its head, then its content; `limits` bounds how many at a time;
* `verdicts` finds the verdict again of a place that was judged before;
* `core.fair_queue` says whose submission the one scorer takes next;
* `core.sequence` knows which places in the draw order each node has filled: replays and gaps;
* `replay` holds shapes, tasks and the model's evidence against the run's limits, and signs;
* `delivery` keeps accepted submissions on disk until the trainer has taken them.

The folder `core` is free of I/O. `stats` counts for people, `config` is the owner's table,
`role` is what a node opens.
"""

from roles.validator.config import ValidatorConfig
from roles.validator.role import Validator

__all__ = ["Validator", "ValidatorConfig"]
