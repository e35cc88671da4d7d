"""Which comparisons there are: each file of `tasks.measure.comparisons`. Listing them imports none, and no torch."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from models.params import did_you_mean
from tasks.measure import comparisons


def families() -> list[str]:
    """Return the names of the comparisons there are."""
    return sorted(module.name for module in iter_modules(comparisons.__path__))


def load_comparison(family: str) -> ModuleType:
    """Import a comparison; ValueError names the nearest one if there is none of that name."""
    if family not in (known := families()):
        raise ValueError(f'no family to compare is called "{family}"{did_you_mean(family, known)}')
    return import_module(f"{comparisons.__name__}.{family}")
