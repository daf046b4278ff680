"""DiLoCo: many members train one model, and average their updates now and then.

Read `session` first: a member at work. What it decides and computes is in the folder `core`,
free of I/O: rounds without a leader, quantisers, sums. `reduction` is one exchange, over the
pieces that `exchange` gives and takes; `store` is what is on disk. The node handles digests,
signatures and files of pieces. Whatever is as large as the model is in the process of `worker`,
which `inner` calls: it encodes, sums and takes outer steps; `pretrain` has the model and its
optimiser, on the device of the machine's owner, and `objectives` says what is lowered, the loss
on text or GRPO's. They read `material`: the text that `corpus` has there, or questions of
environments. `config` is the machine owner's table. `roles.trainer.diloco` opens a session in a
run with ``algorithm = "diloco"``.

How data flows: inner steps -> an update, encoded in pieces, on disk -> its digests, signed, to
all -> a plan -> each owner sums its pieces -> each member fetches the sums, takes the outer
step and votes -> a majority's signatures are the record -> the next inner steps.
"""
