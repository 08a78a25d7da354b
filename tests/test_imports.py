"""Imports: no circle among modules, those in functions and for type checkers counted.

Which packages may import which is in pyproject.toml, for import-linter.
"""

import grimp
import networkx
import pytest


@pytest.fixture(scope="module")
def imports():
    """Every import of one of our modules by another, wherever it stands in the file."""
    graph = grimp.build_graph("pcg", "pcg_cli", cache_dir=None)
    edges = networkx.DiGraph()
    edges.add_nodes_from(graph.modules)
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            edges.add_edge(importer, imported)
    return edges


def test_no_module_imports_itself_by_others(imports):
    circles = [
        networkx.find_cycle(imports.subgraph(modules))
        for modules in networkx.strongly_connected_components(imports)
        if len(modules) > 1
    ]
    shown = [" → ".join([edge[0] for edge in circle] + [circle[0][0]]) for circle in circles]
    assert shown == []


def test_no_module_is_left_alone(imports):
    """What nothing imports is a package's root or an entry point."""
    entries = {"pcg", "pcg_cli", "pcg_cli.__main__"}
    entries |= {"pcg.kernels.triton.ops"}  # which emitted programs call
    # The table of operators finds its modules by their folder.
    entries |= {name for name in imports if name.startswith("pcg.ir.operators.")}
    alone = {name for name in imports if not imports.in_degree(name)} - entries
    packages = {name for name in imports if any(other.startswith(f"{name}.") for other in imports)}
    assert alone - packages == set()


def test_groups_of_processes_stand_on_graphs_and_errors_alone(imports):
    room = "pcg.ranks"
    below = (f"{room}.", "pcg.ir.", "pcg.errors", "pcg.version")
    for importer, imported in imports.edges:
        if importer.startswith(room):
            assert imported.startswith(below), (importer, imported)
