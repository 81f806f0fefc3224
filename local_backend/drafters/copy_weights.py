"""What the traits of a place count when reference copy chooses among continuations.

Fitted by ``python -m benchmarks.copy_weights`` to fifty answers written from retrieved documents and fifty
summaries. On the half of them that it was not fitted to, each fit does as well as on its own.
"""

from __future__ import annotations

from local_backend.drafters.copy_tree import CopyWeights

FITTED = CopyWeights(
    traits=(0.539, -0.842, -0.042, 0.234, -0.419, 0.347, -0.096, 0.388, 0.337, -0.113, 0.28, 0.209),
    by_length=(-1.404, -0.55, -0.053, 0.168, 0.269, 0.223, 0.53, 0.64),
    miss=(0.111, 0.777, 0.045, 1.023, -0.155, -0.24, -0.076, -0.109, -0.163, -0.141, -0.027),
    sharpness=1.614,
)
"""The defaults of :class:`~local_backend.drafters.ReferenceCopy`."""
