"""The trial: the failing cell as it was and as changed, both run for a step or two, and all that they leave compared.

Nothing is proved by reading. Both programs run on real values in a copy of the process, on the CPU, on a few rows that
are unlike each other; see ``compare``.
"""

from oomdoctor.trial.compare import compare
from oomdoctor.trial.setup import HostCopies

__all__ = ["HostCopies", "compare"]
