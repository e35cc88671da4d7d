"""What people are shown, of typed plain data: a view asks nobody and computes nothing that it does not show."""

NONE = "–"
MEANING = "τ is the mean accepted length, 1 + accepted draft tokens / verification steps"


def shown(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"
