"""Train the model of a run with TRL: strangers draw the answers, this process learns from them.

python examples/trl/train.py FOLDER OUT [--lora]
"""

import argparse
from pathlib import Path

try:
    from roles.trl import ExactTrainer, SwarmRun, arguments
except ImportError as error:
    raise SystemExit(str(error)) from None
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl.experimental.async_grpo import AsyncGRPOConfig

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, help="trainer/external of the trainer node's data")
parser.add_argument("out", type=Path, help="where the checkpoints go")
parser.add_argument("--lora", action="store_true", help="an adapter; weights arrive merged")
options = parser.parse_args()

run = SwarmRun(options.folder)
print(f"run {run.task['name']}: {run.steps} steps of {run.rows} answers, model {run.model}")
learner = run.task["learner"]  # learner.toml's numbers, if you want them; the loss is TRL's
config = AsyncGRPOConfig(
    output_dir=str(options.out),
    learning_rate=learner["rate"] * (10 if options.lora else 1),
    max_grad_norm=learner["gradient_norm"],
    warmup_steps=learner["ramp"],
    lr_scheduler_type="linear",
    save_steps=2 * learner["minibatches"],
    save_total_limit=2,
    **arguments(run, updates=learner["minibatches"]),
)
if (Path(run.model) / "tokenizer.json").exists():
    tokenizer = AutoTokenizer.from_pretrained(run.model)
else:  # a network that was drawn from a seed: its tokens are numbers
    words = Tokenizer(WordLevel({"<end>": run.task["end_tokens"][0]}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
adapter = None
if options.lora:
    from peft import LoraConfig

    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
trainer = ExactTrainer(run, args=config, processing_class=tokenizer, peft_config=adapter)
trainer.train(resume_from_checkpoint=run.newest_checkpoint())
