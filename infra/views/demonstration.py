"""The outcome of the demonstration on a terminal; the report shows the same figures as a page."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from models.types import Estimate

Compared = Mapping[str, Any]


def show_demonstration(result: Mapping[str, Any], out: Console) -> None:
    """Print what the demonstration found, as it stands in its `result.json`."""
    domains: dict[str, Compared] = result["domains"]
    table = Table("", *domains, title=f"held-out prompts, K = {result['num_draft_tokens']}, greedy")
    for name, cell in ROWS.items():
        table.add_row(name, *(cell(compared) for compared in domains.values()))
    for name in ("on", "off"):
        table.add_row(f"tokens/s, speculation {name}", *(str(result["tokens_per_s"][name][d]) for d in domains))
    if (stock := result.get("stock")) is not None:  # of what an earlier release left there is none
        table.add_row("tokens/s, vLLM compiled without a draft", *(str(stock["tokens_per_s"][d]) for d in domains))
        table.add_row("against vLLM compiled without a draft", *(f"{stock['gain'][d]:.2f}×" for d in domains))
    out.print(table)
    outputs = result["outputs"]
    out.print(
        f"outputs of {outputs['num_compared']} prompts after the swap, compared with no speculation: "
        f"{outputs['verdicts']}"
    )
    if stock is not None:
        out.print(
            f"outputs of {stock['outputs']['num_compared']} prompts by vLLM's own endpoint, compared with those: "
            f"{stock['outputs']['verdicts']}"
        )
    for name, run in zip(("first", "new"), result["training"], strict=False):
        out.print(f"training of the {name} draft: {run['seconds']:.0f} s, {run['tokens_per_s']:.0f} tokens/s")
    out.print(f"requests: {result['requests']}, swaps: {result['swaps']}, seconds: {result['seconds']}")


def _interval(found: Mapping[str, float] | None, form: str = ".2f") -> str:
    return "none" if found is None else Estimate(**found).text(form)


def _of(side: str, figure: str) -> Callable[[Compared], str]:
    return lambda compared: _interval(compared[side][figure])


ROWS: Mapping[str, Callable[[Compared], str]] = {
    "prompts": lambda compared: f"{compared['after']['num_sequences']}",
    "τ before": _of("before", "tau"),
    "τ after": _of("after", "tau"),
    "τ gain": lambda compared: _interval(compared["gain"], "+.2f"),
    "τ gain, relative": lambda compared: _interval(compared["relative_gain"], "+.1%"),
    "acceptance rate before": _of("before", "rate"),
    "acceptance rate after": _of("after", "rate"),
    "looping outputs, before and after": lambda compared: (
        f"{compared['before']['num_looping']} and {compared['after']['num_looping']}"
    ),
    "τ before, without loops": _of("before", "tau_without_loops"),
    "τ after, without loops": _of("after", "tau_without_loops"),
    "acceptance rate before, without loops": _of("before", "rate_without_loops"),
    "acceptance rate after, without loops": _of("after", "rate_without_loops"),
}
