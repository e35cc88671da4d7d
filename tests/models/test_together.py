"""What goes together follows from declarations alone: a later method may not change what an earlier one keeps."""

import ast
from pathlib import Path

import pytest

from models import catalog, together
from models.together import LOST, Declared, declared, require_kept

PAINTS = Declared('"paint" in [prune]', ("zeroes",), ())
DIGS = Declared('"dig" in [pretrain]', (), ("zeroes",))


def test_the_later_of_two_may_not_change_what_the_earlier_keeps() -> None:
    with pytest.raises(
        ValueError, match=r'^"paint" in \[prune\] fills the zeroes of "dig" in \[pretrain\]; choose one of the two$'
    ):
        require_kept([DIGS, Declared("between", ("steps",), ()), PAINTS])
    require_kept([PAINTS, DIGS])
    require_kept([DIGS, Declared('"look" in [prune]', ("steps",), ("zeroes",))])


def test_what_is_kept_or_changed_is_known_and_settings_may_decide_it() -> None:
    gate = catalog.load("regimes", "layer_skip_gate").Params
    folded, plain = (declared("regimes", gate(fold=fold), "it") for fold in (True, False))
    assert set(folded.changes) - set(plain.changes) == {"frozen weights"}
    for family in ("regimes", "adapters", "prune", "quantize", "shrink"):
        for name in catalog.names(family):
            assert set(getattr(catalog.load(family, name), "KEEPS", ())) <= LOST.keys()
    assert all(
        declared("adapters", catalog.parse("adapters", {"name": name}), name).keeps for name in ("lora", "qlora")
    )


def test_no_method_is_named_where_they_are_compared() -> None:
    tree = ast.parse(Path(together.__file__).read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    methods = {name for family in catalog.families() for name in catalog.names(family)}
    assert words & methods <= {*together.PARTS}  # a part of training has the name of a way to shrink
