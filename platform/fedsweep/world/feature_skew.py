"""Clients whose pictures look different: feature skew, applied once to the training samples that a client holds.

What the server keeps and what is tested stays as the data set has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError
from fedsweep.guard import wrong
from fedsweep.parameters.ranges import Checked, NotNegative
from fedsweep.streams import Stream

Images = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class FeatureSkew(Checked, ABC):
    """Difference of a client's pictures from the others'.

    Attributes:
        source: Who proposed it; for listings.
        moves_pixels: Pixels come to lie elsewhere, so that a target for each of them would stay behind.
    """

    section: ClassVar[str] = "scenario.feature_skew"

    source: ClassVar[str] = ""
    moves_pixels: ClassVar[bool] = False

    @abstractmethod
    def of_client(self, images: Images, client: int, num_clients: int, *, scale: float, stream: Stream) -> Images:
        """Return a client's images under the skew.

        Args:
            images: ``[n, C, H, W]``, uint8 or float32; not changed.
            client: From 0.
            num_clients: N.
            scale: The pixel value that maps to 1.0.
            stream: What is random comes from here; the client's own.

        Returns:
            As ``images``, of the same shape and type.

        Raises:
            DataError: The pictures do not admit it.
        """

    def apply(self, images: Images, indices: Sequence[NDArray[np.int64]], *, scale: float, stream: Stream) -> Images:
        """Return the training images ``[S, C, H, W]`` with those of each client replaced.

        Args:
            images: ``[S, C, H, W]``; not changed.
            indices: Each client's samples; no sample is in two.
            scale: The pixel value that maps to 1.0.
            stream: Each client draws from a child of it.

        Raises:
            DataError: A client's are of another shape or type, which numpy would spread, or cut to bytes.
        """
        changed = images.copy()
        for client, rows in enumerate(indices):
            own, draws = images[rows], stream.child(client)
            skewed = self.of_client(own, client, len(indices), scale=scale, stream=draws)
            kinds = [f"{part.dtype} {part.shape}" for part in (own, np.asarray(skewed))]
            if kinds[0] != kinds[1]:
                must = f"pictures as it is given them, {kinds[0]}"
                raise DataError(str(wrong(self, "of_client", must=must, answer=kinds[1], when=f"for client {client}")))
            changed[rows] = skewed
        return changed


@dataclass(frozen=True, kw_only=True)
class Noise(FeatureSkew):
    """Gaussian noise of variance level x (n + 1) / N on the pictures of client n, in units of the full pixel range.

    Reading: drawn once for each picture, not anew in each epoch, and cut off at the ends of the pixel range where
    pixels are bytes.

    Attributes:
        level: The variance at the last client, >= 0.
    """

    source: ClassVar[str] = "Li et al. 2022 (NIID-Bench), noise-based feature skew"
    level: NotNegative = 0.1

    def of_client(self, images: Images, client: int, num_clients: int, *, scale: float, stream: Stream) -> Images:
        deviation = scale * (self.level * (client + 1) / num_clients) ** 0.5
        noisy = images + deviation * stream.numpy().standard_normal(images.shape, dtype=np.float32)
        if images.dtype == np.uint8:
            noisy = np.clip(np.rint(noisy), 0, min(scale, 255))
        result: Images = noisy.astype(images.dtype)
        return result


@dataclass(frozen=True, kw_only=True)
class Rotation(FeatureSkew):
    """Client n's pictures are turned by (n mod groups) x 360 / groups degrees.

    Attributes:
        groups: 2 or 4: how many angles there are.
    """

    source: ClassVar[str] = "Ghosh et al. 2020 (IFCA), rotated MNIST and CIFAR-10"
    moves_pixels: ClassVar[bool] = True
    groups: Literal[2, 4] = 4

    def of_client(self, images: Images, client: int, num_clients: int, *, scale: float, stream: Stream) -> Images:
        turns = client % self.groups * (4 // self.groups)
        if turns % 2 and images.shape[2] != images.shape[3]:
            raise DataError(
                f"scenario.feature_skew: pictures of {images.shape[2]} x {images.shape[3]} pixels can't be turned by a"
                " quarter; set groups: 2, or scenario.image_size"
            )
        return np.rot90(images, turns, axes=(2, 3))


FEATURE_SKEWS: dict[str, type[FeatureSkew]] = {"noise": Noise, "rotation": Rotation}
