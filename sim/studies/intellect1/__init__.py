"""INTELLECT-1: ten billion weights trained by sites on three continents.

- `sites`: where they are, and what their lines and connections carry
- `ring`: the order of a ring whose slowest edge is fastest
- `reference`: PRIME's design, against its published figures (L0)
- `ours`: our members on the same lines, from four sites to fourteen (L1)
"""
