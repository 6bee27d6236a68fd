# ruff: noqa: RUF001 - the letters of other alphabets are meant
"""Rows for what the C library says in the user's language.

A shell and ``strerror`` speak the language of the locale; Python's errors have the number beside the words.

Source: the message catalogues of glibc (``libc.mo``), the entries "Killed" and "Cannot allocate memory".
"""

from __future__ import annotations

import re
from typing import Final

from oomdoctor.incident.formats import Format, compiled
from oomdoctor.model.incident import Family

_KILLED: Final = (
    "已杀死", "強制結束", "強制終了", "죽었음", "Убито", "Вбито", "Безусловно прекъснат", "Убијен", "Σκοτώθηκε",
    "Getötet", "Processus arrêté", "Terminado (killed)", "Ucciso", "Morto", "Unicestwiony", "Geëlimineerd",
    "Zabit (SIGKILL)", "Zabitý", "Dræbt", "Drept", "Dödad", "Tapettu", "Kilőve", "Matat", "Matado", "Terbunuh",
    "Süreç durduruldu", "Bị buộc kết thúc",
)  # fmt: skip
_NO_MEMORY: Final = (
    "无法分配内存", "無法配置記憶體", "メモリを確保できません", "메모리를 할당할 수 없습니다",
    "Невозможно выделить память", "Не може да се задели памет", "Не могу да доделим меморију",
    "Δεν είναι δυνατό να δεσμευτεί μνήμη",
    "Nicht genügend Hauptspeicher verfügbar", "Ne peut allouer de la mémoire", "No se pudo asignar memoria",
    "Impossibile allocare memoria", "Impossível alocar memória", "Não foi possível alocar memória",
    "Nie można przydzielić pamięci", "Onvoldoende geheugen beschikbaar", "Nelze alokovat paměť",
    "Nie je možné prideliť pamäť", "Kan ikke tildele hukommelse", "Kan ikke tildele minne", "Kan inte allokera minne",
    "Muistin varaaminen ei onnistu", "Nem foglalható memória", "Non se pode reservar memoria",
    "Tidak dapat mengalokasikan memori", "Bellek ayrılamadı", "Không thể cấp phát bộ nhớ",
)  # fmt: skip


def _any(words: tuple[str, ...]) -> str:
    return "|".join(re.escape(word).replace("\\ ", " ") for word in words)


ROWS: Final = (
    Format(
        name="shell_killed_translated",
        family=Family.RANK_KILLED,
        title="The shell says in the user's language that the process was killed by signal 9.",
        versions="bash with glibc",
        needles=tuple(word.lower() for word in _KILLED),
        pattern=compiled(
            r"^(?:[^\n]{0,80}[:\])|>*-]\x20?)?(?:\w{1,8} ?\d{1,6}: )?(?:\d{1,8} |\[\d{1,3}\]\+? (?:\d{1,8} )?)?"
            rf"(?:{_any(_KILLED)})(?:$| \(\w{{1,30}}\b[^)\n]{{0,40}}\)$| python\S{{0,10}}[^\n]{{0,200}}$)"
        ),
        device="cpu",
        sample="run.sh: 行 4: 1234 已杀死 python train.py",
    ),
    Format(
        name="errno12_translated",
        family=Family.HOST,
        title="The operating system refused host memory; it says so in the user's language.",
        versions="any with glibc",
        needles=tuple(word.lower() for word in _NO_MEMORY),
        pattern=compiled(_any(_NO_MEMORY)),
        device="cpu",
        sample="bash: fork: 无法分配内存",
    ),
)
