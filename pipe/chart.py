"""The one text drawing of who does what when: the same for a plan and for a run."""

from __future__ import annotations

from collections.abc import Sequence

Bar = tuple[str, float, float]  # label, start and end in seconds
SCALED = 120  # characters a line where nothing else is asked for and the bars fit no grid
FINEST = 4  # columns for the shortest bar in a drawing to exact scale


def draw(rows: Sequence[Sequence[Bar]], width: int | None = None) -> str:
    """One line a row, `0 | F0 F1 .. B0 B0`: a column is a span of time and shows the bar that covers its middle.

    Where starts and ends lie on a common grid (as with whole-number costs), a column is a step of that grid and the drawing is exact.
    Else it is scaled to `width` characters, and a last line gives the scale.

    Args:
        width: characters a line at most; None: as many as an exact drawing needs, or 120.
    """
    bars = [bar for row in rows for bar in row if bar[2] > bar[1]]
    cell = max([2, *(len(label) for label, _, _ in bars)])
    heads = [f"{w:>{len(str(len(rows) - 1))}} |" for w in range(len(rows))]
    if not bars:
        return "\n".join(heads)
    began, ended = min(b[1] for b in bars), max(b[2] for b in bars)
    room = None if width is None else max(1, (width - len(heads[0])) // (cell + 1))
    unit = _grid(bars, began)
    exact = unit is not None and (room is None or round((ended - began) / unit) <= room)
    if not exact or unit is None:
        unit = (ended - began) / (room or (SCALED - len(heads[0])) // (cell + 1))
    columns = max(1, round((ended - began) / unit))
    lines = [f"{head} {_line(row, began, unit, columns, cell)}" for head, row in zip(heads, rows)]
    return "\n".join(lines if exact else [*lines, f"one column is {unit:.3g} s"])


def _grid(bars: Sequence[Bar], began: float) -> float | None:
    """The coarsest step of which every start and end is a multiple; None if the shortest bar would take more than FINEST."""
    shortest = min(end - start for _, start, end in bars)
    for parts in range(1, FINEST + 1):
        unit = shortest / parts
        places = ((t - began) / unit for _, *span in bars for t in span)
        if all(abs(p - round(p)) < 1e-6 for p in places):
            return unit
    return None


def _line(row: Sequence[Bar], began: float, unit: float, columns: int, cell: int) -> str:
    cells = ["." * cell] * columns
    for label, start, end in row:
        first, last = ((t - began) / unit - 0.5 for t in (start, end))  # the columns whose middles lie in between
        for column in range(max(0, -int(-first // 1)), min(columns, -int(-last // 1))):
            cells[column] = label.ljust(cell)
    return " ".join(cells).rstrip()
