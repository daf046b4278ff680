"""Level 3: real processes on real, shaped lines.

- `namespaces` (read it first): machines and lines out of network namespaces and ``tc tbf``
- `switch`: a program that delays every frame, in the place of the bridge between the lines
- `machines`: `Emulation`, machines that run one program each, started, heard and killed
- `faults`: the faults that real processes and lines can have
- `real`: a scenario of whole nodes on them (`processes`)
- `link_model`: a broadcast down a tree, simulated and real, by which the link model is judged

How data flows: `sim.studies.lab.real` opens an `Emulation`, and
`NodeProcesses` adds machines and starts nodes on them; what they print comes back as JSON
lines.

A newcomer calls nothing here: ``python -m sim run NAME --level 3`` does.
"""
