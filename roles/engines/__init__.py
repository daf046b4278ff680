"""Engines: what samples, scores and trains a policy.

`base` is what a role may ask of one, `config` what it is made of. `client` opens one in a
process of its own, where `worker` reads calls and answers them; `codec` is the calls' bytes.
`fake` needs no model and is for simulations; `tiny` is a small transformer on torch.
`safetensors` reads and writes the files of weights.
"""
