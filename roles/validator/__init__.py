"""The validator: replays submissions, signs verdicts, delivers accepted work to the trainer.

Read `session` first: one submission after the other, from the queue to a durable verdict. A
submission's way, in this order:

* `core.turnstile` lets nodes without accepted work pass one by one;
* `reception` reads its head, then its content, and answers its peer; `limits` bounds how many
  at a time;
* `verdicts` looks up the earlier verdict on a submission that is sent again;
* `core.fair_queue` says whose submission the one scorer takes next;
* `judge` decides by the policy's age, then the place, then what `replay` says;
* `core.sequence` knows which places in the draw order each node has filled, and so detects
  replays and gaps;
* `replay` compares tasks, shapes and the model's evidence with the run's limits, and signs;
* `history` holds the draws of its worker's last submissions against them together;
* `session` makes the verdict durable, in the ledger;
* `delivery` keeps accepted submissions on disk until the trainer has taken them.

The folder `core` is free of I/O. `stats` counts for people, `status` is the snapshot that they
see, `panels` is what the dashboard shows of it, `config` is the owner's table, `role` is what a
node opens.
"""

from roles.validator.config import ValidatorConfig
from roles.validator.role import Validator

__all__ = ["Validator", "ValidatorConfig"]
