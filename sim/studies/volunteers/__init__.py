"""A 32 B run on volunteers' machines: the real roles, with times and sizes of real machines.

- `workload` (read it first): who runs what
- `plan`: how many, on which machines and lines, and the signed run
- `freight`: policies of full size on the lines, though they have few bytes
- `timesheet`: what each machine spends its time on
- `figures`: what is noted on the way, and the metrics that follow
"""
