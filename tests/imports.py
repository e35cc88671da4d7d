"""What a file of the product imports; `test_layout.py` holds it against what its room may import."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("flows", "tasks", "services", "models", "infra")
RECIPE, TYPES = "models.recipe", "models.types"
OPEN = (RECIPE, TYPES)  # of models, open to who may not import the rest


def imported(file: Path) -> set[str]:
    """Return the packages that a file imports; of models, what is open to who may not import the rest by itself."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name if name in OPEN else name.partition(".")[0] for name in names}
