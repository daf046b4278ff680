"""vLLM as an engine, for models and machines for which plain torch is too slow.

Read `engine` first: what the worker process of a node calls. `requirements` is the version of
vLLM that these hooks were checked with, the settings of its process, and what is said when it
is not there. `extension` runs inside vLLM's own workers, of which tensor parallelism has
several: it takes in the tensors that `weights` maps from the disk, and stands in for the
model's head. `recording` is what a batch of requests leaves behind there: seeded draws with
their proofs, or replayed states; where a GPU has the logits,
`roles.engines.torch.device_draws` draws and replays there.
`following` is another thing: with it an unmodified vLLM server takes the versions of a run.

How data flows: the engine hands vLLM prompts without sampling parameters of its own; at each
step the extension gets the hidden states behind the next tokens, computes their logits in
float32, draws by the seeds (`proofs`), and gives vLLM logits that leave no choice. Tokens,
log-probs and proofs are collected when the batch is done. vLLM is imported by the worker
process of a node that asked for it, and by nothing else.
"""


def register() -> None:
    """Register the weight transfer engine ``shoal``; vLLM calls this in each process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "shoal" not in WeightTransferEngineFactory._registry:
        place = "roles.engines.vllm.following"
        WeightTransferEngineFactory.register_engine("shoal", place, "FolderEngine")
