"""Level L3: the same broadcast over virtual streams and over real, shaped links.

`topologies` says who is connected to whom and how well, `broadcast` is the program every machine runs,
`simulated` runs it in a simulation (L1, L2), `namespaces` as real processes over real TCP (L3).
"""
