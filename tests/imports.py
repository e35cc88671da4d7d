"""Who imports whom, as a table and as a picture.

    python -m tests.imports [--root CHECKOUT] [--svg FILE] [--title TEXT]

An arrow's number is how many modules of one room import the other. The recipe and the types stand apart from
the rest of models, because they are open to who may not import that. `test_layout.py` holds the directions, and the
picture of them.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOMS = ("flows", "tasks", "services", "models", "infra")
RECIPE, TYPES = "models.recipe", "models.types"
OPEN = (RECIPE, TYPES)  # of models, open to who may not import the rest
WIDTH, HEIGHT = 760, 500
BOX_WIDTH, BOX_HEIGHT = 216, 96
LINE_HEIGHT = 17
MOST_PACKAGES = 3
PLACES = {"flows": (92, 48), "services": (500, 48), "tasks": (92, 212), "models": (92, 376), "infra": (500, 376)}
# From where to where an arrow is drawn: start, two points that bend it, end. Others are straight, and red.
BENDS = {
    ("flows", "tasks"): ((200, 144), (200, 168), (200, 188), (200, 212)),
    ("flows", "infra"): ((308, 120), (440, 170), (530, 280), (560, 376)),
    ("flows", "models"): ((92, 96), (28, 160), (28, 370), (92, 424)),
    ("infra", TYPES): ((500, 440), (440, 440), (370, 440), (308, 440)),
    ("flows", RECIPE): ((92, 96), (28, 160), (28, 370), (92, 424)),
    ("tasks", "models"): ((200, 308), (200, 332), (200, 352), (200, 376)),
    ("tasks", "infra"): ((308, 260), (380, 280), (440, 360), (500, 412)),
    ("services", "models"): ((540, 144), (500, 260), (400, 380), (308, 420)),
    ("services", "infra"): ((630, 144), (630, 200), (630, 320), (630, 376)),
}
STYLE = """
svg {
  color: #1c2024;
  --page: #fcfcfa; --panel: #f2f3f1; --rule: #8b949e; --soft: #5b6570; --arrow: #0b62a8; --up: #a3281f;
}
@media (prefers-color-scheme: dark) {
  svg {
    color: #e7e9ea;
    --page: #14171a; --panel: #1d2125; --rule: #6b747d; --soft: #a0a9b2; --arrow: #63b3f2; --up: #ff9a8f;
  }
}
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif; fill: currentColor; }
text.name { font-size: 15px; font-weight: 600; }
text.soft { fill: var(--soft); }
.plate { fill: var(--page); }
.box { fill: var(--panel); stroke: var(--rule); }
.arrow, .up { fill: none; stroke: var(--arrow); stroke-width: 2; }
.up { stroke: var(--up); stroke-dasharray: 6 4; }
.head { fill: var(--arrow); }
"""
MARKER = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0L10 5L0 10z"/></marker></defs>'
)

Arrow = tuple[str, str]
Point = tuple[float, float]


class Room(NamedTuple):
    """What lies in a room: modules, lines, and the lines of its largest packages."""

    num_modules: int
    num_lines: int
    packages: Mapping[str, int]


def imported(file: Path) -> set[str]:
    """Return the packages that a file imports; of models, what is open to who may not import the rest by itself."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name if name in OPEN else name.partition(".")[0] for name in names}


def arrows(root: Path = ROOT) -> Counter[Arrow]:
    """Return (room, imported room) to the number of modules that do so; of models, what is open is told as such."""
    found: Counter[Arrow] = Counter()
    for room in ROOMS:
        files = [imported(file) & {*ROOMS, *OPEN} - {room} for file in sorted((root / room).rglob("*.py"))]
        whole = any("models" in names for names in files)
        for names in files:
            found.update((room, other) for other in {"models" if whole and name in OPEN else name for name in names})
    return Counter({(room, other): count for (room, other), count in found.items() if other.partition(".")[0] != room})


def measure(room: Path) -> Room:
    """Count the lines of a room."""
    lines = {file: len(file.read_text().splitlines()) for file in sorted(room.rglob("*.py"))}
    packages: Counter[str] = Counter()
    for file, count in lines.items():
        if file.parent != room:
            packages[file.relative_to(room).parts[0]] += count
    return Room(len(lines), sum(lines.values()), dict(packages.most_common(MOST_PACKAGES)))


def draw(title: str, rooms: Mapping[str, Room], found: Mapping[Arrow, int]) -> str:
    """Return the picture as SVG that is legible on light and on dark pages."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape('; '.join(_sentence(arrow, count) for arrow, count in sorted(found.items())))}</desc>",
            f"<style>{STYLE}</style>",
            MARKER,
            f'<rect class="plate" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<text class="name" x="24" y="28">{escape(title)}</text>',
            *(part for arrow, count in sorted(found.items()) for part in _drawn_arrow(arrow, count)),
            *(part for name, room in rooms.items() for part in _drawn_room(name, room)),
            "</svg>\n",
        ]
    )


def _sentence(arrow: Arrow, count: int) -> str:
    return f"{count} modules of {arrow[0]} import {arrow[1]}"


def _drawn_arrow(arrow: Arrow, count: int) -> Iterator[str]:
    kind, points = "arrow", BENDS.get(arrow)
    if points is None:
        kind, points = "up", _straight(*arrow)
    start, *bends, end = (f"{x:g} {y:g}" for x, y in points)
    path = f"M{start}C{', '.join(bends)}, {end}"
    yield f'<path class="{kind}" data-arrow="{arrow[0]} {arrow[1]}" d="{path}" marker-end="url(#head)"/>'
    weights = (1, 3, 3, 1)  # of a cubic curve's points at its middle
    x, y = (sum(weight * point[axis] for weight, point in zip(weights, points, strict=True)) / 8 for axis in (0, 1))
    label = f"{count} ({arrow[1].removeprefix('models.')})" if arrow[1] in OPEN else f"{count}"
    half = 4 + 3.4 * len(label)
    yield f'<rect class="plate" x="{x - half:.1f}" y="{y - 9:.1f}" width="{2 * half:.1f}" height="18" rx="4"/>'
    yield f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{label}</text>'


def _straight(room: str, other: str) -> tuple[Point, ...]:
    (x1, y1), (x2, y2) = (PLACES[name.partition(".")[0]] for name in (room, other))
    start, end = ((x + BOX_WIDTH / 2, y + BOX_HEIGHT / 2) for x, y in ((x1, y1), (x2, y2)))
    return start, start, end, end


def _drawn_room(name: str, room: Room) -> Iterator[str]:
    x, y = PLACES[name]
    yield f'<rect class="box" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8"/>'
    yield f'<text class="name" x="{x + 14}" y="{y + 24}">{name}/</text>'
    lines = [f"{room.num_modules} modules, {room.num_lines:,} lines"]
    lines += [f"{package}/ {count:,}" for package, count in room.packages.items()]
    shown = [lines[0], ", ".join(lines[1:3]), *lines[3:]]
    for number, line in enumerate(shown):
        yield f'<text class="soft" x="{x + 14}" y="{y + 44 + LINE_HEIGHT * number}">{escape(line)}</text>'


def main() -> None:
    """Print the table; draw the picture where one is wanted."""
    parser = argparse.ArgumentParser(prog="python -m tests.imports", description="Who imports whom.")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--title", default="Imports between rooms: how many modules of one import the other")
    arguments = parser.parse_args()
    found = arrows(arguments.root)
    columns = [*ROOMS, *OPEN]
    print(" " * 10 + "".join(f"{name:>14}" for name in columns))
    for room in ROOMS:
        print(f"{room:10}" + "".join(f"{found[room, other] or '·':>14}" for other in columns))
    if arguments.svg:
        rooms = {room: measure(arguments.root / room) for room in ROOMS}
        arguments.svg.write_text(draw(arguments.title, rooms, found), encoding="utf-8")


if __name__ == "__main__":
    main()
