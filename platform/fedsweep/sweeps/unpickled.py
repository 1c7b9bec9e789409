"""Parts of the driver that Ray Tune pickles with its state, although that state is never read back."""

from __future__ import annotations
