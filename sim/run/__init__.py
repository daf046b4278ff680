"""Runs of scenarios: from a TOML file to a result, alone or by the hundred.

- `scenario` (read it first): a scenario file, and what a workload is
- `runner`: `run_scenario`, which checks a scenario and hands it to the level that it asks for
- `simulated`: levels 0, 1 and 2; `real`: level 3
- `result`: metrics and expectations of a run; `report`: the same as an HTML page; `meanings`:
  of the metrics, and of a run in a sentence; `observers`: who is told while it runs
- `sweep`: many seeds and settings, a process each
- `catalogue`: the scenarios that come with the simulator by theme, and what each costs
- `diff`: the first event in which two runs differ; `perfetto`: a trace for ui.perfetto.dev

How data flows: `load_scenario` gives a `Scenario`; `run_scenario` opens its workload by name,
lets it play on its level, and returns a `Result` with metrics, judged expectations and trace
hash.

A newcomer calls `load_scenario` and `run_scenario`, or ``python -m sim run``.
"""
