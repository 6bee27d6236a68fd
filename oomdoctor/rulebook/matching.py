"""Matches rules against what is known of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import rule_engine

from oomdoctor.errors import Fault, UsageError
from oomdoctor.model.case import Finding
from oomdoctor.rulebook.context import Facts, bound, render
from oomdoctor.rulebook.facts import facts_of

if TYPE_CHECKING:
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.incident import Incident
    from oomdoctor.rulebook.schema import RuleFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A checked rule: its file and its compiled expressions."""

    file: RuleFile
    path: str
    expressions: tuple[rule_engine.Rule, ...]

    @property
    def id(self) -> str:
        """The rule's id."""
        return self.file.id

    @property
    def title(self) -> str:
        """What the rule says, in a few words."""
        return self.file.title

    def fires(self, facts: Facts) -> bool:
        """Whether one of the expressions holds; one that needs a fact that is not known does not."""
        return self.holds(bound(facts))

    def holds(self, known: object) -> bool:
        """Whether one of the expressions holds for facts that are ``bound`` already."""
        return any(_holds(expression, known) for expression in self.expressions)

    def finding(self, facts: Facts) -> Finding:
        """Return what the rule says about these facts."""
        said = (render(sentence, facts) for sentence in self.file.because)
        return Finding(
            rule=self.file.id,
            title=self.file.title,
            cause=self.file.cause,
            confidence=self.file.confidence,
            because=tuple(sentence for sentence in said if sentence is not None),
            fixes=tuple(self.file.fixes),
        )


def _holds(expression: rule_engine.Rule, facts: object) -> bool:
    try:
        return bool(expression.matches(facts))
    # Types were checked when it was loaded. What is left: a null, a division by zero, a number beyond all measure, and
    # a stack that the failure itself has nearly used up.
    except (rule_engine.EngineError, ArithmeticError, RecursionError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleBook:
    """All rules, by id, and the faults of files that were left out."""

    rules: tuple[Rule, ...]
    faults: tuple[Fault, ...] = ()

    def get(self, rule_id: str) -> Rule:
        """Return one rule.

        Raises:
            UsageError: there is none of that id, or its file has a fault.
        """
        for rule in self.rules:
            if rule.file.id == rule_id:
                return rule
        for fault in self.faults:
            if Path(fault.path).stem == rule_id:
                raise UsageError(f"the rule {rule_id!r} is left out: {fault}")
        close = get_close_matches(rule_id, [rule.file.id for rule in self.rules], n=1)
        hint = f"did you mean {close[0]!r}?" if close else "`oomdoctor rules list` names those that there are"
        raise UsageError(f"there is no rule {rule_id!r}: {hint}")

    def match(self, incident: Incident, evidence: Evidence | None) -> tuple[Finding, ...]:
        """Return what the rules find, the most likely first; nothing for a failure that is no OOM."""
        if not incident.is_oom:
            return ()
        facts = facts_of(incident, evidence)
        known = bound(facts)
        found = [rule.finding(facts) for rule in self.rules if rule.holds(known)]
        return tuple(sorted(found, key=lambda finding: (-finding.confidence, finding.rule)))
