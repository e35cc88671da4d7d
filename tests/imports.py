"""What a file of the product imports; `test_layout.py` holds it against what its room may import."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("flows", "tasks", "services", "models", "infra")
# Open to who may not import the rest of models.
RECIPE = "models.recipe"


def imported(file: Path) -> set[str]:
    """Return the packages that a file imports; the recipe, open to who may not import the rest of models, by itself."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name if name == RECIPE else name.partition(".")[0] for name in names}
