"""What a step of an engine takes: a table measured once, refined from the times of the steps that are served.

    T(S, R, P) = d · (f(S, R) + P · g(S))

ms of a step with S sequences, R rows of the target (each sequence's last token and what was drafted after it) and P
passes of the draft. f is piecewise linear in the rows a sequence, and in S; what K is best depends on the ratios of the
table alone.

- A machine that slows down or is shared slows every step. So an error of the table is taken for d at first, at once and
  in full, and only a little of it for the point that was measured; a point that is seen seldom counts for more when it
  is. K changes with a point, not with d.
- Errors are logarithms, cut at three times their usual size: a step of 100 ms among those of 10 counts as one of 12.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

DRIFT_RATE = 0.2
POINT_RATE = 0.02  # of a point seen in every step
SELDOM_RATE = 0.1  # of one not seen for ten steps or more
SPREAD_RATE = 0.02
SPREAD = 0.1  # of the logarithms of times, before any was seen; never taken for less than LEAST_SPREAD
LEAST_SPREAD = 0.02
CUT = 3.0
PASS_DOUBT = 10.0  # how much more of an error is a pass's than the target's, being measured as a difference
MEASURED = 16  # steps that a point of the first measurement counts for
MOST = 100  # steps that a point counts for beside another
LEAST_PASS = 0.02  # of the target's time, that a pass of a draft takes at least
YOUNG = 4  # steps of a point whose errors are not cut yet
DOUBT = 0.1  # between the two halves of a measurement
DOUBTED = 2  # steps that a point of a doubted one counts for


class Time(NamedTuple):
    """What one step took.

    Attributes:
        num_rows: at least one a sequence.
    """

    num_sequences: int
    num_rows: int
    num_passes: int
    ms: float


class Point(NamedTuple):
    """One value of the table.

    Attributes:
        num_steps: that it was learned from.
        last_step: when it was learned from last.
    """

    ms: float
    num_steps: int = MEASURED
    last_step: int = 0

    def moved(self, error: float, share: float, step: int) -> "Point":
        """Return the point nearer to what was seen by its part of the error, a logarithm."""
        rate = max(1 / (1 + self.num_steps), min(POINT_RATE * (step - self.last_step), SELDOM_RATE))
        return Point(self.ms * math.exp(rate * share * error), self.num_steps + 1, step)


class Curve(NamedTuple):
    """Steps of one number of sequences.

    Attributes:
        rows: a sequence, ascending.
        points: of the target, one for each of `rows`.
        draft: of a pass of the draft.
    """

    num_sequences: int
    rows: tuple[float, ...]
    points: tuple[Point, ...]
    draft: Point | None = None

    def parts(self, rows: float) -> list[tuple[int, float]]:
        """Return which points the target's time at so many rows a sequence is made of, and how much of each."""
        after = bisect_right(self.rows, rows)
        if after == 0 or len(self.rows) == 1:
            return [(0, 1.0)]
        right = min(after, len(self.rows) - 1)
        low, high = self.rows[right - 1], self.rows[right]
        share = (rows - low) / (high - low)  # above 1 beyond the last: it goes on as steep as before
        return [(right - 1, 1 - share), (right, share)]

    def target_ms(self, rows: float) -> float:
        """Return f at so many rows a sequence."""
        return sum(share * self.points[place].ms for place, share in self.parts(rows))


class Line(NamedTuple):
    """What steps of one number of sequences take.

    Attributes:
        rows: ascending.
        ms: of the target, one for each of `rows`, ascending as well.
        pass_ms: of a pass of the draft; None if there was none.
        one_pass: as of the table.
    """

    num_sequences: int
    rows: list[float]
    ms: list[float]
    pass_ms: float | None
    one_pass: bool = False

    def target_ms(self, rows: float) -> float:
        """Return what so many rows take: linear between the known ones, as steep as the last ones beyond them."""
        after = bisect_right(self.rows, rows)
        if after == 0 or len(self.rows) == 1:
            return self.ms[0]
        right = min(after, len(self.rows) - 1)
        low, start = self.rows[right - 1], self.ms[right - 1]
        return start + (rows - low) / (self.rows[right] - low) * (self.ms[right] - start)

    def step_ms(self, rows: float, num_passes: float) -> float:
        """Return what a step takes; rows and passes may be means.

        A draft that says all of its tokens in one pass makes one, whatever number it is asked for.

        Raises:
            ValueError: no pass was ever measured.
        """
        return self.target_ms(rows) + self.passes_ms(num_passes)

    def passes_ms(self, num_passes: float) -> float:
        """Return what a step's passes of the draft take; see `step_ms`."""
        if not num_passes:
            return 0.0
        if self.pass_ms is None:
            raise ValueError(f"wanted the time of a step with {num_passes} passes, but none was ever measured")
        return (min(num_passes, 1) if self.one_pass else num_passes) * self.pass_ms


@dataclass(frozen=True)
class Cost:
    """The table; empty until something was measured.

    Attributes:
        curves: ascending in their number of sequences.
        measured_for: what the times hold for: machine, target, draft's shape, the engine's mode, dtype and threads.
        drift: the logarithm of d.
        spread: mean size of the errors of the last steps, as logarithms.
        num_steps: that it was refined from.
        grows: it was never measured, so steps outside of it are taken as they come.
        noise: of the measurement: between its first and its second half, as a logarithm; the median over its steps.
        one_pass: the draft says all of its tokens in one pass (P-EAGLE, DFlash), so it makes 0 or 1.
    """

    curves: tuple[Curve, ...] = ()
    measured_for: str = ""
    drift: float = 0.0
    spread: float = SPREAD
    num_steps: int = 0
    grows: bool = True
    noise: float = 0.0
    one_pass: bool = False

    @property
    def doubted(self) -> bool:
        """Whether the machine was busy with something else while it was measured."""
        return self.noise > DOUBT

    @classmethod
    def measured(cls, times: Iterable[Time], measured_for: str = "") -> "Cost":
        """Make a table; of a step that was measured more than once a fast one counts, the lower quartile.

        Args:
            times: for each number of sequences, steps without a pass of the draft, of one and more rows a sequence, and
                at least one with passes; in the order in which they were measured.
            measured_for: see the attribute.

        Raises:
            ValueError: a time is impossible, or none is of a step without a pass.
        """
        plain: dict[int, dict[float, float]] = defaultdict(dict)
        drafted: dict[int, list[Time]] = defaultdict(list)
        measured = _by_step(times)
        noise = _noise(measured.values())
        num_steps = DOUBTED if noise > DOUBT else MEASURED
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
            curve = Curve(num_sequences, rows, ascending([Point(by_rows[number], num_steps) for number in rows]))
            passes = [
                (time.ms - curve.target_ms(time.num_rows / num_sequences)) / time.num_passes
                for time in drafted[num_sequences]
            ]
            # Where the noise is larger than a pass, nothing is known of one here: other numbers of sequences tell.
            seen = bool(passes) and median(passes) > LEAST_PASS * curve.points[0].ms
            curves.append(curve._replace(draft=Point(median(passes), num_steps) if seen else None))
        if any(drafted.values()) and not any(curve.draft for curve in curves):
            curves[0] = curves[0]._replace(draft=Point(LEAST_PASS * curves[0].points[0].ms))
        return cls(tuple(curves), measured_for, grows=False, noise=noise)

    def line(self, num_sequences: int) -> Line | None:
        """Return what steps of so many sequences take; None if nothing was measured."""
        if not self.curves:
            return None
        scale, inside = math.exp(self.drift), self._inside(num_sequences)
        near = [
            (self.curves[at], share, num_sequences if inside else self.curves[at].num_sequences)
            for at, share in _between([curve.num_sequences for curve in self.curves], num_sequences)
        ]
        rows = sorted({number * unit for curve, _, unit in near for number in curve.rows})
        ms = [scale * sum(share * curve.target_ms(number / unit) for curve, share, unit in near) for number in rows]
        passes = [share * point.ms for _, share, point in self._draft(num_sequences)]
        return Line(num_sequences, rows, ms, scale * sum(passes) if passes else None, self.one_pass)

    def step_ms(self, num_sequences: int, num_rows: float, num_passes: float) -> float | None:
        """Estimate a step; None if nothing was measured that tells."""
        line = self.line(num_sequences)
        if line is None or (num_passes and line.pass_ms is None):
            return None
        return line.step_ms(num_rows, num_passes)

    def after(self, time: Time) -> "Cost":
        """Return the table refined by a step that read no prompt.

        Raises:
            ValueError: the time is impossible.
        """
        _check(time)
        grown = self._with_points_for(time)
        expected = grown.step_ms(*time[:3])
        if expected is None:
            return grown
        step = self.num_steps + 1
        target, draft = grown._target(time.num_sequences, time.num_rows), grown._draft(time.num_sequences)
        undrifted = expected / math.exp(self.drift)
        shares = [max(share, 0.0) * grown.curves[at].points[place].ms / undrifted for at, place, share in target]
        if time.num_passes:
            shares += [time.num_passes * max(share, 0.0) * point.ms / undrifted for _, share, point in draft]
        else:
            draft = []
        error, cut = math.log(time.ms / expected), CUT * max(self.spread, LEAST_SPREAD)
        young = any(grown.curves[at].points[place].num_steps < YOUNG for at, place, _ in target)
        young = young or any(point.num_steps < YOUNG for _, _, point in draft)
        known = max(-cut, min(error, cut))
        moved = error if young else known
        doubts = [1.0] * len(target) + [PASS_DOUBT] * len(draft)
        # So that the estimate moves by rate × error in all.
        scale = 1 / sum(doubt * share * share for doubt, share in zip(doubts, shares, strict=True))
        curves = list(grown.curves)
        for (at, place, _), share in zip(target, shares, strict=False):
            points = list(curves[at].points)
            points[place] = points[place].moved(moved, share * scale, step)
            curves[at] = curves[at]._replace(points=tuple(points))
        for (at, _, point), share in zip(draft, shares[len(target) :], strict=True):
            curves[at] = curves[at]._replace(draft=point.moved(moved, PASS_DOUBT * share * scale, step))
        for at in {at for at, _, _ in target}:
            curves[at] = curves[at]._replace(points=ascending(curves[at].points))
        return replace(
            self,
            curves=tuple(curves),
            drift=self.drift + (0.0 if young else DRIFT_RATE * known),
            spread=self.spread + SPREAD_RATE * (min(abs(error), cut) - self.spread),
            num_steps=step,
        )

    def _target(self, num_sequences: int, num_rows: float) -> list[tuple[int, int, float]]:
        """Return what f is made of: (curve, point, how much of it).

        Between two curves rows a sequence are what is alike; outside of them only rows are.
        """
        return [
            (at, place, weight * share)
            for at, weight in _between([curve.num_sequences for curve in self.curves], num_sequences)
            for place, share in self.curves[at].parts(
                num_rows / (num_sequences if self._inside(num_sequences) else self.curves[at].num_sequences)
            )
        ]

    def _draft(self, num_sequences: int) -> list[tuple[int, float, Point]]:
        """Return what g is made of: (curve, how much of it, its point)."""
        known = [(at, curve.draft) for at, curve in enumerate(self.curves) if curve.draft is not None]
        numbers = [self.curves[at].num_sequences for at, _ in known]
        return [(known[place][0], share, known[place][1]) for place, share in _between(numbers, num_sequences)]

    def _inside(self, num_sequences: int) -> bool:
        return self.curves[0].num_sequences <= num_sequences <= self.curves[-1].num_sequences

    def _with_points_for(self, time: Time) -> "Cost":
        """Return the table with a first guess of what it has no point for: a curve's next rows, or a pass."""
        rows, scale = time.num_rows / time.num_sequences, math.exp(self.drift)
        if not self.grows:
            return self
        if not self.curves:
            if time.num_passes:
                return self
            return replace(self, curves=(Curve(time.num_sequences, (rows,), (Point(time.ms, 0),)),))
        curves = list(self.curves)
        for at, curve in enumerate(curves):
            if curve.num_sequences != time.num_sequences:
                continue
            if time.num_passes == 0 and rows not in curve.rows:
                place = bisect_right(curve.rows, rows)
                points = (*curve.points[:place], Point(time.ms / scale, 0), *curve.points[place:])
                curves[at] = curve._replace(rows=(*curve.rows[:place], rows, *curve.rows[place:]), points=points)
            if time.num_passes and not self._draft(time.num_sequences):
                rest = time.ms / scale - curve.target_ms(rows)
                ms = max(rest / time.num_passes, 1e-3 * curve.points[0].ms)
                curves[at] = curve._replace(draft=Point(ms, 0))
        return replace(self, curves=tuple(curves))


def _by_step(times: Iterable[Time]) -> dict[tuple[int, int, int], list[float]]:
    """Return the ms of each step that was measured, in their order; ValueError if a time is impossible."""
    by_step: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for time in times:
        _check(time)
        by_step[time.num_sequences, time.num_rows, time.num_passes].append(time.ms)
    return by_step


def _noise(measured: Iterable[Sequence[float]]) -> float:
    """Return by how much the later half of each step's times differs from the earlier one."""
    halves = [(every[: len(every) // 2], every[len(every) // 2 :]) for every in measured if len(every) > 1]
    return median([abs(math.log(median(late) / median(early))) for early, late in halves]) if halves else 0.0


def _between(numbers: Sequence[int], number: int) -> list[tuple[int, float]]:
    """Return the places of the two nearest of ascending numbers, and how much each counts; outside, of one."""
    after = bisect_right(numbers, number)
    if not numbers or after == 0:
        return [(0, 1.0)] if numbers else []
    if after == len(numbers) or numbers[after - 1] == number:
        return [(after - 1, 1.0)]
    share = (number - numbers[after - 1]) / (numbers[after] - numbers[after - 1])
    return [(after - 1, 1 - share), (after, share)]


def ascending(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the nearest points that never fall: those that do are pooled with those before them."""
    if all(left.ms <= right.ms for left, right in pairwise(points)):
        return tuple(points)
    pools: list[list[Point]] = []
    for point in points:
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1].extend(last)
    return tuple(point._replace(ms=_mean(pool)) for pool in pools for point in pool)


def _mean(points: Sequence[Point]) -> float:
    weights = [1 + min(point.num_steps, MOST) for point in points]
    return sum(weight * point.ms for weight, point in zip(weights, points, strict=True)) / sum(weights)


def _check(time: Time) -> None:
    if not 1 <= time.num_sequences <= time.num_rows or time.num_passes < 0:
        raise ValueError(f"wanted a step of at least a sequence, and a row for each; got {time}")
    if not (math.isfinite(time.ms) and time.ms > 0):
        raise ValueError(f"wanted a step of more than 0 ms, got {time}")
