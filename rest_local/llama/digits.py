"""Ranges of integers as GBNF: the decimal numbers from one to another, digit by digit."""

from __future__ import annotations

import math

_MOST = 9_999_999_999_999_999  # beyond 2^53 clients lose the last digits


def integers(low: float | None, high: float | None) -> str | None:
    """The integers from `low` to `high` (None: open; at most 16 digits); None where there is none."""
    least = -_MOST if low is None or low < -_MOST else math.ceil(min(low, _MOST + 1))
    most = _MOST if high is None or high > _MOST else math.floor(max(high, -_MOST - 1))
    if least > most:
        return None
    ways = _positive(max(least, 0), most) if most >= 0 else []
    if least < 0:
        ways += [f'"-" ({" | ".join(_positive(max(-most, 1), -least))})']
    return " | ".join(ways)


def _positive(low: int, high: int) -> list[str]:
    """One way for each number of digits."""
    ways = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        ways.append(_between(str(first), str(min(high, 10**digits - 1))))
    return ways


def _between(low: str, high: str) -> str:
    """Numbers of as many digits as both have."""
    if not low:
        return '""'
    rest = len(low) - 1
    if low.strip("0") == "" and high.strip("9") == "":
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return f'"{low[0]}"' if not rest else f'"{low[0]}" ({_between(low[1:], high[1:])})'
    ways = []
    first, last = int(low[0]), int(high[0])
    if low[1:].strip("0"):
        ways.append(f'"{first}" ({_between(low[1:], "9" * rest)})')
        first += 1
    if high[1:].strip("9"):
        ways.append(f'"{last}" ({_between("0" * rest, high[1:])})')
        last -= 1
    if first <= last:
        ways.append(f"[{first}-{last}]" + (f" [0-9]{{{rest}}}" if rest else ""))
    return " | ".join(ways)
