"""What pages are made of: cards, tables, figures, and the template that shows them.

A page loads nothing and runs no script. All text in it is escaped by its template.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


class Card(NamedTuple):
    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Collection[int] = ()


@dataclass(frozen=True)
class Figure:
    chart: Markup
    caption: str


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **shown: Any) -> str:
    return TEMPLATES.get_template(template).render(**shown)
