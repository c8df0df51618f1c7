"""The rooms' imports go one way: the table of docs/architecture.md, and no cycle between files."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "megatron_agentrl"

#: room -> rooms it may import, besides `recipe` and `observe` (and itself)
MAY_IMPORT = {
    "recipe": set(),
    "observe": set(),
    "trajectory": set(),
    "chat": {"trajectory"},
    "data": {"chat"},
    "agent": {"trajectory"},
    "gateway": {"chat", "trajectory"},
    "layout": set(),
    "weights": {"layout"},
    "rollout": {"agent", "gateway", "weights", "trajectory"},
    "coordinator": {"trajectory", "data"},
    "algorithm": set(),
    "trainer": {"algorithm", "layout", "weights", "trajectory", "data"},
    "convert": {"layout", "trainer"},
    "launch": set(),
    "planner": {"layout"},
    "cpu": set(),
    "app": {"*"},
}


def modules() -> dict[str, Path]:
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of this project that a file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; name the module in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {m for m in found if m in known and m != name and m != "megatron_agentrl"}


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_folder_is_a_room_of_the_table():
    folders = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert folders == set(MAY_IMPORT)


def test_rooms_import_only_what_the_table_allows():
    known = modules()
    wrong = []
    for name, path in known.items():
        if name == "megatron_agentrl":
            continue
        allowed = MAY_IMPORT[room(name)] | {"recipe", "observe", room(name)}
        if room(name) in ("recipe", "observe"):
            allowed = {"recipe", room(name)}
        wrong += [
            f"{name} imports {m}" for m in imports(name, path, known) if "*" not in allowed and room(m) not in allowed
        ]
    assert wrong == []


def test_no_cycle_between_files():
    known = modules()
    graph = {name: imports(name, path, known) - {"megatron_agentrl"} for name, path in known.items()}
    # a package's __init__ is not an edge target of its own members unless it is imported for its content
    done: set[str] = set()

    def visit(node: str, trail: tuple[str, ...]) -> None:
        assert node not in trail, "import cycle: " + " -> ".join((*trail[trail.index(node) :], node))
        if node in done:
            return
        for child in sorted(graph[node]):
            visit(child, (*trail, node))
        done.add(node)

    for node in sorted(graph):
        visit(node, ())


def test_only_entry_points_name_the_cpu_shims():
    known = modules()
    users = {
        name
        for name, path in known.items()
        if room(name + ".x") != "cpu" and any(room(m) == "cpu" for m in imports(name, path, known))
    }
    assert {room(u) for u in users} <= {"app"}


def test_recipe_layout_and_planner_never_import_torch():
    for folder in (
        "recipe",
        "observe",
        "layout",
        "planner",
        "launch",
        "coordinator",
        "gateway",
        "chat",
        "agent",
        "trajectory",
        "data",
    ):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                assert not any(n.split(".")[0] == "torch" for n in names), f"{path} imports torch"
