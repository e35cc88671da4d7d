"""Holds a release of vLLM against what redraft uses of it."""

from tests.compat.tree import Tree, is_classmethod
from tests.compat.uses import Call, Use


def fault(use: Use, tree: Tree, before: Tree) -> str:
    """Return what of a use a release does not have, "" if it has all.

    Args:
        use: what is wanted.
        tree: the release's sources.
        before: of the release that redraft was written for.
    """
    found = tree.find(use.symbol)
    if found is None:
        if (place := tree.moved(use.symbol)) and before.find(use.symbol) is not None:
            return f"moved to {place}"
        owner = use.symbol.rpartition(".")[0]
        if (place := tree.moved(owner)) and tree.find(owner) is None:
            return fault(use._replace(symbol=f"{place}.{use.symbol.rpartition('.')[2]}"), tree, before)
        return "gone"
    earlier = before.find(use.symbol)
    if found.elsewhere:
        return "gone" if earlier is not None and not earlier.elsewhere else ""
    takes = tree.parameters(found)
    if use.keyword:
        known = tree.names_in(use.symbol) if takes is None else {*takes.names, *takes.keywords}
        return "" if use.keyword in known else f"has no {use.keyword}"
    if takes is None or use.wants is None:
        return ""
    if isinstance(use.wants, Call):
        num, names, spread, by_class = use.wants
        return takes.why_not_called(num - (by_class and not is_classmethod(found.node)), names, spread)
    written_for = None if earlier is None else before.parameters(earlier)
    return takes.why_not_replaced(use.wants, written_for or takes)
