"""INTELLECT-2's broadcast at level 0: 62 GB to 200 volunteers, by two designs.

- `sites` (read it first): lines, machines and deaths, drawn from the seed alike for both
  designs
- `shardcast`: the production core, striped forest and repair
- `reference`: the published design, from the source of shardcast 0.3.2
"""
