"""Cards by their memory: the table, and which of them would hold a need."""

from __future__ import annotations

import pytest

from oomdoctor.model.sizes import GIB
from oomdoctor.rulebook.cards import CARDS, smallest_for


def test_the_table_goes_from_small_to_large_and_names_its_sources():
    sizes = [card.memory for card in CARDS]
    assert sizes == sorted(set(sizes))
    assert all(card.source.startswith("https://") for card in CARDS)


# Totals that messages of these cards print: what is sold is not what there is to use.
@pytest.mark.parametrize(
    ("need_gib", "sold_gib"), [(14.5, 16), (14.75, 24), (22.0, 32), (43.6, 48), (44.4, 80), (72.0, 80), (79.3, 96)]
)
def test_a_card_is_taken_for_what_can_be_used_of_it(need_gib, sold_gib):
    card = smallest_for(need_gib * GIB)
    assert card is not None
    assert card.memory == sold_gib * GIB


def test_there_is_none_for_what_no_single_card_holds():
    assert smallest_for(2 * CARDS[-1].memory) is None
    assert smallest_for(CARDS[-1].memory) is None
    assert smallest_for(1.0) is CARDS[0]
