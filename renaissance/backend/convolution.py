"""The three products of a convolution, as every backend calls them."""

from __future__ import annotations

from enum import IntEnum


class Direction(IntEnum):
    """Which of the three products; x [N,H,W,C], w [K,R,S,C/groups], y [N,Ho,Wo,K]."""

    FORWARD = 0
    """y from x and w."""
    DATA = 1
    """The gradient of x, from those of y and w."""
    WEIGHT = 2
    """The gradient of w, and of b, from that of y and x."""
