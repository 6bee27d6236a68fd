"""Cards by their memory: which one would hold what did not fit.

The sizes are those that are sold. What a program can use is less: the driver keeps some, and error correction takes a
sixteenth of GDDR memory. Limits: one or two common cards stand for each size; prices and speed are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from oomdoctor.model.sizes import GIB

_USABLE: Final = 0.91
"""Least share of the size sold that ``torch.cuda.mem_get_info`` gives as the total of the cards below.

Source: totals in messages of ``torch.OutOfMemoryError``: T4 14.75 of 16, L4 22.03 of 24, L40S 44.4 of 48, A100 39.4 of
40 and 79.2 of 80, H200 139.8 of 141 GiB.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A size of card.

    Attributes:
        name: cards of this size, as they are called.
        memory: bytes, as sold.
        source: data sheet.
    """

    name: str
    memory: int
    source: str


_GEFORCE: Final = "https://www.nvidia.com/en-us/geforce/graphics-cards/compare/"
_CENTER: Final = "https://www.nvidia.com/en-us/data-center/"
_WORKSTATION: Final = "https://www.nvidia.com/en-us/design-visualization/desktop-graphics/"
_INSTINCT: Final = "https://www.amd.com/en/products/accelerators/instinct.html"

CARDS: Final = tuple(
    Card(name=name, memory=size * GIB, source=source)
    for size, name, source in (
        (8, "GeForce RTX 4060", _GEFORCE),
        (12, "GeForce RTX 3060 or RTX 4070", _GEFORCE),
        (16, "T4, V100 16 GB or GeForce RTX 4080", _CENTER),
        (24, "L4, A10 or GeForce RTX 4090", _CENTER),
        (32, "V100 32 GB or GeForce RTX 5090", _GEFORCE),
        (40, "A100 40 GB", _CENTER),
        (48, "L40S or RTX 6000 Ada", _WORKSTATION),
        (80, "A100 80 GB or H100", _CENTER),
        (96, "RTX PRO 6000 Blackwell or GH200", _WORKSTATION),
        (141, "H200", _CENTER),
        (180, "B200", _CENTER),
        (192, "Instinct MI300X", _INSTINCT),
        (256, "Instinct MI325X", _INSTINCT),
        (288, "Instinct MI355X", _INSTINCT),
    )
)
"""Sizes of cards, the smallest first."""


def smallest_for(need: float) -> Card | None:
    """Return the smallest card that has ``need`` bytes to give, None where no single card has."""
    return next((card for card in CARDS if need <= _USABLE * card.memory), None)
