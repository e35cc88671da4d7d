"""The outcome of the demonstration on a terminal; the report shows the same figures as a page."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from models.types import Estimate

Compared = Mapping[str, Any]


def show_demonstration(result: Mapping[str, Any], out: Console) -> None:
    domains: dict[str, Compared] = result["domains"]
    table = Table("", *domains, title=f"held-out prompts, K = {result['num_draft_tokens']}, greedy")
    told = [_rows(compared) for compared in domains.values()]
    for name in told[0]:
        table.add_row(name, *(of_domain[name] for of_domain in told))
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


def _rows(compared: Compared) -> dict[str, str]:
    before, after = compared["before"], compared["after"]

    def interval(found: Mapping[str, float] | None, form: str = ".2f") -> str:
        return "none" if found is None else Estimate(**found).text(form)

    return {
        "prompts": f"{after['num_sequences']}",
        "τ before": interval(before["tau"]),
        "τ after": interval(after["tau"]),
        "τ gain": interval(compared["gain"], "+.2f"),
        "τ gain, relative": interval(compared["relative_gain"], "+.1%"),
        "acceptance rate before": interval(before["rate"]),
        "acceptance rate after": interval(after["rate"]),
        "looping outputs, before and after": f"{before['num_looping']} and {after['num_looping']}",
        "τ before, without loops": interval(before["tau_without_loops"]),
        "τ after, without loops": interval(after["tau_without_loops"]),
        "acceptance rate before, without loops": interval(before["rate_without_loops"]),
        "acceptance rate after, without loops": interval(after["rate_without_loops"]),
    }
