"""The shape of the project as tests: who imports whom, and what stays behind the seams."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("p2p", "roles", "proofs", "sim")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
BEHIND_SEAMS = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in {"p2p", "roles"}]

# Clocks, randomness, sockets, threads, files and processes are reached through World, Network
# and Host.
FORBIDDEN_MODULES = {
    "asyncio", "concurrent", "fcntl", "multiprocessing", "os", "pathlib", "secrets", "select",
    "selectors", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile",
    "threading", "time",
}  # fmt: skip
FORBIDDEN_TRIO = re.compile(
    r"sleep|sleep_until|current_time|to_thread|from_thread|Path|open_file|wrap_file|run_process|socket|"
    r"open_tcp_\w+|serve_tcp|SocketStream|SocketListener|open_signal_receiver|open_process|FdStream"
)
FORBIDDEN_CALLS = {"open", "hash", "input", "print", "exec", "eval", "__import__"}

# Who may, and why. A trailing slash stands for a folder.
EXEMPT = {
    "p2p/cast/commandline.py": "command lines: paths in, text out",
    "p2p/cast/modes.py": "modes of a command line's files, read and set, on a thread",
    "p2p/cast/puller.py": "a command line: links files into the folder that a person named",
    "p2p/cast/pull_http.py": "a command line: servers' versions into a folder",
    "p2p/cast/pusher.py": "a command line: paths in, text out",
    "p2p/cast/weight_v.py": "a command line's folders: weights in and out, on a thread",
    "p2p/machine.py": "is the real World",
    "p2p/node/cli.py": "a command line: paths in, text out",
    "p2p/node/dashboard/commands.py": "a command line: a node's folder in, text out",
    "p2p/node/dashboard/server.py": "listens for HTTP, at an address and in the node's folder",
    "p2p/node/config.py": "names the configuration file",
    "p2p/node/folders.py": "what command lines share: which node's folder is meant",
    "p2p/node/screen.py": "a line on a person's terminal",
    "p2p/node/process.py": "signals, log file and lock of a real process",
    "p2p/node/tables.py": "reads the configuration file before there is a world",
    "p2p/node/usage.py": "what command lines share: paths, Ctrl-C, text out",
    "p2p/reach/mapping.py": "talks to the home router, which no peer is",
    "p2p/reach/lan.py": "talks to all machines in the local network at once",
    "p2p/transport/dns.py": "asks the system's name servers",
    "p2p/sandbox/entry.py": "runs inside the worker process",
    "p2p/sandbox/installation.py": "looks where this machine keeps Python",
    "p2p/sandbox/launch.py": "a worker's command line, and what contains it on this machine",
    "p2p/sandbox/trial.py": "runs inside a worker process",
    "p2p/shardcast/http/server.py": "listens for HTTP, by hypercorn on trio's sockets",
    "p2p/transport/tcp.py": "is the real Network",
    "p2p/worker_process.py": "is the real World's processes",
    "roles/calibrate/": "a command line: weights and a run file in, limits out",
    "roles/chat/": "a command line: a model's folder in, text out",
    "roles/demo/command.py": "a command line: makes the folder of a run",
    "roles/ledger/command.py": "a command line: paths in, text out",
    "roles/ledger/reading.py": "a command line: nodes' folders in, ledgers out",
    "roles/ledger/repeating.py": "a command line: nodes' folders in, bans weighed out",
    "roles/trainer/metrics.py": "a real trainer's numbers into files of a person's tools",
    "roles/trl/": "a process of its own beside a node: no node imports it",
    "roles/own/": "a command line: makes the folder of a run, and plays it",
    "roles/own/draft.py": "a command line: a draft in, terms out",
    "roles/own/editions.py": "a command line: a key and its record in, a document out",
    "roles/own/people.py": "a command line: keys and run files in, text out",
    "roles/doctor/": "a command line: looks at this machine, text out",
    "roles/engines/adapters.py": "a command line: a learner's checkpoint in, an adapter out",
    "roles/engines/hardware.py": "looks at the machine, for a worker process or a command line",
    "roles/envs/examine.py": "a command line: an environment in two processes, text out",
    "roles/envs/wasm.py": "runs inside the worker process, and compiles for it",
    "roles/diloco/corpus.py": "runs inside the worker process",
    "roles/diloco/pretrain.py": "runs inside the worker process",
    "roles/diloco/worker.py": "is the worker process",
    "roles/engines/torch/": "runs inside the worker process",
    "roles/engines/vllm/": "runs inside the worker process",
    "roles/envs/capsule.py": "runs inside the worker process; packs a command line's folder",
    "roles/envs/data.py": "reads files inside the worker process",
    "roles/envs/installed.py": "hashes installed packages before they are imported",
    "roles/models/bundle.py": "a model's folder, for a command line or inside a worker process",
    "roles/models/ends.py": "a command line: a folder in, its end tokens out",
    "roles/models/fetch.py": "a command line: a package in, a folder out",
    "roles/models/gguf.py": "a command line: a file in, a folder out",
    "roles/models/inspect.py": "a command line: a folder in, text out",
    "roles/models/files.py": "a model's folder, for a command line or inside a worker process",
    "roles/models/tokenizer.py": "runs inside the environment's process",
    "roles/models/trial.py": "a command line: tries a stranger's tokenizer in a process",
    "roles/engines/worker.py": "is the worker process",
    "roles/envs/ration.py": "limits a worker process to what it may spend",
    "roles/workers/server.py": "the standard streams of a worker process",
    "roles/workers/files.py": "runs in the worker process, and in a thread of the node",
    "roles/own/__main__.py": "a command line: paths in, text out",
}

# Handlers that may swallow anything. Each stands at a border where one side must outlive the
# other.
BROAD_EXCEPTS = {
    # what ends the feeding thread is raised again in TRL's own
    "roles/trl/seams.py": 1,
    # an environment is foreign code, called for every stranger's completions
    "roles/envs/contained.py": 1,
    # a chat template is a stranger's program, and may raise whatever Python knows
    "roles/models/template.py": 1,
    # transformers raises whatever its checks of a stranger's config.json and its layers do
    "roles/engines/torch/hosted.py": 1,
    # the library that reads a stranger's tokenizer.json raises plain `Exception`, and panics
    "roles/models/tokenizer.py": 1,
    # whatever a role's health raises, or a lie that finds a bug there: showing ends no work
    "p2p/node/dashboard/snapshots.py": 1,
    # what a package's role says of itself only shows, and ends no node
    "p2p/node/role.py": 1,
    # hypercorn is foreign code: what one client triggers in it ends that client's connection
    "p2p/shardcast/http/server.py": 1,
    "p2p/swarm/swarm.py": 1,  # a bug that one peer can trigger must not take every peer down
    "p2p/node/entries.py": 1,  # a package's module may raise whatever it likes when imported
    "roles/rl/algorithms/find.py": 1,  # a package's algorithm, in the learner's worker
    "roles/trainer/metrics.py": 1,  # a sink of a package's: learning goes on without it
    "p2p/node/rundoc.py": 1,  # a stranger's bytes in another package's reader
    # what one peer's message triggers costs that peer, and not every member that it reaches
    "roles/diloco/session.py": 1,
    # past this frame trio would take a failed callback for its own bug
    "sim/kernel/queue.py": 1,
}

SLEEP_IN_LOOP = {
    "p2p/transport/tcp.py": "a punch that a router refuses is tried again a moment later",
    "p2p/swarm/connector.py": "a listener without free sockets pauses, as trio's own does",
    "p2p/circuit/relay.py": "a circuit carries no more bytes a second than its relay allows",
    "p2p/swarm/swarm.py": "a stream's messages, and our own news, have a greatest rate",
    "p2p/reach/autonat.py": "a round of questions ends with a pause, whatever changes",
    "p2p/reach/lan.py": "who comes into the local network later is found by asking again",
    "p2p/reach/relays.py": "a named relay that is away is asked again, ever more rarely",
    "p2p/shardcast/store.py": "a disk that refuses is tried again, ever more rarely",
    "roles/trainer/desk.py": "counts the seconds in which it serves: time itself is waited for",
    "p2p/cast/pull_http.py": "shardcast's servers tell of a version only when asked",
    "roles/own/stage.py": "a terminal shows the seconds that pass",
    "roles/engines/external.py": "another program's files, perhaps on a shared file system",
    "roles/trl/run.py": "a node's files, perhaps on a shared file system",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=relative(path))


def is_exempt(name: str) -> bool:
    return any(
        name == entry or (entry.endswith("/") and name.startswith(entry)) for entry in EXEMPT
    )


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, also those under ``if TYPE_CHECKING``, but for ``__hash__``, where ``hash()``
    is at home.
    """
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef) and child.name == "__hash__":
            continue
        yield child
        yield from nodes_of(child)


def sins_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (
                f"imports {n.name}" for n in names if n.name.split(".")[0] in FORBIDDEN_MODULES
            )
            yield from (f"imports {n.name}" for n in names if n.name == "random")
        case ast.ImportFrom(module=str(module), names=names):
            if module.split(".")[0] in FORBIDDEN_MODULES:
                yield f"imports {module}"
            if module == "random":
                yield from (f"imports random.{n.name}" for n in names if n.name != "Random")
            if module == "trio":
                yield from (
                    f"imports trio.{n.name}" for n in names if FORBIDDEN_TRIO.fullmatch(n.name)
                )
        case ast.Call(func=ast.Name(id="Random"), args=[], keywords=[]):
            yield "calls Random() without a seed"
        case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
            yield f"calls {name}()"
        case ast.Attribute(value=ast.Name(id="trio"), attr=attr) if FORBIDDEN_TRIO.fullmatch(
            attr
        ):
            yield f"uses trio.{attr}"
        case ast.Attribute(
            value=ast.Attribute(value=ast.Name(id="trio"), attr="lowlevel"), attr=attr
        ):
            if FORBIDDEN_TRIO.fullmatch(attr):
                yield f"uses trio.lowlevel.{attr}"


def test_the_machine_stays_behind_the_seams() -> None:
    assert not [
        f"{relative(path)}:{getattr(node, 'lineno', 0)} {sin}"
        for path in BEHIND_SEAMS
        if not is_exempt(relative(path))
        for node in nodes_of(tree_of(path))
        for sin in sins_of(node)
    ]


def test_every_exemption_is_needed() -> None:
    for entry in EXEMPT:
        path = ROOT / entry
        if not path.exists():
            continue
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        assert any(list(sins_of(node)) for file in files for node in nodes_of(tree_of(file))), (
            entry
        )


def broad_handlers(tree: ast.AST) -> int:
    """Handlers of everything that do not end by raising again."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "BaseException"
            raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            count += bool(re.search(r"\b(Base)?Exception\b", caught)) and not raises
    return count


def test_exactly_these_handlers_catch_everything() -> None:
    found = {
        relative(path): count for path in SOURCES if (count := broad_handlers(tree_of(path)))
    }
    assert found == {
        name: count for name, count in BROAD_EXCEPTS.items() if (ROOT / name).exists()
    }


def test_nobody_polls() -> None:
    polling = {
        relative(path)
        for path in BEHIND_SEAMS
        for loop in ast.walk(tree_of(path))
        if isinstance(loop, ast.While)
        for call in ast.walk(loop)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "sleep"
    }
    assert polling == set(SLEEP_IN_LOOP)


# What lies in a folder `core/`, and in `proofs/`, is pure by contract: no file is named.
CORES = [path for path in SOURCES if "core" in path.parent.relative_to(ROOT).parts]
PURE = [*CORES, *(path for path in SOURCES if path.relative_to(ROOT).parts[0] == "proofs")]
IMPURE = FORBIDDEN_MODULES | {"logging", "trio"}


def test_what_lies_in_a_pure_folder_is_pure() -> None:
    """Import-linter's contract says the same of what these modules import in their turn."""
    assert CORES
    for path in PURE:
        tree = tree_of(path)
        assert not imported(path) & IMPURE, path
        assert not [sin for node in nodes_of(tree) for sin in sins_of(node)], path
        assert not [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.AsyncFunctionDef | ast.Await)
        ], path


def test_the_contracts_of_purity_name_folders_only() -> None:
    """A list of files is out of date with the next file; a folder is not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    pure = [c for c in contracts if "trio" in c.get("forbidden_modules", ())]
    assert [c["source_modules"] for c in pure] == [["p2p.**.core", "roles.**.core"], ["proofs"]]
    assert not any("ignore_imports" in contract for contract in pure)


def test_every_service_has_a_core() -> None:
    """A package of `p2p` with a driver decides beside it: what knows trio has a folder `core/`
    next to it, unless it only composes services.
    """
    drivers = {
        path.parent
        for path in SOURCES
        if len(path.relative_to(ROOT).parts) == 3
        and path.relative_to(ROOT).parts[0] == "p2p"
        and "trio" in imported(path)
    }
    folders = {relative(folder) for folder in drivers} - {"p2p/cast", "p2p/node"}
    assert {"p2p/dht", "p2p/ledger", "p2p/shardcast", "p2p/transport"} <= folders
    assert not [folder for folder in folders if not (ROOT / folder / "core").is_dir()]


def imported(path: Path) -> set[str]:
    """The first names of the modules that a file imports."""
    found = set()
    for node in nodes_of(tree_of(path)):
        match node:
            case ast.Import(names=names):
                found |= {name.name.split(".")[0] for name in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.split(".")[0])
    return found


def is_set(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return isinstance(node, ast.Set | ast.SetComp) or (
        is_call and node.func.id in {"set", "frozenset"}
    )  # type: ignore[attr-defined]


def test_nobody_iterates_over_a_set() -> None:
    """Sets of text and bytes come in another order in every process; simulations must not
    notice.
    """
    assert not [
        f"{relative(path)}:{ast.unparse(loop.iter)}"
        for path in SOURCES
        for loop in ast.walk(tree_of(path))
        if isinstance(loop, ast.For | ast.comprehension) and is_set(loop.iter)
    ]


def test_imports_point_one_way() -> None:
    found = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_entry_point_leads_somewhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    targets = [
        target for group in project["entry-points"].values() for target in group.values()
    ]
    for target in [*targets, *project["scripts"].values()]:
        module, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module), name), target


def test_the_threat_model_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_the_tables_of_the_architecture_name_files_that_exist() -> None:
    """A file by its path, or, behind another one, by its path from that one's folder; and a
    function of it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    strange = []
    for cells in (row.strip("|").split("|") for row in rows):
        file = ROOT
        for name in re.findall(r"`([\w/.]+)`", cells[-1]):
            if name.endswith(".py"):
                file = ROOT / name if (ROOT / name).exists() else file.parent / name
                found = file.exists()
            else:
                found = re.search(rf"def {name}\b", file.read_text("utf-8")) is not None
            strange += [] if found else [name]
    assert strange == []


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_importing_p2p_is_light() -> None:
    heavy = python(
        "import sys, p2p; print(sorted({'torch', 'numpy', 'asyncio', 'kademlia', 'rich',"
        " 'zstandard', 'blake3'} & set(sys.modules)))"
    )
    assert heavy.strip() == "[]"


def test_shoal_pull_imports_what_it_needs() -> None:
    """No run document, no DHT, no roles; rich only where somebody reads bars."""
    loaded = python(
        "import sys; from p2p.node.commands import load_command; load_command('pull');"
        " import p2p.cast.puller; print([name for name in sys.modules if"
        " name.startswith(('p2p.dht', 'p2p.ledger', 'roles', 'torch', 'rich', 'aiohttp'))])"
    )
    assert loaded.strip() == "[]"


def cpu_seconds(module: str) -> float:
    code = (
        f"import time; before = time.process_time(); import {module}; print(time.process_time()"
        " - before)"
    )
    return float(python(code))


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules of the project that a file imports, under ``if TYPE_CHECKING`` too, in
    functions not.

    What a function imports is imported late on purpose: torch, and what comes with kademlia.
    """
    found = set()
    for node in outer_nodes(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def module_of(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def outer_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from outer_nodes(child)


def test_no_two_files_need_each_other_not_even_for_types() -> None:
    """In a circle there is no first file to read."""
    files = {module_of(path): path for path in SOURCES}
    graph = {name: imports_of(path, set(files)) - {name} for name, path in files.items()}
    assert {"p2p.host", "p2p.world"} <= graph["p2p.node.role"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


CLOCK_CALLS = re.compile(
    r"(time\.)?(time|monotonic|perf_counter|process_time|thread_time)(_ns)?|"
    r"(timeit\.)?timeit|trio\.current_time|os\.times"
)
CLOCK_NAMES = {"cpu_seconds", "ru_utime", "ru_stime"}
VIRTUAL_CLOCKS = {"autojump_clock", "mock_clock"}


def asserted_times(tree: ast.Module) -> list[int]:
    """Lines that assert how a value from a real clock compares with one that is from no clock.

    A quotient of two times is from no clock, and two times may be compared with each other:
    what makes one slow makes the other slow. What a test stores in a name, in an attribute or
    in what a function of the module returns is followed.
    """
    modules = [one.module or "" for one in tree.body if isinstance(one, ast.ImportFrom)]
    plays = any(module.startswith("sim.") for module in modules)
    times = set() if plays else {"world.now"}  # of the real World
    before = -1
    while len(times) > before:
        before = len(times)
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=targets, value=value) if is_time(value, times):
                    times |= {ast.unparse(one).rpartition(".")[2] for one in targets}
                case ast.AugAssign(target=one, value=value) if is_time(value, times):
                    times.add(ast.unparse(one).rpartition(".")[2])
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
                    if any(one is not None and is_time(one, times) for one in returned):
                        times.add(name)
    return [
        node.lineno
        for claim in ast.walk(tree)
        if isinstance(claim, ast.Assert)
        for node in ast.walk(claim)
        if isinstance(node, ast.Compare)
        and "math.inf" not in map(ast.unparse, node.comparators)  # whether it ends at all
        and len({is_time(one, times) for one in (node.left, *node.comparators)}) == 2
    ]


def is_time(node: ast.expr, times: set[str]) -> bool:
    match node:
        case ast.BinOp(left=left, right=right, op=ast.Div() | ast.FloorDiv()):
            return is_time(left, times) and not is_time(right, times)
        case ast.BinOp(left=left, right=right):
            return is_time(left, times) or is_time(right, times)
        case ast.Call(func=func, args=arguments):
            called = ast.unparse(func)
            is_known = called.rpartition(".")[2] in times or (
                "world.now" in times and called.endswith("world.now")
            )
            handed = called in ("min", "max", "sum", "sorted", "round", "abs", "float", "int")
            return (
                is_known
                or CLOCK_CALLS.fullmatch(called) is not None
                or (handed and any(is_time(one, times) for one in arguments))
            )
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in times or name in CLOCK_NAMES
        case ast.Await(value=value) | ast.UnaryOp(operand=value) | ast.Subscript(value=value):
            return is_time(value, times)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return any(is_time(one, times) for one in items)
    return False


def on_real_clocks(tree: ast.Module) -> ast.Module:
    """The module without tests on trio's test clocks, where `trio.current_time` is virtual."""
    body = [
        node
        for node in tree.body
        if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)
        or not VIRTUAL_CLOCKS & {one.arg for one in node.args.args}
    ]
    return ast.Module(body=body, type_ignores=[])


def test_no_test_asserts_how_long_something_takes() -> None:
    """On a busy machine one of 5,395 failed, by 0.1 of 3 CPU seconds. A cost is bounded by a
    count (`tests.counting`), by a ratio, or by the limit that the product itself enforces.
    """
    found = [
        f"{relative(path)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in asserted_times(on_real_clocks(tree_of(path)))
    ]
    assert found == []
