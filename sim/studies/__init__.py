"""Studies that use the simulator: published runs, and real lines.

The rest of `sim` imports nothing from here: scenario files name the workloads, and
`sim.run.runner` finds what plays levels 0 and 3 by name.

- `bare`: level 0, a workload without trio on the bare heap; `broadcast`, a flow to 10,000 nodes
- `intellect2`: the published broadcast of INTELLECT-2 and ours (L0)
- `intellect1`: a published pre-training run, and our members on its sites
- `volunteers`: the real roles with the speeds of real machines (`profiles`)
- `lab`: level 3, real processes on shaped lines, and how well the link model meets them
"""
