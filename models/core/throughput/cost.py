"""What a step of an engine takes: a table measured once, refined from the times of the steps that are served.

    T(S, R, P) = d · (f(S, R) + P · g(S))

ms of a step with S sequences, R rows of the target (each sequence's last token and what was drafted after it) and P
passes of the draft. f is piecewise linear in the rows a sequence, and in S; what K is best depends on the ratios of the
table alone.

- A machine that slows down or is shared slows every step, and what was measured once is wrong at some points, so an
  error says that d has changed or that a point is wrong. Logarithms of all of them are followed by one Kalman filter:
  d wanders, points hardly do, and their covariance remembers what was not told apart, so that steps that take turns
  with others put right what of their ratio was wrong. K depends on that ratio alone.
- A step that reads prompts is in no table, since their tokens take their time with a draft or without. What the draft
  takes to read them too is a price of drafting: with many short answers it decides whether a draft pays.
- Errors are cut at three times their usual size: a step of 100 ms among those of 10 counts as one of 12.
"""

import json
import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from models.core.throughput.isotonic import ascending
from models.core.throughput.steps import Curve, Line, between, passes_made
from models.types import Frozen, Positive

PAPER = "Kalman 1960, A new approach to linear filtering and prediction problems"

SPREAD_RATE = 0.02
SPREAD = 0.1  # of the logarithms of times, before any was seen; never taken for less than LEAST_SPREAD
LEAST_SPREAD = 0.02
CUT = 3.0
LEAST_PASS = 0.02  # of the target's time, that a pass of a draft takes at least
DOUBT = 0.1  # of the ratios between the two halves of a measurement
# Standard deviations of logarithms: of a point as it was measured, beside other work, and of a pass of the draft, which
# is a difference; of what was never measured; of how far d moves in a step, in spreads, and a point.
KNOWN, DOUBTED, PASS, NEW = 0.1, 0.3, 0.3, 1.0
DRIFTS, WANDERS = 0.3, 0.001
FORMAT = 2  # of the file in which a table is kept over restarts; since 2 a step lasts until the next one begins

Floats = NDArray[np.float64]


class Time(NamedTuple):
    """What one step took: of at least a row a sequence, with passes over `num_drafted` sequences; 0 stands for all."""

    num_sequences: int
    num_rows: int
    num_passes: int
    ms: float
    num_drafted: int = 0


@dataclass(frozen=True)
class Cost:
    """The table; empty until something was measured.

    Attributes:
        curves: ascending in their number of sequences.
        measured_for: machine, target, draft's shape, the engine's mode, dtype and threads.
        drift: the logarithm of d.
        spread: mean size of the errors of the last steps, as logarithms.
        grows: it was never measured, so steps outside of it are taken as they come.
        noise: of the measurement: between its first and its second half, as a logarithm; the mean over its steps, but
            for what all of them differ by, since a slower machine changes no ratio.
        one_pass: the draft says all of its tokens in one pass (P-EAGLE, DFlash), so it makes 0 or 1.
        prompt_tokens: that are read for each emitted one, of late.
        num_read: prompt tokens that the step reads which is planned.
        covariance: of the errors of the logarithms of d, and of each curve's points and its pass; None before a step.
    """

    curves: tuple[Curve, ...] = ()
    measured_for: str = ""
    drift: float = 0.0
    spread: float = SPREAD
    num_steps: int = 0
    grows: bool = True
    noise: float = 0.0
    one_pass: bool = False
    prompt_tokens: float = 0.0
    num_read: int = 0
    covariance: Floats | None = field(default=None, compare=False)

    @property
    def doubted(self) -> bool:
        """Whether the machine was busy with something else while it was measured."""
        return self.noise > DOUBT

    @classmethod
    def measured(cls, times: Iterable[Time], measured_for: str = "") -> "Cost":
        """Make a table; of a step that was measured more than once a fast one counts, the lower quartile.

        Times are, for each number of sequences, of steps without a pass of the draft, of one and more rows a sequence,
        and of at least one with passes; in the order in which they were measured. ValueError if a time is impossible,
        or none is of a step without a pass.
        """
        plain: dict[int, dict[float, float]] = defaultdict(dict)
        drafted: dict[int, list[Time]] = defaultdict(list)
        measured: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for time in times:
            _check(time)
            measured[time.num_sequences, time.num_rows, time.num_passes].append(time.ms)
        for (num_sequences, num_rows, num_passes), every in measured.items():
            ms = sorted(every)[(len(every) - 1) // 4]  # what else runs can only make a step longer
            if num_passes:
                drafted[num_sequences].append(Time(num_sequences, num_rows, num_passes, ms))
            else:
                plain[num_sequences][num_rows / num_sequences] = ms
        if not plain:
            raise ValueError("wanted times of steps without a pass of the draft, got none")
        curves = []
        for num_sequences, by_rows in sorted(plain.items()):
            rows = tuple(sorted(by_rows))
            curve = Curve(num_sequences, rows, ascending([by_rows[number] for number in rows]))
            passes = [
                (time.ms - curve.target_ms(time.num_rows / num_sequences)) / time.num_passes
                for time in drafted[num_sequences]
            ]
            # Where the noise is larger than a pass, nothing is known of one here: other numbers of sequences tell.
            seen = bool(passes) and median(passes) > LEAST_PASS * curve.points[0]
            curves.append(curve._replace(draft=median(passes) if seen else None))
        if any(drafted.values()) and not any(curve.draft for curve in curves):
            curves[0] = curves[0]._replace(draft=LEAST_PASS * curves[0].points[0])
        return cls(tuple(curves), measured_for, grows=False, noise=_noise(measured.values()))

    def line(self, num_sequences: int) -> Line | None:
        """Return what steps of so many sequences take; None if nothing was measured."""
        if not self.curves:
            return None
        scale, inside = math.exp(self.drift), self._inside(num_sequences)
        near = [
            (self.curves[at], share, num_sequences if inside else self.curves[at].num_sequences)
            for at, share in between([curve.num_sequences for curve in self.curves], num_sequences)
        ]
        rows = sorted({number * unit for curve, _, unit in near for number in curve.rows})
        ms = [scale * sum(share * curve.target_ms(number / unit) for curve, share, unit in near) for number in rows]
        pass_ms, token_ms = self.pass_ms(num_sequences), self._token_ms()
        return Line(
            num_sequences, rows, ms, pass_ms, self.one_pass, self.prompt_tokens * token_ms, self.num_read * token_ms
        )

    def step_ms(self, num_sequences: int, num_rows: float, num_passes: float) -> float | None:
        """Estimate a step; None if nothing was measured that tells. Of many steps of a size `line` tells sooner."""
        pass_ms = self.pass_ms(num_sequences) if num_passes else 0.0
        if not self.curves or pass_ms is None:
            return None
        points = self._target(num_sequences, num_rows)
        target_ms = math.exp(self.drift) * sum(share * self.curves[at].points[place] for at, place, share in points)
        return target_ms + passes_made(num_passes, self.one_pass) * pass_ms

    def pass_ms(self, num_sequences: int) -> float | None:
        """Return what a pass of the draft over so many sequences takes; None if none was ever measured."""
        points = self._draft(num_sequences)
        return math.exp(self.drift) * sum(share * ms for _, share, ms in points) if points else None

    def _token_ms(self) -> float:
        """Return what the draft takes to read a prompt's token: as long as for one sequence more in a pass."""
        known = [(curve.num_sequences, curve.draft) for curve in self.curves if curve.draft is not None]
        if not (self.prompt_tokens or self.num_read) or len(known) < 2:
            return 0.0
        (few, few_ms), (many, many_ms) = known[0], known[-1]
        return math.exp(self.drift) * max(many_ms - few_ms, 0.0) / (many - few)

    def after(self, time: Time) -> "Cost":
        """Return the table refined by a step that read no prompt; ValueError if the time is impossible."""
        _check(time)
        grown = self._with_points_for(time)
        if not grown.curves or (time.num_passes and not grown._draft(1)):
            return grown
        covariance = grown._covariance()
        parts = grown._parts(time, len(covariance))
        undrifted = float(parts.sum())
        expected, shares = math.exp(self.drift) * undrifted, parts.clip(0.0) / undrifted
        shares[0] = 1.0
        noise = max(self.spread, LEAST_SPREAD)
        covariance[0, 0] += (DRIFTS * noise) ** 2
        covariance.flat[:: len(covariance) + 1] += WANDERS**2
        doubt = covariance @ shares
        variance = float(shares @ doubt)
        error, cut = math.log(time.ms / expected), CUT * noise
        known = error if variance > DOUBTED**2 else max(-cut, min(error, cut))
        gain = doubt / (variance + noise**2)
        usual = abs(known) * noise / math.sqrt(variance + noise**2)  # without what is not known of the table
        covariance -= gain[:, None] * doubt
        moved = grown._moved(known * gain, covariance)
        return replace(moved, spread=self.spread + SPREAD_RATE * (usual - self.spread), num_steps=self.num_steps + 1)

    def doubt(self, num_sequences: int) -> float:
        """Return the relative standard error of `step_ms` of so many sequences, each of one row, without a pass."""
        covariance = self._covariance()
        parts = self._parts(Time(num_sequences, num_sequences, 0, 1.0), len(covariance)).clip(0.0)
        shares = parts / parts.sum()
        shares[0] = 1.0
        return math.sqrt(max(float(shares @ covariance @ shares), 0.0))

    def _covariance(self) -> Floats:
        if self.covariance is not None:
            return self.covariance.copy()
        known = DOUBTED if self.doubted else KNOWN
        doubts = [0.0]
        for curve in self.curves:
            doubts += [known] * len(curve.points) + [NEW if curve.draft is None else PASS]
        return np.diag(np.square(doubts))

    def _place(self, at: int) -> int:
        """Return the place of a curve's first point in the covariance; that of its pass is after its points."""
        return 1 + sum(len(curve.points) + 1 for curve in self.curves[:at])

    def _parts(self, time: Time, size: int) -> Floats:
        """Return the ms of a step, without d, that each of what is followed makes up."""
        parts = np.zeros(size)
        for at, place, share in self._target(time.num_sequences, time.num_rows):
            parts[self._place(at) + place] += share * self.curves[at].points[place]
        if time.num_passes:
            for at, share, ms in self._draft(time.num_drafted or time.num_sequences):
                parts[self._place(at) + len(self.curves[at].points)] += time.num_passes * share * ms
        return parts

    def _moved(self, by: Floats, covariance: Floats) -> "Cost":
        """Return the table with what is followed moved by so much, and points that never fall with the rows."""
        factors, weights = np.exp(by).tolist(), (1 / covariance.diagonal()).tolist()
        curves, first = [], 1
        for curve in self.curves:
            end = first + len(curve.points)
            points = [ms * factor for ms, factor in zip(curve.points, factors[first:end], strict=True)]
            draft = None if curve.draft is None else curve.draft * factors[end]
            curves.append(curve._replace(points=ascending(points, weights[first:end]), draft=draft))
            first = end + 1
        return replace(self, curves=tuple(curves), drift=self.drift + float(by[0]), covariance=covariance)

    def _target(self, num_sequences: int, num_rows: float) -> list[tuple[int, int, float]]:
        """Return what f is made of, (curve, point, share); between curves by rows a sequence, outside by rows."""
        return [
            (at, place, weight * share)
            for at, weight in between([curve.num_sequences for curve in self.curves], num_sequences)
            for place, share in self.curves[at].parts(
                num_rows / (num_sequences if self._inside(num_sequences) else self.curves[at].num_sequences)
            )
        ]

    def _draft(self, num_sequences: int) -> list[tuple[int, float, float]]:
        """Return what g is made of: (curve, how much of it, its ms)."""
        known = [(at, curve.draft) for at, curve in enumerate(self.curves) if curve.draft is not None]
        numbers = [self.curves[at].num_sequences for at, _ in known]
        return [(known[place][0], share, known[place][1]) for place, share in between(numbers, num_sequences)]

    def _inside(self, num_sequences: int) -> bool:
        return self.curves[0].num_sequences <= num_sequences <= self.curves[-1].num_sequences

    def _with_points_for(self, time: Time) -> "Cost":
        rows, ms = time.num_rows / time.num_sequences, time.ms / math.exp(self.drift)
        if not self.grows:
            return self
        if not self.curves:
            if time.num_passes:
                return self
            return replace(
                self, curves=(Curve(time.num_sequences, (rows,), (ms,)),), covariance=np.diag([0.0, NEW**2, NEW**2])
            )
        curves, covariance = list(self.curves), self._covariance()
        for at, curve in enumerate(curves):
            if curve.num_sequences != time.num_sequences:
                continue
            if time.num_passes == 0 and rows not in curve.rows:
                place = bisect_right(curve.rows, rows)
                points = (*curve.points[:place], ms, *curve.points[place:])
                curves[at] = curve._replace(rows=(*curve.rows[:place], rows, *curve.rows[place:]), points=points)
                new = self._place(at) + place
                covariance = np.insert(np.insert(covariance, new, 0.0, axis=0), new, 0.0, axis=1)
                covariance[new, new] = NEW**2
            if time.num_passes and not self._draft(time.num_sequences):
                rest = ms - curve.target_ms(rows)
                curves[at] = curve._replace(draft=max(rest / time.num_passes, 1e-3 * curve.points[0]))
        return replace(self, curves=tuple(curves), covariance=covariance)


def _noise(measured: Iterable[Sequence[float]]) -> float:
    """Return by how much the later half of each step's times differs from the earlier one, but for what all have."""
    halves = [(every[: len(every) // 2], every[len(every) // 2 :]) for every in measured if len(every) > 1]
    slower = [math.log(median(late) / median(early)) for early, late in halves]
    return fmean(abs(one - median(slower)) for one in slower) if slower else 0.0


def _check(time: Time) -> None:
    if not 1 <= time.num_sequences <= time.num_rows or time.num_passes < 0:
        raise ValueError(f"wanted a step of at least a sequence, and a row for each; got {time}")
    if not 0 <= time.num_drafted <= time.num_sequences:
        raise ValueError(f"wanted passes over at most the step's sequences, got {time}")
    if not (math.isfinite(time.ms) and time.ms > 0):
        raise ValueError(f"wanted a step of more than 0 ms, got {time}")


def save_cost(cost: Cost, file: Path) -> None:
    """Write a table as JSON in place of the last one, whole or not at all."""
    scale = math.exp(cost.drift)
    curves = [
        {
            "num_sequences": curve.num_sequences,
            "rows": curve.rows,
            "target_ms": [scale * ms for ms in curve.points],
            "draft_ms": None if curve.draft is None else scale * curve.draft,
        }
        for curve in cost.curves
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps({"format": FORMAT, "measured_for": cost.measured_for, "curves": curves}))
    os.replace(new, file)


def load_cost(file: Path, measured_for: str) -> Cost:
    """Read a table; ValueError if there is none, it is torn, or its times hold for something else."""
    try:
        saved = _File.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{file.name} is no table of what steps take: {first_line}") from error
    if saved.measured_for != measured_for:
        raise ValueError(f"{file.name} was measured for {saved.measured_for}, wanted {measured_for}")
    orders: list[list[float]] = [[curve.num_sequences for curve in saved.curves]]
    orders += [curve.rows for curve in saved.curves]
    rising = all(left < right for numbers in orders for left, right in pairwise(numbers))
    if not rising or any(len(curve.rows) != len(curve.target_ms) for curve in saved.curves):
        raise ValueError(f"{file.name} is no table of what steps take: its points are in no order")
    curves = (Curve(one.num_sequences, tuple(one.rows), ascending(one.target_ms), one.draft_ms) for one in saved.curves)
    return Cost(tuple(curves), measured_for, grows=False)


class _Curve(Frozen):
    num_sequences: int = Field(ge=1)
    rows: list[Positive] = Field(min_length=1)
    target_ms: list[Positive]
    draft_ms: Positive | None


class _File(Frozen):
    format: int = Field(ge=FORMAT, le=FORMAT)
    measured_for: str
    curves: list[_Curve] = Field(min_length=1)
